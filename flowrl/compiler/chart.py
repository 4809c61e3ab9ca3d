"""From a placement to what the Plan keeps of it: meshes by name, units with what binds them, transfers, memory, timeline."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.compiler.estimate import Estimate
from flowrl.compiler.generation_layout import target_layout, volume
from flowrl.compiler.layout import Layout
from flowrl.compiler.mapper import Mapped, held_as
from flowrl.compiler.mapping import (
    Alternative,
    Mapping,
    MemoryByCause,
    PlannedMesh,
    PlannedMove,
    PlannedPool,
    PlannedUnit,
    Stretch,
)
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.problem import Choice, copies
from flowrl.compiler.resharding import plan_transfers
from flowrl.compiler.schedule import simulate
from flowrl.compiler.transfers import ReshardPlan
from flowrl.compiler.weights import Weights

#: Devices of both meshes up to which each transfer of weights is listed and counted.
LISTED_DEVICES = 64
#: Memory that moving weights may take beside both layouts.
BUCKET_BYTES = 2**30
#: Of a shape, in words.
SHAPES = {
    "colocated": "all calls on the same devices",
    "split": "calls on devices of their own",
    "mixed": "some calls share devices, others do not",
}


def chart(mapped: Mapped, *, what_ifs: Sequence[Alternative] = ()) -> Mapping:
    """What the Plan keeps of a placement.

    Args:
        what_ifs: other clusters and workloads, as :func:`flowrl.compiler.what_if.what_ifs` gives them.
    """
    problem, placed, request = mapped.problem, mapped.placed, mapped.request
    names = _mesh_names(placed.choices)
    units = [_unit(mapped, u, names) for u in placed.cost.order]
    lengths = mapped.flow_units.units[0].work
    calibration = request.calibration
    return Mapping(
        pools=tuple(PlannedPool(p.device, p.nodes, p.gpus_per_node, p.tiers) for p in problem.cluster.pools),
        meshes=tuple(PlannedMesh(name, m.pool, m.start, m.size) for m, name in names.items()),
        units=tuple(units),
        moves=_moves(mapped),
        stretches=_stretches(mapped),
        slots=simulate(problem, placed.choices, placed.cost),
        period=placed.cost.period,
        critical=tuple(problem.units[u].label for u in placed.cost.critical),
        critical_span=placed.cost.critical_span,
        lower_bound=placed.lower_bound,
        exact=placed.exact,
        evaluations=placed.evaluations,
        alternatives=tuple(
            Alternative(SHAPES[shape], seconds)
            for shape, choices, seconds in placed.by_shape
            if choices != placed.choices
        ),
        what_ifs=tuple(what_ifs),
        calibrated="data sheets" if calibration is None else f"{calibration.machine.cpu}, {calibration.made_at}",
        prompt_tokens=float(lengths.prompt_tokens),
        response_tokens=float(lengths.response_tokens),
        max_response_tokens=float(lengths.max_response_tokens),
    )


def _mesh_names(choices: Sequence[Choice]) -> dict[Mesh, str]:
    """By mesh its name: in the order of their first device, the larger first."""
    meshes = sorted({c.mesh for c in choices}, key=lambda m: (m.pool, m.start, -m.size))
    return {mesh: f"mesh{k}" for k, mesh in enumerate(meshes)}


def _unit(mapped: Mapped, u: int, names: dict[Mesh, str]) -> PlannedUnit:
    unit, choice, cost = mapped.flow_units.units[u], mapped.placed.choices[u], mapped.placed.cost
    architecture, precision = held_as(unit.model)
    found: Estimate = mapped.estimator.estimate(
        architecture, unit.work, choice.mesh, choice.option.parallelism, precision=precision
    )
    return PlannedUnit(
        label=unit.label,
        call=unit.call,
        model=unit.model.name,
        kind=unit.work.kind,
        mesh=names[choice.mesh],
        parallelism=choice.option.parallelism,
        offload=choice.option.offload,
        seconds=cost.seconds[u],
        move_seconds=cost.moves[u],
        compute=found.compute,
        memory=found.memory,
        link=found.link,
        bubble=found.bubble,
        flops=found.flops,
        by_cause=MemoryByCause(
            found.weights,
            found.gradients,
            found.optimizer,
            found.activations,
            found.logits,
            found.kv_cache,
            found.buckets,
        ),
    )


def _moves(mapped: Mapped) -> tuple[PlannedMove, ...]:
    """Weights that are brought every iteration, by the closed form that the search used."""
    problem, choices = mapped.problem, mapped.placed.choices
    keys = copies(problem, choices)
    moves: list[PlannedMove] = []
    seen: set[object] = set()
    for edge in problem.weights:
        key = keys[edge.reader]
        if key in seen or key[0] == "trained":
            continue
        seen.add(key)
        moves.append(planned_move(mapped, edge.writer, edge.reader))
    return tuple(moves)


def planned_move(mapped: Mapped, writer: int, reader: int) -> PlannedMove:
    """How the weights of one unit reach another: counted from the transfers themselves where devices are few, else by the
    closed form that the search used."""
    problem, choices = mapped.problem, mapped.placed.choices
    source, target = choices[writer], choices[reader]
    transfers = _transfers(mapped, writer, reader)
    if transfers is not None:
        received = max(transfers.bytes_received.values(), default=0)
        total, sent = transfers.total_bytes, max(transfers.bytes_sent.values(), default=0)
        extra, messages = transfers.peak_extra_bytes, transfers.num_messages
        tier = list(transfers.bytes_by_tier)[-1] if transfers.bytes_by_tier else ""
    else:
        received = volume(
            problem.units[reader].weight_bytes,
            source.option.parallelism,
            target.option.parallelism,
            same_mesh=source.mesh == target.mesh,
        )
        total, extra, messages = received * target.mesh.size, min(received, BUCKET_BYTES), 0
        sent = total / source.mesh.size
        tier = _tier(mapped, source.mesh, target.mesh) if received else ""
    return PlannedMove(
        model=problem.units[reader].weights,
        writer=problem.units[writer].label,
        reader=problem.units[reader].label,
        total_bytes=float(total),
        bytes_received=float(received),
        bytes_sent=float(sent),
        peak_extra_bytes=float(extra),
        transfers=messages,
        tier=tier,
        seconds=mapped.placed.cost.moves[reader],
    )


def _transfers(mapped: Mapped, writer: int, reader: int) -> ReshardPlan | None:
    """The transfers between the layouts of two units; None where there are too many devices to list them all."""
    source, target = mapped.placed.choices[writer], mapped.placed.choices[reader]
    if source.mesh.size + target.mesh.size > LISTED_DEVICES:
        return None
    unit = mapped.flow_units.units[writer]
    architecture, precision = held_as(unit.model)
    weights = Weights.of(architecture, head=unit.work.head, dtype_bytes=max(1, round(precision.weights)))
    lies = Layout(source.mesh, source.option.parallelism)
    shall = target_layout(lies, target.mesh, target.option.parallelism, num_layers=architecture.num_layers)
    return plan_transfers(weights, lies, shall, mapped.problem.cluster, BUCKET_BYTES)


def _tier(mapped: Mapped, source: Mesh, target: Mesh) -> str:
    """The innermost tier that joins two meshes."""
    pool = mapped.problem.cluster.pools[target.pool]
    if source.pool != target.pool:
        return "between pools"
    return pool.tier(min(source.start, target.start), max(source.stop, target.stop)).name


def _stretches(mapped: Mapped) -> tuple[Stretch, ...]:
    problem, placed = mapped.problem, mapped.placed
    return tuple(
        Stretch(
            pool,
            start,
            stop,
            tuple(
                problem.units[u].label
                for u in placed.cost.order
                if (m := placed.choices[u].mesh).pool == pool and m.start <= start and stop <= m.stop
            ),
            held,
            transient,
            problem.memory(pool),
        )
        for (pool, start, stop), held, transient in placed.cost.memory
    )
