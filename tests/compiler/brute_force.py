"""The best placement by trying every one, and what one costs by another road than the compiler's.

Nothing here is shared with the search: meshes are enumerated from the rule of :meth:`Cluster.meshes` anew, cycles one by one,
and memory is painted device by device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import networkx as nx

from flowrl.compiler.cluster import Pool
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.presets import Tier
from flowrl.compiler.problem import RESERVE, Choice, Option, Problem, WeightEdge, evaluate


def optimum(problem: Problem) -> tuple[float, tuple[Choice, ...]] | None:
    """(period, choices) of the best assignment that fits, rated by :func:`evaluate`; None where none fits."""
    best: tuple[float, tuple[Choice, ...]] | None = None
    for choices in assignments(problem):
        cost = evaluate(problem, choices)
        if cost.overfull == 0 and (best is None or cost.period < best[0]):
            best = cost.period, choices
    return best


def assignments(problem: Problem) -> Iterator[tuple[Choice, ...]]:
    """Every way to give every unit a mesh and an option, pins kept, whether it fits or not."""
    pinned = dict(problem.pinned)
    per_unit: list[list[Choice]] = []
    for unit, options in enumerate(problem.options):
        places = [Choice(mesh, o) for o in options for mesh in all_meshes(problem.cluster.pools[o.pool], o)]
        per_unit.append([c for c in places if unit not in pinned or c.mesh == pinned[unit]])
    return itertools.product(*per_unit)


def all_meshes(pool: Pool, option: Option) -> list[Mesh]:
    """Where ``option`` can lie: within a node at multiples of its size, or over whole nodes side by side."""
    size, node = option.size, pool.gpus_per_node
    found = []
    for start in range(pool.size - size + 1):
        inside = start // node == (start + size - 1) // node
        whole = node % size == 0 if inside else size % node == 0
        if whole and start % (size if inside else node) == 0:
            found.append(Mesh(option.pool, start, size))
    return found


# -- the same cost by another road --------------------------------------------------------------------------------------


def rating(problem: Problem, choices: Sequence[Choice]) -> tuple[float, float]:
    """(period, bytes by which the fullest device has too few, negative where there is room)."""
    seconds = [c.option.seconds + m for c, m in zip(choices, _moves(problem, choices), strict=True)]
    return _period(problem, choices, seconds), _overfull(problem, choices)


def _period(problem: Problem, choices: Sequence[Choice], seconds: Sequence[float]) -> float:
    """The largest ratio of time to iterations spanned, over every simple cycle of the waiting graph."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(choices)))

    def wait(u: int, v: int, lag: int) -> None:
        if not graph.has_edge(u, v) or graph.edges[u, v]["lag"] > lag:
            graph.add_edge(u, v, lag=lag)

    for u in graph.nodes:
        wait(u, u, 1)
    before = nx.DiGraph()
    before.add_nodes_from(graph.nodes)
    before.add_edges_from(problem.data)
    before.add_edges_from((e.reader, e.writer) for e in problem.weights if e.staleness == 0)
    for u, v in before.edges:
        wait(u, v, 0)
    for edge in problem.weights:
        wait(edge.writer, edge.reader, 1 + edge.staleness)
    tail: dict[int, float] = {}
    for u in reversed(list(nx.topological_sort(before))):
        tail[u] = seconds[u] + max((tail[v] for v in before.successors(u)), default=0.0)
    turn = list(nx.lexicographical_topological_sort(before, key=lambda u: (-tail[u], u)))
    for (i, u), (j, v) in itertools.permutations(enumerate(turn), 2):
        if _devices(choices[u].mesh) & _devices(choices[v].mesh):
            wait(u, v, 0 if i < j else 1)
    ratios = []
    for cycle in nx.simple_cycles(graph):
        lag = sum(graph.edges[u, v]["lag"] for u, v in zip(cycle, cycle[1:] + cycle[:1], strict=True))
        assert lag > 0, "units that wait for one another within one iteration"
        ratios.append(sum(seconds[u] for u in cycle) / lag)
    return max(ratios)


def _devices(mesh: Mesh) -> set[tuple[int, int]]:
    return {(mesh.pool, device) for device in range(mesh.start, mesh.start + mesh.size)}


Shard = tuple[int, int, int, bool]


def _shard(choice: Choice) -> Shard:
    """Two choices with equal ones on one mesh hold the same bytes on every device."""
    p = choice.option.parallelism
    return p.data, p.tensor, p.pipeline, p.zero == 3


def _source(problem: Problem, unit: int) -> WeightEdge | None:
    return next((edge for edge in problem.weights if edge.reader == unit), None)


def _shares_with_writer(problem: Problem, choices: Sequence[Choice], unit: int) -> bool:
    """Whether a reader of the newest weights finds them where it runs, cut as it wants them, and leaves them there."""
    edge = _source(problem, unit)
    if edge is None or edge.staleness:
        return False
    writer, reader = choices[edge.writer], choices[unit]
    return writer.mesh == reader.mesh and _shard(writer) == _shard(reader) and not writer.option.offload


def _same_copy(problem: Problem, choices: Sequence[Choice], u: int, v: int) -> bool:
    """Whether two readers use one copy that lies beside the trainer's."""
    if problem.units[u].weights != problem.units[v].weights or problem.units[u].trains or problem.units[v].trains:
        return False
    a, b = choices[u], choices[v]
    if a.mesh != b.mesh or _shard(a) != _shard(b) or a.option.offload != b.option.offload:
        return False
    edges = [_source(problem, unit) for unit in (u, v)]
    lags = [edge.staleness if edge else None for edge in edges]
    return lags[0] == lags[1] and not any(_passing(problem, choices, w) for w in (u, v))


