"""What the tests of runs share: quick runs, and looking at what they left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import flowrl
from flowrl.runtime.metrics import read_metrics
from flowrl.runtime.tensor_files import contents
from tests.flows import prompts


def quick_run(flow: flowrl.RLFlow, num_steps: int, out: Path, data: Any = None, **options: Any) -> flowrl.RunResult:
    """A run that shows, exports and reports nothing unless it is asked to."""
    quiet: dict[str, Any] = dict(progress=False, export=False, report=False, samples_every=0, checkpoint_every=None)
    return flowrl.run(flow, prompts() if data is None else data, num_steps, out=out, **quiet | options)


def rows(folder: Path | flowrl.RunResult) -> list[dict[str, Any]]:
    """The metrics of every step, times and what is absent aside."""
    table = read_metrics(folder.folder if isinstance(folder, flowrl.RunResult) else folder)
    return [
        {k: v for k, v in row.items() if v is not None and not k.startswith("time/") and k != "tokens_per_second"}
        for row in table.to_pylist()
    ]


def training(folder: Path | flowrl.RunResult) -> list[dict[str, Any]]:
    """The metrics of the training steps, without those of evaluations."""
    steps = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows(folder)]
    return [row for row in steps if row["step"] > 0]


def checkpoint_weights(folder: Path, step: int) -> dict[str, bytes]:
    """By Model and name, the weights in a checkpoint, byte for byte."""
    models = folder / "checkpoints" / f"step-{step:06d}" / "models"
    found = {
        f"{place.name}/{name}": tensor.numpy().tobytes()
        for place in sorted(models.iterdir())
        for name, tensor in saved_weights(place).items()
    }
    assert found, f"{models} holds no weights"
    return found


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """By name, the weights that an engine has saved in a folder."""
    found = contents(folder)
    return {name.removeprefix("weights/"): t for name, t in found.items() if name.startswith("weights/")}


def checkpoints(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))
