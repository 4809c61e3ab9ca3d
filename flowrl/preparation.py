"""Between a checked flow and its first step: load, look at data and weights, and write what is run, and with what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrl.errors import CheckpointError
from flowrl.models import Model
from flowrl.preflight import check_prompts, check_recorded

if TYPE_CHECKING:
    from flowrl.runtime.local import LocalRuntime


def prepare(local: LocalRuntime, resume: bool) -> list[str]:
    """Everything between a checked flow and the first step, on every rank; sentences for the user."""
    from flowrl.runtime.disk import disk_errors
    from flowrl.runtime.resuming import check_resume
    from flowrl.runtime.saved_run import save_run

    folder, ranks = local.folder, local.ranks
    known = ranks.once(lambda: folder.read_manifest() if resume else {})
    if resume:
        check_resume(local)
    local.open()
    ranks.enter("looking at the data and the weights")
    ranks.once(lambda: _check_rows(local))
    weights, needed = _weigh(local, known.get("weights", {}))
    notes = ranks.once(lambda: _write_beginning(local, known, weights, needed))
    with disk_errors(folder.path):
        reason = save_run(local)
    ranks.once(lambda: folder.write_manifest(not_replayable=reason))
    if reason:
        notes.append(f"This run cannot be replayed, because it cannot be pickled: {reason}")
    return notes


def _check_rows(local: LocalRuntime) -> None:
    for each, sets in [(local.program, local.data), *((p.program, p.data) for p in local.evaluations)]:
        check_prompts(local, each, sets)
        check_recorded(local, each, sets)


def _write_beginning(local: LocalRuntime, known: Mapping[str, Any], weights: dict[str, str], needed: int) -> list[str]:
    """Write what is run, and with what; what is other than it was when the run began."""
    from flowrl.runtime.atomic import write_atomically
    from flowrl.runtime.disk import disk_errors
    from flowrl.runtime.manifest import changes, environment, layout, settings_of

    folder, program = local.folder, local.program
    folder.require_space(needed)
    made = {"layout": layout(program), "settings": settings_of(program)}
    notes = [
        f"Changed since the run began: {text}."
        for key, now in made.items()
        for text in changes(known.get(key, now), now)
    ]
    began = {key: value for key, value in {"weights": weights, **made}.items() if key not in known}
    folder.write_manifest(
        name=local.settings.title,
        status="running",
        num_steps=local.settings.num_steps,
        seed=local.settings.seed,
        flow=program.plan.structure,
        environment=environment(),
        error="",
        **began,
    )
    with disk_errors(folder.path):
        write_atomically(folder.plan, program.plan.to_json().encode())
    return notes


def _weigh(local: LocalRuntime, known: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """SHA-256 of the weights of every Model that is not derived, as they were loaded, and the bytes that the run's
    checkpoints will need.

    Raises:
        CheckpointError: a Model, or the base of an adapter, that no checkpoint holds has changed since the run began.
    """
    from flowrl.runtime.checkpoint import list_checkpoints

    digests: dict[str, str] = {}
    checkpoint = frozen = 0
    for name, model in local.models.items():
        if isinstance(model, Model):
            size, digests[name] = local.weights(model)
            in_checkpoints = name in local.changing and model.lora is None
            if not in_checkpoints and known.get(name, digests[name]) != digests[name]:
                raise CheckpointError(
                    f"Model {name!r} has other weights than when the run began",
                    expected="what it was loaded from, unchanged: no checkpoint holds a Model that is not trained, or a base",
                    received=f"others in {model.source!r}",
                    do="bring the old weights back, or start anew in another --out",
                )
            if model.lora is not None or model.quantization is not None:  # of these the adapter alone is kept
                engine: Any = local.bindings.engines[model]
                size = sum(t.numel() * t.element_size() for _, t in engine.adapter_weights())
            derived = [m for m in local.models.values() if getattr(m, "base", None) is model]
            # a trained Model has two moments a weight in the optimiser, a derived one none
            checkpoint += 3 * size * (name in local.changing) + size * sum(m.name in local.changing for m in derived)
            frozen += size * sum(m.name in local.frozen for m in derived)
    there = local.ranks.once(lambda: len(list_checkpoints(local.folder.checkpoints)))
    kept = local.ranks.once(local.folder.frozen.exists)
    to_come = max(1, local.settings.keep_last + 1 - there)
    return digests, checkpoint * to_come + (0 if kept else frozen)
