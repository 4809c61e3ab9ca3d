"""The loss of a critic, token by token; flat columns ``[num_tokens]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Half the squared error (V − R)², or with a clip the larger of it and that of V clipped to V_old ± clip
    (as PPO's reference implementation does, arXiv 1707.06347).

    Args:
        values: float ``[num_tokens]`` with gradient.
        returns: float ``[num_tokens]``.
        old_values: float ``[num_tokens]``; needed with a clip.
        clip: None does not clip.

    Returns:
        losses ``[num_tokens]`` with gradient, and float ``[num_tokens]``, 1 where the clip holds the loss; empty
        for no tokens.
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
