"""Estimates: how long a unit takes, and what it needs, for all ways to lay it over devices at once.

What is counted, and how it becomes time, is said in :mod:`flowrl.compiler.seconds` and :mod:`flowrl.compiler.memory`; what rates
it is divided by, in :mod:`flowrl.compiler.rates`. All figures are estimates until a calibration replaces the rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrl.calibration import Calibration
from flowrl.compiler.architecture import Architecture
from flowrl.compiler.calibrated import calibrated_cluster
from flowrl.compiler.candidates import Floats, Grid, Ints, Shares, candidates
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.memory import memory_columns
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.precision import Precision
from flowrl.compiler.rates import Rates
from flowrl.compiler.seconds import Setting, time_columns
from flowrl.compiler.work import Work
from flowrl.errors import FlowError, nearest

__all__ = ["Estimate", "Estimator", "Precision", "Table"]

_SHAPE = ("size", "data", "tensor", "pipeline", "zero", "checkpointing", "micro_batches")
#: Columns that ``fixed`` may pin.
PINNABLE = _SHAPE[1:]


@dataclass(frozen=True)
class Estimate:
    """Of one unit under one parallelism; see :class:`Table` for the fields."""

    parallelism: Parallelism
    seconds: float
    compute: float
    memory: float
    link: float
    bubble: float
    flops: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    kv_cache: float
    buckets: float

    @property
    def held(self) -> float:
        """Bytes that stay between calls: weights, and of a trainer the optimiser's state."""
        return self.weights + self.optimizer

    @property
    def transient(self) -> float:
        """Bytes that are needed only while it runs."""
        return self.gradients + self.activations + self.logits + self.kv_cache + self.buckets

    @property
    def binds(self) -> str:
        """What takes most of the time: "compute", "memory", "link" or "bubble"."""
        return max(("compute", "memory", "link", "bubble"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Table:
    """Candidates of one unit, one row each.

    Args:
        size: devices. data, tensor, pipeline, zero, checkpointing (0 or 1), micro_batches: see
            :class:`flowrl.compiler.parallelism.Parallelism`.
        seconds: of the unit in one iteration, without waiting for others and without moving weights in.
        compute, memory, link, bubble: seconds by what binds; they add up to ``seconds``.
        flops: FLOP of the unit in one iteration, of all devices.
        weights, gradients, optimizer, activations, logits, kv_cache, buckets: bytes on the fullest rank.
    """

    size: Ints
    data: Ints
    tensor: Ints
    pipeline: Ints
    zero: Ints
    checkpointing: Ints
    micro_batches: Ints
    seconds: Floats
    compute: Floats
    memory: Floats
    link: Floats
    bubble: Floats
    flops: Floats
    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    kv_cache: Floats
    buckets: Floats

    def __len__(self) -> int:
        return len(self.size)

    @property
    def held(self) -> Floats:
        """See :attr:`Estimate.held`."""
        return self.weights + self.optimizer

    @property
    def transient(self) -> Floats:
        """See :attr:`Estimate.transient`."""
        return self.gradients + self.activations + self.logits + self.kv_cache + self.buckets

    def parallelism(self, row: int) -> Parallelism:
        """Of one row."""
        return Parallelism(
            data=int(self.data[row]),
            tensor=int(self.tensor[row]),
            pipeline=int(self.pipeline[row]),
            zero=int(self.zero[row]),
            checkpointing=bool(self.checkpointing[row]),
            micro_batches=int(self.micro_batches[row]),
        )

    def row(self, row: int) -> Estimate:
        """One row."""
        numbers = {f.name: float(getattr(self, f.name)[row]) for f in fields(self) if f.name not in _SHAPE}
        return Estimate(self.parallelism(row), **numbers)

    def select(self, rows: Ints | NDArray[np.bool_]) -> Table:
        """Some rows, by mask or indices."""
        return Table(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


class Estimator:
    """Estimates on a cluster, remembered.

    Args:
        cluster: on what.
        calibration: replaces the rates of data sheets by what was measured; ``cluster`` is then the cluster with them.

    Example::

        estimator = Estimator(Cluster("A100-80G", nodes=2))
        work = Work("train", sequences=512, prompt_tokens=512, response_tokens=512, max_response_tokens=512)
        table = estimator.table(known_architecture("llama-2-7b"), work, 0, [8, 16], precision=Precision.mixed())
        table.row(int(table.seconds.argmin()))
    """

    def __init__(self, cluster: Cluster, calibration: Calibration | None = None) -> None:
        self.cluster = calibrated_cluster(cluster, calibration)
        self.calibration = calibration
        self._tables: dict[Any, Table] = {}

    def table(
        self,
        architecture: Architecture,
        work: Work,
        pool: int,
        sizes: Sequence[int],
        *,
        precision: Precision,
        memory_limit: float | None = None,
        fixed: Mapping[str, int] | None = None,
    ) -> Table:
        """All candidates that fit by themselves.

        Args:
            pool: index of the pool of the cluster.
            sizes: devices of a mesh that are tried.
            memory_limit: bytes of a device that may be used; by default all that it has. Infinite: nothing is dropped.
            fixed: columns that have one value: ``{"tensor": 4}``.

        Raises:
            FlowError: ``fixed`` names no column.
        """
        fixed = dict(fixed or {})
        for name in fixed:
            if name not in PINNABLE:
                raise FlowError(f"{name!r} cannot be fixed: {nearest(name, PINNABLE)}")
        limit = self.cluster.pools[pool].device.memory_bytes if memory_limit is None else memory_limit
        key = (architecture, work, pool, tuple(sizes), precision, limit, tuple(sorted(fixed.items())))
        if key not in self._tables:
            grid = candidates(architecture, work, self.cluster.pools[pool], sizes, fixed)
            table = self._estimates(architecture, work, pool, 0, precision, grid)
            self._tables[key] = table.select(table.held + table.transient <= limit)
        return self._tables[key]

    def estimate(
        self, architecture: Architecture, work: Work, mesh: Mesh, parallelism: Parallelism, *, precision: Precision
    ) -> Estimate:
        """Of one parallelism on one mesh, whether it fits or not."""
        if parallelism.size != mesh.size:
            raise FlowError(
                f"{parallelism} does not fill the mesh", expected=f"{mesh.size} devices", received=parallelism.size
            )
        values = (mesh.size, *(int(getattr(parallelism, name)) for name in PINNABLE))
        grid = Grid(*(np.array([value], dtype=np.int64) for value in values))
        return self._estimates(architecture, work, mesh.pool, mesh.start, precision, grid).row(0)

    def _estimates(
        self, architecture: Architecture, work: Work, pool: int, start: int, precision: Precision, grid: Grid
    ) -> Table:
        where = self.cluster.pools[pool]
        rates = Rates.of(where, precision.compute, self.calibration, architecture)
        shares = Shares.of(architecture, work.head, grid)
        setting = Setting(architecture, work, precision, where, rates, start, grid, shares)
        times = time_columns(setting)
        seconds = times["compute"] + times["memory"] + times["link"] + times["bubble"]
        columns: dict[str, Any] = {name: getattr(grid, name) for name in _SHAPE}
        columns |= times | memory_columns(architecture, work, precision, grid, shares)
        return Table(**columns, seconds=seconds)
