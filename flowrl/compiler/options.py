"""The ways to run a unit: what the estimates list, less what can never be part of a best placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowrl.compiler.collector import collector_paused
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.problem import RESERVE, Option
from flowrl.compiler.work import Work

if TYPE_CHECKING:
    from flowrl.compiler.architecture import Architecture
    from flowrl.compiler.estimate import Estimator, Table
    from flowrl.compiler.memory import Precision

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


@collector_paused()
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
            length = work.prompt_tokens + work.response_tokens
            forward = other.flops_forward(work.tokens, length, predicted=work.tokens) * work.epochs
            seconds = seconds + table.compute * (forward / table.flops)
        fits = held + transient <= limit
        load = 0.0 if read else (2.0 if work.kind == "train" else 1.0)
        moves = work.kind == "train" or read
        margin = table.weights / here.tiers[0].bandwidth + here.tiers[0].latency if moves else np.zeros(len(seconds))
        all_rows = np.flatnonzero(fits)
        kept = _worth(table, seconds, held, transient, margin, all_rows)
        found += _options(table, kept, pool, seconds, held, transient)
        if here.device.kind == "cpu":  # whose memory is the host's
            continue
        # The same with nothing held between calls: loading costs time, and all is needed only while it runs.
        loaded, none, everything = (
            seconds + held * load / here.device.host_bandwidth,
            np.zeros_like(held),
            held + transient,
        )
        emptied = _worth(table, loaded, none, everything, margin, kept)
        found += _options(table, emptied, pool, loaded, none, everything, offload=True)
    return tuple(found)


def _worth(table: Table, seconds: Floats, held: Floats, transient: Floats, margin: Floats, rows: Rows) -> Rows:
    """Those of some rows that no other one of their size makes pointless; of equal ones the first.

    Of every size at once: the fastest row strikes out what it makes pointless, then the fastest of those that are left, and
    so on.
    """
    rows = rows[np.lexsort((rows, seconds[rows], table.size[rows]))]
    layout = (table.data * 65536 + table.tensor) * 65536 * 2 + table.pipeline * 2 + (table.zero == 3)
    done: list[Rows] = []
    nth = 0
    while len(rows):
        begins = np.flatnonzero(np.diff(table.size[rows], prepend=-1))
        counts = np.diff(begins, append=len(rows))
        group = np.repeat(np.arange(len(begins)), counts)
        place = np.arange(len(rows)) - begins[group]
        if nth:  # sizes whose rows have all had their turn are finished
            finished = counts[group] <= nth
            done.append(rows[finished])
            rows, group, place = rows[~finished], group[~finished], place[~finished]
        if not len(rows):
            break
        by = _nth(rows, group, place, nth)
        late = seconds[by] + np.where(layout[by] == layout[rows], 0.0, margin[by]) <= seconds[rows]
        pointless = late & (held[by] <= held[rows]) & (transient[by] <= transient[rows]) & (place > nth)
        rows = rows[~pointless]
        nth += 1
    return np.concatenate(done) if done else rows


def _nth(rows: Rows, group: Rows, place: Rows, nth: int) -> Rows:
    """For each row, the row of its group that has the place ``nth``."""
    of_group = np.zeros(group.max() + 1, dtype=rows.dtype)
    of_group[group[place == nth]] = rows[place == nth]
    return of_group[group]


def _options(
    table: Table, rows: Rows, pool: int, seconds: Floats, held: Floats, transient: Floats, offload: bool = False
) -> Iterator[Option]:
    names = ("data", "tensor", "pipeline", "zero", "checkpointing", "micro_batches")
    shapes = zip(*(getattr(table, name)[rows].tolist() for name in names), strict=True)
    numbers = zip(*(c[rows].tolist() for c in (table.size, seconds, held, transient, table.weights)), strict=True)
    for (data, tensor, pipeline, zero, kept, micro), (size, t, h, x, weights) in zip(shapes, numbers, strict=True):
        parallelism = Parallelism(data, tensor, pipeline, zero, bool(kept), micro)
        yield Option(pool, size, parallelism, t, h, x, weights, offload)
