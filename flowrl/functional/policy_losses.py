"""Token losses of policies: the surrogates that policy-gradient methods minimise.

Columns are flat, ``[num_tokens]`` in response layout: ``logprobs`` of the current policy with gradient, ``old_logprobs``
before the update, ``advantages``. A surrogate gives one loss a token; what becomes of them is the business of
:mod:`flowrl.functional.aggregation`. Those that look at whole responses also take the ``mask`` of the tokens that count.

ρ is the ratio π/π_old, sg(·) passes no gradient, A is the advantage. Every function keeps the dtype of ``logprobs``,
gives empty results for no tokens, and is finite in value and gradient for any finite log-probs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest
from flowrl.functional.aggregation import row_means
from flowrl.functional.kl import MAX_LOG_RATIO
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: What :func:`dppo_loss` may bound.
DPPO_DIVERGENCES = ("tv", "kl")
#: GSPO's ratio is that of a whole response and is clamped where exp() of it stops saying anything.
MAX_SEQUENCE_LOG_RATIO = 10.0


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ρ = exp(log π − log π_old), float ``[num_tokens]``; the log-ratio is clamped to ±20, beyond which ρ has no
    gradient."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al., arXiv 1707.06347).

    max(−Aρ, −A·clip(ρ, 1−low, 1+high)). Asymmetric bounds are the clip-higher of DAPO (arXiv 2503.14476). With
    ``dual_clip`` c, tokens with A < 0 are also capped at −A·c (Ye et al., arXiv 1912.09729): a very unlikely token that
    became likely cannot dominate.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        clip_low: ε below 1.
        clip_high: ε above 1; None takes ``clip_low``.
        dual_clip: c > 1, or None.

    Returns:
        losses ``[num_tokens]`` with gradient, and float ``[num_tokens]``, 1 where the clip holds the loss.
    """
    import torch

    ratio = importance_ratio(logprobs, old_logprobs)
    losses, held = _clipped(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        capped = torch.minimum(losses, -advantages * dual_clip)
        losses = torch.where(advantages < 0, capped, losses)
    return losses, held


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Ragged,
    *,
    clip_low: float = 3e-4,
    clip_high: float | None = 4e-4,
) -> tuple[Tensor, Tensor]:
    """Group sequence policy optimisation (Zheng et al., arXiv 2507.18071), in its token form.

    s = sg(exp(mean over the response of log ρ)) · π/sg(π), clipped as in PPO: every token of a response has the
    response's geometric mean ratio, and passes the gradient on to its own log-prob. The mean log-ratio is clamped to at
    most 10.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``; one number a response in the paper.
        mask: uint8 or bool ragged: the tokens over which the mean is taken. A row without one has ratio 1.
        clip_low: ε below 1; ratios of whole responses stay close to 1, so it is much smaller than PPO's.
        clip_high: ε above 1; None takes ``clip_low``.

    Returns:
        losses ``[num_tokens]`` with gradient, and float ``[num_tokens]``, 1 where the clip holds the loss.
    """
    log_ratio = row_means(logprobs.detach() - old_logprobs, mask)[mask.row_of_value]
    ratio = (logprobs - logprobs.detach() + log_ratio).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    return _clipped(ratio, advantages, clip_low, clip_high)


def geo_mean_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Ragged,
    *,
    clip_low: float = 0.4,
    clip_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Geometric-mean policy optimisation (GMPO, Zhao et al., arXiv 2507.20673).

    −mean(A) · exp(mean over the response of the clipped log ρ). The log-ratio of each token is clipped to
    [−low, high] on the side that its advantage would otherwise push it to, and their mean is clamped to at most 20.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``; one number a response in the paper.
        mask: uint8 or bool ragged: the tokens over which the means are taken.
        clip_low: ε below 0 of the log-ratio.
        clip_high: ε above 0; None takes ``clip_low``.

    Returns:
        losses ``[num_tokens]`` with gradient: the response's loss at each of its tokens, so that "seq-mean-token-mean"
        is the plain mean over responses (a row without a token has loss 0 and is not counted); and float
        ``[num_tokens]``, 1 where a log-ratio is clipped.
    """
    import torch

    log_ratio = logprobs - old_logprobs
    high = clip_low if clip_high is None else clip_high
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, high))
    ratio = row_means(bounded, mask).clamp(max=MAX_LOG_RATIO).exp()
    losses = (-row_means(advantages, mask) * ratio)[mask.row_of_value]
    clipped = (sign != 0) & (bounded != log_ratio)
    return losses, clipped.detach().to(losses.dtype)


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    """Soft adaptive policy optimisation (Gao et al., arXiv 2511.20347): a sigmoid gate in place of the clip.

    −A · 4/τ · sigmoid(τ(ρ − 1)), with τ by the sign of A. At ρ = 1 its slope is that of −Aρ, and it fades smoothly as ρ
    moves away.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        tau_pos: the temperature where A > 0.
        tau_neg: that of the others; larger fades faster.

    Returns:
        losses ``[num_tokens]`` with gradient.
    """
    import torch

    ratio = importance_ratio(logprobs, old_logprobs)
    positive, negative = (torch.tensor(tau, dtype=ratio.dtype) for tau in (tau_pos, tau_neg))
    tau = torch.where(advantages > 0, positive, negative)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A · log π: the likelihood-ratio policy gradient (REINFORCE, Williams 1992). Right for one step on samples of
    the policy itself; nothing bounds a second one.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        advantages: float ``[num_tokens]``.

    Returns:
        losses ``[num_tokens]`` with gradient.
    """
    return -advantages * logprobs


