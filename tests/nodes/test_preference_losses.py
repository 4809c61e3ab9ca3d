"""Preference losses as terms of an updater: the papers' numbers row by row, micro-batches, masks, and training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flowrl
from flowrl.batches import Feedback, LogprobOrigin, Preferences, RefLogprobs
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.errors import FlowError, GraphError
from flowrl.models import RewardModel
from flowrl.nodes import AdamW, ReferenceLogprobs, SFTLoss, Updater
from flowrl.nodes.loss import Current, Loss, LossTerm, Sums
from flowrl.nodes.pairs import MismatchedCompletions
from flowrl.nodes.preference_losses import BradleyTerryLoss, DPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from flowrl.runtime.worker import open_engine
from tests.tiny import recorded_rollouts, tiny_actor

ORIGIN = LogprobOrigin("m", 0, "test", "float32")


def preferences(num_pairs: int = 4, **options: Any) -> Preferences:
    """Pairs of which some rows have an observation, one a single token, one none; every other pair lists the rejected
    answer first."""
    options.setdefault("observations", True)
    rows = recorded_rollouts(num_pairs, 2, response_lengths=(4, 1, 7, 0, 6, 3, 5, 2), **options)
    chosen = (torch.arange(2 * num_pairs) + rows.prompt_id) % 2
    return Preferences(
        rows.prompt_id, rows.sample_id, rows.tokens, rows.spans, rows.prompt_id + 100, chosen.to(torch.uint8)
    )


def feedback(num_rows: int = 6) -> Feedback:
    rows = recorded_rollouts(num_rows, 1, observations=True)
    desirable = torch.tensor([1, 0, 0, 1, 1, 0] * num_rows, dtype=torch.uint8)[:num_rows]
    return Feedback(rows.prompt_id, rows.sample_id, rows.tokens, rows.spans, desirable)


def ref_of(sequences: Any, seed: int = 7) -> RefLogprobs:
    """Random log-probs, NaN where the policy wrote no token."""
    mask = sequences.loss_mask
    values = -2 * torch.rand(len(mask.values), generator=torch.Generator().manual_seed(seed))
    broken = torch.where(mask.values.bool(), values, torch.nan)
    return RefLogprobs(sequences.prompt_id, sequences.sample_id, mask.with_values(broken), ORIGIN)


def current_of(sequences: Any, *, junk: float = -1.0) -> Current:
    """What a model gives; ``junk`` where the policy wrote no token."""
    mask = sequences.loss_mask
    generator = torch.Generator().manual_seed(3)
    values = torch.where(mask.values.bool(), -2 * torch.rand(len(mask.values), generator=generator), junk)
    scores = torch.randn(sequences.num_rows, generator=generator)
    return Current(mask, logprobs=values.requires_grad_(), scores=scores.requires_grad_())


class Policy:
    """Scores as :func:`ref_of` with another seed; counts how often it is asked."""

    asked = 0

    def logprobs(self, sequences: Any) -> Tensor:
        self.asked += 1
        return ref_of(sequences, seed=11).ref_logprobs.values


def sums_of(loss: Loss, current: Current, constants: Any = None, **inputs: Any) -> Sums:
    return loss.sums(current, constants, **inputs)


def mean(sums: Sums, name: str = "loss") -> float:
    total, count = sums[name]
    assert count is not None
    return total.item() / count.item()


def rows_of(values: Tensor, mask: Any) -> list[list[float]]:
    """The values of the policy's own tokens, row by row, as Python floats."""
    split = mask.with_values(values.double()).to_lists()
    return [[v for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(split, mask.to_lists(), strict=True)]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


class Case:
    """Some pairs worked by hand: sums, lengths and reference of each chosen and rejected row."""

    def __init__(self) -> None:
        self.batch = preferences()
        self.ref = ref_of(self.batch)
        self.current = current_of(self.batch)
        policy = rows_of(self.current.logprobs.detach(), self.batch.loss_mask)
        reference = rows_of(self.ref.ref_logprobs.values, self.batch.loss_mask)
        self.pairs = []
        for pair in range(4):
            rows = {int(self.batch.chosen[i]): i for i in (2 * pair, 2 * pair + 1)}
            self.pairs.append(
                tuple((sum(policy[i]), sum(reference[i]), max(1, len(policy[i]))) for i in (rows[1], rows[0]))
            )

    def sums(self, loss: Loss, with_reference: bool = False) -> Sums:
        reference = {"ref_logprobs": self.ref} if with_reference else {}
        return sums_of(loss, self.current, preferences=self.batch, **reference)


class TestDPO:
    @pytest.mark.parametrize("by_length", [False, True])
    @pytest.mark.parametrize(("loss", "epsilon"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0), ("hinge", 0.2)])
    @pytest.mark.parametrize("reference_free", [False, True])
    def test_the_mean_over_pairs(self, loss: Any, epsilon: float, by_length: bool, reference_free: bool) -> None:
        case, expected = Case(), []
        for (c, ref_c, num_c), (r, ref_r, num_r) in case.pairs:
            c, r = (c, r) if reference_free else (c - ref_c, r - ref_r)
            h = c / num_c - r / num_r if by_length else c - r

            def ell(h: float) -> float:
                if loss == "ipo":
                    return (h - 1 / 0.6) ** 2
                return max(0.0, 1 - 0.3 * h) if loss == "hinge" else -log_sigmoid(0.3 * h)

            expected.append((1 - epsilon) * ell(h) + epsilon * ell(-h))
        term = DPOLoss(0.3, loss, epsilon, length_normalised=by_length, reference_free=reference_free)
        found = case.sums(term, with_reference=not reference_free)
        assert mean(found) == pytest.approx(sum(expected) / 4, rel=1e-5)
        assert found["loss"][1] == 4 == term.count(preferences=case.batch)

    def test_metrics(self) -> None:
        case = Case()
        found = case.sums(DPOLoss(0.3), with_reference=True)
        chosen = [0.3 * (c - ref) for (c, ref, _), _ in case.pairs]
        rejected = [0.3 * (r - ref) for _, (r, ref, _) in case.pairs]
        wins = [c > r for c, r in zip(chosen, rejected, strict=True)]
        assert 0 < sum(wins) < 4  # the case has both
        for name, values in {
            "accuracy": wins,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "margin": [c - r for c, r in zip(chosen, rejected, strict=True)],
            "chosen_logprob": [c for (c, _, _), _ in case.pairs],
            "rejected_logprob": [r for _, (r, _, _) in case.pairs],
        }.items():
            assert mean(found, name) == pytest.approx(sum(values) / 4, rel=1e-5), name
            assert not found[name][0].requires_grad

    def test_a_reference_is_wired_or_not_wanted(self) -> None:
        batch = preferences()
        with pytest.raises(GraphError, match=r"ref_logprobs are missing.*reference_free=True"):
            DPOLoss()(batch)
        with pytest.raises(GraphError, match="expected one of them"):
            DPOLoss(reference_free=True)(batch, ref_of(batch))
        assert set(DPOLoss(reference_free=True)(batch).inputs) == {"preferences"}
        pairs: Any = flowrl.source(Preferences, name="pairs", batch_size=2)
        flow = flowrl.RLFlow.from_outputs(Updater(tiny_actor())(DPOLoss()(pairs)))
        assert any("ref_logprobs are missing" in str(violation) for violation in flow.check().errors)
        shuffled = ref_of(batch).select([3, 1, 0, 2, 7, 6, 5, 4])
        aligned = DPOLoss()(batch, shuffled).inputs["ref_logprobs"]
        assert aligned.ref_logprobs == ref_of(batch).ref_logprobs  # by id, not by position


