import math

import pytest
import torch

from flowrl.errors import FlowError
from flowrl.functional.importance import (
    geometric_row_means,
    icepop_weights,
    importance_weights,
    rejected_tokens,
    truncate_weights,
)
from flowrl.ragged import Ragged

NAN = math.nan
MASK = Ragged.from_rows([[1, 0, 1, 1], [1], [0], []], torch.uint8)
#: Ratios of trainer and sampler: 2, (garbage), 0.25, 1 in one row, 3 in another.
OLD = torch.tensor([2.0, NAN, 0.25, 1.0, 3.0, 1.0]).log()
ROLLOUT = torch.tensor([0.0, 7.0, 0.0, 0.0, 0.0, NAN])


def test_weights_by_hand() -> None:
    token = importance_weights(OLD, ROLLOUT, MASK)
    assert token.tolist() == pytest.approx([2.0, 1.0, 0.25, 1.0, 3.0, 1.0])
    sequence = importance_weights(OLD, ROLLOUT, MASK, level="sequence")
    assert sequence.tolist() == pytest.approx([0.5, 1.0, 0.5, 0.5, 3.0, 1.0])
    assert not importance_weights(OLD.clone().requires_grad_(), ROLLOUT, MASK).requires_grad


def test_truncation_and_the_band() -> None:
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 5.0, 5.1])
    assert truncate_weights(weights, 2.0).tolist() == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert truncate_weights(weights, 2.0, 0.5).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert icepop_weights(weights).tolist() == pytest.approx([0.0, 0.5, 1.0, 2.0, 5.0, 0.0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_log_ratios_are_clamped(level: str) -> None:
    mask = Ragged.from_rows([[1], [1], [1]], torch.uint8)
    rollout = torch.tensor([-100.0, 100.0, -math.inf])
    got = importance_weights(torch.zeros(3), rollout, mask, level=level).log()
    assert got.tolist() == pytest.approx([20.0, -20.0, 20.0])


@pytest.mark.parametrize(
    ("level", "estimator", "threshold", "low", "want"),
    [
        # Δ = log μ − log π_old: −log 2 = −0.69, log 4 = 1.39, 0 in one row (mean 0.23), −log 3 = −1.10 in another
        ("token", "k1", 1.0, None, [0, 0, 1, 0, 1, 0]),
        ("token", "k1", 2.0, -0.5, [1, 0, 0, 0, 1, 0]),
        ("token", "k2", 0.5, None, [0, 0, 1, 0, 1, 0]),  # 0.24, 0.96, 0, 0.60
        ("token", "k3", 0.7, None, [0, 0, 0, 0, 1, 0]),  # 0.31, 0.64, 0, 0.90
        ("sequence_mean", "k1", 1.0, None, [0, 0, 0, 0, 1, 0]),
        ("sequence_mean", "k1", 2.0, 0.0, [0, 0, 0, 0, 1, 0]),
        ("sequence_mean", "k2", 0.3, None, [1, 0, 1, 1, 1, 0]),  # 0.40, 0.60
        ("sequence_max", "k3", 0.6, None, [1, 0, 1, 1, 1, 0]),
        ("sequence_max", "k3", 0.7, None, [0, 0, 0, 0, 1, 0]),
        ("sequence_max", "k1", 1.2, -1.0, [1, 0, 1, 1, 1, 0]),
    ],
)
def test_rejection_by_hand(level: str, estimator: str, threshold: float, low: float | None, want: list[int]) -> None:
    got = rejected_tokens(OLD, ROLLOUT, MASK, threshold=threshold, low=low, level=level, estimator=estimator)
    assert got.int().tolist() == want


def test_a_nan_at_a_policy_token_is_no_off_policy_token() -> None:
    """It is neither masked nor rejected: it stops the step where the loss meets it."""
    mask = Ragged.from_rows([[1]], torch.uint8)
    nan, zero = torch.tensor([NAN]), torch.zeros(1)
    assert bool(icepop_weights(importance_weights(nan, zero, mask)).isnan().all())
    for level in ("token", "sequence_mean", "sequence_max"):
        assert not bool(rejected_tokens(nan, zero, mask, threshold=0.1, level=level).any())


def test_geometric_means() -> None:
    weights = torch.tensor([4.0, NAN, 1.0, 2.0, 0.0, NAN])
    assert geometric_row_means(weights, MASK).tolist() == pytest.approx([2.0, 0.0, 1.0, 1.0])


def test_nothing() -> None:
    empty, mask = torch.zeros(0), Ragged.from_rows([], torch.uint8)
    for level in ("token", "sequence"):
        assert importance_weights(empty, empty, mask, level=level).tolist() == []
    for level in ("token", "sequence_mean", "sequence_max"):
        assert rejected_tokens(empty, empty, mask, threshold=1.0, level=level).tolist() == []
    assert geometric_row_means(empty, mask).tolist() == []


def test_unknown_settings() -> None:
    with pytest.raises(FlowError, match="did you mean 'token'"):
        importance_weights(OLD, ROLLOUT, MASK, level="tokens")
    with pytest.raises(FlowError, match="sequence_mean"):
        rejected_tokens(OLD, ROLLOUT, MASK, threshold=1.0, level="sequence")
    with pytest.raises(FlowError, match="k1, k2, k3"):
        rejected_tokens(OLD, ROLLOUT, MASK, threshold=1.0, estimator="abs")
