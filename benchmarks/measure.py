"""What the benchmarks measure, as rows: planning times are of this machine, times of an iteration are estimates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.baselines.hybridflow import hybridflow
from benchmarks.baselines.outcome import Outcome
from benchmarks.baselines.real_mcmc import real_mcmc
from benchmarks.problems import Case
from flowrl.compiler.placement import Placed, PlacementError, place
from flowrl.compiler.problem import Problem, evaluate


@dataclass(frozen=True)
class Planned:
    """One problem, planned.

    Args:
        name: of the problem.
        models, units, gpus: of it.
        options: ways to run, of all units.
        building: seconds of a core for estimates and options, measured.
        placing: seconds of a core for the search, measured.
        evaluations: assignments that were rated.
        period: seconds of an iteration, estimated; infinity where nothing fits.
        lower_bound: of the same.
        exact: whether the plan is known to be the best one.
        shape: "colocated", "split" or "mixed".
    """

    name: str
    models: int
    units: int
    gpus: int
    options: int
    building: float
    placing: float
    evaluations: int
    period: float
    lower_bound: float
    exact: bool
    shape: str

    @property
    def planning(self) -> float:
        """Seconds of all, measured."""
        return self.building + self.placing

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, as a share of the bound."""
        return self.period / self.lower_bound - 1


@dataclass(frozen=True)
class Compared:
    """One problem, and what a method makes of it."""

    name: str
    gpus: int
    method: str
    period: float
    evaluations: int
    seconds: float
    finished: bool


def plan(case: Case) -> tuple[Problem, Placed]:
    """Everything that planning is: estimates, options, search, bound."""
    problem = case.problem()
    return problem, place(problem)


def planned(case: Case) -> Planned:
    """Plans a case, and measures it: seconds of one core, which others that use the machine do not change much."""
    started = time.process_time()
    problem = case.problem()
    built = time.process_time()
    placed = place(problem)
    placing = time.process_time() - built
    return Planned(
        name=case.name,
        models=len(case.models),
        units=len(case.roles),
        gpus=case.cluster.num_devices,
        options=sum(map(len, problem.options)),
        building=built - started,
        placing=placing,
        evaluations=placed.evaluations,
        period=placed.cost.period,
        lower_bound=placed.lower_bound,
        exact=placed.exact,
        shape=shape(placed),
    )


def flowrl(problem: Problem) -> Outcome:
    """The compiler's plan, in the form of the baselines'."""
    started = time.perf_counter()
    try:
        found = place(problem)
    except PlacementError:
        return Outcome(None, None, 0, time.perf_counter() - started)
    return Outcome(found.choices, found.cost, found.evaluations, time.perf_counter() - started)


def methods(mcmc_seconds: float) -> dict[str, Callable[[Problem], Outcome]]:
    """By name; each gets the same problem, with the same options."""
    return {
        "flowrl": flowrl,
        "HybridFlow": hybridflow,
        "ReaL": lambda problem: real_mcmc(problem, seconds=mcmc_seconds),
    }


def compared(case: Case, mcmc_seconds: float) -> Iterable[Compared]:
    """What each method makes of one problem; options are estimated once for all. Each answer is rated anew."""
    problem = case.problem()
    for name, method in methods(mcmc_seconds).items():
        found = method(problem)
        if found.choices is not None:
            again = evaluate(problem, found.choices)
            assert again.overfull == 0 and math.isclose(again.period, found.period), name
        gpus = case.cluster.num_devices
        yield Compared(case.name, gpus, name, found.period, found.evaluations, found.seconds, found.finished)


def shape(placed: Placed) -> str:
    """ "colocated": all units on one mesh; "split": on meshes that share nothing; "mixed": anything else."""
    meshes = sorted({choice.mesh for choice in placed.choices})
    if len(meshes) == 1:
        return "colocated"
    disjoint = not any(a.overlaps(b) for i, a in enumerate(meshes) for b in meshes[i + 1 :])
    return "split" if disjoint else "mixed"
