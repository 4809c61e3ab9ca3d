"""A run as a file: programs, data and settings, so that a step can be replayed without the recipe."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.models import Model
from flowrl.runtime.atomic import write_atomically
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.run_folder import RunFolder


def save_run(local: LocalRuntime) -> None:
    """Write ``program.pkl`` with cloudpickle. A live model is written as a HuggingFace folder beside it."""
    import cloudpickle

    live = {
        id(m.source): m
        for m in local.models.values()
        if isinstance(m, Model) and not isinstance(m.source, str | os.PathLike)
    }
    for model in live.values():
        local.bindings.engines[model].export(local.folder.path / "live" / model.name)

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            model = live.get(id(obj))
            return f"live/{model.name}" if model is not None else None

    buffer = io.BytesIO()
    Pickler(buffer).dump((local.program, local.data, local.evaluations, local.settings))
    write_atomically(local.folder.program, buffer.getvalue())


def load_run(path: str | os.PathLike[str]) -> LocalRuntime:
    """The runtime of an existing run folder, with its Models opened at step 0. Only load what you trust: it is a pickle.

    Raises:
        RunFolderError: it is not a run folder.
    """
    folder = RunFolder(Path(path))
    folder.read_manifest()

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> str:
            return str(folder.path / pid)

    with open(folder.program, "rb") as file:
        program, data, evaluations, settings = Unpickler(file).load()
    local = LocalRuntime(program, data, evaluations, folder, replace(settings, progress=False))
    local.open()
    return local
