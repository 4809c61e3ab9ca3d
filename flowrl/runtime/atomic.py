"""Files that are either the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from flowrl.errors import RunFolderError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file by these bytes, or leave it as it is.

    Raises:
        RunFolderError: the disk is full or the folder cannot be written; names the path and the free bytes.
    """
    # One fixed name: kills leave at most one such file behind.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, len(data), error) from error


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cannot_write(path: Path, size: int, error: OSError) -> RunFolderError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes free on that file system"
    except OSError:
        free = "a folder that cannot be read"
    return RunFolderError(
        f"Cannot write {path}: {'the disk is full' if full else error.strerror or error}",
        expected=f"room for {size:,} bytes" if full else "a folder that can be written",
        received=free,
        do="free space and resume; the last complete file is untouched" if full else "choose another folder",
    )


def clean_utf8(text: str) -> str:
    """Text that UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
