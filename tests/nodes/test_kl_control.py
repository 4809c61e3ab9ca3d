from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    KLPenalty,
    PolicyLogprobs,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Rollouts,
    State,
    TrainStats,
    report,
    source,
)
from flowrl.batches import OldLogprobs, RefLogprobs
from flowrl.context import Bindings, use_bindings
from flowrl.errors import FlowError
from flowrl.nodes import rewards_like
from flowrl.nodes.kl_control import AdaptiveKL, FixedKL, coefficient
from tests.flows import FAST, SAMPLING, prompts, share_of_vowels
from tests.nodes.test_advantage import ORIGIN
from tests.runs import checkpoint_weights, quick_run, rows, training
from tests.tiny import recorded_rollouts, tiny_actor


def no_engine(model: Any, bindings: Bindings) -> Any:
    raise AssertionError("no engine is needed here")


@pytest.fixture(autouse=True)
def bindings():
    with use_bindings(Bindings(no_engine)) as opened:
        yield opened


def measured(gap: float, rollouts: Rollouts) -> tuple[Rollouts, OldLogprobs, RefLogprobs]:
    """Rollouts whose policy is ``gap`` nats a token from the reference; NaN where the policy wrote nothing."""
    mask = rollouts.loss_mask
    ids = rollouts.prompt_id, rollouts.sample_id

    def column(value: float) -> Any:
        return mask.with_values(torch.where(mask.values.bool(), value, torch.nan))

    origin = replace(ORIGIN, policy_version=3)
    return rollouts, OldLogprobs(*ids, column(-1.0), origin), RefLogprobs(*ids, column(-1.0 - gap), origin)


ROLLOUTS = recorded_rollouts(2, 2, response_lengths=(5, 0, 4, 1), observations=True)  # 3, 0, 3 and 1 policy tokens


class TestAdaptiveKL:
    def test_one_update(self) -> None:
        coef = State("kl_coef", 0.2)
        stats = AdaptiveKL(coef, target=0.4, horizon=100.0)(*measured(0.42, ROLLOUTS))
        # error = 0.05 over 4 responses.
        assert coef.value == pytest.approx(0.2 * (1 + 0.05 * 4 / 100), rel=1e-6)
        assert isinstance(stats, TrainStats)
        assert (stats.policy_version, stats.num_optimizer_steps, stats.num_skipped_steps) == (3, 1, 0)
        assert stats.metrics == {"kl": pytest.approx(0.42, rel=1e-6), "kl_coef": 0.2, "kl_coef_next": coef.value}

    def test_per_sequence(self) -> None:
        coef = State("kl_coef", 0.2)
        stats = AdaptiveKL(coef, target=6.0, horizon=100.0, per="sequence")(*measured(2.0, ROLLOUTS))
        assert stats.metrics["kl"] == pytest.approx(2.0 * 7 / 4, rel=1e-6)  # the response without a token counts as 0
        assert coef.value == pytest.approx(0.2 * (1 - 0.2 * 4 / 100), rel=1e-12)

    def test_other_estimators(self) -> None:
        coef = State("kl_coef", 1.0)
        stats = AdaptiveKL(coef, target=1.0, horizon=100.0, estimator="k2")(*measured(-2.0, ROLLOUTS))
        assert stats.metrics["kl"] == pytest.approx(2.0, rel=1e-6) and coef.value == pytest.approx(1.008, rel=1e-12)

    @pytest.mark.parametrize("rollouts", [ROLLOUTS.select([1]), ROLLOUTS.select([])], ids=["no token", "no row"])
    def test_without_a_policy_token_the_coefficient_stays(self, rollouts: Rollouts) -> None:
        coef = State("kl_coef", 0.2)
        stats = AdaptiveKL(coef, target=0.1, horizon=100.0)(*measured(9.0, rollouts))
        assert coef.value == 0.2
        assert stats.metrics == {"kl_coef": 0.2, "kl_coef_next": 0.2} and stats.num_optimizer_steps == 0

    def test_a_kl_of_nan_changes_nothing(self) -> None:
        coef = State("kl_coef", 0.2)
        stats = AdaptiveKL(coef, target=0.1, horizon=100.0)(*measured(math.nan, ROLLOUTS))
        assert coef.value == 0.2 and math.isnan(stats.metrics["kl"])

    def test_a_horizon_in_updates_is_refused(self) -> None:
        with pytest.raises(FlowError, match="it counts responses, not updates"):
            AdaptiveKL(State("kl_coef", 0.2), target=0.1, horizon=0.5)(*measured(0.0, ROLLOUTS))

    def test_settings(self) -> None:
        assert list(AdaptiveKL(State("c", 0.1), target=0.1, horizon=10.0).problems()) == []
        wrong = AdaptiveKL(State("c", 0.0), target=0.0, horizon=math.inf, estimator="k9", per="row")  # type: ignore[arg-type]
        assert len(list(wrong.problems())) == 5
        assert "expected a State" in str(list(AdaptiveKL(0.1, target=1.0, horizon=1.0).problems()))  # type: ignore[arg-type]
        assert "expected a finite number" in str(list(AdaptiveKL(State("c", None), target=1.0, horizon=1.0).problems()))


