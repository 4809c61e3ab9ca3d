"""How a run ends: what it leaves behind when it is done, and what it says and takes away when it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrl.errors import FlowError
from flowrl.models import Model

if TYPE_CHECKING:
    from flowrl.run import RunResult
    from flowrl.runtime.local import LocalRuntime
    from flowrl.runtime.run_state import Outcome

#: Seconds that a checkpoint which is being written gets to its end, where another rank's failure ends this process.
LAST_CHECKPOINT = 20.0


@contextlib.contextmanager
def discarded_on_error(local: LocalRuntime, resume: bool, existed: bool) -> Iterator[None]:
    """A run that could not begin leaves nothing behind, so that the same command works once its cause is repaired."""

    def discard() -> None:
        if not resume and local.ranks.is_first:
            local.folder.discard(keep_folder=existed)

    if local.ranks.watch is not None:  # which ends this process where another rank is gone
        local.ranks.watch.on_end = lambda text: discard()
    try:
        yield
    except BaseException:
        discard()
        raise


@contextlib.contextmanager
def status_on_error(local: LocalRuntime) -> Iterator[None]:
    """Write how the run ended, where it ends with an error; also where the process is ended because another rank hangs."""
    from flowrl.runtime.ranks import text_of

    def note(status: str, text: str) -> None:
        if local.ranks.is_first:
            with contextlib.suppress(FlowError):  # the disk may be what failed
                local.folder.write_manifest(status=status, error=text)

    if local.ranks.watch is not None:

        def end(text: str) -> None:
            local.background.abandon(LAST_CHECKPOINT)
            note("failed", text)

        local.ranks.watch.on_end = end
    try:
        yield
    except BaseException as error:
        elsewhere = local.ranks.watch.failure() if local.ranks.watch is not None else ""
        if isinstance(error, KeyboardInterrupt) and elsewhere:
            note("failed", elsewhere)
        else:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            note(status, text_of(error))
        raise


# -- what a run leaves behind ----------------------------------------------------------------------------------------


def finish(local: LocalRuntime, outcome: Outcome, result: RunResult, *, export: bool, report: bool) -> None:
    from flowrl.runtime.checkpoint import replace_folder

    folder, ranks = local.folder, local.ranks
    if export and outcome.status != "interrupted" and outcome.steps:
        for model in local.changing.values():
            if isinstance(model, Model):
                ranks.enter(f"exporting Model {model.name!r}")
                engine = local.bindings.engines[model]
                replace_folder(folder.export / model.name, lambda target, _, e=engine: e.export(target), ranks)
    ranks.enter("writing the report")
    if report:
        ranks.once(lambda: _write_report(local, result))
    ranks.once(lambda: folder.write_manifest(status=outcome.status, steps=outcome.steps))


def _write_report(local: LocalRuntime, result: RunResult) -> None:
    from flowrl.runtime.manifest import environment
    from flowrl.runtime.metrics import read_samples, sample_rows
    from flowrl.runtime.report import write_report

    if not (local.folder.path / "metrics.parquet").exists():  # it was stopped before there was anything to report
        return
    samples = read_samples(local.folder.path)
    for evaluation in result.evaluations:
        rows = sample_rows(evaluation.rollouts, evaluation.rewards)
        samples += [{"step": evaluation.step, "evaluation": evaluation.name, **row} for row in rows]
    write_report(
        local.folder.report,
        title=local.settings.title,
        graph_svg=local.program.graph_svg,
        metrics=result.metrics,
        samples=samples,
        summary={
            "status": result.status,
            "steps": f"{result.steps} of {local.settings.num_steps}",
            "seed": str(local.settings.seed),
            **environment(),
        },
        plan_text=local.program.plan.explain(),
    )
