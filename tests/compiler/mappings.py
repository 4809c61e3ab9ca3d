"""Mappings for tests: one of PPO made by hand, of any number of nodes; and any at random."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.mapping import (
    Alternative,
    Mapping,
    MemoryByCause,
    PlannedMesh,
    PlannedMove,
    PlannedPool,
    PlannedUnit,
    Slot,
    Stretch,
)
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.presets import Device, Tier

GB = 10**9


def pools_of(cluster: Cluster) -> tuple[PlannedPool, ...]:
    return tuple(PlannedPool(p.device, p.nodes, p.gpus_per_node, p.tiers) for p in cluster.pools)


def ppo(nodes: int = 2, **settings: Any) -> Mapping:
    """Sampling on the first half of the devices, with a staleness of 1; scoring and training on the other half; the last
    device of the critic's quarter shared by nobody else. Period 40 s: training binds."""
    cluster = Cluster("H100", nodes=nodes)
    half = 4 * nodes
    meshes = (PlannedMesh("A", 0, 0, half), PlannedMesh("B", 0, half, half), PlannedMesh("C", 0, half, half // 2))
    units = (
        _unit("rollout", "actor", "generate", meshes[0], 30.0, Parallelism(data=half // 2, tensor=2), move=0.5),
        _unit("values", "critic", "score", meshes[2], 4.0, Parallelism(data=half // 2), binds="compute"),
        _unit("ref", "actor.frozen", "score", meshes[1], 6.0, Parallelism(data=half, micro_batches=4), offload=True),
        _unit(
            "update", "actor", "train", meshes[1], 30.0,
            Parallelism(data=half // 4, tensor=2, pipeline=2, zero=1, checkpointing=True, micro_batches=8),
        ),
    )  # fmt: skip
    starts = {"rollout": 0.0, "values": 30.0, "ref": 34.0, "update": 40.0}
    slots = tuple(
        Slot(u.label, i, starts[u.label] + 40.0 * i, starts[u.label] + 40.0 * i + u.seconds)
        for i in range(4)
        for u in units
    )
    capacity = 80 * GB * 0.92
    middle = half + half // 2
    made = {
        "pools": pools_of(cluster),
        "meshes": meshes,
        "units": units,
        "moves": (
            PlannedMove("actor", "update", "rollout", 14e9 * half, 14e9, 20e9, 2**28, 96, "network", 0.5),
            PlannedMove("actor", "update", "old", 0.0, 0.0, 0.0, 0.0, 0, "", 0.0),
        ),
        "stretches": (
            Stretch(0, 0, half, ("rollout",), 7e9, 50e9, capacity),
            Stretch(0, half, middle, ("values", "ref", "update"), 40e9, 31e9, capacity),
            Stretch(0, middle, 2 * half, ("ref", "update"), 33e9, 31e9, capacity),
        ),
        "slots": tuple(sorted(slots, key=lambda s: s.start)),
        "period": 40.0,
        "critical": ("values", "ref", "update"),
        "critical_span": 1,
        "lower_bound": 38.0,
        "exact": False,
        "evaluations": 12345,
        "alternatives": (
            Alternative("all colocated", 44.0),
            Alternative("split", None, "the actor needs 91.2 GB a device, 73.6 GB are there"),
        ),
        "what_ifs": (Alternative("one node more", 33.0), Alternative("twice the response tokens", 71.5)),
        "prompt_tokens": 1024.0,
        "response_tokens": 1024.0,
        "max_response_tokens": 2048.0,
    }
    return Mapping(**{**made, **settings})


def _unit(
    label: str,
    model: str,
    kind: str,
    mesh: PlannedMesh,
    seconds: float,
    parallelism: Parallelism,
    *,
    binds: str = "memory",
    move: float = 0.0,
    offload: bool = False,
) -> PlannedUnit:
    rest = seconds - move
    parts = {"compute": 0.2 * rest, "memory": 0.1 * rest, "link": 0.1 * rest, "bubble": 0.0}
    parts[binds] += 0.6 * rest
    train = kind == "train"
    by_cause = MemoryByCause(
        7e9,
        7e9 * train,
        21e9 * train,
        9e9 * train,
        2e9 if kind != "generate" else 0.0,
        50e9 * (kind == "generate"),
        1e8,
    )
    return PlannedUnit(
        label, label, model, kind, mesh.name, parallelism, offload, seconds, move, **parts,
        flops=seconds * mesh.size * 300e12, by_cause=by_cause,
    )  # fmt: skip


# -- at random: types right, sense none -----------------------------------------------------------------------------------

_NUMBER = st.floats(0, 1e15) | st.integers(0, 10**12)
_TEXT = st.text(max_size=12) | st.sampled_from(["a", "rollout", "<b>&\"'", "a\nb\x1b[31m", "x" * 400])
_WHOLE = st.integers(1, 64)


def _built(cls: type, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    kinds = {"str": _TEXT, "float": _NUMBER, "int": _WHOLE, "bool": st.booleans(), "float | None": st.none() | _NUMBER}
    return st.builds(cls, **{f.name: special[f.name] if f.name in special else kinds[str(f.type)] for f in fields(cls)})


def _tuple(of: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=least, max_size=3).map(tuple)


@st.composite
def mappings(draw: st.DrawFn) -> Mapping:
    """Every field of its type; names of meshes and units that are referred to are there."""
    pools = draw(_tuple(_built(PlannedPool, device=_built(Device), tiers=_tuple(_built(Tier))), least=1))
    pool = st.integers(0, len(pools) - 1)
    meshes = draw(_tuple(_built(PlannedMesh, pool=pool, start=st.integers(0, 64)), least=1))
    names = st.sampled_from([mesh.name for mesh in meshes])
    unit = _built(
        PlannedUnit,
        kind=st.sampled_from(["generate", "score", "train"]),
        mesh=names,
        parallelism=_built(Parallelism),
        by_cause=_built(MemoryByCause),
    )
    units = draw(_tuple(unit, least=1))
    label = st.sampled_from([u.label for u in units])
    start = st.integers(0, 64)
    stretch = st.tuples(pool, start, _WHOLE, _tuple(label), _NUMBER, _NUMBER, _NUMBER).map(
        lambda t: Stretch(t[0], t[1], t[1] + t[2], *t[3:])
    )
    return draw(
        _built(
            Mapping,
            pools=st.just(pools),
            meshes=st.just(meshes),
            units=st.just(units),
            moves=_tuple(_built(PlannedMove)),
            stretches=_tuple(stretch),
            slots=_tuple(_built(Slot, unit=label)),
            critical=_tuple(label),
            alternatives=_tuple(_built(Alternative)),
            what_ifs=_tuple(_built(Alternative)),
        )
    )
