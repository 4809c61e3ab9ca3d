"""What was measured on a machine: rates with their units and conditions, in a file that estimates read.

The file is JSON, written by ``flowrl calibrate``. Every number says what it is: its unit, how often it was measured, how far
the repetitions lay apart, and under which conditions.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flowrl.errors import FlowError
from flowrl.machine import Gpu, Machine

T = TypeVar("T")

#: Of the file. It grows by one when a file of before cannot be read any more.
SCHEMA = 1

#: By name, the unit of a rate and what is counted.
UNITS: dict[str, tuple[str, str]] = {
    "matmul": ("FLOP/s", "2·n³ for a product of two n × n matrices"),
    "copy": ("B/s", "bytes read and bytes written"),
    "read": ("B/s", "bytes of a matrix that is multiplied with a vector, and of the vectors"),
    "host_to_device": ("B/s", "bytes copied from pinned host memory"),
    "device_to_host": ("B/s", "bytes copied to pinned host memory"),
    "all_reduce": ("B/s", "bytes of the tensor that each rank holds"),
    "broadcast": ("B/s", "bytes of the tensor that is sent"),
    "prefill": ("token/s", "prompt tokens, until the first token is sampled"),
    "generate": ("token/s", "sampled tokens; the passes over the prompts are in the time"),
    "score": ("token/s", "tokens of whole sequences"),
    "train": ("token/s", "tokens of whole sequences, forward, backward and optimiser"),
}

Condition = str | int | float | bool


@dataclass(frozen=True)
class Rate:
    """A rate that was measured.

    Args:
        name: of :data:`UNITS`.
        unit: as there.
        value: ``work`` divided by the median of the repetitions' times.
        low, high: the same with the third and the first quartile of the times: half of all repetitions lie between.
        repetitions: how many were timed, after the warm-up.
        work: what one repetition does, counted exactly (FLOP, bytes or tokens).
        conditions: what it was measured with: device, dtype, size, threads, …
    """

    name: str
    unit: str
    value: float
    low: float
    high: float
    repetitions: int
    work: int
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median time of a repetition."""
        return self.work / self.value

    def matches(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether it was measured under all of these."""
        return all(name in self.conditions and self.conditions[name] == value for name, value in conditions.items())

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "conditions": dict(self.conditions)}


@dataclass(frozen=True)
class Calibration:
    """The rates of one machine.

    Args:
        machine: which.
        made_at: UTC, ISO 8601.
        versions: by package, of those that the rates depend on.
        rates: in the order in which they were measured.
        notes: what was not measured and why, and what makes the numbers doubtful, a sentence each.

    Example::

        calibration = Calibration.load()
        calibration.best("matmul", dtype="bfloat16").value  # FLOP/s
    """

    machine: Machine
    made_at: str
    versions: Mapping[str, str]
    rates: tuple[Rate, ...]
    notes: tuple[str, ...] = ()

    def find(self, name: str, **conditions: Condition) -> tuple[Rate, ...]:
        """All rates of a name that were measured under these conditions.

        Raises:
            FlowError: there is no such name.
        """
        if name not in UNITS:
            raise FlowError("There is no such rate", expected=", ".join(UNITS), received=name)
        return tuple(r for r in self.rates if r.name == name and r.matches(conditions))

    def best(self, name: str, **conditions: Condition) -> Rate | None:
        """The highest of :meth:`find`; None where nothing was measured."""
        return max(self.find(name, **conditions), key=lambda r: r.value, default=None)

    # -- the file ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "made_at": self.made_at,
            "versions": dict(self.versions),
            "machine": self.machine.to_json(),
            "rates": [rate.to_json() for rate in self.rates],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Any, *, file: str = "the calibration") -> Calibration:
        """The calibration of a value that ``json.loads`` gave.

        Raises:
            FlowError: names the file, the field, what was expected there and what is there.
        """
        return _Reader(file).calibration(data)

    def save(self, path: Path | None = None) -> Path:
        """Write the file, whole or not at all; by default where :meth:`load` looks for it. Its path.

        Raises:
            RunFolderError: it cannot be written.
        """
        from flowrl.runtime.atomic import write_atomically

        path = default_path() if path is None else Path(path)
        write_atomically(path, (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode())
        return path

    @classmethod
    def load(cls, path: Path | str | None = None) -> Calibration:
        """Read a file, by default that of this user.

        Raises:
            FlowError: there is none, or it is malformed (names file and field).
        """
        path = default_path() if path is None else Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise FlowError(
                f"There is no calibration at {path}",
                expected="a file of `flowrl calibrate`",
                do="run `flowrl calibrate`",
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise FlowError(
                f"{path} cannot be read", expected="a file of `flowrl calibrate`", received=error
            ) from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise FlowError(
                f"{path} is malformed", expected="JSON", received=error, do="run `flowrl calibrate` again"
            ) from error
        return cls.from_json(data, file=str(path))


def default_path() -> Path:
    """``calibration.json`` in flowrl's folder in the user's cache folder, ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "flowrl" / "calibration.json"


class _Reader:
    """Reads a calibration from JSON, field by field."""

    def __init__(self, file: str) -> None:
        self.file = file

    def refuse(self, field: str, expected: str, received: object) -> FlowError:
        return FlowError(
            f"{self.file} is malformed: {field}",
            expected=expected,
            received=repr(received)[:200],
            do="run `flowrl calibrate` again",
        )

    def mapping(self, data: Any, field: str, names: tuple[str, ...]) -> dict[str, Any]:
        """A mapping with exactly these names."""
        if not isinstance(data, dict):
            raise self.refuse(field, "an object", data)
        inner = "" if field == "the file" else field + "."
        for name in names:
            if name not in data:
                raise self.refuse(f"{inner}{name}", "a value", "nothing")
        for name in data:
            if name not in names:
                raise self.refuse(f"{inner}{name}", "no such field", data[name])
        return data

    def typed(self, data: Any, field: str, kind: type[T], expected: str) -> T:
        if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
            raise self.refuse(field, expected, data)
        return data

    def text(self, data: Any, field: str) -> str:
        return self.typed(data, field, str, "a text")

    def whole(self, data: Any, field: str, at_least: int = 1) -> int:
        number = self.typed(data, field, int, f"a whole number, at least {at_least}")
        if number < at_least:
            raise self.refuse(field, f"a whole number, at least {at_least}", data)
        return number

    def positive(self, data: Any, field: str) -> float:
        expected = "a finite number above 0"
        if isinstance(data, bool) or not isinstance(data, int | float) or not (math.isfinite(data) and data > 0):
            raise self.refuse(field, expected, data)
        return float(data)

    def texts(self, data: Any, field: str) -> tuple[str, ...]:
        listed = self.typed(data, field, list, "a list of texts")
        return tuple(self.text(x, f"{field}[{i}]") for i, x in enumerate(listed))

    def calibration(self, data: Any) -> Calibration:
        if isinstance(data, dict) and data.get("schema") != SCHEMA:
            raise self.refuse("schema", f"{SCHEMA}, the one that this version reads", data.get("schema", "nothing"))
        names = ("schema", "made_at", "versions", "machine", "rates", "notes")
        data = self.mapping(data, "the file", names)
        versions = self.typed(data["versions"], "versions", dict, "an object of texts")
        rates = self.typed(data["rates"], "rates", list, "a list")
        return Calibration(
            machine=self.machine(data["machine"]),
            made_at=self.text(data["made_at"], "made_at"),
            versions={name: self.text(value, f"versions.{name}") for name, value in versions.items()},
            rates=tuple(self.rate(rate, f"rates[{i}]") for i, rate in enumerate(rates)),
            notes=self.texts(data["notes"], "notes"),
        )

    def machine(self, data: Any) -> Machine:
        data = self.mapping(data, "machine", tuple(Machine.__dataclass_fields__))
        for name in ("system", "cpu"):
            self.text(data[name], f"machine.{name}")
        for name in ("num_cores", "num_usable_cores", "memory_bytes"):
            self.whole(data[name], f"machine.{name}")
        self.typed(data["fast_bfloat16"], "machine.fast_bfloat16", bool, "true or false")
        self.texts(data["instruction_sets"], "machine.instruction_sets")
        for i, gpu in enumerate(self.typed(data["gpus"], "machine.gpus", list, "a list")):
            gpu = self.mapping(gpu, f"machine.gpus[{i}]", tuple(Gpu.__dataclass_fields__))
            self.text(gpu["name"], f"machine.gpus[{i}].name")
            self.text(gpu["capability"], f"machine.gpus[{i}].capability")
            self.whole(gpu["memory_bytes"], f"machine.gpus[{i}].memory_bytes")
        return Machine.from_json(data)

    def rate(self, data: Any, field: str) -> Rate:
        data = self.mapping(data, field, tuple(Rate.__dataclass_fields__))
        name = self.text(data["name"], f"{field}.name")
        if name not in UNITS:
            raise self.refuse(f"{field}.name", "one of " + ", ".join(UNITS), name)
        if data["unit"] != UNITS[name][0]:
            raise self.refuse(f"{field}.unit", f"{UNITS[name][0]!r}, the unit of {name}", data["unit"])
        value, low, high = (self.positive(data[n], f"{field}.{n}") for n in ("value", "low", "high"))
        if not low <= value <= high:
            raise self.refuse(f"{field}.value", f"a number between low, {low}, and high, {high}", value)
        conditions = self.typed(data["conditions"], f"{field}.conditions", dict, "an object")
        for key, condition in conditions.items():
            if not isinstance(condition, str | int | float | bool):
                raise self.refuse(f"{field}.conditions.{key}", "a text, a number, true or false", condition)
        return Rate(
            name=name,
            unit=data["unit"],
            value=value,
            low=low,
            high=high,
            repetitions=self.whole(data["repetitions"], f"{field}.repetitions"),
            work=self.whole(data["work"], f"{field}.work"),
            conditions=conditions,
        )
