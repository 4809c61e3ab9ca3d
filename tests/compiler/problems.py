"""Placement problems at random, and by hand, for the tests of what reckons with them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.problem import Choice, Option, Problem, Unit, WeightEdge
from flowrl.compiler.work import Work

GB = 10**9


def unit(label: str, model: str = "actor", kind: str = "score", weight_bytes: float = 0.0) -> Unit:
    work = Work(kind, 8, 100.0, 200.0, 200.0)  # type: ignore[arg-type]
    return Unit(label, label, model, model, work, kind == "train", weight_bytes)


def choice(start: int, size: int, seconds: float, *, pool: int = 0, **settings: object) -> Choice:
    """On devices from ``start``; ``tensor``, ``pipeline``, ``zero`` are of the parallelism, all else of the option."""
    axes = {name: settings.pop(name) for name in ("tensor", "pipeline", "zero") if name in settings}
    parallelism = Parallelism(**axes)  # type: ignore[arg-type]
    parallelism = replace(parallelism, data=size // (parallelism.tensor * parallelism.pipeline))
    sizes = {"held": 0.0, "transient": 0.0, "weights": 0.0, "offload": False, **settings}
    return Choice(Mesh(pool, start, size), Option(pool, size, parallelism, seconds, **sizes))  # type: ignore[arg-type]


def problem(cluster: Cluster, units: list[Unit], data: list[tuple[int, int]], weights: list[WeightEdge]) -> Problem:
    return Problem(cluster, tuple(units), tuple(data), tuple(weights), tuple(() for _ in units))


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Problem, list[Choice]]:
    """Up to seven units with data and weight edges of staleness 0 to 2, on meshes that may overlap. Seconds are whole numbers,
    so that the steady state repeats itself exactly."""
    cluster = Cluster("H100", nodes=draw(st.integers(1, 3)), gpus_per_node=draw(st.sampled_from([1, 2, 4])))
    count = draw(st.integers(1, 7))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    # Few edges and small meshes as often as many and large ones: what waits for nothing else shows each rule by itself.
    density, largest = draw(st.integers(0, 3)), draw(st.sampled_from([1, 1, 2, 12]))
    data = [pair for pair in pairs if draw(st.integers(1, 4)) <= density]
    writers = [u for u in range(count) if draw(st.integers(0, 2)) == 0]
    units = [unit(f"u{u}", f"m{u}", "train" if u in writers else "score") for u in range(count)]
    weights: list[WeightEdge] = []
    for reader in range(count):
        if reader in writers or not writers:
            continue
        writer = draw(st.sampled_from(writers))
        # What the writer has made in this iteration reaches no reader of the version before.
        least = 0 if writer > reader else 1
        if draw(st.integers(0, 3)):
            staleness = draw(st.integers(least, 2))
            weights.append(WeightEdge(writer, reader, staleness))
            units[reader] = replace(units[reader], weights=units[writer].weights, model=units[writer].model)
    choices = []
    for _ in units:
        size = draw(st.sampled_from([n for n in cluster.sizes() if n <= largest]))
        mesh = draw(st.sampled_from(list(cluster.meshes(size))))
        seconds = draw(st.integers(1, 12))
        option = Option(0, size, Parallelism(data=size), float(seconds), 0.0, 0.0, 0.0)
        choices.append(Choice(mesh, option))
    return problem(cluster, units, data, weights), choices
