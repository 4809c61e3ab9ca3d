"""HybridFlow's device mapping (Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", arXiv 2409.19256, §6,
algorithm 1), written from the paper for comparison.

It goes through every partition of the Models into sets that are colocated, every allocation of all devices to the sets, and
gives each Model the fastest parallelism on the devices of its set. Models of one set run one after another, sets at the same
time; an iteration is the sum over the stages (generation, preparation, training) of the slowest set of each. What the paper
prunes is pruned: allocations below the fewest devices that hold a set, and a parallelism is searched once for a Model and a
number of devices.

Where the paper leaves a choice: the Models of a set share the memory of its devices, so that of a set that does not fit the
unit that gives back most bytes for its seconds takes a leaner way, until it fits. The paper compares placements by its own
sum of stages; here the best allocations of every placement by that sum are rated by the compiler's cost as well, and the best of
these counts, which can only help it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.outcome import Outcome
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.problem import Choice, Cost, Option, Problem, WeightEdge, evaluate, transfer_seconds

STAGES = ("generate", "score", "train")
#: Allocations of one placement, beyond which it is not tried: an array of them must fit into memory.
MOST_ALLOCATIONS = 20_000_000

#: Allocations of a placement, those with the least sums of stages, that the compiler's cost rates.
RATED = 32
#: Ways of one unit on a number of devices that are tried where the fastest ones of a set do not fit.
TRIED = 24

#: Of one set on a number of devices: an option of each of its units, and seconds by stage.
Ways = tuple[tuple[Option, ...], NDArray[np.float64]]


def best_of_placement(problem: Problem, placement: Sequence[tuple[str, ...]]) -> Cost | None:
    """What the best allocation of one placement costs: sets of Models, each on devices of its own. None where none fits."""
    found = _Mapping(problem).best_allocation(placement)
    return None if found is None else found[1]


def hybridflow(problem: Problem) -> Outcome:
    """The best mapping in HybridFlow's space.

    Raises:
        ValueError: the problem has several pools or a pin, which the algorithm does not know.
    """
    if len(problem.cluster.pools) != 1 or problem.pinned:
        raise ValueError("algorithm 1 maps onto one pool of equal devices, and knows no pins")
    started = time.perf_counter()
    mapping = _Mapping(problem)
    best: tuple[tuple[Choice, ...], Cost] | None = None
    for placement in set_partitions(sorted({unit.weights for unit in problem.units})):
        found = mapping.best_allocation(placement)
        if found is not None and (best is None or found[1].period < best[1].period):
            best = found
    choices, cost = best or (None, None)
    return Outcome(choices, cost, mapping.evaluations, time.perf_counter() - started, mapping.finished)


def set_partitions(items: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every way to put items into sets: as many as the Bell number of them."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        yield [(first,), *partition]
        for i, group in enumerate(partition):
            yield [*partition[:i], (first, *group), *partition[i + 1 :]]


class _Mapping:
    """The search, with what it has found for a set and a number of devices."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pool = problem.cluster.pools[0]
        self.sizes = problem.cluster.sizes(0)
        self.evaluations = 0
        self.finished = True
        self._tables: dict[tuple[str, ...], dict[int, Ways]] = {}

    def best_allocation(self, placement: Sequence[tuple[str, ...]]) -> tuple[tuple[Choice, ...], Cost] | None:
        """Of the allocations of all devices to the sets with the least sums of stages the best; None where none fits."""
        tables = [self._table(tuple(sorted(group))) for group in placement]
        if not all(tables):
            return None
        allocations = self._allocations([sorted(table) for table in tables])
        if not len(allocations):
            return None
        stages = np.zeros((len(allocations), len(STAGES)))
        for i, table in enumerate(tables):
            sizes = np.array(sorted(table))
            latency = np.array([table[int(n)][1] for n in sizes])
            np.maximum(stages, latency[np.searchsorted(sizes, allocations[:, i])], out=stages)
        totals = stages.sum(axis=1)
        self.evaluations += len(totals)
        best: tuple[tuple[Choice, ...], Cost] | None = None
        for row in np.argsort(totals, kind="stable")[:RATED]:
            meshes = self._side_by_side([int(n) for n in allocations[row]])
            if meshes is not None:
                choices = self._choices(placement, meshes)
                cost = evaluate(self.problem, choices)
                self.evaluations += 1
                if cost.overfull == 0 and (best is None or cost.period < best[1].period):
                    best = choices, cost
        return best

    def _allocations(self, sizes: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """(allocations, sets): devices of each set, which are all devices together."""
        least = [min(s) for s in sizes]
        rows = np.zeros((1, 0), dtype=np.int64)
        for i, mine in enumerate(sizes[:-1]):
            if len(rows) * len(mine) > MOST_ALLOCATIONS:
                self.finished = False
                return np.zeros((0, len(sizes)), dtype=np.int64)
            rows = np.column_stack([np.repeat(rows, len(mine), axis=0), np.tile(np.array(mine), len(rows))])
            rows = rows[rows.sum(axis=1) + sum(least[i + 1 :]) <= self.pool.size]
        last = self.pool.size - rows.sum(axis=1)
        rows = np.column_stack([rows, last])
        return rows[np.isin(last, sizes[-1])]

    def _side_by_side(self, sizes: Sequence[int]) -> list[Mesh] | None:
        """Meshes that share no device, the largest first; None where they do not go onto the nodes."""
        taken: dict[int, Mesh] = {}
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            every = self.problem.cluster.meshes(sizes[i], 0)
            mesh = next((m for m in every if not any(m.overlaps(t) for t in taken.values())), None)
            if mesh is None:
                return None
            taken[i] = mesh
        return [taken[i] for i in range(len(sizes))]

    def _choices(self, placement: Sequence[tuple[str, ...]], meshes: Sequence[Mesh]) -> tuple[Choice, ...]:
        chosen: dict[int, Choice] = {}
        for group, mesh in zip(placement, meshes, strict=True):
            options, _ = self._table(tuple(sorted(group)))[mesh.size]
            for u, option in zip(self._units(group), options, strict=True):
                chosen[u] = Choice(mesh, option)
        return tuple(chosen[u] for u in range(len(self.problem.units)))

    def _units(self, group: Sequence[str]) -> list[int]:
        return [u for u, unit in enumerate(self.problem.units) if unit.weights in group]

    def _table(self, group: tuple[str, ...]) -> dict[int, Ways]:
        """By number of devices on which a set of Models fits, how its units run there. The least is the paper's A_min."""
        if group not in self._tables:
            part = _part(self.problem, self._units(group))
            by_size = [_by_size(options) for options in part.options]
            found = ((n, self._fastest(part, by_size, n)) for n in self.sizes if all(n in ways for ways in by_size))
            self._tables[group] = {n: ways for n, ways in found if ways is not None}
        return self._tables[group]

    def _fastest(self, part: Problem, by_size: Sequence[dict[int, list[Option]]], size: int) -> Ways | None:
        """The fastest way of every unit of a set on ``size`` devices, leaner until memory suffices."""
        mesh = Mesh(0, 0, size)
        options = [ways[size][0] for ways in by_size]
        options = self._readers(part, mesh, options)
        cost = self._rate(part, mesh, options)
        while cost.overfull > 0:
            best: tuple[float, list[Option], Cost] | None = None
            for u, ways in enumerate(by_size):
                for option in _leaner(ways[size], options[u]):
                    changed = [*options[:u], option, *options[u + 1 :]]
                    new = self._rate(part, mesh, changed)
                    price = max(1e-9, sum(new.seconds) - sum(cost.seconds))
                    gain = (cost.overfull - new.overfull) / price
                    if gain > 0 and (best is None or gain > best[0]):
                        best = gain, changed, new
            if best is None:
                return None
            _, options, cost = best
        changed = self._readers(part, mesh, options)
        again = self._rate(part, mesh, changed)
        if again.overfull == 0 and sum(again.seconds) < sum(cost.seconds):
            options, cost = changed, again
        stages = np.zeros(len(STAGES))
        for unit, seconds in zip(part.units, cost.seconds, strict=True):
            stages[STAGES.index(unit.work.kind)] += seconds
        return tuple(options), stages

    def _readers(self, part: Problem, mesh: Mesh, options: Sequence[Option]) -> list[Option]:
        """The same with those who read what a unit of the set trains as fast as they can be, weights brought into their
        layout included; the paper, too, chooses training first and generation for it."""
        chosen = list(options)
        for edge in part.weights:
            writer = Choice(mesh, chosen[edge.writer])
            size = part.units[edge.reader].weight_bytes

            def seconds(
                option: Option, writer: Choice = writer, size: float = size, late: int = edge.staleness
            ) -> float:
                same = option.parallelism.layout == writer.option.parallelism.layout and not writer.option.offload
                if same and not late:
                    return option.seconds
                return option.seconds + transfer_seconds(part.cluster, size, writer, Choice(mesh, option))

            ways = [o for o in part.options[edge.reader] if o.size == mesh.size]
            chosen[edge.reader] = min(ways, key=seconds)
        return chosen

    def _rate(self, part: Problem, mesh: Mesh, options: Sequence[Option]) -> Cost:
        self.evaluations += 1
        return evaluate(part, [Choice(mesh, option) for option in options])


def _part(problem: Problem, units: Sequence[int]) -> Problem:
    """The problem of some units by themselves."""
    at = {u: i for i, u in enumerate(units)}
    return dataclasses.replace(
        problem,
        units=tuple(problem.units[u] for u in units),
        data=tuple((at[u], at[v]) for u, v in problem.data if u in at and v in at),
        weights=tuple(
            WeightEdge(at[e.writer], at[e.reader], e.staleness)
            for e in problem.weights
            if e.writer in at and e.reader in at
        ),
        options=tuple(problem.options[u] for u in units),
    )


def _by_size(options: Sequence[Option]) -> dict[int, list[Option]]:
    """By size, options of which no other needs fewer seconds and fewer bytes, the fastest first; of many some all along."""
    found: dict[int, list[Option]] = {}
    for size, group in itertools.groupby(sorted(options, key=lambda o: (o.size, o.seconds)), key=lambda o: o.size):
        kept: list[Option] = []
        for option in group:
            if not any(o.held <= option.held and o.transient <= option.transient for o in kept):
                kept.append(option)
        found[size] = _some(kept)
    return found


def _some(options: list[Option]) -> list[Option]:
    """At most ``TRIED``: the fastest, the leanest, and others at equal distances between them."""
    if len(options) <= TRIED:
        return options
    leaner = sorted(options[1:], key=lambda o: o.held + o.transient)
    chosen = [leaner[i * (len(leaner) - 1) // (TRIED - 2)] for i in range(TRIED - 1)]
    return [options[0], *sorted(dict.fromkeys(chosen), key=lambda o: o.seconds)]


def _leaner(options: Sequence[Option], than: Option) -> list[Option]:
    return [o for o in options if o.held < than.held or o.transient < than.transient]


def num_placements(models: int) -> int:
    """The Bell number: partitions of so many Models into sets."""
    row = [1]
    for _ in range(models - 1):
        row = list(itertools.accumulate([row[-1], *row]))
    return row[-1] if models else 1


def num_allocations(devices: int, sets: int) -> int:
    """Ways to give devices to sets, each at least one: what the paper counts before pruning."""
    return math.comb(devices - 1, sets - 1)
