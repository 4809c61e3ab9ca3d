"""Branch and bound over all assignments: proves that a placement is the best one, or finds a better one."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.compiler.cycle_time import cycle_time
from flowrl.compiler.problem import Choice, Problem
from flowrl.compiler.search import Search

#: A placement must be better by this share to count.
TOLERANCE = 1e-9


class BranchAndBound:
    """Assigns units one after another, the one with most work first, and leaves out what cannot beat the best so far.

    A partial assignment is left out when one of these is at least the best time: the cycle time with all others at their
    fastest; the work of the units of any device; the least work of all over all devices. Or when its weights and optimisers
    alone are too much for a device.

    Args:
        search: rates, and knows the best so far.
        budget: partial assignments that may be looked at.
    """

    def __init__(self, search: Search, budget: int) -> None:
        self.search, self.budget = search, budget
        problem = self.problem = search.problem
        self.looked_at = 0
        self.fastest = [min(o.seconds for o in options) for options in problem.options]
        self.least_work = [min(o.seconds * o.size for o in options) for options in problem.options]
        self.edges = problem.dependencies
        self.order = sorted(range(len(problem.units)), key=lambda u: (-self.least_work[u], u))
        self.ways = [_ways(search, u) for u in range(len(problem.units))]
        self.read = {e.reader for e in problem.weights}

    def run(self) -> bool:
        """Whether everything was tried or left out; the best is in ``search.best``."""
        return self._descend({}, {})

    def _descend(self, chosen: dict[int, Choice], load: dict[tuple[int, int], float]) -> bool:
        if len(chosen) == len(self.order):
            self.search.rate(tuple(chosen[u] for u in range(len(self.order))))
            return True
        u = self.order[len(chosen)]
        for choice in self.ways[u]:
            self.looked_at += 1
            if self.looked_at > self.budget:
                return False
            heavier = dict(load)
            for device in range(choice.mesh.start, choice.mesh.stop):
                key = (choice.mesh.pool, device)
                heavier[key] = heavier.get(key, 0.0) + choice.option.seconds
            deeper = {**chosen, u: choice}
            if self._hopeless(deeper, heavier, choice):
                continue
            if not self._descend(deeper, heavier):
                return False
        return True

    def _hopeless(self, chosen: dict[int, Choice], load: dict[tuple[int, int], float], newest: Choice) -> bool:
        best = self.search.best
        if best is not None and best[0][0] == 0:
            limit = best[0][1] * (1 - TOLERANCE)
            stretch = range(newest.mesh.start, newest.mesh.stop)
            if max(load[newest.mesh.pool, device] for device in stretch) >= limit:
                return True
            work = sum(
                chosen[u].option.seconds * chosen[u].mesh.size if u in chosen else self.least_work[u]
                for u in range(len(self.order))
            )
            if work / self.problem.cluster.num_devices >= limit:
                return True
            seconds = [chosen[u].option.seconds if u in chosen else self.fastest[u] for u in range(len(self.order))]
            if cycle_time(seconds, self.edges)[0] >= limit:
                return True
        return self._too_full(chosen, newest)

    def _too_full(self, chosen: dict[int, Choice], newest: Choice) -> bool:
        """Whether what is surely held, and the largest transient, are too much for a device of the newest mesh."""
        limit = self.problem.memory(newest.mesh.pool)
        for device in range(newest.mesh.start, newest.mesh.stop):
            held: dict[object, float] = {}
            transient = 0.0
            for u, choice in chosen.items():
                mesh, option = choice.mesh, choice.option
                if mesh.pool != newest.mesh.pool or not mesh.start <= device < mesh.stop:
                    continue
                unit = self.problem.units[u]
                if unit.trains or u not in self.read:
                    key = (unit.weights, unit.trains, mesh, option.parallelism.layout, option.offload)
                    held[key] = option.held
                    transient = max(transient, option.transient)
                else:
                    transient = max(transient, option.transient - (option.weights if option.offload else 0.0))
            if sum(held.values()) + transient > limit:
                return True
        return False


def _ways(search: Search, u: int) -> Sequence[Choice]:
    """All a unit may do, the fastest first."""
    found = [Choice(mesh, option) for mesh in search.meshes(u) for option in search.options(u, mesh)]
    return sorted(found, key=lambda c: (c.option.seconds, c.mesh, c.option.parallelism, c.option.offload))


def num_assignments(problem: Problem, search: Search) -> float:
    """How many there are."""
    count = 1.0
    for u in range(len(problem.units)):
        count *= len(_ways(search, u))
    return count