def _passing(problem: Problem, choices: Sequence[Choice], unit: int) -> bool:
    """Whether a reader's weights are there only while it runs: regrouped from the trainer's, or given anew each time."""
    edge = _source(problem, unit)
    if edge is None:
        return False
    regrouped = edge.staleness == 0 and choices[edge.writer].mesh == choices[unit].mesh
    return not _shares_with_writer(problem, choices, unit) and (regrouped or choices[unit].option.offload)


def _moves(problem: Problem, choices: Sequence[Choice]) -> list[float]:
    """Seconds of bringing each unit its weights; of several that use one copy the first in ``problem.weights`` pays."""
    moves, paid = [0.0] * len(choices), []
    for edge in problem.weights:
        unit = edge.reader
        if _shares_with_writer(problem, choices, unit) or any(_same_copy(problem, choices, unit, u) for u in paid):
            continue
        paid.append(unit)
        moves[unit] = _transfer(problem, problem.units[unit].weight_bytes, choices[edge.writer], choices[unit])
    return moves


def _transfer(problem: Problem, total: float, writer: Choice, reader: Choice) -> float:
    pools = problem.cluster.pools

    from_host = 0.0
    if writer.option.offload:
        from_host = writer.option.weights / pools[writer.mesh.pool].device.host_bandwidth
    if writer.mesh == reader.mesh:
        data, tensor, pipeline, sharded = _shard(writer)
        together = max(tensor * pipeline * (data if sharded else 1), reader.option.parallelism.tensor)
        link = _link(pools[reader.mesh.pool], reader.mesh.start, min(reader.mesh.size, together))
        missing = total * float(_missing(_shard(writer), _shard(reader)))
        return from_host + (missing / link.bandwidth + link.latency if missing else 0.0)
    if writer.mesh.pool == reader.mesh.pool:
        start = min(writer.mesh.start, reader.mesh.start)
        stop = max(m.start + m.size for m in (writer.mesh, reader.mesh))
        link = _link(pools[reader.mesh.pool], start, stop - start)
    else:
        link = min((pools[c.mesh.pool].tiers[-1] for c in (writer, reader)), key=lambda tier: tier.bandwidth)
    each_sends = total / (writer.mesh.size * link.bandwidth)
    return from_host + total * float(_share(_shard(reader))) / link.bandwidth + each_sends + link.latency


def _share(shard: Shard) -> Fraction:
    """Of the weights, what one device holds."""
    data, tensor, pipeline, sharded = shard
    return Fraction(1, tensor * pipeline * (data if sharded else 1))


def _missing(old: Shard, new: Shard) -> Fraction:
    """Of the weights, what a device lacks of its new share. Along each axis the finer cut lies inside the coarser one, where
    one divides the other; ranks that share parameters by ZeRO-3 hold parts that lie anyhow in one another's."""
    if old == new:
        return Fraction(0)
    kept = Fraction(1)
    for a, b in ((old[1], new[1]), (old[2], new[2])):
        if a % b and b % a:
            return _share(new)
        kept *= min(Fraction(1, a), Fraction(1, b))
    for data, _, _, sharded in (old, new):
        kept /= data if sharded else 1
    return max(Fraction(0), _share(new) - kept)


def _kept(total: float, old: tuple[int, int, int, bool], new: tuple[int, int, int, bool]) -> float:
    """Of a rank's new part, what is in its old one: everything, where nothing changes; the common part of two nested cuts,
    where sharded rows lie anywhere; nothing to count on, where one degree does not divide the other."""
    if old == new:
        return total / (new[1] * new[2] * (new[0] if new[3] else 1))
    kept = total
    for before, after in zip(old[1:3], new[1:3], strict=True):
        if max(before, after) % min(before, after):
            return 0.0
        kept /= max(before, after)
    for ranks, sharded in ((old[0], old[3]), (new[0], new[3])):
        kept /= ranks if sharded else 1
    return kept


def _link(pool: Pool, start: int, count: int) -> Tier:
    """The narrowest group of links of which one joins all of ``count`` devices."""
    for tier in pool.tiers:
        if len({device // tier.size for device in range(start, start + count)}) == 1:
            return tier
    return pool.tiers[-1]


def _overfull(problem: Problem, choices: Sequence[Choice]) -> float:
    """Paints every device with what lies on it."""
    worst = float("-inf")
    for pool, here in enumerate(problem.cluster.pools):
        for device in range(here.size):
            units = [u for u, c in enumerate(choices) if (pool, device) in _devices(c.mesh)]
            if units:
                room = here.device.memory_bytes * (1 - RESERVE)
                worst = max(worst, _bytes(problem, choices, units) - room)
    return worst


def _bytes(problem: Problem, choices: Sequence[Choice], units: Sequence[int]) -> float:
    """What one device must hold that all of ``units`` run on."""
    lasting, most = [], 0.0
    for u in units:
        option = choices[u].option
        passing = _passing(problem, choices, u)
        shares = _shares_with_writer(problem, choices, u)
        extra = (
            option.weights if passing and not option.offload else -option.weights if shares and option.offload else 0.0
        )
        most = max(most, option.transient + extra)
        brought = passing or shares
        if not brought and not any(_same_copy(problem, choices, u, v) for v in lasting):
            lasting.append(u)
    return sum(choices[u].option.held for u in lasting) + most
