"""What the search moves in: meshes that there are, sizes that are tried, stages and cycles of units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import networkx as nx

from flowrl.compiler.mesh import Mesh
from flowrl.compiler.problem import Choice, Option, Problem

#: Cycles of who waits for whom that a move is first held against.
MOST_CYCLES = 64


def shape_of(choices: Sequence[Choice]) -> str:
    """ "colocated": one mesh; "split": meshes that share nothing; "mixed": anything else."""
    meshes = sorted({c.mesh for c in choices})
    if len(meshes) == 1:
        return "colocated"
    return "mixed" if any(a.overlaps(b) for a, b in itertools.combinations(meshes, 2)) else "split"


def stages_of(problem: Problem) -> list[list[int]]:
    """Units by the longest path to them from those that wait for nobody in their iteration."""
    depth = [0] * len(problem.units)
    for u in range(len(depth)):
        for v in problem.followers[u]:
            depth[v] = max(depth[v], depth[u] + 1)
    return [[u for u in range(len(depth)) if depth[u] == level] for level in sorted(set(depth))]


def waiting_cycles(problem: Problem) -> list[tuple[tuple[int, ...], int]]:
    """(units, lag) of the cycles of who waits for whom whatever the meshes are; at most MOST_CYCLES of them."""
    edges = [(u, v, lag) for u, v, lag in problem.dependencies if u != v]
    graph = nx.DiGraph()
    for u, v, lag in edges:
        graph.add_edge(u, v, lag=min(lag, graph.get_edge_data(u, v, {"lag": lag})["lag"]))
    found = []
    for cycle in itertools.islice(nx.simple_cycles(graph), MOST_CYCLES):
        lag = sum(graph[u][v]["lag"] for u, v in itertools.pairwise([*cycle, cycle[0]]))
        found.append((tuple(cycle), lag))
    return found


def by_size(options: Sequence[Option]) -> dict[tuple[int, int], tuple[Option, ...]]:
    found: dict[tuple[int, int], list[Option]] = {}
    for option in options:
        found.setdefault((option.pool, option.size), []).append(option)
    return {key: tuple(sorted(found[key], key=preference)) for key in sorted(found)}


def preference(option: Option) -> tuple[object, ...]:
    return (option.seconds, option.held + option.transient, option.offload, option.parallelism)


def is_mesh(problem: Problem, mesh: Mesh) -> bool:
    """Whether there are such devices, within a node and aligned, or whole nodes."""
    here = problem.cluster.pools[mesh.pool]
    if not is_size(mesh.size, here.gpus_per_node) or mesh.start < 0 or mesh.stop > here.size:
        return False
    return mesh.start % min(mesh.size, here.gpus_per_node) == 0


def is_size(size: int, per_node: int) -> bool:
    return size > 0 and (size % per_node == 0 if size >= per_node else per_node % size == 0)


def grid(devices: int, per_node: int) -> list[int]:
    """Sizes between one device and all: within a node all, then nodes in steps of about a third."""
    sizes = [n for n in range(1, per_node) if per_node % n == 0]
    nodes, count = devices // per_node, 1
    while count <= nodes:
        sizes.append(count * per_node)
        count = max(count + 1, math.ceil(count * 1.25))
    return sizes


def moved(mesh: Mesh, pool: int, old: int, new: int) -> Mesh:
    """A mesh whose end at ``old`` is at ``new``."""
    if mesh.pool != pool or old not in (mesh.start, mesh.stop):
        return mesh
    start, stop = (new, mesh.stop) if mesh.start == old else (mesh.start, new)
    return Mesh(pool, start, stop - start)


def nearest_size(problem: Problem, pool: int, start: int, size: float) -> int | None:
    """The number of devices nearest to ``size`` that a mesh can have; None for 0."""
    per_node = problem.cluster.pools[pool].gpus_per_node
    if size >= per_node or start % per_node:
        return max(1, round(size / per_node)) * per_node
    within = [n for n in range(1, per_node) if per_node % n == 0]
    return min(within, key=lambda n: (abs(n - size), n)) if within else None
