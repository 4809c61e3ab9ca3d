"""Policy losses by hand, their gradients against finite differences, and what they make of extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flowrl.errors import FlowError
from flowrl.functional.covariance import clip_cov_loss, kl_cov_loss
from flowrl.functional.policy_losses import (
    cispo_loss,
    dppo_loss,
    dro_loss,
    geo_mean_loss,
    gpg_loss,
    gspo_loss,
    importance_ratio,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
)
from flowrl.ragged import Ragged

# -- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "want", "clipped"),
    [
        (1.0, 2.0, {}, -2.0, 0.0),
        (1.5, 2.0, {}, -2.4, 1.0),  # no reward for going further than 1.2
        (1.5, 2.0, {"clip_high": 0.6}, -3.0, 0.0),
        (0.5, 2.0, {}, -1.0, 0.0),  # a good token that became unlikely is pulled back in full
        (0.5, -2.0, {}, 1.6, 1.0),
        (5.0, -2.0, {}, 10.0, 0.0),
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 1.0),  # the dual clip is for negative advantages alone
    ],
)
def test_ppo_by_hand(ratio: float, advantage: float, settings, want: float, clipped: float) -> None:
    losses, held = ppo_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), **settings)
    assert losses.tolist() == pytest.approx([want])
    assert held.tolist() == [clipped]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    ppo_loss(logprobs, torch.zeros(2), torch.ones(2))[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_gspo_by_hand() -> None:
    """Ratios 4 and 1 of one response: √4 = 2 at both tokens, of which a positive advantage may keep 1.5."""
    mask = Ragged.from_rows([[1, 0, 1]], torch.uint8)
    logprobs = torch.tensor([math.log(4.0), math.nan, 0.0], requires_grad=True)
    losses, clipped = gspo_loss(logprobs, torch.zeros(3), torch.ones(3), mask, clip_low=0.5, clip_high=0.5)
    assert losses[[0, 2]].tolist() == pytest.approx([-1.5, -1.5]) and clipped[[0, 2]].tolist() == [1.0, 1.0]
    losses, clipped = gspo_loss(logprobs, torch.zeros(3), -torch.ones(3), mask, clip_low=0.5, clip_high=0.5)
    assert losses[[0, 2]].tolist() == pytest.approx([2.0, 2.0]) and clipped[[0, 2]].tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(losses[0] + losses[2], logprobs)
    assert gradient[[0, 2]].tolist() == pytest.approx([2.0, 2.0])  # each token its own, not the mean over the row


def test_gmpo_by_hand() -> None:
    """Log-ratios 1 and −1, clipped to 0.4 where the advantage pushes: mean −0.3 for A = 2, 0.3 for A = −2."""
    mask = Ragged.from_rows([[1, 1, 0]], torch.uint8)
    logprobs = torch.tensor([1.0, -1.0, math.nan], requires_grad=True)
    losses, clipped = geo_mean_loss(logprobs, torch.zeros(3), torch.tensor([2.0, 2.0, math.nan]), mask)
    assert losses[:2].tolist() == pytest.approx([-2 * math.exp(-0.3)] * 2, rel=1e-6)
    assert clipped[:2].tolist() == [1.0, 0.0]
    (gradient,) = torch.autograd.grad(losses[:2].mean(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -math.exp(-0.3), 0.0], rel=1e-6)
    losses, clipped = geo_mean_loss(logprobs, torch.zeros(3), torch.full((3,), -2.0), mask)
    assert losses[:2].tolist() == pytest.approx([2 * math.exp(0.3)] * 2, rel=1e-6)
    assert clipped[:2].tolist() == [0.0, 1.0]


def test_sapo_by_hand() -> None:
    """At a ratio of 1 the gate is 2/τ with the slope of PPO; the temperature goes by the sign of the advantage."""
    logprobs = torch.tensor([0.0, 0.0, math.log(2.0)], requires_grad=True)
    losses = sapo_loss(logprobs, torch.zeros(3), torch.tensor([3.0, -3.0, 1.0]), tau_pos=2.0, tau_neg=4.0)
    assert losses.tolist() == pytest.approx([-3.0, 1.5, -2 / (1 + math.exp(-2.0))])
    losses.sum().backward()
    assert logprobs.grad is not None and logprobs.grad[:2].tolist() == pytest.approx([-3.0, 3.0])


def test_cispo_by_hand() -> None:
    """The weight is clipped at 1.28, the gradient is not lost; there is no lower bound by default."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = logprobs.detach() - torch.tensor([1.0, -3.0])
    losses, clipped = cispo_loss(logprobs, old, torch.tensor([2.0, 2.0]))
    assert losses.tolist() == pytest.approx([2 * 1.28, 4 * math.exp(-3.0)])
    assert clipped.tolist() == [1.0, 0.0]
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2 * 1.28, -2 * math.exp(-3.0)])
    assert cispo_loss(logprobs, old, torch.ones(2), clip_low=0.2)[1].tolist() == [1.0, 1.0]


