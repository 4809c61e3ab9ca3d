import math

import pytest
import torch

from flowrl.errors import FlowError
from flowrl.functional.kl import KL_ESTIMATORS, kl_estimate

PLAIN = ("k1", "abs", "k2", "k3")
STRAIGHT_THROUGH = ("k1_st", "abs_st", "k3_st")


@pytest.mark.parametrize(
    ("estimator", "want"), [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1 - 0.5)]
)
def test_by_hand(estimator: str, want: float) -> None:
    for name in {estimator, f"{estimator}_st"} & set(KL_ESTIMATORS):
        got = kl_estimate(torch.tensor([-2.0]), torch.tensor([-1.5]), name)
        assert got.tolist() == pytest.approx([want], rel=1e-5)


def policy_and_reference() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.tensor([0.9, -0.3, -1.0], dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()


def test_k1_and_k3_are_unbiased() -> None:
    """Their mean over tokens of π is the KL divergence itself."""
    logits, reference = policy_and_reference()
    policy = logits.detach().log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k3", "k1_st", "k3_st"):
        mean = float((policy.exp() * kl_estimate(policy, reference, estimator)).sum())
        assert mean == pytest.approx(exact, rel=1e-9)


def test_what_each_gradient_descends() -> None:
    """The mean gradient over tokens of π: of k2 and all straight-through ones, that of KL(π ‖ ref); of k3, that of
    KL(ref ‖ π); of k1, nothing."""
    logits, reference = policy_and_reference()
    policy = logits.log_softmax(0)

    def gradient(of: torch.Tensor) -> list[float]:
        return torch.autograd.grad(of, logits, retain_graph=True)[0].tolist()

    towards = gradient((policy.exp() * (policy - reference)).sum())
    away = gradient((reference.exp() * (reference - policy)).sum())
    sampled = policy.exp().detach()
    for estimator in KL_ESTIMATORS:
        got = gradient((sampled * kl_estimate(policy, reference, estimator)).sum())
        if estimator == "k2" or estimator in STRAIGHT_THROUGH:
            assert got == pytest.approx(towards, rel=1e-9)
        elif estimator == "k3":
            assert got == pytest.approx(away, rel=1e-9) and got != pytest.approx(towards, rel=1e-2)
        elif estimator == "k1":
            assert got == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("estimator", PLAIN)
def test_gradients_against_finite_differences(estimator: str) -> None:
    x = torch.tensor([-0.3, -2.0, -1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.4, -1.3], dtype=torch.float64)
    kl_estimate(x, reference, estimator).sum().backward()
    step = 1e-6
    up, down = (kl_estimate(x.detach() + d, reference, estimator) for d in (step, -step))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (up - down) / (2 * step), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("estimator", STRAIGHT_THROUGH)
def test_straight_through_has_the_value_of_one_and_the_gradient_of_another(estimator: str) -> None:
    x = torch.tensor([-0.3, -2.0, -1.1], requires_grad=True)
    reference = torch.tensor([-1.0, -0.4, -1.3])
    got = kl_estimate(x, reference, estimator)
    assert torch.equal(got, kl_estimate(x.detach(), reference, estimator.removesuffix("_st")))
    got.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, (x - reference).detach())


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_extremes(estimator: str) -> None:
    x = torch.tensor([-900.0, 0.0], requires_grad=True)
    got = kl_estimate(x, torch.tensor([0.0, -900.0]), estimator)
    got.sum().backward()
    assert bool(got.isfinite().all()) and x.grad is not None and bool(x.grad.isfinite().all())
    assert kl_estimate(torch.zeros(0), torch.zeros(0), estimator).tolist() == []


def test_unknown() -> None:
    with pytest.raises(FlowError, match="did you mean 'k3'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k33")
    assert (*PLAIN, *STRAIGHT_THROUGH) == KL_ESTIMATORS
