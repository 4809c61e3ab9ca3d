"""flowrl.run: compile a flow, then give the Program to a runtime. The one place that knows both.

Everything that can be known before training is looked at first, in the order of its price: settings, the flow, the data,
the run folder, the checkpoint to resume from, the models, the lengths of the prompts, the room on the disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.calibration import Calibration, default_path
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.compile import DEFAULT_MICRO_BATCH_TOKENS, Strategies, cluster_of, compile, strategies_by_name
from flowrl.compiler.plan import Program
from flowrl.compiler.strategy import Strategy
from flowrl.ending import discarded_on_error, finish, status_on_error
from flowrl.errors import FlowError, nearest
from flowrl.flow import RLFlow
from flowrl.machine import Machine
from flowrl.preflight import check_names, check_settings, data_of
from flowrl.preparation import prepare

if TYPE_CHECKING:
    import pyarrow as pa

    from flowrl.runtime.evaluation import EvaluationResult
    from flowrl.runtime.local import LocalRuntime
    from flowrl.runtime.ranks import Ranks
    from flowrl.runtime.run_state import EvaluationPlan


@dataclass(frozen=True)
class Evaluation:
    """Run a flow without an updater on held-out data, before the first step, every ``every`` steps and after the last.

    Args:
        flow: source → rollout → reward.
        data: the data set of its source, or data sets by source name.
        name: metrics are called ``eval/<name>/…``.
        every: steps between two evaluations.
        success_threshold: a response solves its prompt when its total reward reaches this; for pass@k.
    """

    flow: RLFlow
    data: Any
    name: str = "heldout"
    every: int = 10
    success_threshold: float = 1.0


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Args:
        status: "finished" (all steps are done), "time limit" or "interrupted" (by a signal).
        steps: completed steps, those before a resume included.
        folder: the run folder; ``report`` and ``export`` lie in it.
        evaluations: the first and the last of each name, those before a resume included; the numbers of all are metrics.
        signal_number: which signal came, if one did.
        rank: of this process among those of the run, all of which have the same result.
    """

    status: Literal["finished", "time limit", "interrupted"]
    steps: int
    folder: Path
    evaluations: tuple[EvaluationResult, ...] = field(default=(), repr=False)
    signal_number: int | None = None
    rank: int = field(default=0, repr=False)

    @property
    def report(self) -> Path:
        """The self-contained HTML report."""
        return self.folder / "report.html"

    @property
    def metrics(self) -> pa.Table:
        """A row a step."""
        from flowrl.runtime.metrics import read_metrics

        return read_metrics(self.folder)

    def evaluation(self, name: str = "heldout", *, which: Literal["first", "last"] = "last") -> EvaluationResult | None:
        """The first or the last evaluation of this name; None if there was none."""
        found = [e for e in self.evaluations if e.name == name]
        return (found[0] if which == "first" else found[-1]) if found else None


