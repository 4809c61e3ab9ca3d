"""Token losses of policies and values. All take flat columns ``[num_tokens]`` and give one loss a token; what
becomes of them is :mod:`flowrl.functional.aggregation`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.functional.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ρ = exp(log π − log π_old), float ``[num_tokens]``; the log-ratio is clamped to ±20."""
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

    max(−Aρ, −A·clip(ρ, 1−low, 1+high)) with ρ = π/π_old. Asymmetric bounds are the clip-higher of DAPO (arXiv
    2503.14476). With ``dual_clip`` c, tokens with A < 0 are also capped at −A·c (Ye et al., arXiv
    1912.09729): a very unlikely token that became likely cannot dominate.

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
    high = clip_low if clip_high is None else clip_high
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + high)
    losses = torch.maximum(free, bounded)
    if dual_clip is not None:
        capped = torch.minimum(losses, -advantages * dual_clip)
        losses = torch.where(advantages < 0, capped, losses)
    return losses, (bounded > free).detach().to(losses.dtype)


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Half the squared error (V − R)², or with a clip the larger of it and that of V clipped to V_old ± clip
    (as PPO's reference implementation does).

    Args:
        values: float ``[num_tokens]`` with gradient.
        returns: float ``[num_tokens]``.
        old_values: float ``[num_tokens]``; needed with a clip.
        clip: None does not clip.

    Returns:
        losses ``[num_tokens]`` with gradient, and float ``[num_tokens]``, 1 where the clip holds the loss.
    """
    import torch

    squared = (values - returns) ** 2
    if clip is None:
        return squared / 2, torch.zeros_like(values)
    assert old_values is not None, "a clipped value loss needs the old values"
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    squared_clipped = (clipped - returns) ** 2
    held = (squared_clipped > squared).detach().to(values.dtype)
    return torch.maximum(squared, squared_clipped) / 2, held
