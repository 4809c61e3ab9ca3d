"""Checkpoints: a consistent cut of a run, written atomically.

A checkpoint is a folder. It is written beside its place under a temporary name, every file is synced and hashed into
``manifest.json``, and then it is renamed: a reader sees a whole checkpoint or none. Frozen models are written once, when
the run starts, so that "the weights at step 0" survive a resume whatever becomes of their source.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl.context import Bindings
from flowrl.errors import CheckpointError, RunFolderError
from flowrl.models import BaseModel, Frozen, State

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


@dataclass
class Progress:
    """Where a run stands: everything of a checkpoint that is neither weights nor State.

    Args:
        step: completed iterations.
        cursors: by source name, the number of the next draw.
        counters: whatever else the loop counts (skipped steps in a row, best evaluation, …).
    """

    step: int = 0
    cursors: dict[str, int] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: a resume of another flow, seed or data set is refused."""

    flow: str
    seed: int
    data: Mapping[str, str]


def save_checkpoint(
    folder: Path,
    *,
    progress: Progress,
    identity: Identity,
    models: Mapping[str, BaseModel],
    states: tuple[State, ...],
    bindings: Bindings,
) -> Path:
    """Write ``folder/step-<step>``. Nothing that exists is touched before the new one is whole.

    Args:
        models: by name, those whose engines change during a run.

    Raises:
        RunFolderError: the disk is full or cannot be written.
    """

    def write(target: Path) -> None:
        import torch

        for name, model in models.items():
            place = target / "models" / name
            place.mkdir(parents=True)
            bindings.engines[model].save(place)  # type: ignore[index]
        torch.save({s.name: bindings.states.get(s, s.init) for s in states}, target / "states.pt")
        (target / "progress.json").write_text(json.dumps({"progress": asdict(progress), "identity": asdict(identity)}))

    return write_folder(folder / f"step-{progress.step:06d}", write)


def write_folder(final: Path, write: Callable[[Path], None]) -> Path:
    """Make a folder appear whole or not at all.

    Raises:
        RunFolderError: the disk is full or cannot be written; nothing is left behind.
    """
    if (final / MANIFEST).exists():  # the same step again, after a resume: it is whole, and equal by law 4
        return final
    temporary = final.with_name(f".{final.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        files = {str(p.relative_to(temporary)): _seal(p) for p in sorted(temporary.rglob("*")) if p.is_file()}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
        _seal(manifest)
        os.rename(temporary, final)
        sync_folder(final.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause = disk_error(error)
        if cause is not None:
            raise disk_full(final, cause) from error
        raise
    return final


def disk_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an error: libraries wrap it (safetensors, zip writers)."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if "No space left on device" in str(error) or "os error 28" in str(error):
            return OSError(errno.ENOSPC, "No space left on device")
        error = error.__cause__ or error.__context__
    return None


def disk_full(path: Path, error: OSError) -> RunFolderError:
    """The error for a path that cannot be written, with the room that is left there."""
    parent = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(parent).free / 2**20
    what = "The disk is full" if error.errno == errno.ENOSPC else f"Cannot write ({error.strerror})"
    return RunFolderError(
        f"{what}: {path}",
        expected="room to write",
        received=f"{free:.0f} MiB free",
        do="free space or choose another --out, then --resume: what was written before is whole",
    )


def _seal(path: Path) -> tuple[int, str]:
    """Sync a file to disk; its size and SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return path.stat().st_size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames inside of a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / MANIFEST).exists())


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: a file is missing, cut or changed; it is named.
    """
    advice = "delete that folder to go on from the checkpoint before it"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {path} has no readable {MANIFEST}", received=error, do=advice) from None
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"Checkpoint {path} is of another version",
            expected=f"schema {SCHEMA_VERSION}",
            received=manifest.get("schema_version"),
        )
    for name, (size, digest) in files.items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"Checkpoint {path} is damaged", expected=name, received="no such file", do=advice)
        found = file.stat().st_size
        if found != size or _digest(file) != digest:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {name} has changed",
                expected=f"{size} bytes, SHA-256 {digest[:12]}…",
                received=f"{found} bytes",
                do=advice,
            )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_checkpoint(
    path: Path,
    *,
    identity: Identity,
    models: Mapping[str, BaseModel],
    states: tuple[State, ...],
    bindings: Bindings,
) -> Progress:
    """Restore engines and States from a checkpoint, after verifying it whole.

    Raises:
        CheckpointError: it is damaged, or of another flow, seed or data set.
    """
    import torch

    verify(path)
    raw = json.loads((path / "progress.json").read_text())
    found = Identity(**raw["identity"])
    for what, expected, received in (
        ("flow", identity.flow, found.flow),
        ("seed", identity.seed, found.seed),
        ("data", dict(identity.data), dict(found.data)),
    ):
        if expected != received:
            raise CheckpointError(
                f"Checkpoint {path} is of another {what}",
                expected=expected,
                received=received,
                do="resume with what the run was started with, or start anew in another --out",
            )
    for name, model in models.items():
        place = path / "models" / name
        if not place.is_dir():
            raise CheckpointError(
                f"Checkpoint {path} lacks model {name!r}",
                received=sorted(p.name for p in (path / "models").iterdir()),
            )
        bindings.engines[model].load(place)  # type: ignore[index]
    saved = torch.load(path / "states.pt", weights_only=False)
    for state in states:
        if state.name in saved:
            bindings.states[state] = saved[state.name]
    return Progress(**raw["progress"])


def save_frozen(folder: Path, models: Mapping[str, Frozen], bindings: Bindings) -> None:
    """Write the weights of frozen models once, at the start of a run."""
    for name, model in models.items():
        if not (folder / name).exists():
            write_folder(folder / name, lambda target, m=model: bindings.engines[m].save(target))  # type: ignore[index,misc]


def load_frozen(folder: Path, models: Mapping[str, Frozen], bindings: Bindings) -> None:
    """Restore frozen models as they were at step 0."""
    for name, model in models.items():
        if (folder / name).exists():
            verify(folder / name)
            bindings.engines[model].load(folder / name)  # type: ignore[index]


def prune(folder: Path, *, keep_last: int, protected: set[int]) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and the protected steps, and what a kill left half-written."""
    for path in list_checkpoints(folder)[:-keep_last]:
        if int(path.name.removeprefix("step-")) not in protected:
            # Renamed first: a kill in the middle of the deletion leaves no checkpoint without its files.
            discarded = path.with_name(f".{path.name}.discarded")
            os.rename(path, discarded)
    for leftover in [*folder.glob(".*.discarded"), *folder.glob(".*.writing")]:
        shutil.rmtree(leftover, ignore_errors=True)
