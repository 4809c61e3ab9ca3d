"""Preference losses against the formulas of their papers, written out here in float64 with `math` alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.errors import FlowError
from flowrl.functional.preferences import (
    DPO_LOSSES,
    bradley_terry_loss,
    dpo_loss,
    implicit_reward,
    kto_loss,
    kto_reference_point,
    log_odds,
    orpo_loss,
    simpo_loss,
)

#: Log-probs of chosen and rejected answers, under the policy and under the reference: sums over a few tokens.
CHOSEN, REJECTED = [-3.0, -12.5, -0.25, -40.0], [-4.5, -9.0, -0.25, -2.0]
REF_CHOSEN, REF_REJECTED = [-3.5, -12.0, -0.5, -35.0], [-4.0, -9.5, -0.25, -4.5]
#: Means over tokens.
MEAN_CHOSEN, MEAN_REJECTED = [-0.3, -2.0, -0.001, -5.0], [-0.9, -0.5, -0.69, -5.0]


def tensors(*columns: list[float], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.tensor(column, dtype=dtype, requires_grad=True) for column in columns]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def close(found: Tensor, expected: list[float], rel: float = 1e-12) -> None:
    assert found.tolist() == pytest.approx(expected, rel=rel, abs=1e-12)


class TestDPO:
    @pytest.mark.parametrize("beta", [0.1, 0.7])
    @pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.4])
    @pytest.mark.parametrize("reference_free", [False, True])
    @pytest.mark.parametrize("loss", DPO_LOSSES)
    def test_the_formulas(self, loss: str, beta: float, epsilon: float, reference_free: bool) -> None:
        def ell(h: float) -> float:
            if loss == "ipo":
                return (h - 1 / (2 * beta)) ** 2
            if loss == "hinge":
                return max(0.0, 1 - beta * h)
            return -math.log(sigmoid(beta * h))

        expected = []
        for c, r, ref_c, ref_r in zip(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, strict=True):
            h = c - r if reference_free else math.log(math.exp(c) / math.exp(ref_c)) - (r - ref_r)
            if loss == "robust":
                expected.append(((1 - epsilon) * ell(h) - epsilon * ell(-h)) / (1 - 2 * epsilon))
            else:
                expected.append((1 - epsilon) * ell(h) + epsilon * ell(-h))
        chosen, rejected, ref_chosen, ref_rejected = tensors(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
        reference = () if reference_free else (ref_chosen, ref_rejected)
        close(dpo_loss(chosen, rejected, *reference, beta=beta, loss=loss, label_smoothing=epsilon), expected, 1e-10)

    def test_by_hand(self) -> None:
        """h = (−1 + 2) − (−3 + 2) = 2 and β = ½: σ(1)."""
        columns = tensors([-1.0], [-3.0], [-2.0], [-2.0])
        assert dpo_loss(*columns, beta=0.5).item() == pytest.approx(0.31326168751822286, rel=1e-14)
        assert dpo_loss(*columns, beta=0.5, loss="ipo").item() == pytest.approx(1.0)
        assert dpo_loss(*columns, beta=0.5, loss="hinge").item() == 0
        assert dpo_loss(*columns, beta=0.25, loss="hinge").item() == pytest.approx(0.5)

    def test_equal_answers(self) -> None:
        """h = 0: log 2, 1/(4β²), 1. The gradients of the two cancel where they are one sequence."""
        answer = tensors([-2.0])[0]
        for loss, expected in (("sigmoid", math.log(2)), ("ipo", 25.0), ("hinge", 1.0), ("robust", math.log(2))):
            value = dpo_loss(answer, answer, beta=0.1, loss=loss)
            assert value.item() == pytest.approx(expected)
            assert torch.autograd.grad(value, answer)[0].item() == 0

    def test_gradient_of_the_paper(self) -> None:
        """∇ = −β σ(−βh) (∇ log π(y_w) − ∇ log π(y_l)), below equation 7."""
        chosen, rejected, *reference = tensors(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
        grads = torch.autograd.grad(dpo_loss(chosen, rejected, *reference, beta=0.3).sum(), (chosen, rejected))
        margins = [c - a - (r - b) for c, r, a, b in zip(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, strict=True)]
        pull = [-0.3 * sigmoid(-0.3 * h) for h in margins]
        close(grads[0], pull)
        close(grads[1], [-p for p in pull])

    def test_smoothing_of_conservative_dpo_holds_the_margin(self) -> None:
        """The gradient vanishes where σ(βh) = 1 − ε (Mitchell's note on cDPO)."""
        epsilon, beta = 0.2, 0.5
        h = math.log((1 - epsilon) / epsilon) / beta
        chosen, rejected = tensors([h], [0.0])
        value = dpo_loss(chosen, rejected, beta=beta, label_smoothing=epsilon)
        assert torch.autograd.grad(value, chosen)[0].item() == pytest.approx(0, abs=1e-15)

    def test_robust_is_unbiased(self) -> None:
        """Averaged over labels flipped with probability ε it is the loss on clean labels."""
        chosen, rejected = tensors(CHOSEN, REJECTED)
        options: dict[str, Any] = dict(beta=0.3, loss="robust", label_smoothing=0.3)
        seen = 0.7 * dpo_loss(chosen, rejected, **options) + 0.3 * dpo_loss(rejected, chosen, **options)
        expected = [-math.log(sigmoid(0.3 * (c - r))) for c, r in zip(CHOSEN, REJECTED, strict=True)]
        close(seen, expected, 1e-10)

    def test_mistakes(self) -> None:
        chosen, rejected = tensors(CHOSEN, REJECTED)
        with pytest.raises(FlowError, match="did you mean 'hinge'"):
            dpo_loss(chosen, rejected, loss="hing")
        with pytest.raises(FlowError, match="half a reference"):
            dpo_loss(chosen, rejected, chosen)

    def test_implicit_reward(self) -> None:
        chosen, reference = tensors(CHOSEN, REF_CHOSEN)
        close(implicit_reward(chosen, reference, beta=0.5), [0.25, -0.25, 0.125, -2.5])
        close(implicit_reward(chosen, None, beta=2.0), [-6.0, -25.0, -0.5, -80.0])


@pytest.mark.parametrize(("beta", "gamma", "epsilon"), [(2.0, 1.0, 0.0), (2.5, 0.0, 0.0), (10.0, 3.0, 0.1)])
def test_simpo(beta: float, gamma: float, epsilon: float) -> None:
    expected = []
    for c, r in zip(MEAN_CHOSEN, MEAN_REJECTED, strict=True):
        z = beta * c - beta * r - gamma
        expected.append(-(1 - epsilon) * math.log(sigmoid(z)) - epsilon * math.log(sigmoid(-z)))
    close(simpo_loss(*tensors(MEAN_CHOSEN, MEAN_REJECTED), beta=beta, gamma=gamma, label_smoothing=epsilon), expected)


class TestORPO:
    @pytest.mark.parametrize("lam", [0.0, 0.1, 2.0])
    def test_the_formula(self, lam: float) -> None:
        def odds(mean: float) -> float:
            return math.exp(mean) / (1 - math.exp(mean))

        ratios = [math.log(odds(c) / odds(r)) for c, r in zip(MEAN_CHOSEN, MEAN_REJECTED, strict=True)]
        expected = [-c - lam * math.log(sigmoid(x)) for c, x in zip(MEAN_CHOSEN, ratios, strict=True)]
        losses, found = orpo_loss(*tensors(MEAN_CHOSEN, MEAN_REJECTED), lam=lam)
        close(losses, expected, 1e-10)
        close(found, ratios, 1e-10)

    @given(st.floats(-60, -1e-6))
    def test_log_odds_to_the_last_digits(self, logprob: float) -> None:
        with localcontext() as exact:
            exact.prec = 60
            p = Decimal(logprob).exp()
            expected = float((p / (1 - p)).ln())
        assert log_odds(torch.tensor([logprob], dtype=torch.float64)).item() == pytest.approx(
            expected, rel=1e-13, abs=1e-14
        )
        assert log_odds(torch.tensor([logprob])).item() == pytest.approx(expected, rel=1e-4, abs=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_certain_answers_are_finite(self, dtype: torch.dtype) -> None:
        chosen, rejected = tensors([0.0, 0.0, -1.0, -1e-30, -1e4], [0.0, -1.0, 0.0, -1e4, -1e-9], dtype=dtype)
        losses, ratios = orpo_loss(chosen, rejected, lam=1.0)
        grads = torch.autograd.grad(losses.sum(), (chosen, rejected))
        assert all(bool(t.isfinite().all()) for t in (losses, ratios, *grads))
        assert ratios[0].item() == 0 and losses[0].item() == pytest.approx(math.log(2))
        assert ratios[1].item() > 10 > -10 > ratios[2].item()
        assert ratios[1].item() == pytest.approx(-math.log(1e-6) + math.log(math.e - 1), rel=1e-3)

    def test_gradient_is_that_of_the_odds(self) -> None:
        """d log odds(p) / d log p = 1/(1−p)."""
        logprobs = tensors(MEAN_CHOSEN)[0]
        (found,) = torch.autograd.grad(log_odds(logprobs).sum(), logprobs)
        close(found, [1 / (1 - math.exp(x)) for x in MEAN_CHOSEN], 1e-10)


class TestKTO:
    LIKED = (True, False, False, True)

    @pytest.mark.parametrize(("beta", "point", "weights"), [(0.1, 0.0, (1.0, 1.0)), (0.5, 1.7, (1.3, 0.6))])
    def test_the_formula(self, beta: float, point: float, weights: tuple[float, float]) -> None:
        """λ_y − v(x, y) with v = λ_D σ(β(r − z₀)) or λ_U σ(β(z₀ − r))."""
        expected = []
        for logprob, ref, liked in zip(CHOSEN, REF_CHOSEN, self.LIKED, strict=True):
            r = logprob - ref
            if liked:
                expected.append(weights[0] - weights[0] * sigmoid(beta * (r - point)))
            else:
                expected.append(weights[1] - weights[1] * sigmoid(beta * (point - r)))
        logprobs, reference = tensors(CHOSEN, REF_CHOSEN)
        desirable = torch.tensor(self.LIKED, dtype=torch.uint8)
        options: dict[str, Any] = dict(beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
        close(kto_loss(logprobs, reference, desirable, point, **options), expected)
        close(kto_loss(logprobs, reference, desirable, torch.tensor(point), **options), expected, 1e-6)

    def test_reference_point(self) -> None:
        """(½ − ½ + ¼ − 5)/4 < 0 is held at 0; (0.5 − 0.5 + 0.25 + 3)/4."""
        logprobs, reference = tensors(CHOSEN, REF_CHOSEN)
        assert kto_reference_point(logprobs, reference).item() == 0
        point = kto_reference_point(torch.tensor([-3.0, -12.5, -0.25, -32.0]), reference)
        assert point.item() == pytest.approx(3.25 / 4) and point.dtype == torch.float64 and not point.requires_grad

    def test_reference_point_ignores_the_order_of_rows(self) -> None:
        logprobs = -100 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
        shuffled = logprobs[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
        reference = torch.full((1000,), -70.0)
        assert kto_reference_point(logprobs, reference).item() == kto_reference_point(shuffled, reference).item() > 0

    def test_no_mismatched_completion(self) -> None:
        assert kto_reference_point(torch.zeros(0), torch.zeros(0)).item() == 0


class TestBradleyTerry:
    @pytest.mark.parametrize(
        ("margin", "epsilon", "center"), [(0.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.0, 0.2, 0.0), (0.5, 0.1, 0.01)]
    )
    def test_the_formula(self, margin: float, epsilon: float, center: float) -> None:
        scores, others = [0.3, -2.0, 7.0, 1.0], [0.1, 1.0, -7.5, 1.0]
        expected = []
        for w, l in zip(scores, others, strict=True):  # noqa: E741
            z = w - l - margin
            value = -(1 - epsilon) * math.log(sigmoid(z)) - epsilon * math.log(sigmoid(-z))
            expected.append(value + center * (w + l) ** 2)
        chosen, rejected = tensors(scores, others)
        for given_margin in (margin, torch.full((4,), margin)):
            losses = bradley_terry_loss(chosen, rejected, given_margin, label_smoothing=epsilon, center_coef=center)
            close(losses, expected)

    def test_a_likelihood(self) -> None:
        """exp(−loss) is P(w over l), and adds up to 1 with P(l over w)."""
        first, second = tensors([0.3, -2.0], [0.1, 1.0])
        both = (-bradley_terry_loss(first, second)).exp() + (-bradley_terry_loss(second, first)).exp()
        close(both, [1.0, 1.0])


#: Every pairwise loss, with inputs [n] and [n].
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{f"dpo {name}": (lambda c, r, name=name: dpo_loss(c, r, beta=0.3, loss=name)) for name in DPO_LOSSES},
    "dpo smoothed": lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=0.1),
    "dpo robust smoothed": lambda c, r: dpo_loss(c, r, beta=0.3, loss="robust", label_smoothing=0.1),
    "simpo": lambda c, r: simpo_loss(c, r),
    "simpo smoothed": lambda c, r: simpo_loss(c, r, label_smoothing=0.1),
    "orpo": lambda c, r: orpo_loss(c, r, lam=0.5)[0],
    "kto": lambda c, r: kto_loss(c, r, torch.arange(len(c)) % 2, 0.5, beta=0.3),
    "bradley-terry": lambda c, r: bradley_terry_loss(c, r, 0.5, label_smoothing=0.1, center_coef=0.1),
}


@pytest.mark.parametrize("name", PAIRWISE)
class TestEveryLoss:
    def test_gradients_against_finite_differences(self, name: str) -> None:
        """In float64, away from the kink of the hinge (at a margin of 10/3) and of the odds (at 0)."""
        assert torch.autograd.gradcheck(PAIRWISE[name], tensors(MEAN_CHOSEN, MEAN_REJECTED))

    def test_extreme_logprobs(self, name: str) -> None:
        chosen, rejected = tensors([-1e4, -1e-3, -1e4], [-1e-3, -1e4, -1e4], dtype=torch.float32)
        losses = PAIRWISE[name](chosen, rejected)
        grads = torch.autograd.grad(losses.sum(), (chosen, rejected))
        assert all(bool(t.isfinite().all()) for t in (losses, *grads)), (losses, grads)

    def test_nothing(self, name: str) -> None:
        chosen, rejected = tensors([], [])
        losses = PAIRWISE[name](chosen, rejected)
        assert losses.shape == (0,)
        losses.sum().backward()

    def test_a_row_alone_and_in_company(self, name: str) -> None:
        """A loss of its own for each pair: NaN in one leaves the others as they are."""
        chosen, rejected = tensors(MEAN_CHOSEN, MEAN_REJECTED)
        broken = chosen.detach().clone()
        broken[1] = math.nan
        whole, other = PAIRWISE[name](chosen, rejected), PAIRWISE[name](broken, rejected)
        kept = torch.tensor([0, 2, 3])
        assert torch.equal(whole[kept], other[kept]) and bool(other[1].isnan())
