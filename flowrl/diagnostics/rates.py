"""From repetitions to a rate: warm up, repeat for a while, take the median and say how far the repetitions lay apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.calibration import UNITS, Condition, Rate

Clock = Callable[[], float]


@dataclass(frozen=True)
class Effort:
    """How long one thing is measured.

    Args:
        seconds: after the least number of repetitions, it is repeated until so much time was measured.
        min_repetitions: timed at least, however long they take.
        max_repetitions: at most.
        warm_up: repetitions that do not count; fewer where they take longer than ``seconds``, but at least one.
        longest: seconds that one repetition may be predicted to take; what would take longer is skipped, and said.
    """

    seconds: float = 1.0
    min_repetitions: int = 3
    max_repetitions: int = 50
    warm_up: int = 2
    longest: float = 3.0


#: Of ``flowrl calibrate``, and of ``--quick``.
FULL = Effort()
QUICK = Effort(seconds=0.2, max_repetitions=20, warm_up=1, longest=0.5)


def repeat(
    work: Callable[[], object],
    effort: Effort,
    *,
    clock: Clock = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> list[float]:
    """The seconds that each repetition took.

    Args:
        wait: until the device has done what it was asked: before the clock is read, each time.
    """
    begun = clock()
    for _ in range(effort.warm_up):
        work()
        wait()
        if clock() - begun > effort.seconds:
            break
    taken: list[float] = []
    while len(taken) < effort.min_repetitions or (sum(taken) < effort.seconds and len(taken) < effort.max_repetitions):
        start = clock()
        work()
        wait()
        taken.append(clock() - start)
    return taken


def rate(name: str, work: int, seconds: Sequence[float], **conditions: Condition) -> Rate:
    """The rate of repetitions that each did ``work`` in so many seconds.

    Args:
        work: FLOP, bytes or tokens of one repetition, as :data:`flowrl.calibration.UNITS` says.
        seconds: of each; a clock that does not move between two readings is taken at its resolution.
    """
    resolution = time.get_clock_info("perf_counter").resolution
    times = [max(s, resolution) for s in seconds]
    if len(times) > 1:
        quick, middle, late = statistics.quantiles(times, n=4, method="inclusive")
    else:
        quick = middle = late = times[0]
    return Rate(
        name=name,
        unit=UNITS[name][0],
        value=work / middle,
        low=work / late,
        high=work / quick,
        repetitions=len(times),
        work=work,
        conditions=conditions,
    )
