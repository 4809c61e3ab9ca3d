"""Replay: run one step of a run again, alone, and compare it with what was recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from flowrl import context
from flowrl.errors import RunFolderError
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.interpreter import Iteration, run_iteration
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.metrics import read_metrics
from flowrl.runtime.saved_run import load_run
from flowrl.runtime.step_metrics import step_metrics


@dataclass(frozen=True)
class Replay:
    """A replayed step.

    Args:
        step: which, from 1.
        started_from: the checkpoint, or "step 0".
        recorded: the run's metrics of that step, times aside.
        replayed: the same, computed again.
        iteration: everything that the step made.
    """

    step: int
    started_from: str
    recorded: dict[str, float]
    replayed: dict[str, float]
    iteration: Iteration

    @property
    def equal(self) -> bool:
        """Whether every metric is the same number, bit for bit."""
        return self.recorded.keys() == self.replayed.keys() and all(
            _same(self.recorded[k], self.replayed[k]) for k in self.recorded
        )

    def table(self) -> str:
        """The two columns side by side, differences marked."""
        lines = [f"Step {self.step}, replayed from {self.started_from}:"]
        for name in sorted(self.recorded.keys() | self.replayed.keys()):
            a, b = self.recorded.get(name), self.replayed.get(name)
            mark = "  " if a is not None and b is not None and _same(a, b) else "≠ "
            lines.append(f"{mark}{name:40} recorded {a!s:24} replayed {b}")
        lines.append("All metrics are equal." if self.equal else "The replay differs from the record.")
        return "\n".join(lines)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def replay_step(folder: Path, step: int) -> Replay:
    """Run a step again.

    It starts from the step's own dump where there is one, else from the newest checkpoint before it, else from step 0, and
    runs up to the step. Nothing is written.

    Raises:
        RunFolderError: the folder is not a run, or the step was not run.
    """
    local = load_run(folder)
    table = read_metrics(folder)
    recorded = next((row for row in table.to_pylist() if row["step"] == step), None)
    if step < 1 or recorded is None:
        steps = [s for s in table.column("step").to_pylist() if s > 0]
        raise RunFolderError(
            f"Step {step} is not in {folder}",
            expected=f"a step from 1 to {max(steps, default=0)}",
            received=step,
        )
    started_from = _go_before(local, step)
    with context.use_bindings(local.bindings):
        try:
            while True:
                done = run_iteration(
                    local.program, draw=local.draw, seed=local.settings.seed, iteration=local.state.step
                )
                local.state.step += 1
                if local.state.step == step:
                    break
        finally:
            local.close()
    numbers = {
        k: v
        for k, v in recorded.items()
        if v is not None and k not in ("step", "tokens_per_second") and not k.startswith(("time/", "eval/"))
    }
    return Replay(step, started_from, numbers, step_metrics(local.program, done), done)


def _go_before(local: LocalRuntime, step: int) -> str:
    folders = [local.folder.dumps / f"step-{step:06d}" / "before", local.folder.checkpoints]
    for folder in folders:
        usable = [p for p in ckpt.list_checkpoints(folder) if int(p.name.removeprefix("step-")) < step]
        if usable:
            local.restore(usable[-1])
            return str(usable[-1])
    ckpt.load_frozen(local.folder.frozen, local.frozen, local.bindings)
    return "step 0"
