"""Where the search begins: placements of every shape that people build by hand.

- **Colocated**: every unit on all devices of a pool, one after another.
- **Stages**: units that may run at the same time lie side by side, in proportion to their work; each stage has all devices.
- **Split**: sets of Models have devices of their own (HybridFlow, arXiv 2409.19256, §6), in proportion to their work.
- **Disaggregated**: generation on some nodes, everything else on the others (AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from flowrl.compiler.mesh import Mesh
from flowrl.compiler.search import Search

#: Set partitions of the Models that are tried; of six Models there are 203.
MOST_PARTITIONS = 250
#: Shares of the devices that generation is given.
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)

Meshes = tuple[Mesh, ...]


def seeds(search: Search) -> Iterator[Meshes]:
    """Meshes of all units, each assignment once."""
    seen: set[Meshes] = set()
    for meshes in itertools.chain(_colocated(search), _stages(search), _disaggregated(search), _split(search)):
        placed = tuple(search.pinned.get(u, mesh) for u, mesh in enumerate(meshes))
        if placed not in seen:
            seen.add(placed)
            yield placed


def _colocated(search: Search) -> Iterator[Meshes]:
    """All devices of a pool, or the largest size that every unit can use, and a half, a quarter, … of it."""
    problem = search.problem
    for pool in range(len(problem.cluster.pools)):
        common = set.intersection(*({size for p, size in sizes if p == pool} for sizes in search.by_size))
        size = max(common, default=0)
        while size:
            yield (Mesh(pool, 0, size),) * len(problem.units)
            size = max((s for s in common if s <= size // 2), default=0)


def _stages(search: Search) -> Iterator[Meshes]:
    """The units of a stage side by side; each stage on all devices."""
    for pool, here in enumerate(search.problem.cluster.pools):
        meshes: list[Mesh] = [Mesh(pool, 0, here.size)] * len(search.problem.units)
        for units in search.stages:
            for u, mesh in zip(units, _side_by_side(search, pool, [search.least_work[u] for u in units]), strict=True):
                meshes[u] = mesh
        yield tuple(meshes)


def _disaggregated(search: Search) -> Iterator[Meshes]:
    problem = search.problem
    makers = [u.work.kind == "generate" for u in problem.units]
    if not any(makers) or all(makers):
        return
    for pool in range(len(problem.cluster.pools)):
        for share in SHARES:
            first, second = _side_by_side(search, pool, [share, 1 - share])
            yield tuple(first if makes else second for makes in makers)
    for a, b in itertools.permutations(range(len(problem.cluster.pools)), 2):
        first, second = (Mesh(p, 0, problem.cluster.pools[p].size) for p in (a, b))
        yield tuple(first if makes else second for makes in makers)


def _split(search: Search) -> Iterator[Meshes]:
    """Set partitions of the Models, the largest sets first; each set on devices of its own."""
    units = search.problem.units
    names = list(dict.fromkeys(u.weights for u in units))
    for sets in itertools.islice(partitions(names), 1, MOST_PARTITIONS):
        home = {name: k for k, group in enumerate(sets) for name in group}
        work = [0.0] * len(sets)
        for u, unit in enumerate(units):
            work[home[unit.weights]] += search.least_work[u]
        for pool in range(len(search.problem.cluster.pools)):
            meshes = _side_by_side(search, pool, work)
            yield tuple(meshes[home[unit.weights]] for unit in units)


def partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """All set partitions; the first is the whole."""
    if not names:
        yield []
        return
    first, *rest = names
    for smaller in partitions(rest):
        for k in range(len(smaller)):
            yield [*smaller[:k], [first, *smaller[k]], *smaller[k + 1 :]]
        yield [[first], *smaller]


def _side_by_side(search: Search, pool: int, work: Sequence[float]) -> list[Mesh]:
    """Meshes next to one another in proportion to some work; on top of one another where there are fewer devices than
    shares."""
    here = search.problem.cluster.pools[pool]
    if len(work) == 1:
        return [Mesh(pool, 0, here.size)]
    unit = here.gpus_per_node if here.nodes >= len(work) else 1
    slots = here.size // unit
    if slots < len(work):
        return [Mesh(pool, 0, here.size)] * len(work)
    sizes = _apportion(work, slots)
    if unit == 1 and here.nodes == 1:  # within a node a mesh is aligned to its size
        return _aligned(pool, here.size, sizes)
    meshes, start = [], 0
    for size in sizes:
        meshes.append(Mesh(pool, start * unit, size * unit))
        start += size
    return meshes


def _apportion(work: Sequence[float], slots: int) -> list[int]:
    """Whole numbers in proportion to the work, each at least 1, that add up to ``slots`` (largest remainder)."""
    total = sum(work)
    exact = [1 + (slots - len(work)) * w / total for w in work]
    sizes = [int(e) for e in exact]
    for k in sorted(range(len(work)), key=lambda k: (sizes[k] - exact[k], k))[: slots - sum(sizes)]:
        sizes[k] += 1
    return sizes


def _aligned(pool: int, devices: int, sizes: Sequence[int]) -> list[Mesh]:
    """Aligned meshes within a node, each of the largest divisor of the node that is no more than its share."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    rounded = [max(n for n in divisors if n <= size) for size in sizes]
    meshes: list[Mesh] = [Mesh(pool, 0, devices)] * len(sizes)
    start = 0
    for k in sorted(range(len(sizes)), key=lambda k: (-rounded[k], k)):
        start = -(-start // rounded[k]) * rounded[k]
        meshes[k] = Mesh(pool, start, rounded[k])
        start += rounded[k]
    return meshes
