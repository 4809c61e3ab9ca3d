"""Watching over the ranks of a run: one that dies, hangs or raises ends the run for all, with one message.

Every rank says in torchrun's store what it is at, and a thread of each says once a second that its process is alive. The
same thread ends the process when a call takes longer than the deadline, and when another rank has failed or is dead and this
one does not come back from waiting for it. torchrun ends the others when one process ends with an error. Whether a process
of this machine is dead is asked of the system; of another machine's, a long silence says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flowrl
from flowrl.errors import FlowError, RankError
from flowrl.runtime.ranks import text_of
from flowrl.runtime.torchrun import claim, run_store

#: Seconds in which ranks that hear of another's error get to the end of what they are at, and raise themselves.
GRACE = 5.0
#: After SIGTERM, a rank that has been silent for so many seconds is the reason for it. torchrun waits 30.
SILENT = 10.0


class Watch:
    """Watches over this process and, through the store, the others.

    Args:
        rank: this process.
        size: how many there are.
        deadline: seconds that one thing may take.
    """

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.interval = max(0.05, min(1.0, deadline / 10))
        #: Called with the message before the process is ended.
        self.on_end: Callable[[str], None] = lambda text: None
        #: Set when a signal has come.
        self.asked_to_stop = False
        #: Set when an error is on its way that ends the run.
        self.ending = False
        self._store, self._thread_store = run_store(), run_store().clone()
        self._number, self._what, self._since = 0, "the start", time.monotonic()
        self._beats = 0
        self._failed_since: float | None = None
        self._own_failure = False
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._dead_since: float | None = None
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowrl-watch", daemon=True)
        self._store.set(f"process/{rank}", json.dumps([_machine(), os.getpid()]))
        self.enter("the start")
        self._thread.start()

    def enter(self, what: str) -> None:
        """This rank is at this now."""
        if self._closed.is_set():
            return
        self._number, self._what, self._since = self._number + 1, what, time.monotonic()
        try:
            self._store.set(f"at/{self.rank}", json.dumps([self._number, what]))
        except RuntimeError as error:
            raise RankError(
                f"torchrun, which started rank {self.rank}, is gone: it was in {what}",
                expected="the process that started the ranks, until they end",
                received=str(error),
            ) from error

    def trouble(self, error: BaseException) -> None:
        """Tell the others that this rank has raised."""
        self.ending = True
        if self._closed.is_set():
            return
        self._own_failure = True
        if not isinstance(error, Exception):
            place = traceback.extract_tb(error.__traceback__)[-1:]
            where = f" at {place[0].filename}:{place[0].lineno}" if place else ""
            self._fail(f"Rank {self.rank} was ended in {self._what}: {text_of(error)}{where}.")
            return
        if isinstance(error, RankError):
            self._fail(str(error))
            return
        if isinstance(error, FlowError):
            text = str(error) + "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        else:  # somebody's code: its lines say more
            lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
            text = text_of(error) + "\n" + "\n".join(f"  {line}" for line in lines)
        self._fail(f"Rank {self.rank} raised in {self._what}. {text}")

    def failure(self) -> str:
        """Why the run ends on all ranks, where one has failed; else ""."""
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        except Exception as error:
            return f"torchrun is gone ({error})"

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def leave(self) -> None:
        """Watch no longer, and let nobody take the end of this process for a failure."""
        if not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # torchrun is gone, and nobody watches
                self._store.set(f"left/{self.rank}", "")
        self.close()

    def missing(self) -> str:
        """A sentence that names the ranks that are gone and what they were at; "" where all are alive."""
        with contextlib.suppress(
            Exception
        ):  # torchrun is gone with its store, and who asked has an error to raise already
            before, until = self._all_beats(self._store), time.monotonic() + 3 * self.interval
            while time.monotonic() < until:
                gone = self._dead(self._store)
                if gone:
                    return self._sentence(self._store, gone, "is gone")
                time.sleep(0.05)
            after = self._all_beats(self._store)
            gone = [r for r in self._others if before[r] == after[r]]
            if gone:
                return self._sentence(self._store, gone, "is gone")
        return ""

    def end_if_lost(self) -> None:
        """Called where a signal has come that would end this process: if it came because another rank is gone or has failed, say
        so, and end."""
        until = (
            time.monotonic() + 2 * self.interval
        )  # a dead process is found dead in an instant, an error said in another
        while time.monotonic() < until:
            text = self.failure()
            if not text:
                gone = self._dead(self._store)
                text = self._sentence(self._store, gone, "is gone") if gone else ""
            if text:
                self._end(text)
            time.sleep(0.05)

    # -- the thread -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(self.interval):
            try:
                self._look()
            except Exception as error:  # the store is torchrun's
                if not self._closed.is_set():
                    self._end(f"Rank {self.rank} in {self._what}: torchrun is gone ({error})".splitlines()[0])

    def _look(self) -> None:
        store = self._thread_store
        self._beat(store)
        now = time.monotonic()
        if store.check(["failed"]):
            self._failed_since = self._failed_since or now
            # The one that failed says so; the others say it for a process that can no more.
            if now - self._failed_since > GRACE * (1 if self._own_failure else 1.5):
                self._end(store.get("failed").decode())
        elif now - self._since > self.deadline:
            self._overdue(store)
        else:
            self._look_for_the_dead(store, now)

    def _beat(self, store: Any) -> None:
        self._beats += 1
        store.set(f"beat/{self.rank}", str(self._beats))

    def _look_for_the_dead(self, store: Any, now: float) -> None:
        dead = self._dead(store)
        self._dead_since = (self._dead_since or now) if dead else None
        # A conversation with it fails at once, and then the main thread says so; it may be in the middle of something else.
        patience = 2 * self.interval if self.asked_to_stop else GRACE
        if self._dead_since is not None and now - self._dead_since > patience:
            self._end(self._sentence(store, dead, "is gone"))
        if self.asked_to_stop:
            silent = [r for r in self._others if self._silence(store, r, now) > SILENT and not self._has_left(store, r)]
            if silent:
                self._end(self._sentence(store, silent, "is gone"))

    def _overdue(self, store: Any) -> None:
        store.set(f"stuck/{self.rank}", json.dumps([self._number, *self._place()]))
        before = self._all_beats(store)
        for _ in range(3):  # the others are late as well
            self._closed.wait(self.interval)
            self._beat(store)
        if self._closed.is_set() or store.check(["failed"]):
            return
        stuck: dict[int, list[Any]] = {}
        for rank in range(self.size):
            if store.check([f"stuck/{rank}"]):
                stuck[rank] = json.loads(store.get(f"stuck/{rank}"))
        at = self._positions(store)
        furthest = max(number for number, _ in at.values())
        guilty = [r for r in at if at[r][0] < furthest or r not in stuck or not stuck[r][2]]
        if not guilty:
            guilty = sorted(at)
        after = self._all_beats(store)
        silent = [r for r in self._others if before[r] == after[r]]
        where = "".join(f"\n  rank {rank} is at {stuck[rank][1]}" for rank in sorted(stuck))
        where += "".join(f"\n  rank {rank} gives no sign of life: its process is stopped or gone" for rank in silent)
        self._end(self._sentence(store, guilty, f"has not come back within {self.deadline:g} s") + where)

    def _end(self, text: str) -> None:
        """End this process, with one message of all ranks. Whatever else fails here (the store, a closed stderr, a full disk)
        must not keep it alive."""
        if self._closed.is_set():
            return
        with contextlib.suppress(Exception):
            self._fail(text)
        if claim():
            with contextlib.suppress(Exception):
                print(f"error: {text}", file=sys.stderr, flush=True)
        else:
            time.sleep(0.5)  # the main thread may be the one that says it
        with contextlib.suppress(Exception):
            self.on_end(text)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(1)  # the main thread waits inside of a library, and cannot be told

    # -- the store ------------------------------------------------------------------------------------------------------------

    def _fail(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # torchrun is gone, and the others know
            if self._store.add("failures", 1) == 1:
                self._store.set("failed", text)

    def _positions(self, store: Any) -> dict[int, tuple[int, str]]:
        found: dict[int, tuple[int, str]] = {}
        for rank in range(self.size):
            known = store.check([f"at/{rank}"])
            number, what = json.loads(store.get(f"at/{rank}")) if known else (0, "the start")
            found[rank] = (number, what)
        return found

    @property
    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _has_left(self, store: Any, rank: int) -> bool:
        return store.check([f"left/{rank}"])

    def _dead(self, store: Any) -> list[int]:
        """Ranks whose processes ended without leaving the run; only those of this machine can be asked for."""
        dead = []
        for rank in self._others:
            if store.check([f"process/{rank}"]) and not self._has_left(store, rank):
                machine, pid = json.loads(store.get(f"process/{rank}"))
                if machine == _machine() and not _is_alive(pid):
                    dead.append(rank)
        return dead

    def _all_beats(self, store: Any) -> list[bytes]:
        return [store.get(f"beat/{r}") if store.check([f"beat/{r}"]) else b"" for r in range(self.size)]

    def _silence(self, store: Any, rank: int, now: float) -> float:
        """Seconds since a rank was heard of."""
        beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = (beat, now)
        return now - self._seen[rank][1]

    def _sentence(self, store: Any, ranks: list[int], what: str) -> str:
        at = self._positions(store)
        return "; ".join(f"Rank {r} {what}: it was in {at[r][1]}" for r in ranks) + "."

    def _place(self) -> tuple[str, bool]:
        """Where the main thread is: the innermost line that is neither ours nor a library's; and whether it is inside of
        torch, where ranks wait for each other."""
        frame = sys._current_frames().get(self._main or 0)
        lines, innermost = [], ""
        while frame is not None:
            file = frame.f_code.co_filename
            innermost = innermost or file
            lines.append((file, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"))
            frame = frame.f_back
        theirs = [text for file, text in lines if not file.startswith(_LIBRARIES)]
        text = (
            theirs[0] if theirs and not innermost.startswith(_TORCH) else lines[0][1] if lines else "no line of Python"
        )
        return text, innermost.startswith(_TORCH)


@functools.cache
def _machine() -> str:
    """Names the processes that this one can see: this machine since it was started, and the container."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        found += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(found)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked how does not."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_TORCH = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
_LIBRARIES = (
    str(Path(flowrl.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    "<frozen",
)
