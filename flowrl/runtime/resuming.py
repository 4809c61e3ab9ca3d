"""The beginning of a run: at step 0, or at the newest checkpoint."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from flowrl.errors import CheckpointError
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.evaluation import EvaluationResult, load_evaluations
from flowrl.runtime.progress import Progress as Display

if TYPE_CHECKING:
    from flowrl.runtime.local import LocalRuntime


def check_resume(local: LocalRuntime) -> None:
    """What can be known of a resume before any weight is loaded. Every rank calls it.

    Raises:
        CheckpointError: the newest checkpoint is damaged, of another flow, or beyond the steps that are asked for.
    """
    found = local.ranks.once(lambda: ckpt.list_checkpoints(local.folder.checkpoints))
    if not found:
        return
    ckpt.verify(found[-1], ranks=local.ranks)
    step = local.ranks.once(lambda: ckpt.read_progress(found[-1], local.identity)).step
    if step > local.settings.num_steps:
        raise CheckpointError(
            f"The run in {local.folder.path} has more steps than are asked for",
            expected=f"num_steps of at least {step}, the steps that it has",
            received=f"num_steps={local.settings.num_steps}",
            do="ask for more steps; they count from the start of the run",
        )


def begin(local: LocalRuntime, resume: bool, display: Display) -> None:
    """Restore the newest checkpoint, or begin at step 0."""
    local.ranks.enter("restoring a checkpoint" if resume else "keeping frozen Models")
    found = local.ranks.once(lambda: ckpt.list_checkpoints(local.folder.checkpoints) if resume else [])
    if found:
        local.restore(found[-1])
        step, most = local.state.step, local.settings.num_steps
        more = "" if step < most else " The run has all its steps: there is nothing to do."
        display.message(f"Resumed from {found[-1]}, after step {step}.{more}")
    else:
        ckpt.save_frozen(local.folder.frozen, local.frozen, local.bindings)
        if resume:
            local.restore(None)
            display.message("There is no checkpoint yet: the run starts at step 0.")
    if resume:
        local.results = local.ranks.once(lambda: _forget_what_comes_again(local))


def _forget_what_comes_again(local: LocalRuntime) -> dict[str, list[EvaluationResult]]:
    """Delete evaluations and dumps of steps that are run again; what evaluations are left."""
    found: dict[str, list[EvaluationResult]] = {}
    for plan in local.evaluations:
        results = load_evaluations(local.folder.evaluations, plan.name, up_to=local.state.step)
        found[plan.name] = [*results[:1], *results[1:][-1:]]
    for path in local.folder.dumps.glob("step-*"):
        if ckpt.step_of(path) > local.state.step:  # it is run again
            shutil.rmtree(path)
    return found
