"""Clip-Cov and KL-Cov: hold the few tokens whose updates cost the most entropy (Cui et al., "The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617).

The change of a policy's entropy in a step is, to first order, minus the covariance of log π and A under the policy. A
token's part of it is (A − mean A)·(log π − mean log π), with the means over all tokens that count in the optimiser batch.
Which tokens are held is a question about the whole batch, so it is answered once an optimiser step (``*_tokens``) and the
answer is handed to the losses of all its micro-batches.

Nothing here depends on the order of rows: sums are taken in the order of the values, ties go by the ids of the rows and
the place in the row, and randomness is a hash of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrl.functional.masking import masked_mean
from flowrl.functional.policy_losses import importance_ratio, ppo_loss
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A − mean A)·(log π − mean log π), the means over the selected tokens.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy.
        advantages: float ``[num_tokens]``.
        mask: bool ``[num_tokens]``; what it does not select may be anything.

    Returns:
        float64 ``[num_tokens]``, detached, 0 outside of the mask; all 0 for a single selected token.
    """
    import torch

    def centred(values: Tensor) -> Tensor:
        return values.detach().to(torch.float64) - masked_mean(values.detach(), mask)

    covariances = centred(advantages) * centred(logprobs)
    return torch.where(mask, covariances, torch.zeros((), dtype=torch.float64))


def kl_cov_tokens(
    logprobs: Tensor, advantages: Tensor, mask: Ragged, *, share: float = 0.002, ids: Tensor | None = None
) -> Tensor:
    """The share of the tokens with the largest covariance of A and log π.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy.
        advantages: float ``[num_tokens]``.
        mask: uint8 or bool ragged: the n tokens that count.
        share: int(n · share) of them are taken, at least one.
        ids: int64 ``[num_rows, k]``, which break ties, then the place in the row; None takes the row's place in the
            batch.

    Returns:
        bool ``[num_tokens]``; none for no tokens.
    """
    selected = mask.values.bool()
    covariances = token_covariances(logprobs, advantages, selected)
    return _first(-covariances, selected, _number(share, selected), mask, ids)


def clip_cov_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Ragged,
    *,
    key: int,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """A random share of the tokens, out of those with a large covariance of A and log π whose ratio PPO's clip does
    not hold already.

    Args:
        logprobs: float ``[num_tokens]`` of the current policy.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        mask: uint8 or bool ragged: the n tokens that count.
        key: of the draw. A token's number in it is a hash of the key, the ids of its row and its place there, so that
            neither the order of rows nor how they are split changes what is drawn.
        share: int(n · share) tokens are taken, at least one, at most as many as qualify.
        low, high: a token qualifies with a covariance strictly between the two.
        clip_low, clip_high: of the ratio, as in :func:`flowrl.functional.policy_losses.ppo_loss`.
        ids: int64 ``[num_rows, k]``; None takes the row's place in the batch.

    Returns:
        bool ``[num_tokens]``; none for no tokens.
    """
    import torch

    selected = mask.values.bool()
    covariances = token_covariances(logprobs, advantages, selected)
    _, held = ppo_loss(logprobs.detach(), old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    candidates = selected & (covariances > low) & (covariances < high) & (held == 0)
    numbers = torch.from_numpy(token_hashes(key, mask, ids).view("int64"))
    return _first(numbers, candidates, _number(share, selected), mask, ids)


def kl_cov_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, penalised: Tensor, *, coef: float = 1.0
) -> Tensor:
    """KL-Cov: −Aρ without a clip, plus ``coef``·\\|log π − log π_old\\| on the ``penalised`` tokens (arXiv 2505.22617).

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        penalised: bool ``[num_tokens]`` from :func:`kl_cov_tokens`.
        coef: weight of the penalty.

    Returns:
        losses ``[num_tokens]`` with gradient.
    """
    import torch

    penalty = coef * (logprobs - old_logprobs).abs()
    losses = -advantages * importance_ratio(logprobs, old_logprobs)
    return losses + torch.where(penalised, penalty, torch.zeros((), dtype=losses.dtype))


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    detached: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clip-Cov: PPO's clipped surrogate, and 0, without gradient, on the ``detached`` tokens (arXiv 2505.22617).

    Args:
        logprobs: float ``[num_tokens]`` of the current policy, with gradient.
        old_logprobs: float ``[num_tokens]`` before the update.
        advantages: float ``[num_tokens]``.
        detached: bool ``[num_tokens]`` from :func:`clip_cov_tokens`.
        clip_low, clip_high: as in :func:`flowrl.functional.policy_losses.ppo_loss`.

    Returns:
        losses ``[num_tokens]`` with gradient, and float ``[num_tokens]``, 1 where the clip of the ratio holds the loss.
    """
    import torch

    losses, held = ppo_loss(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(detached, torch.zeros((), dtype=losses.dtype), losses), held


def token_hashes(key: int, layout: Ragged, ids: Tensor | None = None) -> np.ndarray[Any, Any]:
    """uint64 ``[num_tokens]``: a number for each token from a key, the ids of its row and its place in it, the same on
    every machine (SplitMix64, Steele et al. 2014).

    Args:
        key: any integer; its lowest 64 bits count.
        layout: ragged; its values do not matter.
        ids: int64 ``[num_rows, k]``; None takes the row's place in the batch.
    """
    import numpy as np

    state = np.full(len(layout.values), key % (1 << 64), dtype=np.uint64)
    for column in reversed(_order_columns(layout, ids)):
        state = _split_mix(state ^ _split_mix(column.astype(np.uint64)))
    return state


def _split_mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One step of SplitMix64: a bijection of 64 bits in which each bit of the input changes half of the output."""
    import numpy as np

    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _order_columns(layout: Ragged, ids: Tensor | None) -> list[np.ndarray[Any, Any]]:
    """What tokens are ordered by, the least important first, int64 ``[num_tokens]`` each: the place in the row, then
    the ids of the row from the last to the first."""
    rows = layout.row_of_value
    columns = [rows] if ids is None else [ids[rows, i] for i in range(ids.shape[1])]
    return [c.numpy() for c in (layout.position_of_value, *reversed(columns))]


def _number(share: float, selected: Tensor) -> int:
    return max(1, int(int(selected.sum()) * share))


def _first(keys: Tensor, candidates: Tensor, number: int, layout: Ragged, ids: Tensor | None) -> Tensor:
    """bool ``[num_tokens]``: the ``number`` candidates with the smallest keys; ties go by ids and place."""
    import numpy as np
    import torch

    places = candidates.nonzero().flatten().numpy()
    columns = [c[places] for c in (*_order_columns(layout, ids), keys.numpy())]
    chosen = places[np.lexsort(columns)[:number]]
    found = torch.zeros(len(candidates), dtype=torch.bool)
    found[torch.from_numpy(chosen)] = True
    return found
