"""Estimates of the KL divergence from sampled tokens (John Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest

if TYPE_CHECKING:
    from torch import Tensor

#: A name with "_st" has the value of the estimator before it and, straight through, the gradient of k2.
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1_st", "abs_st", "k3_st")
#: exp() of a larger log-ratio says nothing more and overflows in float32.
MAX_LOG_RATIO = 20.0

_STRAIGHT_THROUGH = "_st"


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each token, for tokens sampled from π.

    With Δ = log π − log π_ref:

    * ``k1``: Δ. Unbiased, of either sign.
    * ``abs``: \\|Δ\\|. Biased; never negative.
    * ``k2``: Δ²/2. Biased a little, little variance.
    * ``k3``: exp(−Δ) − 1 + Δ. Unbiased, never negative; Δ is clamped to ±20.
    * ``k1_st``, ``abs_st``, ``k3_st``: the value of k1, abs or k3 with the gradient of k2, "straight through".

    In a reward only the value matters. In a loss only the gradient does, and the two are different questions: over
    tokens of π, the gradient of k2, Δ·∇log π, is an unbiased gradient of KL(π ‖ π_ref). That of k1 is ∇log π, 0 in the
    mean (k1 in a loss is only noise), and that of k3 is (1 − exp(−Δ))·∇log π, the gradient of the other divergence,
    KL(π_ref ‖ π). So ``k3_st`` reports k3 and descends the KL itself. (k2 is its own straight-through variant.)

    Args:
        logprobs: float ``[num_tokens]``, with gradient where it is wanted.
        ref_logprobs: float ``[num_tokens]``.
        estimator: one of ``KL_ESTIMATORS``.

    Returns:
        float ``[num_tokens]``; empty for no tokens.

    Raises:
        FlowError: an unknown estimator.
    """
    import torch

    if estimator not in KL_ESTIMATORS:
        raise FlowError(
            f"There is no KL estimator {estimator!r}",
            expected=f"one of {', '.join(KL_ESTIMATORS)}",
            received=repr(estimator),
            do=nearest(estimator, KL_ESTIMATORS),
        )
    delta = logprobs - ref_logprobs
    k2 = delta**2 / 2
    if estimator == "k2":
        return k2
    name = estimator.removesuffix(_STRAIGHT_THROUGH)
    if name == "k1":
        value = delta
    elif name == "abs":
        value = delta.abs()
    else:
        clamped = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = torch.exp(-clamped) - 1 + clamped
    if estimator.endswith(_STRAIGHT_THROUGH):
        return value.detach() + (k2 - k2.detach())
    return value
