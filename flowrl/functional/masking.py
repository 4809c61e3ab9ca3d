"""Masked reductions. They select, they do not multiply: a NaN under a zero mask changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """float64 scalar: the mean of ``values`` ``[n]`` where bool ``mask`` ``[n]``; 0 for no values."""
    import torch

    kept = values[mask].to(torch.float64)
    return kept.sum() / max(1, len(kept))


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """float64 scalar: the unbiased variance of ``values`` ``[n]`` where ``mask``; 0 for fewer than two."""
    import torch

    kept = values[mask].to(torch.float64)
    if len(kept) < 2:
        return torch.zeros((), dtype=torch.float64)
    return ((kept - kept.mean()) ** 2).sum() / (len(kept) - 1)


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x − mean) / √(var + eps) with mean and unbiased variance over the selected values.

    Args:
        values: ``[n]``.
        mask: bool ``[n]``.

    Returns:
        ``[n]`` of the dtype of ``values``; outside of the mask the same map is applied, NaN stays NaN. Fewer
        than two selected values become 0.
    """
    import torch

    centered = values.to(torch.float64) - masked_mean(values, mask)
    return (centered * torch.rsqrt(masked_var(values, mask) + eps)).to(values.dtype)


def explained_variance(predicted: Tensor, target: Tensor, mask: Tensor) -> float:
    """1 − Var(target − predicted) / Var(target) over the selected values: 1 is perfect, 0 no better than the
    mean. 0 where the target does not vary.

    Args:
        predicted, target: ``[n]``.
        mask: bool ``[n]``.
    """
    variance = float(masked_var(target, mask))
    return 1.0 - float(masked_var(target - predicted, mask)) / variance if variance > 0 else 0.0
