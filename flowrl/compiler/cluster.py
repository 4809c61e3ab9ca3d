"""What a flow may run on: devices, how many, and how fast they reach one another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.compiler.mesh import Mesh
from flowrl.compiler.presets import NETWORK_LATENCY, PRESETS, UNKNOWN_GPU, Device, Preset, Tier
from flowrl.compiler.strategy import is_whole
from flowrl.errors import FlowError, nearest

_USAGE = 'Cluster("H100", nodes=2, gpus_per_node=8)'


@dataclass(frozen=True)
class Pool:
    """Equal nodes of equal devices.

    Args:
        device: each of them.
        nodes: hosts.
        gpus_per_node: devices of a host.
        tiers: from the innermost to the outermost, which joins all of the pool, and it to other pools.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    tiers: tuple[Tier, ...]

    @property
    def size(self) -> int:
        """Devices."""
        return self.nodes * self.gpus_per_node

    def tier(self, start: int, stop: int) -> Tier:
        """The innermost tier that joins devices ``start`` … ``stop − 1``."""
        for tier in self.tiers:
            if start // tier.size == (stop - 1) // tier.size:
                return tier
        return self.tiers[-1]

    def with_nodes(self, nodes: int) -> Pool:
        """The same with another number of nodes; where no network between them is known, as fast as the links within one."""
        *inner, outer = self.tiers
        if not inner:
            inner, outer = [outer], Tier("network", outer.size, outer.bandwidth, NETWORK_LATENCY)
        return replace(self, nodes=nodes, tiers=(*inner, replace(outer, size=nodes * self.gpus_per_node)))


