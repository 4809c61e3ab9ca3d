"""What is different between two plans, in words; and a plan's mapping back from JSON."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from flowrl.compiler import figures
from flowrl.compiler.mapping import Mapping
from flowrl.compiler.plan import Plan
from flowrl.drawing.svg import one_line
from flowrl.errors import FlowError, nearest

T = TypeVar("T")


# -- the difference of two plans ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """Things of one kind in two plans: what they are called, and what tells one from another."""

    noun: str
    key: Callable[[Any], tuple[Any, ...]]
    name: Callable[[Any], str]


def _by(noun: str, *names: str, arrow: bool = False) -> _Kind:
    def key(thing: Any) -> tuple[Any, ...]:
        return tuple(getattr(thing, name) for name in names)

    def text(thing: Any) -> str:
        words = [one_line(part) for part in key(thing)]
        return f"{words[0]}: {' → '.join(words[1:])}" if arrow else " ".join(words)

    return _Kind(noun, key, text)


#: By field of a plan or mapping, what it holds.
_KINDS = {
    "calls": _by("call", "label"),
    "models": _by("model", "name"),
    "weight_edges": _by("weight edge", "model", "writer", "reader", arrow=True),
    "derived_writers": _Kind(
        "derived writer", lambda pair: tuple(pair), lambda pair: one_line(f"{pair[0]} of {pair[1]}")
    ),
    "pools": _Kind("pool", lambda pool: (pool.device.name,), lambda pool: one_line(pool.device.name)),
    "meshes": _by("mesh", "name"),
    "units": _by("unit", "label"),
    "moves": _by("move of weights", "model", "writer", "reader", arrow=True),
    "stretches": _Kind(
        "devices",
        lambda s: (s.pool, s.start, s.stop),
        lambda s: f"{figures.span(s.start, s.stop - 1)} of pool {s.pool}",
    ),
    "alternatives": _by("alternative", "name"),
    "what_ifs": _by("what-if", "name"),
}
_SECONDS = frozenset({"seconds", "move_seconds", "compute", "memory", "link", "bubble", "period", "lower_bound"})
_BYTES = frozenset(
    {"held", "transient", "capacity", "total_bytes", "bytes_received", "bytes_sent", "peak_extra_bytes", "weights"}
    | {"gradients", "optimizer", "activations", "logits", "kv_cache", "buckets", "memory_bytes"}
)


def diff(a: Plan, b: Plan) -> str:
    """What ``b`` has that ``a`` has not (``+``), the other way round (``−``), and what both have differently (``~``), a line
    each; "" for equal plans. Seconds in it are estimates.

    Example::

        ~ unit rollout: seconds 30.0 s → 25.0 s (−17 %)
        ~ model actor: strategy.tensor_parallel 1 → 2
        + call reference
    """
    if a == b:
        return ""
    return "\n".join(_differences(a, b, ""))


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    """Of two of one dataclass, field by field."""
    for field in fields(a):
        name = field.name
        old, new = getattr(a, name), getattr(b, name)
        if _same(old, new):
            continue
        if name == "slots":
            yield f"~ timeline: {figures.count(len(old), 'slot')} → {figures.count(len(new), 'slot')}, at other times"
        elif name in _KINDS:
            yield from _things(_KINDS[name], old, new)
        elif name == "mapping" and old is not None and new is not None:
            yield from _differences(old, new, "")
        elif name == "mapping":
            yield (
                "+ mapping: calls are placed on devices"
                if old is None
                else "− mapping: calls are not placed on devices"
            )
        else:
            yield f"~ {'; '.join(_changes(old, new, path + name, name))}"


def _things(kind: _Kind, old: Sequence[Any], new: Sequence[Any]) -> Iterator[str]:
    """Things that came, went, changed or changed places. Of two with one name each is compared with its like."""
    before, after = _numbered(kind, old), _numbered(kind, new)
    for key, thing in before.items():
        if key not in after:
            yield f"− {kind.noun} {kind.name(thing)}"
    for key, thing in after.items():
        if key not in before:
            yield f"+ {kind.noun} {kind.name(thing)}"
        elif not _same(before[key], thing):
            changes = "; ".join(text for text in _changes(before[key], thing, "", ""))
            yield f"~ {kind.noun} {kind.name(thing)}: {changes}"
    kept_before, kept_after = [k for k in before if k in after], [k for k in after if k in before]
    if kept_before != kept_after:
        moved = [kind.name(after[k]) for was, k in zip(kept_before, kept_after, strict=True) if was != k]
        yield f"~ order, {kind.noun} by {kind.noun}: {', '.join(moved)}"


def _numbered(kind: _Kind, things: Iterable[Any]) -> dict[tuple[Any, ...], Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for thing in things:
        again = sum(key[:-1] == kind.key(thing) for key in found)
        found[(*kind.key(thing), again)] = thing
    return found


def _changes(old: Any, new: Any, path: str, name: str) -> Iterator[str]:
    """``path old → new`` of every value inside that is not the same."""
    if is_dataclass(old) and type(old) is type(new):
        for field in fields(old):
            was, now = getattr(old, field.name), getattr(new, field.name)
            if not _same(was, now):
                yield from _changes(was, now, f"{path}.{field.name}" if path else field.name, field.name)
    elif _is_pairs(old) and _is_pairs(new):
        was, now = dict(old), dict(new)
        for key in dict.fromkeys([*was, *now]):
            if key not in now:
                yield f"{path}.{one_line(key)} {_value(was[key], name)} → nothing"
            elif key not in was:
                yield f"{path}.{one_line(key)} nothing → {_value(now[key], name)}"
            elif not _same(was[key], now[key]):
                yield f"{path}.{one_line(key)} {_value(was[key], name)} → {_value(now[key], name)}"
        if was == now:
            yield f"{path} in another order"
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) and any(map(is_dataclass, old)):
        for i, (was, now) in enumerate(zip(old, new, strict=True)):
            if not _same(was, now):
                yield from _changes(was, now, f"{path}[{i}]", name)
    else:
        yield f"{path} {_value(old, name)} → {_value(new, name)}{_relative(old, new, name)}"


def _is_pairs(value: Any) -> bool:
    """Whether it is (name, value) pairs, each name once."""
    pairs = isinstance(value, tuple) and all(
        isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value
    )
    return bool(value) and pairs and len({v[0] for v in value}) == len(value)


def _value(value: Any, name: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name in _SECONDS:
            return figures.seconds(value)
        return figures.size(value) if name in _BYTES else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    if isinstance(value, tuple):
        return f"({', '.join(_value(v, name) for v in value)})"
    if is_dataclass(value):
        inner = ((f.name, getattr(value, f.name)) for f in fields(value))
        return f"{type(value).__name__}({', '.join(f'{n}={_value(v, n)}' for n, v in inner)})"
    return one_line(value) or repr(value)


def _relative(old: Any, new: Any, name: str) -> str:
    """How far apart two numbers are; both in full where their texts are one."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (old, new))
    if numbers and _value(old, name) == _value(new, name):
        return f" ({old!r} → {new!r})"
    if numbers and name in _SECONDS | _BYTES and old and all(map(math.isfinite, (old, new))):
        return f" ({figures.change(new, old)})"
    return ""


