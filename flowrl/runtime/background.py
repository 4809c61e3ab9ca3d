"""Work beside the training: one piece at a time, on a thread of this process, with a conversation of its own between ranks.

A checkpoint is written so. Whoever began the work must wait for it: an error of it is raised there, on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from flowrl.runtime.ranks import Ranks, group_of


class Background:
    """Runs one piece of work at a time; every rank begins the same ones in the same order.

    Args:
        ranks: of the run. The work is given others: the same processes, over a group that nobody else speaks on.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._others = ranks
        if ranks.size > 1:
            # Nothing that two threads say may be taken one for the other, agreement least of all.
            group, agreement = (
                group_of([range(ranks.size)], ranks.deadline, use) for use in ("background", "background agreement")
            )
            # It does not say what this rank is at: the training does that.
            self._others = replace(ranks, group=group, agreement=agreement, watch=None)
        self._running: Future[None] | None = None

    def begin(self, work: Callable[[Ranks], object]) -> None:
        """Start work, after what was begun before is done.

        Raises:
            Exception: of what was begun before.
        """
        self.wait()
        running: Future[None] = Future()

        def run() -> None:
            try:
                work(self._others)
                running.set_result(None)
            except BaseException as error:  # whatever it is, who waits is told
                running.set_exception(error)

        self._running = running
        # A daemon: a process that ends because another rank is gone waits for no conversation with it.
        threading.Thread(target=run, name="flowrl-background", daemon=True).start()

    @property
    def has_failed(self) -> bool:
        """Whether the work has ended with an error on this rank; :meth:`wait` raises it."""
        running = self._running
        return running is not None and running.done() and running.exception() is not None

    def wait(self) -> None:
        """Wait for what was begun. Every rank calls it.

        Raises:
            Exception: of the work, on every rank.
        """
        running, self._running = self._running, None
        if running is not None:
            self._ranks.together(running.result)

    def abandon(self, seconds: float) -> None:
        """Give what was begun some time to end, where this process ends with another error; any thread may call it."""
        running, self._running = self._running, None
        if running is not None:
            try:
                running.exception(timeout=seconds)
            except TimeoutError:
                return
