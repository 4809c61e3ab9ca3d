"""The local runtime: in one process, the reference interpreter and the laptop default.

``LocalRuntime.run`` is the loop: draw, run an iteration, measure, evaluate, checkpoint. It ends cleanly, with a checkpoint,
when the steps are done, when time is up, and on the first Ctrl-C or SIGTERM.

Every rank of the spmd runtime runs this same loop. What reads, shows, writes or decides is done once, by rank 0, for all of
them: ``ranks.once``; a single process is a run of one rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl import context
from flowrl.batches import Batch, Rewards
from flowrl.compiler.plan import Program
from flowrl.errors import ExhaustedError, FlowError, NonFiniteError, nearest
from flowrl.models import BaseModel, DerivedModel, Ema, Frozen, Model, Snapshot, State
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.background import Background
from flowrl.runtime.dumps import dump_edges
from flowrl.runtime.evaluation import EvaluationResult, evaluate, save_evaluation
from flowrl.runtime.interpreter import Iteration, run_iteration
from flowrl.runtime.metrics import MetricsLog, SampleLog, sample_rows
from flowrl.runtime.progress import Progress as Display
from flowrl.runtime.ranks import ONE_RANK, Ranks, is_lost, is_told
from flowrl.runtime.refusals import refuse_meshes, refuse_staleness
from flowrl.runtime.resuming import begin
from flowrl.runtime.run_folder import RunFolder
from flowrl.runtime.run_state import EvaluationPlan, Outcome, RunState, Settings, Status
from flowrl.runtime.signals import Stop, stop_on_signals
from flowrl.runtime.step_metrics import main_rollouts, step_metrics, timing_metrics
from flowrl.runtime.worker import open_engine


class LocalRuntime:
    """Runs a Program in this process.

    Args:
        program: the training program.
        data: by source name, a data set (see ``flowrl.data.datasets.Dataset``).
        evaluations: programs without an updater.
        folder: where the run writes.
        settings: what the run is asked for.
        ranks: this process among those of the run.
    """

    def __init__(
        self,
        program: Program,
        data: Mapping[str, Any],
        evaluations: Sequence[EvaluationPlan],
        folder: RunFolder,
        settings: Settings,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.ranks = ranks
        self.program, self.data, self.evaluations = program, data, evaluations
        self.folder, self.settings = folder, settings
        programs = [program, *(e.program for e in evaluations)]
        self.bindings = context.Bindings(
            open_engine,
            micro_batch_tokens=program.plan.micro_batch_tokens,
            strategies={name: strategy for p in reversed(programs) for name, strategy in p.strategies().items()},
            ranks=ranks,
        )
        #: Writes checkpoints.
        self.background = Background(ranks)
        self.state = RunState()
        self.identity = ckpt.Identity(
            program.plan.structure, settings.seed, {name: d.fingerprint for name, d in sorted(data.items())}
        )
        self.models = {m.name: m for p in programs for m in p.models}
        self.states: tuple[State, ...] = tuple({id(s): s for p in programs for s in p.states}.values())
        #: Snapshots and Emas, those that only an evaluation reads too.
        self.followers: tuple[DerivedModel, ...] = tuple(
            m for m in self.models.values() if isinstance(m, Snapshot | Ema)
        )
        written = {id(t) for c in program.calls for t in c.node.writes()}
        #: Whose engines change during the run, and so belong into every checkpoint.
        self.changing: dict[str, BaseModel] = {
            m.name: m for m in self.models.values() if id(m) in written or isinstance(m, Snapshot | Ema)
        }
        self.frozen = {m.name: m for m in self.models.values() if isinstance(m, Frozen)}
        #: By name of the evaluation, the first and the latest result.
        self.results: dict[str, list[EvaluationResult]] = {e.name: [] for e in evaluations}
        refuse_staleness(program)
        refuse_meshes(program)

    def open(self) -> None:
        """Load every Model. Derived ones come after their base: a frozen copy must see the weights of step 0."""
        for model in sorted(self.models.values(), key=lambda m: not isinstance(m, Model)):
            self.ranks.enter(f"loading Model {model.name!r}")
            self.ranks.together(lambda m=model: self.bindings.engine(m))  # type: ignore[misc,arg-type]

    def close(self) -> None:
        """Close what nodes opened (pools, sandboxes)."""
        for _, resource in self.bindings.resources.values():
            if hasattr(resource, "close"):
                resource.close()
        self.bindings.resources.clear()

    def weights(self, model: BaseModel) -> tuple[int, str]:
        """How many bytes the weights of a Model have, and their SHA-256. Every rank asks for it."""
        import torch

        digest, size = hashlib.sha256(), 0
        for name, tensor in self.bindings.engines[model].weights():  # type: ignore[index]
            raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(raw.data)
            size += raw.nbytes
        return size, digest.hexdigest()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool, started: float | None = None, notes: Sequence[str] = ()) -> Outcome:
        """Run until the steps are done, time is up, or a signal comes.

        Args:
            started: of ``time.monotonic()``: from when the time limit counts; by default from now.
            notes: sentences to show first.

        Raises:
            NonFiniteError: more than ``max_nonfinite_steps`` iterations in a row had a non-finite step.
            ExhaustedError: more than ``max_empty_steps`` iterations in a row trained nothing.
            FlowError: whatever a node or the data raise; the last checkpoint stays.
        """
        settings, state = self.settings, self.state
        started = time.monotonic() if started is None else started
        shows = settings.progress and self.ranks.is_first
        with (
            context.use_bindings(self.bindings),
            Display(settings.num_steps, settings.title, mode=None if shows else "silent") as display,
            self.stop_on_signals(display) as stop,
            contextlib.ExitStack() as closing,
        ):
            closing.callback(self.close)
            for note in notes:
                display.message(note)
            begin(self, resume, display)
            state = self.state
            first = state.step + 1
            begin_at = first if resume else None
            metrics = self.ranks.alone(lambda: MetricsLog(self.folder.path, begin_at, note=display.message))
            if self.ranks.is_first:
                closing.callback(metrics.close)
            samples = self.ranks.alone(lambda: SampleLog(self.folder.path, begin_at))
            try:
                status = self._loop(metrics, samples, display, stop, started)
            except BaseException as error:  # a checkpoint that was begun gets its end
                if is_told(error) or not is_lost(error):
                    self.background.abandon(self.ranks.deadline)
                raise
        evaluations = sorted((r for results in self.results.values() for r in results), key=lambda r: r.step)
        return Outcome(status, state.step, tuple(evaluations), stop.signal_number)

    def _loop(self, metrics: MetricsLog, samples: SampleLog, display: Display, stop: Stop, started: float) -> Status:
        state, settings = self.state, self.settings
        status: Status = "finished"
        slowest = 0.0
        if state.step == 0 and self._stops(stop, display, -math.inf) is None:
            self._evaluate(metrics, display, self.evaluations)
        while state.step < settings.num_steps:
            reason = self._stops(stop, display, time.monotonic() - started + slowest)
            if reason is not None:
                status = reason
                break
            began = time.monotonic()
            self._step(metrics, samples, display)
            last = state.step == settings.num_steps
            is_best = self._evaluate(
                metrics, display, [e for e in self.evaluations if last or not state.step % e.every]
            )
            every = settings.checkpoint_every
            if is_best or (every is not None and state.step % every == 0):
                self._checkpoint(metrics)
            slowest = max(slowest, time.monotonic() - began)
        if state.step:
            self._checkpoint(metrics)
            self.ranks.enter(f"writing the checkpoint of step {state.step}")
            self.background.wait()
        return status

    def stop_on_signals(self, display: Display) -> contextlib.AbstractContextManager[Stop]:
        """What happens on Ctrl-C and SIGTERM."""
        return stop_on_signals(display.message)

    def _stops(self, stop: Stop, display: Display, end_of_next: float) -> Status | None:
        """Why no further step is begun; all ranks ask, and get one answer.

        Args:
            end_of_next: seconds since the start when the next step is likely to end.
        """
        limit = self.settings.time_limit
        late = limit is not None and end_of_next > limit
        answers = self.ranks.everyone((stop.signal_number, late, self.background.has_failed))
        if any(failed for _, _, failed in answers):  # soon, not only when the next checkpoint is due
            self.background.wait()
        signals = [number for number, _, _ in answers if number is not None]
        if signals:
            stop.signal_number = signals[0]
            self.say_signal(display, signals[0])
            return "interrupted"
        return "time limit" if answers[0][1] else None

    def say_signal(self, display: Display, number: int) -> None:
        """Nothing: the handler has said it."""

    def iterate(self) -> Iteration:
        """Run the next iteration, and count it."""
        state = self.state
        done = run_iteration(
            self.program,
            draw=self.draw,
            seed=self.settings.seed,
            iteration=state.step,
            followers=self.followers,
            carried=state.carried,
        )
        state.carried = done.carried
        state.step += 1
        return done

    def draw(self, source: str, count: int) -> Batch:
        """The next rows of a source; moves its cursor."""
        start = self.state.cursors.get(source, 0)
        self.state.cursors[source] = start + count
        return self.ranks.once(lambda: self.data[source].rows(start, count, self.settings.seed))

    def _step(self, metrics: MetricsLog, samples: SampleLog, display: Display) -> None:
        state, settings = self.state, self.settings
        number = state.step + 1
        if number in settings.dump_steps:
            self.save(self.folder.dump(number) / "before")
        began = time.perf_counter()
        done = self.iterate()
        seconds = time.perf_counter() - began
        self.ranks.enter(f"writing what step {number} made")
        bad, empty = self.ranks.once(lambda: self._record(number, done, seconds, metrics, samples, display))
        state.nonfinite_in_a_row = state.nonfinite_in_a_row + 1 if bad else 0
        state.empty_in_a_row = state.empty_in_a_row + 1 if empty else 0
        if empty:
            self._empty(number, metrics, display)
        if bad:
            self._nonfinite(number, done, metrics, display)

    def _record(
        self, number: int, done: Iteration, seconds: float, metrics: MetricsLog, samples: SampleLog, display: Display
    ) -> tuple[bool, bool]:
        """Log, show and dump an iteration; whether a loss or gradient of it was not finite, and whether it trained nothing."""
        settings = self.settings
        numbers = step_metrics(self.program, done)
        row = {**numbers, **timing_metrics(self.program, done, seconds)}
        bad = bool(done.nonfinite_rows) or numbers.get("skipped_steps", 0) > 0
        if number in settings.dump_steps or bad:
            for label, reason in dump_edges(self.folder.dump(number) / "edges", done.values):
                display.message(f"The output of {label} could not be dumped: {reason}")
        if settings.samples_every and (number == 1 or number % settings.samples_every == 0):
            samples.log(number, self._samples_of(done))
        metrics.log(number, row)
        display.update(number, row)
        if done.carried:
            display.message(
                f"Step {number}: too few groups passed the filter; they are carried over, nothing was updated."
            )
        return bad, bool(row.get("empty_updates"))

    def _empty(self, number: int, metrics: MetricsLog, display: Display) -> None:
        limit, count = self.settings.max_empty_steps, self.state.empty_in_a_row
        why = "were all rewards invalid, or did a filter drop every group?"
        display.message(f"Step {number}: nothing was trained: no row reached an updater ({why}).")
        if count > limit:
            self.ranks.once(lambda: metrics.flush())
            raise ExhaustedError(
                f"{count} iterations in a row trained nothing: no row reached an updater",
                expected=f"at most {limit} (max_empty_steps)",
                received=f"the last one at step {number}",
                do=f"look at reward/invalid and at the filters' acceptance in {self.folder.path}: {why}",
            )

    def _nonfinite(self, number: int, done: Iteration, metrics: MetricsLog, display: Display) -> None:
        limit, count = self.settings.max_nonfinite_steps, self.state.nonfinite_in_a_row
        rows = ", ".join(map(str, done.nonfinite_rows[:8])) or "unknown rows"
        rows += f" and {len(done.nonfinite_rows) - 8} more" if len(done.nonfinite_rows) > 8 else ""
        display.message(
            f"Step {number}: a loss or gradient was not finite; the optimiser step was skipped. "
            f"Rows (prompt_id, sample_id): {rows}. Dumped to {self.folder.dump(number)}"
        )
        if count > limit:
            self.ranks.once(lambda: metrics.flush())
            raise NonFiniteError(
                f"{count} iterations in a row had a non-finite loss or gradient",
                expected=f"at most {limit} (max_nonfinite_steps)",
                received=f"the last one at step {number}, rows (prompt_id, sample_id) {rows}",
                do=f"look at the step with `flowrl replay {self.folder.path} {number}`; lower the learning rate or clip harder",
            )

    def _samples_of(self, done: Iteration) -> list[dict[str, Any]]:
        rollouts = main_rollouts(self.program, done)
        rewards = [v for v in done.values.values() if isinstance(v, Rewards)]
        return [] if rollouts is None else sample_rows(rollouts, rewards[-1] if rewards else None)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, metrics: MetricsLog, display: Display, plans: Sequence[EvaluationPlan]) -> bool:
        """Run these evaluations now; whether the metric that decides ``keep_best`` is better than ever."""
        state, best = self.state, self.settings.keep_best
        found: dict[str, float] = {}
        for plan in plans:
            result = evaluate(plan, step=state.step, seed=self.settings.seed)
            named = self.ranks.from_first({f"eval/{plan.name}/{k}": v for k, v in result.metrics.items()})
            self.ranks.once(lambda: metrics.log(state.step, named))  # noqa: B023
            display.evaluation(plan.name, named)
            found |= named
            self.results[plan.name] = [*self.results[plan.name][:1], result]
        if best is not None and best not in found and any(best.startswith(f"eval/{p.name}/") for p in plans):
            raise FlowError(
                f"keep_best asks for {best!r}, which no evaluation gives",
                received=sorted(found),
                do=nearest(best, found),
            )
        value = found.get(best or "", math.nan)
        better = state.step > 0 and not math.isnan(value) and (state.best_value is None or value > state.best_value)
        if better:
            state.best_value, state.best_step = value, state.step
        results = [self.results[plan.name][-1] for plan in plans]
        self.ranks.once(lambda: self._save_evaluations(results))
        return better

    def _save_evaluations(self, results: Sequence[EvaluationResult]) -> None:
        for result in results:
            save_evaluation(self.folder.evaluations, result, kept={self.state.best_step or 0})

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _checkpoint(self, metrics: MetricsLog) -> None:
        """Begin to write a checkpoint, after the one before it is there."""
        step = self.state.step
        self.ranks.enter(f"waiting for the checkpoint before step {step}'s")
        self.background.wait()
        self.ranks.enter(f"copying the checkpoint of step {step}")
        self.ranks.once(lambda: metrics.flush())  # first: a checkpoint's metrics are never missing
        write = self._checkpoint_writer(self.folder.checkpoints, copy=self.settings.async_checkpoints)
        protected = {self.state.best_step} if self.state.best_step is not None else set()
        keep_last = self.settings.keep_last

        def write_and_prune(ranks: Ranks) -> None:
            write(ranks)
            ranks.once(lambda: ckpt.prune(self.folder.checkpoints, keep_last=keep_last, protected=protected))

        if self.settings.async_checkpoints:
            self.background.begin(write_and_prune)
        else:
            self.ranks.enter(f"writing the checkpoint of step {step}")
            write_and_prune(self.ranks)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of this moment into ``folder``, and wait until it is there. Every rank calls it."""
        return self._checkpoint_writer(folder, copy=False)(self.ranks)

    def _checkpoint_writer(self, folder: Path, *, copy: bool) -> Callable[[Ranks], Path]:
        return ckpt.checkpoint_writer(
            folder,
            progress=self.state,
            identity=self.identity,
            models=self.changing,
            states=self.states,
            bindings=self.bindings,
            copy=copy,
        )

    def restore(self, path: Path | None) -> None:
        """Go to a checkpoint, or to step 0.

        Raises:
            CheckpointError: it is damaged, or of another flow, seed or data set.
        """
        ckpt.load_frozen(self.folder.frozen, self.frozen, self.bindings)
        if path is not None:
            self.state = ckpt.load_checkpoint(
                path, identity=self.identity, models=self.changing, states=self.states, bindings=self.bindings
            )
