"""Divergences over the vocabulary: hand-computed values, limits, and gradients where a probability is 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowrl.errors import FlowError
from flowrl.functional.divergence import DIVERGENCES, divergence, top_k_divergence

P = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
LN2 = math.log(2)


def distributions(seed: int, rows: int = 5, vocab: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64), -1)


def test_hand_computed() -> None:
    # Σ p ln(p/q) = 0.5 ln 2 + 0 − 0.25 ln 2, and the same the other way round.
    assert divergence(P.log(), Q.log(), "reverse_kl").item() == pytest.approx(0.25 * LN2, abs=1e-15)
    assert divergence(P.log(), Q.log(), "forward_kl").item() == pytest.approx(0.25 * LN2, abs=1e-15)
    p, q, m = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5), (0.425, 0.25, 0.325)  # m = 0.3 q + 0.7 p
    expected = 0.3 * sum(b * math.log(b / c) for b, c in zip(q, m, strict=True))
    expected += 0.7 * sum(a * math.log(a / c) for a, c in zip(p, m, strict=True))
    assert divergence(P.log(), Q.log(), "jsd", beta=0.3).item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_never_negative_and_zero_for_equals(kind: str) -> None:
    a, b = distributions(0), distributions(1)
    assert bool((divergence(a, b, kind) > 0).all())
    assert torch.allclose(divergence(a, a, kind), torch.zeros(5, dtype=torch.float64), atol=1e-15)


def test_reverse_and_forward_are_each_others_mirror() -> None:
    a, b = distributions(0), distributions(1)
    assert torch.equal(divergence(a, b, "reverse_kl"), divergence(b, a, "forward_kl"))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_gradients_against_finite_differences(kind: str) -> None:
    logits = distributions(0, rows=2, vocab=4).requires_grad_()
    other = distributions(1, rows=2, vocab=4)
    assert torch.autograd.gradcheck(lambda x: divergence(torch.log_softmax(x, -1), other, kind, 0.3), (logits,))


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_a_token_without_probability_has_a_finite_gradient(kind: str) -> None:
    student = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64), -1)
    value = divergence(torch.log_softmax(student, -1), teacher, kind)
    value.sum().backward()
    assert bool(torch.isfinite(value).all()) and student.grad is not None and bool(torch.isfinite(student.grad).all())
    assert divergence(torch.log_softmax(student, -1), teacher, "reverse_kl").item() == math.inf


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_top_k_is_a_lower_bound_that_reaches_the_whole(kind: str) -> None:
    a, b = distributions(0), distributions(1)
    whole = divergence(a, b, kind)
    previous = torch.zeros(5, dtype=torch.float64)
    order = b.argsort(-1, descending=True)
    for k in (1, 3, 6, 7):
        ids = order[:, :k]
        part = top_k_divergence(a.gather(1, ids), b.gather(1, ids), kind)
        assert bool((part >= previous - 1e-12).all()) and bool((part <= whole + 1e-12).all())
        previous = part
    assert torch.allclose(previous, whole, atol=1e-9)
    two = top_k_divergence(P.log()[:, :1], Q.log()[:, :1], "forward_kl").item()
    assert two == pytest.approx(0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5), abs=1e-14)


def test_nothing_in_and_an_unknown_kind() -> None:
    assert divergence(torch.zeros(0, 3), torch.zeros(0, 3), "jsd").shape == (0,)
    with pytest.raises(FlowError, match=r"no divergence 'reverse'.*did you mean 'reverse_kl'"):
        divergence(P, Q, "reverse")
