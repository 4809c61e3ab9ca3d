"""Columns and the base of all batches: what rows have in common, whatever they mean.

A **column** is a Tensor ``[num_rows]``, a Ragged, a tuple of Python objects, a dict of columns, or a nested group of
columns. Everything else in a batch (an origin, a name, None) belongs to the batch as a whole. The functions here
select, join and compare columns and carry them over Arrow; :class:`Batch` does that for all columns of a batch at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

from flowrl.errors import BatchError
from flowrl.ragged import Ragged, arrow_to_tensor, tensor_to_arrow, tensors_equal

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


# -- one column ------------------------------------------------------------------------------------------------------


def is_column(value: object) -> bool:
    """Whether a value of a batch has rows."""
    import torch

    return isinstance(value, torch.Tensor | Ragged | tuple | dict | ColumnGroup)


def column_rows(value: Any) -> int | None:
    """The number of rows of a column; None for an empty dict and for a dict of plain numbers, which fit any."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    if isinstance(value, tuple):
        return len(value)
    if isinstance(value, dict):
        return next((column_rows(v) for v in value.values() if is_column(v)), None)
    return value.num_rows


def select_rows(value: Any, index: Tensor | Sequence[int]) -> Any:
    """Rows of a column by int64 ``index`` ``[k]``, in its order."""
    import torch

    index = torch.as_tensor(index, dtype=torch.int64)
    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, tuple):
        return tuple(value[i] for i in index.tolist())
    if isinstance(value, dict):
        return {k: select_rows(v, index) for k, v in value.items()}
    if isinstance(value, Ragged | ColumnGroup):
        return value.select(index)
    return value


def concat_rows(values: Sequence[Any], name: str) -> Any:
    """Join columns of one field; what belongs to the batch as a whole must be equal in all parts."""
    import torch

    first = values[0]
    known = next((v for v in values if v is not None), None)
    if hasattr(known, "joined"):
        return type(known).joined(values, name)  # pyright: ignore[reportAttributeAccessIssue]
    if is_column(known) and any(v is None for v in values):
        raise BatchError(f"Parts of a batch differ in {name}", expected="it in every part", received="it in some")
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, tuple):
        return tuple(item for part in values for item in part)
    if isinstance(first, dict):
        missing = sorted({k for part in values for k in part if not all(k in other for other in values)})
        if missing:
            raise BatchError(
                f"Parts of a batch differ in {name}", expected=f"{missing} in every part", received="it in some"
            )
        return {k: concat_rows([part[k] for part in values], f"{name}[{k!r}]") for k in first}
    if isinstance(first, Ragged):
        return Ragged.concat(values)
    if isinstance(first, ColumnGroup):
        return type(first).concat(values)
    for other in values[1:]:
        if other != first:
            raise BatchError(f"Parts of a batch differ in {name}", expected=first, received=other)
    return first


def columns_equal(a: Any, b: Any) -> bool:
    """Bit for bit equality of two columns (any NaN equals any NaN), or plain equality of anything else."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return tensors_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(columns_equal(a[k], b[k]) for k in a)
    if isinstance(a, ColumnGroup):
        return all(columns_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def column_to_arrow(value: Any) -> pa.Array:
    """One column as an Arrow array; Python objects travel as JSON text."""
    import pyarrow as pa

    if isinstance(value, Ragged):
        return value.to_arrow()
    if isinstance(value, tuple):
        return pa.array([json.dumps(v) for v in value], pa.large_string())
    return tensor_to_arrow(value)


def column_from_arrow(array: pa.Array | pa.ChunkedArray) -> Any:
    """The inverse of :func:`column_to_arrow`."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = (
            array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks or [pa.array([], array.type)])
        )
    if pa.types.is_large_string(array.type):
        return tuple(json.loads(v) for v in array.to_pylist())
    if pa.types.is_large_list(array.type):
        return Ragged.from_arrow(array)
    return arrow_to_tensor(array)


# -- a group of columns, and a batch ---------------------------------------------------------------------------------

T = TypeVar("T")

