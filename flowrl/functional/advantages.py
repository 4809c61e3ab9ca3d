"""Advantage estimators as pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.functional.grouping import Groups
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor


def gae(
    rewards: Ragged, values: Ragged, mask: Ragged, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438) over the policy's tokens.

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = Σ_k (γλ)^k·δ_{t+k}, returns = A + V, where t counts the policy's tokens
    alone: observations are skipped. The value after the last policy token is 0, for truncated responses too.

    Args:
        rewards: float ragged in response layout. A reward at an observation belongs to the policy token
            before it (to the first one, where there is none before), so that no reward is lost.
        values: float ragged in response layout; V before each token.
        mask: uint8 ragged in response layout.
        gamma: discount a policy token.
        lam: λ.

    Returns:
        advantages and returns, float32 ragged in response layout, 0 at observations. Rows without a policy
        token are 0.
    """
    import torch

    selected = mask.values.bool()
    place = selected.nonzero().flatten()
    row = mask.row_of_value[place]
    delta = _rewards_of_actions(rewards.values.to(torch.float64), mask)[place]
    value = values.values.to(torch.float64)[place]
    delta = delta - value
    follows = row[1:] == row[:-1]
    delta[:-1] += gamma * torch.where(follows, value[1:], torch.zeros((), dtype=value.dtype))
    advantage = discounted_sums(delta, row, gamma * lam)
    out = torch.zeros(2, len(selected), dtype=torch.float32)
    out[0, place] = advantage.float()
    out[1, place] = (advantage + value).float()
    return mask.with_values(out[0]), mask.with_values(out[1])


def discounted_sums(values: Tensor, row: Tensor, discount: float) -> Tensor:
    """Σ_k discount^k · values[t+k] within each row, in O(n log longest) by doubling: the sum over 2m steps is
    that over m steps plus discount^m times the one m steps on.

    Args:
        values: float ``[n]``, row after row.
        row: int64 ``[n]``, the row of each value, non-decreasing.
        discount: 0 gives the values themselves.

    Returns:
        float ``[n]``. The sums of a row do not depend on the other rows.
    """
    import torch

    total, step, factor = values, 1, discount
    longest = int(torch.bincount(row).max()) if len(row) else 0
    while step < longest:
        ahead = torch.where(row[step:] == row[:-step], total[step:], torch.zeros((), dtype=values.dtype))
        total = torch.cat([total[:-step] + factor * ahead, total[-step:]])
        step, factor = 2 * step, factor * factor
    return total


def _rewards_of_actions(rewards: Tensor, mask: Ragged) -> Tensor:
    """``[num_tokens]``: rewards at observations moved to the policy token before, or the row's first one."""
    import torch

    selected = mask.values.bool()
    if bool(selected.all()):
        return rewards
    row = mask.row_of_value
    place = torch.arange(len(rewards))
    before = torch.cummax(torch.where(selected, place, -1), 0).values
    inside = before >= mask.offsets[:-1][row]
    nowhere = len(rewards)
    first = torch.full((mask.num_rows,), nowhere).scatter_reduce(0, row, torch.where(selected, place, nowhere), "amin")
    target = torch.where(inside, before, first[row])
    found = target < nowhere
    return torch.zeros_like(rewards).index_add(0, target[found], rewards[found])


def group_advantages(
    rewards: Tensor,
    prompt_id: Tensor,
    *,
    normalize_by_std: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """How much better each response is than the others to its prompt.

    GRPO (Shao et al., arXiv 2402.03300): (R − mean) / (std + eps), std unbiased. Without the division Dr.GRPO
    (Liu et al., arXiv 2503.20783). With leave-one-out the mean is that of the others, n/(n−1)·(R − mean):
    RLOO (Ahmadian et al., arXiv 2402.14740).

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``: equal for the responses to one prompt, which may stand anywhere.

    Returns:
        float32 ``[num_rows]``. Exactly 0 in a group whose rewards are all equal, and in a group of one.
        Equivariant to the order of rows, bit for bit.
    """
    import torch

    groups = Groups.of(prompt_id)
    centered = rewards.to(torch.float64) - groups.mean(rewards)[groups.index]
    if leave_one_out:
        centered = centered * (groups.sizes / (groups.sizes - 1).clamp(min=1))[groups.index]
    if normalize_by_std:
        centered = centered / (groups.std(rewards) + eps)[groups.index]
    varied = (groups.max(rewards) > groups.min(rewards))[groups.index]
    return torch.where(varied, centered, torch.zeros((), dtype=torch.float64)).float()


def spread_over_tokens(rows: Tensor, mask: Ragged) -> Ragged:
    """A number a row (``[num_rows]``) at each of its policy tokens: response layout, 0 at observations."""
    import torch

    return mask.with_values(torch.where(mask.values.bool(), rows[mask.row_of_value], torch.zeros((), dtype=rows.dtype)))
