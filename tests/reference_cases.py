"""Reads the reference values: the whole set where it lies beside the repository, else the sample in the repository."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.ragged import Ragged

SAMPLE = Path(__file__).parent / "reference"
WHOLE = Path(__file__).parents[2] / "shared" / "reference"


@dataclass(frozen=True)
class Case:
    name: str
    mask: Ragged
    prompt_id: Tensor
    inputs: dict[str, Any]
    params: dict[str, Any]
    expected: dict[str, Any]
    id: str

    def column(self, name: str) -> Ragged:
        return Ragged.from_rows(self.inputs[name], torch.float32)

    def expected_column(self, name: str) -> Tensor:
        return Ragged.from_rows(self.expected[name], torch.float32).values


def cases(kind: str, *names: str) -> list[Case]:
    """All cases of a kind, of these names where some are given."""
    found: list[Case] = []
    sources = [SAMPLE, WHOLE] if (WHOLE / f"{kind}.jsonl").exists() else [SAMPLE]
    for folder in sources:
        for number, line in enumerate((folder / f"{kind}.jsonl").read_text().splitlines()):
            raw = json.loads(line)
            if names and raw["name"] not in names:
                continue
            found.append(
                Case(
                    raw["name"],
                    Ragged.from_rows(raw["mask"], torch.uint8),
                    torch.tensor(raw["groups"]),
                    raw["inputs"],
                    raw["params"],
                    raw["expected"],
                    f"{folder.parent.name}-{raw['name']}-{number}",
                )
            )
    return found
