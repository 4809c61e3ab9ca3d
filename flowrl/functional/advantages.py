"""Advantage estimators with a number of their own for each token. Those with one number a response are in
:mod:`flowrl.functional.group_advantages`. See ``docs/advantages.md``.

Time is counted in policy tokens: observations (a tool's answer, a user's turn) are skipped, as if the policy's tokens
stood side by side. A reward at an observation belongs to the policy token before it (to the row's first one, where
there is none before), so that no reward is lost. Everything is 0 at observations; rows without a policy token have
nothing but zeros; what values and log-probs hold at observations, NaN included, changes nothing. A row's numbers do not
depend on where it stands. No rows give no rows.
"""

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
        rewards: float ragged in response layout, finite.
        values: float ragged in response layout; V before each token.
        mask: uint8 ragged in response layout.
        gamma: discount a policy token.
        lam: λ.

    Returns:
        advantages and returns, float32 ragged in response layout.
    """
    import torch

    place, row = _policy_tokens(mask)
    delta = _rewards_of_actions(rewards, mask)[place]
    value = values.values.to(torch.float64)[place]
    delta = delta - value
    follows = row[1:] == row[:-1]
    delta[:-1] += gamma * torch.where(follows, value[1:], torch.zeros((), dtype=value.dtype))
    advantage = discounted_sums(delta, row, gamma * lam)
    return _at(place, advantage, mask), _at(place, advantage + value, mask)


def reinforce_plus_plus(
    rewards: Ragged, mask: Ragged, *, gamma: float = 1.0, whiten: bool = True
) -> tuple[Ragged, Ragged]:
    """REINFORCE++ (Hu et al., arXiv 2501.03262): G_t = r_t + γ·G_{t+1}, whitened over all policy tokens.

    A = (G − mean) / √(var + 1e-8) with mean and unbiased variance over the policy tokens of the batch.

    Args:
        rewards: float ragged in response layout, finite; a KL penalty is among them, where there is one.
        mask: uint8 ragged in response layout.
        gamma: discount a policy token.
        whiten: without it A = G.

    Returns:
        advantages and returns G, float32 ragged in response layout. Advantages are 0 where all returns of the batch
        are equal and where it has fewer than two policy tokens.
    """
    place, row = _policy_tokens(mask)
    returns = _at(place, discounted_sums(_rewards_of_actions(rewards, mask)[place], row, gamma), mask)
    return whitened(returns, mask) if whiten else returns, returns


def reinforce_plus_plus_baseline(rewards: Tensor, prompt_id: Tensor, mask: Ragged) -> Ragged:
    """REINFORCE++ with baseline (Hu et al., arXiv 2501.03262): R − mean of the group at each policy token, whitened
    over all policy tokens of the batch (so a long response counts more in mean and variance).

    Args:
        rewards: float ``[num_rows]``, finite.
        prompt_id: int64 ``[num_rows]``.
        mask: uint8 ragged in response layout.

    Returns:
        float32 ragged in response layout. Before whitening a group of one and one of equal rewards is exactly 0;
        whitening then moves it with all the others. All 0 where no group varies.
    """
    from flowrl.functional.group_advantages import normalize

    centered = normalize(rewards, prompt_id, mean="group", std="none")
    return whitened(spread_over_tokens(centered, mask), mask)


def remax(rewards: Ragged, greedy_rewards: Tensor, mask: Ragged) -> tuple[Ragged, Ragged]:
    """ReMax (Li et al., arXiv 2310.10505): A_t = Σ_{k ≥ t} r_k − R of the greedy response to the same prompt.

    Args:
        rewards: float ragged in response layout, finite.
        greedy_rewards: float ``[num_rows]``: the total reward of the greedy response to each row's prompt.
        mask: uint8 ragged in response layout.

    Returns:
        advantages and returns (to go), float32 ragged in response layout. Rows are not compared with each other, so
        there are no degenerate groups; where sampled and greedy response earn the same, the advantage is 0.
    """
    import torch

    place, row = _policy_tokens(mask)
    returns = discounted_sums(_rewards_of_actions(rewards, mask)[place], row, 1.0)
    return _at(place, returns - greedy_rewards.to(torch.float64)[row], mask), _at(place, returns, mask)


def optimal_token_baseline(
    rewards: Ragged, old_logprobs: Ragged, sum_pi_squared: Ragged, prompt_id: Tensor, mask: Ragged
) -> tuple[Ragged, Ragged]:
    """The optimal token baseline (Li et al., arXiv 2602.07078): A_t = G_t − B_t.

    G_t is the return to go. B_t = Σ G_t·W_t / Σ W_t over the responses of the group that reach policy token t, where
    W_t = Σ_{k ≤ t} (1 − 2·π_k + Σ_v π_k(v)²) stands for the squared norm of the gradient up to t. In the part of a
    group's one longest response beyond its second longest there is nobody to compare with, and B_t = 0.

    In several turns t counts the policy's tokens over all turns, and W does not grow at observations: a response with
    tool calls is compared with the others as if its own tokens stood side by side.

    Args:
        rewards: float ragged in response layout, finite.
        old_logprobs: float ragged in response layout: log π of each token before the update.
        sum_pi_squared: float ragged in response layout: Σ_v π(v)² over the vocabulary.
        prompt_id: int64 ``[num_rows]``.
        mask: uint8 ragged in response layout.

    Returns:
        advantages and returns G, float32 ragged in response layout. Where all weights at t are 0 (the policy was
        certain of every token) the mean is unweighted. Exactly 0 in a group in which fewer than two responses have a
        policy token (there is no baseline at all), and in one whose returns are all equal, its longest response
        included. A row without a policy token takes no part.
    """
    import torch

    place, row = _policy_tokens(mask)
    returns = discounted_sums(_rewards_of_actions(rewards, mask)[place], row, 1.0)
    group = Groups.of(prompt_id).index[row]
    weight = _cumulative_energy(old_logprobs.values[place], sum_pi_squared.values[place], row)
    lengths = torch.bincount(row, minlength=mask.num_rows)
    step = torch.arange(len(row)) - (torch.cumsum(lengths, 0) - lengths)[row]
    longest = int(lengths.max()) if len(lengths) else 0
    cells = Groups.of(group * max(1, longest) + step)  # the responses of a group at one step
    total = cells.sum(weight)
    weighted = cells.sum(returns * weight) / torch.where(total != 0, total, torch.ones((), dtype=torch.float64))
    baseline = torch.where(total != 0, weighted, cells.mean(returns))
    baseline = torch.where(cells.sizes > 1, baseline, torch.zeros((), dtype=torch.float64))
    tells = returns_vary(mask.with_values(_scattered(place, returns, mask)), prompt_id, mask)[row]
    advantage = torch.where(tells, returns - baseline[cells.index], torch.zeros((), dtype=torch.float64))
    return _at(place, advantage, mask), _at(place, returns, mask)


def returns_vary(returns: Ragged, prompt_id: Tensor, mask: Ragged) -> Tensor:
    """bool ``[num_rows]``: whether, in the row's group, two responses have a policy token and two returns differ.

    Args:
        returns: float ragged in response layout.
        prompt_id: int64 ``[num_rows]``.
        mask: uint8 ragged in response layout.
    """
    import torch

    groups = Groups.of(prompt_id)
    per_token = Groups(groups.prompt_id, groups.index[mask.row_of_value], groups.sizes)
    varied = per_token.varied(returns.values, mask.values.bool())
    with_tokens = groups.sum((num_policy_tokens(mask) > 0).to(torch.float64))
    return (varied & (with_tokens > 1))[groups.index]


def _cumulative_energy(logprobs: Tensor, sum_pi_squared: Tensor, row: Tensor) -> Tensor:
    """float64 ``[n]``: Σ over the row's tokens so far of 1 − 2π + Σπ²."""
    import torch

    energy = 1 - 2 * logprobs.to(torch.float64).exp() + sum_pi_squared.to(torch.float64)
    # It is at least (1 − π)². Where the policy is certain rounding may say −1e-7, and weights of both signs can add up
    # to next to nothing, which is then divided by.
    rounding = (energy < 0) & (energy > -1e-6)
    energy = torch.where(rounding, torch.zeros((), dtype=energy.dtype), energy)
    return discounted_sums(energy.flip(0), row.flip(0), 1.0).flip(0)


