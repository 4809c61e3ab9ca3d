"""The placement problem: units, the ways to run each, what orders them, and what an assignment of all costs.

Every unit gets a mesh and an option (a parallelism, resident or offloaded). Two units whose meshes share a device take turns,
in one order that is the same in every iteration. :func:`evaluate` gives the time of an iteration in the steady state: the
largest ratio, over the cycles of who waits for whom, of the time of a cycle to the iterations that it spans (the cycle time
of a timed event graph: Baccelli et al., "Synchronization and Linearity", 1992, theorem 2.28).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.cycle_time import cycle_time
from flowrl.compiler.generation_layout import volume
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.work import Work

#: Of a device's memory, what the allocator, kernels and communication libraries take for themselves.
RESERVE = 0.08


@dataclass(frozen=True)
class Unit:
    """One call's use of one Model: what is placed.

    Args:
        label: unique: the call's, with the Model's name where the call holds several.
        call: label of the call.
        model: name of the Model.
        weights: name of the Model that owns the weights: units of one name can share a copy.
        work: what it does in an iteration.
        trains: whether it writes the weights.
        weight_bytes: of one whole copy, in the precision that it computes in.
    """

    label: str
    call: str
    model: str
    weights: str
    work: Work
    trains: bool
    weight_bytes: float


@dataclass(frozen=True, eq=False)
class Option:
    """One way to run one unit on a mesh of a size, wherever it lies. It is equal to itself alone, which is quick to say.

    Args:
        pool: that the mesh is of.
        size: devices.
        parallelism: over them.
        seconds: of the unit in one iteration, loading included where it is offloaded.
        held: bytes on the fullest rank that stay between calls (weights, and the optimiser of a trainer).
        transient: bytes on the fullest rank that are needed only while it runs.
        weights: bytes of the weights alone on the fullest rank.
        offload: whether it holds nothing while it does not run: its state is in host memory, or, of a unit that reads what
            another writes, it is given the weights anew each time. ``held`` is then 0, and in ``transient``.
    """

    pool: int
    size: int
    parallelism: Parallelism
    seconds: float
    held: float
    transient: float
    weights: float
    offload: bool = False


@dataclass(frozen=True)
class Choice:
    """Where a unit runs, and how."""

    mesh: Mesh
    option: Option


@dataclass(frozen=True)
class WeightEdge:
    """In iteration i, ``reader`` uses what ``writer`` made in iteration i − 1 − ``staleness``; both are indices of units."""

    writer: int
    reader: int
    staleness: int = 0


@dataclass(frozen=True)
class Problem:
    """What is to be placed.

    Args:
        cluster: on what.
        units: in an order that the data edges allow.
        data: (before, after): indices of units, within one iteration.
        weights: which unit reads what which other writes.
        options: of each unit, all ways to run it.
        pinned: by index of a unit, the only mesh that it may have.
    """

    cluster: Cluster
    units: tuple[Unit, ...]
    data: tuple[tuple[int, int], ...]
    weights: tuple[WeightEdge, ...]
    options: tuple[tuple[Option, ...], ...]
    pinned: tuple[tuple[int, Mesh], ...] = ()

    def memory(self, pool: int) -> float:
        """Bytes of a device that a plan may use."""
        return self.cluster.pools[pool].device.memory_bytes * (1 - RESERVE)

    @cached_property
    def dependencies(self) -> tuple[tuple[int, int, int], ...]:
        """(u, v, lag): v in iteration i starts when u of iteration i − lag has ended, whatever the meshes are."""
        edges = [(u, v, 0) for u, v in self.data] + [(u, u, 1) for u in range(len(self.units))]
        for edge in self.weights:
            edges.append((edge.writer, edge.reader, 1 + edge.staleness))
            if edge.staleness == 0:  # nobody changes the weights of version i before all its readers are done
                edges.append((edge.reader, edge.writer, 0))
        return tuple(edges)

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """By unit, those that wait for it within an iteration."""
        return tuple(
            tuple(sorted({v for u, v, lag in self.dependencies if u == unit and lag == 0}))
            for unit in range(len(self.units))
        )

    @cached_property
    def sources(self) -> dict[int, WeightEdge]:
        """By unit that reads what another writes, the edge."""
        return {edge.reader: edge for edge in self.weights}


@dataclass(frozen=True)
class Cost:
    """What an assignment costs.

    Args:
        period: seconds of an iteration in the steady state.
        seconds: of each unit, weights moved in included.
        moves: seconds of those that moving weights takes, a unit each.
        order: indices of units, as devices that they share take them.
        critical: indices of the units of the cycle that sets the period.
        critical_span: iterations that this cycle spans.
        memory: ((pool, start, stop), bytes held, bytes of the greatest transient) of each stretch of devices.
        overfull: bytes by which the fullest device has too few; 0 where all fits.
    """

    period: float
    seconds: tuple[float, ...]
    moves: tuple[float, ...]
    order: tuple[int, ...]
    critical: tuple[int, ...]
    critical_span: int
    memory: tuple[tuple[tuple[int, int, int], float, float], ...] = field(default=(), repr=False)
    overfull: float = 0.0


def evaluate(problem: Problem, choices: Sequence[Choice]) -> Cost:
    """What an assignment of all units costs. The order on shared devices: whoever has most still to come after it goes
    first; equal ones in the order of the units."""
    moves = move_seconds(problem, choices)
    seconds = tuple(c.option.seconds + m for c, m in zip(choices, moves, strict=True))
    order = _order(problem, seconds)
    edges = waits(problem, [c.mesh for c in choices], order)
    period, critical, span = cycle_time(seconds, edges, order, _busiest(choices, seconds, order), set(problem.sources))
    memory = memory_of(problem, choices)
    over = max((h + t - problem.memory(stretch[0]) for stretch, h, t in memory), default=0.0)
    return Cost(period, seconds, moves, order, critical, span, memory, max(0.0, over))


def _busiest(choices: Sequence[Choice], seconds: Sequence[float], order: Sequence[int]) -> tuple[float, list[int], int]:
    """The units of the device with most work, which take turns: a cycle to begin with."""
    best: tuple[float, list[int]] = (-1.0, [])
    for pool, device in {(c.mesh.pool, c.mesh.start) for c in choices}:
        here = [u for u in order if (m := choices[u].mesh).pool == pool and m.start <= device < m.stop]
        load = sum([seconds[u] for u in here])
        if load > best[0] or (load == best[0] and here < best[1]):
            best = (load, here)
    return (*best, 1)


def waits(problem: Problem, meshes: Sequence[Mesh], order: Sequence[int]) -> list[tuple[int, int, int]]:
    """(u, v, lag): v in iteration i starts when u of iteration i − lag has ended."""
    edges = list(problem.dependencies)
    for i, u in enumerate(order):
        pool, start, stop = meshes[u].pool, meshes[u].start, meshes[u].stop
        for v in order[i + 1 :]:
            other = meshes[v]
            if other.start < stop and start < other.stop and other.pool == pool:
                edges.append((u, v, 0))
                edges.append((v, u, 1))
    return edges


def _order(problem: Problem, seconds: Sequence[float]) -> tuple[int, ...]:
    count = len(problem.units)
    after = problem.followers
    tails = [0.0] * count
    waiting = [0] * count
    for u in reversed(range(count)):
        longest = 0.0
        for v in after[u]:
            waiting[v] += 1
            longest = max(longest, tails[v])
        tails[u] = seconds[u] + longest
    ready, order = [u for u in range(count) if not waiting[u]], []
    while ready:
        u = max(ready, key=lambda u: (tails[u], -u))
        ready.remove(u)
        order.append(u)
        for v in after[u]:
            waiting[v] -= 1
            if not waiting[v]:
                ready.append(v)
    return tuple(order)


# -- weights: who holds them, and what moves ----------------------------------------------------------------------------


def copies(problem: Problem, choices: Sequence[Choice]) -> list[tuple[object, ...]]:
    """By unit, the copy of the weights that it uses: equal keys are one copy, which is held, and moved, once.

    A reader on the very mesh of its writer with the same layout uses the writer's own weights; with another layout it holds
    its copy only while it runs ("regrouped"), and so does one that is offloaded: it is given the weights anew each time, so
    that nothing need go to the host. Anywhere else, and with a staleness above 0, it holds a copy of its own.
    """
    incoming = problem.sources
    keys: list[tuple[object, ...]] = []
    for u, (unit, choice) in enumerate(zip(problem.units, choices, strict=True)):
        layout = choice.option.parallelism.layout
        edge = incoming.get(u)
        if unit.trains:
            keys.append(("trained", unit.weights))
        elif edge is None:
            keys.append(("held", unit.weights, choice.mesh, layout, choice.option.offload, 0))
        else:
            writer = choices[edge.writer]
            here = edge.staleness == 0 and writer.mesh == choice.mesh
            if here and writer.option.parallelism.layout == layout and not writer.option.offload:
                keys.append(("trained", unit.weights))
            elif here or choice.option.offload:
                keys.append(("regrouped", unit.weights, u))
            else:
                keys.append(("held", unit.weights, choice.mesh, layout, choice.option.offload, edge.staleness))
    return keys


def move_seconds(problem: Problem, choices: Sequence[Choice]) -> tuple[float, ...]:
    """By unit, seconds in which the weights that it reads are brought from where they are written. Of units that share a
    copy the first pays."""
    keys = copies(problem, choices)
    seconds, paid = [0.0] * len(choices), set()
    for edge in problem.weights:
        key = keys[edge.reader]
        if key in paid or key[0] == "trained":
            continue
        paid.add(key)
        unit = problem.units[edge.reader]
        seconds[edge.reader] = transfer_seconds(
            problem.cluster, unit.weight_bytes, choices[edge.writer], choices[edge.reader]
        )
    return tuple(seconds)


def transfer_seconds(cluster: Cluster, weight_bytes: float, writer: Choice, reader: Choice) -> float:
    """Seconds to bring a Model's weights from the layout that trains it to one that reads it.

    On one mesh a rank receives what its new share exceeds its old one by (HybridFlow, arXiv 2409.19256, §5.3); on another,
    its whole share, and the senders share the sending.
    """
    pool = cluster.pools[reader.mesh.pool]
    old, new = writer.option.parallelism, reader.option.parallelism
    fetched = 0.0  # from the host's memory, where the trainer is offloaded
    if writer.option.offload:
        fetched = writer.option.weights / cluster.pools[writer.mesh.pool].device.host_bandwidth
    same = writer.mesh == reader.mesh
    received = volume(weight_bytes, old, new, same_mesh=same)
    if same:
        ranks = old.tensor * old.pipeline * (old.data if old.zero == 3 else 1)
        near = pool.tier(reader.mesh.start, reader.mesh.start + min(reader.mesh.size, max(ranks, new.tensor)))
        return fetched + (received / near.bandwidth + near.latency if received else 0.0)
    if writer.mesh.pool == reader.mesh.pool:
        start = min(writer.mesh.start, reader.mesh.start)
        far = pool.tier(start, max(writer.mesh.stop, reader.mesh.stop))
    else:
        far = min((cluster.pools[m.pool].tiers[-1] for m in (writer.mesh, reader.mesh)), key=lambda t: t.bandwidth)
    return fetched + received / far.bandwidth + weight_bytes / (writer.mesh.size * far.bandwidth) + far.latency


def memory_of(problem: Problem, choices: Sequence[Choice]) -> tuple[tuple[tuple[int, int, int], float, float], ...]:
    """((pool, start, stop), bytes held, bytes of the greatest transient) of each stretch of devices with the same units."""
    rows: list[tuple[int, int, int, object, float, float]] = []
    for choice, key, unit in zip(choices, copies(problem, choices), problem.units, strict=True):
        mesh, option = choice.mesh, choice.option
        held, transient = option.held, option.transient
        if key[0] == "regrouped":
            held, transient = 0.0, transient + (0.0 if option.offload else option.weights)
        elif key[0] == "trained" and not unit.trains:
            held, transient = -1.0, transient - (option.weights if option.offload else 0.0)
        rows.append((mesh.pool, mesh.start, mesh.stop, key, held, transient))
    stretches: list[tuple[tuple[int, int, int], float, float]] = []
    for pool in sorted({row[0] for row in rows}):
        here = [row for row in rows if row[0] == pool]
        ends = sorted({row[1] for row in here} | {row[2] for row in here})
        for start, stop in itertools.pairwise(ends):
            kept: dict[object, float] = {}
            most, used = 0.0, False
            for _, first, last, key, held, transient in here:
                if first <= start and stop <= last:
                    used = True
                    most = max(most, transient)
                    if held >= 0:  # a reader of the trainer's own copy adds nothing to it
                        kept[key] = held
            if used:
                stretches.append(((pool, start, stop), sum(kept.values()), most))
    return tuple(stretches)
