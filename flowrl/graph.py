"""Recording: called with a Ref instead of data, a node is written down as a Call, and its output is a Ref again.

A Ref is typed as the batch it stands for, so that editors check the wiring. At run time it knows the call that makes it
and the path of fields read from it, and refuses to be used as data.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flowrl.annotations import edge_types, field_type, fits, type_name
from flowrl.errors import EdgeTypeError, RefUseError

if TYPE_CHECKING:
    from flowrl.nodes.base import Node

_PACKAGE_FOLDER = str(Path(__file__).parent) + os.sep
_order = itertools.count()


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded invocation of a node.

    Args:
        node: the node, with its settings.
        arguments: by parameter name, the Ref, or a tuple of Refs for ``*args``; parameters left at their default are
            absent.
        output_type: what it returns.
        where: the user's ``file:line``.
        order: recording order in this process, the tie-break of every ordering.
    """

    node: Node
    arguments: Mapping[str, Any]
    output_type: Any
    where: str
    order: int = field(default_factory=lambda: next(_order))

    def inputs(self) -> Iterator[tuple[str, Ref]]:
        """(argument name, Ref) of every edge into this call; those of ``*terms`` are named ``terms[0]``,
        ``terms[1]``, …"""
        for name, value in self.arguments.items():
            if isinstance(value, tuple):
                yield from ((f"{name}[{i}]", ref) for i, ref in enumerate(value))
            else:
                yield name, value

    def __repr__(self) -> str:
        return f"Call({self.node.name} at {self.where})"


class Ref:
    """Stands in for a batch, or for a field of one, while a flow is being built.

    ``ref.field`` is a Ref again: an edge that carries one field or property. Everything that needs data raises
    RefUseError: truth value, iteration, length, indexing, calling, assignment, arithmetic and comparison.
    """

    __slots__ = ("__weakref__", "_call", "_path", "_type")

    _call: Call
    _path: tuple[str, ...]
    _type: Any

    def __init__(self, call: Call, path: tuple[str, ...] = (), type_: Any = None) -> None:
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_type", type_ or call.output_type)

    def __getattr__(self, name: str) -> Ref:
        if name.startswith("__"):  # protocol look-ups (copy, pickle, IPython) must not become edges
            raise AttributeError(name)
        return Ref(self._call, (*self._path, name), field_type(self._type, name))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse(f"ref.{name} = …")

    def __delattr__(self, name: str) -> NoReturn:
        self._refuse(f"del ref.{name}")

    def __bool__(self) -> NoReturn:
        self._refuse("if ref:")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("for x in ref:")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            self._refuse("ref == …")
        return self is other

    __hash__ = object.__hash__  # Refs are keys, of a placement for example

    def __copy__(self) -> Ref:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        return self

    def _refuse(self, what: str) -> NoReturn:
        raise RefUseError(
            f"A Ref of {type_name(self._type)} was used in `{what}`",
            expected="a Ref passed to a node, or a field of it",
            received=f"`{what}` while the flow is being built, when there is no data yet",
            do="move that logic into a node (@flowrl.node on a function)",
            where=user_location(),
        )

    def __repr__(self) -> str:
        path = "".join(f".{name}" for name in self._path)
        return f"Ref[{type_name(self._type)}]({self._call.node.name}{path})"


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Ref, *args: object, **kwargs: object) -> NoReturn:
        self._refuse(what)

    return refuse


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_REFUSED = {
    **{name: f"ref {sign} …" for name, sign in _OPERATORS.items()},
    **{f"r{name}": f"… {sign} ref" for name, sign in _OPERATORS.items()},
    **{"lt": "ref < …", "le": "ref <= …", "gt": "ref > …", "ge": "ref >= …", "contains": "… in ref"},
    **{"neg": "-ref", "pos": "+ref", "invert": "~ref", "abs": "abs(ref)", "round": "round(ref)"},
    **{"len": "len(ref)", "int": "int(ref)", "float": "float(ref)", "index": "a place in a list"},
    **{"getitem": "ref[…]", "setitem": "ref[…] = …", "call": "ref(…)"},
}
for _name, _what in _REFUSED.items():
    setattr(Ref, f"__{_name}__", _refusal(_what))


