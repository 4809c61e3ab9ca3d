import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import flowrl
from flowrl import Prompts, RLFlow, source
from flowrl.batches import Batch, Rewards, Rollouts
from flowrl.context import StepContext, use_step
from flowrl.errors import BatchError, GraphError
from flowrl.nodes import DropUniformGroups, GroupAdvantage, rewards_like
from flowrl.nodes.filter import Filter, KeepAccuracyBand
from tests.nodes.test_advantage import with_invalid
from tests.tiny import recorded_rollouts

ROLLOUTS = recorded_rollouts(3, 3)


def kept(rewards, rollouts=ROLLOUTS) -> list[int]:
    return DropUniformGroups()(rollouts, rewards).prompt_id.tolist()


def test_uniform_groups_go() -> None:
    rewards = rewards_like(ROLLOUTS, score=[1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    reported: dict[str, float] = {}
    with use_step(StepContext(report=reported.__setitem__)):
        filtered = DropUniformGroups()(ROLLOUTS, rewards)
    assert filtered == ROLLOUTS.select([3, 4, 5])
    assert reported == {"kept_groups": 1, "dropped_groups": 2}
    assert GroupAdvantage()(filtered, rewards).num_rows == 3


def test_the_total_decides() -> None:
    half = torch.tensor([1.0, 0.0, 1.0] * 3)
    assert kept(rewards_like(ROLLOUTS, a=half, b=1.0 - half)) == []
    assert kept(rewards_like(ROLLOUTS, a=half, b=half)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_invalid_rewards_are_not_compared() -> None:
    rewards = rewards_like(ROLLOUTS, score=[1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    assert kept(with_invalid(rewards, 2, 4, 6, 7)) == [1, 1, 1]
    assert kept(with_invalid(rewards, *range(9))) == []


def test_no_rows() -> None:
    assert kept(rewards_like(ROLLOUTS, score=[0.0] * 9), ROLLOUTS.select([])) == []


def test_settings() -> None:
    node = DropUniformGroups(max_pulls=3, on_exhausted="carry_over")
    assert node.is_filter and node.needs_groups == 2 and node.split == "groups"
    assert list(node.problems()) == []
    found = list(DropUniformGroups(max_pulls=0, on_exhausted="wait").problems())  # type: ignore[arg-type]
    assert len(found) == 2
    with pytest.raises(TypeError):
        DropUniformGroups(3)  # type: ignore[misc]


def test_a_component_decides() -> None:
    rewards = rewards_like(ROLLOUTS, correct=[1.0] * 3 + [0.0, 1.0, 1.0] + [0.0] * 3, length=torch.arange(9.0))
    assert kept(rewards) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert DropUniformGroups(component="correct")(ROLLOUTS, rewards).prompt_id.tolist() == [1, 1, 1]
    with pytest.raises(BatchError, match=r"no row component 'corect'.*did you mean 'correct'"):
        DropUniformGroups(component="corect")(ROLLOUTS, rewards)


def test_what_is_not_finite_is_not_compared() -> None:
    """Also where somebody calls it valid."""
    column = torch.tensor([math.nan, 0.0, 1.0, math.inf, 1.0, 1.0, math.nan, math.nan, 2.0])
    rewards = replace(rewards_like(ROLLOUTS, score=[0.0] * 9), components={"score": column})
    assert bool(rewards.valid.all()) and kept(rewards) == [0, 0, 0]


def test_a_response_of_no_length_is_a_row_like_others() -> None:
    rollouts = recorded_rollouts(2, 2, response_lengths=(0, 0, 3, 0))
    assert kept(rewards_like(rollouts, score=[0.0, 1.0, 1.0, 1.0]), rollouts) == [0, 0]


class TestAccuracyBand:
    # Means 1/3, 1 and 0.
    rewards = rewards_like(ROLLOUTS, correct=[1.0, 0.0, 0.0] + [1.0] * 3 + [0.0] * 3)

    def band(self, *args: float, rewards: Rewards | None = None, **options: Any) -> list[int]:
        node = KeepAccuracyBand(*args, **options)
        given = self.rewards if rewards is None else rewards
        return list(dict.fromkeys(node(ROLLOUTS, given).prompt_id.tolist()))

    def test_too_easy_and_too_hard_go(self) -> None:
        reported: dict[str, float] = {}
        with use_step(StepContext(report=reported.__setitem__)):
            assert KeepAccuracyBand()(ROLLOUTS, self.rewards) == ROLLOUTS.select([0, 1, 2])
        assert reported == {"kept_groups": 1, "dropped_groups": 2}
        assert self.band(0.5, 1.0) == [1] and self.band(0.0, 0.2) == [2] and self.band(0.4, 0.9) == []

    def test_the_bounds_are_inside(self) -> None:
        assert self.band(0.0, 1.0) == [0, 1, 2] and self.band(1 / 3, 1 / 3) == [0]
        fifths = recorded_rollouts(1, 5)
        one_of_five = rewards_like(fifths, correct=[0.0, 0.0, 1.0, 0.0, 0.0])
        assert KeepAccuracyBand(0.2, 0.8)(fifths, one_of_five).num_rows == 5

    def test_invalid_rows_are_left_out_of_the_mean(self) -> None:
        assert self.band(0.5, 0.5, rewards=with_invalid(self.rewards, 1)) == [0]
        assert self.band(0.0, 1.0, rewards=with_invalid(self.rewards, 0, 1, 2)) == [1, 2]

    def test_a_component(self) -> None:
        both = rewards_like(ROLLOUTS, correct=self.rewards.components["correct"], length=[-5.0] * 9)
        assert self.band(rewards=both) == [] and self.band(rewards=both, component="correct") == [0]

    def test_no_rows_and_settings(self) -> None:
        assert KeepAccuracyBand()(ROLLOUTS.select([]), self.rewards).num_rows == 0
        assert list(KeepAccuracyBand().problems()) == []
        assert len(list(KeepAccuracyBand(0.8, 0.2, max_pulls=0).problems())) == 2
        assert len(list(KeepAccuracyBand(math.nan).problems())) == 1


# -- what a filter may not do ----------------------------------------------------------------------------------------


class Rows(Filter):
    """Returns these rows, changed or not."""

    rows: tuple[int, ...]
    changed: bool = False

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        out = rollouts.select(self.rows)
        if self.changed and out.num_rows:
            out = replace(out, response_text=("changed", *out.response_text[1:]))
        return out


class TestWholeGroups:
    def refused(self, rows: Sequence[int], what: str, changed: bool = False) -> None:
        with pytest.raises(BatchError, match=f"whole and as they are. Received {what}"):
            Rows(tuple(rows), changed)(ROLLOUTS)

    def test_whole_groups_in_any_order_are_fine(self) -> None:
        for rows in ([0, 1, 2], [8, 6, 7, 0, 1, 2], list(range(9)), []):
            assert Rows(tuple(rows))(ROLLOUTS) == ROLLOUTS.select(rows)

    def test_part_of_a_group(self) -> None:
        self.refused([0, 1, 2, 3, 5], "prompt_id 1 without its sample_id 1: part of a group")

    def test_a_row_twice(self) -> None:
        self.refused([0, 1, 2, 1], r"row \(0, 1\) twice")

    def test_changed_rows(self) -> None:
        self.refused([0, 1, 2], "rows of the same ids with other columns", changed=True)

    def test_invented_rows(self) -> None:
        class Invents(Filter):
            def __call__(self, rollouts: Rollouts) -> Rollouts:
                return replace(rollouts, prompt_id=rollouts.prompt_id + 100)

        with pytest.raises(BatchError, match=r"Invents is a filter.*row \(100, 0\), which it was not given"):
            Invents()(ROLLOUTS)

    def test_in_a_flow(self) -> None:
        kept: Any = Rows((0, 1, 3), label="half")(source(flowrl.Rollouts, name="recorded", batch_size=3))
        with pytest.raises(BatchError, match="Rows is a filter"):
            RLFlow.from_outputs(kept).step(ROLLOUTS)

    def test_the_rewards_may_come_first(self) -> None:
        class Last(Filter):
            joins: ClassVar[Any] = {"rewards": "subset"}

            def __call__(self, rewards: Rewards, rollouts: Rollouts) -> Rollouts:
                return rollouts.select([6, 7, 8])

        rewards = rewards_like(ROLLOUTS, a=[0.0] * 9)
        assert Last.filtered_port() == "rollouts" and Last()(rewards, ROLLOUTS).prompt_id.tolist() == [2, 2, 2]

    def test_a_filter_returns_what_it_takes(self) -> None:
        with pytest.raises(GraphError, match=r"Wrong does not return some groups.*\(rollouts: Rollouts\) -> Rewards"):

            class Wrong(Filter):
                def __call__(self, rollouts: Rollouts) -> Rewards: ...

        with pytest.raises(GraphError, match="a batch with a prompt_id"):

            class OfARecord(Filter):
                def __call__(self, record: Batch) -> Batch: ...

    def test_prompts_can_be_filtered_before_sampling(self) -> None:
        class Short(Filter):
            def __call__(self, prompts: Prompts) -> Prompts:
                return prompts.select([i for i, m in enumerate(prompts.messages) if len(m) < 3])

        prompts = Prompts(torch.arange(3), ("aa", "bbbb", "c"))
        assert Short()(prompts).messages == ("aa", "c")
