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
#: With less than this left, an error of another kind while writing is the disk's, too: torch has several of its own.
_NOTHING_LEFT = 1 << 20


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
        cause = _disk_error(error, path)
        if cause is None:
            raise
        said = _cannot_write(path, cause)
        said.__dict__.update(error.__dict__)  # which rank it is of
        raise said from error


def _disk_error(error: BaseException, path: Path) -> OSError | None:
    """The OSError that an error is, or stands for: libraries wrap it (safetensors, zip writers)."""
    if isinstance(error, OSError):
        return error
    says_so = any(sign in str(error) for sign in _SIGNS)
    if says_so or (isinstance(error, RuntimeError) and shutil.disk_usage(_existing(path)).free < _NOTHING_LEFT):
        return OSError(errno.ENOSPC, "No space left on device")
    return None


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))


def _cannot_write(path: Path, error: OSError) -> RunFolderError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = f"{shutil.disk_usage(_existing(path)).free / 2**20:.1f} MiB free"
    return RunFolderError(
        f"Cannot write {path}: {'the disk is full' if full else error.strerror or error}",
        expected="room to write" if full else "a folder that can be written",
        received=free if full else str(error),
        do="free space, then go on with --resume: what was written before is whole" if full else "choose another --out",
    )