#: Nested groups of columns and origins by class name: what Arrow metadata may name.
_NESTED: dict[str, type] = {}


def nested(cls: type[T]) -> type[T]:
    """Let a dataclass be nested in a batch that travels over Arrow."""
    _NESTED[cls.__name__] = cls
    return cls


class ColumnGroup:
    """Row operations shared by batches and by nested groups of columns. Subclasses are frozen dataclasses."""

    #: By field, "<dtype>" for a Tensor ``[num_rows]``, "<dtype> ragged", "objects" for a tuple, or "dict of …" them.
    column_types: ClassVar[Mapping[str, str]] = {}
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        self._check_types()
        self._check_rows()

    @property
    def num_rows(self) -> int:
        """How many rows every column has."""
        for value in self._values().values():
            rows = column_rows(value) if is_column(value) else None
            if rows is not None:
                return rows
        return 0

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """The rows of int64 ``index`` ``[k]``, in its order."""
        return type(self)(**{name: select_rows(value, index) for name, value in self._values().items()})

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order.

        Raises:
            BatchError: no parts, or parts that differ in what belongs to a batch as a whole.
        """
        if not parts:
            raise BatchError(f"{cls.__name__}.concat needs parts", expected="at least one", received="none")
        return cls(
            **{
                name: concat_rows([getattr(part, name) for part in parts], f"{cls.__name__}.{name}")
                for name in parts[0]._values()
            }
        )

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _columns(self) -> Iterator[tuple[str, Any]]:
        """(name as users write it, column), dicts taken apart."""
        for name, value in self._values().items():
            if isinstance(value, dict):
                yield from ((f"{name}[{key!r}]", column) for key, column in value.items() if is_column(column))
            elif is_column(value):
                yield name, value

    def _check_types(self) -> None:
        for name, wanted in self.column_types.items():
            value = getattr(self, name)
            if wanted.startswith("dict of "):
                if not isinstance(value, dict):
                    self._refuse(name, wanted, value)
                for key, column in value.items():
                    self._check_type(f"{name}[{key!r}]", wanted.removeprefix("dict of "), column)
            else:
                self._check_type(name, wanted, value)

    def _check_type(self, name: str, wanted: str, value: Any) -> None:
        if describe_column(value) != wanted:
            self._refuse(name, wanted, value)

    def _refuse(self, name: str, wanted: str, value: Any) -> NoReturn:
        raise BatchError(
            f"{type(self).__name__}.{name} is not such a column", expected=wanted, received=describe_column(value)
        )

    def _check_rows(self) -> None:
        first: tuple[str, int] | None = None
        for name, column in self._columns():
            rows = column_rows(column)
            if first is None and rows is not None:
                first = (name, rows)
            elif first is not None and rows != first[1]:
                raise BatchError(
                    f"{type(self).__name__}.{name} has the wrong number of rows",
                    expected=f"{first[1]}, as {first[0]} has",
                    received=rows,
                )


def describe_column(value: Any) -> str:
    """The type of a column in the words of ``column_types``."""
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return dtype if value.ndim == 1 else f"{dtype} of shape {list(value.shape)}"
    if isinstance(value, Ragged):
        return f"{describe_column(value.values)} ragged"
    return "objects" if isinstance(value, tuple) else type(value).__name__


@dataclass(frozen=True, eq=False)
class Batch(ColumnGroup):
    """The base of everything an edge carries. While a flow is built, a ``Ref`` stands in for it.

    A batch is a value: it has no truth value, is not iterable, and knows its rows through ``num_rows``.
    """

    #: What a row is: "prompts", "samples", "pairs", or "step" for a result without rows.
    unit: ClassVar[str] = "samples"

    @property
    def row_ids(self) -> Tensor | None:
        """int64 ``[num_rows, 1 or 2]``: what aligns rows; None for a batch without rows."""
        import torch

        columns = [getattr(self, name) for name in ("prompt_id", "sample_id") if hasattr(self, name)]
        return torch.stack(columns, dim=1) if columns else None

    # Typed so that an editor marks `if batch:` and `for row in batch:` red, for a Ref and for data alike.
    __iter__: ClassVar[None] = None

    def __bool__(self) -> NoReturn:
        raise TypeError(f"A {type(self).__name__} has no truth value; ask for num_rows.")

    def __eq__(self, other: object) -> bool:
        """Bit for bit equality of all columns."""
        return columns_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_rows} {self.unit})"

    # -- Arrow ----------------------------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """A table over the same memory; nested columns get dotted names, the rest travels as schema metadata.

        Raises:
            BatchError: a column of Python objects holds something that JSON does not, or a tensor is not 1-D.
        """
        import pyarrow as pa

        columns: dict[str, pa.Array] = {}
        whole: dict[str, Any] = {}
        classes: dict[str, str] = {}
        for name, value in _flatten(self, "", classes):
            if not is_column(value):
                whole[name] = value
                continue
            try:
                columns[name] = column_to_arrow(value)
            except (TypeError, ValueError, pa.ArrowInvalid) as error:
                raise BatchError(
                    f"{type(self).__name__}.{name} cannot travel over Arrow",
                    expected="a tensor [num_rows], a ragged column, or JSON values",
                    received=error,
                ) from None
        table = pa.table(columns) if columns else pa.table({"": pa.array([], pa.int8())})
        metadata = {"type": type(self).__name__, "whole": whole, "classes": classes}
        return table.replace_schema_metadata({"flowrl": json.dumps(metadata)})

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Self:
        """The batch back from :meth:`to_arrow`. Its tensors are views of the table's memory: never write into them.

        Raises:
            BatchError: the table holds another type, lacks a column, or has nulls.
        """
        metadata = json.loads((table.schema.metadata or {}).get(b"flowrl", b"{}"))
        if metadata.get("type") != cls.__name__:
            raise BatchError(
                f"This Arrow table does not hold {cls.__name__}",
                expected=cls.__name__,
                received=metadata.get("type", "no flowrl metadata"),
            )
        values: dict[str, Any] = dict(metadata["whole"])
        for name in table.column_names:
            try:
                values[name] = column_from_arrow(table.column(name))
            except ValueError as error:
                raise BatchError(f"{cls.__name__}.{name} cannot be read from Arrow: {error}") from None
        return _unflatten(cls, "", values, metadata["classes"])


def _flatten(group: Any, prefix: str, classes: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of every field. ``classes`` receives, by dotted name, what was taken apart."""
    for f in fields(group):
        value, name = getattr(group, f.name), prefix + f.name
        if isinstance(value, dict):
            classes[name] = "dict"
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        elif isinstance(value, ColumnGroup):
            classes[name] = type(value).__name__
            yield from _flatten(value, f"{name}.", classes)
        elif is_dataclass(value) and not isinstance(value, type | Ragged):
            classes[name] = type(value).__name__
            yield from ((f"{name}.{key}", item) for key, item in asdict(value).items())
        else:
            yield name, value


def _unflatten(cls: type, prefix: str, values: Mapping[str, Any], classes: Mapping[str, str]) -> Any:
    made: dict[str, Any] = {}
    for f in fields(cls):
        name = prefix + f.name
        if classes.get(name) == "dict":
            made[f.name] = {k[len(name) + 1 :]: v for k, v in values.items() if k.startswith(f"{name}.")}
        elif name in classes:
            made[f.name] = _unflatten(_NESTED[classes[name]], f"{name}.", values, classes)
        elif name in values:
            made[f.name] = values[name]
        else:
            raise BatchError(f"The Arrow table lacks column {name!r}", expected=name, received=sorted(values))
    return cls(**made)


def check_lengths(batch: str, name: str, column: Ragged, lengths: Tensor, what: str) -> None:
    """Refuse a ragged column whose rows are not of these int64 ``lengths`` ``[num_rows]``."""
    wrong = (column.lengths != lengths).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise BatchError(
            f"{batch}.{name} does not fit row {row}",
            expected=f"{int(lengths[row])} ({what})",
            received=int(column.lengths[row]),
        )
