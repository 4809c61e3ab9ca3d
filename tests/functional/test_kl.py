import math

import pytest
import torch

from flowrl.errors import FlowError
from flowrl.functional.kl import KL_ESTIMATORS, kl_estimate


@pytest.mark.parametrize(
    ("estimator", "want"), [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1 - 0.5)]
)
def test_by_hand(estimator: str, want: float) -> None:
    got = kl_estimate(torch.tensor([-2.0]), torch.tensor([-1.5]), estimator)
    assert got.tolist() == pytest.approx([want], rel=1e-5)


def test_k1_and_k3_are_unbiased() -> None:
    """Their mean over tokens of π is the KL divergence itself."""
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):
        mean = float((policy * kl_estimate(policy.log(), reference.log(), estimator)).sum())
        assert mean == pytest.approx(exact, rel=1e-5)


def test_extreme_and_unknown() -> None:
    assert bool(kl_estimate(torch.tensor([-900.0]), torch.tensor([0.0]), "k3").isfinite().all())
    assert kl_estimate(torch.zeros(0), torch.zeros(0), "k3").tolist() == []
    with pytest.raises(FlowError, match="did you mean 'k3'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k33")
    assert KL_ESTIMATORS == ("k1", "abs", "k2", "k3")
