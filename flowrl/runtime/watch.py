"""Watching over the ranks of a run: one that dies, hangs or raises ends the run for all, with one message.

Every rank says in torchrun's store what it is at, and a thread of each says once a second that its process is alive. The
same thread ends the process when a call takes longer than the deadline, and when another rank has failed and this one does
not come back from waiting for it. torchrun ends the others when one process ends with an error.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from flowrl.runtime.ranks import claim, run_store

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
        self._store, self._thread_store = run_store(), run_store().clone()
        self._number, self._what, self._since = 0, "the start", time.monotonic()
        self._beats = 0
        self._failed_since: float | None = None
        self._own_failure = False
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowrl-watch", daemon=True)
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
        if self._closed.is_set():
            return
        self._own_failure = True
        if not isinstance(error, Exception):
            self._fail(f"Rank {self.rank} was ended in {self._what}.")
            return
        if isinstance(error, RankError):
            self._fail(str(error))
            return
        if isinstance(error, FlowError):
            text = str(error) + "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        else:  # somebody's code: its lines say more
            lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
            text = f"{type(error).__name__}: {error}\n" + "\n".join(f"  {line}" for line in lines)
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

    def missing(self) -> str:
        """A sentence that names the ranks that are gone and what they were at; "" where all are alive."""
        with contextlib.suppress(Exception):
            before = self._all_beats(self._store)
            time.sleep(3 * self.interval)
            after = self._all_beats(self._store)
            gone = [r for r in range(self.size) if r != self.rank and before[r] == after[r]]
            if gone:
                return self._sentence(self._store, gone, "is gone")
        return ""

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
        self._beats += 1
        store.set(f"beat/{self.rank}", str(self._beats))
        now = time.monotonic()
        if store.check(["failed"]):
            self._failed_since = self._failed_since or now
            # The one that failed says so; the others say it for a process that can no more.
            if now - self._failed_since > GRACE * (1 if self._own_failure else 1.5):
                self._end(store.get("failed").decode())
        elif now - self._since > self.deadline:
            self._overdue(store)
        elif self.asked_to_stop:
            silent = [r for r in range(self.size) if r != self.rank and self._silence(store, r, now) > SILENT]
            if silent:
                self._end(self._sentence(store, silent, "is gone"))

    def _overdue(self, store: Any) -> None:
        store.set(f"stuck/{self.rank}", json.dumps([self._number, *self._place()]))
        self._closed.wait(3 * self.interval)  # the others are late as well
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
        where = "".join(f"\n  rank {rank} is at {stuck[rank][1]}" for rank in sorted(stuck))
        self._end(self._sentence(store, guilty, f"has not come back within {self.deadline:g} s") + where)

    def _end(self, text: str) -> None:
        """End this process, with one message of all ranks."""
        if self._closed.is_set():
            return
        with contextlib.suppress(Exception):
            self._fail(text)
        if claim():
            with contextlib.suppress(Exception):
                print(f"error: {text}", file=sys.stderr, flush=True)
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


_TORCH = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
_LIBRARIES = (
    str(Path(flowrl.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    "<frozen",
)
