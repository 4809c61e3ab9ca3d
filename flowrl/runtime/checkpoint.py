"""Checkpoints: a consistent cut of a run, written atomically.

A checkpoint is a folder. It is written beside its place under a temporary name, every file is synced and hashed into
``manifest.json``, and then it is renamed: a reader sees a whole checkpoint or none. Frozen models are written once, when
the run starts, so that "the weights at step 0" survive a resume whatever becomes of their source.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from flowrl.context import Bindings
from flowrl.errors import CheckpointError, FlowError
from flowrl.models import BaseModel, Frozen, State
from flowrl.runtime.atomic import sync_folder
from flowrl.runtime.disk import disk_errors
from flowrl.runtime.ranks import ONE_RANK, Ranks
from flowrl.runtime.run_state import RunState

MANIFEST, PROGRESS, STATES, CARRIED = "manifest.json", "progress.json", "states.pt", "carried.pkl"
SCHEMA_VERSION = 2
T = TypeVar("T")
GO_BACK = "delete that folder to go on from the checkpoint before it"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: a resume of another flow, seed or data set is refused."""

    flow: str
    seed: int
    data: Mapping[str, str]


def checkpoint_writer(
    folder: Path,
    *,
    progress: RunState,
    identity: Identity,
    models: Mapping[str, BaseModel],
    states: tuple[State, ...],
    bindings: Bindings,
    copy: bool = False,
) -> Callable[[Ranks], Path]:
    """What writes ``folder/step-<step>`` of this moment. Nothing that exists is touched before the new one is whole. Every
    rank of a run calls it, and what it returns, with ranks to talk over.

    Args:
        models: by name, those whose engines change during a run.
        copy: whether all is copied, and so may be written while training goes on.

    Raises:
        FlowError: a State holds what a checkpoint cannot.
        RunFolderError: of the writer: the disk is full or cannot be written.
    """
    ranks = bindings.ranks or ONE_RANK
    final = folder / f"step-{progress.step:06d}"
    if ranks.once(
        lambda: (final / MANIFEST).exists()
    ):  # the same step again, after a resume: whole, and equal by law 4
        return lambda ranks: final
    files = ranks.alone(lambda: _small_files(progress, identity, states, bindings))
    savings = {
        name: ranks.together(lambda m=model: bindings.engines[m].saving(copy=copy))  # type: ignore[index,misc]
        for name, model in models.items()
    }

    def write(target: Path, ranks: Ranks) -> None:
        for name, saving in savings.items():
            write_engine(saving, target / "models" / name, ranks)
        if ranks.is_first:
            for name, data in files.items():
                (target / name).write_bytes(data)

    return lambda ranks: write_folder(final, write, ranks)


def write_engine(saving: Callable[[Path, Ranks], None], place: Path, ranks: Ranks) -> None:
    """Write one engine into a new folder. Every rank calls it."""
    ranks.once(lambda: place.mkdir(parents=True, exist_ok=True))
    ranks.together(lambda: saving(place, ranks))


def _small_files(
    progress: RunState, identity: Identity, states: tuple[State, ...], bindings: Bindings
) -> dict[str, bytes]:
    """By name of the file, all but the engines."""
    import torch

    values = {s.name: bindings.states.get(s, s.init) for s in states}
    for name, value in values.items():
        _check_state(name, value)
    buffer = io.BytesIO()
    torch.save(values, buffer)
    numbers = {f.name: getattr(progress, f.name) for f in fields(progress) if f.name != "carried"}
    found = {
        STATES: buffer.getvalue(),
        PROGRESS: json.dumps({"progress": numbers, "identity": asdict(identity)}).encode(),
    }
    return found | ({CARRIED: pickle.dumps(progress.carried)} if progress.carried else {})


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


def write_folder(final: Path, write: Callable[[Path, Ranks], None], ranks: Ranks = ONE_RANK) -> Path:
    """Make a folder appear whole or not at all.

    Args:
        write: given the folder to write into, on every rank, and the ranks to talk over.
        ranks: who takes part; all of them see the folder, and seal its files; rank 0 makes and renames it.

    Raises:
        RunFolderError: the disk is full or cannot be written; nothing is left behind.
    """
    if ranks.once(lambda: (final / MANIFEST).exists()):
        return final

    def on_disk(work: Callable[[], T]) -> T:
        with disk_errors(final):
            return work()

    def write_and_seal(target: Path, ranks: Ranks) -> None:
        ranks.together(lambda: on_disk(lambda: write(target, ranks)))
        found = ranks.once(lambda: sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()))
        my_share = found[ranks.rank :: ranks.size]  # hashing is what takes long
        mine = ranks.together(lambda: on_disk(lambda: {name: _seal(target / name) for name in my_share}))
        sealed = {name: seal for part in ranks.everyone(mine) for name, seal in part.items()}
        if ranks.is_first:
            files = {name: sealed[name] for name in found}
            manifest = target / MANIFEST
            manifest.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "files": files}, indent=1))
            _seal(manifest)

    def finish(temporary: Path) -> None:
        os.rename(temporary, final)
        sync_folder(final.parent)

    _written(final, ".writing", write_and_seal, finish, ranks)
    return final