class TestOtherPairLosses:
    def test_simpo(self) -> None:
        case = Case()
        z = [2.5 * (c / num_c - r / num_r) - 0.7 for (c, _, num_c), (r, _, num_r) in case.pairs]
        found = case.sums(SimPOLoss(2.5, 0.7))
        assert mean(found) == pytest.approx(-sum(map(log_sigmoid, z)) / 4, rel=1e-5)
        assert mean(found, "margin") == pytest.approx(sum(z) / 4 + 0.7, rel=1e-5)
        smoothed = -sum(0.9 * log_sigmoid(x) + 0.1 * log_sigmoid(-x) for x in z) / 4
        assert mean(case.sums(SimPOLoss(2.5, 0.7, 0.1))) == pytest.approx(smoothed, rel=1e-5)

    def test_orpo(self) -> None:
        """Pair 1 has an answer without a token, which is certain: its mean log-prob counts as −1e-6 in the odds."""
        case, expected, nlls = Case(), [], []
        for (c, _, num_c), (r, _, num_r) in case.pairs:
            p, q = (min(-1e-6, x) for x in (c / num_c, r / num_r))
            ratio = math.log(math.exp(p) / -math.expm1(p)) - math.log(math.exp(q) / -math.expm1(q))
            nlls.append(-c / num_c)
            expected.append(-c / num_c - 0.5 * log_sigmoid(ratio))
        found = case.sums(ORPOLoss(0.5))
        assert mean(found) == pytest.approx(sum(expected) / 4, rel=1e-4)
        assert mean(found, "nll") == pytest.approx(sum(nlls) / 4, rel=1e-5)

    def test_bradley_terry(self) -> None:
        case = Case()
        scores = case.current.scores.detach().double().tolist()
        rows = [{int(case.batch.chosen[i]): i for i in (2 * p, 2 * p + 1)} for p in range(4)]
        chosen, rejected = [scores[r[1]] for r in rows], [scores[r[0]] for r in rows]
        expected = [-log_sigmoid(w - v - 0.4) + 0.1 * (w + v) ** 2 for w, v in zip(chosen, rejected, strict=True)]
        found = case.sums(BradleyTerryLoss(0.4, center_coef=0.1))
        assert mean(found) == pytest.approx(sum(expected) / 4, rel=1e-5)
        assert mean(found, "chosen_score") == pytest.approx(sum(chosen) / 4, rel=1e-5)
        assert BradleyTerryLoss.requires == {"scores"}


