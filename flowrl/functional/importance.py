"""Corrections for tokens that another policy sampled: truncated importance weights, IcePop's band, rejection masks.

The sampler μ (an inference engine, older weights) gave ``rollout_logprobs``; the trainer's own log-probs of the same
tokens, before the update, are ``old_logprobs``. Their ratio π_old/μ is what the token losses must be weighted with. All
take flat columns in response layout and the ``mask`` of the tokens that the policy wrote: elsewhere (observations) there
may be anything, the weight is 1 and nothing is rejected. Log-ratios are clamped to ±20. A NaN at a token of the policy
is a fault, not an off-policy token: it is never rejected, and goes on into the loss, where it stops the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest
from flowrl.functional.kl import MAX_LOG_RATIO, kl_estimate
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_LEVELS = ("token", "sequence")
REJECTION_LEVELS = ("token", "sequence_mean", "sequence_max")
REJECTION_ESTIMATORS = ("k1", "k2", "k3")


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Ragged, *, level: str = "token") -> Tensor:
    """π_old/μ of each token, or of the whole response it belongs to.

    Args:
        old_logprobs: float ``[num_tokens]`` of the trainer before the update.
        rollout_logprobs: float ``[num_tokens]`` of the sampler.
        mask: uint8 or bool ragged: the tokens that the policy wrote.
        level: "token", or "sequence" for the product of the ratios of a row, the same at each of its tokens.

    Returns:
        float ``[num_tokens]``, detached; 1 outside of the mask. Between e⁻²⁰ and e²⁰.

    Raises:
        FlowError: an unknown level.
    """
    import torch

    _known(level, WEIGHT_LEVELS, "level")
    selected = mask.values.bool()
    log_ratio = torch.where(
        selected, (old_logprobs - rollout_logprobs).detach(), torch.zeros((), dtype=old_logprobs.dtype)
    )
    if level == "sequence":
        totals = mask.with_values(log_ratio.to(torch.float64)).sum_rows().to(log_ratio.dtype)
        log_ratio = torch.where(selected, totals[mask.row_of_value], torch.zeros((), dtype=log_ratio.dtype))
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate_weights(weights: Tensor, threshold: float, low: float | None = None) -> Tensor:
    """min(w, threshold), and at least ``low`` where it is given: truncated importance sampling (Ionides 2008; in
    actor-critics Espeholt et al., arXiv 1802.01561). A bounded weight has bounded variance, at the price of a bias.

    Args:
        weights: float ``[n]``.
        threshold: the largest weight.
        low: the smallest; None leaves small ones.

    Returns:
        float ``[n]``.
    """
    return weights.clamp(min=low, max=threshold)


def icepop_weights(weights: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """w where low ≤ w ≤ high, else 0: a band of two sides (IcePop, Ling Team, arXiv 2510.18855). Tokens on which sampler
    and trainer disagree give no gradient, in either direction.

    Args:
        weights: float ``[n]``.
        low, high: the band.

    Returns:
        float ``[n]``.
    """
    import torch

    outside = (weights < low) | (weights > high)
    return torch.where(outside, torch.zeros((), dtype=weights.dtype), weights)


def rejected_tokens(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Ragged,
    *,
    threshold: float,
    low: float | None = None,
    level: str = "token",
    estimator: str = "k3",
) -> Tensor:
    """The tokens to leave out, because sampler and trainer are too far apart there or anywhere in the response.

    d is the estimate of KL(μ ‖ π_old) at a token, with Δ = log μ − log π_old: Δ (k1), Δ²/2 (k2) or exp(−Δ)−1+Δ (k3).
    It may lie in [low, threshold]:

    * "token": each token for itself;
    * "sequence_mean": the mean of d over the row decides about the row;
    * "sequence_max": one token outside rejects the row.

    Args:
        old_logprobs: float ``[num_tokens]`` of the trainer before the update.
        rollout_logprobs: float ``[num_tokens]`` of the sampler.
        mask: uint8 or bool ragged: the tokens that the policy wrote.
        threshold: the largest d that is kept.
        low: the smallest; None takes −threshold, which only k1 can go below.
        level: one of ``REJECTION_LEVELS``.
        estimator: one of ``REJECTION_ESTIMATORS``.

    Returns:
        bool ``[num_tokens]``, False outside of the mask.

    Raises:
        FlowError: an unknown level or estimator.
    """
    from flowrl.functional.aggregation import row_means

    _known(level, REJECTION_LEVELS, "level")
    _known(estimator, REJECTION_ESTIMATORS, "estimator")
    selected = mask.values.bool()
    smallest = -threshold if low is None else low
    distance = kl_estimate(rollout_logprobs, old_logprobs, estimator).detach()
    if level == "sequence_mean":
        distance = row_means(distance, mask)[mask.row_of_value]
    outside = selected & ((distance > threshold) | (distance < smallest))
    if level == "sequence_max":
        outside = selected & (mask.with_values(outside.int()).sum_rows() > 0)[mask.row_of_value]
    return outside


def geometric_row_means(weights: Tensor, mask: Ragged) -> Tensor:
    """exp(mean of log w) of each row over its selected tokens: 1 for a row without one, and 0 where any weight is 0.

    Args:
        weights: non-negative float ``[num_tokens]``; anything outside of the mask.
        mask: uint8 or bool ragged.

    Returns:
        float ``[num_rows]``.
    """
    import torch

    from flowrl.functional.aggregation import row_means

    inside = torch.where(mask.values.bool(), weights, torch.ones((), dtype=weights.dtype))
    return row_means(inside.log(), mask).exp()


def _known(value: str, options: tuple[str, ...], what: str) -> None:
    if value not in options:
        raise FlowError(
            f"There is no {what} {value!r}",
            expected=f"one of {', '.join(options)}",
            received=repr(value),
            do=nearest(value, options),
        )
