"""When each unit runs: the timeline of the steady state, what idles in it, the cycle that sets its pace; and a simulator.

:func:`simulate` writes down the steady state itself: the earliest timeline in which every iteration is the one before, one
period later (Baccelli et al., "Synchronization and Linearity", 1992, §3.2.3). :func:`run_events` knows nothing of periods and
cycles: it starts cold, lets devices take their units in turn, and counts the versions of weights. Left to run, it reaches the
same pace; the tests hold the one against the other. All times are estimates: they are as good as the seconds of the units.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.compiler.mapping import Mapping, Slot
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.problem import Choice, Cost, Problem, waits

#: Two times closer than this share of the period are one.
_SAME = 1e-7
#: Of the period: what rounding may add to a sum of seconds.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Occupancy:
    """How a stretch of devices spends one period of the steady state.

    Args:
        pool, start, stop: devices ``start`` … ``stop − 1`` of a pool.
        busy: seconds in which a unit runs on them.
        idle: seconds of bubbles.
    """

    pool: int
    start: int
    stop: int
    busy: float
    idle: float

    @property
    def utilisation(self) -> float:
        """The share of the time in which they are busy."""
        return self.busy / (self.busy + self.idle) if self.busy + self.idle else 0.0


def simulate(problem: Problem, choices: Sequence[Choice], cost: Cost, iterations: int = 3) -> tuple[Slot, ...]:
    """The timeline of a few iterations in the steady state, by start.

    Args:
        choices: where each unit runs.
        cost: of these choices, as :func:`flowrl.compiler.problem.evaluate` gives it.
        iterations: periods in which the timeline is complete: in the last ones before the end, whatever runs is there. Where
            iterations overlap, those before are there too; and at least so many as the critical cycle spans.
    """
    starts = start_times(problem, choices, cost)
    stops = [start + seconds for start, seconds in zip(starts, cost.seconds, strict=True)]
    count = _warm_up(max(stops, default=0.0), cost.period) + max(iterations, cost.critical_span + 1)
    slots = [
        Slot(unit.label, i, starts[u] + i * cost.period, stops[u] + i * cost.period)
        for i in range(count)
        for u, unit in enumerate(problem.units)
    ]
    place = {unit.label: cost.order.index(u) for u, unit in enumerate(problem.units)}
    return tuple(sorted(slots, key=lambda slot: (slot.start, slot.iteration, place[slot.unit])))


def start_times(problem: Problem, choices: Sequence[Choice], cost: Cost) -> list[float]:
    """By unit, seconds from the start of an iteration: the longest path to it, where a lag of one iteration gives back one
    period. Nothing starts before its iteration does."""
    edges = waits(problem, [choice.mesh for choice in choices], cost.order)
    starts = [0.0] * len(problem.units)
    slack = _ROUNDING * cost.period
    for _ in range(len(starts) + 1):
        late = False
        for u, v, lag in edges:
            ready = starts[u] + cost.seconds[u] - lag * cost.period
            if ready > starts[v] + slack:
                starts[v], late = ready, True
        if not late:
            return starts
    raise AssertionError("the period is shorter than a cycle of units that wait for one another")


def warm_up(mapping: Mapping) -> int:
    """Of the iterations of the timeline, how many begin before it is complete: 0 where iterations do not overlap."""
    last = max((slot.stop for slot in mapping.slots if slot.iteration == 0), default=0.0)
    count = max((slot.iteration for slot in mapping.slots), default=0)
    return min(count, _warm_up(last, mapping.period))


def _warm_up(last: float, period: float) -> int:
    periods = last / period if period > 0 else 0.0
    return max(0, math.ceil(periods - _SAME) - 1) if math.isfinite(periods) else 0


def critical_slots(mapping: Mapping) -> tuple[Slot, ...]:
    """The critical cycle once around, each slot from where the one before stops, first in the first iteration that the
    timeline has complete; empty where the timeline does not have it."""
    at = {(slot.unit, slot.iteration): slot for slot in mapping.slots}
    first = warm_up(mapping)
    path: list[Slot] = []
    for label in mapping.critical:
        if not path:
            found = at.get((label, first))
        else:
            until = path[-1].stop
            following = (at.get((label, path[-1].iteration + lag)) for lag in range(mapping.critical_span + 1))
            near = (slot for slot in following if slot and abs(slot.start - until) <= _SAME * mapping.period)
            found = next(near, None)
        if found is None:
            return ()
        path.append(found)
    return tuple(path)


def occupancy(mapping: Mapping) -> tuple[Occupancy, ...]:
    """How each stretch of devices spends a period, in the order of ``mapping.stretches``."""
    seconds = {unit.label: unit.seconds for unit in mapping.units}
    busy = [math.fsum(seconds[label] for label in stretch.units) for stretch in mapping.stretches]
    return tuple(
        Occupancy(s.pool, s.start, s.stop, b, max(0.0, mapping.period - b))
        for s, b in zip(mapping.stretches, busy, strict=True)
    )


def utilisation(mapping: Mapping) -> float:
    """The share of all devices' time, those without a unit included, in which a unit runs on them."""
    devices = sum(pool.nodes * pool.gpus_per_node for pool in mapping.pools)
    busy = math.fsum((o.stop - o.start) * o.busy for o in occupancy(mapping))
    return busy / (devices * mapping.period) if devices and mapping.period else 0.0


