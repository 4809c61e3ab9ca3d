"""The place pass: a mesh and a way to run for every unit, with a bound of how much better it could be."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.compiler.bounds import lower_bound
from flowrl.compiler.branch import BranchAndBound
from flowrl.compiler.collector import collector_paused
from flowrl.compiler.problem import Choice, Cost, Problem
from flowrl.compiler.search import Placement, Search
from flowrl.compiler.seeds import seeds
from flowrl.errors import FlowError

#: Ratings of the search for each pair of units; a plan for equal inputs is equal, so no clock counts.
BUDGET_OF_PAIR = 40
#: Partial assignments that branch and bound may look at.
EXACT_BUDGET = 20_000
#: Ratings of a search that only asks what something else would cost.
ASIDE = 1500
#: Devices up to which branch and bound is tried.
EXACT_DEVICES = 32
#: Seeds that are improved, of each shape.
IMPROVED = 2
#: A bound so near counts as reached.
EQUAL = 1e-9


class PlacementError(FlowError):
    """No assignment fits, or none was found."""


@dataclass(frozen=True)
class Placed:
    """The answer.

    Args:
        choices: of the units, in their order.
        cost: of them.
        lower_bound: seconds of an iteration that no assignment beats.
        exact: whether this is the best one: everything else was tried or left out, or it reaches the bound.
        evaluations: assignments that were rated.
        by_shape: ("colocated" | "split" | "mixed", choices, seconds) of the best that was seen of each shape, best first.
    """

    choices: tuple[Choice, ...]
    cost: Cost
    lower_bound: float
    exact: bool
    evaluations: int
    by_shape: tuple[tuple[str, tuple[Choice, ...], float], ...]


@collector_paused()
def place(problem: Problem, *, budget: int | None = None, exact_budget: int = EXACT_BUDGET) -> Placed:
    """The best assignment that is found.

    Args:
        budget: ratings of the search; by default so many as the square of the number of units asks for.
        exact_budget: partial assignments that branch and bound may look at; 0 leaves it out.

    Raises:
        PlacementError: a unit has no way to run at all, or no assignment fits into memory.
    """
    lost = [u.label for u, options in zip(problem.units, problem.options, strict=True) if not options]
    if lost:
        raise PlacementError("Nothing here can run " + ", ".join(lost))
    search = Search(problem, BUDGET_OF_PAIR * len(problem.units) ** 2 if budget is None else budget)
    _search(search)
    finished = False
    known = _feasible(search)
    bound = lower_bound(problem, known)
    if known > bound * (1 + EQUAL) and exact_budget and problem.cluster.num_devices <= EXACT_DEVICES:
        search.budget = search.evaluations + exact_budget
        finished = BranchAndBound(search, exact_budget).run()
        known = _feasible(search)
        bound = known if finished else min(bound, known)
    if search.best is None or search.best[0][0] > 0:
        raise PlacementError(_nothing_fits(search, finished))
    _, choices, cost = search.best
    others = sorted(search.best_by_shape.items(), key=lambda item: item[1][0])
    return Placed(
        choices=choices,
        cost=cost,
        lower_bound=bound,
        exact=finished or cost.period <= bound * (1 + EQUAL),
        evaluations=search.evaluations,
        by_shape=tuple((shape, found, rank[1]) for shape, (rank, found, _) in others),
    )


def _search(search: Search) -> None:
    """Rates all seeds, and improves the best of each shape, as far as the budget goes."""
    started = [placed for meshes in seeds(search) if not search.spent and (placed := search.place_on(meshes))]
    started.sort(key=search.rate)
    taken: dict[str, int] = {}
    chosen: list[Placement] = []
    for placed in started:
        shape = str(len({c.mesh for c in placed}))
        if taken.get(shape, 0) < IMPROVED:
            taken[shape] = taken.get(shape, 0) + 1
            chosen.append(placed)
    for placed in chosen:
        if search.spent:
            return
        search.improve(placed)


def _feasible(search: Search) -> float:
    """Seconds of the best that fits; infinity where none does."""
    return search.best[0][1] if search.best is not None and search.best[0][0] == 0 else float("inf")


def _nothing_fits(search: Search, finished: bool) -> str:
    if search.best is None:
        return "No mesh suits all units"
    over, cost = search.best[0][0], search.best[2]
    (pool, start, stop), held, transient = max(cost.memory, key=lambda m: m[1] + m[2] - search.problem.memory(m[0][0]))
    known = "nothing fits" if finished else "nothing was found that fits"
    return (
        f"{known}: the best leaves devices {start}–{stop - 1} of pool {pool} with {held / 1e9:.1f} GB held and "
        f"{transient / 1e9:.1f} GB more while a unit runs, {over / 1e9:.1f} GB above the "
        f"{search.problem.memory(pool) / 1e9:.1f} GB that a plan may use"
    )