def record(node: Node, arguments: dict[str, Any], output_type: type) -> Any:
    """Write a call down and hand back the Ref of its output (typed ``Any``: it is typed as what it stands for)."""
    call = Call(node, types.MappingProxyType(dict(arguments)), output_type, where=user_location())
    for source in {id(s): s for s in _sources_of(call)}.values():
        _recorded_from(source).append(call)
    return Ref(call)


def _sources_of(call: Call) -> Iterator[Call]:
    """The calls without inputs that this call descends from (itself, if it has none)."""
    seen: set[int] = set()
    stack = [call]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        inputs = [ref._call for _, ref in current.inputs()]
        if not inputs:
            yield current
        stack += inputs


def _recorded_from(source: Call) -> list[Call]:
    """Every call recorded downstream of a source, in order: what finds calls that reach no output."""
    recorded = source.__dict__.get("_recorded")
    if recorded is None:
        recorded = []
        object.__setattr__(source, "_recorded", recorded)
    return recorded


def recorded_from(source: Call) -> tuple[Call, ...]:
    """Calls recorded from this source. A cell that is run again replaces what its lines recorded before."""
    latest: dict[tuple[Any, ...], Call] = {}
    calls = _recorded_from(source)
    for call in calls:
        key: tuple[Any, ...] = ("call", id(call))
        if in_notebook(call.where):
            key = (call.where, type(call.node), tuple(call.arguments))
        latest[key] = call
    return tuple(latest.values())


def in_notebook(where: str) -> bool:
    """Whether a ``file:line`` is in a cell of a notebook."""
    return "<ipython" in where or "ipykernel" in where


def user_location() -> str:
    """``file:line`` of the nearest frame outside of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        generated = filename == "<string>" and frame.f_code.co_name.startswith("__")  # a dataclass's own __init__
        if not filename.startswith(_PACKAGE_FOLDER) and not generated:
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def check_edge_type(ref: Ref, annotation: Any, *, node: str, argument: str) -> None:
    """Refuse, at the line, a Ref that does not fit a parameter.

    Raises:
        EdgeTypeError: with both types, and where the Ref was made.
    """
    allowed, _ = edge_types(annotation)
    if not fits(ref._type, annotation):
        raise EdgeTypeError(
            f"{node}: argument {argument!r} has the wrong type",
            expected=" or ".join(type_name(t) for t in allowed),
            received=f"{type_name(ref._type)}, {_described(ref)} at {ref._call.where}",
            do=f"pass a call that returns {type_name(allowed[0])}",
            where=user_location(),
        )


def _described(ref: Ref) -> str:
    name = ref._call.node.name
    return f"field {'.'.join(ref._path)!r} of {name}" if ref._path else f"the output of {name}"


def walk(outputs: list[Ref] | tuple[Ref, ...]) -> list[Call]:
    """Every call that the outputs need, inputs before users, ties in recording order. The one walker of the package.

    A cycle (only possible after surgery on a graph) is left in recording order; the check of the flow reports it.
    """
    calls: dict[int, Call] = {}
    stack = [ref._call for ref in outputs]
    while stack:
        call = stack.pop()
        if id(call) not in calls:
            calls[id(call)] = call
            stack += [ref._call for _, ref in call.inputs()]
    waiting = {key: len({id(r._call) for _, r in c.inputs()}) for key, c in calls.items()}
    users: dict[int, list[Call]] = {key: [] for key in calls}
    for call in calls.values():
        for upstream in {id(r._call) for _, r in call.inputs()}:
            users[upstream].append(call)
    ready = [(c.order, key) for key, c in calls.items() if not waiting[key]]
    heapq.heapify(ready)
    ordered: list[Call] = []
    while ready:
        _, key = heapq.heappop(ready)
        ordered.append(calls[key])
        for user in users[key]:
            waiting[id(user)] -= 1
            if not waiting[id(user)]:
                heapq.heappush(ready, (user.order, id(user)))
    done = {id(c) for c in ordered}
    return ordered + sorted((c for key, c in calls.items() if key not in done), key=lambda c: c.order)
