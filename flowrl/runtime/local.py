"""The local runtime: in one process, the reference interpreter and the laptop default.

``LocalRuntime.run`` is the loop: draw, run an iteration, measure, evaluate, checkpoint. It ends cleanly, with a checkpoint,
when the steps are done, when time is up, and on the first Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl import context
from flowrl.batches import Batch, Rewards, Rollouts
from flowrl.compiler.plan import Program
from flowrl.errors import NonFiniteError, UnsupportedError
from flowrl.models import BaseModel, Ema, Frozen, Model, Snapshot, State
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.evaluation import EvaluationResult, evaluate
from flowrl.runtime.interpreter import Iteration, run_iteration
from flowrl.runtime.metrics import MetricsLog, SampleLog, sample_rows
from flowrl.runtime.progress import Progress as Display
from flowrl.runtime.run_folder import RunFolder
from flowrl.runtime.step_metrics import step_metrics, timing_metrics
from flowrl.runtime.worker import open_engine


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation as the runtime needs it; see :class:`flowrl.run.Evaluation` for the settings."""

    name: str
    program: Program
    data: Mapping[str, Any]
    every: int
    success_threshold: float = 1.0


@dataclass(frozen=True)
class Settings:
    """What a run is asked for; see :func:`flowrl.run.run` for each."""

    num_steps: int
    seed: int = 0
    checkpoint_every: int | None = 50
    keep_last: int = 2
    keep_best: str | None = None
    time_limit: float | None = None
    max_nonfinite_steps: int = 3
    dump_steps: tuple[int, ...] = ()
    samples_every: int = 10
    progress: bool = True
    title: str = "flowrl"


