"""Masked reductions. They select, they do not multiply: a NaN under a zero mask changes nothing. Sums are taken in
float64 and in the order of the values themselves, so that no statistic depends on the order of rows, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """float64 scalar: the mean of ``values`` ``[n]`` where bool ``mask`` ``[n]``; 0 for no values."""
    kept = _kept(values, mask)
    return kept.sum() / max(1, len(kept))


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """float64 scalar: the unbiased variance of ``values`` ``[n]`` where ``mask``; 0 for fewer than two, and for
    equal ones."""
    import torch

    kept = _kept(values, mask)
    if len(kept) < 2 or bool(kept[0] == kept[-1]):  # sorted: all are equal, whatever their mean is rounded to
        return torch.zeros((), dtype=torch.float64)
    return ((kept - kept.mean()) ** 2).sum() / (len(kept) - 1)


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x − mean) / √(var + eps) with mean and unbiased variance over the selected values.

    Args:
        values: ``[n]``.
        mask: bool ``[n]``.

    Returns:
        ``[n]`` of the dtype of ``values``; outside of the mask the same map is applied, NaN stays NaN. Exactly 0
        everywhere where fewer than two values are selected, and where those selected are all equal. Equivariant to
        the order of the values, bit for bit.
    """
    import torch

    variance = masked_var(values, mask)
    if bool(variance == 0):
        return torch.zeros_like(values)
    centered = values.to(torch.float64) - masked_mean(values, mask)
    return (centered * torch.rsqrt(variance + eps)).to(values.dtype)


def explained_variance(predicted: Tensor, target: Tensor, mask: Tensor) -> float:
    """1 − Var(target − predicted) / Var(target) over the selected values: 1 is perfect, 0 no better than the
    mean. 0 where the target does not vary.

    Args:
        predicted, target: ``[n]``.
        mask: bool ``[n]``.
    """
    variance = float(masked_var(target, mask))
    return 1.0 - float(masked_var(target - predicted, mask)) / variance if variance > 0 else 0.0


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    """float64: the selected values, sorted."""
    import torch

    return values[mask].to(torch.float64).sort().values
