"""Groups of rows (the responses to one prompt), their statistics, and which rows must stay together.

Every statistic is equivariant to the order of rows, bit for bit: sums are taken in float64 and, within a
group, in the order of the values themselves, not in that of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.errors import FlowError

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.batches import Sequences


def group_index(prompt_id: Tensor) -> Tensor:
    """int64 ``[num_rows]``: the group 0 … G−1 of each row, numbered by increasing ``prompt_id``."""
    import torch

    return torch.unique(prompt_id, return_inverse=True)[1]


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a column of prompt ids.

    Args:
        prompt_id: int64 ``[num_groups]``, increasing.
        index: int64 ``[num_rows]``, the group of each row.
        sizes: int64 ``[num_groups]``.

    Example::

        >>> groups = Groups.of(torch.tensor([7, 3, 7]))
        >>> groups.mean(torch.tensor([1.0, 5.0, 2.0])).tolist()  # of prompts 3 and 7
        [5.0, 1.5]
    """

    prompt_id: Tensor
    index: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, prompt_id: Tensor) -> Groups:
        """Group rows by int64 ``prompt_id`` ``[num_rows]``."""
        import torch

        return cls(*torch.unique(prompt_id, return_inverse=True, return_counts=True))

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    def sum(self, values: Tensor) -> Tensor:
        """float64 ``[num_groups]``: the sum of each group's ``values`` (``[num_rows]``)."""
        import torch

        values = values.to(torch.float64)
        order = torch.argsort(values, stable=True)
        order = order[torch.argsort(self.index[order], stable=True)]
        zeros = torch.zeros(self.num_groups, dtype=torch.float64)
        return zeros.index_add(0, self.index[order], values[order])

    def mean(self, values: Tensor) -> Tensor:
        """float64 ``[num_groups]``: the mean of each group."""
        return self.sum(values) / self.sizes

    def std(self, values: Tensor) -> Tensor:
        """float64 ``[num_groups]``: the unbiased standard deviation; 0 for one value, and for equal ones."""
        import torch

        centered = values.to(torch.float64) - self.mean(values)[self.index]
        std = (self.sum(centered**2) / (self.sizes - 1).clamp(min=1)).sqrt()
        return torch.where(self.varied(values), std, torch.zeros((), dtype=torch.float64))

    def varied(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """bool ``[num_groups]``: whether two of the values differ, among the rows that bool ``where`` selects."""
        return self.max(values, where) > self.min(values, where)

    def max(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """``[num_groups]``: the largest value among the rows that bool ``where`` selects; −inf for none."""
        return self._extreme(values, where, "amax", float("-inf"))

    def min(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """``[num_groups]``: the smallest value among the rows that bool ``where`` selects; inf for none."""
        return self._extreme(values, where, "amin", float("inf"))

    def _extreme(self, values: Tensor, where: Tensor | None, reduce: str, empty: float) -> Tensor:
        import torch

        values = values if values.is_floating_point() else values.to(torch.float64)
        if where is not None:
            values = torch.where(where, values, torch.tensor(empty, dtype=values.dtype))
        start = torch.full((self.num_groups,), empty, dtype=values.dtype)
        return start.scatter_reduce(0, self.index, values, reduce)


def coupled_units(sequences: Sequences, couples: str) -> list[list[int]]:
    """Rows that must stay together in one optimiser batch and micro-batch, in the order of their first rows.

    Args:
        couples: "row": each alone; "group": the rows of one ``prompt_id``; "pair": those of one ``pair_id``.

    Raises:
        FlowError: "pair" for sequences that are not in pairs, or an unknown word.
    """
    if couples == "row":
        return [[row] for row in range(sequences.num_rows)]
    key = {"group": "prompt_id", "pair": "pair_id"}.get(couples)
    if key is None or not hasattr(sequences, key):
        raise FlowError(
            f"A loss couples its rows by {couples!r}",
            expected="'row', 'group', or 'pair' with Preferences",
            received=f"{couples!r} with {type(sequences).__name__}",
        )
    units: dict[int, list[int]] = {}
    for row, value in enumerate(getattr(sequences, key).tolist()):
        units.setdefault(value, []).append(row)
    return list(units.values())
