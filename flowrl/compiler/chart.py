"""From a placement to what the Plan keeps of it: meshes by name, units with what binds them, transfers, memory, timeline."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.compiler.estimate import Estimate
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
from flowrl.compiler.schedule import simulate

#: Of a shape, in words.
SHAPES = {
    "colocated": "all calls on the same devices",
    "split": "calls on devices of their own",
    "mixed": "some calls share devices, others do not",
}


def chart(mapped: Mapped, *, what_ifs: Sequence[Alternative] = ()) -> Mapping:
    """What the Plan keeps of a placement.

    Args:
        what_ifs: other clusters and workloads, as :func:`ask_what_if` gives them.
    """
    problem, placed, request = mapped.problem, mapped.placed, mapped.request
    names = _mesh_names(placed.choices)
    units = [_unit(mapped, u, names) for u in placed.cost.order]
    lengths = mapped.flow_units.units[0].work
    calibration = request.calibration
    return Mapping(
        pools=tuple(PlannedPool(p.device, p.nodes, p.gpus_per_node, p.tiers) for p in request.cluster.pools),
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
    """How the weights of one unit reach another."""
    problem, choices = mapped.problem, mapped.placed.choices
    source, target = choices[writer], choices[reader]
    pool = mapped.request.cluster.pools[target.mesh.pool]
    share = problem.units[reader].weight_bytes / (target.option.parallelism.tensor * target.option.parallelism.pipeline)
    return PlannedMove(
        model=problem.units[reader].weights,
        writer=problem.units[writer].label,
        reader=problem.units[reader].label,
        total_bytes=share * target.mesh.size,
        bytes_received=share,
        bytes_sent=problem.units[reader].weight_bytes / source.mesh.size,
        peak_extra_bytes=0.0,
        transfers=0,
        tier=pool.tier(target.mesh.start, target.mesh.stop).name,
        seconds=mapped.placed.cost.moves[reader],
    )


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
