"""flowrl.run: compile a flow, then give the Program to a runtime. The one place that knows both.

Everything that can be known before training is looked at first, in the order of its price: settings, the flow, the data,
the run folder, the models, the lengths of the prompts, the room on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.compile import DEFAULT_MICRO_BATCH_TOKENS, compile
from flowrl.compiler.plan import Program
from flowrl.errors import DataError, FlowError, nearest
from flowrl.flow import RLFlow
from flowrl.models import Model
from flowrl.nodes.source import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from flowrl.runtime.evaluation import EvaluationResult
    from flowrl.runtime.local import LocalRuntime

RUNTIMES = ("local",)


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
        status: "finished", "time limit" or "interrupted".
        steps: completed steps, those before a resume included.
        folder: the run folder; ``report`` and ``export`` lie in it.
        evaluations: every evaluation of this run, in order.
        signal_number: which signal interrupted it.
    """

    status: Literal["finished", "time limit", "interrupted"]
    steps: int
    folder: Path
    evaluations: tuple[EvaluationResult, ...] = field(default=(), repr=False)
    signal_number: int | None = None

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
        """The first or the last evaluation of this name; None if there was none (after a resume, no first)."""
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
        on_end: called with the RunResult of a run that was not interrupted; prints a summary, say.
        options: further keyword arguments of :func:`run`.
    """

    flow: RLFlow
    data: Any
    num_steps: int
    evaluations: Sequence[Evaluation] = ()
    on_end: Callable[[RunResult], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, **overrides: Any) -> RunResult:
        """Run it; keyword arguments of :func:`run` override the recipe's own."""
        arguments = {
            "num_steps": self.num_steps,
            "evaluations": self.evaluations,
            **self.options,
            **overrides,
        }
        result = run(self.flow, self.data, **arguments)
        if self.on_end is not None and result.status != "interrupted":
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
    keep_best: str | None = None,
    time_limit: float | None = None,
    max_nonfinite_steps: int = 3,
    dump_steps: Sequence[int] = (),
    samples_every: int = 10,
    export: bool = True,
    progress: bool = True,
    name: str = "flow",
    cluster: Cluster | None = None,
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
) -> RunResult:
    """Train.

    Args:
        flow: what one iteration does.
        data: the data set of the one source, or data sets by source name.
        num_steps: iterations in all, those before a resume included.
        out: the run folder; by default ``runs/<name>-<n>``.
        seed: of everything random; two runs with one seed are equal.
        runtime: "local".
        resume: go on from the newest checkpoint in ``out``.
        evaluations: flows without an updater on held-out data.
        checkpoint_every: steps between checkpoints; None only at the end. One is always written when a run ends cleanly.
        keep_last: how many checkpoints to keep.
        keep_best: a metric such as "eval/heldout/pass@1": the checkpoint where it was highest is kept too.
        time_limit: seconds after which the run ends cleanly, with a checkpoint.
        max_nonfinite_steps: so many iterations in a row may have a skipped optimiser step; one more stops the run.
        dump_steps: steps (from 1) whose state and edges are kept for ``flowrl replay``.
        samples_every: steps between sampled completions in ``samples/``.
        export: write a HuggingFace directory of each trained Model at the end.
        progress: show live progress.
        name: titles the display and the report.
        cluster: what to plan for; by default this machine's best device.
        micro_batch_tokens: token budget of one forward pass in training and scoring.

    Raises:
        CheckError: the flow breaks rules; all are listed.
        DataError: data are missing, empty or do not fit.
        ModelError: a Model cannot be loaded.
        RunFolderError: ``out`` exists, cannot be written, or is too full.
        CheckpointError: the checkpoint to resume from is damaged or of another run.
    """
    from flowrl.runtime.local import EvaluationPlan, LocalRuntime, Settings
    from flowrl.runtime.run_folder import RunFolder, default_folder, environment
    from flowrl.runtime.saved_run import save_run

    _check_settings(num_steps=num_steps, runtime=runtime, checkpoint_every=checkpoint_every, keep_last=keep_last,
                    time_limit=time_limit, seed=seed, keep_best=keep_best, evaluations=evaluations)  # fmt: skip
    program = compile(flow, cluster, micro_batch_tokens=micro_batch_tokens)
    data = _data_of(program, data)
    plans = []
    for evaluation in evaluations:
        eval_program = compile(evaluation.flow, cluster, micro_batch_tokens=micro_batch_tokens)
        plans.append(
            EvaluationPlan(
                evaluation.name,
                eval_program,
                _data_of(eval_program, evaluation.data),
                evaluation.every,
                evaluation.success_threshold,
            )
        )
    _check_names([program, *(p.program for p in plans)])
    folder = RunFolder(Path(out) if out is not None else default_folder(name))
    folder.create(resume=resume)
    settings = Settings(
        num_steps=num_steps,
        seed=seed,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        keep_best=keep_best,
        time_limit=time_limit,
        max_nonfinite_steps=max_nonfinite_steps,
        dump_steps=tuple(dump_steps),
        samples_every=samples_every,
        progress=progress,
        title=name,
    )
    local = LocalRuntime(program, data, plans, folder, settings)
    local.open()
    for each, sets in [(program, data), *((p.program, p.data) for p in plans)]:
        _check_prompts(local, each, sets)
    folder.require_space(local.checkpoint_bytes() * (keep_last + 1))
    if not resume:
        folder.plan.write_text(program.plan.to_json())
        save_run(local)
    folder.write_manifest(
        name=name,
        status="running",
        num_steps=num_steps,
        seed=seed,
        flow=program.plan.structure,
        environment=environment(),
    )
    outcome = local.run(resume=resume)
    result = RunResult(outcome.status, outcome.steps, folder.path, outcome.evaluations, outcome.signal_number)  # type: ignore[arg-type]
    if export and outcome.status != "interrupted":
        for model in local.changing.values():
            if isinstance(model, Model):
                local.bindings.engines[model].export(folder.export / model.name)
    _write_report(result, program, folder, name, settings, environment())
    folder.write_manifest(status=outcome.status, steps=outcome.steps)
    return result


