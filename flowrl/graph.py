"""Recording: called with a Ref instead of data, a node is written down as a Call, and its output is a Ref again.

A Ref is typed as the batch it stands for, so that editors check the wiring. At run time it knows the call that makes it
and the path of fields read from it, and refuses to be used as data.
"""

from __future__ import annotations

import builtins
import heapq
import itertools
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flowrl.batches import Batch, refuse_data_use, unknown_field
from flowrl.errors import EdgeTypeError

if TYPE_CHECKING:
    from flowrl.nodes.base import Node

_PACKAGE_FOLDER = str(Path(__file__).parent)
_order = itertools.count()


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded invocation of a node.

    Args:
        node: the node, with its settings.
        arguments: by parameter name, the Ref, or a tuple of Refs for ``*args``; parameters left at their default are absent.
        output_type: what it returns.
        where: the user's ``file:line``.
        order: recording order in this process, the tie-break of every ordering.
    """

    node: Node
    arguments: Mapping[str, Any]
    output_type: type
    where: str
    order: int = field(default_factory=lambda: next(_order))

    def inputs(self) -> Iterator[tuple[str, Ref]]:
        """(argument name, Ref) of every edge into this call; those of ``*terms`` are named ``terms[0]``, ``terms[1]``, …"""
        for name, value in self.arguments.items():
            if isinstance(value, tuple):
                yield from ((f"{name}[{i}]", ref) for i, ref in enumerate(value))
            else:
                yield name, value

    def __repr__(self) -> str:
        return f"Call({type(self.node).__name__} at {self.where})"


class Ref:
    """Stands in for a batch, or for a field of one, while a flow is being built."""

    __slots__ = ("__weakref__", "_call", "_path", "_type")

    _call: Call
    _path: tuple[str, ...]
    _type: type

    def __init__(self, call: Call, path: tuple[str, ...] = (), type_: type | None = None) -> None:
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_type", type_ or call.output_type)

    def __getattr__(self, name: str) -> Ref:
        if name.startswith("__"):  # protocol look-ups (copy, pickle, IPython) must not become edges
            raise AttributeError(name)
        return Ref(self._call, (*self._path, name), field_type(self._type, name))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        refuse_data_use(f"ref.{name} = …", self._type)

    def __bool__(self) -> bool:
        refuse_data_use("if ref:", self._type)

    def __iter__(self) -> Iterator[Any]:
        refuse_data_use("for x in ref:", self._type)

    def __len__(self) -> int:
        refuse_data_use("len(ref)", self._type)

    def __getitem__(self, key: object) -> NoReturn:
        refuse_data_use("ref[…]", self._type)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        refuse_data_use("ref(…)", self._type)

    def _refuse_arithmetic(self, other: object) -> NoReturn:
        refuse_data_use("arithmetic on a ref", self._type)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_arithmetic

    def __repr__(self) -> str:
        path = "".join(f".{name}" for name in self._path)
        return f"Ref[{type_name(self._type)}]({type(self._call.node).__name__}{path})"


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
        if "<ipython" in call.where or "ipykernel" in call.where:
            key = (call.where, type(call.node), tuple(call.arguments))
        latest[key] = call
    return tuple(latest.values())


def user_location() -> str:
    """``file:line`` of the nearest frame outside of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_PACKAGE_FOLDER) and not filename.startswith("<string>"):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def type_name(annotation: Any) -> str:
    """A type as users write it."""
    return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")


def field_type(owner: Any, name: str) -> Any:
    """The type of a field or property of a batch type.

    Raises:
        UnknownFieldError: it has none of this name; the nearest is offered.
    """
    if is_dataclass(owner) and isinstance(owner, type):
        if name in {f.name for f in fields(owner)}:
            return resolve_hints(owner).get(name, object)
        attribute = getattr(owner, name, None)
        if isinstance(attribute, property) and attribute.fget is not None:
            return resolve_hints(attribute.fget).get("return", object)
        unknown_field(owner, name)
    raise EdgeTypeError(
        f"A {type_name(owner)} on an edge has no fields to read",
        expected="a field of a batch",
        received=f".{name} of a {type_name(owner)}",
        do="pass it to a node that takes it whole",
    )


class _Names(dict[str, Any]):
    """Names for evaluating an annotation; those imported only for type checkers (Tensor, Engine) become ``object``."""

    def __missing__(self, key: str) -> Any:
        return object


def resolve_hints(thing: Any, localns: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Annotations of a class (inherited ones too) or function, as types. Lenient where ``typing.get_type_hints`` raises:
    torch is not imported for the sake of an annotation.
    """
    out: dict[str, Any] = {}
    for owner in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        module = sys.modules.get(getattr(owner, "__module__", None) or "")
        names = _Names({**vars(builtins), **(vars(module) if module else {})})
        names.update(getattr(owner, "__globals__", {}))
        names.update(localns or {})
        own = owner.__dict__ if isinstance(owner, type) else {"__annotations__": owner.__annotations__}
        for name, annotation in own.get("__annotations__", {}).items():
            if isinstance(annotation, str):
                try:
                    annotation = eval(annotation, {}, names)
                except (TypeError, AttributeError, SyntaxError):
                    annotation = object
            out[name] = type(None) if annotation is None else annotation
    return out


def edge_types(annotation: Any) -> tuple[tuple[type, ...], bool]:
    """The batch types that an annotation admits, and whether None is allowed too."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
        return tuple(m for m in members if isinstance(m, type) and m is not type(None)), type(None) in members
    return ((annotation,) if isinstance(annotation, type) else ()), False


def is_edge_annotation(annotation: Any) -> bool:
    """Whether a parameter with this annotation is an input (an edge) rather than a setting."""
    from flowrl.ragged import Ragged

    types_, _ = edge_types(annotation)
    return any(issubclass(t, Batch | Ragged) for t in types_)


def check_edge_type(ref: Ref, annotation: Any, *, node: str, argument: str) -> None:
    """Raise at the line when a Ref does not fit a parameter."""
    allowed, _ = edge_types(annotation)
    if not allowed or object in allowed:
        return
    if not (isinstance(ref._type, type) and issubclass(ref._type, allowed)):
        raise EdgeTypeError(
            f"{node}: argument {argument!r} has the wrong type",
            expected=" or ".join(type_name(t) for t in allowed),
            received=f"{type_name(ref._type)}, the output of {type(ref._call.node).__name__} at {ref._call.where}",
            do=f"pass a call that returns {type_name(allowed[0])}",
            where=user_location(),
        )


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

