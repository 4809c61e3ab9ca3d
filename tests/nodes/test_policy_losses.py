import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.batches import Advantages, ImportanceWeights, OldLogprobs
from flowrl.compiler.derive import elided_calls
from flowrl.flow import RLFlow
from flowrl.functional import policy_losses as functional
from flowrl.functional.aggregation import AGGREGATIONS
from flowrl.models import State
from flowrl.nodes.importance import TruncatedImportance
from flowrl.nodes.loss import Current
from flowrl.nodes.policy_loss_base import kl_problems
from flowrl.nodes.policy_losses import (
    CISPOLoss,
    ClipCovLoss,
    DecoupledPPOLoss,
    DPPOLoss,
    DROLoss,
    GMPOLoss,
    GPGLoss,
    GRPOLoss,
    GSPOLoss,
    KLCovLoss,
    PPOLoss,
    ReinforceLoss,
    SAPOLoss,
)
from flowrl.nodes.updater import Updater
from flowrl.ragged import Ragged
from tests.policy_terms import (
    IDS,
    MASK,
    NUM_TOKENS,
    ORIGIN,
    ROLLOUTS,
    SPLIT,
    WHOLE,
    Policy,
    current_of,
    gradients,
    inputs,
    leaves,
    means,
    noise,
    term_of,
)
from tests.tiny import recorded_rollouts

NAN = float("nan")
CLASSES: list[Any] = [
    PPOLoss, GRPOLoss, DecoupledPPOLoss, GSPOLoss, GMPOLoss, SAPOLoss, CISPOLoss, DROLoss, DPPOLoss, ReinforceLoss,
    GPGLoss, ClipCovLoss, KLCovLoss,
]  # fmt: skip
LOSSES = {f"{c.__name__} {i}": c(**settings) for c in CLASSES for i, settings in enumerate(c.examples)}

by_loss = pytest.mark.parametrize("name", LOSSES)


@by_loss
def test_law_1_micro_batches_do_not_matter(name: str) -> None:
    split_does_not_matter(LOSSES[name])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cls", [PPOLoss, GMPOLoss])
def test_law_1_in_any_aggregation(cls: Any, aggregation: Any) -> None:
    split_does_not_matter(cls(aggregation=aggregation, scale=3.0))


def split_does_not_matter(loss: Any) -> None:
    term = term_of(loss)
    whole, want = gradients(term, leaves(), WHOLE)
    split, got = gradients(term, leaves(), SPLIT)
    assert want.keys() == got.keys() != set()
    torch.testing.assert_close(split, whole)
    for n in want:
        torch.testing.assert_close(got[n], want[n])


@by_loss
def test_law_9_the_order_of_rows_does_not_matter(name: str) -> None:
    """Rows in another order when constants are prepared, and when the loss is taken."""
    term = term_of(LOSSES[name])
    whole, want = gradients(term, leaves(), WHOLE)
    order = [4, 0, 5, 2, 1, 3]
    back = [order.index(row) for row in range(ROLLOUTS.num_rows)]  # micro-batches are cut by place in the term
    model = {n: MASK.with_values(v) for n, v in leaves().items()}
    moved = {n: v.select(torch.tensor(order)).values.detach().requires_grad_() for n, v in model.items()}
    shuffled = term.select(order)
    constants = shuffled.loss.prepare(Policy(leaves()["logprobs"]), **shuffled.inputs)
    sums = shuffled.loss.sums(Current(MASK.select(torch.tensor(order)), **moved), constants, **shuffled.inputs)
    count = shuffled.loss.count(**shuffled.inputs)
    loss = sums["loss"][0] / (1 if count is None else count)
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), whole.double())
    for n in want:
        layout = MASK.select(torch.tensor(order))
        grad = moved[n].grad
        assert grad is not None
        torch.testing.assert_close(layout.with_values(grad).select(torch.tensor(back)).values, want[n])