class TestKTO:
    def inputs(self, batch: Feedback) -> dict[str, Any]:
        mismatched = MismatchedCompletions()(batch)
        reference = ref_of(mismatched, seed=5)
        term = KTOLoss()(batch, ref_of(batch), mismatched=mismatched, mismatched_ref=reference)
        return term.inputs

    def test_the_mean_over_rows(self) -> None:
        batch = feedback()
        inputs, current, policy = self.inputs(batch), current_of(batch), Policy()
        loss = KTOLoss(0.3, 1.3, 0.7)
        ratios = [
            sum(a) - sum(b)
            for a, b in zip(
                rows_of(policy.logprobs(inputs["mismatched"]), inputs["mismatched"].loss_mask),
                rows_of(inputs["mismatched_ref"].ref_logprobs.values, inputs["mismatched"].loss_mask),
                strict=True,
            )
        ]
        point = sum(ratios) / 6
        assert point > 0.01  # the case is not held at 0
        expected = []
        for own, ref, liked in zip(
            rows_of(current.logprobs.detach(), batch.loss_mask),
            rows_of(inputs["ref_logprobs"].ref_logprobs.values, batch.loss_mask),
            batch.desirable.tolist(),
            strict=True,
        ):
            r = sum(own) - sum(ref)
            weight, x = (1.3, 0.3 * (r - point)) if liked else (0.7, 0.3 * (point - r))
            expected.append(weight * (1 - 1 / (1 + math.exp(-x))))
        constants = loss.prepare(policy, **inputs)
        found = sums_of(loss, current, constants, **inputs)
        assert mean(found) == pytest.approx(sum(expected) / 6, rel=1e-5)
        assert mean(found, "reference_point") == pytest.approx(point, rel=1e-5)
        assert found["loss"][1] == 6 == loss.count(**inputs)

    def test_metrics_of_either_kind(self) -> None:
        batch = feedback()
        inputs, current = self.inputs(batch), current_of(batch)
        found = sums_of(KTOLoss(0.3), current, torch.tensor(0.5), **inputs)
        rewards = [
            0.3 * (sum(a) - sum(b))
            for a, b in zip(
                rows_of(current.logprobs.detach(), batch.loss_mask),
                rows_of(inputs["ref_logprobs"].ref_logprobs.values, batch.loss_mask),
                strict=True,
            )
        ]
        liked = [bool(x) for x in batch.desirable.tolist()]
        for name, wanted in (("desirable", True), ("undesirable", False)):
            values = [r for r, x in zip(rewards, liked, strict=True) if x == wanted]
            assert mean(found, f"{name}_reward") == pytest.approx(sum(values) / 3, rel=1e-5)
            assert found[f"{name}_logprob"][1] == 3
        right = [(r > 0.15) if x else (r < 0.15) for r, x in zip(rewards, liked, strict=True)]
        assert mean(found, "accuracy") == pytest.approx(sum(right) / 6)

    def test_the_policy_is_asked_once_and_about_the_mismatched(self) -> None:
        policy = Policy()
        KTOLoss().prepare(policy, **self.inputs(feedback()))
        assert policy.asked == 1

    def test_one_row_has_no_reference_point(self) -> None:
        """Without a mismatched completion z₀ is 0, whatever the row's own reward is."""
        inputs = self.inputs(feedback(1))
        assert KTOLoss().prepare(Policy(), **inputs).item() == 0