def test_fixed_kl_measures_and_changes_nothing() -> None:
    coef = State("kl_coef", 0.2)
    for given in (coef, 0.2):
        stats = FixedKL(given)(*measured(0.5, ROLLOUTS))
        assert stats.metrics == {"kl": 0.5, "kl_coef": 0.2, "kl_coef_next": 0.2}
    assert coef.value == 0.2
    assert FixedKL(coef).writes() == () and list(FixedKL(coef).problems()) == []
    assert len(list(FixedKL(-1.0, estimator="?").problems())) == 2


def test_a_penalty_reads_the_state_when_it_runs() -> None:
    coef = State("kl_coef", 0.5)
    node = KLPenalty(coef)
    rewards = rewards_like(ROLLOUTS, score=[0.0] * 4)

    def penalties() -> list[list[float]]:
        return node(ROLLOUTS, rewards, *measured(2.0, ROLLOUTS)[1:]).token_components["kl"].to_lists()

    assert penalties() == [[-1.0, -1.0, 0.0, 0.0, -1.0], [], [-1.0, -1.0, 0.0, -1.0], [-1.0]]
    coef.set(0.25)
    assert penalties()[3] == [-0.5]
    assert coefficient(coef) == 0.25 and coefficient(0.5) == 0.5
    assert list(node.problems()) == []
    for bad in (State("c", -1.0), State("c", None), math.nan, True):
        assert len(list(KLPenalty(bad).problems())) == 1


# -- in a flow -------------------------------------------------------------------------------------------------------


@flowrl.node
def looks(rollouts: Rollouts, coef: State | None = None) -> Rollouts:
    """A reader that says what it saw."""
    report("seen", float(coef.value) if coef is not None else math.nan)
    return rollouts


def controlled(target: float = 1e-4) -> RLFlow:
    """GRPO whose loss and rewards are penalised by one coefficient. Readers of it are recorded after its writer."""
    actor, coef = tiny_actor(), State("kl_coef", 0.05)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    old, ref = PolicyLogprobs(actor)(rollouts), ReferenceLogprobs(actor.frozen())(rollouts)
    control = AdaptiveKL(coef, target=target, horizon=100.0, label="control")(rollouts, old, ref)
    scores = FunctionReward(share_of_vowels, isolate=False)(rollouts)
    rewards = KLPenalty(coef, label="penalty")(rollouts, scores, old, ref)
    seen = looks.options(label="looks")(rollouts, coef=coef)
    advantages = GroupAdvantage()(seen, rewards)
    update = GRPOUpdater(actor, optimizer=FAST, kl_coef=coef, label="update")(rollouts, advantages, old, ref)
    return RLFlow.from_outputs(control, update)


def test_the_writer_runs_after_every_reader() -> None:
    flow = controlled()
    order = [flow.label(call) for call in flow.execution_order()]
    assert order[-1] == "control"
    readers = {edge.reader for edge in flow.weight_edges if edge.model == "kl_coef"}
    assert readers == {"penalty", "looks", "update"}
    assert {edge.writer for edge in flow.weight_edges if edge.model == "kl_coef"} == {"control"}
    flow.check().raise_if_broken()


def test_readers_of_an_iteration_see_one_value_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    in_loss: list[float] = []
    from flowrl.nodes.loss import Loss

    bind = Loss.term

    def spied(self: Any, **inputs: Any) -> Any:
        term = bind(self, **inputs)
        in_loss.append(term.loss.kl_coef)  # type: ignore[attr-defined]
        return term

    monkeypatch.setattr(Loss, "term", spied)
    whole = quick_run(controlled(), 4, tmp_path / "whole", prompts())
    steps = training(whole)
    used = [row["penalty/kl_coef"] for row in steps]
    assert used == [row["looks/seen"] for row in steps] == [row["kl_coef/kl_coef"] for row in steps] == in_loss
    assert used[1:] == [row["kl_coef/kl_coef_next"] for row in steps[:-1]]
    assert used[0] == 0.05 and len(set(used)) == 4
    # At step 1 the policy is the reference; later it is further away than the target.
    assert steps[0]["kl_coef/kl"] == 0.0 and used[1] == pytest.approx(0.05 * (1 - 0.2 * 6 / 100), rel=1e-12)
    for row, before, after in zip(steps[1:], used[1:], used[2:], strict=False):
        error = min(0.2, max(-0.2, row["kl_coef/kl"] / 1e-4 - 1))
        assert after == pytest.approx(before * (1 + error * 6 / 100), rel=1e-12)
    assert all("empty_updates" not in row for row in steps)

    quick_run(controlled(), 2, tmp_path / "parts", prompts())
    parts = quick_run(controlled(), 4, tmp_path / "parts", prompts(), resume=True)
    assert rows(parts) == rows(whole)
    assert checkpoint_weights(tmp_path / "parts", 4) == checkpoint_weights(tmp_path / "whole", 4)
