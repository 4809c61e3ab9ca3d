"""What the compiler decided about devices, as the Plan keeps it: frozen, comparable, JSON. Every time is an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.presets import Device, Tier


@dataclass(frozen=True)
class PlannedPool:
    """Equal nodes, as the plan saw them."""

    device: Device
    nodes: int
    gpus_per_node: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True)
class PlannedMesh:
    """Devices ``start`` … ``start + size − 1`` of a pool."""

    name: str
    pool: int
    start: int
    size: int


@dataclass(frozen=True)
class MemoryByCause:
    """Bytes on the fullest rank of a unit's mesh."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    kv_cache: float
    buckets: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class PlannedUnit:
    """One call's use of one Model, placed.

    Args:
        label: unique.
        call: label of the call.
        model: name of the Model.
        kind: "generate", "score" or "train".
        mesh: name of its mesh.
        parallelism: over the mesh.
        offload: whether its state is in host memory while it does not run.
        seconds: in one iteration, weights moved in included.
        move_seconds: of those, bringing the weights.
        compute, memory, link, bubble: seconds by what binds, as the estimate splits them.
        flops: of one iteration.
        by_cause: memory while it runs.
    """

    label: str
    call: str
    model: str
    kind: str
    mesh: str
    parallelism: Parallelism
    offload: bool
    seconds: float
    move_seconds: float
    compute: float
    memory: float
    link: float
    bubble: float
    flops: float
    by_cause: MemoryByCause

    @property
    def binds(self) -> str:
        """What takes the largest part of its time: "compute", "memory", "link" or "bubble"."""
        parts = {"compute": self.compute, "memory": self.memory, "link": self.link, "bubble": self.bubble}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class PlannedMove:
    """Weights that a reader is brought in every iteration.

    Args:
        model: name of the Model whose weights move.
        writer, reader: labels of units.
        total_bytes: over all receivers.
        bytes_received: of the device that receives most.
        bytes_sent: of the device that sends most.
        peak_extra_bytes: of the device that needs most beside both layouts.
        transfers: messages, after bucketing; 0 where devices are too many to list them.
        tier: the slowest link tier that is used; "" where nothing moves.
        seconds: of all.
    """

    model: str
    writer: str
    reader: str
    total_bytes: float
    bytes_received: float
    bytes_sent: float
    peak_extra_bytes: float
    transfers: int
    tier: str
    seconds: float


@dataclass(frozen=True)
class Stretch:
    """Devices side by side with the same units.

    Args:
        pool, start, stop: devices ``start`` … ``stop − 1`` of a pool.
        units: labels of those that run here.
        held: bytes that stay between calls.
        transient: bytes of the unit that needs most while it runs.
        capacity: bytes that a plan may use.
    """

    pool: int
    start: int
    stop: int
    units: tuple[str, ...]
    held: float
    transient: float
    capacity: float


@dataclass(frozen=True)
class Slot:
    """A unit of an iteration on its mesh, in seconds from the start of the first iteration that is shown."""

    unit: str
    iteration: int
    start: float
    stop: float


@dataclass(frozen=True)
class Alternative:
    """Another plan, or another cluster or workload, and what an iteration would take; None where it cannot be.

    Args:
        name: "all colocated", "one node more", "twice the response tokens", …
        seconds: of an iteration.
        why_not: where it cannot be.
    """

    name: str
    seconds: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Mapping:
    """Where everything runs, and what that costs.

    Args:
        pools: of the cluster.
        meshes: by name, in the order of their first device.
        units: in the order in which devices that they share take them.
        moves: weights that are brought to readers.
        stretches: devices with their memory.
        slots: the timeline of a few iterations in the steady state.
        period: seconds of an iteration in the steady state.
        critical: labels of the units whose cycle sets the period.
        critical_span: iterations that this cycle spans.
        lower_bound: seconds that no placement in the space can beat.
        exact: whether the search has tried or excluded everything.
        evaluations: assignments that were rated.
        alternatives: other shapes of placement that were rated, best first.
        what_ifs: other clusters and workloads, where they were asked for.
        calibrated: what the rates come from: "data sheets", or the machine and date of a calibration.
        prompt_tokens, response_tokens, max_response_tokens: lengths that were assumed.
    """

    pools: tuple[PlannedPool, ...]
    meshes: tuple[PlannedMesh, ...]
    units: tuple[PlannedUnit, ...]
    moves: tuple[PlannedMove, ...]
    stretches: tuple[Stretch, ...]
    slots: tuple[Slot, ...]
    period: float
    critical: tuple[str, ...]
    critical_span: int
    lower_bound: float
    exact: bool
    evaluations: int
    alternatives: tuple[Alternative, ...] = ()
    what_ifs: tuple[Alternative, ...] = ()
    calibrated: str = "data sheets"
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    max_response_tokens: float = 0.0

    @property
    def gap(self) -> float:
        """How far the period may lie above the best one, as a share of the lower bound."""
        return self.period / self.lower_bound - 1 if self.lower_bound else 0.0
