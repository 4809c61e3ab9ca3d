"""ReaL's search for an execution plan (Mei et al., "ReaL: Efficient RLHF Training of Large Language Models with Parameter
Reallocation", arXiv 2406.14088, §5), written from the paper for comparison.

A plan gives each call a device mesh and a parallelism of its own. Metropolis–Hastings draws plans with probability
proportional to exp(−β · energy), starting from the plan in which each call by itself is fastest; a step gives one call another
mesh and parallelism, drawn evenly from all. The energy is the time of an iteration, and more where memory does not suffice.
The search runs for a fixed time (120 s in the paper) and keeps the best plan.

Where the paper leaves a choice: it multiplies the time of a plan that does not fit by a constant; here the factor grows with the
bytes that are too many, which leads the chain out of such plans, and can only help it. β is 20 a time of the first plan: a plan
that is 5 % worse is taken every third time.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from bisect import bisect_right

from benchmarks.baselines.outcome import Outcome
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.problem import Choice, Cost, Option, Problem, evaluate

#: Seconds of the search in the paper.
BUDGET = 120.0
#: Of the energy of a plan that exceeds memory by all that a device has, over its time.
PENALTY = 100.0
#: Times the inverse of the first plan's time: β.
COLDNESS = 20.0


def real_mcmc(problem: Problem, *, seconds: float = BUDGET, steps: int | None = None, seed: int = 0) -> Outcome:
    """The best plan of one chain.

    Args:
        seconds: that it may run, on this machine.
        steps: that it may take at most; for tests, which no clock may decide.
        seed: of the chain.
    """
    started = time.perf_counter()
    rng = random.Random(seed)
    calls = [_Call(problem, u) for u in range(len(problem.units))]
    choices = tuple(call.fastest() for call in calls)
    cost = evaluate(problem, choices)
    beta = COLDNESS / cost.period
    energy = _energy(problem, cost)
    best = (choices, cost) if cost.overfull == 0 else None
    taken = 0
    while taken != steps and time.perf_counter() - started < seconds:
        taken += 1
        u = rng.randrange(len(calls))
        proposed = (*choices[:u], calls[u].draw(rng), *choices[u + 1 :])
        new = evaluate(problem, proposed)
        new_energy = _energy(problem, new)
        if new_energy <= energy or rng.random() < math.exp(-beta * (new_energy - energy)):
            choices, energy = proposed, new_energy
            if new.overfull == 0 and (best is None or new.period < best[1].period):
                best = proposed, new
    found, its_cost = best or (None, None)
    return Outcome(found, its_cost, taken + 1, time.perf_counter() - started)


def _energy(problem: Problem, cost: Cost) -> float:
    least = min(problem.memory(pool) for pool in range(len(problem.cluster.pools)))
    return cost.period * (1 + PENALTY * cost.overfull / least)


class _Call:
    """All that one call may do: options, and the meshes of each."""

    def __init__(self, problem: Problem, unit: int) -> None:
        pinned = dict(problem.pinned).get(unit)
        meshes: dict[tuple[int, int], list[Mesh]] = {}
        for option in problem.options[unit]:
            key = option.pool, option.size
            if key not in meshes:
                every = problem.cluster.meshes(option.size, option.pool)
                meshes[key] = [m for m in every if pinned is None or m == pinned]
        self.meshes = meshes
        self.options: list[Option] = [o for o in problem.options[unit] if meshes[o.pool, o.size]]
        self.upto = list(itertools.accumulate(len(meshes[o.pool, o.size]) for o in self.options))

    def fastest(self) -> Choice:
        """The way that takes the fewest seconds, with no thought of the other calls."""
        option = min(self.options, key=lambda o: o.seconds)
        return Choice(self.meshes[option.pool, option.size][0], option)

    def draw(self, rng: random.Random) -> Choice:
        """Any way on any mesh, all of them equally likely."""
        at = rng.randrange(self.upto[-1])
        index = bisect_right(self.upto, at)
        option = self.options[index]
        meshes = self.meshes[option.pool, option.size]
        return Choice(meshes[at - (self.upto[index] - len(meshes))], option)