@by_loss
@pytest.mark.parametrize("garbage", [NAN, math.inf])
def test_what_stands_at_observations_reaches_neither_loss_nor_gradient(name: str, garbage: float) -> None:
    """In every input: advantages, old and reference log-probs, weights, the sampler's log-probs, the Model's output."""
    clean, want = gradients(term_of(LOSSES[name]), leaves(), WHOLE)
    dirty, got = gradients(term_of(LOSSES[name], garbage), leaves(garbage), WHOLE)
    assert torch.equal(clean, dirty) and bool(clean.isfinite())
    assert want.keys() == got.keys()
    for n in want:
        assert torch.equal(got[n], want[n]) and bool(got[n].isfinite().all())


@by_loss
def test_rejected_tokens_do_not_exist(name: str) -> None:
    """Whatever stands at a token that the weights reject, and the loss is the mean over the others."""
    loss, given = LOSSES[name], inputs()
    weights: ImportanceWeights = given["importance_weights"]
    gone = MASK.values.bool() & ~weights.keep.values.bool()
    assert 0 < int(gone.sum()) < int(MASK.values.sum())
    clean, want = gradients(term_of(loss), leaves(), WHOLE)

    def spoiled(column: Ragged) -> Ragged:
        return column.with_values(torch.where(gone, NAN, column.values))

    changes = {
        "advantages": replace(given["advantages"], advantages=spoiled(given["advantages"].advantages)),
        "old_logprobs": replace(given["old_logprobs"], old_logprobs=spoiled(given["old_logprobs"].old_logprobs)),
        "ref_logprobs": replace(given["ref_logprobs"], ref_logprobs=spoiled(given["ref_logprobs"].ref_logprobs)),
        "importance_weights": replace(weights, weights=spoiled(weights.weights)),
    }
    dirty, got = gradients(term_of(loss, **changes), leaves(), WHOLE)
    assert torch.equal(clean, dirty)
    for n in want:
        assert torch.equal(got[n], want[n]) and not bool(got[n][gone].any())
    term = term_of(replace(loss, aggregation="token-mean"))
    assert term.loss.count(**term.inputs) == int(MASK.values.sum()) - int(gone.sum())


@by_loss
@pytest.mark.parametrize("size", [100.0, -100.0])
def test_extreme_log_ratios_are_finite(name: str, size: float) -> None:
    """Log-ratios of ±100, of the current policy to the old one and of the old one to the sampler."""
    old = OldLogprobs(*IDS, MASK.with_values(leaves()["logprobs"].detach() - size), ORIGIN)
    loss, got = gradients(term_of(LOSSES[name], old_logprobs=old), leaves(), WHOLE)
    assert bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in got.values())


@by_loss
def test_without_rows_or_tokens_the_loss_is_0(name: str) -> None:
    """A batch without rows, one whose only row is empty, and one of which every token is rejected."""
    term, model = term_of(LOSSES[name]), leaves()
    for rows in ([], [2]):
        part = term.select(rows)
        constants = part.loss.prepare(Policy(model["logprobs"]), **part.inputs)
        columns = {n: v[:0] for n, v in model.items()}
        sums = part.loss.sums(
            Current(MASK.select(torch.tensor(rows, dtype=torch.int64)), **columns), constants, **part.inputs
        )
        assert all(float(s.detach()) == 0.0 and not (c or 0) for s, c in sums.values())
        assert not part.loss.count(**part.inputs)
    weights = inputs()["importance_weights"]
    rejected = replace(weights, keep=MASK.with_values(torch.zeros_like(MASK.values)))
    loss, got = gradients(term_of(LOSSES[name], importance_weights=rejected), model, WHOLE)
    assert float(loss) == 0.0 and not any(bool(g.any()) for g in got.values())


# -- each loss against its function ----------------------------------------------------------------------------------

