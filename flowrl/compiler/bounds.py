"""What no placement can beat: lower bounds of the time of an iteration.

Three relaxations of :func:`flowrl.compiler.problem.evaluate`; the largest is the bound.

- **Cycle**: every unit at its fastest, devices without end; who waits for whom remains.
- **Area**: every unit at its fewest device-seconds; N devices give N device-seconds a second.
- **Chain**: units that can never run at the same time (they lie on one cycle that spans one iteration) run one after
  another, and while one of them runs on n devices, the other N − n can only do what may run beside it. Over all ways to run
  the units of a chain, the least of: their times, and the work that finds no place beside them spread over all devices. It is
  the dual argument of moldable scheduling (Turek, Wolf, Yu, "Approximate algorithms for scheduling parallelizable tasks",
  1992) with the idle time that precedence forces.

A bound may be asked for only those placements that take less than some time: then ways to run a unit that take too long
for it are left out, and the bound is closer.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowrl.compiler.cycle_time import cycle_time
from flowrl.compiler.problem import Problem

#: Points of a unit's curve of time over devices that a chain is tried with; more are merged, towards the optimistic side.
POINTS = 12
#: Chains of at most so many units are tried.
LONGEST_CHAIN = 3

Floats = NDArray[np.float64]


def lower_bound(problem: Problem, below: float = math.inf) -> float:
    """Seconds that no assignment beats which takes less than ``below``; at most ``below``.

    Raises:
        ValueError: a unit has no option.
    """
    fastest = [min(o.seconds for o in options) for options in problem.options]
    edges = problem.dependencies
    bound = cycle_time(fastest, edges)[0]
    if bound >= below:
        return below
    curves = []
    for u, options in enumerate(problem.options):
        curve = _curve([(o.seconds, o.size) for o in options])
        curve = _quick_enough(curve, fastest, edges, u, below)
        if not curve:
            return below
        curves.append(curve)
    num_devices = problem.cluster.num_devices
    areas = [min(t * n for t, n in curve) for curve in curves]
    bound = max(bound, sum(areas) / num_devices)
    exclusive = never_together(problem)
    chains = [c for size in range(1, LONGEST_CHAIN + 1) for c in itertools.combinations(range(len(fastest)), size)]
    merged = [_merge(curve) for curve in curves]
    for chain in chains:
        if all(exclusive[u][v] for u, v in itertools.combinations(chain, 2)):
            bound = max(bound, _chain_bound(chain, merged, areas, exclusive, num_devices))
    return min(bound, below)


def never_together(problem: Problem) -> list[list[bool]]:
    """By pair of units, whether they lie on a cycle that spans one iteration, so that they can never run at the same time."""
    count = len(problem.units)
    lags = [[math.inf] * count for _ in range(count)]
    for u, v, lag in problem.dependencies:
        if u != v:
            lags[u][v] = min(lags[u][v], lag)
    for k, i, j in itertools.product(range(count), repeat=3):
        lags[i][j] = min(lags[i][j], lags[i][k] + lags[k][j])
    return [[i != j and lags[i][j] + lags[j][i] <= 1 for j in range(count)] for i in range(count)]


def _quick_enough(
    curve: list[tuple[float, int]],
    fastest: Sequence[float],
    edges: Sequence[tuple[int, int, int]],
    u: int,
    below: float,
) -> list[tuple[float, int]]:
    """The points of a unit's curve with which an iteration can take less than ``below``: from some point on, as more devices
    are faster."""

    def fits(point: tuple[float, int]) -> bool:
        return cycle_time([point[0] if v == u else t for v, t in enumerate(fastest)], edges)[0] < below

    return curve if math.isinf(below) else curve[bisect.bisect_left(curve, True, key=fits) :]


def _curve(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The (seconds, devices) that no other point beats in both, the fewest devices first."""
    best: list[tuple[float, int]] = []
    for seconds, size in sorted(points, key=lambda p: (p[1], p[0])):
        if not best or seconds < best[-1][0]:
            best.append((seconds, size))
    return best


def _merge(curve: Sequence[tuple[float, int]]) -> tuple[Floats, Floats]:
    """(seconds, devices) of at most POINTS points; merged ones take the time of the fastest and the devices of the fewest."""
    groups = np.array_split(np.arange(len(curve)), min(POINTS, len(curve)))
    seconds = np.array([min(curve[i][0] for i in group) for group in groups])
    return seconds, np.array([min(curve[i][1] for i in group) for group in groups], dtype=np.float64)


def _chain_bound(
    chain: tuple[int, ...],
    curves: Sequence[tuple[Floats, Floats]],
    areas: Sequence[float],
    exclusive: Sequence[Sequence[bool]],
    num_devices: int,
) -> float:
    """The least of the chain's times plus the others' work that finds no place beside it, over all ways to run the chain."""
    shape = [len(curves[u][0]) for u in chain]
    grids = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    total = np.zeros(shape)
    free = []
    for u, index in zip(chain, grids, strict=True):
        seconds, devices = curves[u][0][index], curves[u][1][index]
        total = total + seconds
        free.append((num_devices - devices) * seconds)
    others = [v for v in range(len(areas)) if v not in chain]
    absorbed = np.zeros(shape)
    usable = [False] * len(chain)
    for v in others:
        beside = [k for k, u in enumerate(chain) if not exclusive[u][v]]
        for k in beside:
            usable[k] = True
        room = sum((free[k] for k in beside), np.zeros(shape))
        absorbed = absorbed + np.minimum(areas[v], room)
    room = sum((f for f, used in zip(free, usable, strict=True) if used), np.zeros(shape))
    left = sum(areas[v] for v in others) - np.minimum(absorbed, room)
    return float(np.min(total + np.maximum(0.0, left) / num_devices))