def test_dro_and_reinforce_by_hand() -> None:
    logprobs, old, advantages = torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([2.0])
    assert dro_loss(logprobs, old, advantages, beta=0.5).tolist() == pytest.approx([2.0 + 0.25 * 4])
    assert reinforce_loss(logprobs, advantages).tolist() == gpg_loss(logprobs, advantages).tolist() == [2.0]


@pytest.mark.parametrize(
    ("old", "new", "advantage", "divergence", "kept"),
    [
        (0.5, 0.64, 1.0, "tv", True),  # 0.14 further
        (0.5, 0.66, 1.0, "tv", False),
        (0.5, 0.66, -1.0, "tv", True),  # the advantage pushes it back
        (0.66, 0.5, -1.0, "tv", False),
        (0.66, 0.5, 1.0, "tv", True),
        (1e-4, 0.1, 1.0, "tv", True),  # a ratio of 1000 on a token that hardly matters
        (0.5, 0.66, 1.0, "kl", False),  # 0.5·log(0.5/0.66) + 0.5·log(0.5/0.34) = 0.054
        (0.5, 0.64, 1.0, "kl", True),  # 0.041
        (0.5, 0.66, 0.0, "tv", True),
        (1.0, 0.5, -1.0, "kl", False),  # certain before: log 2
        (0.5, 1.0, 1.0, "kl", False),
        (1.0, 1.0, 1.0, "kl", True),
    ],
)
def test_dppo_by_hand(old: float, new: float, advantage: float, divergence: str, kept: bool) -> None:
    bound = {"tv": 0.15, "kl": 0.05}[divergence]
    logprobs = torch.tensor([math.log(new)], requires_grad=True)
    losses, too_far = dppo_loss(
        logprobs,
        torch.tensor([math.log(old)]),
        torch.tensor([advantage]),
        divergence=divergence,
        clip_low=bound,
        ratio_cap=3.0,
    )
    assert too_far.tolist() == [0.0 if kept else 1.0]
    assert losses.tolist() == pytest.approx([-advantage * min(new / old, 3.0) * math.log(new) if kept else 0.0])
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-advantage * min(new / old, 3.0) if kept else 0.0])


def test_dppo_knows_two_divergences() -> None:
    with pytest.raises(FlowError, match="one of tv, kl"):
        dppo_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), divergence="js")
    with pytest.raises(FlowError, match="did you mean"):
        dppo_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), divergence="kll")


# -- gradients against finite differences ----------------------------------------------------------------------------

MASK = Ragged.from_rows([[1, 1, 0, 1, 1], [1], [0, 0], [1, 1, 1, 0, 1, 1, 1], [], [1] * 12], torch.uint8)
WHERE = MASK.values.bool()
ROWS = [[t for t in range(a, b) if WHERE[t]] for a, b in zip(MASK.offsets[:-1], MASK.offsets[1:], strict=True)]
NUMBER = len(MASK.values)


