"""Settings as text that is the same in every process: for plans that are compared, and for pictures."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from flowrl.models import BaseModel, State

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def stable_text(value: Any) -> str:
    """A setting in words: functions and classes by qualified name, Models and States by their own, no memory addresses,
    sets in sorted order.
    """
    if isinstance(value, BaseModel | State):
        return value.name
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, functools.partial):
        given = [*map(stable_text, value.args), *(f"{k}={stable_text(v)}" for k, v in value.keywords.items())]
        return f"partial({', '.join([stable_text(value.func), *given])})"
    if hasattr(value, "__qualname__"):  # a function, class or method
        return f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}".lstrip(".")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{stable_text(k)}: {stable_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(stable_text, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(stable_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if is_dataclass(value):
        settings = ", ".join(f"{f.name}={stable_text(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({settings})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__}({list(value.shape)}, {value.dtype})"
    return _ADDRESS.sub("", repr(value))
