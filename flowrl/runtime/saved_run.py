"""A run as a file: programs, data and settings, so that a step can be replayed without the recipe."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.errors import RunFolderError
from flowrl.models import Model
from flowrl.runtime.atomic import write_atomically
from flowrl.runtime.checkpoint import write_folder
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.run_folder import RunFolder


def save_run(local: LocalRuntime) -> str:
    """Write ``program.pkl`` with cloudpickle. A live model is written as a HuggingFace folder beside it, at step 0. Every rank
    of a run calls it.

    Returns:
        Why the run cannot be replayed, where something in it cannot be pickled; else "".
    """
    live = _live_models(local)
    for name, model in live.values():
        engine = local.bindings.engines[model]
        write_folder(local.folder.live / name, lambda target, _, engine=engine: engine.export(target), local.ranks)
    return local.ranks.once(lambda: _save_program(local, live))


def _save_program(local: LocalRuntime, live: dict[int, tuple[str, Model]]) -> str:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return live[id(obj)][0] if id(obj) in live else None

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump((local.program, local.data, local.evaluations, local.settings))
    except Exception as error:  # what a user's node or data set holds may be anything
        return f"{type(error).__name__}: {error}"
    write_atomically(local.folder.program, buffer.getvalue())
    return ""


def _live_models(local: LocalRuntime) -> dict[int, tuple[str, Model]]:
    """By id of the live object, a name for it, and the Model to write it from: a policy has all of it, a critic its trunk."""
    found: dict[int, tuple[str, Model]] = {}
    for model in sorted(local.models.values(), key=lambda m: m.kind != "policy"):
        if isinstance(model, Model) and not isinstance(model.source, str | os.PathLike):
            found.setdefault(id(model.source), (model.name, model))
    return found


def load_run(path: str | os.PathLike[str]) -> LocalRuntime:
    """The runtime of an existing run folder, with its Models opened at step 0. Only load what you trust: it is a pickle.

    Raises:
        RunFolderError: it is not a run folder, or what it holds cannot be loaded.
    """
    folder = RunFolder(Path(path))
    manifest = folder.read_manifest()

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> str:
            return str(folder.live / pid)

    try:
        with open(folder.program, "rb") as file:
            program, data, evaluations, settings = Unpickler(file).load()
    except FileNotFoundError:
        raise RunFolderError(
            f"The run in {folder.path} cannot be replayed",
            expected=folder.program.name,
            received=manifest.get("not_replayable") or "no such file",
        ) from None
    except Exception as error:  # unpickling runs anything
        raise RunFolderError(
            f"{folder.program} cannot be loaded",
            expected="what this version of flowrl, with the same packages installed, has written",
            received=f"{type(error).__name__}: {error}",
        ) from error
    local = LocalRuntime(program, data, evaluations, folder, replace(settings, progress=False))
    local.open()
    return local
