"""Estimates of the KL divergence from sampled tokens (John Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest

if TYPE_CHECKING:
    from torch import Tensor

KL_ESTIMATORS = ("k1", "abs", "k2", "k3")
#: exp() of a larger log-ratio says nothing more and overflows in float32.
MAX_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each token, for tokens sampled from π.

    With Δ = log π − log π_ref:

    * ``k1``: Δ. Unbiased, of either sign.
    * ``abs``: \\|Δ\\|. Biased; never negative.
    * ``k2``: Δ²/2. Biased a little, little variance; its gradient is that of the KL itself.
    * ``k3``: exp(−Δ) − 1 + Δ. Unbiased, never negative; Δ is clamped to ±20.

    Args:
        logprobs: float ``[num_tokens]``, with gradient where it is wanted.
        ref_logprobs: float ``[num_tokens]``.

    Returns:
        float ``[num_tokens]``.

    Raises:
        FlowError: an unknown estimator.
    """
    import torch

    delta = logprobs - ref_logprobs
    if estimator == "k1":
        return delta
    if estimator == "abs":
        return delta.abs()
    if estimator == "k2":
        return delta**2 / 2
    if estimator == "k3":
        delta = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.exp(-delta) - 1 + delta
    raise FlowError(
        f"There is no KL estimator {estimator!r}",
        expected=f"one of {', '.join(KL_ESTIMATORS)}",
        received=repr(estimator),
        do=nearest(estimator, KL_ESTIMATORS),
    )
