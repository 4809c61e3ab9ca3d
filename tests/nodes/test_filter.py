import pytest
import torch

from flowrl.context import StepContext, use_step
from flowrl.nodes import DropUniformGroups, GroupAdvantage, rewards_like
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
