"""Corrections of off-policy tokens: weights, what is left out, statistics, chains, and what they do to a loss."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.batches import ImportanceWeights, OldLogprobs, Prompts, Rollouts
from flowrl.compiler.derive import elided_calls
from flowrl.context import StepContext, use_step
from flowrl.errors import AlignmentError
from flowrl.flow import RLFlow
from flowrl.models import Model
from flowrl.nodes.group_advantage import GroupAdvantage
from flowrl.nodes.importance import IcePop, ImportanceCorrection, RejectionMask, TruncatedImportance
from flowrl.nodes.logprobs import PolicyLogprobs
from flowrl.nodes.policy_losses import PPOLoss
from flowrl.nodes.reward import FunctionReward
from flowrl.nodes.rollout import Rollout
from flowrl.nodes.source import source
from flowrl.nodes.updater import Updater
from flowrl.ragged import Ragged
from tests.policy_terms import IDS, MASK, NUM_TOKENS, ORIGIN, ROLLOUTS, inputs, means, term_of
from tests.tiny import recorded_rollouts

NAN = math.nan


def run(node: Any, *arguments: Any, **named: Any) -> tuple[ImportanceWeights, dict[str, float]]:
    """The node's result and what it reported."""
    reported: dict[str, float] = {}
    with use_step(StepContext(report=reported.__setitem__)):
        return node(*arguments, **named), reported


def small() -> tuple[Rollouts, OldLogprobs]:
    """Ratios of trainer to sampler 2, 0.25, 1 in one row, 3 in another, none in a third."""
    rollouts = replace(recorded_rollouts(1, 3, response_lengths=(3, 1, 0)), origin=ORIGIN)
    ratios = torch.tensor([2.0, 0.25, 1.0, 3.0])
    old = rollouts.rollout_logprobs.values + ratios.log()
    return rollouts, OldLogprobs(
        rollouts.prompt_id, rollouts.sample_id, rollouts.rollout_logprobs.with_values(old), ORIGIN
    )


def test_truncation_by_hand() -> None:
    got, reported = run(TruncatedImportance(2.5), *small())
    assert got.weights.values.tolist() == pytest.approx([2.0, 0.25, 1.0, 2.5])
    assert got.keep.values.tolist() == [1, 1, 1, 1]
    log = [math.log(2), math.log(0.25), 0.0, math.log(3)]
    assert reported == pytest.approx(
        {
            "kl_k1": -sum(log) / 4,
            "kl_k3": (2.0 + 0.25 + 1.0 + 3.0) / 4 - 1 - sum(log) / 4,
            "truncated_fraction": 0.25,
            "rejected_fraction": 0.0,
            "weight_mean": 5.75 / 4,
            "weight_min": 0.25,
            "weight_max": 2.5,
            "effective_sample_size": 5.75**2 / (4 * (4 + 0.0625 + 1 + 6.25)),
            "comparable": 1.0,
        },
        rel=1e-5,
    )


def test_truncation_of_sequences_and_from_below() -> None:
    got, _ = run(TruncatedImportance(2.0, "sequence"), *small())
    assert got.weights.values.tolist() == pytest.approx([0.5, 0.5, 0.5, 2.0])
    got, reported = run(TruncatedImportance(2.0, low=0.5), *small())
    assert got.weights.values.tolist() == pytest.approx([2.0, 0.5, 1.0, 2.0])
    assert reported["truncated_fraction"] in (0.5, 0.75)  # whether exp(log 2) is above 2 is a matter of rounding


