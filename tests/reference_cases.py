"""Reads reference values (``../shared/reference/README.md``): numbers that another library computes on seeded inputs.

A sample of each name lies in ``tests/reference``; the whole set may lie beside the repository. What to compute for each
name is in ``tests/reference/functions.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.ragged import Ragged

SAMPLE = Path(__file__).parent / "reference"
WHOLE = Path(__file__).parents[2] / "shared" / "reference"

_KEYS = ("kind", "name", "seed", "lengths", "groups", "mask", "inputs", "params", "expected")


class MalformedCase(Exception):
    """A line that is not a case of the format; says which file and line, and what is wrong."""


@dataclass(frozen=True)
class Case:
    """One line: what was computed on which draw, and the result."""

    kind: str
    name: str
    seed: int
    lengths: list[int]
    groups: list[int]
    masks: list[list[int]]
    inputs: dict[str, Any]
    params: dict[str, Any]
    expected: dict[str, Any]
    place: str  # file:line

    @cached_property
    def mask(self) -> Ragged:
        """uint8 ragged: the tokens that the policy produced."""
        return Ragged.from_rows(self.masks, torch.uint8)

    @cached_property
    def prompt_id(self) -> Tensor:
        """int64 ``[num_rows]``."""
        return torch.tensor(self.groups)

    def column(self, name: str) -> Ragged:
        """float32 ragged: an input with a number a token."""
        return Ragged.from_rows(self.inputs[name], torch.float32)

    def rows(self, name: str) -> Tensor:
        """float32 ``[num_rows]``: an input with a number a response."""
        return torch.tensor(self.inputs[name], dtype=torch.float32)

    def __str__(self) -> str:
        params = "".join(f" {k}={v}" for k, v in self.params.items())
        return f"{self.place} {self.kind} {self.name} seed={self.seed}{params}"


def read_case(line: str, place: str) -> Case:
    """The case in one line of a file.

    Raises:
        MalformedCase: it is not JSON, lacks a key, or a column does not fit the lengths.
    """
    try:
        raw = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedCase(f"{place}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise MalformedCase(f"{place}: expected an object, received {type(raw).__name__}")
    missing = [key for key in _KEYS if key not in raw]
    if missing:
        raise MalformedCase(f"{place}: lacks {', '.join(missing)}")
    for problem in _problems(raw):
        raise MalformedCase(f"{place}: {problem}")
    values = {key: raw[key] for key in _KEYS if key != "mask"}
    return Case(**values, masks=raw["mask"], place=place)


def read_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """(file:line, text) of every line of every ``*.jsonl`` that is not blank."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
            if line.strip():
                yield f"{path.name}:{number}", line


def cases(folder: Path) -> list[Case]:
    """All cases of a folder.

    Raises:
        MalformedCase: a line is none.
    """
    return [read_case(line, place) for place, line in read_lines(folder)]


def _problems(raw: dict[str, Any]) -> Iterator[str]:
    for key in ("kind", "name"):
        if not isinstance(raw[key], str):
            yield f"{key} is {raw[key]!r}; expected a text"
    for key in ("inputs", "params", "expected"):
        if not isinstance(raw[key], dict):
            yield f"{key} is a {type(raw[key]).__name__}; expected an object"
            return
    lengths = raw["lengths"]
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        yield "lengths are not a list of whole numbers"
        return
    groups = raw["groups"]
    if not isinstance(groups, list) or len(groups) != len(lengths) or not all(type(g) is int for g in groups):
        yield f"groups are not {len(lengths)} whole numbers"
    if not raw["expected"]:
        yield "expected is empty"
    if not _fits(raw["mask"], lengths) or any(value not in (0, 1) for row in raw["mask"] for value in row):
        yield f"mask is not {len(lengths)} rows of 0 and 1 of the lengths given"
    for part in ("inputs", "expected"):
        for name, value in raw[part].items():
            if not _is_number(value) and not _fits(value, lengths):
                yield f"{part}.{name} is neither a number, nor a number a response, nor a number a token"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: Any, lengths: list[int]) -> bool:
    """Whether it has a number a row, or a row of numbers of each length."""
    if not isinstance(value, list) or len(value) != len(lengths):
        return False
    if all(map(_is_number, value)):
        return True
    shaped = all(isinstance(row, list) and len(row) == n for row, n in zip(value, lengths, strict=True))
    return shaped and all(_is_number(v) for row in value for v in row)