def replace_folder(final: Path, write: Callable[[Path, Ranks], None], ranks: Ranks = ONE_RANK) -> None:
    """Make a folder new as a whole, in the place of an older one; arguments as for :func:`write_folder`.

    Raises:
        RunFolderError: the disk is full or cannot be written; the older one is untouched.
    """

    def finish(new: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(new, final)

    _written(final, ".new", write, finish, ranks)


def _written(
    final: Path, suffix: str, write: Callable[[Path, Ranks], None], finish: Callable[[Path], None], ranks: Ranks
) -> None:
    """Write into a new folder beside the final one, on all ranks, and finish on rank 0; an error leaves nothing behind."""

    def begin() -> Path:
        # A name of its own: whoever may still be writing another one of this name cannot be taken for this.
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}{suffix}")
        for leftover in final.parent.glob(f".{final.name}.*{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def on_disk(work: Callable[[], T]) -> T:
        with disk_errors(final):
            return work()

    temporary = ranks.once(lambda: on_disk(begin))
    try:
        ranks.together(lambda: on_disk(lambda: write(temporary, ranks)))
        ranks.once(lambda: on_disk(lambda: finish(temporary)))
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


def verify(path: Path, advice: str = GO_BACK, ranks: Ranks = ONE_RANK) -> None:
    """Check every file of a checkpoint against its manifest. Every rank calls it, and reads its share.

    Raises:
        CheckpointError: a file is missing, cut or changed; it is named.
    """
    files = ranks.once(lambda: _read_manifest(path, advice))
    mine = list(files)[ranks.rank :: ranks.size]
    ranks.together(lambda: [_verify_file(path, name, *files[name], advice) for name in mine])


def _read_manifest(path: Path, advice: str) -> dict[str, tuple[int, str]]:
    """By name, size and SHA-256 of each file."""
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
    return files


def _verify_file(path: Path, name: str, size: int, digest: str, advice: str) -> None:
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
    """Where a verified checkpoint stands.

    Raises:
        CheckpointError: it is of another flow, seed or data set.
    """
    files = _read_manifest(path, GO_BACK)
    if absent := [name for name in (PROGRESS, STATES) if name not in files]:
        raise CheckpointError(
            f"Checkpoint {path} is damaged: its {MANIFEST} does not list all of it",
            expected=", ".join(absent),
            received=f"{len(files)} files",
            do=GO_BACK,
        )
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
    carried = pickle.loads((path / CARRIED).read_bytes()) if CARRIED in files else {}
    return RunState(**raw["progress"], carried=carried)


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
    verify(path, ranks=ranks)
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
        saving = bindings.engines[model].saving(copy=False)  # type: ignore[index]
        write_folder(folder / name, saving, bindings.ranks or ONE_RANK)


def load_frozen(folder: Path, models: Mapping[str, Frozen], bindings: Bindings) -> None:
    """Restore frozen models as they were at step 0. Every rank of a run calls it.

    Raises:
        CheckpointError: the weights at step 0 are damaged or gone: nothing can replace them.
    """
    for name, model in models.items():
        ranks = bindings.ranks or ONE_RANK
        advice = "restore it from a copy of the run folder, or start anew: nothing else holds it"
        verify(folder / name, advice, ranks)
        ranks.together(lambda m=model, name=name: bindings.engines[m].load(folder / name))  # type: ignore[index,misc]


def prune(folder: Path, *, keep_last: int, protected: set[int]) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and the protected steps, and what a kill left half-written."""
    for path in list_checkpoints(folder)[:-keep_last]:
        if step_of(path) not in protected:
            # Renamed first: a kill in the middle of the deletion leaves no checkpoint without its files.
            os.rename(path, path.with_name(f".{path.name}.discarded"))
    for leftover in [*folder.glob(".*.discarded"), *folder.glob(".*.writing")]:
        shutil.rmtree(leftover, ignore_errors=True)