OLD, ADVANTAGES, X = noise(3).values, noise(1).values, noise(6).values
SURROGATES: list[tuple[Any, Any]] = [
    (PPOLoss(0.1, 0.3, 2.0), functional.ppo_loss(X, OLD, ADVANTAGES, clip_low=0.1, clip_high=0.3, dual_clip=2.0)),
    (GRPOLoss(0.1), functional.ppo_loss(X, OLD, ADVANTAGES, clip_low=0.1)),
    (GSPOLoss(0.1, 0.3), functional.gspo_loss(X, OLD, ADVANTAGES, MASK, clip_low=0.1, clip_high=0.3)),
    (GMPOLoss(0.1, 0.3), functional.geo_mean_loss(X, OLD, ADVANTAGES, MASK, clip_low=0.1, clip_high=0.3)),
    (SAPOLoss(2.0, 3.0), functional.sapo_loss(X, OLD, ADVANTAGES, tau_pos=2.0, tau_neg=3.0)),
    (CISPOLoss(0.1, 0.3), functional.cispo_loss(X, OLD, ADVANTAGES, clip_low=0.1, clip_high=0.3)),
    (DROLoss(0.3), functional.dro_loss(X, OLD, ADVANTAGES, beta=0.3)),
    (DPPOLoss(), functional.dppo_loss(X, OLD, ADVANTAGES, clip_low=0.15)),
    (DPPOLoss("kl"), functional.dppo_loss(X, OLD, ADVANTAGES, divergence="kl", clip_low=0.05)),
    (
        DPPOLoss("kl", 0.1, 0.2, ratio_cap=1.5),
        functional.dppo_loss(X, OLD, ADVANTAGES, divergence="kl", clip_low=0.1, clip_high=0.2, ratio_cap=1.5),
    ),
    (ReinforceLoss(), functional.reinforce_loss(X, ADVANTAGES)),
    (GPGLoss(), functional.gpg_loss(X, ADVANTAGES)),
]


@pytest.mark.parametrize(("loss", "want"), SURROGATES, ids=lambda v: type(v).__name__)
def test_settings_reach_the_function(loss: Any, want: Any) -> None:
    term = term_of(replace(loss, aggregation="token-mean"), without=("ref_logprobs", "importance_weights"))
    losses, clipped = want if isinstance(want, tuple) else (want, None)
    got, selected = means(term), MASK.values.bool()
    assert got["loss"] == pytest.approx(float(losses[selected].mean()), rel=1e-5)
    assert got.get("clip_fraction") == (None if clipped is None else pytest.approx(float(clipped[selected].mean())))