def gpg_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Group policy gradient (Chu et al., arXiv 2504.02546): −A · log π, as :func:`reinforce_loss`; what is its own
    is the advantage.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        advantages: float ``[num_tokens]``.

    Returns:
        losses ``[num_tokens]`` with gradient.
    """
    return reinforce_loss(logprobs, advantages)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float | None = 0.28,
) -> tuple[Tensor, Tensor]:
    """Clipped importance-sampling policy optimisation (MiniMax-M1, arXiv 2506.13585).

    −A · sg(clip(ρ, 1−low, 1+high)) · log π: the weight is clipped, not the update, so that no token loses its
    gradient.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        clip_low: ε below 1; 1 or more is no lower bound, as in the paper.
        clip_high: ε above 1; None takes ``clip_low``.

    Returns:
        losses ``[num_tokens]`` with gradient, and float ``[num_tokens]``, 1 where the weight is clipped.
    """
    ratio = importance_ratio(logprobs, old_logprobs).detach()
    high = clip_low if clip_high is None else clip_high
    weight = ratio.clamp(1 - clip_low, 1 + high)
    return -advantages * weight * logprobs, (weight != ratio).to(logprobs.dtype)


def dro_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float = 0.05) -> Tensor:
    """Direct reward optimisation (Richemond et al., arXiv 2405.19107), token by token: a quadratic pull towards the old
    policy instead of a clip.

    −(A·log π − β/2·(log π − log π_old)²). The log-ratio is not clamped: the further a token went, the harder it is
    pulled back.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        beta: strength of the pull.

    Returns:
        losses ``[num_tokens]`` with gradient.
    """
    return -(advantages * logprobs - beta / 2 * (logprobs - old_logprobs) ** 2)


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: str = "tv",
    clip_low: float = 0.15,
    clip_high: float | None = None,
    ratio_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Divergence proximal policy optimisation (Qi et al., arXiv 2602.04879), in its binary form.

    −A · sg(min(ρ, cap)) · log π, kept only where π has not gone further from π_old than ``clip_high`` (A > 0) or
    ``clip_low`` (A ≤ 0) in the direction that A pushes it to. The divergence is that of "this token or any other":
    \\|π − π_old\\| for "tv", π_old·log(π_old/π) + (1−π_old)·log((1−π_old)/(1−π)) for "kl". A ratio bounds unlikely tokens
    too tightly and likely ones too loosely; these do neither.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        divergence: "tv" or "kl".
        clip_low: the bound where A ≤ 0.
        clip_high: the bound where A > 0; None takes ``clip_low``.
        ratio_cap: the largest weight; None leaves it.

    Returns:
        losses ``[num_tokens]`` with gradient, 0 where not kept, and float ``[num_tokens]``, 1 there.

    Raises:
        FlowError: an unknown divergence.
    """
    import torch

    ratio, new, old = importance_ratio(logprobs, old_logprobs).detach(), logprobs.detach(), old_logprobs
    if divergence == "tv":
        distance = (new.exp() - old.exp()).abs()
    elif divergence == "kl":
        distance = _binary_kl(old, new)
    else:
        raise FlowError(
            f"There is no divergence {divergence!r}",
            expected=f"one of {', '.join(DPPO_DIVERGENCES)}",
            received=repr(divergence),
            do=nearest(divergence, DPPO_DIVERGENCES),
        )
    high = clip_low if clip_high is None else clip_high
    too_far = torch.where(advantages > 0, (new > old) & (distance > high), (new < old) & (distance > clip_low))
    weight = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    losses = torch.where(too_far, torch.zeros((), dtype=logprobs.dtype), -advantages * weight * logprobs)
    return losses, too_far.to(logprobs.dtype)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float | None) -> tuple[Tensor, Tensor]:
    """max(−Ar, −A·clip(r)), and 1 where the clip holds it."""
    import torch

    high = clip_low if clip_high is None else clip_high
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + high)
    return torch.maximum(free, bounded), (bounded > free).detach().to(ratio.dtype)


def _binary_kl(p_log: Tensor, q_log: Tensor) -> Tensor:
    """KL(p ‖ q) of the two outcomes "this token" and "another", from log-probs ``[num_tokens]``, finite at certainty."""
    import torch

    tiny = torch.finfo(p_log.dtype).tiny
    p, rest_p, rest_q = p_log.exp(), -torch.expm1(p_log), -torch.expm1(q_log)
    other = rest_p * (rest_p.clamp(min=tiny).log() - rest_q.clamp(min=tiny).log())
    return p * (p_log - q_log) + other