@dataclass
class RunState:
    """Where the loop stands; saved in every checkpoint."""

    step: int = 0
    cursors: dict[str, int] = field(default_factory=dict)
    nonfinite_in_a_row: int = 0
    best_value: float | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "finished", "time limit" or "interrupted"; after how many steps; with which evaluations."""

    status: str
    steps: int
    evaluations: tuple[EvaluationResult, ...]
    signal_number: int | None = None


class LocalRuntime:
    """Runs a Program in this process.

    Args:
        program: the training program.
        data: by source name, a data set (see ``flowrl.data.datasets.Dataset``).
        evaluations: programs without an updater.
        folder: where the run writes.
        settings: what the run is asked for.
    """

    def __init__(
        self,
        program: Program,
        data: Mapping[str, Any],
        evaluations: Sequence[EvaluationPlan],
        folder: RunFolder,
        settings: Settings,
    ) -> None:
        self.program, self.data, self.evaluations = program, data, evaluations
        self.folder, self.settings = folder, settings
        self.bindings = context.Bindings(open_engine, micro_batch_tokens=program.plan.micro_batch_tokens)
        self.state = RunState()
        self.identity = ckpt.Identity(
            program.plan.structure, settings.seed, {name: d.fingerprint for name, d in sorted(data.items())}
        )
        programs = [program, *(e.program for e in evaluations)]
        self.models = {m.name: m for p in programs for m in p.models}
        self.states: tuple[State, ...] = program.states
        written = {id(t) for c in program.calls for t in c.node.writes()}
        #: Whose engines change during the run, and so belong into every checkpoint.
        self.changing: dict[str, BaseModel] = {
            m.name: m for m in self.models.values() if id(m) in written or isinstance(m, Snapshot | Ema)
        }
        self.frozen = {m.name: m for m in self.models.values() if isinstance(m, Frozen)}
        refuse_staleness(program)

    def open(self) -> None:
        """Load every Model. Derived ones come after their base: a frozen copy must see the weights of step 0."""
        for model in sorted(self.models.values(), key=lambda m: not isinstance(m, Model)):
            self.bindings.engine(model)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close what nodes opened (pools, sandboxes)."""
        for _, resource in self.bindings.resources.values():
            if hasattr(resource, "close"):
                resource.close()
        self.bindings.resources.clear()

    def checkpoint_bytes(self) -> int:
        """About how large one checkpoint is: weights and two moments of everything that changes, and frozen weights once."""

        def size(model: BaseModel) -> int:
            return sum(t.numel() * t.element_size() for _, t in self.bindings.engines[model].weights())  # type: ignore[index]

        return sum(3 * size(m) for m in self.changing.values()) + sum(size(m) for m in self.frozen.values())

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool) -> Outcome:
        """Run until the steps are done, time is up, or a signal comes.

        Raises:
            NonFiniteError: more than ``max_nonfinite_steps`` iterations in a row had a non-finite step.
            FlowError: whatever a node or the data raise; the last checkpoint stays.
        """
        settings, state = self.settings, self.state
        started = time.monotonic()
        slowest = 0.0
        results: list[EvaluationResult] = []
        with (
            context.use_bindings(self.bindings),
            Display(settings.num_steps, settings.title, mode=None if settings.progress else "silent") as display,
            stop_on_signals(display.message) as stop,
        ):
            self._restore(resume, display)
            first = state.step + 1
            metrics = MetricsLog(self.folder.path, first if resume else None, note=display.message)
            samples = SampleLog(self.folder.path, first if resume else None)
            status = "finished"
            try:
                if state.step == 0:
                    results += self._evaluate(metrics, display, at_start=True)
                while state.step < settings.num_steps:
                    if stop.signal_number is not None:
                        status = "interrupted"
                        break
                    if settings.time_limit is not None and time.monotonic() - started + slowest > settings.time_limit:
                        status = "time limit"
                        break
                    began = time.monotonic()
                    self._step(metrics, samples, display)
                    results += self._evaluate(metrics, display, at_start=False)
                    every = settings.checkpoint_every
                    if every is not None and state.step % every == 0:
                        self._checkpoint(metrics)
                    slowest = max(slowest, time.monotonic() - began)
                if state.step:
                    self._checkpoint(metrics)
            finally:
                metrics.close()
                self.close()
        return Outcome(status, state.step, tuple(results), stop.signal_number)

    def _step(self, metrics: MetricsLog, samples: SampleLog, display: Display) -> None:
        state, settings = self.state, self.settings
        number = state.step + 1
        if number in settings.dump_steps:
            self.dump_before(number)
        cursors = dict(state.cursors)
        began = time.perf_counter()
        done = run_iteration(self.program, draw=self.draw, seed=settings.seed, iteration=state.step)
        numbers = step_metrics(self.program, done)
        state.step = number
        bad = bool(done.nonfinite_rows) or numbers.get("skipped_steps", 0) > 0
        state.nonfinite_in_a_row = state.nonfinite_in_a_row + 1 if bad else 0
        if number in settings.dump_steps or bad:
            self.dump_edges(number, done, cursors)
        if settings.samples_every and (number == 1 or number % settings.samples_every == 0):
            samples.log(number, _samples_of(done))
        row = {**numbers, **timing_metrics(done, time.perf_counter() - began)}
        metrics.log(number, row)
        display.update(number, row)
        if bad:
            rows = ", ".join(map(str, done.nonfinite_rows[:8])) or "unknown rows"
            display.message(
                f"Step {number}: a loss or gradient was not finite; the optimiser step was skipped. "
                f"Rows (prompt_id, sample_id): {rows}. Dumped to {self.folder.dumps / f'step-{number:06d}'}"
            )
            if state.nonfinite_in_a_row > settings.max_nonfinite_steps:
                metrics.flush()
                raise NonFiniteError(
                    f"{state.nonfinite_in_a_row} iterations in a row had a non-finite loss or gradient",
                    expected=f"at most {settings.max_nonfinite_steps} (max_nonfinite_steps)",
                    received=f"the last one at step {number}, rows {rows}",
                    do=f"look at the step with `flowrl replay {self.folder.path} {number}`; lower the learning rate or clip harder",
                )

    def draw(self, source: str, count: int) -> Batch:
        """The next rows of a source; moves its cursor."""
        start = self.state.cursors.get(source, 0)
        self.state.cursors[source] = start + count
        return self.data[source].rows(start, count, self.settings.seed)

    def _evaluate(self, metrics: MetricsLog, display: Display, *, at_start: bool) -> list[EvaluationResult]:
        state, settings = self.state, self.settings
        results = []
        for plan in self.evaluations:
            if not at_start and state.step % plan.every and state.step != settings.num_steps:
                continue
            result = evaluate(
                plan.program,
                plan.data,
                name=plan.name,
                step=state.step,
                seed=settings.seed,
                success_threshold=plan.success_threshold,
            )
            named = {f"eval/{plan.name}/{k}": v for k, v in result.metrics.items()}
            metrics.log(state.step, named)
            display.evaluation(plan.name, named)
            results.append(result)
            value = named.get(settings.keep_best or "")
            if value is not None and not at_start and not math.isnan(value):
                if state.best_value is None or value > state.best_value:
                    state.best_value, state.best_step = value, state.step
                    self._checkpoint(metrics)
        return results

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _checkpoint(self, metrics: MetricsLog) -> None:
        metrics.flush()  # first: a checkpoint's metrics are never missing
        self.save(self.folder.checkpoints)
        protected = {self.state.best_step} - {None}
        ckpt.prune(self.folder.checkpoints, keep_last=self.settings.keep_last, protected=protected)  # type: ignore[arg-type]

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of this moment into ``folder``."""
        state = self.state
        progress = ckpt.Progress(
            state.step,
            dict(state.cursors),
            {
                "nonfinite_in_a_row": state.nonfinite_in_a_row,
                "best_value": state.best_value,
                "best_step": state.best_step,
            },
        )
        return ckpt.save_checkpoint(
            folder,
            progress=progress,
            identity=self.identity,
            models=self.changing,
            states=self.states,
            bindings=self.bindings,
        )

    def restore(self, path: Path) -> None:
        """Go back to a checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another flow, seed or data set.
        """
        ckpt.load_frozen(self.folder.frozen, self.frozen, self.bindings)
        progress = ckpt.load_checkpoint(
            path, identity=self.identity, models=self.changing, states=self.states, bindings=self.bindings
        )
        self.state = RunState(progress.step, progress.cursors, **progress.counters)

    def _restore(self, resume: bool, display: Display) -> None:
        found = ckpt.list_checkpoints(self.folder.checkpoints) if resume else []
        if found:
            self.restore(found[-1])
            display.message(f"Resumed from {found[-1]}, after step {self.state.step}.")
            return
        if resume:
            display.message("No checkpoint yet: the run starts at step 0.")
            ckpt.load_frozen(self.folder.frozen, self.frozen, self.bindings)
        ckpt.save_frozen(self.folder.frozen, self.frozen, self.bindings)

    # -- dumps -------------------------------------------------------------------------------------------------------

    def dump_before(self, step: int) -> None:
        """Keep the state before a step, so that the step can be replayed alone."""
        self.save(self.folder.dumps / f"step-{step:06d}" / "before")

    def dump_edges(self, step: int, done: Iteration, cursors: Mapping[str, int]) -> None:
        """Keep everything that travelled on the edges of a step, one Arrow file a call."""
        import pyarrow as pa

        folder = self.folder.dumps / f"step-{step:06d}" / "edges"
        folder.mkdir(parents=True, exist_ok=True)
        for label, value in done.values.items():
            if isinstance(value, Batch) and hasattr(value, "to_arrow") and type(value).__name__ != "LossTerm":
                table = value.to_arrow()
                with pa.OSFile(str(folder / f"{label.replace('/', '_')}.arrow"), "wb") as sink:
                    with pa.ipc.new_file(sink, table.schema) as writer:
                        writer.write_table(table)


def refuse_staleness(program: Program) -> None:
    """This runtime runs every reader at the version of its iteration.

    Raises:
        UnsupportedError: a reader asks for ``max_staleness`` above 0.
    """
    stale = [e for e in program.plan.weight_edges if e.max_staleness > 0]
    if stale:
        raise UnsupportedError(
            f"{stale[0].reader} asks for max_staleness={stale[0].max_staleness}",
            expected="max_staleness=0 on the local runtime, which runs one iteration after the other",
            received=stale[0].max_staleness,
            do="leave max_staleness out",
        )


def _samples_of(done: Iteration) -> list[dict[str, Any]]:
    rewards = [v for v in done.values.values() if isinstance(v, Rewards)]
    rollouts = [v for v in done.values.values() if isinstance(v, Rollouts)]
    return [row for r in rollouts[-1:] for row in sample_rows(r, rewards[-1] if rewards else None)]


@dataclass
class Stop:
    """The signal that asked the run to stop, if any."""

    signal_number: int | None = None


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """The first Ctrl-C or SIGTERM lets the current step finish and a checkpoint be written; the second ends at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals are the main thread's business
        return

    def handle(number: int, frame: Any) -> None:
        if stop.signal_number is not None:
            raise KeyboardInterrupt
        stop.signal_number = number
        say(f"{signal.Signals(number).name}: finishing this step and writing a checkpoint; once more to stop at once.")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
