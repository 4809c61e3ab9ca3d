"""Replay: run one step of a run again, alone, and compare it with what was recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from flowrl import context
from flowrl.errors import CheckpointError, RunFolderError
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.interpreter import Iteration
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.manifest import changes, layout
from flowrl.runtime.metrics import read_metrics
from flowrl.runtime.run_folder import RunFolder
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
        differences: what is other than it was in the run (threads, torch, …), a text each.
    """

    step: int
    started_from: str
    recorded: dict[str, float]
    replayed: dict[str, float]
    iteration: Iteration
    differences: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every metric is the same number: bit for bit, or, where the layout is another one than the run's
        (:attr:`differences`), up to the order of sums: a relative difference of 1e-3, or an absolute one of 1e-5."""
        return self.recorded.keys() == self.replayed.keys() and all(
            self._agree(self.recorded[k], self.replayed[k]) for k in self.recorded
        )

    def _agree(self, a: float, b: float) -> bool:
        return _same(a, b) or bool(self.differences and math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5))

    def table(self) -> str:
        """The two columns side by side, differences marked."""
        names = sorted(self.recorded.keys() | self.replayed.keys())
        width = max(map(len, names), default=0)
        lines = [f"Step {self.step}, replayed from {self.started_from}:"]
        for name in names:
            a, b = self.recorded.get(name), self.replayed.get(name)
            mark = "  " if a is not None and b is not None and self._agree(a, b) else "≠ "
            lines.append(f"{mark}{name:{width}}  recorded {a!s:22}  replayed {b}")
        lines += [f"Changed since the run: {text}." for text in self.differences]
        how = " up to the order of sums (relative 1e-3): the layout is another one" if self.differences else ""
        lines.append(f"All metrics are equal{how}." if self.equal else "The replay differs from the record.")
        return "\n".join(lines)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def replay_step(folder: Path, step: int) -> Replay:
    """Run a step again.

    It starts from the step's own dump where there is one, else from the newest checkpoint before it, else from step 0, and
    runs up to the step. Nothing is written.

    Raises:
        RunFolderError: the folder is not a run, or the step was not run.
        CheckpointError: the checkpoint that it would start from is damaged, or the weights at step 0 are not there any more.
    """
    manifest = RunFolder(folder).read_manifest()
    table = read_metrics(folder).to_pylist()
    recorded = next((row for row in table if row["step"] == step), None)
    if step < 1 or recorded is None:
        last = max((row["step"] for row in table), default=0)
        raise RunFolderError(
            f"Step {step} is not in {folder}",
            expected=f"a step from 1 to {last}" if last else "a run with a step",
            received=step,
        )
    local = load_run(folder)
    started_from = _go_before(local, step, manifest.get("weights", {}))
    with context.use_bindings(local.bindings):
        try:
            done = local.iterate()
            while local.state.step < step:
                done = local.iterate()
        finally:
            local.close()
    numbers = {
        k: v
        for k, v in recorded.items()
        if v is not None and k not in ("step", "tokens_per_second") and not k.startswith(("time/", "eval/"))
    }
    differences = changes(manifest.get("layout", {}), layout(local.program, num_ranks=1))
    return Replay(step, started_from, numbers, step_metrics(local.program, done), done, tuple(differences))


def _go_before(local: LocalRuntime, step: int, weights: dict[str, str]) -> str:
    for folder in (local.folder.dump(step) / "before", local.folder.checkpoints):
        usable = [p for p in ckpt.list_checkpoints(folder) if ckpt.step_of(p) < step]
        if usable:
            local.restore(usable[-1])
            return str(usable[-1])
    for name, digest in weights.items():
        if local.weights(local.models[name])[1] != digest:
            raise CheckpointError(
                f"Step {step} would be replayed from step 0, and the source of Model {name!r} has changed since",
                expected="the weights that the run began with",
                received=f"others in {getattr(local.models[name], 'source', name)}",
                do="replay a step behind a checkpoint or a dump (dump_steps)",
            )
    local.restore(None)
    return "step 0"
