from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import (
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    RLFlow,
    Rollout,
    State,
    source,
)
from flowrl.batches import Advantages, FinishReason, Rewards, Rollouts
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.errors import BatchError
from flowrl.nodes import DropUniformGroups, WeightedSum, rewards_like
from flowrl.nodes.reward_shaping import (
    ClipReward,
    DropTruncated,
    GroupLengthReward,
    LengthPenalty,
    MaskTruncated,
    OverlongPenalty,
    RunningNormalization,
)
from tests.flows import FAST, SAMPLING, prompts, reward, share_of_vowels
from tests.runs import checkpoint_weights, quick_run, rows, training
from tests.tiny import recorded_rollouts, tiny_actor

EMPTY: list[int] = []


def no_engine(model: Any, bindings: Bindings) -> Any:
    raise AssertionError("no engine is needed here")


@pytest.fixture(autouse=True)
def bindings():
    with use_bindings(Bindings(no_engine)) as opened:
        yield opened


def reported(node: Any, *inputs: Any) -> tuple[Any, dict[str, float]]:
    """The result of a call, and what it reported."""
    said: dict[str, float] = {}
    with use_step(StepContext(report=said.__setitem__)):
        return node(*inputs), said


def answers(*lengths: int, group_size: int = 1, cut: tuple[int, ...] = (), **options: Any) -> Rollouts:
    """Responses of these lengths; those of the rows ``cut`` were cut at the length limit."""
    rollouts = recorded_rollouts(len(lengths) // group_size, group_size, response_lengths=lengths or (1,), **options)
    reason = [FinishReason.LENGTH if i in cut else FinishReason.STOP for i in range(len(lengths))]
    return replace(rollouts, finish_reason=torch.tensor(reason, dtype=torch.uint8))


def with_invalid(rewards: Rewards, *places: int) -> Rewards:
    """Rows that could not be judged: they hold NaN."""
    bad = torch.zeros(rewards.num_rows, dtype=torch.bool)
    bad[list(places)] = True
    return replace(
        rewards,
        components={n: torch.where(bad, torch.nan, c) for n, c in rewards.components.items()},
        valid=(rewards.valid.bool() & ~bad).to(torch.uint8),
        reasons=tuple("timed out" if b else r for b, r in zip(bad.tolist(), rewards.reasons, strict=True)),
    )


def totals(rewards: Rewards) -> list[float | None]:
    """Totals; None for invalid rows, which are NaN."""
    assert bool(rewards.totals.isnan().eq(rewards.valid == 0).all())
    return [t if v else None for t, v in zip(rewards.totals.tolist(), rewards.valid.tolist(), strict=True)]


# -- length ----------------------------------------------------------------------------------------------------------


class TestOverlongPenalty:
    def test_policy_tokens_count(self) -> None:
        # 8 tokens after the prompt, of which 4 + 1 are the policy's: within 8 − 3, so free. Cut to 6: 3 + 1 of them.
        rollouts = answers(8, 6, 4, 0, observations=True)
        assert rollouts.loss_mask.with_values(rollouts.loss_mask.values.long()).sum_rows().tolist() == [5, 4, 3, 0]
        result, said = reported(OverlongPenalty(max_length=5, buffer=2, coef=0.5), rollouts)
        assert result.components["overlong"].tolist() == [-0.5, -0.25, 0.0, 0.0]
        assert result.valid.tolist() == [1, 1, 1, 1] and said == {"penalized_rows": 2}

    def test_a_truncated_response_gets_all_of_it(self) -> None:
        """The sampling limit is ``max_length``."""
        rollouts = answers(6, 3, cut=(0,))
        assert OverlongPenalty(SAMPLING.max_new_tokens, 2)(rollouts).totals.tolist() == [-1.0, 0.0]

    def test_no_rows(self) -> None:
        empty = OverlongPenalty(5, 2)(answers(4).select(EMPTY))
        assert empty.num_rows == 0 and list(empty.components) == ["overlong"]

    def test_settings(self) -> None:
        assert list(OverlongPenalty(10, 10).problems()) == []
        assert len(list(OverlongPenalty(0, 1, -1.0).problems())) == 3
        assert list(OverlongPenalty(10, 11).problems()) == ["buffer is 11; expected 0 to max_length, 10"]

    def test_in_the_short_form(self) -> None:
        flow = RLFlow(
            rollout=Rollout(tiny_actor(), group_size=2, sampling=SAMPLING),
            reward=reward(),
            reward_models=[OverlongPenalty(6, 2), MaskTruncated()],
            advantage_estimator=GroupAdvantage(),
            policy_updater=GRPOUpdater(optimizer=FAST),
            batch_size=2,
        )
        flow.check().raise_if_broken()
        assert {"OverlongPenalty#0", "MaskTruncated#0", "WeightedSum#0"} <= set(flow.labels)


class TestLengthPenalty:
    def test_policy_tokens_beyond_the_free_ones(self) -> None:
        rollouts = answers(8, 6, 3, 0, observations=True)
        result = LengthPenalty(0.5, free_tokens=3)(rollouts)
        assert result.components["length_penalty"].tolist() == [-1.0, -0.5, 0.0, 0.0]
        assert LengthPenalty(0.5)(rollouts.select(EMPTY)).num_rows == 0

    def test_settings(self) -> None:
        assert list(LengthPenalty(0.0).problems()) == []
        assert len(list(LengthPenalty(math.nan, free_tokens=-1).problems())) == 2


class TestGroupLengthReward:
    # Two groups of three: lengths 1, 5, 3 and 4, 4, 4.
    rollouts = answers(1, 5, 3, 4, 4, 4, group_size=3)

    def test_shorter_among_the_correct(self) -> None:
        given = rewards_like(self.rollouts, correct=[1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
        result = GroupLengthReward(coef=2.0)(self.rollouts, given)
        # λ: 1/2, −1/2, 0 in the first group; the second is of one length.
        assert result.components["group_length"].tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
        assert result.components["correct"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]

    def test_being_short_and_wrong_is_worth_nothing(self) -> None:
        given = rewards_like(self.rollouts, correct=[0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
        result = GroupLengthReward()(self.rollouts, given)
        assert result.components["group_length"].tolist() == [0.0, -0.5, 0.0, 0.0, 0.0, 0.0]

    def test_a_component_says_what_is_correct(self) -> None:
        given = rewards_like(self.rollouts, correct=[1.0] * 6, style=[-9.0] * 6)
        bonus = GroupLengthReward(component="correct")(self.rollouts, given).components["group_length"]
        assert bonus.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
        assert GroupLengthReward()(self.rollouts, given).components["group_length"].tolist()[0] == 0.0
        with pytest.raises(BatchError, match="did you mean 'correct'"):
            GroupLengthReward(component="corect")(self.rollouts, given)

    def test_invalid_rows_are_not_compared(self) -> None:
        given = with_invalid(rewards_like(self.rollouts, correct=[1.0] * 6), 1, 3, 4, 5)
        result = GroupLengthReward()(self.rollouts, given)
        # Of the first group lengths 1 and 3 are left.
        assert totals(result) == [1.5, None, 0.5, None, None, None]
        assert result.components["group_length"].tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]

    def test_its_name_gives_way(self) -> None:
        once = GroupLengthReward()(self.rollouts, rewards_like(self.rollouts, correct=[1.0] * 6))
        assert list(GroupLengthReward()(self.rollouts, once).components) == [
            "correct",
            "group_length",
            "group_length_2",
        ]

    def test_no_rows_and_settings(self) -> None:
        none = self.rollouts.select(EMPTY)
        assert GroupLengthReward()(none, rewards_like(self.rollouts, correct=[1.0] * 6)).num_rows == 0
        assert len(list(GroupLengthReward(coef=-1.0).problems())) == 1


# -- truncated responses ---------------------------------------------------------------------------------------------


class TestTruncated:
    rollouts = answers(3, 6, 6, 2, group_size=2, cut=(1, 2))

    def test_they_become_invalid(self) -> None:
        given = with_invalid(rewards_like(self.rollouts, score=[1.0, 2.0, 3.0, 4.0]), 2)
        result, said = reported(MaskTruncated(), self.rollouts, given)
        assert totals(result) == [1.0, None, None, 4.0]
        assert result.reasons == ("", "cut at the length limit", "timed out", "")
        assert said == {"truncated_rows": 2}

    def test_as_a_reward_of_its_own(self) -> None:
        total = WeightedSum()(rewards_like(self.rollouts, score=[1.0] * 4), MaskTruncated()(self.rollouts))
        assert totals(total) == [1.0, None, None, 1.0]

    def test_what_the_advantage_node_makes_of_it(self) -> None:
        rollouts = answers(3, 2, 6, group_size=3, cut=(2,))
        given = rewards_like(rollouts, score=[1.0, 0.0, 5.0])
        masked = GroupAdvantage(normalize_by_std=False)(rollouts, MaskTruncated()(rollouts, given))
        assert masked.sample_id.tolist() == [0, 1]
        assert [row[0] for row in masked.advantages.to_lists()] == [0.5, -0.5]
        assert GroupAdvantage(invalid="drop_group")(rollouts, MaskTruncated()(rollouts, given)).num_rows == 0

    def test_dropped_after_the_comparison(self) -> None:
        rollouts = answers(3, 2, 6, group_size=3, cut=(2,))
        compared = GroupAdvantage(normalize_by_std=False)(rollouts, rewards_like(rollouts, score=[1.0, 0.0, 5.0]))
        result, said = reported(DropTruncated(), compared, rollouts)
        assert isinstance(result, Advantages) and said == {"truncated_rows": 1}
        assert [row[0] for row in result.advantages.to_lists()] == [-1.0, -2.0]  # the mean of all three is 2

    def test_degenerate(self) -> None:
        all_cut = answers(4, 4, cut=(0, 1))
        given = rewards_like(all_cut, score=[1.0, 2.0])
        assert totals(MaskTruncated()(all_cut, given)) == [None, None]
        none = self.rollouts.select(EMPTY)
        assert MaskTruncated()(none, rewards_like(self.rollouts, score=[1.0] * 4)).num_rows == 0
        assert MaskTruncated()(none).num_rows == 0


# -- clipping --------------------------------------------------------------------------------------------------------


class TestClipReward:
    rollouts = answers(2, 1, 3, 0)

    def test_one_component_stays_one(self) -> None:
        given = with_invalid(rewards_like(self.rollouts, score=[3.0, -0.5, 9.0, -7.0]), 2)
        result, said = reported(ClipReward(-1.0, 2.0), given)
        assert list(result.components) == ["score"] and totals(result) == [2.0, -0.5, None, -1.0]
        assert said == {"clipped_rows": 2, "unclipped_mean": -1.5}

    def test_several_keep_their_numbers(self) -> None:
        mask = self.rollouts.loss_mask
        steps = mask.with_values(torch.ones(len(mask.values)))
        result = ClipReward(high=3.0)(rewards_like(self.rollouts, a=[1.0, 2.0, 3.0, 4.0], steps=steps))
        assert result.totals.tolist() == [3.0, 3.0, 3.0, 3.0]
        assert result.components["a"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert result.components["clip"].tolist() == [0.0, 0.0, -3.0, -1.0]
        assert result.token_components["steps"] == steps

    def test_what_is_not_finite_becomes_invalid(self) -> None:
        given = replace(
            rewards_like(self.rollouts, a=[0.0] * 4), components={"a": torch.tensor([math.inf, 1, math.nan, 0])}
        )
        result = ClipReward(-1.0, 1.0)(given)
        assert totals(result) == [None, 1.0, None, 0.0] and result.reasons[0] == "the reward is not finite"

    def test_no_rows_and_settings(self) -> None:
        assert ClipReward(0.0, 1.0)(rewards_like(self.rollouts, a=[0.0] * 4).select(EMPTY)).num_rows == 0
        assert list(ClipReward().problems()) == []
        assert len(list(ClipReward(1.0, 1.0).problems())) == len(list(ClipReward(math.nan).problems())) == 1


# -- running normalisation -------------------------------------------------------------------------------------------


class TestRunningNormalization:
    rollouts = answers(2, 1, 3, 0)

    def scores(self, *values: float) -> Rewards:
        return rewards_like(self.rollouts, score=list(values))

    def test_against_all_rewards_so_far(self) -> None:
        """In float64, over three batches; the batch that is normalised is among them."""
        node = RunningNormalization(State("statistics", None))
        seen: list[float] = []
        for batch in ([1.0, 2.0, 4.0, 8.0], [-3.0, 0.5, 0.5, 0.25], [100.0, 1.0, 2.0, 3.0]):
            seen += batch
            expected = (np.array(batch) - np.mean(seen)) / (np.std(seen, ddof=1) + 1e-8)
            result, said = reported(node, self.scores(*batch))
            np.testing.assert_allclose(result.totals.numpy(), expected, rtol=1e-6, atol=1e-7)
            assert list(result.components) == ["score"]
            assert said["running_mean"] == pytest.approx(np.mean(seen), rel=1e-12)
            assert said["running_std"] == pytest.approx(np.std(seen, ddof=1), rel=1e-12)
            assert said["raw_mean"] == pytest.approx(np.mean(batch), rel=1e-12)

    def test_without_centre_scale_or_limit(self) -> None:
        std = np.std([1.0, 2.0, 4.0, 9.0], ddof=1)
        given = self.scores(1.0, 2.0, 4.0, 9.0)
        centred = RunningNormalization("a", scale=False)(given)
        assert centred.totals.tolist() == [-3.0, -2.0, 0.0, 5.0]
        scaled = RunningNormalization("b", center=False, eps=0.0)(given)
        np.testing.assert_allclose(scaled.totals.numpy(), np.array([1.0, 2.0, 4.0, 9.0]) / std, rtol=1e-6)
        clipped = RunningNormalization("c", clip=1.0)(given)
        assert clipped.totals.tolist()[-1] == 1.0 and clipped.totals.min() > -1.0

    def test_components_add_up(self) -> None:
        mask = self.rollouts.loss_mask
        steps = mask.with_values(torch.arange(len(mask.values), dtype=torch.float32))
        given = rewards_like(self.rollouts, a=[1.0, 2.0, 4.0, 9.0], steps=steps)
        together = RunningNormalization("a", clip=1.2)(given)
        alone = RunningNormalization("b", clip=1.2)(self.scores(*given.totals.tolist()))
        torch.testing.assert_close(together.totals, alone.totals, rtol=1e-6, atol=1e-6)
        std = np.std(given.totals.double().numpy(), ddof=1)
        np.testing.assert_allclose(together.components["a"].numpy(), np.array([1.0, 2.0, 4.0, 9.0]) / std, rtol=1e-6)
        assert set(together.components) == {"a", "normalization"} and set(together.token_components) == {"steps"}

    def test_invalid_rewards_count_nowhere(self) -> None:
        node = RunningNormalization("statistics", eps=0.0)
        result = node(with_invalid(self.scores(1.0, 3.0, 1e9, 5.0), 2))
        assert totals(result) == [-1.0, 0.0, None, 1.0]
        assert result.reasons == ("", "", "timed out", "")
        before = node.statistics.value
        assert before["count"] == 3
        # None valid at all, and no rows: the statistics stay, bit for bit.
        for nothing in (
            with_invalid(self.scores(9.0, 9.0, 9.0, 9.0), 0, 1, 2, 3),
            self.scores(1, 2, 3, 4).select(EMPTY),
        ):
            assert all(t is None for t in totals(node(nothing)))
            assert node.statistics.value == before

    def test_a_valid_row_that_is_not_finite_becomes_invalid(self) -> None:
        given = replace(self.scores(0, 0, 0, 0), components={"score": torch.tensor([1.0, math.inf, math.nan, 3.0])})
        result = RunningNormalization("statistics", eps=0.0)(given)
        assert totals(result) == [pytest.approx(-0.70710678), None, None, pytest.approx(0.70710678)]
        assert result.reasons[1] == "the reward is not finite"

    def test_rewards_that_do_not_vary_are_not_scaled(self) -> None:
        assert RunningNormalization("a")(self.scores(0.1, 0.1, 0.1, 0.1)).totals.tolist() == [0.0] * 4
        kept = RunningNormalization("b", center=False)(self.scores(3.0, 3.0, 3.0, 3.0))
        assert kept.totals.tolist() == [3.0] * 4
        assert RunningNormalization("c")(self.scores(5.0, 0, 0, 0).select([0])).totals.tolist() == [0.0]

    def test_the_order_of_rows_changes_no_bit(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rollouts = recorded_rollouts(16, 4)
        given = rewards_like(rollouts, score=torch.randn(64, generator=generator) * 1e3)
        order = torch.randperm(64, generator=generator)
        one, two = RunningNormalization("one"), RunningNormalization("two")
        straight, shuffled = one(given), two(given.select(order))
        assert one.statistics.value == two.statistics.value
        assert shuffled == straight.select(order)

    def test_settings(self) -> None:
        assert list(RunningNormalization().problems()) == []
        assert list(RunningNormalization(State("s", None), clip=2.0).problems()) == []
        assert len(list(RunningNormalization(State("s", 0.0), clip=0.0, eps=-1.0).problems())) == 3
        assert len(list(RunningNormalization(3).problems())) == 1  # type: ignore[arg-type]

    def test_one_writer_a_state_and_none_before_a_filter(self) -> None:
        actor = tiny_actor()
        rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
        twice = [RunningNormalization()(reward()(rollouts)) for _ in range(2)]
        report = str(RLFlow.from_outputs(*twice).check())
        assert "unique model name" in report and "reward_statistics" in report
        normal = RunningNormalization()(reward()(rollouts))
        report = str(RLFlow.from_outputs(DropUniformGroups()(rollouts, normal)).check())
        assert "one that writes 'reward_statistics', upstream of DropUniformGroups#0" in report


def normalised_flow(actor: Any = None) -> RLFlow:
    """Without a comparison in groups, which would undo a normalisation: PPO's loss on the normalised reward."""
    from flowrl import GAE, Critic, ValueModel, ValueUpdater

    actor = actor or tiny_actor()
    critic = ValueModel.from_policy(actor)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    rewards = FunctionReward(share_of_vowels, isolate=False)(rollouts)
    normal = RunningNormalization("reward_statistics", clip=3.0, label="normal")(rewards)
    values = Critic(critic)(rollouts)
    advantages = GAE(whiten=False)(rollouts, normal, values)
    return RLFlow.from_outputs(
        PPOUpdater(actor, optimizer=FAST)(rollouts, advantages, PolicyLogprobs(actor)(rollouts)),
        ValueUpdater(critic, optimizer=FAST)(rollouts, values, advantages),
    )


def test_statistics_survive_a_resume(tmp_path: Path) -> None:
    """Four steps are two, a resume and two more, bit for bit, and the statistics go on growing."""
    torch.set_num_threads(1)
    whole = quick_run(normalised_flow(), 4, tmp_path / "whole", prompts())
    quick_run(normalised_flow(), 2, tmp_path / "parts", prompts())
    parts = quick_run(normalised_flow(), 4, tmp_path / "parts", prompts(), resume=True)
    assert rows(parts) == rows(whole)
    assert checkpoint_weights(tmp_path / "parts", 4) == checkpoint_weights(tmp_path / "whole", 4)
    saved = torch.load(tmp_path / "parts" / "checkpoints" / "step-000004" / "states.pt", weights_only=True)
    assert saved["reward_statistics"]["count"] == 4 * 6
    # Each batch is normalised by all before it and itself: the running mean is the mean of the batches' means.
    steps = training(whole)
    for i, row in enumerate(steps):
        means = [r["normal/raw_mean"] for r in steps[: i + 1]]
        assert row["normal/running_mean"] == pytest.approx(sum(means) / len(means), rel=1e-6)
