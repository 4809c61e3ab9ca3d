"""Stopping a run: the first Ctrl-C or SIGTERM asks it to end, the second ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    """The signal that asked the run to stop, if any."""

    signal_number: int | None = None


class EndedAtOnce(KeyboardInterrupt):
    """A second signal came: end without a checkpoint."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None], at_once: Callable[[], bool] = lambda: False) -> Iterator[Stop]:
    """Inside the body the first Ctrl-C or SIGTERM sets the flag that it is given, and the second raises.

    Args:
        say: shows a sentence.
        at_once: asked at the first one, whether that raises already.

    In a thread that is not the main one nothing is done: signals are the main thread's business.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.signal_number is not None or at_once():
            raise EndedAtOnce(number)
        stop.signal_number = number
        # The signal may have come in the middle of a print, which cannot be entered twice.
        with contextlib.suppress(Exception):
            say(
                f"{signal.Signals(number).name}: finishing this step and writing a checkpoint; once more to end at once."
            )

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            # None: the handler was not set from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
