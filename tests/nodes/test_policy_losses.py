import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl import context
from flowrl.batches import Advantages, Demonstrations, OldLogprobs, Prompts, RefLogprobs, Values
from flowrl.context import Bindings, use_bindings
from flowrl.functional.aggregation import AGGREGATIONS
from flowrl.graph import Ref, walk
from flowrl.models import Model, ValueHead, ValueModel
from flowrl.nodes import (
    AdamW,
    Critic,
    Current,
    GroupAdvantage,
    GRPOLoss,
    GRPOUpdater,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    ReferenceLogprobs,
    Rollout,
    SFTLoss,
    SFTUpdater,
    Updater,
    ValueLoss,
    ValueUpdater,
    rewards_like,
    source,
)
from flowrl.nodes.loss import LossTerm
from flowrl.nodes.reward import FunctionReward
from flowrl.ragged import Ragged
from tests.nodes.test_advantage import ORIGIN
from tests.tiny import recorded_rollouts, tiny_actor

NAN = float("nan")
ROLLOUTS = recorded_rollouts(2, 2, response_lengths=(5, 1, 0, 4), observations=True)
MASK = ROLLOUTS.loss_mask
NUM_TOKENS = len(MASK.values)
IDS = ROLLOUTS.prompt_id, ROLLOUTS.sample_id


def noise(seed: int, fill: float = 0.0) -> Ragged:
    """Random numbers at policy tokens, ``fill`` at observations."""
    values = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    return MASK.with_values(torch.where(MASK.values.bool(), values, fill))


def inputs(fill: float = 0.0) -> dict[str, Any]:
    return {
        "rollouts": ROLLOUTS,
        "advantages": Advantages(*IDS, noise(1, fill), noise(2, fill)),
        "old_logprobs": OldLogprobs(*IDS, noise(3, fill), ORIGIN),
        "ref_logprobs": RefLogprobs(*IDS, noise(4, fill), ORIGIN),
        "values": Values(*IDS, noise(5, fill)),
        "demonstrations": Demonstrations(*IDS, ROLLOUTS.tokens, ROLLOUTS.spans),
    }


LOSSES = {
    "ppo": PPOLoss(dual_clip=3.0),
    "ppo with entropy": PPOLoss(entropy_coef=0.1, clip_high=0.3),
    "grpo": GRPOLoss(kl_coef=0.1),
    "value": ValueLoss(clip=0.1),
    "sft": SFTLoss(),
}


def term_of(loss: Any, fill: float = 0.0) -> LossTerm:
    given = inputs(fill)
    return loss(**{port.name: given[port.name] for port in loss.ports})


def leaves(fill: float = 0.0) -> dict[str, torch.Tensor]:
    """What the Model gives, as leaves of the graph."""
    names = ("logprobs", "entropy", "values")
    return {n: noise(6 + i, fill).values.requires_grad_() for i, n in enumerate(names)}


