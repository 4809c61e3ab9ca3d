"""Rows of a batch from one mesh to another with another number of data-parallel ranks.

Each data-parallel rank has consecutive rows, as evenly as groups allow: the rows of one group are never apart. All devices of
a data-parallel rank (its tensor ranks and stages) have the same rows, so they share the sending, and each needs all of them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.links import Links, mesh_problems, shared
from flowrl.errors import FlowError


class RowTransfer(NamedTuple):
    """Rows ``start`` … ``stop − 1`` of the batch, from one device to another."""

    sender: DeviceId
    receiver: DeviceId
    start: int
    stop: int
    bytes: int


class RowCopy(NamedTuple):
    """Rows that a device of the target has already."""

    device: DeviceId
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class BatchPlan:
    """Who sends which rows to whom.

    Args:
        source_rows: (start, stop) of each data-parallel rank of the source.
        target_rows: the same of the target.
        transfers: what is sent.
        copies: what is there already.
        bytes_received: of each device of the target.
        bytes_sent: of each device of the source.
        bytes_by_tier: over links of each tier.
        seconds: estimated, of the device that takes longest: its bytes at the rates of the links, and a latency a message.
    """

    source_rows: tuple[tuple[int, int], ...]
    target_rows: tuple[tuple[int, int], ...]
    transfers: tuple[RowTransfer, ...] = field(repr=False)
    copies: tuple[RowCopy, ...] = field(repr=False)
    bytes_received: Mapping[DeviceId, int] = field(repr=False)
    bytes_sent: Mapping[DeviceId, int] = field(repr=False)
    bytes_by_tier: Mapping[str, int]
    seconds: float


def split_rows(groups: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Consecutive rows of each of ``parts`` ranks, (start, stop).

    Each cut is at the end of the group that is nearest to an even one, so no rank has more than an even share and the rows of
    the largest group; with fewer groups than ranks some have none.

    Args:
        groups: rows of each group, in the order of the batch; ones where rows stand alone.
        parts: ranks.
    """
    ends = [0, *itertools.accumulate(groups)]
    cuts = []
    for i in range(parts + 1):
        even = ends[-1] * i / parts
        at = bisect.bisect_left(ends, even)
        cuts.append(min(ends[max(0, at - 1) : at + 1], key=lambda end: (abs(end - even), end)))
    return list(itertools.pairwise(cuts))


def plan_batch(
    groups: Sequence[int], row_bytes: int | Sequence[int], source: Layout, target: Layout, cluster: Cluster
) -> BatchPlan:
    """Plan how a batch that is split over one mesh comes to be split over another.

    Args:
        groups: rows of each group, in the order of the batch.
        row_bytes: of every row, or of each: rows are ragged.
        source: the mesh that has the batch, and its data-parallel ranks.
        target: the mesh that needs it.
        cluster: whose links join the devices.

    Raises:
        FlowError: group sizes or bytes that cannot be, or a mesh outside of the cluster.
    """
    num_rows = sum(groups)
    sizes = [row_bytes] * num_rows if isinstance(row_bytes, int) else list(row_bytes)
    problems = [p for what, x in (("source", source), ("target", target)) for p in mesh_problems(x.mesh, cluster, what)]
    problems += [f"{what}: {p}" for what, x in (("source", source), ("target", target)) for p in x.problems()]
    if min(groups, default=1) < 1:
        problems.append(f"groups holds {min(groups)}; expected at least 1 row each")
    if len(sizes) != num_rows or min(sizes, default=0) < 0:
        problems.append(f"row_bytes holds {len(sizes)} numbers; expected one of each of {num_rows} rows, not negative")
    if problems:
        raise FlowError("A batch cannot be moved so: " + "; ".join(problems))
    before = [0, *itertools.accumulate(sizes)]
    have = split_rows(groups, source.parallelism.data)
    need = split_rows(groups, target.parallelism.data)
    here, there = source.devices, target.devices
    links = Links(cluster, here, there)
    has = [source.coordinates(d).data for d in here]
    holders = [[i for i, rank in enumerate(has) if rank == data] for data in range(len(have))]
    sent = [0] * len(here)
    moved = np.zeros((len(here), len(there)), dtype=np.int64)
    messages = np.zeros_like(moved)
    transfers, copies = [], []
    for j, device in enumerate(there):
        first, last = need[target.coordinates(device).data]
        for data, (start, stop) in enumerate(have):
            start, stop = max(first, start), min(last, stop)
            if start >= stop:
                continue
            size = before[stop] - before[start]
            if any(here[i] == device for i in holders[data]):
                copies.append(RowCopy(device, start, stop, size))
                continue
            ((sender, _),) = shared(links.nearest(holders[data], j), (0,), size, sent)
            transfers.append(RowTransfer(here[sender], device, start, stop, size))
            moved[sender, j] += size
            messages[sender, j] += 1
    return BatchPlan(
        tuple(have),
        tuple(need),
        tuple(sorted(transfers)),
        tuple(sorted(copies)),
        dict(zip(there, moved.sum(axis=0).tolist(), strict=True)),
        dict(zip(here, moved.sum(axis=1).tolist(), strict=True)),
        links.by_tier(moved),
        links.seconds(moved, messages),
    )