#: Every loss with its inputs, the rows of each unit that stays together, and its constants.
def everything() -> list[tuple[str, Loss, dict[str, Any], list[list[int]], Any]]:
    pairs, rows = preferences(), feedback()
    kto = TestKTO().inputs(rows)
    two = [[2 * i, 2 * i + 1] for i in range(4)]
    out: list[tuple[str, Loss, dict[str, Any], list[list[int]], Any]] = []
    for kind in (DPOLoss, SimPOLoss, ORPOLoss, BradleyTerryLoss, KTOLoss):
        for settings in kind.examples:
            loss: Any = kind(**settings)
            inputs: dict[str, Any] = {"preferences": pairs}
            if kind is DPOLoss and not loss.reference_free:
                inputs["ref_logprobs"] = ref_of(pairs)
            if kind is KTOLoss:
                inputs = kto
            constants = loss.prepare(Policy(), **inputs)
            units = [[i] for i in range(6)] if kind is KTOLoss else two
            out.append((f"{kind.__name__} {settings or ''}", loss, inputs, units, constants))
    return out


CASES = everything()


def objective(
    loss: Loss, inputs: dict[str, Any], constants: Any, batches: Sequence[Sequence[int]], junk: float = -1.0
) -> tuple[float, dict[tuple[int, ...], list[float]]]:
    """The mean over micro-batches of these rows, and the gradient of each row's tokens (or score) by its id."""
    whole = LossTerm(loss, inputs)
    everything = current_of(whole.sequences, junk=junk)
    count = loss.count(**inputs)
    assert count is not None
    total = torch.zeros(())
    for rows in batches:
        term = whole.select(rows)
        tokens = everything.loss_mask.with_values(torch.arange(len(everything.logprobs))).select(torch.tensor(rows))
        part = Current(
            term.sequences.loss_mask,
            logprobs=everything.logprobs[tokens.values],
            scores=everything.scores[torch.tensor(rows)],
        )
        total = total + sums_of(loss, part, constants, **term.inputs)["loss"][0]
    value = total / count
    grads = torch.autograd.grad(value, (everything.logprobs, everything.scores), allow_unused=True)
    by_row: list[list[float]] = [[] for _ in range(whole.num_rows)]
    if grads[0] is not None:
        by_row = everything.loss_mask.with_values(grads[0]).to_lists()
    if grads[1] is not None:
        by_row = [[g] for g in grads[1].tolist()]
    ids: Any = whole.sequences.row_ids
    return value.item(), dict(zip(map(tuple, ids.tolist()), by_row, strict=True))