def gradients(term: LossTerm, model: dict[str, torch.Tensor], parts: list[list[int]]):
    """The loss over micro-batches, and its gradients, normalised as an engine does."""
    count = term.loss.count(**term.inputs)
    constants = term.loss.prepare(**term.inputs)
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        index = torch.tensor(rows, dtype=torch.int64)
        columns = {n: MASK.with_values(v).select(index).values for n, v in model.items()}
        current = Current(MASK.select(index), **columns)
        total = total + term.loss.sums(current, constants, **term.select(index).inputs)["loss"][0]
    total = total if count is None else total / count
    total.backward()
    return total.detach(), {n: v.grad for n, v in model.items() if v.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_law_1_micro_batches_do_not_matter(name: str, aggregation: Any) -> None:
    term = term_of(replace(LOSSES[name], aggregation=aggregation))
    whole, want = gradients(term, leaves(), [[0, 1, 2, 3]])
    split, got = gradients(term, leaves(), [[2], [3, 0], [1], []])
    assert want.keys() == got.keys() != set()
    torch.testing.assert_close(split, whole)
    for n in want:
        torch.testing.assert_close(got[n], want[n])


@pytest.mark.parametrize("name", LOSSES)
def test_nan_at_observations_reaches_neither_loss_nor_gradient(name: str) -> None:
    clean, want = gradients(term_of(LOSSES[name]), leaves(), [[0, 1, 2, 3]])
    dirty, got = gradients(term_of(LOSSES[name], NAN), leaves(NAN), [[0, 1, 2, 3]])
    assert torch.equal(clean, dirty) and bool(clean.isfinite())
    for n in want:
        assert torch.equal(got[n], want[n])


def test_ppo_by_hand() -> None:
    """Two tokens with ratios 1.5 and 1, advantages 1 and −1: −1.2 (clipped) and 1, so −0.1 a token."""
    rollouts = recorded_rollouts(1, 1, response_lengths=(2,))
    mask, ids = rollouts.loss_mask, (rollouts.prompt_id, rollouts.sample_id)
    old = OldLogprobs(*ids, mask.with_values(torch.zeros(2)), ORIGIN)
    advantages = Advantages(*ids, *[mask.with_values(torch.tensor([1.0, -1.0]))] * 2)
    term = PPOLoss(entropy_coef=0.5)(rollouts, advantages, old)
    current = Current(mask, torch.tensor([math.log(1.5), 0.0]), entropy=torch.tensor([0.4, 0.6]))
    sums = term.loss.sums(current, None, **term.inputs)
    means = {n: float(total) / float(count) for n, (total, count) in sums.items() if count is not None}
    assert means == pytest.approx(
        {
            "loss": -0.1 - 0.5 * 0.5,
            "clip_fraction": 0.5,
            "ratio": 1.25,
            "ratio_squared": (1.5**2 + 1) / 2,
            "approx_kl": (0.5 - math.log(1.5)) / 2,
            "entropy": 0.5,
        },
        rel=1e-5,
    )


def test_log_probs_that_the_plan_left_out() -> None:
    """The ratio is 1 and its gradient that of log π: the values, which are NaN then, are not looked at."""
    term = term_of(PPOLoss())
    left_out = OldLogprobs(*IDS, MASK.with_values(torch.full((NUM_TOKENS,), NAN)), ORIGIN, is_current=True)
    term = LossTerm(term.loss, {**term.inputs, "old_logprobs": left_out})
    _, got = gradients(term, leaves(), [[0, 1, 2, 3]])
    selected = MASK.values.bool()
    want = torch.where(selected, -noise(1).values / int(selected.sum()), 0.0)
    torch.testing.assert_close(got["logprobs"], want)


def test_the_gap_to_the_sampler_is_measured_where_it_means_something() -> None:
    def metrics(**settings: Any) -> set[str]:
        origin = replace(ORIGIN, **settings)
        term = term_of(PPOLoss())
        term = LossTerm(term.loss, {**term.inputs, "rollouts": replace(ROLLOUTS, origin=origin)})
        sums = term.loss.sums(Current(MASK, **leaves()), None, **term.inputs)
        return set(sums) & {"rollout_logprob_gap"}

    assert metrics() == {"rollout_logprob_gap"}
    assert metrics(top_p=0.9) == metrics(temperature=0.5) == set()


def test_grpo_adds_the_kl_to_the_loss() -> None:
    plain = gradients(term_of(GRPOLoss()), leaves(), [[0, 1, 2, 3]])[0]
    with_kl = gradients(term_of(GRPOLoss(kl_coef=0.1)), leaves(), [[0, 1, 2, 3]])[0]
    term = term_of(GRPOLoss())
    sums = term.loss.sums(Current(MASK, **leaves()), None, **term.inputs)
    total, count = sums["kl"]
    assert float(with_kl) == pytest.approx(float(plain) + 0.1 * float(total) / float(count), rel=1e-5)


def test_value_loss_and_its_metrics() -> None:
    rollouts = recorded_rollouts(1, 1, response_lengths=(2,))
    mask, ids = rollouts.loss_mask, (rollouts.prompt_id, rollouts.sample_id)

    def column(*numbers: float) -> Ragged:
        return mask.with_values(torch.tensor(numbers))

    term = ValueLoss(clip=1.0)(
        rollouts, Values(*ids, column(0.5, 1.0)), Advantages(*ids, column(0.0, 0.0), column(0.0, 4.0))
    )
    sums = term.loss.sums(Current(mask, values=torch.tensor([1.0, 3.0])), None, **term.inputs)
    means = {n: float(total) / float(count) for n, (total, count) in sums.items() if count is not None}
    assert means == {"loss": 1.25, "value_mean": 2.0, "value_error": 1.0, "value_clip_fraction": 0.5}


def test_rows_without_an_advantage_are_not_trained_on() -> None:
    given = inputs()
    term = PPOLoss()(ROLLOUTS, given["advantages"].select([3, 0]), given["old_logprobs"])
    assert term.num_rows == 2 and term.sequences == ROLLOUTS.select([3, 0])
    assert term.inputs["old_logprobs"] == given["old_logprobs"].select([3, 0])


def test_what_a_loss_reads() -> None:
    assert PPOLoss().requires == {"logprobs"}
    assert GRPOLoss(entropy_coef=0.1).requires == {"logprobs", "entropy"}
    assert ValueLoss().requires == {"values"} and ValueLoss().head() is None
    head = ValueHead(Model("m"))
    assert ValueLoss(head).head() is head


def test_problems() -> None:
    for loss in LOSSES.values():
        assert list(loss.problems()) == []
    bad = GRPOLoss(1.5, 0.0, 0.5, kl_coef=-1.0, kl_estimator="?", aggregation="mean", scale=0.0)  # type: ignore[arg-type]
    assert len(list(bad.problems())) == 7
    assert len(list(ValueLoss(clip=0.0).problems())) == 1
    given = frozenset({"rollouts", "advantages", "old_logprobs"})
    assert "ref_logprobs" in next(iter(GRPOLoss(kl_coef=0.1).wiring_problems(given)))
    assert list(GRPOLoss(kl_coef=0.1).wiring_problems(given | {"ref_logprobs"})) == []
    assert list(GRPOLoss().wiring_problems(given)) == []


# -- shorthands ------------------------------------------------------------------------------------------------------


def recorded(output: Any) -> list[Any]:
    """A flow as plain data: each call's node and where its inputs come from."""
    assert isinstance(output, Ref)
    calls = walk([output])
    place = {id(call): i for i, call in enumerate(calls)}
    return [(call.node, [(name, place[id(ref._call)], ref._path) for name, ref in call.inputs()]) for call in calls]


ACTOR, CRITIC = Model("actor"), ValueModel("critic")
ADAM = AdamW(learning_rate=1e-3)
TRAINING: dict[str, Any] = {"epochs": 2, "num_minibatches": 3, "optimizer": ADAM, "max_grad_norm": None}


def edges() -> dict[str, Any]:
    prompts = source(Prompts, name="prompts", batch_size=4)
    rollouts = Rollout(ACTOR, group_size=2)(prompts)
    rewards = FunctionReward(len)(rollouts)
    return {
        "rollouts": rollouts,
        "values": Critic(CRITIC)(rollouts),
        "old_logprobs": PolicyLogprobs(ACTOR)(rollouts),
        "ref_logprobs": ReferenceLogprobs(ACTOR.frozen())(rollouts),
        "advantages": GroupAdvantage()(rollouts, rewards),
        "demonstrations": source(Demonstrations, name="demonstrations", batch_size=4),
    }


HEAD = ValueHead(ACTOR)
KEEP: Any = {"aggregation": "seq-mean-token-sum-norm", "scale": 9.0}
SHORTHANDS = [
    (PPOUpdater(ACTOR), Updater(ACTOR), PPOLoss()),
    (
        PPOUpdater(ACTOR, **TRAINING, clip=0.1, clip_high=0.3, dual_clip=2.0, entropy_coef=0.1, label="train"),
        Updater(ACTOR, **TRAINING, label="train"),
        PPOLoss(0.1, 0.3, 2.0, 0.1),
    ),
    (
        GRPOUpdater(ACTOR, **TRAINING, clip=0.1, kl_coef=0.2, kl_estimator="k2", **KEEP),
        Updater(ACTOR, **TRAINING),
        GRPOLoss(0.1, kl_coef=0.2, kl_estimator="k2", **KEEP),
    ),
    (ValueUpdater(CRITIC, **TRAINING, clip=0.2), Updater(CRITIC, **TRAINING), ValueLoss(clip=0.2)),
    (ValueUpdater(HEAD), Updater(ACTOR), ValueLoss(HEAD)),
    (SFTUpdater(ACTOR, 2, aggregation="token-sum"), Updater(ACTOR, 2), SFTLoss(aggregation="token-sum")),
]


@pytest.mark.parametrize(("short", "updater", "loss"), SHORTHANDS, ids=lambda node: type(node).__name__)
def test_a_shorthand_records_what_it_is_short_for(short: Any, updater: Any, loss: Any) -> None:
    inputs = edges()
    given = {port.name: inputs[port.name] for port in loss.ports}
    assert recorded(short(**given)) == recorded(updater(loss(**given)))


def test_without_reference_log_probs() -> None:
    inputs = edges()
    given = {n: inputs[n] for n in ("rollouts", "advantages", "old_logprobs")}
    assert recorded(GRPOUpdater(ACTOR)(**given)) == recorded(Updater(ACTOR)(GRPOLoss()(**given)))


# -- with a model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bindings():
    from flowrl.runtime.worker import open_engine

    bindings = Bindings(open_engine)
    with use_bindings(bindings), context.step(seed=3):
        yield bindings
    for engine in bindings.engines.values():
        engine.close()


def test_training_a_tiny_model(bindings: Bindings) -> None:
    """Better answers become likelier, and what the terms report comes out as means."""
    actor = tiny_actor()
    rollouts = recorded_rollouts(2, 3)
    old = PolicyLogprobs(actor)(rollouts)
    ref = ReferenceLogprobs(actor.frozen())(rollouts)
    assert torch.equal(old.old_logprobs.values, ref.ref_logprobs.values)
    rewards = rewards_like(rollouts, score=[1.0, 0.0, 0.5, 0.0, 1.0, 0.2])
    advantages = GroupAdvantage()(rollouts, rewards)
    updater = GRPOUpdater(actor, epochs=3, optimizer=AdamW(learning_rate=1e-3), kl_coef=0.01)
    stats = updater(rollouts, advantages, old, ref)
    assert (stats.policy_version, stats.num_optimizer_steps, stats.num_skipped_steps) == (1, 3, 0)
    assert {"loss", "clip_fraction", "ratio", "approx_kl", "kl", "grad_norm"} <= stats.metrics.keys()
    assert stats.metrics["kl"] > 0
    moved = PolicyLogprobs(actor)(rollouts).old_logprobs.values - old.old_logprobs.values
    assert float((moved * advantages.advantages.values).sum()) > 0
    assert ReferenceLogprobs(actor.frozen())(rollouts) == ref
