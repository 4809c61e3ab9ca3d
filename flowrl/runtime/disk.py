"""A disk that is full or cannot be written, said once and the same way wherever a run writes."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from flowrl.errors import FlowError, RunFolderError

#: How libraries that write files from C++ or Rust say that they could not.
_SIGNS = ("No space left on device", "os error 28", "PytorchStreamWriter failed writing", "file write failed")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Inside the body, an error that comes from the disk is a RunFolderError which names ``path``.

    Raises:
        RunFolderError: the disk is full or cannot be written.
    """
    try:
        yield
    except FlowError:
        raise
    except Exception as error:
        cause = _disk_error(error)
        if cause is None:
            raise
        raise _cannot_write(path, cause) from error


def _disk_error(error: BaseException) -> OSError | None:
    """The OSError that an error is, or that it says it is: libraries wrap it (safetensors, zip writers)."""
    if isinstance(error, OSError):
        return error
    if any(sign in str(error) for sign in _SIGNS):
        return OSError(errno.ENOSPC, "No space left on device")
    return None


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    parent = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = f"{shutil.disk_usage(parent).free / 2**20:.1f} MiB free"
    return RunFolderError(
        f"Cannot write {path}: {'the disk is full' if full else error.strerror or error}",
        expected="room to write" if full else "a folder that can be written",
        received=free if full else str(error),
        do="free space, then go on with --resume: what was written before is whole" if full else "choose another --out",
    )