@dataclass(frozen=True)
class Experiment:
    """What a recipe returns: a flow, its data, and how to run it.

    Args:
        flow: the training flow.
        data: the data set of the one source, or data sets by source name.
        num_steps: iterations.
        evaluations: on held-out data.
        on_end: called with the RunResult of a run that was not interrupted; prints a summary, say. Of several ranks the first
            calls it.
        options: further keyword arguments of :func:`run`.
    """

    flow: RLFlow
    data: Any
    num_steps: int
    evaluations: Sequence[Evaluation] = ()
    on_end: Callable[[RunResult], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def check_data(self) -> None:
        """Compile every flow, and look whether its data fit: what a run does before it loads a model.

        Raises:
            FlowError: the first thing that does not fit.
        """
        _Planner(None).all(self.flow, self.data, self.evaluations)

    def run(self, **overrides: Any) -> RunResult:
        """Run it; keyword arguments of :func:`run` override the recipe's own."""
        arguments = {
            "num_steps": self.num_steps,
            "evaluations": self.evaluations,
            **self.options,
            **overrides,
        }
        result = run(self.flow, self.data, **arguments)
        if self.on_end is not None and result.status != "interrupted" and result.rank == 0:
            self.on_end(result)
        return result


def run(
    flow: RLFlow,
    data: Any,
    num_steps: int,
    *,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    runtime: str = "local",
    resume: bool = False,
    evaluations: Sequence[Evaluation] = (),
    checkpoint_every: int | None = 50,
    keep_last: int = 2,
    async_checkpoints: bool = True,
    keep_best: str | None = None,
    time_limit: float | None = None,
    max_nonfinite_steps: int = 3,
    max_empty_steps: int = 20,
    dump_steps: Sequence[int] = (),
    samples_every: int = 10,
    export: bool = True,
    report: bool = True,
    progress: bool = True,
    name: str = "flow",
    cluster: Cluster | None = None,
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
    strategies: Strategies | None = None,
    strategy: Strategy | Literal["auto"] | None = None,
    deadline: float | None = None,
) -> RunResult:
    """Train.

    Args:
        flow: what one iteration does.
        data: the data set of the one source, or data sets by source name.
        num_steps: iterations in all, those before a resume included.
        out: the run folder; by default ``runs/<name>-<n>``.
        seed: of everything random; two runs with one seed are equal.
        runtime: "local", in this process; or "spmd", on all ranks that torchrun started: every rank calls ``run``, and gets the
            same result.
        resume: go on from the newest checkpoint in ``out``.
        evaluations: flows without an updater on held-out data.
        checkpoint_every: steps between checkpoints; None only at the end. One is always written when a run ends cleanly.
        keep_last: how many checkpoints to keep.
        async_checkpoints: checkpoints are copied in host memory, and written while training goes on; else it waits for them.
        keep_best: a metric such as "eval/heldout/pass@1": the checkpoint where it was highest is kept too.
        time_limit: seconds after which the run ends cleanly, with a checkpoint; no step is begun that would end later, going
            by the slowest one so far.
        max_nonfinite_steps: so many iterations in a row may have a skipped optimiser step; one more stops the run.
        max_empty_steps: so many iterations in a row may train nothing, because no row reached an updater; one more stops the
            run.
        dump_steps: steps (from 1) whose state and edges are kept for ``flowrl replay``.
        samples_every: steps between sampled completions in ``samples/``; 0 for none.
        export: write a HuggingFace directory of each trained Model at the end.
        report: write ``report.html`` at the end.
        progress: show live progress.
        name: titles the display and the report.
        cluster: what to plan for; by default this machine's best device.
        micro_batch_tokens: token budget of one forward pass in training and scoring.
        strategies: by Model or name of one, how it is held over the ranks; see :func:`flowrl.compile`.
        strategy: of all other Models; "auto" has the compiler choose by its estimates, with the rates of ``flowrl calibrate``
            where they were measured on this machine.
        deadline: seconds that one call may take on several ranks, before the run is given up because one hangs; by default
            ``FLOWRL_DEADLINE``, else half an hour.

    Raises:
        CheckError: the flow breaks rules; all are listed.
        DataError: data are missing, empty or do not fit.
        ModelError: a Model cannot be loaded.
        RunFolderError: ``out`` exists, is in use, cannot be written, or is too full.
        CheckpointError: the checkpoint to resume from is damaged or of another run.
        RankError: another rank raised, or is gone.
    """
    started = time.monotonic()
    check_settings(num_steps=num_steps, runtime=runtime, keep_best=keep_best, evaluations=evaluations, seed=seed,
                   checkpoint_every=checkpoint_every, keep_last=keep_last, time_limit=time_limit, dump_steps=dump_steps,
                   max_nonfinite_steps=max_nonfinite_steps, max_empty_steps=max_empty_steps, samples_every=samples_every,
                   micro_batch_tokens=micro_batch_tokens, deadline=deadline, resume=resume,
                   async_checkpoints=async_checkpoints, export=export, report=report, progress=progress)  # fmt: skip
    with _ranks(runtime, deadline) as ranks:
        plan = _Planner(cluster_of(cluster, ranks.size), micro_batch_tokens, strategies, strategy, runtime)
        program, sets, plans = ranks.together(lambda: plan.all(flow, data, evaluations, ranks.size))

        from flowrl.runtime.run_folder import RunFolder, default_folder
        from flowrl.runtime.run_state import Settings

        settings = Settings(
            num_steps=num_steps,
            seed=seed,
            checkpoint_every=checkpoint_every,
            keep_last=keep_last,
            async_checkpoints=async_checkpoints,
            keep_best=keep_best,
            time_limit=time_limit,
            max_nonfinite_steps=max_nonfinite_steps,
            max_empty_steps=max_empty_steps,
            dump_steps=tuple(dump_steps),
            samples_every=samples_every,
            progress=progress,
            title=name,
        )
        folder = RunFolder(ranks.once(lambda: Path(out) if out is not None else default_folder(name)))
        local = _runtime(runtime)(program, sets, plans, folder, settings, ranks)
        return _run(local, resume=resume, started=started, export=export, report=report)


@contextlib.contextmanager
def _ranks(runtime: str, deadline: float | None) -> Iterator[Ranks]:
    if runtime == "spmd":
        from flowrl.runtime.spmd import joined

        with joined(deadline) as ranks:
            yield ranks
    else:
        from flowrl.runtime.ranks import ONE_RANK

        yield ONE_RANK


def _runtime(name: str) -> type[LocalRuntime]:
    if name == "spmd":
        from flowrl.runtime.spmd import SpmdRuntime

        return SpmdRuntime
    from flowrl.runtime.local import LocalRuntime

    return LocalRuntime


def _run(local: LocalRuntime, *, resume: bool, started: float, export: bool, report: bool) -> RunResult:
    """On every rank: make or find the folder, load, train, and write what a run leaves behind."""
    folder, ranks = local.folder, local.ranks
    resume, export, report = ranks.from_first((resume, export, report))
    existed = ranks.once(folder.path.exists)
    ranks.once(lambda: folder.create(resume=resume))
    with contextlib.ExitStack() as holding:
        ranks.alone(lambda: holding.enter_context(folder.held()))
        with discarded_on_error(local, resume, existed):
            notes = prepare(local, resume)
        with status_on_error(local):
            outcome = local.run(resume=resume, started=started, notes=notes)
            result = RunResult(
                outcome.status, outcome.steps, folder.path, outcome.evaluations, outcome.signal_number, ranks.rank
            )
            finish(local, outcome, result, export=export, report=report)
    return result


def measured_here() -> Calibration | None:
    """The rates that ``flowrl calibrate`` has measured on this machine; None where there are none."""
    if not default_path().exists():
        return None
    calibration = Calibration.load()
    return calibration if not calibration.machine.differences(Machine.here(calibration.machine.gpus)) else None


@dataclass(frozen=True)
class _Planner:
    """Compiles the flows of a run for the same cluster."""

    cluster: Cluster | None
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    strategies: Strategies | None = None
    strategy: Strategy | Literal["auto"] | None = None
    runtime: str = "local"

    def all(
        self, flow: RLFlow, data: Any, evaluations: Sequence[Evaluation], num_ranks: int = 1
    ) -> tuple[Program, dict[str, Any], list[EvaluationPlan]]:
        """The training program, its data, and the evaluations.

        Raises:
            FlowError: the first thing that does not fit.
        """
        if self.cluster is not None and self.cluster.num_devices != num_ranks:
            raise FlowError(
                f"The cluster has {self.cluster.num_devices} devices, and this run {num_ranks} ranks",
                expected="a rank a device",
                received=self.cluster,
                do=f"torchrun --nproc-per-node {self.cluster.num_devices} with runtime='spmd', or another num_devices",
            )
        names = {m.name for f in (flow, *(e.flow for e in evaluations)) for m in f.models}
        for name in strategies_by_name(self.strategies):
            if name not in names:
                raise FlowError(
                    f"strategies name {name!r}, which is no Model of this run",
                    expected="Models of the flow or of an evaluation",
                    received=repr(name),
                    do=nearest(name, names),
                )
        program = self.program(flow)
        sets = data_of(program, data)
        same = replace(self, strategies={**program.strategies(), **strategies_by_name(self.strategies)}, strategy=None)
        plans = [(same if self.strategy == "auto" else self).evaluation(e) for e in evaluations]
        check_names([program, *(p.program for p in plans)])
        return program, sets, plans

    def program(self, flow: RLFlow) -> Program:
        names = {m.name for m in flow.models}
        here = {name: held for name, held in strategies_by_name(self.strategies).items() if name in names}
        return compile(
            flow,
            self.cluster,
            micro_batch_tokens=self.micro_batch_tokens,
            strategies=here,
            strategy=self.strategy,
            runtime=self.runtime,
            calibration=measured_here() if self.strategy == "auto" else None,
        )

    def evaluation(self, evaluation: Evaluation) -> EvaluationPlan:
        from flowrl.runtime.evaluation import scored_calls
        from flowrl.runtime.run_state import EvaluationPlan

        program = self.program(evaluation.flow)
        scored_calls(program, evaluation.name)
        data = data_of(program, evaluation.data)
        return EvaluationPlan(evaluation.name, program, data, evaluation.every, evaluation.success_threshold)
