"""The ways to run a unit: what the estimates list, less what can never be part of a best placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.problem import RESERVE, Option
from flowrl.compiler.work import Work

if TYPE_CHECKING:
    from flowrl.compiler.architecture import Architecture
    from flowrl.compiler.estimate import Estimator, Table
    from flowrl.compiler.memory import Precision

Floats = NDArray[np.float64]


def options_of(
    estimator: Estimator,
    architecture: Architecture,
    work: Work,
    precision: Precision,
    *,
    read: bool = False,
    fixed: Mapping[str, int] | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
    beside: Sequence[tuple[Architecture, Precision]] = (),
) -> tuple[Option, ...]:
    """All options of a unit that fit into a device by themselves and that another one does not make pointless.

    An option is pointless where another of the same size holds no more, needs no more while it runs, and is faster; by more
    than it costs to bring the weights into its layout, where they are brought every iteration.

    Args:
        read: whether another unit writes the weights: then nothing need go to the host, as they are brought anew.
        fixed: columns of the estimates that are pinned: {"tensor": 4}.
        sizes: by pool, of meshes; by default all that there can be.
        beside: Models that run on the same rows and devices (a teacher in a loss): their weights and forward passes count.
    """
    cluster = estimator.cluster
    found: list[Option] = []
    for pool, here in enumerate(cluster.pools):
        limit = here.device.memory_bytes * (1 - RESERVE)
        wanted = cluster.sizes(pool) if sizes is None else tuple(sizes.get(pool, ()))
        if not wanted:
            continue
        table = estimator.table(
            architecture, work, pool, wanted, precision=precision, memory_limit=int(limit), fixed=dict(fixed or {})
        )
        held, transient = table.held, table.transient
        seconds = table.seconds
        for other, kept_in in beside:
            share = table.tensor * table.pipeline
            held = held + other.num_parameters() * kept_in.weights / share
            ratio = other.flops_forward(work) / architecture.flops_forward(work)
            seconds = seconds + table.compute * ratio / (4 if table.checkpointing.any() else 3)
        fits = held + transient <= limit
        load = 0.0 if read else (2.0 if work.kind == "train" else 1.0)
        moves = work.kind == "train" or read
        margin = table.weights / here.tiers[0].bandwidth + here.tiers[0].latency if moves else np.zeros(len(seconds))
        for size in wanted:
            rows = np.flatnonzero((table.size == size) & fits)
            for row in rows[_worth(table, seconds, held, transient, margin, rows)]:
                found += _both(table, int(row), pool, seconds, held, transient, load / here.device.host_bandwidth)
    return tuple(found)


def _worth(
    table: Table, seconds: Floats, held: Floats, transient: Floats, margin: Floats, rows: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Which of some rows of one size no other one makes pointless; of equal ones the first."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    t, h, x, m = seconds[rows], held[rows], transient[rows], margin[rows]
    layout = np.stack([table.data[rows], table.tensor[rows], table.pipeline[rows], table.zero[rows] == 3])
    alike = (layout[:, :, None] == layout[:, None, :]).all(axis=0)
    # [a, b]: whether a makes b pointless
    sooner = t[:, None] + np.where(alike, 0.0, m[:, None]) <= t[None, :]
    no_worse = sooner & (h[:, None] <= h[None, :]) & (x[:, None] <= x[None, :])
    equal = no_worse & no_worse.T
    first = np.arange(len(rows))[:, None] < np.arange(len(rows))[None, :]
    return ~(no_worse & (~equal | first)).any(axis=0)


def _both(
    table: Table, row: int, pool: int, seconds: Floats, held: Floats, transient: Floats, load: float
) -> list[Option]:
    """A row as it is, and with nothing held between calls, which costs ``load`` seconds a byte."""
    parallelism: Parallelism = table.parallelism(row)
    size, weights = int(table.size[row]), float(table.weights[row])
    t, h, x = float(seconds[row]), float(held[row]), float(transient[row])
    kept = Option(pool, size, parallelism, t, h, x, weights)
    return [kept, Option(pool, size, parallelism, t + h * load, 0.0, x + h, weights, True)]