# -- checks before training ------------------------------------------------------------------------------------------


def _check_settings(**s: Any) -> None:
    problems = []
    if not (isinstance(s["num_steps"], int) and s["num_steps"] >= 1):
        problems.append(f"num_steps is {s['num_steps']!r}; expected at least 1")
    if s["runtime"] not in RUNTIMES:
        problems.append(f"runtime is {s['runtime']!r}; {nearest(str(s['runtime']), RUNTIMES)}")
    if s["checkpoint_every"] is not None and s["checkpoint_every"] < 1:
        problems.append(f"checkpoint_every is {s['checkpoint_every']}; expected at least 1, or None")
    if s["keep_last"] < 1:
        problems.append(f"keep_last is {s['keep_last']}; expected at least 1")
    if s["time_limit"] is not None and not s["time_limit"] > 0:
        problems.append(f"time_limit is {s['time_limit']}; expected seconds, more than 0")
    names = [e.name for e in s["evaluations"]]
    problems += [
        f"two evaluations are called {n!r}; expected names of their own" for n in set(names) if names.count(n) > 1
    ]
    problems += [
        f"evaluation {e.name!r} runs every {e.every} steps; expected at least 1"
        for e in s["evaluations"]
        if e.every < 1
    ]
    best = s["keep_best"]
    if best is not None and not any(best.startswith(f"eval/{n}/") for n in names):
        problems.append(f"keep_best is {best!r}; expected eval/<name>/<metric> of an evaluation: {names}")
    for evaluation in s["evaluations"]:
        writers = [evaluation.flow.label(c) for c in evaluation.flow.calls if c.node.writes()]
        if writers:
            problems.append(
                f"evaluation {evaluation.name!r} trains ({', '.join(writers)}); expected a flow without an updater"
            )
    if problems:
        raise FlowError("This run cannot start: " + "; ".join(problems))


def _check_names(programs: Sequence[Program]) -> None:
    by_name: dict[str, int] = {}
    for program in programs:
        for model in program.models:
            if by_name.setdefault(model.name, id(model)) != id(model):
                raise FlowError(
                    f"Two distinct Models are called {model.name!r}, in the training flow and in an evaluation",
                    expected="one Model object in both, or names of their own",
                    received="two objects of one name",
                    do="build the evaluation's Rollout with the same Model object, or give name=",
                )


