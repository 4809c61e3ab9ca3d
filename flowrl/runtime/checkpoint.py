"""Checkpoints: a consistent cut of a run, written atomically.

A checkpoint is a folder. It is written beside its place under a temporary name, every file is synced and hashed into
``manifest.json``, and then it is renamed: a reader sees a whole checkpoint or none. Frozen models are written once, when
the run starts, so that "the weights at step 0" survive a resume whatever becomes of their source.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flowrl.context import Bindings
from flowrl.errors import CheckpointError, FlowError
from flowrl.models import BaseModel, Frozen, State
from flowrl.runtime.atomic import sync_folder
from flowrl.runtime.disk import disk_errors
from flowrl.runtime.ranks import ONE_RANK, Ranks
from flowrl.runtime.run_state import RunState

MANIFEST, PROGRESS, STATES, CARRIED = "manifest.json", "progress.json", "states.pt", "carried.pkl"
SCHEMA_VERSION = 1
GO_BACK = "delete that folder to go on from the checkpoint before it"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: a resume of another flow, seed or data set is refused."""

    flow: str
    seed: int
    data: Mapping[str, str]


def save_checkpoint(
    folder: Path,
    *,
    progress: RunState,
    identity: Identity,
    models: Mapping[str, BaseModel],
    states: tuple[State, ...],
    bindings: Bindings,
) -> Path:
    """Write ``folder/step-<step>``. Nothing that exists is touched before the new one is whole. Every rank of a run calls it.

    Args:
        models: by name, those whose engines change during a run.

    Raises:
        RunFolderError: the disk is full or cannot be written.
        FlowError: a State holds what a checkpoint cannot.
    """
    values = {s.name: bindings.states.get(s, s.init) for s in states}
    for name, value in values.items():
        _check_state(name, value)

    ranks = bindings.ranks or ONE_RANK

    def write(target: Path) -> None:
        for name, model in models.items():
            place = target / "models" / name
            ranks.once(lambda place=place: place.mkdir(parents=True))  # type: ignore[misc]
            ranks.together(lambda m=model, place=place: bindings.engines[m].save(place))  # type: ignore[index,misc]
        ranks.once(lambda: write_progress(target))

    def write_progress(target: Path) -> None:
        import torch

        torch.save(values, target / STATES)
        if progress.carried:
            (target / CARRIED).write_bytes(pickle.dumps(progress.carried))
        numbers = {f.name: getattr(progress, f.name) for f in fields(progress) if f.name != "carried"}
        (target / PROGRESS).write_text(json.dumps({"progress": numbers, "identity": asdict(identity)}))

    return write_folder(folder / f"step-{progress.step:06d}", write, ranks)


def _check_state(name: str, value: Any) -> None:
    """A State holds what a checkpoint can hold: numbers, texts, tensors, and lists, tuples and dicts of them."""
    import torch

    if isinstance(value, dict):
        for key, inner in value.items():
            _check_state(name, key)
            _check_state(name, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_state(name, inner)
    elif type(value) not in (type(None), bool, int, float, str, torch.Tensor):
        raise FlowError(
            f"State {name!r} cannot be written into a checkpoint",
            expected="numbers, texts, tensors, None, and lists, tuples and dicts of them",
            received=f"a {type(value).__module__}.{type(value).__qualname__}",
            do="keep the numbers of it in the State, and make the object from them in the node",
        )


def write_folder(final: Path, write: Callable[[Path], None], ranks: Ranks = ONE_RANK) -> Path:
    """Make a folder appear whole or not at all.

    Args:
        write: given the folder to write into, on every rank.
        ranks: who takes part; all of them see the folder, and rank 0 makes, seals and renames it.

    Raises:
        RunFolderError: the disk is full or cannot be written; nothing is left behind.
    """
    if ranks.once(
        lambda: (final / MANIFEST).exists()
    ):  # the same step again, after a resume: whole, and equal by law 4
        return final
    temporary = final.with_name(f".{final.name}.writing")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        files = {str(p.relative_to(temporary)): _seal(p) for p in sorted(temporary.rglob("*")) if p.is_file()}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
        _seal(manifest)
        os.rename(temporary, final)
        sync_folder(final.parent)

    _written(final, temporary, begin, write, finish, ranks)
    return final


def replace_folder(final: Path, write: Callable[[Path], None], ranks: Ranks = ONE_RANK) -> None:
    """Make a folder new as a whole, in the place of an older one; arguments as for :func:`write_folder`.

    Raises:
        RunFolderError: the disk is full or cannot be written; the older one is untouched.
    """
    new = final.with_name(f".{final.name}.new")

    def begin() -> None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)

    def finish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(new, final)

    _written(final, new, begin, write, finish, ranks)


