"""Seconds, bytes, rates and devices as people read them: what explanations, differences and pictures of plans share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flowrl.compiler.mapping import Mapping, PlannedPool
from flowrl.drawing.svg import one_line


def seconds(value: float) -> str:
    """``123 s``, ``12.3 s``, ``45.6 ms``, ``0.012 ms``."""
    if value == 0 or abs(value) >= 0.9995:
        return f"{_three(value)} s"
    return f"{_three(value * 1e3)} ms"


def size(value: float) -> str:
    """Bytes: ``1.24 TB``, ``63.1 GB``, ``12.3 MB``, ``100 kB``, ``12 B``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value)} B"


def flops(value: float) -> str:
    """FLOP/s: ``312 TFLOP/s``."""
    return f"{_three(value / 1e12)} TFLOP/s"


def share(value: float) -> str:
    """``62 %``, ``0.4 %``."""
    percent = 100 * value
    if not math.isfinite(percent):
        return f"{_three(percent)} %"
    return f"{percent:.0f} %" if percent >= 9.5 or percent == 0 else f"{percent:.2g} %"


def change(value: float, base: float) -> str:
    """How far a value is from another: ``+9 %``, ``−13 %``; "" where there is no other."""
    if not base:
        return ""
    percent = 100 * (value / base - 1)
    if abs(percent) < 0.05:
        return "the same"
    digits = 0 if abs(percent) >= 9.5 else 1
    return f"{'+' if percent > 0 else '−'}{abs(percent):,.{digits}f} %"


def count(number: int, noun: str) -> str:
    """``1 node``, ``16 nodes``, ``1,024 devices``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("sh") else "s")


def span(first: int, last: int) -> str:
    """``7``, or ``0–7``."""
    return f"{first}" if first == last else f"{first}–{last}"


def listed(words: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    words = list(words)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def pool_text(pool: PlannedPool) -> str:
    """``2 nodes of 8 H100``."""
    return f"{count(pool.nodes, 'node')} of {pool.gpus_per_node} {one_line(pool.device.name)}"


def devices_text(mapping: Mapping, pool: int, start: int, stop: int) -> str:
    """``H100 0–7 (node 0)``: devices are numbered within their pool."""
    here = mapping.pools[pool]
    text = f"{one_line(here.device.name)} {span(start, stop - 1)}"
    if here.nodes > 1:
        first, last = start // here.gpus_per_node, (stop - 1) // here.gpus_per_node
        text += f" ({'node' if first == last else 'nodes'} {span(first, last)})"
    same = [p for p in mapping.pools if p.device.name == here.device.name]
    return text if len(same) == 1 else f"{text} of pool {pool}"


def _three(value: float) -> str:
    """Three digits; an exponent only where a number is next to nothing."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "NaN"
    if abs(value) < 1e-4:
        return f"{value:.2e}" if value else "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}" if rounded else "0"
