"""Run a user's function in processes of its own, with a deadline for each call.

Hung user code is killed by killing its process: a signal handler or a thread cannot stop a loop inside C (a
regular expression, a computer algebra system). So each :class:`IsolatedWorker` is a fresh Python: not a fork
(no locks, no GPU context), and not ``multiprocessing``'s spawn (which would run the user's ``__main__``
again). The function travels by cloudpickle, so closures, lambdas and functions of a notebook or script work.

Parent and child talk over a socket pair that nothing else writes to, so what the function prints goes where
prints go. A call is timed from the moment its worker is ready for it: no call pays for starting a process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle

from flowrl.errors import FlowError
from flowrl.runtime.isolated_child import (
    Died,
    Outcome,
    Raised,
    Returned,
    TimedOut,
    dump_function,
    raised,
    run_here,
    take_frame,
    to_frame,
)

__all__ = ["Died", "IsolatedPool", "IsolatedWorker", "Outcome", "Raised", "Returned", "TimedOut", "run_here"]

#: How long a process may take to start and to import what the function needs.
START_TIMEOUT = 120.0
#: Answers arrive as events; this is only how often the death of a silent process is looked for.
_POLL_SECONDS = 0.2


class IsolatedWorker:
    """One process that runs one function. Driven by :class:`IsolatedPool`."""

    def __init__(self, frame: bytes) -> None:
        """
        Args:
            frame: the pickled function.
        """
        ours, theirs = socket.socketpair()
        try:
            self.process = _spawner().submit(_start_process, theirs).result()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.socket = ours
        self.ready = False
        self.call: int | None = None
        self.deadline = time.monotonic() + START_TIMEOUT
        self.open = True
        self._out = bytearray(to_frame(frame))
        self._in = bytearray()

    def send(self, call: int, frame: bytes, timeout: float) -> None:
        """Begin a call; its clock runs from here."""
        assert self.ready and self.call is None and not self._out
        self.call = call
        self.deadline = time.monotonic() + timeout
        self._out += to_frame(frame)
        self.write()

    @property
    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def write(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                del self._out[: self.socket.send(self._out)]

    def read(self) -> bytes | None:
        """The next whole frame, where it has arrived. A dead process shows in :meth:`exit_code`, not here."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while chunk := self.socket.recv(1 << 20):
                self._in += chunk
            self.open = False
        return take_frame(self._in)

    def exit_code(self) -> int | None:
        """How the process ended; None while it runs. Leaves it unreaped, so that its group's id stays its
        own.
        """
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self.process.poll()
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return self.process.returncode or 0
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def kill(self) -> None:
        """End the process and everything in its group. Safe to call twice."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.socket.close()


class IsolatedPool:
    """Workers that run one function on many arguments. Results come in order; blame is per call.

    Args:
        function: called with keyword arguments; it and what it returns must be picklable by cloudpickle.
        timeout: seconds a call may take.
        num_workers: processes.
        name: how errors call the function; by default its own name.

    A worker whose call ran out of time is killed with its process group and started anew when it is needed.
    The processes end with :meth:`close`, or with the parent, however it dies.

    Raises:
        FlowError: the function cannot be sent to another process, or a process cannot start with it.

    Example::

        >>> pool = IsolatedPool(lambda x: 1 / x, timeout=1.0)
        >>> pool.map([{"x": 2}, {"x": 0}])
        [Returned(value=0.5), Raised(message='ZeroDivisionError: division by zero', ...)]
    """

    def __init__(self, function: Callable[..., Any], *, timeout: float, num_workers: int = 1, name: str = "") -> None:
        self.timeout = timeout
        self.num_workers = num_workers
        self.name = name or getattr(function, "__name__", type(function).__name__)
        try:
            self._function = dump_function(function)
        except Exception as error:
            raise FlowError(
                f"The function {self.name!r} cannot be sent to a process of its own",
                expected="a function that cloudpickle can pickle, with all that it refers to",
                received=f"{type(error).__name__}: {error}",
                do="open clients, locks and files inside the function, or set isolate=False",
            ) from error
        self._workers: list[IsolatedWorker] = []
        self._lock = threading.Lock()
        _open_pools.add(self)

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """The outcome of the function on each call's keyword arguments, in order."""
        with self._lock:
            try:
                return self._map(calls)
            except BaseException:  # a worker in the middle of a call would answer into the next one
                self._kill([w for w in self._workers if w.call is not None or not w.ready])
                raise

    def close(self) -> None:
        """End all processes. The pool may be used again; it then starts new ones."""
        self._kill(list(self._workers))

    def _kill(self, workers: Iterable[IsolatedWorker]) -> None:
        for worker in workers:
            worker.kill()
            if worker in self._workers:
                self._workers.remove(worker)

    def _map(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        while waiting or any(w.call is not None for w in self._workers):
            self._assign(waiting, calls, outcomes)
            self._wait()
            for worker in list(self._workers):
                self._advance(worker, outcomes)
        done = [o for o in outcomes if o is not None]
        if len(done) != len(calls):
            raise FlowError(f"The processes of {self.name!r} were closed in the middle of its calls")
        return done

    def _assign(self, waiting: deque[int], calls: Sequence[Mapping[str, Any]], outcomes: list[Outcome | None]) -> None:
        """Give ready workers something to do; start as many as there is work for."""
        for worker in list(self._workers):
            while waiting and worker.ready and worker.call is None:
                if worker.exit_code() is not None:  # died between calls: no call is to blame
                    self._kill([worker])
                    break
                call = waiting.popleft()
                try:
                    frame = cloudpickle.dumps(dict(calls[call]))
                except Exception as error:
                    outcomes[call] = raised(error)
                    continue
                worker.send(call, frame, self.timeout)
        starting = sum(not w.ready for w in self._workers)
        while len(self._workers) < self.num_workers and starting < len(waiting):
            self._workers.append(IsolatedWorker(self._function))
            starting += 1

    def _wait(self) -> None:
        """Until a worker has something to say, a deadline passes, or it is time to look for the dead."""
        busy = [w for w in self._workers if w.call is not None or not w.ready]
        if not busy:
            return
        until = min(w.deadline for w in busy)
        with selectors.DefaultSelector() as selector:  # with nothing registered, select() only waits
            for worker in busy:
                if worker.open:  # a closed one is always readable; its process is about to be found dead
                    selector.register(worker.socket, worker.events)
            selector.select(max(0.0, min(_POLL_SECONDS, until - time.monotonic())))

    def _advance(self, worker: IsolatedWorker, outcomes: list[Outcome | None]) -> None:
        """Take a worker's answer, or find out that there will be none."""
        worker.write()
        code = worker.exit_code()  # before reading: what a process wrote before it ended must not be lost
        frame = worker.read()
        if frame is not None:
            answer = cloudpickle.loads(frame)
            if not worker.ready:
                self._take_ready(worker, answer)
            elif worker.call is not None:
                outcomes[worker.call] = answer
                worker.call = None
        elif code is not None:
            call = worker.call
            self._kill([worker])
            if call is not None:
                outcomes[call] = Died(code)
            elif not worker.ready:
                raise self._start_error(str(Died(code)))
        elif (worker.call is not None or not worker.ready) and time.monotonic() > worker.deadline:
            call = worker.call
            self._kill([worker])
            if call is None:
                raise self._start_error(f"not ready after {START_TIMEOUT:g} s")
            outcomes[call] = TimedOut(self.timeout)

    def _take_ready(self, worker: IsolatedWorker, answer: Outcome) -> None:
        if isinstance(answer, Raised):
            self._kill([worker])
            raise self._start_error(answer.message)
        worker.ready = True

    def _start_error(self, reason: str) -> FlowError:
        return FlowError(
            f"A process for the function {self.name!r} cannot start",
            expected="a function whose module another Python process can import",
            received=reason,
            do="put its module on sys.path, define it in the script itself, or set isolate=False",
        )


_open_pools: weakref.WeakSet[IsolatedPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


_spawners: dict[int, ThreadPoolExecutor] = {}


def _spawner() -> ThreadPoolExecutor:
    """The thread that starts processes. It lives as long as this process does: the kernel's parent-death
    signal is sent when the *thread* that started a child ends.
    """
    if os.getpid() not in _spawners:
        _spawners[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="flowrl-isolation")
    return _spawners[os.getpid()]


def _start_process(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # The child gets our sys.path before it imports anything: a script's folder, a notebook's.
    code = (
        "import json, sys; args = json.loads(sys.argv[1]); sys.path[:] = args['path'];"
        "from flowrl.runtime.isolated_child import child_main; child_main(args['fd'], args['parent'])"
    )
    arguments = {"path": [p or os.getcwd() for p in sys.path], "fd": theirs.fileno(), "parent": os.getpid()}
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        # Its own session: Ctrl-C reaches the parent alone, and one signal ends the whole group.
        start_new_session=True,
    )