def test_icepop_masks_and_still_counts() -> None:
    got, reported = run(IcePop(0.5, 2.5), *small())
    assert got.weights.values.tolist() == pytest.approx([2.0, 0.0, 1.0, 0.0])
    assert got.keep.values.tolist() == [1, 1, 1, 1]
    assert (reported["masked_fraction"], reported["rejected_fraction"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("node", "keep"),
    [
        (RejectionMask(0.7), [1, 1, 1, 0]),  # k3: 0.31, 0.64, 0, 0.90
        (RejectionMask(1.2, estimator="k1"), [1, 0, 1, 1]),  # −0.69, 1.39, 0, −1.10
        (RejectionMask(1.5, estimator="k1", low=-0.5), [0, 1, 1, 0]),
        (RejectionMask(0.3, "sequence_mean", "k2"), [0, 0, 0, 0]),  # 0.40 and 0.60
        (RejectionMask(0.6, "sequence_max"), [0, 0, 0, 0]),
        (RejectionMask(0.7, "sequence_max"), [1, 1, 1, 0]),
    ],
)
def test_rejection_by_hand(node: RejectionMask, keep: list[int]) -> None:
    got, reported = run(node, *small())
    assert got.keep.values.tolist() == keep and got.weights.values.tolist() == [1.0] * 4
    assert reported["rejected_fraction"] == 1 - sum(keep) / 4
    assert ("weight_mean" in reported) == bool(sum(keep)) and reported["effective_sample_size"] == float(any(keep))


NODES: list[Any] = [
    TruncatedImportance(1.5),
    TruncatedImportance(1.5, "sequence", low=0.5),
    IcePop(0.5, 2.0),
    RejectionMask(0.5),
    RejectionMask(1.0, "sequence_mean", "k1"),
    RejectionMask(2.0, "sequence_max", "k2"),
]


@pytest.mark.parametrize("node", NODES, ids=repr)
@pytest.mark.parametrize("garbage", [NAN, math.inf])
def test_observations_have_weight_1_and_are_kept(node: Any, garbage: float) -> None:
    """Whatever stands there, in any input; and it moves no other token, nor a metric."""
    clean, dirty = inputs(), inputs(garbage)
    written = MASK.values.bool()
    earlier = clean["importance_weights"]
    before = replace(earlier, weights=MASK.with_values(torch.where(written, earlier.weights.values, garbage)))
    want = run(node, clean["rollouts"], clean["old_logprobs"], earlier)
    got = run(node, dirty["rollouts"], dirty["old_logprobs"], before)
    assert got == want
    assert got[0].weights.values[~written].tolist() == [1.0] * int((~written).sum())
    assert bool(got[0].keep.values[~written].all())
    assert bool(got[0].weights.values.isfinite().all()) and not bool(got[0].keep.values[written].all())


@pytest.mark.parametrize("node", NODES, ids=repr)
def test_the_order_of_rows_and_of_old_logprobs_does_not_matter(node: Any) -> None:
    given = inputs()
    want, metrics = run(node, given["rollouts"], given["old_logprobs"])
    order = [4, 0, 5, 2, 1, 3]
    got, shuffled = run(node, given["rollouts"].select(order), given["old_logprobs"])
    assert got == want.select(order) and shuffled == pytest.approx(metrics, rel=1e-5)


CHAIN = [IcePop(0.3, 3.0), TruncatedImportance(1.5), RejectionMask(1.5, "sequence_mean"), RejectionMask(0.5)]


@pytest.mark.parametrize("chain", list(itertools.permutations(CHAIN)))
def test_a_chain_multiplies_and_leaves_out_in_any_order(chain: Any) -> None:
    given = inputs()
    rollouts, old = given["rollouts"], given["old_logprobs"]
    weights = None
    for node in chain:
        weights = node(rollouts, old, weights)
    alone = [node(rollouts, old) for node in chain]
    assert weights is not None
    product = torch.stack([w.weights.values for w in alone]).prod(0)
    torch.testing.assert_close(weights.weights.values, product)
    keeps = torch.stack([w.keep.values for w in alone])
    assert torch.equal(weights.keep.values, keeps.amin(0))
    assert not any(torch.equal(weights.keep.values, keep) for keep in keeps) and bool((product == 0).any())


@pytest.mark.parametrize("node", NODES, ids=repr)
def test_extreme_log_ratios(node: Any) -> None:
    """±100: finite, and the tokens are truncated, masked or rejected."""
    for size in (100.0, -100.0):
        old = OldLogprobs(*IDS, MASK.with_values(ROLLOUTS.rollout_logprobs.values + size), ORIGIN)
        got, reported = run(node, ROLLOUTS, old)
        written = MASK.values.bool()
        assert bool(got.weights.values.isfinite().all()) and all(math.isfinite(v) for v in reported.values())
        if isinstance(node, RejectionMask):
            assert not bool(got.keep.values[written].any())
        else:
            assert float(got.weights.values[written].max()) <= 1.5


@pytest.mark.parametrize("node", NODES, ids=repr)
@pytest.mark.parametrize("rows", [[], [2]])
def test_no_rows_and_no_policy_token(node: Any, rows: list[int]) -> None:
    given = inputs()
    got, reported = run(node, given["rollouts"].select(rows), given["old_logprobs"])
    assert got.num_rows == len(rows) and got.weights.values.tolist() == [] and reported == {}


@pytest.mark.parametrize(
    ("change", "comparable"),
    [({}, 1.0), ({"top_p": 0.9}, 0.0), ({"top_k": 20}, 0.0), ({"temperature": 0.7}, 0.0)],
)
def test_whether_sampler_and_trainer_are_comparable_is_reported(change: dict[str, Any], comparable: float) -> None:
    rollouts, old = small()
    _, reported = run(IcePop(), replace(rollouts, origin=replace(ORIGIN, **change)), old)
    assert reported["comparable"] == comparable
    _, reported = run(IcePop(), replace(rollouts, origin=None), old)
    assert reported["comparable"] == 0.0


def test_inputs_are_aligned_and_may_hold_more_rows() -> None:
    given = inputs()
    part = given["rollouts"].select([4, 1])
    whole, _ = run(IcePop(), given["rollouts"], given["old_logprobs"])
    assert run(IcePop(), part, given["old_logprobs"])[0] == whole.select([4, 1])
    with pytest.raises(AlignmentError):
        IcePop()(given["rollouts"], given["old_logprobs"].select([0]))


# -- in a loss and in a flow -----------------------------------------------------------------------------------------


def test_a_weight_of_0_counts_and_a_rejected_token_does_not() -> None:
    """The same four tokens, two of them out: the sum is the same, its divisor is not."""
    out = MASK.values.bool() & (torch.arange(NUM_TOKENS) % 2 == 0)
    ones, kept = torch.ones(NUM_TOKENS), torch.ones(NUM_TOKENS, dtype=torch.uint8)

    def loss(weights: torch.Tensor, keep: torch.Tensor) -> float:
        column: tuple[Ragged, Ragged] = (MASK.with_values(weights), MASK.with_values(keep))
        term = term_of(PPOLoss(), importance_weights=ImportanceWeights(*IDS, *column), without=("ref_logprobs",))
        return means(term)["loss"]

    masked = loss(torch.where(out, 0.0, ones), kept)
    rejected = loss(ones, torch.where(out, 0, kept))
    number = int(MASK.values.sum())
    assert masked * number == pytest.approx(rejected * (number - int(out.sum())), rel=1e-5)


def test_in_a_flow_the_log_probs_are_computed_then() -> None:
    """A plan may leave them out where only losses read them."""
    actor = Model("m", name="actor")
    rollouts: Any = Rollout(actor, group_size=2)(source(Prompts, name="prompts"))
    advantages: Any = GroupAdvantage()(rollouts, FunctionReward(len)(rollouts))
    old: Any = PolicyLogprobs(actor)(rollouts)
    plain = RLFlow.from_outputs(Updater(actor)(PPOLoss()(rollouts, advantages, old)))
    weights: Any = RejectionMask(0.1)(rollouts, old, importance_weights=TruncatedImportance()(rollouts, old))
    corrected = RLFlow.from_outputs(Updater(actor)(PPOLoss()(rollouts, advantages, old, importance_weights=weights)))
    assert corrected.check().ok and elided_calls(plain) and not elided_calls(corrected)


def test_problems() -> None:
    for node in NODES:
        assert list(node.problems()) == []

    def problems(node: Any) -> list[str]:
        return [p.split(" is ")[0] for p in node.problems()]

    assert problems(TruncatedImportance(0.0, "row", low=-1.0)) == ["threshold", "level", "low"]  # type: ignore[arg-type]
    assert problems(TruncatedImportance(1.0, low=2.0)) == problems(IcePop(2.0, 1.0)) == ["low"]
    assert problems(IcePop(-1.0, math.inf)) == ["high", "low"]
    bad = RejectionMask(NAN, "sequence", "abs", low=1.0)  # type: ignore[arg-type]
    assert problems(bad) == ["threshold", "level", "estimator", "low"]
    with pytest.raises(NotImplementedError, match="corrects nothing"):
        ImportanceCorrection()(*small())
