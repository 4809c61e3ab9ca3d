"""Concat: several batches of one type as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

from flowrl.annotations import edge_types, type_name
from flowrl.batches import Batch, TrainStats
from flowrl.errors import AlignmentError, EdgeTypeError
from flowrl.graph import Ref, user_location
from flowrl.nodes.base import Node
from flowrl.nodes.calling import Port
from flowrl.nodes.loss import LossTerm

B = TypeVar("B", bound=Batch)

Renumber = Literal["prompts", "samples"]


class Concat(Node):
    """The rows of several batches of one type as one batch: fresh and replayed rollouts, the answers of two policies.

    Args:
        renumber: what makes ids unique where those of the parts clash. None: nothing, a clash is an error. "prompts":
            ``prompt_id`` becomes ``num_parts · prompt_id + part``, so that no group spans two parts (rows of
            different sources, which all count from 0). "samples": ``sample_id`` becomes ``num_parts · sample_id +
            part``, so that rows of one prompt stay one group (two policies that answered the same prompts).

    Shapes: any batch with rows, all parts of one type; the rows of the parts in order. Empty parts are fine, and one
    part comes back as it is. What belongs to a batch as a whole must be equal; origins of log-probs are merged where
    they were sampled with the same settings, and keep the oldest policy version.

    Concatenate before scoring where you can, so that a row's reward and log-probs are made of the row that is trained
    on. Where scores are concatenated too, give their parts in the same order: with ``renumber`` the order decides the
    ids.

    Raises:
        EdgeTypeError: parts of different types, or something that has no rows.
        AlignmentError: two rows have one id.
        BatchError: parts differ in their columns, or in what belongs to a batch as a whole.

    Example::

        replayed = source(Rollouts, name="replayed", batch_size=16)
        rollouts = Concat(renumber="prompts")(Rollout(actor, group_size=4)(prompts), replayed)
    """

    renumber: Renumber | None = None

    kind: ClassVar[str] = "host"
    composite: ClassVar[bool] = True

    def __call__(self, *parts: B) -> B:
        batch_type = _common_type(parts)
        return ConcatOf(batch_type, self.renumber, label=self.label)(*parts)


class _ConcatBody(Node):
    batch_type: type[Batch]
    renumber: Renumber | None = None

    split: ClassVar[Literal["rows", "groups", "whole"]] = "groups"
    aligns_variadic: ClassVar[bool] = False

    def problems(self) -> Iterable[str]:
        if self.renumber not in (None, *get_args(Renumber)):
            yield f"renumber is {self.renumber!r}; expected None, prompts or samples"

    def __call__(self, *parts: Batch) -> Any:
        if self.renumber is not None:
            parts = tuple(_renumbered(part, self.renumber, i, len(parts)) for i, part in enumerate(parts))
        _refuse_clash(parts)
        return parts[0] if len(parts) == 1 else type(parts[0]).concat(parts)


class ConcatOf(_ConcatBody):
    """What :class:`Concat` records: the node for one type of batch, which its ports and its output carry."""

    @property
    def name(self) -> str:
        return "Concat"

    @property
    def ports(self) -> tuple[Port, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (Port("parts", self.batch_type, required=False, variadic=True),)

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.batch_type


def _common_type(parts: Sequence[Any]) -> type[Batch]:
    """The one type of batch that all parts (Refs or data) are of."""
    found: dict[Any, None] = {}
    for part in parts:
        types, may_be_none = edge_types(part._type) if isinstance(part, Ref) else ((type(part),), False)
        rows = [t for t in types if issubclass(t, Batch) and not issubclass(t, LossTerm | TrainStats)]
        if len(types) != 1 or not rows or may_be_none:
            given = type_name(part._type) if isinstance(part, Ref) else type_name(type(part))
            raise EdgeTypeError(
                "Concat joins batches that have rows",
                expected="Rollouts, Rewards, OldLogprobs or another batch, all of one type",
                received=given,
                where=user_location(),
            )
        found[rows[0]] = None
    if len(found) > 1:
        raise EdgeTypeError(
            "Concat joins batches of one type",
            expected=f"{len(parts)} times {type_name(next(iter(found)))}",
            received=", ".join(map(type_name, found)),
            do="join each type by a Concat of its own",
            where=user_location(),
        )
    return next(iter(found))


def _renumbered(part: Batch, what: Renumber, place: int, num_parts: int) -> Batch:
    name = "prompt_id" if what == "prompts" else "sample_id"
    if not hasattr(part, name):
        raise AlignmentError(
            f"Concat cannot renumber the {what} of {part!r}",
            expected=f"batches with a {name}",
            received=f"columns {', '.join(_id_columns(part)) or 'without ids'}",
            do="use renumber='prompts', or leave renumber out",
        )
    names = [name, *(["pair_id"] if hasattr(part, "pair_id") else [])]
    changes: Mapping[str, Any] = {n: getattr(part, n) * num_parts + place for n in names}
    return replace(part, **changes)


def _id_columns(part: Batch) -> list[str]:
    return [name for name in ("prompt_id", "sample_id") if hasattr(part, name)]


def _refuse_clash(parts: Sequence[Batch]) -> None:
    """Refuse rows of one id, in batches inside of a record too, and pairs of one id in two parts."""
    first = parts[0]
    if first.row_ids is not None:
        ids: list[Any] = [part.row_ids for part in parts]
        _refuse_shared([list(map(tuple, of_part.tolist())) for of_part in ids], _id_columns(first))
    if hasattr(first, "pair_id"):
        pairs: list[Any] = [part.pair_id.tolist() for part in parts]  # type: ignore[attr-defined]
        _refuse_shared([[(p,) for p in dict.fromkeys(of_part)] for of_part in pairs], ["pair_id"])
    for f in fields(first):
        if isinstance(getattr(first, f.name), Batch):
            _refuse_clash([getattr(part, f.name) for part in parts])


def _refuse_shared(ids: Sequence[Sequence[tuple[int, ...]]], names: Sequence[str]) -> None:
    """Refuse an id that comes twice.

    Args:
        ids: by part, an id a row.
        names: of the columns that ids are made of.
    """
    owner: dict[tuple[int, ...], int] = {}
    clashes: dict[tuple[int, ...], tuple[int, int]] = {}
    for place, of_part in enumerate(ids):
        for key in of_part:
            if key in owner:
                clashes.setdefault(key, (owner[key], place))
            owner.setdefault(key, place)
    if not clashes:
        return
    first, second = next(iter(clashes.values()))
    shown = ", ".join(f"{k[0] if len(k) == 1 else k}" for k in list(clashes)[:3])
    where = f"parts {first} and {second}" if first != second else f"part {first}, twice"
    ways = "set renumber='prompts' where the parts come from different sources"
    if len(names) == 2:
        ways += ", or 'samples' where they answer the same prompts and are one group"
    raise AlignmentError(
        f"Concat: {len(clashes)} id{'s occur' if len(clashes) > 1 else ' occurs'} more than once",
        expected=f"a ({', '.join(names)}) of its own for each {'pair' if names == ['pair_id'] else 'row'}",
        received=f"{shown}{', …' if len(clashes) > 3 else ''}; the first is in {where}",
        do=f"{ways}; and the same wherever what belongs to these rows is concatenated",
    )
