"""What joins devices that send to devices that receive, and which of several that hold something sends it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.layout import DeviceId
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.presets import Tier

#: Name of the tier of devices in two pools.
BETWEEN_POOLS = "between pools"


class Links:
    """What joins each device of a source to each of a target.

    Args:
        cluster: with both.
        source: devices of one pool.
        target: devices of one pool, of the same or of another one.
    """

    def __init__(self, cluster: Cluster, source: Sequence[DeviceId], target: Sequence[DeviceId]) -> None:
        #: Nearer ones first; the slower of both networks where the pools differ.
        self.tiers: list[Tier] = []
        #: int64 [source, target]: index of the tier.
        self.tier = np.zeros((len(source), len(target)), dtype=np.int64)
        here, there = source[0].pool, target[0].pool
        if here == there:
            self.tiers = list(cluster.pools[here].tiers)
            a = np.array([d.device for d in source])[:, None]
            b = np.array([d.device for d in target])[None, :]
            self.tier[:] = len(self.tiers) - 1
            for i in reversed(range(len(self.tiers))):
                self.tier[a // self.tiers[i].size == b // self.tiers[i].size] = i
        else:
            outer = [cluster.pools[p].tiers[-1] for p in (here, there)]
            bandwidth, latency = min(t.bandwidth for t in outer), max(t.latency for t in outer)
            self.tiers = [Tier(BETWEEN_POOLS, 0, bandwidth, latency)]
        number = {device: i for i, device in enumerate(sorted({*source, *target}))}
        #: Of each device of the source and of the target, a number that is the same where the device is.
        self.numbers = ([number[d] for d in source], [number[d] for d in target])

    def nearest(self, holders: Sequence[int], receiver: int) -> list[int]:
        """Of devices of the source that hold something, those on the tier nearest to a device of the target; indices."""
        if len(holders) == 1:
            return [holders[0]]
        tiers = self.tier[list(holders), receiver]
        return [h for h, near in zip(holders, (tiers == tiers.min()).tolist(), strict=True) if near]

    def seconds(self, moved: np.ndarray, messages: np.ndarray) -> float:
        """Estimated: of the device that takes longest, both directions at once.

        Args:
            moved: int64 [source, target]: bytes.
            messages: int64 [source, target]: how many.
        """
        rate = np.array([t.bandwidth for t in self.tiers])[self.tier]
        latency = np.array([t.latency for t in self.tiers])[self.tier]
        seconds = moved / rate + messages * latency
        return float(max(seconds.sum(axis=0).max(), seconds.sum(axis=1).max()))

    def by_tier(self, moved: np.ndarray) -> dict[str, int]:
        """Bytes over each tier that is used."""
        found = {t.name: int(moved[self.tier == i].sum()) for i, t in enumerate(self.tiers)}
        return {name: n for name, n in found.items() if n}


def shared(
    near: Sequence[int], items: tuple[int, ...], size: int, sent: list[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Deal equal items to senders, each to the one that has sent least, of equal ones to the first.

    Args:
        near: who could send them; indices.
        items: what is dealt.
        size: bytes of each.
        sent: bytes of every sender so far, which is kept up.

    Yields:
        A sender, and what it sends.
    """
    if len(near) == 1:
        sent[near[0]] += size * len(items)
        yield near[0], items
        return
    waiting = [(sent[s], s) for s in near]
    heapq.heapify(waiting)
    dealt: dict[int, list[int]] = {}
    for item in items:
        so_far, sender = waiting[0]
        dealt.setdefault(sender, []).append(item)
        heapq.heapreplace(waiting, (so_far + size, sender))
    for sender, mine in sorted(dealt.items()):
        sent[sender] += size * len(mine)
        yield sender, tuple(mine)


def mesh_problems(mesh: Mesh, cluster: Cluster, what: str) -> Iterator[str]:
    """Why a mesh is not within a cluster, a sentence; ``what``: whose it is."""
    pool = cluster.pools[mesh.pool] if 0 <= mesh.pool < len(cluster.pools) else None
    if pool is not None and mesh.start >= 0 and mesh.stop <= pool.size and mesh.size > 0:
        return
    there = f"it has {pool.size} devices" if pool else f"there are {len(cluster.pools)} pools"
    yield f"the {what} is on {mesh.size} devices from {mesh.start} on in pool {mesh.pool}; {there}"
