"""The results of the benchmarks as one JSON file, from which docs/benchmarks.md and its pictures are made."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.measure import Compared, Planned
from benchmarks.published import Ordering

FILE = Path(__file__).with_name("results.json")


@dataclass
class Results:
    """Everything that was measured, section by section.

    Args:
        machine: that planning times are of.
        mcmc_seconds: that ReaL's chain ran.
        standard: the standard set.
        largest: six Models on 4,096 devices.
        devices, models: growth.
        methods: the three methods.
        orderings: placements of PPO by size and devices.
        generation: by size, (tensor parallelism, seconds) of generation.
    """

    machine: str = ""
    mcmc_seconds: float = 0.0
    standard: list[Planned] = field(default_factory=list)
    largest: list[Planned] = field(default_factory=list)
    devices: list[Planned] = field(default_factory=list)
    models: list[Planned] = field(default_factory=list)
    methods: list[Compared] = field(default_factory=list)
    orderings: list[Ordering] = field(default_factory=list)
    generation: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def save(self, path: Path = FILE) -> None:
        """Writes them; numbers are rounded to what is meant."""
        path.write_text(json.dumps(_rounded(asdict(self)), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path = FILE) -> Results:
        """Reads what was saved; empty where there is no file."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text())
        kinds = {"methods": Compared, "orderings": Ordering}
        kinds |= dict.fromkeys(("standard", "largest", "devices", "models"), Planned)
        for name, kind in kinds.items():
            found[name] = [kind(**{k: _value(v) for k, v in row.items()}) for row in found[name]]
        found["generation"] = {
            size: [(int(t), float(s)) for t, s in rows] for size, rows in found["generation"].items()
        }
        return cls(**{f.name: found[f.name] for f in fields(cls)})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return "infinite" if math.isinf(value) else float(f"{value:.5g}")
    return value


def _value(value: Any) -> Any:
    if value == "infinite":
        return float("inf")
    return tuple((name, seconds) for name, seconds in value) if isinstance(value, list) else value
