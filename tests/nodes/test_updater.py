"""Updater: how rows are dealt to optimiser steps, what it counts and reports. A fake engine records the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    AdamW,
    Demonstrations,
    Model,
    PPOLoss,
    Preferences,
    SFTLoss,
    TrainStats,
    Updater,
    ValueHead,
    ValueLoss,
)
from flowrl.batches import Values
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.nodes.loss import LossTerm, TermRows
from flowrl.runtime.engines.base import StepResult
from tests.nodes.test_loss import advantages_of, entropic, old_of, reinforce
from tests.tiny import recorded_rollouts


class FakeEngine:
    """Writes down what it is asked to train on; "metric" is the sum of sample ids over their count."""

    def __init__(self, skip: Sequence[int] = ()) -> None:
        self.policy_version, self.skip = 0, skip
        self.steps: list[list[TermRows]] = []
        self.norms: list[float | None] = []

    def train_step(self, terms: Sequence[TermRows], optimizer: AdamW, *, max_grad_norm: float | None) -> StepResult:
        number = len(self.steps)
        self.steps.append(list(terms))
        self.norms.append(max_grad_norm)
        if number in self.skip:
            return StepResult({}, float("nan"), 0.1, skipped=True, nonfinite_rows=((number, 0),))
        rows = terms[0].term.sequences
        return StepResult({"metric": (float(rows.sample_id.sum()), float(rows.num_rows))}, float(number), 0.5 + number)

    def complete_version(self) -> None:
        self.policy_version += 1

    def rows(self, term: int = 0) -> list[list[tuple[int, ...]]]:
        return [
            list(map(tuple, step[term].term.sequences.row_ids.tolist()))  # type: ignore[union-attr]
            for step in self.steps
        ]


ACTOR = Model("m")


def train(
    updater: Updater, *terms: LossTerm, engine: FakeEngine | None = None, **where: Any
) -> tuple[TrainStats, FakeEngine]:
    engine = engine or FakeEngine()
    with use_bindings(Bindings(lambda model, bindings: engine)), use_step(StepContext(**where)):  # type: ignore[arg-type,return-value]
        return updater(*terms), engine


def term(rows: int = 12, group_size: int = 3) -> LossTerm:
    rollouts = recorded_rollouts(rows // group_size, group_size)
    return reinforce(rollouts, advantages_of(rollouts))


class TestMinibatches:
    def test_one_minibatch_takes_the_rows_as_they_come(self) -> None:
        given = term()
        _, engine = train(Updater(ACTOR), given)
        assert engine.rows() == [list(map(tuple, given.sequences.row_ids.tolist()))]  # type: ignore[union-attr]

    @pytest.mark.parametrize("parts", [2, 3, 5, 12, 20])
    def test_every_epoch_covers_each_row_once(self, parts: int) -> None:
        given = term()
        _, engine = train(Updater(ACTOR, epochs=3, num_minibatches=parts), given)
        steps = engine.rows()
        per_epoch = min(parts, 12)
        assert len(steps) == 3 * per_epoch  # an empty minibatch is no step
        everything = sorted(map(tuple, given.sequences.row_ids.tolist()))  # type: ignore[union-attr]
        for epoch in range(3):
            rows = [row for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for row in step]
            assert sorted(rows) == everything
        sizes = [len(s) for s in steps]
        assert max(sizes) - min(sizes) <= 1

    def test_coupled_rows_stay_together(self) -> None:
        rollouts = recorded_rollouts(6, 3)
        _, engine = train(Updater(ACTOR, num_minibatches=4), entropic(rollouts, coef=1.0))
        for step in engine.rows():
            prompts = [p for p, _ in step]
            assert all(prompts.count(p) == 3 for p in prompts)

    def test_pairs_stay_together(self) -> None:
        class PairLoss(SFTLoss):
            couples = "pair"

            def __call__(self, preferences: Preferences) -> LossTerm:
                return self.term(preferences=preferences)

        rollouts = recorded_rollouts(4, 2)
        preferences = Preferences(
            rollouts.prompt_id,
            rollouts.sample_id,
            rollouts.tokens,
            rollouts.spans,
            pair_id=torch.tensor([9, 7, 7, 9, 3, 4, 4, 3]),
            chosen=torch.tensor([1, 0] * 4, dtype=torch.uint8),
        )
        _, engine = train(Updater(ACTOR, num_minibatches=2), PairLoss()(preferences))
        for step in engine.steps:
            pairs = step[0].term.inputs["preferences"].pair_id.tolist()
            assert all(pairs.count(p) == 2 for p in pairs)

    def test_the_shuffle_depends_on_counters_only(self) -> None:
        def order(label: str | None = None, **where: Any) -> list[Any]:
            torch.manual_seed(len(str(where)))
            return train(Updater(ACTOR, epochs=2, num_minibatches=3, label=label), term(), **where)[1].rows()

        same = order(seed=1, iteration=4)
        assert same == order(seed=1, iteration=4)
        assert same[:3] != same[3:]  # another epoch
        assert same != order(seed=2, iteration=4) and same != order(seed=1, iteration=5)
        assert same != order("other", seed=1, iteration=4)

    def test_terms_on_the_same_rows_are_dealt_alike(self) -> None:
        rollouts = recorded_rollouts(4, 3)
        advantages = advantages_of(rollouts)
        values = Values(rollouts.prompt_id, rollouts.sample_id, advantages.returns)
        terms = (
            PPOLoss()(rollouts, advantages, old_of(rollouts)),
            ValueLoss(ValueHead(ACTOR), weight=0.5)(rollouts, values, advantages),
        )
        _, engine = train(Updater(ACTOR, num_minibatches=3), *terms)
        assert engine.rows(0) == engine.rows(1) and len(engine.steps) == 3

    def test_a_term_with_fewer_rows_is_left_out_of_some_steps(self) -> None:
        rollouts = recorded_rollouts(1, 1)
        demonstrations = Demonstrations(rollouts.prompt_id, rollouts.sample_id, rollouts.tokens, rollouts.spans)
        _, engine = train(Updater(ACTOR, num_minibatches=3), term(), SFTLoss()(demonstrations))
        assert sorted(len(step) for step in engine.steps) == [1, 1, 2]

    def test_each_step_carries_the_count_of_its_own_rows(self) -> None:
        _, engine = train(Updater(ACTOR, num_minibatches=3), term())
        for (rows,) in engine.steps:
            assert rows.count == rows.term.loss.count(**rows.term.inputs) and rows.constants is None


class TestStats:
    def test_metrics_are_weighted_by_counts(self) -> None:
        stats, _ = train(Updater(ACTOR, num_minibatches=5), term())
        assert stats.metrics["metric"] == pytest.approx((0 + 1 + 2) * 4 / 12)
        assert stats.metrics["grad_norm"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 5)
        assert stats.metrics["learning_rate"] == 4.5
        assert (stats.num_optimizer_steps, stats.num_skipped_steps) == (5, 0)

    def test_the_version_grows_by_one_however_many_steps(self) -> None:
        engine = FakeEngine()
        updater = Updater(ACTOR, epochs=2, num_minibatches=3)
        versions = [train(updater, term(), engine=engine)[0].policy_version for _ in range(3)]
        assert versions == [1, 2, 3]

    def test_skipped_steps_are_counted_and_their_rows_reported(self) -> None:
        blamed: list[tuple[int, int]] = []
        stats, _ = train(
            Updater(ACTOR, num_minibatches=4), term(), engine=FakeEngine(skip=(1, 2)), report_nonfinite=blamed.extend
        )
        assert (stats.num_optimizer_steps, stats.num_skipped_steps) == (4, 2)
        assert blamed == [(1, 0), (2, 0)]
        assert stats.metrics["grad_norm"] == pytest.approx((0 + 3) / 2)

    def test_nothing_but_skipped_steps(self) -> None:
        stats, _ = train(Updater(ACTOR), term(), engine=FakeEngine(skip=(0,)))
        assert stats.metrics == {"learning_rate": 0.1} and stats.num_skipped_steps == 1

    @pytest.mark.parametrize("parts", [1, 3])
    def test_no_rows_no_steps_one_version(self, parts: int) -> None:
        stats, engine = train(Updater(ACTOR, epochs=2, num_minibatches=parts), term().select([]))
        assert engine.steps == [] and stats.policy_version == 1
        assert stats == TrainStats({}, 1, 0, 0)

    def test_max_grad_norm_is_handed_on(self) -> None:
        assert train(Updater(ACTOR, max_grad_norm=None), term())[1].norms == [None]


class TestSettings:
    def test_impossible_settings(self) -> None:
        assert list(Updater(ACTOR).problems()) == []
        broken = Updater(None, epochs=0, num_minibatches=0, max_grad_norm=0.0, optimizer=AdamW(-1.0))
        assert [p.split(" ")[0] for p in broken.problems()] == [
            "model",
            "epochs",
            "num_minibatches",
            "max_grad_norm",
            "learning_rate",
        ]

    def test_learning_rate_schedules(self) -> None:
        warm = AdamW(1.0, warmup_steps=4)
        assert [warm.learning_rate_at(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        linear = AdamW(1.0, schedule="linear", total_steps=10, warmup_steps=2, final_fraction=0.1)
        assert linear.learning_rate_at(2) == 1.0
        assert linear.learning_rate_at(6) == pytest.approx(0.55)
        assert linear.learning_rate_at(10) == linear.learning_rate_at(99) == pytest.approx(0.1)
        cosine = AdamW(1.0, schedule="cosine", total_steps=10)
        assert cosine.learning_rate_at(5) == pytest.approx(0.5) and cosine.learning_rate_at(10) == pytest.approx(0.0)

    def test_schedule_problems(self) -> None:
        assert "without total_steps" in AdamW(schedule="cosine").problems()[0]
        assert "schedule is 'step'" in AdamW(schedule="step").problems()[0]  # type: ignore[arg-type]
        assert "betas" in AdamW(betas=(0.9, 1.0)).problems()[0]

    def test_it_is_the_writer(self) -> None:
        assert Updater(ACTOR).writes() == (ACTOR,) and Updater().writes() == ()
        assert flowrl.PPOUpdater(ACTOR).writes() == (ACTOR,)
