import pytest
import torch

from flowrl.errors import FlowError
from flowrl.functional.grouping import Groups, coupled_units, group_index
from tests.tiny import recorded_rollouts


def test_groups_by_hand() -> None:
    prompt_id = torch.tensor([7, 3, 7, 9])
    groups = Groups.of(prompt_id)
    values = torch.tensor([1.0, 5.0, 4.0, -2.0])
    assert group_index(prompt_id).tolist() == groups.index.tolist() == [1, 0, 1, 2]
    assert (groups.prompt_id.tolist(), groups.sizes.tolist()) == ([3, 7, 9], [1, 2, 1])
    assert groups.sum(values).tolist() == [5.0, 5.0, -2.0]
    assert groups.mean(values).tolist() == [5.0, 2.5, -2.0]
    assert groups.std(values).tolist() == pytest.approx([0.0, 4.5**0.5, 0.0])
    assert groups.max(values).tolist() == [5.0, 4.0, -2.0]
    assert groups.min(values).tolist() == [5.0, 1.0, -2.0]
    assert groups.varied(values).tolist() == [False, True, False]
    assert groups.varied(values, torch.tensor([True, True, False, False])).tolist() == [False] * 3


def test_nan_outside_of_the_selection_does_not_count() -> None:
    groups = Groups.of(torch.tensor([0, 0, 1]))
    values, where = torch.tensor([1.0, float("nan"), float("nan")]), torch.tensor([True, False, False])
    assert groups.max(values, where).tolist() == [1.0, float("-inf")]
    assert groups.min(values, where).tolist() == [1.0, float("inf")]


def test_no_rows() -> None:
    groups = Groups.of(torch.zeros(0, dtype=torch.int64))
    assert groups.num_groups == 0
    assert groups.std(torch.zeros(0)).tolist() == groups.max(torch.zeros(0)).tolist() == []


def test_coupled_units() -> None:
    rollouts = recorded_rollouts(num_prompts=2, group_size=2).select([2, 0, 3, 1])
    assert coupled_units(rollouts, "row") == [[0], [1], [2], [3]]
    assert coupled_units(rollouts, "group") == [[0, 2], [1, 3]]
    with pytest.raises(FlowError, match="Preferences"):
        coupled_units(rollouts, "pair")
    with pytest.raises(FlowError, match="prompt"):
        coupled_units(rollouts, "prompt")


def test_coupled_pairs() -> None:
    from flowrl.batches import Preferences

    rollouts = recorded_rollouts(num_prompts=2, group_size=2)
    pairs = Preferences(
        rollouts.prompt_id,
        rollouts.sample_id,
        rollouts.tokens,
        rollouts.spans,
        pair_id=torch.tensor([5, 6, 5, 6]),
        chosen=torch.tensor([1, 1, 0, 0], dtype=torch.uint8),
    )
    assert coupled_units(pairs, "pair") == [[0, 2], [1, 3]]
