"""Pins: parts of a placement that are fixed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.strategy import Strategy, is_whole
from flowrl.errors import FlowError, nearest
from flowrl.flow import RLFlow
from flowrl.graph import Ref
from flowrl.models import BaseModel

#: By what Strategy calls it, the stage of ZeRO.
ZERO = {"none": 0, "optimizer": 2, "full": 3}


@dataclass(frozen=True)
class Pin:
    """What is fixed of a call, or of all calls of a Model; None leaves it to the search.

    Args:
        mesh: where it runs.
        data, tensor, pipeline: ranks of each axis.
        zero: stage of ZeRO, 0 to 3.
        checkpointing: whether activations are computed again.
        micro_batches: forward passes of a data-parallel rank.
        offload: whether its state is in host memory while it does not run.

    Example::

        cluster = Cluster("H100", nodes=2)
        compile(flow, cluster, pin={rollouts: Pin(tensor=2), "Updater#0": Pin(mesh=cluster.mesh(0, 8))})
    """

    mesh: Mesh | None = None
    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    zero: int | None = None
    checkpointing: bool | None = None
    micro_batches: int | None = None
    offload: bool | None = None

    def columns(self) -> dict[str, int]:
        """What is fixed of the parallelism."""
        names = ("data", "tensor", "pipeline", "zero", "checkpointing", "micro_batches")
        return {name: int(value) for name in names if (value := getattr(self, name)) is not None}

    def problems(self, cluster: Cluster) -> Iterator[str]:
        """What cannot be meant, a sentence each."""
        for name in ("data", "tensor", "pipeline", "micro_batches"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                yield f"{name} is {value!r}; expected a whole number, at least 1"
        if self.zero is not None and (not is_whole(self.zero, 0) or self.zero > 3):
            yield f"zero is {self.zero!r}; expected 0, 1, 2 or 3"
        for name in ("checkpointing", "offload"):
            if getattr(self, name) not in (None, True, False):
                yield f"{name} is {getattr(self, name)!r}; expected True, False or None"
        if self.mesh is not None:
            yield from mesh_problems(self.mesh, cluster)

    def with_(self, other: Pin) -> Pin:
        """Both; what the other fixes counts."""
        return Pin(**{**vars(self), **{k: v for k, v in vars(other).items() if v is not None}})


def mesh_problems(mesh: Any, cluster: Cluster) -> Iterator[str]:
    """Why a cluster has no such mesh."""
    if not isinstance(mesh, Mesh):
        yield f"mesh is {mesh!r}; expected a Mesh, as Cluster.mesh(start, size) gives it"
        return
    if not 0 <= mesh.pool < len(cluster.pools):
        yield f"mesh is of pool {mesh.pool}; expected one of the {len(cluster.pools)} pools, counted from 0"
        return
    pool = cluster.pools[mesh.pool]
    if mesh.size not in cluster.sizes(mesh.pool):
        yield (
            f"mesh has {mesh.size} devices; expected a divisor of the {pool.gpus_per_node} of a node, or whole nodes, of "
            f"{pool.nodes}"
        )
    elif mesh not in set(cluster.meshes(mesh.size, mesh.pool)):
        yield (
            f"mesh begins at device {mesh.start}; expected a multiple of {min(mesh.size, pool.gpus_per_node)}, and an end "
            f"within the {pool.size} devices of the pool"
        )


def pins_by_label(flow: RLFlow, cluster: Cluster, given: Any, strategies: Mapping[str, Strategy]) -> dict[str, Pin]:
    """By label of a call, what is fixed.

    Args:
        given: by Ref, label, Model or name of one: a Pin, a Mesh, or a Strategy. None for none.
        strategies: by name of the Model, how it is held; it holds for all its calls.

    Raises:
        FlowError: keys that are neither of this flow, and pins that cannot be meant; all of them.
    """
    if given is not None and not isinstance(given, Mapping):
        raise FlowError("pin is no mapping", expected="{call: mesh}", received=repr(given), do="pin={rollouts: mesh}")
    names = {m.name for m in flow.models}
    problems: list[str] = []
    by_label: dict[str, Pin] = {}
    for key, value in [*strategies.items(), *(given or {}).items()]:
        name = key.name if isinstance(key, BaseModel) else flow.label(key) if isinstance(key, Ref) else key
        if name in names:
            labels = [flow.label(c) for c in flow.calls if any(m.name == name for m in c.node.models())]
        elif name in flow.labels:
            labels = [name]
        else:
            known = [*flow.labels, *names]
            problems.append(
                f"pin names {name!r}, which is no call and no Model of this flow; {nearest(str(name), known)}"
            )
            continue
        pin = _as_pin(value)
        if pin is None:
            problems.append(f"pin of {name} is {value!r}; expected a Mesh, a Pin or a Strategy")
            continue
        problems += [f"pin of {name}: {text}" for text in pin.problems(cluster)]
        for label in labels:
            by_label[label] = by_label.get(label, Pin()).with_(pin)
    if problems:
        raise FlowError("These pins do not fit: " + "; ".join(problems))
    return by_label


def _as_pin(value: Any) -> Pin | None:
    if isinstance(value, Pin):
        return value
    if isinstance(value, Mesh):
        return Pin(mesh=value)
    if isinstance(value, Strategy):
        return Pin(
            tensor=value.tensor_parallel,
            pipeline=value.pipeline_parallel,
            zero=ZERO.get(value.sharding),
            checkpointing=True if value.activation_checkpointing != "none" else None,
        )
    return None
