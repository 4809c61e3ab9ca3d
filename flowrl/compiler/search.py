"""The search for a good placement: seeds of every shape, improved one unit, one boundary and one pair at a time.

Deterministic: it is bounded by a number of ratings, never by a clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flowrl.compiler.bounds import never_together
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.problem import Choice, Cost, Option, Problem, copies, evaluate, memory_of, transfer_seconds
from flowrl.compiler.search_space import (
    by_size,
    grid,
    is_mesh,
    moved,
    nearest_size,
    shape_of,
    stages_of,
    waiting_cycles,
)

#: Ways to run a unit on a mesh that are tried in the improvement: the fastest, and the leanest.
TRIED = 4
#: Changes that make a placement leaner, at most.
LEAN_STEPS = 40
#: Where a mesh of two units is cut, as shares of it.
CUTS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)

Placement = tuple[Choice, ...]
Rank = tuple[float, float, float]


class Search:
    """The best assignments that were seen, by shape.

    Args:
        problem: what is placed.
        budget: ratings that may be spent.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.evaluations = 0
        self.best: tuple[Rank, Placement, Cost] | None = None
        self.best_by_shape: dict[str, tuple[Rank, Placement, Cost]] = {}
        self.exclusive = never_together(problem)
        self.cycles = waiting_cycles(problem)
        self.stages = stages_of(problem)
        self.by_size: list[dict[tuple[int, int], tuple[Option, ...]]] = [by_size(o) for o in problem.options]
        self.pinned = dict(problem.pinned)
        self._ladders: dict[tuple[int, int, int], list[Option]] = {}
        self._quickest: dict[tuple[int, Mesh, Choice], Option] = {}
        self._shortlists: dict[tuple[int, int, int], tuple[Option, ...]] = {}
        self.least_work = [min(o.seconds * o.size for o in options) for options in problem.options]
        self._rated: dict[Placement, tuple[Rank, Cost]] = {}

    # -- rating ----------------------------------------------------------------------------------------------------------

    def rate(self, choices: Placement) -> Rank:
        """(bytes too many, seconds of an iteration, seconds of all units): less is better, the first counts most."""
        known = self._rated.get(choices)
        if known is not None:
            return known[0]
        self.evaluations += 1
        cost = evaluate(self.problem, choices)
        rank = (cost.overfull, cost.period, sum(cost.seconds))
        self._rated[choices] = (rank, cost)
        if self.best is None or rank < self.best[0]:
            self.best = (rank, choices, cost)
        shape = shape_of(choices)
        if cost.overfull == 0 and (shape not in self.best_by_shape or rank < self.best_by_shape[shape][0]):
            self.best_by_shape[shape] = (rank, choices, cost)
        return rank

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.evaluations >= self.budget

    # -- choosing how a unit runs on a mesh --------------------------------------------------------------------------------

    def meshes(self, u: int) -> Iterator[Mesh]:
        """All meshes that a unit may have."""
        if u in self.pinned:
            yield self.pinned[u]
            return
        for pool, size in self.by_size[u]:
            yield from self.problem.cluster.meshes(size, pool)

    def options(self, u: int, mesh: Mesh) -> tuple[Option, ...]:
        """How a unit may run on a mesh, the fastest first; empty where it may not."""
        if self.pinned.get(u, mesh) != mesh or not is_mesh(self.problem, mesh):
            return ()
        return self.by_size[u].get((mesh.pool, mesh.size), ())

    def place_on(self, meshes: Sequence[Mesh]) -> Placement | None:
        """The fastest way of each unit on these meshes, made leaner until memory suffices; None where one has no way."""
        ways = [self.options(u, mesh) for u, mesh in enumerate(meshes)]
        if not all(ways):
            return None
        placed = tuple(Choice(mesh, options[0]) for mesh, options in zip(meshes, ways, strict=True))
        return self.lean(self._with_moves(placed))

    def lean(self, choices: Placement) -> Placement:
        """Other ways on the same meshes, as long as a device has too few bytes: each time the change on the fullest device
        that frees most for the seconds that it costs. What others share with whoever changes is only seen at the end."""
        for _ in range(LEAN_STEPS):
            stretches = memory_of(self.problem, choices)
            (pool, start, stop), held, transient = max(
                stretches, key=lambda s: s[1] + s[2] - self.problem.memory(s[0][0])
            )
            over = held + transient - self.problem.memory(pool)
            if over <= 0:
                break
            changed = self._leaner(choices, (pool, start, stop), over)
            if changed is None:
                break
            choices = changed
        self.rate(choices)
        return choices

    def _leaner(self, choices: Placement, stretch: tuple[int, int, int], over: float) -> Placement | None:
        pool, start, stop = stretch
        kinds = [key[0] for key in copies(self.problem, choices)]
        here = [
            u for u, c in enumerate(choices) if c.mesh.pool == pool and c.mesh.start <= start and stop <= c.mesh.stop
        ]
        needs = {u: self._needs(u, kinds[u], choices[u].option) for u in here}
        best: tuple[float, int, Option] | None = None
        for u in here:
            held, transient = needs[u]
            others = max((needs[v][1] for v in here if v != u), default=0.0)
            for option in self.ladder(u, choices[u].mesh):
                new_held, new_transient = self._needs(u, kinds[u], option)
                freed = held - new_held + max(others, transient) - max(others, new_transient)
                # Below another's transient it frees nothing yet, but once that one has shrunk as well.
                freed += 1e-3 * max(0.0, transient - new_transient)
                if freed <= 1e-6 * over:
                    continue
                price = max(option.seconds - choices[u].option.seconds, 1e-9)
                gain = min(freed, over) / price
                if best is None or gain > best[0]:
                    best = (gain, u, option)
        if best is None:
            return None
        _, u, option = best
        return (*choices[:u], Choice(choices[u].mesh, option), *choices[u + 1 :])

    def _needs(self, u: int, kind: object, option: Option) -> tuple[float, float]:
        """(bytes held, bytes while it runs) of a unit whose copy of the weights is of a kind."""
        if kind == "held" or self.problem.units[u].trains:
            return option.held, option.transient
        own = option.weights if kind == "regrouped" else 0.0
        return 0.0, option.transient + own - (option.weights if option.offload else 0.0)

    def ladder(self, u: int, mesh: Mesh) -> list[Option]:
        """Ways on a mesh, each slower than the last and leaner than all before, in what it holds or in all that it needs."""
        key = (u, mesh.pool, mesh.size)
        if key not in self._ladders:
            steps: list[Option] = []
            least_held = least_all = math.inf
            for option in self.options(u, mesh):
                everything = option.held + option.transient
                if option.held < least_held or everything < least_all:
                    steps.append(option)
                    least_held, least_all = min(least_held, option.held), min(least_all, everything)
            self._ladders[key] = steps
        return self._ladders[key]

    # -- improvement -------------------------------------------------------------------------------------------------------

    def improve(self, choices: Placement) -> Placement:
        """Better placements near one, until there is none or the budget is spent."""
        rank = self.rate(choices)
        moved = True
        while moved and not self.spent:
            moved = False
            for move in self._moves():
                for changed in move(choices):
                    if self._surely_worse(changed, rank):
                        continue
                    new = self.rate(changed)
                    if new < rank and _really_less(new, rank):
                        rank, choices, moved = new, changed, True
                    if self.spent:
                        return choices
        return choices

    def _surely_worse(self, choices: Placement, rank: Rank) -> bool:
        """Whether a device has more work, or who waits for whom takes longer, than the time to beat, where what is to be beaten
        fits."""
        if rank[0] > 0:
            return False
        limit = rank[1]
        spans = [(c.mesh.pool, c.mesh.start, c.mesh.start + c.mesh.size, c.option.seconds) for c in choices]
        for cycle, lag in self.cycles:
            if sum([spans[u][3] for u in cycle]) > limit * lag:
                return True
        for pool, device, _, _ in spans:
            load = 0.0
            for other, start, stop, more in spans:
                if start <= device < stop and other == pool:
                    load += more
            if load > limit:
                return True
        return False

    def _moves(self) -> list[Callable[[Placement], list[Placement]]]:
        single = [partial(self._one_unit, u=u) for u in range(len(self.problem.units))]
        return [*single, self._boundaries, self._pairs, self._stages]

    def _one_unit(self, choices: Placement, u: int) -> list[Placement]:
        """Another mesh or another way for one unit."""
        here = choices[u].mesh
        meshes = dict.fromkeys([here, *self._near(choices, u)])
        found = []
        for mesh in meshes:
            quickest = self.quickest(u, mesh, choices)
            tried = self._tried(u, mesh)
            for option in tried if quickest is None or quickest in tried else (quickest, *tried):
                if choices[u] != Choice(mesh, option):
                    found.append((*choices[:u], Choice(mesh, option), *choices[u + 1 :]))
        return found

    def _near(self, choices: Placement, u: int) -> Iterator[Mesh]:
        """Meshes that begin or end where another does, or at an end of the pool."""
        if u in self.pinned:
            return
        for pool, here in enumerate(self.problem.cluster.pools):
            ends = {0, here.size}
            for v, choice in enumerate(choices):
                if v != u and choice.mesh.pool == pool:
                    ends |= {choice.mesh.start, choice.mesh.stop}
            for start, stop in itertools.combinations(sorted(ends), 2):
                yield Mesh(pool, start, stop - start)
            for size in grid(here.size, here.gpus_per_node):
                for end in sorted(ends):
                    if end + size <= here.size:
                        yield Mesh(pool, end, size)
                    if end - size >= 0:
                        yield Mesh(pool, end - size, size)

    def _tried(self, u: int, mesh: Mesh) -> tuple[Option, ...]:
        options = self.options(u, mesh)
        if len(options) <= TRIED:
            return options
        key = (u, mesh.pool, mesh.size)
        if key not in self._shortlists:
            leanest = min(options, key=lambda o: (o.held + o.transient, o.seconds))
            self._shortlists[key] = tuple(dict.fromkeys([*options[: TRIED - 1], leanest]))
        return self._shortlists[key]

    def _boundaries(self, choices: Placement) -> list[Placement]:
        """All meshes that begin or end at one place, moved there by some nodes."""
        found = []
        for pool, here in enumerate(self.problem.cluster.pools):
            ends = {e for c in choices if c.mesh.pool == pool for e in (c.mesh.start, c.mesh.stop)} - {0, here.size}
            nodes = here.nodes
            steps = [s for s in (1, 2, 4, 8, 16, 32, 64) if s < nodes] if nodes > 1 else []
            within = [s for s in (1, 2, 4) if s < here.gpus_per_node]
            shifts = [s * here.gpus_per_node for s in steps] + within
            for end in sorted(ends):
                for shift in [*shifts, *(-s for s in shifts)]:
                    meshes = [moved(c.mesh, pool, end, end + shift) for c in choices]
                    changed = self._same_ways(choices, meshes)
                    if changed is not None:
                        found.append(changed)
        return found

    def _pairs(self, choices: Placement) -> list[Placement]:
        """Two units that may run at the same time, side by side on the devices that they have now."""
        found = []
        for u, v in itertools.combinations(range(len(choices)), 2):
            a, b = choices[u].mesh, choices[v].mesh
            if self.exclusive[u][v] or a.pool != b.pool:
                continue
            start, stop = min(a.start, b.start), max(a.stop, b.stop)
            for cut in CUTS:
                left = nearest_size(self.problem, a.pool, start, (stop - start) * cut)
                if left is None:
                    continue
                first, second = Mesh(a.pool, start, left), Mesh(a.pool, start + left, stop - start - left)
                for one, other in ((first, second), (second, first)):
                    meshes = [c.mesh for c in choices]
                    meshes[u], meshes[v] = one, other
                    changed = self._same_ways(choices, meshes)
                    if changed is not None:
                        found.append(changed)
        return found

    def _stages(self, choices: Placement) -> list[Placement]:
        """All units that wait for the same, one after another on all devices of a pool, or each where its weights are
        trained."""
        trainers = {unit.weights: u for u, unit in enumerate(self.problem.units) if unit.trains}
        found = []
        for stage in self.stages:
            for pool, here in enumerate(self.problem.cluster.pools):
                everything = Mesh(pool, 0, here.size)
                for at_home in (False, True):
                    meshes = [c.mesh for c in choices]
                    for u in stage:
                        home = trainers.get(self.problem.units[u].weights)
                        meshes[u] = everything if home is None or not at_home else choices[home].mesh
                    changed = self._same_ways(choices, meshes)
                    if changed is not None and changed != choices:
                        found.append(changed)
        return found

    def _same_ways(self, choices: Placement, meshes: Sequence[Mesh]) -> Placement | None:
        """The same units on other meshes: where a mesh changes, as like the way before as there is."""
        changed = []
        for u, (choice, mesh) in enumerate(zip(choices, meshes, strict=True)):
            if mesh == choice.mesh:
                changed.append(choice)
                continue
            options = self.options(u, mesh)
            if not options:
                return None
            old = choice.option
            like = [o for o in options if o.offload == old.offload and o.parallelism.zero == old.parallelism.zero]
            changed.append(Choice(mesh, (like or options)[0]))
        return self._with_moves(tuple(changed), choices)

    def _with_moves(self, placed: Placement, before: Placement | None = None) -> Placement:
        """The same with the quickest way of units that have changed and whose weights another one writes."""
        made = list(placed)
        for u in self.problem.sources:
            if before is None or placed[u] != before[u]:
                quickest = self.quickest(u, placed[u].mesh, placed)
                made[u] = Choice(placed[u].mesh, quickest) if quickest is not None else placed[u]
        return tuple(made)

    def quickest(self, u: int, mesh: Mesh, choices: Placement) -> Option | None:
        """Of a unit whose weights another one writes, the way that is fastest with what it costs to bring them; None of any
        other."""
        edge = self.problem.sources.get(u)
        options = self.options(u, mesh)
        if edge is None or not options:
            return None
        writer = choices[edge.writer]
        key = (u, mesh, writer)
        if key not in self._quickest:
            at_home = edge.staleness == 0 and writer.mesh == mesh and not writer.option.offload
            cluster, size = self.problem.cluster, self.problem.units[u].weight_bytes
            best, least = options[0], math.inf
            for option in options:  # the fastest first: once it alone takes as long, no later one is quicker
                if option.seconds >= least:
                    break
                seconds = option.seconds
                if not (at_home and option.parallelism.layout == writer.option.parallelism.layout):
                    seconds += transfer_seconds(cluster, size, writer, Choice(mesh, option))
                if seconds < least:
                    best, least = option, seconds
            self._quickest[key] = best
        return self._quickest[key]


def _really_less(new: Rank, old: Rank) -> bool:
    """Whether it is better by more than rounding."""
    return any(a < b - 1e-9 * max(1.0, abs(b)) for a, b in zip(new, old, strict=True))