def assert_same(found: Any, expected: Any, rel: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel)
    for key, row in expected[1].items():
        assert found[1][key] == pytest.approx(row, rel=rel, abs=1e-8), key


@pytest.mark.parametrize(("name", "loss", "inputs", "units", "constants"), CASES, ids=[c[0] for c in CASES])
class TestEveryLoss:
    def test_micro_batches_and_the_order_of_rows(
        self, name: str, loss: Loss, inputs: dict[str, Any], units: list[list[int]], constants: Any
    ) -> None:
        whole = objective(loss, inputs, constants, [[r for unit in units for r in unit]])
        assert any(any(row) for row in whole[1].values())
        assert_same(objective(loss, inputs, constants, units), whole)
        backwards = [[*reversed(unit)] for unit in reversed(units)]
        two = [[*backwards[0], *backwards[2]], [row for unit in (backwards[1], *backwards[3:]) for row in unit]]
        assert_same(objective(loss, inputs, constants, two), whole)

    @pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf])
    def test_what_stands_under_the_mask(
        self, name: str, loss: Loss, inputs: dict[str, Any], units: list[list[int]], constants: Any, junk: float
    ) -> None:
        rows = [[r for unit in units for r in unit]]
        clean, dirty = (objective(loss, inputs, constants, rows, junk=j) for j in (-1.0, junk))
        assert dirty[0] == clean[0] and dirty[1] == clean[1]
        mask = LossTerm(loss, inputs).sequences.loss_mask
        if "scores" not in loss.requires:
            for grads, keep in zip(dirty[1].values(), mask.to_lists(), strict=True):
                assert all(g == 0 for g, kept in zip(grads, keep, strict=True) if not kept)

    def test_nothing(
        self, name: str, loss: Loss, inputs: dict[str, Any], units: list[list[int]], constants: Any
    ) -> None:
        none = LossTerm(loss, inputs).select([])
        found = sums_of(loss, current_of(none.sequences), constants, **none.inputs)
        assert all(total.item() == 0 and count == 0 for total, count in found.values())

    def test_settings_are_fine(
        self, name: str, loss: Loss, inputs: dict[str, Any], units: list[list[int]], constants: Any
    ) -> None:
        assert not list(loss.problems())


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (DPOLoss(0.0), "beta is 0.0; expected more than 0"),
        (DPOLoss(loss="exotic"), "loss is 'exotic'; expected one of sigmoid, ipo, hinge, robust"),  # type: ignore[arg-type]
        (DPOLoss(label_smoothing=0.5), "label_smoothing is 0.5"),
        (DPOLoss(math.nan), "beta is nan"),
        (SimPOLoss(gamma=-1.0), "gamma is -1.0; expected at least 0"),
        (ORPOLoss(-0.1), "lam is -0.1"),
        (BradleyTerryLoss(math.inf), "margin is inf"),
        (BradleyTerryLoss(center_coef=-1.0), "center_coef is -1.0"),
        (KTOLoss(undesirable_weight=-1.0), "undesirable_weight is -1.0"),
    ],
)
def test_settings_that_cannot_work(loss: Loss, problem: str) -> None:
    assert any(problem in p for p in loss.problems())


# -- on a real engine ----------------------------------------------------------------------------------------------------

FAST = AdamW(learning_rate=1e-2, weight_decay=0.0)


@pytest.fixture
def step():
    """The engines of one test, and a step for nodes to run in."""
    with use_bindings(Bindings(open_engine)), use_step(StepContext(label="here")):
        yield