def draws(seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(NUMBER, generator=generator, dtype=torch.float64)


X0 = -draws(106, 1.0).abs() - 0.1  # the current log-probs
OLD = (X0 - draws(6, 0.5)).clamp(max=-0.01)
A = draws(206, 1.0)
MARKED = draws(4, 1.0) > 0


@dataclass
class Frozen:
    """A surrogate, and the same in plain Python with the parts that pass no gradient taken at the point ``X0``."""

    loss: Callable[[Tensor], Tensor]
    by_hand: Callable[[list[float], int], float]  # (log-probs, token) → its loss


def ratio(x: list[float], t: int) -> float:
    return math.exp(x[t] - float(OLD[t]))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(x: list[float], t: int, dual: float = math.inf) -> float:
    a, r = float(A[t]), ratio(x, t)
    loss = max(-a * r, -a * clip(r, 0.8, 1.28))
    return min(loss, -a * dual) if a < 0 else loss


def row_of(t: int) -> list[int]:
    return next(row for row in ROWS if t in row)


def gspo(x: list[float], t: int) -> float:
    row, a = row_of(t), float(A[t])
    mean = sum(float(X0[i] - OLD[i]) for i in row) / len(row)
    s = math.exp(mean) * math.exp(x[t]) / math.exp(float(X0[t]))
    return max(-a * s, -a * clip(s, 0.8, 1.28))


def gmpo(x: list[float], t: int) -> float:
    row = row_of(t)
    total = 0.0
    for i in row:
        delta = x[i] - float(OLD[i])
        total += min(delta, 0.28) if A[i] > 0 else max(delta, -0.2)
    return -sum(float(A[i]) for i in row) / len(row) * math.exp(total / len(row))


def sapo(x: list[float], t: int) -> float:
    tau = 1.5 if A[t] > 0 else 2.5
    return -float(A[t]) * 4 / tau / (1 + math.exp(-tau * (ratio(x, t) - 1)))


def cispo(x: list[float], t: int) -> float:
    return -float(A[t]) * clip(ratio(X0.tolist(), t), 0.7, 1.25) * x[t]


def dro(x: list[float], t: int) -> float:
    return -(float(A[t]) * x[t] - 0.35 * (x[t] - float(OLD[t])) ** 2)


def dppo(kind: str, x: list[float], t: int) -> float:
    a, p, q = float(A[t]), math.exp(float(X0[t])), math.exp(float(OLD[t]))
    distance = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (a > 0 and p > q and distance > 0.12) or (a <= 0 and p < q and distance > 0.06):
        return 0.0
    return -a * min(p / q, 1.4) * x[t]


def kl_cov(x: list[float], t: int) -> float:
    return -float(A[t]) * ratio(x, t) + (0.3 * abs(x[t] - float(OLD[t])) if MARKED[t] else 0.0)


SURROGATES = {
    "ppo": Frozen(lambda x: ppo_loss(x, OLD, A, clip_high=0.28)[0], ppo),
    "ppo, dual clip": Frozen(
        lambda x: ppo_loss(x, OLD, A, clip_high=0.28, dual_clip=1.3)[0], lambda x, t: ppo(x, t, 1.3)
    ),
    "gspo": Frozen(lambda x: gspo_loss(x, OLD, A, MASK, clip_low=0.2, clip_high=0.28)[0], gspo),
    "gmpo": Frozen(lambda x: geo_mean_loss(x, OLD, A, MASK, clip_low=0.2, clip_high=0.28)[0], gmpo),
    "sapo": Frozen(lambda x: sapo_loss(x, OLD, A, tau_pos=1.5, tau_neg=2.5), sapo),
    "reinforce": Frozen(lambda x: reinforce_loss(x, A), lambda x, t: -float(A[t]) * x[t]),
    "gpg": Frozen(lambda x: gpg_loss(x, A), lambda x, t: -float(A[t]) * x[t]),
    "cispo": Frozen(lambda x: cispo_loss(x, OLD, A, clip_low=0.3, clip_high=0.25)[0], cispo),
    "dro": Frozen(lambda x: dro_loss(x, OLD, A, beta=0.7), dro),
    "dppo, tv": Frozen(
        lambda x: dppo_loss(x, OLD, A, clip_low=0.06, clip_high=0.12, ratio_cap=1.4)[0],
        lambda x, t: dppo("tv", x, t),
    ),
    "dppo, kl": Frozen(
        lambda x: dppo_loss(x, OLD, A, divergence="kl", clip_low=0.06, clip_high=0.12, ratio_cap=1.4)[0],
        lambda x, t: dppo("kl", x, t),
    ),
    "kl-cov": Frozen(lambda x: kl_cov_loss(x, OLD, A, MARKED, coef=0.3), kl_cov),
    "clip-cov": Frozen(
        lambda x: clip_cov_loss(x, OLD, A, MARKED, clip_high=0.28)[0], lambda x, t: 0.0 if MARKED[t] else ppo(x, t)
    ),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_gradients_against_finite_differences(name: str) -> None:
    """In float64, with detached parts frozen. Differences to both sides agree, so no token is at a kink."""
    surrogate, step = SURROGATES[name], 1e-6
    factors = torch.where(WHERE, 1 + draws(5, 0.3), 0.0)
    x = X0.clone().requires_grad_()
    losses = surrogate.loss(x)
    assert losses.dtype == torch.float64 and losses.shape == x.shape
    (factors * torch.where(WHERE, losses, 0.0)).sum().backward()
    assert x.grad is not None

    def total(point: list[float]) -> float:
        return sum(float(factors[t]) * surrogate.by_hand(point, t) for row in ROWS for t in row)

    at = X0.tolist()
    assert torch.allclose(
        losses.detach()[WHERE],
        torch.tensor([surrogate.by_hand(at, t) for row in ROWS for t in row], dtype=torch.float64),
        rtol=1e-10,
        atol=1e-12,
    )
    for t in range(NUMBER):
        up, down = ([v + d * (i == t) for i, v in enumerate(at)] for d in (step, -step))
        forward, backward = (total(up) - total(at)) / step, (total(at) - total(down)) / step
        assert forward == pytest.approx(backward, rel=1e-4, abs=1e-4), "at a kink"
        assert float(x.grad[t]) == pytest.approx((forward + backward) / 2, rel=1e-6, abs=1e-7)


def test_the_points_reach_every_branch() -> None:
    """Both signs of the advantage, clipped and unclipped, kept and not kept."""
    inside = [ppo_loss(X0, OLD, A, clip_high=0.28)[1], cispo_loss(X0, OLD, A, clip_low=0.3, clip_high=0.25)[1]]
    inside += [f(X0, OLD, A, MASK, clip_low=0.2, clip_high=0.28)[1] for f in (gspo_loss, geo_mean_loss)]
    inside += [dppo_loss(X0, OLD, A, divergence=d, clip_low=0.06, clip_high=0.12)[1] for d in ("tv", "kl")]
    for held in inside:
        for sign in (A > 0, A < 0):
            assert 0 < float(held[WHERE & sign].sum()) < int((WHERE & sign).sum())


# -- extremes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_are_finite(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-ratios of ±100 with either sign of the advantage, and tokens of probability 1 and nearly 0."""
    signs = torch.arange(NUMBER) % 2 * 2.0 - 1
    monkeypatch.setitem(globals(), "OLD", torch.where(signs > 0, -100.0, 0.0).to(dtype))
    monkeypatch.setitem(globals(), "A", ((torch.arange(NUMBER) // 2 % 2) * 2.0 - 1).to(dtype))
    x = torch.where(signs > 0, 0.0, -100.0).to(dtype).requires_grad_()
    losses = SURROGATES[name].loss(x)
    losses[WHERE].sum().backward()
    assert x.grad is not None and losses.dtype == dtype
    assert bool(losses[WHERE].isfinite().all()) and bool(x.grad.isfinite().all())


def test_the_ratio_stays_finite() -> None:
    got = importance_ratio(torch.tensor([500.0, -500.0]), torch.zeros(2)).log()
    assert got.tolist() == pytest.approx([20.0, -20.0])


@pytest.mark.parametrize("name", SURROGATES)
def test_no_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    for column in ("OLD", "A"):
        monkeypatch.setitem(globals(), column, nothing)
    monkeypatch.setitem(globals(), "MARKED", nothing.bool())
    monkeypatch.setitem(globals(), "MASK", Ragged.from_rows([], torch.uint8))
    assert SURROGATES[name].loss(nothing).tolist() == []


@pytest.mark.parametrize("loss", [gspo_loss, geo_mean_loss])
def test_what_does_not_count_does_not_move_a_row(loss: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """NaN outside of the mask changes no loss and no gradient inside; a row without a token is finite."""
    dirty = torch.where(WHERE, X0, math.nan).requires_grad_()
    clean = torch.where(WHERE, X0, 0.0).requires_grad_()
    got = [
        loss(x, torch.where(WHERE, OLD, x.detach()), torch.where(WHERE, A, x.detach()), MASK)[0] for x in (dirty, clean)
    ]
    assert torch.equal(got[0][WHERE], got[1][WHERE])
    for losses in got:
        torch.where(WHERE, losses, 0.0).sum().backward()
    assert dirty.grad is not None and clean.grad is not None
    assert torch.equal(dirty.grad[WHERE], clean.grad[WHERE])
    empty = Ragged.from_rows([[0, 0]], torch.uint8)
    losses, _ = loss(torch.tensor([5.0, -5.0]), torch.zeros(2), torch.ones(2), empty)
    assert bool(losses.isfinite().all())
