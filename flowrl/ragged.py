"""Ragged columns: rows of different lengths without padding, Arrow and torch over one memory.

A ragged column is flat values plus int64 offsets: Arrow's list layout, and the packed layout that variable-length
attention wants. Numbers cross between Arrow and torch without a copy; never write into a tensor that came from Arrow.
Padding is not here: it lives inside an engine that needs it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.errors import BatchError

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths in one flat tensor.

    Args:
        values: ``[num_values]``, the rows one after the other.
        offsets: int64 ``[num_rows + 1]``, increasing from 0 to ``num_values``; row i is
            ``values[offsets[i]:offsets[i+1]]``.

    Raises:
        BatchError: offsets that are not int64, do not start at 0, decrease, or do not end at ``num_values``.

    Example::

        >>> Ragged.from_rows([[1, 2], [], [3]]).lengths.tolist()
        [2, 0, 1]
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        import torch

        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or len(self.offsets) < 1:
            raise BatchError(
                "Ragged offsets are malformed",
                expected="int64 of shape [num_rows + 1]",
                received=f"{self.offsets.dtype} of shape {list(self.offsets.shape)}",
            )
        ends = (int(self.offsets[0]), int(self.offsets[-1]))
        if ends != (0, len(self.values)) or bool((self.lengths < 0).any()):
            raise BatchError(
                "Ragged offsets do not fit their values",
                expected=f"offsets increasing from 0 to {len(self.values)}",
                received=f"offsets from {ends[0]} to {ends[1]}",
            )

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """Join rows (lists of numbers or 1-D tensors). ``dtype`` is inferred from the rows when None."""
        import torch

        tensors = [r if isinstance(r, torch.Tensor) else torch.as_tensor(r, dtype=dtype) for r in rows]
        lengths = torch.tensor([len(t) for t in tensors], dtype=torch.int64)
        if dtype is None:  # an empty list says nothing about its type
            dtype = next((t.dtype for t in tensors if len(t)), torch.float32)
        values = torch.cat([t.to(dtype) for t in tensors]) if tensors else torch.empty(0, dtype=dtype)
        return cls.from_lengths(values, lengths)

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        """Cut flat ``values`` ``[num_values]`` into rows of int64 ``lengths`` ``[num_rows]``."""
        import torch

        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return cls(values, offsets)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """int64 ``[num_rows]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def row_of_value(self) -> Tensor:
        """int64 ``[num_values]``: the row that each value belongs to."""
        import torch

        return torch.repeat_interleave(torch.arange(self.num_rows), self.lengths)

    @property
    def position_of_value(self) -> Tensor:
        """int64 ``[num_values]``: the place of each value within its row, from 0."""
        import torch

        return torch.arange(len(self.values)) - torch.repeat_interleave(self.offsets[:-1], self.lengths)

    def row(self, index: int) -> Tensor:
        """``[length of the row]``, a view."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def rows(self) -> Iterator[Tensor]:
        """Views of the rows, in order."""
        bounds = self.offsets.tolist()
        for start, stop in itertools.pairwise(bounds):
            yield self.values[start:stop]

    def to_lists(self) -> list[list[Any]]:
        """The rows as Python lists."""
        return [row.tolist() for row in self.rows()]

    def with_values(self, values: Tensor) -> Ragged:
        """The same rows with other values ``[num_values]``."""
        return Ragged(values, self.offsets)

    def select(self, index: Tensor) -> Ragged:
        """Rows by int64 ``index`` ``[k]``, in its order; a row may repeat."""
        return self._gather(self.offsets[:-1][index], self.lengths[index])

    def slice_rows(self, starts: Tensor, lengths: Tensor) -> Ragged:
        """Of each row the ``lengths[i]`` values from place ``starts[i]`` on (int64 ``[num_rows]`` each).

        Raises:
            BatchError: a slice reaches out of its row.
        """
        if bool(((starts < 0) | (lengths < 0) | (starts + lengths > self.lengths)).any()):
            raise BatchError("A slice reaches out of its row", expected=f"slices within {self.lengths.tolist()[:8]}")
        return self._gather(self.offsets[:-1] + starts, lengths)

    def _gather(self, first: Tensor, lengths: Tensor) -> Ragged:
        import torch

        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        source = torch.arange(int(offsets[-1])) + torch.repeat_interleave(first - offsets[:-1], lengths)
        return Ragged(self.values[source], offsets)

    def sum_rows(self, where: Ragged | None = None) -> Tensor:
        """``[num_rows]``: the sum of each row, over the values that the mask ``where`` selects.

        Masked values are selected away, not multiplied: a NaN under a zero mask changes nothing.
        """
        import torch

        values = self.values
        if where is not None:
            values = torch.where(where.values.bool(), values, torch.zeros((), dtype=values.dtype))
        return torch.zeros(self.num_rows, dtype=values.dtype).index_add(0, self.row_of_value, values)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Rows of all parts (at least one), in order."""
        import torch

        return Ragged.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    @staticmethod
    def join(first: Ragged, second: Ragged) -> Ragged:
        """Row by row, the values of ``first`` and then those of ``second``.

        Raises:
            BatchError: the two differ in their number of rows.
        """
        import torch

        if first.num_rows != second.num_rows:
            raise BatchError("Ragged.join needs equal rows", expected=first.num_rows, received=second.num_rows)
        lengths = first.lengths + second.lengths
        values = torch.empty(int(lengths.sum()), dtype=first.values.dtype)
        out = Ragged.from_lengths(values, lengths)
        starts = out.offsets[:-1]
        values[first.position_of_value + starts[first.row_of_value]] = first.values
        values[second.position_of_value + (starts + first.lengths)[second.row_of_value]] = second.values
        return out

    def to_arrow(self) -> pa.LargeListArray:
        """A large list array over the same memory."""
        import pyarrow as pa

        return pa.LargeListArray.from_arrays(tensor_to_arrow(self.offsets), tensor_to_arrow(self.values))

    @classmethod
    def from_arrow(cls, array: pa.LargeListArray) -> Ragged:
        """A view of a large list array's memory (offsets are rebased when it is a slice): never write into it.

        Raises:
            BatchError: the array has nulls.
        """
        if array.null_count:
            raise BatchError("A ragged column has nulls", expected="a validity column", received="Arrow nulls")
        offsets, values = arrow_to_tensor(array.offsets), array.values
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0:
            offsets = offsets - first
        return cls(arrow_to_tensor(values.slice(first, last - first)), offsets)

    def __bool__(self) -> bool:
        raise TypeError("A Ragged has no truth value; compare its values or its num_rows.")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ragged)
            and tensors_equal(self.values, other.values)
            and tensors_equal(self.offsets, other.offsets)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({self.num_rows} rows, {len(self.values)} values, {self.values.dtype})"


def tensors_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit equality of two tensors; any NaN equals any NaN."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    same = a == b
    if a.is_floating_point():  # 0.0 == -0.0, but their bits differ
        same = (same & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())
    return bool(same.all())


def tensor_to_arrow(tensor: Tensor) -> pa.Array:
    """A tensor ``[num_values]`` as an Arrow array over the same memory (bool becomes uint8, bfloat16 a float32
    copy)."""
    import pyarrow as pa
    import torch

    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return pa.array(tensor.contiguous().numpy())


def arrow_to_tensor(array: pa.Array) -> Tensor:
    """A tensor over the memory of an Arrow array of numbers. Arrow memory is shared and immutable by contract, torch
    knows no read-only tensors: never write into it.

    Raises:
        BatchError: the array has nulls.
    """
    import torch

    if array.null_count:
        raise BatchError("A column of numbers has nulls", expected="a validity column", received="Arrow nulls")
    values = array.to_numpy(zero_copy_only=True)
    with warnings.catch_warnings():  # torch warns that the memory is read-only, which is what we promise
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)
