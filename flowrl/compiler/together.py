"""Placement for runtimes whose ranks all run every call: each Model in one layout over all devices."""

from __future__ import annotations

import itertools
import math

from flowrl.compiler.mesh import Mesh
from flowrl.compiler.placement import Placed, PlacementError
from flowrl.compiler.problem import Choice, Cost, Option, Problem, evaluate

#: Assignments of layouts to Models that are all tried; beyond, Models are made leaner one by one.
MOST = 20_000

#: (tensor, zero, checkpointing) of a Model. ZeRO-1 is none: no engine of these runtimes shards the optimiser alone.
Layout = tuple[int, int, bool]


def place_together(problem: Problem) -> Placed:
    """The fastest layout of each Model with which all fits.

    Raises:
        PlacementError: no layouts fit together, or a Model has none that suits all of its calls.
    """
    size = problem.cluster.num_devices
    mesh = Mesh(0, 0, size)
    names = list(dict.fromkeys(u.weights for u in problem.units))
    layouts = {name: _layouts(problem, name, size) for name in names}
    lost = [name for name, found in layouts.items() if not found]
    if lost:
        raise PlacementError(f"No layout over {size} devices suits all calls of {', '.join(lost)}")
    fewer = max(1, int(MOST ** (1 / len(names))))
    best: tuple[Cost, tuple[Choice, ...]] | None = None
    tried = 0
    for ways in itertools.product(*(_kept(found, fewer) for found in layouts.values())):
        options = {u: option for way in ways for u, option in way.items()}
        choices = tuple(Choice(mesh, options[u]) for u in range(len(problem.units)))
        cost = evaluate(problem, choices)
        tried += 1
        if best is None or (cost.overfull, cost.period) < (best[0].overfull, best[0].period):
            best = (cost, choices)
    assert best is not None
    cost, choices = best
    if cost.overfull > 0:
        raise PlacementError(
            f"nothing fits on {size} devices that all run every call: {cost.overfull / 1e9:.1f} GB too few on each"
        )
    bound = sum(min(sum(o.seconds for o in way.values()) for way in found) for found in layouts.values())
    everything = tried == math.prod(len(found) for found in layouts.values())
    return Placed(choices, cost, min(bound, cost.period), everything, tried, (("colocated", choices, cost.period),))


def _layouts(problem: Problem, name: str, size: int) -> list[dict[int, Option]]:
    """By layout that suits all units of a Model, the option of each."""
    units = [u for u, unit in enumerate(problem.units) if unit.weights == name]
    trained = any(problem.units[u].trains for u in units)
    found: dict[tuple[Layout, bool], dict[int, Option]] = {}
    for u in units:
        for option in problem.options[u]:
            p = option.parallelism
            if option.size != size or p.pipeline > 1 or p.zero == 1 or option.offload:
                continue  # an engine's own offload brings parameters in each pass, which is not what is estimated
            if problem.units[u].trains:
                keys = [(p.tensor, p.zero, p.checkpointing)]
            else:  # a reader takes the trainer's layout; only generation puts sharded parameters together first
                zeros = (p.zero,) if not trained else (3,) if p.zero == 3 else (0, 2)
                if problem.units[u].work.kind == "generate" and trained:
                    zeros = (0, 2, 3)
                keys = [(p.tensor, zero, kept) for zero in zeros for kept in (False, True)]
            for key in keys:
                way = found.setdefault((key, option.offload), {})
                if u not in way or option.seconds < way[u].seconds:
                    way[u] = option
    complete = [way for way in found.values() if len(way) == len(units)]
    return list({tuple(way.items()): way for way in complete}.values())


def _kept(ways: list[dict[int, Option]], most: int) -> list[dict[int, Option]]:
    """The fastest, and among the last of them the leanest."""
    ordered = sorted(ways, key=lambda way: sum(o.seconds for o in way.values()))
    if len(ordered) <= most:
        return ordered
    leanest = min(ordered, key=lambda way: sum(o.held for o in way.values()) + max(o.transient for o in way.values()))
    kept = ordered[: max(1, most - 1)]
    return kept if leanest in kept else [*kept, leanest]