def _written(
    final: Path,
    temporary: Path,
    begin: Callable[[], None],
    write: Callable[[Path], None],
    finish: Callable[[], None],
    ranks: Ranks,
) -> None:
    """Begin and finish on rank 0, write on all; an error leaves nothing behind."""
    try:
        with disk_errors(final):
            ranks.once(begin)
            ranks.together(lambda: write(temporary))
            ranks.once(finish)
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _seal(path: Path) -> tuple[int, str]:
    """Sync a file to disk; its size and SHA-256."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    return sorted((p for p in folder.glob("step-*") if step_of(p) >= 0), key=step_of)  # a user's copies are the user's


def step_of(path: Path) -> int:
    """The number of completed steps that a checkpoint was written after."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def verify(path: Path, advice: str = GO_BACK) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: a file is missing, cut or changed; it is named.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"Checkpoint {path} is damaged: {MANIFEST} cannot be read", received=repr(error), do=advice
        ) from None
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"Checkpoint {path} is of another version",
            expected=f"schema {SCHEMA_VERSION}",
            received=f"schema {manifest.get('schema_version')}",
            do="resume it with the flowrl that wrote it",
        )
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"Checkpoint {path} is damaged", expected=name, received="no such file", do=advice)
        found = file.stat().st_size
        if found != size or _digest(file) != digest:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {name} has changed",
                expected=f"{size} bytes, SHA-256 {digest[:12]}…",
                received=f"{found} bytes" + (", SHA-256 of another content" if found == size else ""),
                do=advice,
            )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_progress(path: Path, identity: Identity) -> RunState:
    """Verify a checkpoint whole, and that it is of this run; where it stands.

    Raises:
        CheckpointError: it is damaged, or of another flow, seed or data set.
    """
    verify(path)
    raw = json.loads((path / PROGRESS).read_text())
    found = Identity(**raw["identity"])
    for what, expected, received in (
        ("flow", identity.flow, found.flow),
        ("seed", identity.seed, found.seed),
        ("data", dict(identity.data), dict(found.data)),
    ):
        if expected != received:
            raise CheckpointError(
                f"Checkpoint {path} is of another {what}",
                expected=f"{expected}, as asked for now",
                received=f"{received}, of the run that wrote it",
                do="resume with what the run was started with, or start anew in another --out",
            )
    carried = path / CARRIED
    return RunState(**raw["progress"], carried=pickle.loads(carried.read_bytes()) if carried.exists() else {})


def load_checkpoint(
    path: Path,
    *,
    identity: Identity,
    models: Mapping[str, BaseModel],
    states: tuple[State, ...],
    bindings: Bindings,
) -> RunState:
    """Restore engines and States from a checkpoint, after verifying it whole. Every rank of a run calls it.

    Raises:
        CheckpointError: it is damaged, or of another flow, seed or data set.
    """
    import torch

    ranks = bindings.ranks or ONE_RANK
    progress = ranks.once(lambda: read_progress(path, identity))
    for name, model in models.items():
        place = path / "models" / name
        if not place.is_dir():
            there = sorted(p.name for p in (path / "models").glob("*"))
            raise CheckpointError(f"Checkpoint {path} lacks model {name!r}", expected=name, received=there)
        ranks.together(lambda m=model, place=place: bindings.engines[m].load(place))  # type: ignore[index,misc]
    saved = torch.load(path / STATES, weights_only=True)
    for state in states:
        bindings.states[state] = saved.get(state.name, state.init)
    return progress


def save_frozen(folder: Path, models: Mapping[str, Frozen], bindings: Bindings) -> None:
    """Write the weights of frozen models once, at the start of a run. Every rank of it calls it."""
    for name, model in models.items():
        save: Callable[[Path], None] = bindings.engines[model].save  # type: ignore[index]
        write_folder(folder / name, save, bindings.ranks or ONE_RANK)


def load_frozen(folder: Path, models: Mapping[str, Frozen], bindings: Bindings) -> None:
    """Restore frozen models as they were at step 0. Every rank of a run calls it.

    Raises:
        CheckpointError: the weights at step 0 are damaged or gone: nothing can replace them.
    """
    for name, model in models.items():
        ranks = bindings.ranks or ONE_RANK
        advice = "restore it from a copy of the run folder, or start anew: nothing else holds it"
        ranks.once(lambda name=name, advice=advice: verify(folder / name, advice))  # type: ignore[misc]
        ranks.together(lambda m=model, name=name: bindings.engines[m].load(folder / name))  # type: ignore[index,misc]


def prune(folder: Path, *, keep_last: int, protected: set[int]) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and the protected steps, and what a kill left half-written."""
    for path in list_checkpoints(folder)[:-keep_last]:
        if step_of(path) not in protected:
            # Renamed first: a kill in the middle of the deletion leaves no checkpoint without its files.
            os.rename(path, path.with_name(f".{path.name}.discarded"))
    for leftover in [*folder.glob(".*.discarded"), *folder.glob(".*.writing")]:
        shutil.rmtree(leftover, ignore_errors=True)