def test_ppo_by_hand() -> None:
    """Two tokens with ratios 1.5 and 1, advantages 1 and −1: −1.2 (clipped) and 1, so −0.1 a token."""
    rollouts = recorded_rollouts(1, 1, response_lengths=(2,))
    mask, ids = rollouts.loss_mask, (rollouts.prompt_id, rollouts.sample_id)
    old = OldLogprobs(*ids, mask.with_values(torch.zeros(2)), ORIGIN)
    advantages = Advantages(*ids, *[mask.with_values(torch.tensor([1.0, -1.0]))] * 2)
    term = PPOLoss(entropy_coef=0.5)(rollouts, advantages, old)
    current = Current(mask, torch.tensor([math.log(1.5), 0.0]), entropy=torch.tensor([0.4, 0.6]))
    sums = term.loss.sums(current, None, **term.inputs)
    found = {n: float(total) / float(count) for n, (total, count) in sums.items() if count is not None}
    assert found == pytest.approx(
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


def test_aggregations_by_default() -> None:
    """Losses of whole responses take the mean over responses, as their papers do; the others that over tokens."""
    by_row = {c for c in CLASSES if c().aggregation == "seq-mean-token-mean"}
    assert by_row == {GSPOLoss, GMPOLoss, SAPOLoss}
    assert {c().aggregation for c in set(CLASSES) - by_row} == {"token-mean"}


# -- what they share -------------------------------------------------------------------------------------------------


def test_importance_weights_multiply_the_surrogate_alone() -> None:
    weights: ImportanceWeights = inputs()["importance_weights"]
    mask = MASK.with_values(MASK.values * weights.keep.values)
    keep = mask.values.bool()
    losses, _ = functional.ppo_loss(X, OLD, ADVANTAGES)
    entropy = leaves()["entropy"].detach()
    loss = PPOLoss(entropy_coef=0.3)
    got = means(term_of(loss, without=("ref_logprobs",)))["loss"]
    assert got == pytest.approx(float((losses * weights.weights.values - 0.3 * entropy)[keep].mean()), rel=1e-5)


def test_gmpo_takes_their_geometric_mean() -> None:
    weights: ImportanceWeights = inputs()["importance_weights"]
    mask = MASK.with_values(MASK.values * weights.keep.values)
    losses, _ = functional.geo_mean_loss(X, OLD, ADVANTAGES, mask)
    by_row = []
    for row, kept, of_row in zip(mask.with_values(losses).rows(), mask.rows(), weights.weights.rows(), strict=True):
        if bool(kept.any()):
            by_row.append(float(row[0]) * math.exp(float(of_row[kept.bool()].log().mean())))
    assert means(term_of(GMPOLoss(), without=("ref_logprobs",)))["loss"] == pytest.approx(
        sum(by_row) / len(by_row), rel=1e-5
    )


@pytest.mark.parametrize("cap", [None, 1.5])
def test_decoupled_ppo_is_ppo_with_the_weights_of_the_behaviour_policy(cap: float | None) -> None:
    given = inputs()
    weights = TruncatedImportance(math.exp(20) if cap is None else cap)(given["rollouts"], given["old_logprobs"])
    corrected = term_of(PPOLoss(clip_high=0.3), importance_weights=weights)
    decoupled = term_of(DecoupledPPOLoss(clip_high=0.3, behaviour_cap=cap), without=("importance_weights",))
    want, got = (gradients(t, leaves(), WHOLE) for t in (corrected, decoupled))
    torch.testing.assert_close(got, want)
    weight = means(decoupled)["behaviour_weight"]
    assert weight == pytest.approx(float(weights.weights.values[MASK.values.bool()].mean()), rel=1e-5)


def test_the_kl_is_added_to_the_loss() -> None:
    without = ("importance_weights",)
    plain = means(term_of(GRPOLoss(), without=without))
    for estimator in ("k2", "k3", "k3_st"):
        found = means(term_of(GRPOLoss(kl_coef=0.1, kl_estimator=estimator), without=without))
        assert found["loss"] == pytest.approx(plain["loss"] + 0.1 * found["kl"], rel=1e-5)
    both = [
        gradients(term_of(GRPOLoss(kl_coef=0.1, kl_estimator=e), without=without), leaves(), WHOLE)[1]
        for e in ("k2", "k3_st")
    ]
    torch.testing.assert_close(both[0], both[1])


def test_coefficients_may_be_states() -> None:
    """Bound when the term is made: all micro-batches see one number."""
    kl, entropy = State("kl", 0.1), State("entropy", 0.2)
    loss = PPOLoss(kl_coef=kl, entropy_coef=entropy)
    assert loss.problems() == [] and loss.requires == {"logprobs", "entropy"} and set(loss.states()) == {kl, entropy}
    assert "State('kl', 0.1)" in next(iter(loss.wiring_problems(frozenset())))
    term = term_of(loss)
    assert (term.loss.kl_coef, term.loss.entropy_coef) == (0.1, 0.2)  # type: ignore[attr-defined]
    fixed = term_of(PPOLoss(kl_coef=0.1, entropy_coef=0.2))
    torch.testing.assert_close(gradients(term, leaves(), WHOLE), gradients(fixed, leaves(), WHOLE))


@pytest.mark.parametrize("cls", [ReinforceLoss, GPGLoss])
def test_old_log_probs_that_are_not_needed(cls: Any) -> None:
    without = means(term_of(cls(), without=("old_logprobs",)))
    given = means(term_of(cls()))
    assert given["loss"] == without["loss"]
    assert set(given) - set(without) == {"ratio", "ratio_squared", "approx_kl", "rollout_logprob_gap"}


def test_log_probs_that_the_plan_left_out() -> None:
    """The ratio is 1 and its gradient that of log π: the values, which are NaN then, are not looked at."""
    left_out = OldLogprobs(*IDS, MASK.with_values(torch.full((NUM_TOKENS,), NAN)), ORIGIN, is_current=True)
    term = term_of(PPOLoss(), old_logprobs=left_out, without=("importance_weights",))
    _, got = gradients(term, leaves(), WHOLE)
    selected = MASK.values.bool()
    want = torch.where(selected, -noise(1).values / int(selected.sum()), 0.0)
    torch.testing.assert_close(got["logprobs"], want)


@pytest.mark.parametrize("cls", CLASSES)
def test_which_losses_let_the_plan_leave_them_out(cls: Any) -> None:
    """Those that ask the policy before the step look at the old log-probs then."""
    from tests.compiler.test_derive import Parts

    p = Parts()
    elided = elided_calls(RLFlow.from_outputs(Updater(p.actor)(p.loss(cls))))
    assert bool(elided) == (cls not in (ClipCovLoss, KLCovLoss))


def test_the_gap_to_the_sampler_is_measured_where_it_means_something() -> None:
    def metrics(**settings: Any) -> set[str]:
        term = term_of(PPOLoss(), rollouts=replace(ROLLOUTS, origin=replace(ORIGIN, **settings)))
        sums = term.loss.sums(current_of(leaves()), None, **term.inputs)
        return set(sums) & {"rollout_logprob_gap"}

    assert metrics() == {"rollout_logprob_gap"}
    assert metrics(top_p=0.9) == metrics(temperature=0.5) == set()


def test_rows_without_an_advantage_are_not_trained_on() -> None:
    given = inputs()
    names = ("old_logprobs", "ref_logprobs", "importance_weights")
    term = PPOLoss()(ROLLOUTS, given["advantages"].select([3, 0]), **{n: given[n] for n in names})
    assert term.num_rows == 2 and term.sequences == ROLLOUTS.select([3, 0])
    for n in names:
        assert term.inputs[n] == given[n].select([3, 0])


def test_problems() -> None:
    for loss in LOSSES.values():
        assert loss.problems() == []

    def problems(loss: Any) -> list[str]:
        return [p.split(" is ")[0] for p in loss.problems()]

    shared = GRPOLoss(entropy_coef=NAN, kl_coef=-1.0, kl_estimator="?", aggregation="mean", scale=0.0)  # type: ignore[arg-type]
    assert problems(shared) == ["aggregation", "scale", "entropy_coef", "kl_coef", "kl_estimator"]
    assert problems(PPOLoss(1.5, 0.0, 0.5)) == ["clip", "clip_high", "dual_clip"]
    assert problems(DecoupledPPOLoss(behaviour_cap=0.0)) == ["behaviour_cap"]
    assert problems(GSPOLoss(1.0, -1.0)) == problems(GMPOLoss(0.0, 0.0)) == ["clip", "clip_high"]
    assert problems(CISPOLoss(0.0, math.inf)) == ["clip", "clip_high"] and problems(CISPOLoss(9.0)) == []
    assert problems(SAPOLoss(0.0, NAN)) == ["tau_pos", "tau_neg"] and problems(DROLoss(0.0)) == ["beta"]
    assert problems(DPPOLoss("js", 0.0, -1.0, ratio_cap=0.0)) == ["distance", "clip", "clip_high", "ratio_cap"]  # type: ignore[arg-type]
    assert len(list(kl_problems(State("kl", "much"), "k4"))) == 2
    given = frozenset({"rollouts", "advantages", "old_logprobs"})
    assert "ref_logprobs" in next(iter(GRPOLoss(kl_coef=0.1).wiring_problems(given)))
    assert list(GRPOLoss(kl_coef=0.1).wiring_problems(given | {"ref_logprobs"})) == []
    assert list(GRPOLoss().wiring_problems(given)) == []


def test_what_a_loss_reads() -> None:
    assert PPOLoss().requires == {"logprobs"}
    assert GRPOLoss(entropy_coef=0.1).requires == {"logprobs", "entropy"}
