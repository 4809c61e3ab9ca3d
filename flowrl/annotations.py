"""Annotations as types of edges: what a parameter admits, what a field of a batch is, and whether one fits the other.

Annotations are read leniently: torch is not imported for the sake of ``Tensor`` in one. A name that cannot be resolved
becomes a stand-in type of that name, and stand-ins are compared by name.
"""

from __future__ import annotations

import builtins
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from flowrl import batches
from flowrl.batches import Batch
from flowrl.errors import EdgeTypeError, UnknownFieldError, nearest
from flowrl.ragged import Ragged


class _StandInMeta(type):
    """``torch.Tensor`` and ``Mapping[str, x]`` work on stand-ins too."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __getitem__(cls, item: Any) -> type:
        return cls


_stand_ins: dict[str, type] = {}


def stand_in(name: str) -> type:
    """The type that stands for a name which is not imported (Tensor, Engine)."""
    if name not in _stand_ins:
        _stand_ins[name] = _StandInMeta(name, (), {"__module__": "unresolved"})
    return _stand_ins[name]


class _Names(dict[str, Any]):
    """Names for evaluating an annotation. What the module lacks (it may import it only for type checkers) is looked for
    among the batches, and else becomes a stand-in."""

    def __missing__(self, key: str) -> Any:
        return getattr(batches, key) if key in batches.__all__ else Ragged if key == "Ragged" else stand_in(key)


def resolve_hints(thing: Any, localns: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Annotations of a class (inherited ones too) or function, as types.

    Lenient where ``typing.get_type_hints`` raises: see the module's docstring.

    Args:
        localns: the names around it, where it is defined in a function.
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


def type_name(annotation: Any) -> str:
    """A type as users write it."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join("None" if m is type(None) else type_name(m) for m in typing.get_args(annotation))
    return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")


def edge_types(annotation: Any) -> tuple[tuple[type, ...], bool]:
    """The types that an annotation admits, and whether None is allowed too."""
    members = (annotation,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
    real = tuple(typing.get_origin(m) or m for m in members if m is not type(None))
    return tuple(m for m in real if isinstance(m, type)), type(None) in members


def is_edge_annotation(annotation: Any) -> bool:
    """Whether a function's parameter with this annotation is an input (an edge) rather than a setting."""
    return any(issubclass(t, Batch | Ragged) for t in edge_types(annotation)[0])


def fits(given: Any, annotation: Any) -> bool:
    """Whether everything that an edge of type ``given`` may carry is admitted by a parameter's annotation."""
    allowed, takes_none = edge_types(annotation)
    if not allowed or object in allowed or Any in allowed:  # Any is a class from Python 3.11 on
        return True
    carried, may_be_none = edge_types(given)
    if not carried or (may_be_none and not takes_none):
        return False
    return all(any(_is_a(t, a) for a in allowed) for t in carried)


def _is_a(given: type, allowed: type) -> bool:
    if isinstance(given, _StandInMeta) or isinstance(allowed, _StandInMeta):
        return given.__name__ == allowed.__name__
    return issubclass(given, allowed)


def field_type(owner: Any, name: str) -> Any:
    """The type of a field or property of a batch type.

    Raises:
        UnknownFieldError: it has none of this name; the nearest is offered.
        EdgeTypeError: ``owner`` is not a batch.
    """
    if not (isinstance(owner, type) and is_dataclass(owner)):
        raise EdgeTypeError(
            f"A {type_name(owner)} on an edge has no fields to read",
            expected="a field of a batch",
            received=f".{name} of a {type_name(owner)}",
            do="pass it to a node that takes it whole",
            where=_where(),
        )
    if name in {f.name for f in fields(owner)}:
        return resolve_hints(owner).get(name, object)
    attribute = getattr(owner, name, None)
    if isinstance(attribute, property) and attribute.fget is not None:
        return resolve_hints(attribute.fget).get("return", object)
    if callable(attribute):
        raise UnknownFieldError(
            f"`ref.{name}(…)` is a method of {owner.__name__}",
            expected="a field or a property of it",
            received="a method, while the flow is being built and there is no data yet",
            do="call it inside of a node (@flowrl.node on a function)",
            where=_where(),
        )
    properties = [n for cls in owner.__mro__ for n, v in vars(cls).items() if isinstance(v, property)]
    raise UnknownFieldError(
        f"{owner.__name__} has no field {name!r}",
        do=nearest(name, [*(f.name for f in fields(owner)), *dict.fromkeys(properties)]),
        where=_where(),
    )


def _where() -> str:
    from flowrl.graph import user_location  # graph imports this module

    return user_location()