# -- a simulator ----------------------------------------------------------------------------------------------------------


def run_events(
    problem: Problem,
    choices: Sequence[Choice],
    order: Sequence[int],
    seconds: Sequence[float],
    iterations: int,
    in_flight: int | None = None,
) -> tuple[Slot, ...]:
    """A run from its cold start, event by event: everything starts as soon as it may, all by the rules that a runtime keeps.

    A unit starts when all its devices are free and it is its turn on each, when its inputs of this iteration are there, when
    the version of the weights that it reads has been made, and, where it writes weights of which there is one copy in time,
    when all have read this version.

    Args:
        order: indices of units, as devices that they share take them.
        seconds: of each unit.
        iterations: how many.
        in_flight: iterations that may be begun before the oldest has ended; None for no limit. So many as there are units
            never slow a run down.

    Returns:
        What ran when, in seconds from the start, by start.
    """
    run = _Run(problem, [choice.mesh for choice in choices], order, iterations, in_flight or iterations)
    running: list[tuple[float, int]] = []
    slots: list[Slot] = []
    now = 0.0
    while True:
        while (u := run.next()) is not None:
            slots.append(Slot(problem.units[u].label, run.begun[u], now, now + seconds[u]))
            run.begin(u)
            heapq.heappush(running, (now + seconds[u], u))
        if not running:
            break
        now, u = heapq.heappop(running)
        run.end(u)
        while running and running[0][0] == now:
            run.end(heapq.heappop(running)[1])
    assert len(slots) == iterations * len(problem.units), "units that wait for one another within one iteration"
    return tuple(slots)


class _Run:
    """What has begun and ended of a run, and what may begin."""

    def __init__(
        self, problem: Problem, meshes: Sequence[Mesh], order: Sequence[int], iterations: int, in_flight: int
    ) -> None:
        self.problem, self.meshes, self.order = problem, meshes, order
        self.iterations, self.in_flight = iterations, in_flight
        self.begun = [0] * len(meshes)
        self.ended = [0] * len(meshes)
        #: Each stretch of devices: its units in turn, and how many turns it has given.
        self.turns: list[tuple[list[int], list[int]]] = []
        for pool in sorted({mesh.pool for mesh in meshes}):
            here = [mesh for mesh in meshes if mesh.pool == pool]
            ends = sorted({end for mesh in here for end in (mesh.start, mesh.stop)})
            for start, stop in itertools.pairwise(ends):
                on = [u for u in order if meshes[u].overlaps(Mesh(pool, start, stop - start))]
                self.turns.append((on, [0]))

    def next(self) -> int | None:
        """A unit that may begin now."""
        return next((u for u in self.order if self._may(u)), None)

    def begin(self, u: int) -> None:
        self.begun[u] += 1

    def end(self, u: int) -> None:
        self.ended[u] += 1
        for on, turn in self.turns:
            if u in on:
                turn[0] += 1

    def _may(self, u: int) -> bool:
        i = self.begun[u]
        if i > self.ended[u] or i >= min(self.iterations, min(self.ended) + self.in_flight):
            return False
        if any(u in on and on[turn[0] % len(on)] != u for on, turn in self.turns):
            return False
        if any(v == u and self.ended[before] <= i for before, v in self.problem.data):
            return False
        for edge in self.problem.weights:
            if edge.reader == u and self.ended[edge.writer] < i - edge.staleness:
                return False
            if edge.writer == u and edge.staleness == 0 and self.ended[edge.reader] <= i:
                return False
        return True