def _same(a: Any, b: Any) -> bool:
    return bool(a == b)


# -- a mapping from JSON --------------------------------------------------------------------------------------------------


def mapping_from_json(raw: Any) -> Mapping:
    """The mapping of a value that ``json.loads`` gave; the inverse of :func:`dataclasses.asdict` and ``json.dumps``.

    Raises:
        FlowError: names the field, what was expected there and what is there; all such fields.
    """
    problems: list[str] = []
    made = _read(Mapping, raw, "mapping", problems)
    if problems:
        raise FlowError("This is not a plan's mapping: " + "; ".join(problems), do="make the plan again")
    return made


def _read(kind: Any, raw: Any, path: str, problems: list[str]) -> Any:
    """``raw`` as a ``kind``; what it is not goes to ``problems``, and what comes back then is of no use."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, raw, path, problems)
    if typing.get_origin(kind) is tuple:
        (of, _) = typing.get_args(kind)  # all tuples of a mapping are of any length
        if not isinstance(raw, list | tuple):
            return _refuse("a list", raw, path, problems)
        return tuple(_read(of, value, f"{path}[{i}]", problems) for i, value in enumerate(raw))
    if isinstance(kind, types.UnionType):
        (other,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
        return None if raw is None else _read(other, raw, path, problems)
    expected, accepted = _PLAIN[kind]
    if not isinstance(raw, accepted) or (isinstance(raw, bool) and kind is not bool):
        return _refuse(expected, raw, path, problems)
    return raw


_PLAIN: dict[type, tuple[str, Any]] = {
    str: ("a text", str),
    bool: ("true or false", bool),
    int: ("a whole number", int),
    float: ("a number", int | float),
}


def _read_dataclass(kind: type[T], raw: Any, path: str, problems: list[str]) -> T | None:
    if not isinstance(raw, dict):
        return _refuse("an object", raw, path, problems)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    before = len(problems)
    problems += [f"{path}.{name} is missing; expected {_expected(hints[name])}" for name in names if name not in raw]
    problems += [
        f"{path} has {key!r}; expected no such field; {nearest(str(key), names)}" for key in raw if key not in names
    ]
    values = {name: _read(hints[name], raw[name], f"{path}.{name}", problems) for name in names if name in raw}
    return kind(**values) if len(problems) == before else None


def _expected(kind: Any) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind][0]
    return "a list" if typing.get_origin(kind) is tuple else "a value"


def _refuse(expected: str, raw: Any, path: str, problems: list[str]) -> None:
    problems.append(f"{path} is {repr(raw)[:80]}; expected {expected}")
