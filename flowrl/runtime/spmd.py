"""The spmd runtime: under torchrun every rank runs the flow.

All ranks interpret the Program side by side with equal batches. A call that holds a Model is a conversation of all ranks:
the engine deals its rows out and gathers the results. Any other call (a source, a reward function, a judge, a filter, an
advantage) runs once, on rank 0, and its result is given to the others: what it does to the world happens once, and all ranks
go on with the same bits. Rank 0 alone shows progress and writes the run folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from flowrl.errors import FlowError, RankError
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.progress import Progress as Display
from flowrl.runtime.ranks import DEADLINE, ONE_RANK, Ranks, next_run, tells, world_size
from flowrl.runtime.signals import EndedAtOnce, Stop, stop_on_signals
from flowrl.runtime.watch import Watch


class SpmdRuntime(LocalRuntime):
    """Runs a Program on all ranks that torchrun started; arguments as for LocalRuntime.

    SIGTERM or Ctrl-C on any rank ends the run on all of them after the same step, with a checkpoint.
    """

    @contextlib.contextmanager
    def stop_on_signals(self, display: Display) -> Iterator[Stop]:
        watch = self.ranks.watch
        if watch is None:
            with super().stop_on_signals(display) as stop:
                yield stop
            return

        def at_once() -> bool:
            """Whether torchrun ends this process because another one has failed."""
            watch.asked_to_stop = True
            return bool(watch.failure())

        # Nothing is said before all ranks have agreed: torchrun sends SIGTERM when a rank has died, too.
        with stop_on_signals(lambda text: None, at_once) as stop:
            yield stop

    def say_signal(self, display: Display, number: int) -> None:
        if self.ranks.size > 1:
            display.message(
                f"{signal.Signals(number).name}: all ranks end after step {self.state.step}, with a checkpoint."
            )


@contextlib.contextmanager
def joined(deadline: float | None = None) -> Iterator[Ranks]:
    """The ranks that torchrun started, watched over for the time of one run; a single rank where it did not.

    Args:
        deadline: seconds that one call may take; by default ``FLOWRL_DEADLINE``, else half an hour.

    Raises:
        RankError: the others do not come, or are gone.
        FlowError: ``FLOWRL_DEADLINE`` is not a number.
    """
    if world_size() == 1:
        yield ONE_RANK
        return
    next_run()
    deadline = deadline or deadline_of_environment()
    ranks = Ranks.join(deadline)
    watch = Watch(ranks.rank, ranks.size, deadline)
    _tell_once()
    with _quiet_logs() if not ranks.is_first else contextlib.nullcontext():
        try:
            yield replace(ranks, watch=watch)
        except BaseException as error:
            if not hasattr(error, "told_by"):
                watch.trouble(error)  # the others may wait for this rank, which comes no more
            raise
        finally:
            watch.close()


def deadline_of_environment() -> float:
    """Seconds from ``FLOWRL_DEADLINE``; half an hour where it is not set.

    Raises:
        FlowError: it is not a number of seconds.
    """
    text = os.environ.get("FLOWRL_DEADLINE", str(DEADLINE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise FlowError("FLOWRL_DEADLINE cannot be used", expected="seconds, more than 0", received=repr(text))
    return seconds


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Rank 0 says what all ranks would say."""
    logger = logging.getLogger("flowrl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def end_now(status: int = 1) -> NoReturn:
    """End this process without waiting for anybody: libraries say goodbye to ranks that are gone, and wait for an answer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


_hooked: list[Any] = []


def _tell_once() -> None:
    """An error that ends a script on all ranks is printed by one."""
    if _hooked:
        return
    previous = sys.excepthook
    _hooked.append(previous)

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        gone = isinstance(error, RankError)
        if tells(error):
            if gone:  # where it was noticed says nothing
                notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
                print(f"error: {error}{notes}", file=sys.stderr)
            else:
                previous(kind, error, traceback)
        if gone or isinstance(error, EndedAtOnce):
            end_now()

    sys.excepthook = hook
