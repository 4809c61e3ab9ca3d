"""Shaping of rewards as pure functions: penalties of length, and moments that run over all batches so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from flowrl.functional.grouping import Groups

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """The soft punishment of overlong responses (DAPO, arXiv 2503.14476, eq. 13).

    With the last ``buffer`` tokens before ``max_length`` as a soft zone:

    * 0 for a length up to ``max_length − buffer``,
    * (``max_length − buffer`` − length) / ``buffer`` up to ``max_length``,
    * −1 beyond it.

    Args:
        lengths: int64 ``[num_rows]``, tokens of each response.
        max_length: the longest response that is wanted.
        buffer: width of the soft zone in tokens; 0 leaves a step at ``max_length``.

    Returns:
        float32 ``[num_rows]`` in [−1, 0]; 0 for a response without tokens.
    """
    import torch

    over = (lengths - (max_length - buffer)).clamp(min=0).to(torch.float64)
    soft = -over / max(1, buffer) + 0.0  # no −0
    return torch.where(lengths > max_length, -1.0, soft).float()


def length_penalty(lengths: Tensor, *, per_token: float, free_tokens: int = 0) -> Tensor:
    """−``per_token`` for each token beyond the first ``free_tokens``.

    Args:
        lengths: int64 ``[num_rows]``.

    Returns:
        float32 ``[num_rows]``; 0 for a response without tokens.
    """
    import torch

    return (-per_token * (lengths - free_tokens).clamp(min=0).to(torch.float64)).float() + 0.0  # no −0


def group_length_rewards(lengths: Tensor, prompt_id: Tensor, correct: Tensor, valid: Tensor | None = None) -> Tensor:
    """Shorter than the other responses to the prompt is better (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    λ = 1/2 − (length − min) / (max − min) with the extremes of the group; a correct response gets λ, a wrong one
    min(0, λ): being short is worth nothing where the answer is wrong.

    Args:
        lengths: int64 ``[num_rows]``.
        prompt_id: int64 ``[num_rows]``.
        correct: bool ``[num_rows]``.
        valid: bool ``[num_rows]``: rows that are compared; by default all.

    Returns:
        float32 ``[num_rows]`` in [−1/2, 1/2]. 0 in a group of one and where all are of one length, and in rows that
        are not valid. Equivariant to the order of rows.
    """
    import torch

    groups = Groups.of(prompt_id)
    valid = torch.ones_like(correct, dtype=torch.bool) if valid is None else valid
    longest, shortest = groups.max(lengths, valid), groups.min(lengths, valid)
    varied = (longest > shortest)[groups.index]
    span = torch.where(varied, (longest - shortest)[groups.index], torch.ones((), dtype=torch.float64))
    share = torch.where(varied, (lengths - shortest[groups.index]) / span, torch.full((), 0.5, dtype=torch.float64))
    reward = 0.5 - share
    reward = torch.where(correct, reward, reward.clamp(max=0.0))
    return torch.where(valid & varied, reward, torch.zeros((), dtype=torch.float64)).float()


@dataclass(frozen=True)
class Moments:
    """Number, mean and spread of all values so far, merged batch by batch (Chan, Golub & LeVeque 1983), in float64.

    Args:
        count: how many values.
        mean: of them; 0 for none.
        m2: the sum of squared distances from the mean.
        low: the smallest; inf for none.
        high: the largest; −inf for none.

    Merging a batch does not depend on the order of its values, bit for bit: its sums are exact (``math.fsum``).

    Example::

        >>> moments = Moments().merged([1.0, 2.0]).merged([6.0])
        >>> (moments.count, moments.mean, moments.std)
        (3, 3.0, 2.6457513110645907)
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def merged(self, values: list[float]) -> Self:
        """These and further finite values. None of them: itself."""
        if not values:
            return self
        number = len(values)
        mean = math.fsum(values) / number
        m2 = math.fsum((v - mean) ** 2 for v in values)
        total, delta = self.count + number, mean - self.mean
        return type(self)(
            count=total,
            mean=self.mean + delta * number / total,
            m2=self.m2 + m2 + delta**2 * self.count * number / total,
            low=min(self.low, *values),
            high=max(self.high, *values),
        )

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 0 for fewer than two values, and exactly 0 where all are equal."""
        if self.count < 2 or not self.high > self.low:
            return 0.0
        return math.sqrt(self.m2 / (self.count - 1))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, as a ``State`` holds them."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2, "low": self.low, "high": self.high}
