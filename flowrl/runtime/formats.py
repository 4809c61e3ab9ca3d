"""Numbers and durations as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from flowrl.drawing.svg import one_line

_BARS = "▁▂▃▄▅▆▇█"


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Whether this is a number that can be reckoned with."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Any) -> str:
    """A number in about four digits: ``0.5312``, ``12.3``, ``1,234``, ``3e-06``, ``NaN``, ``∞``."""
    if not isinstance(value, int | float):
        return one_line(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration: ``0.42s``, ``12.3s``, ``3:07``, ``1:02:03``."""
    if not math.isfinite(value):
        return number(value)
    if value < 60:
        return f"{value:.2f}s" if value < 1 else f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Iterable[float]) -> str:
    """The last values as a row of bars, from the least to the greatest of them."""
    values = list(values)
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in values)


def pairs(metrics: Mapping[str, Any]) -> str:
    """``math 0.5, format 0.9``"""
    return ", ".join(f"{one_line(name)} {number(value)}" for name, value in metrics.items())


def below(metrics: Mapping[str, Any], prefix: str, skip: Iterable[str] = ()) -> dict[str, Any]:
    """The metrics under ``prefix/``, by the rest of their names."""
    start, skipped = f"{prefix}/", set(skip)
    found = {n.removeprefix(start): v for n, v in metrics.items() if n.startswith(start)}
    return {n: v for n, v in found.items() if n not in skipped}


def is_bad(text: str) -> bool:
    """Whether a text made here starts with a number that is not finite."""
    return text.startswith(("NaN", "∞", "−∞"))