def discounted_sums(values: Tensor, row: Tensor, discount: float) -> Tensor:
    """Σ_k discount^k · values[t+k] within each row, in O(n log longest) by doubling: the sum over 2m steps is
    that over m steps plus discount^m times the one m steps on.

    Args:
        values: float ``[n]``, row after row.
        row: int64 ``[n]``, the row of each value; those of a row stand together.
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


def num_policy_tokens(mask: Ragged) -> Tensor:
    """int64 ``[num_rows]``: how many tokens of each row the policy wrote."""
    import torch

    return mask.with_values(mask.values.to(torch.int64)).sum_rows()


def spread_over_tokens(rows: Tensor, mask: Ragged) -> Ragged:
    """A number a row (``[num_rows]``) at each of its policy tokens: response layout, 0 at observations."""
    import torch

    return mask.with_values(torch.where(mask.values.bool(), rows[mask.row_of_value], torch.zeros((), dtype=rows.dtype)))


def whitened(column: Ragged, mask: Ragged) -> Ragged:
    """The column (float ragged in response layout) with mean 0 and variance 1 over the policy tokens, 0 elsewhere; see
    :func:`flowrl.functional.masking.masked_whiten`."""
    import torch

    from flowrl.functional.masking import masked_whiten

    selected = mask.values.bool()
    return mask.with_values(torch.where(selected, masked_whiten(column.values, selected), torch.zeros(())))


def _policy_tokens(mask: Ragged) -> tuple[Tensor, Tensor]:
    """int64 ``[num_policy_tokens]`` each: where the policy's tokens stand among all, and their rows."""
    place = mask.values.bool().nonzero().flatten()
    return place, mask.row_of_value[place]


def _at(place: Tensor, values: Tensor, mask: Ragged) -> Ragged:
    """float32 ragged in response layout: ``values`` at ``place``, 0 elsewhere."""
    return mask.with_values(_scattered(place, values, mask).float())


def _scattered(place: Tensor, values: Tensor, mask: Ragged) -> Tensor:
    import torch

    out = torch.zeros(len(mask.values), dtype=values.dtype)
    out[place] = values
    return out


def _rewards_of_actions(rewards: Ragged, mask: Ragged) -> Tensor:
    """float64 ``[num_tokens]``: rewards at observations moved to the policy token before, or the row's first one."""
    import torch

    values = rewards.values.to(torch.float64)
    selected = mask.values.bool()
    if bool(selected.all()):
        return values
    row = mask.row_of_value
    place = torch.arange(len(values))
    before = torch.cummax(torch.where(selected, place, -1), 0).values
    inside = before >= mask.offsets[:-1][row]
    nowhere = len(values)
    first = torch.full((mask.num_rows,), nowhere).scatter_reduce(0, row, torch.where(selected, place, nowhere), "amin")
    target = torch.where(inside, before, first[row])
    found = target < nowhere
    return torch.zeros_like(values).index_add(0, target[found], values[found])
