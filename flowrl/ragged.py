"""Ragged columns and the column operations that every batch shares: select, concatenate, Arrow both ways.

A ragged column is flat values plus int64 offsets: Arrow's list layout, and the packed layout that variable-length
attention wants. Numbers cross between Arrow and torch without a copy; a tensor that came from Arrow is read-only.
Padding is not here: it lives inside an engine that needs it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
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
        offsets: int64 ``[num_rows + 1]``, increasing from 0 to ``num_values``; row i is ``values[offsets[i]:offsets[i+1]]``.

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
        if ends != (0, len(self.values)) or bool((self.offsets[1:] < self.offsets[:-1]).any()):
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
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
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
        """Of each row the ``lengths[i]`` values from place ``starts[i]`` on (int64 ``[num_rows]`` each)."""
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
        """Rows of all parts, in order."""
        import torch

        return Ragged.from_lengths(
            torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts])
        )

    @staticmethod
    def join(first: Ragged, second: Ragged) -> Ragged:
        """Row by row, the values of ``first`` and then those of ``second``."""
        import torch

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
        """A read-only view of a large list array (rebased when it is a slice). No nulls are allowed."""
        offsets, values = arrow_to_tensor(array.offsets), array.values
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0:
            offsets = offsets - first
        return cls(arrow_to_tensor(values.slice(first, last - first)), offsets)

    def __bool__(self) -> bool:
        raise TypeError("A Ragged has no truth value; compare its values or its num_rows.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ragged) and columns_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({self.num_rows} rows, {len(self.values)} values, {self.values.dtype})"


def tensor_to_arrow(tensor: Tensor) -> pa.Array:
    """A 1-D tensor as an Arrow array over the same memory (bool becomes uint8, bfloat16 its float32 copy)."""
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
    """A read-only tensor over the memory of an Arrow array of numbers without nulls."""
    import torch

    if array.null_count:
        raise BatchError("A column of numbers has nulls", expected="a validity column", received="Arrow nulls")
    values = array.to_numpy(zero_copy_only=True)
    with warnings.catch_warnings():  # torch warns that the memory is read-only, which is what we promise
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)


# A column is a Tensor [num_rows], a Ragged, a tuple of Python objects, a dict of columns, or a dataclass of columns.
# Everything else in a batch (an origin, a name, None) belongs to the batch as a whole.


def is_column(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor | Ragged | tuple | dict) or hasattr(value, "column_fields")


def column_rows(value: Any) -> int | None:
    """The number of rows of a column; None for an empty dict, which fits any."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    if isinstance(value, tuple):
        return len(value)
    if isinstance(value, dict):
        return next((column_rows(v) for v in value.values()), None)
    return value.num_rows


def select_rows(value: Any, index: Tensor) -> Any:
    """Rows of a column by int64 index, in its order."""
    import torch

    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, tuple):
        return tuple(value[i] for i in index.tolist())
    if isinstance(value, dict):
        return {k: select_rows(v, index) for k, v in value.items()}
    if isinstance(value, Ragged) or hasattr(value, "select"):
        return value.select(index)
    return value


def concat_rows(values: Sequence[Any], name: str) -> Any:
    """Join columns of one field; what belongs to the batch as a whole must be equal in all parts."""
    import torch

    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, tuple):
        return tuple(item for part in values for item in part)
    if isinstance(first, dict):
        keys = {k for part in values for k in part}
        missing = sorted(k for k in keys if not all(k in part for part in values))
        if missing:
            raise BatchError(f"Parts of a batch differ in {name}", expected=f"{missing} in every part", received="it in some")
        return {k: concat_rows([part[k] for part in values], f"{name}[{k!r}]") for k in first}
    if isinstance(first, Ragged):
        return Ragged.concat(values)
    if hasattr(first, "column_fields"):
        return type(first).concat(values)
    if any(v != first for v in values[1:]):
        raise BatchError(f"Parts of a batch differ in {name}", expected=first, received=next(v for v in values if v != first))
    return first


def columns_equal(a: Any, b: Any) -> bool:
    """Bit for bit equality of two columns (NaN equals NaN), or plain equality of anything else."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(columns_equal(a[k], b[k]) for k in a)
    if is_dataclass(a):
        return all(columns_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def column_to_arrow(value: Any) -> pa.Array:
    """One column as an Arrow array; Python objects travel as JSON text."""
    import pyarrow as pa
    import torch

    if isinstance(value, torch.Tensor):
        return tensor_to_arrow(value)
    if isinstance(value, Ragged):
        return value.to_arrow()
    if isinstance(value, tuple):
        try:
            return pa.array([json.dumps(v) for v in value], pa.large_string())
        except TypeError as error:
            raise BatchError("A column of Python objects cannot travel", expected="JSON values", received=error) from None
    raise TypeError(f"not a column: {type(value).__name__}")


def column_from_arrow(array: pa.Array) -> Any:
    """The inverse of :func:`column_to_arrow`."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if pa.types.is_large_string(array.type):
        return tuple(json.loads(v) for v in array.to_pylist())
    if pa.types.is_large_list(array.type):
        return Ragged.from_arrow(array)
    return arrow_to_tensor(array)

