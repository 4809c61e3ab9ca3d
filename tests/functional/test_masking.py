import pytest
import torch

from flowrl.functional.masking import explained_variance, masked_mean, masked_var, masked_whiten

VALUES = torch.tensor([1.0, float("nan"), 3.0])
MASK = torch.tensor([True, False, True])


def test_by_hand_with_nan_under_the_mask() -> None:
    assert float(masked_mean(VALUES, MASK)) == 2.0
    assert float(masked_var(VALUES, MASK)) == 2.0
    assert masked_whiten(VALUES, MASK)[MASK].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("mask", [[False, False, False], [True, False, False]])
def test_fewer_than_two_values(mask: list[bool]) -> None:
    selected = torch.tensor(mask)
    assert float(masked_mean(VALUES, selected)) == (1.0 if selected.any() else 0.0)
    assert float(masked_var(VALUES, selected)) == 0.0
    assert masked_whiten(VALUES, selected)[selected].tolist() == [0.0] * int(selected.sum())


def test_equal_values_whiten_to_zero() -> None:
    assert masked_whiten(torch.full((5,), 0.1), torch.ones(5, dtype=torch.bool)).tolist() == [0.0] * 5
    exact = torch.full((3,), 0.1, dtype=torch.float64)  # their float64 sum over 3 is not 0.1
    assert masked_whiten(exact, torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3


def test_the_order_of_values_does_not_matter_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator) * 10 ** torch.randint(-4, 4, (1000,), generator=generator)
    mask = torch.rand(1000, generator=generator) < 0.7
    whitened = masked_whiten(values, mask)
    for _ in range(5):
        order = torch.randperm(1000, generator=generator)
        assert torch.equal(masked_whiten(values[order], mask[order]), whitened[order])


def test_explained_variance() -> None:
    target, everything = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool)
    assert explained_variance(target, target, everything) == 1.0
    assert explained_variance(torch.zeros(3), target, everything) == 0.0
    assert explained_variance(-target, target, everything) == -3.0
    assert explained_variance(target, torch.ones(3), everything) == 0.0
