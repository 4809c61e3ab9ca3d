"""Files that are either the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from flowrl.runtime.disk import disk_errors


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file by these bytes, or leave it as it is.

    Raises:
        RunFolderError: the disk is full or the folder cannot be written; names the path and what is free.
    """
    # One fixed name: kills leave at most one such file behind.
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside of a folder survive a power cut, where the file system can sync a folder."""
    with contextlib.suppress(OSError):  # some cannot; the file itself is synced
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def clean_utf8(text: str) -> str:
    """Text that UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
