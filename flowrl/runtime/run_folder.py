"""The folder of a run: where everything is, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import RunFolderError
from flowrl.runtime.atomic import write_atomically

LOCK = ".lock"


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run.

    ``run.json`` (what was asked and how it ended), ``program.pkl`` and ``plan.json``, ``metrics.parquet``, ``tensorboard/``,
    ``samples/``, ``evaluations/``, ``checkpoints/``, ``frozen/`` (weights at step 0), ``live/`` (models that were given as
    objects, at step 0), ``dumps/``, ``report.html``, ``export/``.
    """

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def program(self) -> Path:
        return self.path / "program.pkl"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def frozen(self) -> Path:
        return self.path / "frozen"

    @property
    def live(self) -> Path:
        return self.path / "live"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    def dump(self, step: int) -> Path:
        """Of one step: ``before/`` (a checkpoint) and ``edges/``."""
        return self.dumps / f"step-{step:06d}"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def create(self, *, resume: bool) -> None:
        """Make the folder for a new run, or make sure that there is a run to resume.

        Raises:
            RunFolderError: a new run finds anything there; a resume finds no run; the place cannot be written.
        """
        if resume:
            if not self.manifest.exists():
                raise RunFolderError(
                    f"There is no run to resume in {self.path}",
                    expected=f"a run folder with {self.manifest.name}",
                    received="no such folder"
                    if not self.path.exists()
                    else sorted(p.name for p in self.path.iterdir())[:8],
                    do="leave --resume out to start a new run there",
                )
        elif self.path.exists() and (not self.path.is_dir() or any(p.name != LOCK for p in self.path.iterdir())):
            raise RunFolderError(
                f"Run folder {self.path} exists already",
                expected="a new or an empty folder",
                received="a run" if self.manifest.exists() else "something else",
                do="choose another --out, or go on with --resume",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise RunFolderError(
                f"Cannot write in {self.path}",
                expected="a folder that can be written",
                received=error,
                do="choose another --out",
            ) from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside the body no other process runs in this folder. The system lets go of it when this process ends.

        Raises:
            RunFolderError: another process runs there now.
        """
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(handle, 32).decode().strip()
                raise RunFolderError(
                    f"Another process runs in {self.path}",
                    expected="one process a run folder",
                    received=f"process {owner}" if owner else "a process that holds its lock",
                    do="wait for it or end it, or choose another --out",
                ) from None
            except OSError:  # a file system without locks
                pass
            else:
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(handle)

    def discard(self, *, keep_folder: bool = False) -> None:
        """Remove what a run that could not begin has left in a folder that was new or empty.

        Args:
            keep_folder: the folder itself is the user's.
        """
        for path in self.path.iterdir() if self.path.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not keep_folder:
            shutil.rmtree(self.path, ignore_errors=True)

    def write_manifest(self, **values: Any) -> None:
        """Update ``run.json``."""
        known = json.loads(self.manifest.read_text()) if self.manifest.exists() else {}
        write_atomically(self.manifest, json.dumps({**known, **values}, indent=1, default=str).encode())

    def read_manifest(self) -> dict[str, Any]:
        """``run.json``.

        Raises:
            RunFolderError: it is not there, or damaged.
        """
        try:
            return json.loads(self.manifest.read_text())
        except FileNotFoundError:
            raise RunFolderError(
                f"{self.path} is not a run folder",
                expected=self.manifest.name,
                received="no such file" if self.path.is_dir() else "no such folder",
            ) from None
        except ValueError as error:
            raise RunFolderError(f"{self.manifest} is damaged", received=error) from None

    def require_space(self, needed: int) -> None:
        """Refuse to start where the checkpoints would not fit.

        Args:
            needed: bytes.

        Raises:
            RunFolderError: with what is needed and what is free.
        """
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise RunFolderError(
                f"The disk of {self.path} is too full for this run's checkpoints",
                expected=f"{needed / 2**20:.0f} MiB",
                received=f"{free / 2**20:.0f} MiB free",
                do="free space, choose another --out, or keep fewer checkpoints (keep_last)",
            )


def default_folder(name: str) -> Path:
    """``runs/<name>-<n>``, the first that is free; what no file name takes becomes a dash."""
    name = re.sub(r"[^\w.-]+", "-", name)[:80].strip(".-") or "run"
    number = 1
    while (path := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return path