@pytest.mark.usefixtures("step")
class TestTraining:
    def test_dpo_starts_at_log_2_and_learns(self) -> None:
        actor, batch = tiny_actor(), preferences(observations=False)
        reference = ReferenceLogprobs(actor.frozen())(batch)
        updater = Updater(actor, optimizer=FAST)
        metrics = [updater(DPOLoss(0.5)(batch, reference)).metrics for _ in range(4)]
        assert metrics[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert metrics[0]["margin"] == metrics[0]["accuracy"] == 0
        assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"] and metrics[-1]["accuracy"] == 1

    def test_kto_asks_the_policy_at_each_optimiser_step(self) -> None:
        actor, batch = tiny_actor(), feedback()
        reference, mismatched = ReferenceLogprobs(actor.frozen()), MismatchedCompletions()(batch)
        loss = KTOLoss(0.5)(batch, reference(batch), mismatched=mismatched, mismatched_ref=reference(mismatched))
        first, *_, last = (Updater(actor, optimizer=FAST)(loss).metrics for _ in range(6))
        assert first["loss"] == pytest.approx(0.5) and first["reference_point"] == 0  # the policy is the reference
        assert last["loss"] < 0.45 and last["desirable_reward"] > 0 > last["undesirable_reward"]
        twice = Updater(actor, num_minibatches=2, optimizer=FAST)(loss)
        assert twice.num_optimizer_steps == 2 and math.isfinite(twice.metrics["loss"])

    def test_losses_without_a_reference_and_several_terms(self) -> None:
        actor, batch = tiny_actor(), preferences(observations=False)
        updater = Updater(actor, optimizer=FAST)
        terms = (SimPOLoss()(batch), ORPOLoss()(batch), DPOLoss(reference_free=True, weight=0.1)(batch))
        first, *_, last = (updater(*terms).metrics for _ in range(4))
        for name in ("sim_po_loss/loss", "orpo_loss/loss", "dpo_loss/loss"):
            assert last[name] < first[name], first

    def test_a_reward_model_starts_at_log_2_and_learns(self) -> None:
        batch = preferences(observations=False)
        model = RewardModel.from_policy(tiny_actor())
        updater = Updater(model, optimizer=FAST)
        first, *_, last = (updater(BradleyTerryLoss()(batch)).metrics for _ in range(8))
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)  # a new head is 0
        assert last["loss"] < 0.5 * first["loss"] and last["accuracy"] == 1

    @pytest.mark.parametrize("loss", [DPOLoss(reference_free=True), SimPOLoss(), ORPOLoss()])
    def test_no_pair_updates_nothing(self, loss: Any) -> None:
        stats = Updater(tiny_actor(), optimizer=FAST)(loss(preferences().select([])))
        assert stats.num_optimizer_steps == 0 and stats.num_skipped_steps == 0

    def test_no_feedback_updates_nothing(self) -> None:
        actor, batch = tiny_actor(), feedback().select([])
        mismatched = MismatchedCompletions()(batch)
        reference = ReferenceLogprobs(actor.frozen())
        loss = KTOLoss()(batch, reference(batch), mismatched=mismatched, mismatched_ref=reference(mismatched))
        assert Updater(actor)(loss).num_optimizer_steps == 0

    def test_a_supervised_term_beside(self) -> None:
        from flowrl.batches import Demonstrations

        actor, batch = tiny_actor(), preferences(observations=False)
        liked = batch.select(batch.chosen.nonzero().flatten())
        demos = Demonstrations(liked.prompt_id, liked.sample_id, liked.tokens, liked.spans)
        stats = Updater(actor)(DPOLoss(reference_free=True)(batch), SFTLoss(weight=0.1)(demos))
        assert math.isfinite(stats.metrics["loss"])

    def test_half_a_pair_is_refused(self) -> None:
        with pytest.raises(FlowError, match="Pair 100 is not a pair"):
            Updater(tiny_actor())(SimPOLoss()(preferences().select([0, 2, 3])))

    def test_two_chosen_are_refused(self) -> None:
        batch = preferences()
        both = replace(batch, chosen=torch.ones_like(batch.chosen))
        with pytest.raises(FlowError, match="2 of them chosen"):
            Updater(tiny_actor())(SimPOLoss()(both))