def _data_of(program: Program, data: Any) -> dict[str, Any]:
    """Data sets by source name; every source has one, of the right rows, with the columns that nodes read."""
    sources = {c.node.source_name: c for c in program.calls if isinstance(c.node, Source)}
    if not isinstance(data, Mapping):
        if len(sources) != 1:
            raise DataError(
                f"This flow has {len(sources)} sources",
                expected=f"data by name: {sorted(sources)}",
                received=type(data).__name__,
            )
        data = {next(iter(sources)): data}
    for name in data:
        if name not in sources:
            raise DataError(f"data has {name!r}, but no source is called so", do=nearest(name, sources))
    for name, call in sources.items():
        if name not in data:
            raise DataError(
                f"There is no data set for source {name!r}",
                expected=f"data={{{name!r}: …}}",
                received=sorted(data),
            )
        given = data[name]
        if not hasattr(given, "rows") or not hasattr(given, "fingerprint"):
            raise DataError(
                f"The data of source {name!r} are not a data set",
                expected="a flowrl.data data set (from_jsonl, from_rows, a task)",
                received=type(given).__name__,
            )
        if not issubclass(given.batch_type, call.node.batch_type):
            raise DataError(
                f"The data set of source {name!r} gives the wrong rows",
                expected=call.node.batch_type.__name__,
                received=given.batch_type.__name__,
            )
        for user in _downstream(program, call.label):
            for column in getattr(user.node, "required_columns", tuple)():
                if column not in given.columns:
                    raise DataError(
                        f"{user.label} reads column {column!r}, which the data set of source {name!r} does not have",
                        expected=column,
                        received=", ".join(given.columns) or "no further columns",
                        do=nearest(column, given.columns),
                    )
    return dict(data)


def _downstream(program: Program, label: str) -> list[Any]:
    reached, out = {label}, []
    for call in program.calls:
        if any(b.label in reached for b in call.bindings()):
            reached.add(call.label)
            out.append(call)
    return out


#: So many prompts are tokenised before training to find those that are too long; longer data are checked as they come.
PROMPTS_CHECKED = 20_000


def _check_prompts(local: LocalRuntime, program: Program, data: Mapping[str, Any]) -> None:
    """Tokenise the prompts of every rollout: a prompt that the model cannot take is an error before training."""
    for call in program.calls:
        sampling = getattr(call.node, "sampling", None)
        for binding in call.bindings() if sampling is not None else ():
            source = program.call(binding.label).node
            if not isinstance(source, Source) or not hasattr(data[source.source_name], "unshuffled"):
                continue
            dataset = data[source.source_name]
            engine = local.bindings.engines[call.node.models()[0]]  # type: ignore[index]
            for start in range(0, min(len(dataset), PROMPTS_CHECKED), 1000):
                rows = dataset.unshuffled(start, min(1000, len(dataset) - start))
                lengths = engine.encode(rows.messages).lengths
                limit = engine.max_length
                for row, length in enumerate(lengths.tolist()):
                    if length == 0 or (limit is not None and length >= limit):
                        raise DataError(
                            f"Row {start + row + 1} of {getattr(dataset, 'name', source.source_name)}: the prompt does not fit {call.label}",
                            expected=f"1 to {limit - 1} tokens" if limit is not None else "at least 1 token",
                            received=f"{length} tokens: {str(rows.messages[row])[:80]!r}",
                            do="shorten or drop that row",
                        )


# -- what a run leaves behind ----------------------------------------------------------------------------------------


def _write_report(
    result: RunResult, program: Program, folder: Any, name: str, settings: Any, versions: dict[str, str]
) -> None:
    from flowrl.runtime.metrics import read_samples
    from flowrl.runtime.report import write_report

    summary = {
        "status": result.status,
        "steps": f"{result.steps} of {settings.num_steps}",
        "seed": str(settings.seed),
        **versions,
    }
    samples = read_samples(folder.path)
    for evaluation in result.evaluations:
        samples += _evaluation_samples(evaluation)
    write_report(
        folder.report,
        title=name,
        graph_svg=program.graph_svg,
        metrics=result.metrics,
        samples=samples,
        summary=summary,
        plan_text=program.plan.explain(),
    )


def _evaluation_samples(evaluation: EvaluationResult) -> list[dict[str, Any]]:
    from flowrl.runtime.metrics import sample_rows

    rows = sample_rows(evaluation.rollouts, evaluation.rewards)
    return [{"step": evaluation.step, "evaluation": evaluation.name, **row} for row in rows]
