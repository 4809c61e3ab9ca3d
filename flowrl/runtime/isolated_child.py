"""The child's side of :mod:`flowrl.runtime.isolation`: outcomes, frames, and the loop that answers calls.

Every process of a reward function imports this module: it must stay quick.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle

_HEADER = struct.Struct("<Q")
#: A result larger than this is refused: it would be held by the driver once a row.
MAX_RESULT_BYTES = 16 << 20


_reducers: Any = cloudpickle.Pickler.dispatch_table


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _reducers[types.CodeType](code)
    return _rebuild_code, (make, arguments, code.co_filename)


def _rebuild_code(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle forgets which file a function comes from; a traceback should say it."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduce_code}, _reducers)


def dump_function(function: Callable[..., Any]) -> bytes:
    """A function by value where it cannot be imported, with the names of its files."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(function)
    return buffer.getvalue()


def to_frame(data: bytes) -> bytes:
    """Data as it travels: its length and itself."""
    return _HEADER.pack(len(data)) + data


def take_frame(received: bytearray) -> bytes | None:
    """Cut the first whole frame off what was received; None where it has not all arrived."""
    if len(received) < _HEADER.size:
        return None
    end = _HEADER.size + _HEADER.unpack_from(received)[0]
    if len(received) < end:
        return None
    data = bytes(received[_HEADER.size : end])
    del received[:end]
    return data


@dataclass(frozen=True)
class Returned:
    """The function returned ``value``."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The function raised.

    Args:
        message: the last line of the traceback.
        where: ``file:line`` of the innermost frame.
        traceback: all of it.
    """

    message: str
    where: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return f"raised {self.message}"


@dataclass(frozen=True)
class TimedOut:
    """The function did not return in time, and its process was killed."""

    seconds: float

    def __str__(self) -> str:
        return f"timed out after {self.seconds:g} s"


@dataclass(frozen=True)
class Died:
    """The process ended inside the call: by ``exit_code``, or by a signal (then it is the negative signal
    number).
    """

    exit_code: int

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"process exited with code {self.exit_code}"
        try:
            return f"process killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"process killed by signal {-self.exit_code}"


Outcome = Returned | Raised | TimedOut | Died


def run_here(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Returned | Raised:
    """Call without isolation: exceptions become :class:`Raised`; nothing bounds the time."""
    try:
        return Returned(function(**arguments))
    except Exception as error:
        return raised(error)


def raised(error: BaseException) -> Raised:
    """What is kept of an exception."""
    last = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Raised(last[:1000], where, "".join(traceback.format_exception(error))[-8000:])


def child_main(fd: int, parent: int) -> None:
    """Read a function, then calls; answer each. Ends when the parent closes the socket or dies."""
    _die_with(parent)
    channel = socket.socket(fileno=fd)
    # A fork or a subprocess of the function must not hold the channel open.
    channel.set_inheritable(False)
    try:
        function = cloudpickle.loads(_receive(channel))
    except EOFError:
        return
    except BaseException as error:
        _answer(channel, raised(error))
        return
    _answer(channel, Returned(None))
    while True:
        try:
            frame = _receive(channel)
        except (EOFError, OSError):
            return
        try:
            outcome: Outcome = Returned(function(**cloudpickle.loads(frame)))
        except BaseException as error:  # sys.exit() in a reward function fails its row, like all else
            outcome = raised(error)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        _answer(channel, outcome)


def _answer(channel: socket.socket, outcome: Outcome) -> None:
    try:
        frame = cloudpickle.dumps(outcome)
    except BaseException as error:
        frame = cloudpickle.dumps(Raised(f"the result cannot be sent: {type(error).__name__}: {error}"[:1000]))
    if len(frame) > MAX_RESULT_BYTES:
        frame = cloudpickle.dumps(Raised(f"the result is too large: {len(frame)} bytes, at most {MAX_RESULT_BYTES}"))
    channel.sendall(to_frame(frame))


def _receive(channel: socket.socket) -> bytes:
    (size,) = _HEADER.unpack(_receive_exactly(channel, _HEADER.size))
    return _receive_exactly(channel, size)


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = channel.recv(min(1 << 20, size - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _die_with(parent: int) -> None:
    """End this process when the parent ends: by the kernel's signal where there is one (it works even while C
    code holds the interpreter), and by a thread that watches for being adopted.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="flowrl-parent-watch", daemon=True).start()