@dataclass(frozen=True, init=False, repr=False)
class Cluster:
    """Devices of one kind, or pools of several.

    Args:
        device: a preset ("H100", "A100-80G", …; case does not matter), or what torch calls a device: "cpu", "cuda",
            "cuda:<index>".
        num_devices: on one node; the same as ``gpus_per_node``.
        nodes: hosts.
        gpus_per_node: devices of a host; by default as many as the usual host of the preset has.
        network_bandwidth: B/s between hosts for each device, one way; by default the preset's.
        memory_bytes: of a device; by default the preset's.

    Pools of different devices are added: ``Cluster("H100", nodes=2) + Cluster("L40S", nodes=1)``. A mesh lies within one.

    Raises:
        FlowError: all that cannot be meant.
    """

    device: str
    pools: tuple[Pool, ...]

    def __init__(
        self,
        device: str = "cpu",
        num_devices: int | None = None,
        *,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        network_bandwidth: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        problems = [
            f"{name} is {value!r}; expected a whole number, at least 1"
            for name, value in (("num_devices", num_devices), ("nodes", nodes), ("gpus_per_node", gpus_per_node))
            if value is not None and not is_whole(value, 1)
        ]
        if num_devices is not None and gpus_per_node is not None:
            problems.append("num_devices and gpus_per_node are both given; expected one of them: they mean the same")
        for name, rate in (("network_bandwidth", network_bandwidth), ("memory_bytes", memory_bytes)):
            if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
                problems.append(f"{name} is {rate!r}; expected a positive number")
        preset, torch_device = _preset(device, problems)
        per_node = num_devices or gpus_per_node or (1 if torch_device == device else preset.per_node)
        if not problems and ":" in torch_device and nodes * per_node > 1:
            kind = torch_device.partition(":")[0]
            problems.append(
                f"{nodes * per_node} ranks cannot share {device}; expected a kind of device, of which each rank takes its "
                f"own: Cluster({kind!r}, num_devices={per_node})"
            )
        if problems:
            raise FlowError("This cluster cannot be: " + "; ".join(problems), do=_USAGE)
        unit = replace(preset.device, memory_bytes=int(memory_bytes)) if memory_bytes else preset.device
        pool = Pool(unit, nodes, per_node, _tiers(preset, nodes, per_node, network_bandwidth))
        object.__setattr__(self, "device", torch_device)
        object.__setattr__(self, "pools", (pool,))

    @classmethod
    def of(cls, pools: Sequence[Pool], device: str | None = None) -> Cluster:
        """A cluster of pools, run on what torch calls ``device``; by default what those of the pools are called.

        Raises:
            FlowError: there is no pool, or they hold devices of different kinds.
        """
        kinds = {pool.device.kind for pool in pools}
        if len(kinds) != 1:
            raise FlowError(
                "These pools are no cluster",
                expected="one pool or more, whose devices are of one kind",
                received=", ".join(sorted(kinds)) or "none",
            )
        made = object.__new__(cls)
        object.__setattr__(made, "device", device or kinds.pop())
        object.__setattr__(made, "pools", tuple(pools))
        return made

    def __add__(self, other: Cluster) -> Cluster:
        """The pools of both."""
        return Cluster.of((*self.pools, *other.pools))

    @classmethod
    def detect(cls, num_devices: int = 1) -> Cluster:
        """The best devices of this machine, a rank each: GPUs of a preset where torch names one, with the memory that they
        have; else its processor, whose ranks share the machine's memory. More GPUs than this machine has are those of
        several such machines."""
        from flowrl.compiler.detect import detect

        return detect(num_devices)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster that a YAML file describes; docs/clusters.md says how.

        Raises:
            FlowError: the file cannot be read, is no YAML, or says what cannot be: all of it, each with its line.
        """
        from flowrl.compiler.cluster_file import read_cluster

        return read_cluster(path)

    def __repr__(self) -> str:
        """What makes it again, where presets and numbers do: ``Cluster("H100", nodes=2, gpus_per_node=8)``."""
        return " + ".join(_pool_repr(pool, self.device if len(self.pools) == 1 else None) for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.size for pool in self.pools)

    def mesh(self, start: int, size: int, pool: int = 0) -> Mesh:
        """Devices ``start`` … ``start + size − 1`` of a pool, to pin a call on.

        Raises:
            FlowError: there is no such mesh: it is neither a part of a node, aligned to its size, nor whole nodes.
        """
        from flowrl.compiler.pins import mesh_problems

        made = Mesh(pool, start, size)
        if problems := list(mesh_problems(made, self)):
            raise FlowError("There is no such mesh: " + "; ".join(problems))
        return made

    def sizes(self, pool: int = 0) -> tuple[int, ...]:
        """All sizes that a mesh of a pool can have, ascending: divisors of a node, and whole nodes."""
        here = self.pools[pool]
        within = [n for n in range(1, here.gpus_per_node) if here.gpus_per_node % n == 0]
        return (*within, *(here.gpus_per_node * n for n in range(1, here.nodes + 1)))

    def meshes(self, size: int, pool: int = 0) -> Iterator[Mesh]:
        """All meshes of a size in a pool: within a node aligned to their size, else whole consecutive nodes."""
        here = self.pools[pool]
        step = min(size, here.gpus_per_node)
        for start in range(0, here.size - size + 1, step):
            yield Mesh(pool, start, size)


def _preset(device: Any, problems: list[str]) -> tuple[Preset, str]:
    """What is known of a device, and what torch calls it; what is wrong with the name goes to ``problems``."""
    known = {name.lower(): name for name in PRESETS}
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return UNKNOWN_GPU, device
    if isinstance(device, str) and device.lower() in known:
        preset = PRESETS[known[device.lower()]]
        return preset, device if device == "cpu" else preset.device.kind
    hint = f"; {nearest(device, [*PRESETS, 'cuda'])}" if isinstance(device, str) and device else ""
    problems.append(
        f"device is {device!r}; expected 'cpu', 'cuda', 'cuda:<index>' or one of {', '.join(PRESETS)}{hint}"
    )
    return PRESETS["CPU"], "cpu"


def _pool_repr(pool: Pool, device: str | None) -> str:
    preset = PRESETS.get(pool.device.name)
    if preset is None and pool.device.name == "cuda":
        preset = UNKNOWN_GPU
    own = pool.device if preset is None else replace(pool.device, memory_bytes=preset.device.memory_bytes)
    if preset is None or own != preset.device:
        return f"<{pool.nodes}x{pool.gpus_per_node} {pool.device.name}>"
    # "cpu", "cuda" and "cuda:1" are what torch calls them, and one node of them is so many ranks.
    name = device if pool.device.name == "cuda" and device else preset.device.name.replace("CPU", "cpu")
    words = [f'"{name}"']
    if pool.nodes > 1 or pool.device.name not in ("cuda", "CPU"):
        words += [f"nodes={pool.nodes}", f"gpus_per_node={pool.gpus_per_node}"]
    elif pool.gpus_per_node > 1:
        words.append(f"num_devices={pool.gpus_per_node}")
    network = pool.tiers[-1].bandwidth
    if pool.tiers != _tiers(preset, pool.nodes, pool.gpus_per_node, network):
        return f"<{pool.nodes}x{pool.gpus_per_node} {pool.device.name}>"
    words += [f"network_bandwidth={network!r}"] if network != preset.network else []
    memory = pool.device.memory_bytes
    words += [f"memory_bytes={memory}"] if memory != preset.device.memory_bytes else []
    return f"Cluster({', '.join(words)})"


def _tiers(preset: Preset, nodes: int, per_node: int, network: float | None) -> tuple[Tier, ...]:
    name, bandwidth, latency = preset.link
    inside = Tier(name, per_node, bandwidth, latency)
    return (inside, Tier("network", nodes * per_node, network or preset.network, NETWORK_LATENCY))
