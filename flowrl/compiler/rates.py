"""How fast devices and links are in practice: the share of a data sheet's peak that is reached, or what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.calibrated import EngineFit, Pass, engine_fit, is_measured
from flowrl.compiler.candidates import Floats, Ints, distinct_pairs
from flowrl.compiler.cluster import Pool
from flowrl.compiler.presets import Tier

if TYPE_CHECKING:
    from flowrl.calibration import Calibration

#: Of the peak, what whole training and scoring passes of large models reach: Megatron-LM reports 44 to 52 % on A100s (arXiv
#: 2104.04473, table 1), and 54 to 57 % with what is recomputed counted as work (arXiv 2205.05198, table 5), links and bubbles
#: included. Those are counted apart here, so this is a little more.
MATMUL_SHARE = 0.60
#: Of the peak memory bandwidth, what reading weights and cache reaches (a STREAM-like copy on an A100 gives 85 to 90 %).
MEMORY_SHARE = 0.85
#: Of a link's peak, what collectives reach (nccl-tests: a bus bandwidth of about 230 of 300 GB/s over an A100's NVLink).
LINK_SHARE = 0.80
#: Of the time of a pass, the part that gathers and reduces of data-parallel ranks can hide behind; on a CPU, cores that send do
#: not compute.
OVERLAP = {"cuda": 0.80, "cpu": 0.0}
#: Of the peak of bfloat16, what float32 products have: 19.5 of 312 (A100), 67 of 989 TFLOP/s (H100). A CPU has the same peak
#: in its preset for both.
FLOAT32_SHARE = {"cuda": 1 / 16, "cpu": 1.0}
#: Seconds that a layer's kernels take at least, one pass: about ten kernels of 4 µs; in decoding they are replayed as a graph
#: (CUDA graphs, 1.5 µs each).
LAYER_SECONDS = {"cuda": 4e-5, "cpu": 3e-4}
DECODE_LAYER_SECONDS = {"cuda": 1.5e-5, "cpu": 3e-4}
#: Seconds of the host for each row of a decoding step: schedule, prepare, sample, append. Of vLLM 0.5, 29 % of the time went
#: there and 38 % to the GPU (vLLM's notes on 0.6, Llama 3 8B on an H100): about 5 ms beside a step of 6.5 ms, for up to 256 rows.
#: Later versions take less.
ROW_SECONDS = {"cuda": 2e-5, "cpu": 2e-5}


@dataclass(frozen=True)
class Rates:
    """What a device of a pool does.

    Args:
        flops: FLOP/s of large matrix products in the dtype that is asked for.
        memory: B/s.
        layer_seconds: of a layer in one pass, at least.
        decode_layer_seconds: the same in a decoding step.
        row_seconds: of the host for each row of a decoding step.
        fit: how an engine's passes take longer, where that was measured.
    """

    flops: float
    memory: float
    layer_seconds: float
    decode_layer_seconds: float
    row_seconds: float
    fit: EngineFit | None = None

    @classmethod
    def of(
        cls, pool: Pool, dtype: str, calibration: Calibration | None = None, architecture: Architecture | None = None
    ) -> Rates:
        """From the data sheet, or from what was measured on a device of this kind.

        Args:
            architecture: of the model; with it, what a calibration says of the engine is used.
        """
        device, kind = pool.device, pool.device.kind
        peak = device.flops * (FLOAT32_SHARE.get(kind, 1.0) if dtype == "float32" else 1.0)
        flops, memory = MATMUL_SHARE * peak, MEMORY_SHARE * device.memory_bandwidth
        fit = None
        if calibration is not None:
            flops = _measured(calibration, "matmul", kind, flops, dtype=dtype)
            memory = _measured(calibration, "read", kind, memory)
            if architecture is not None:
                fit = engine_fit(calibration, kind, dtype, flops, memory, architecture)
        if fit is not None:
            return cls(flops, memory, 0.0, 0.0, 0.0, fit)
        return cls(flops, memory, LAYER_SECONDS[kind], DECODE_LAYER_SECONDS[kind], ROW_SECONDS[kind])

    def rows_seconds(self, rows: Floats) -> Floats:
        """Seconds of a decoding step for so many rows, beside its products and what it reads."""
        if self.fit is None:
            return rows * self.row_seconds
        few = np.minimum(rows, self.fit.rows)
        return few * self.fit.row_seconds + (rows - few) * self.fit.row_seconds_beyond

    def passes(self, kind: str) -> Pass:
        """How passes of a kind ("prefill", "decode", "score", "train") differ from FLOP and bytes over rates."""
        return Pass() if self.fit is None else getattr(self.fit, kind)


def _measured(calibration: Calibration, name: str, kind: str, otherwise: float, **conditions: str) -> float:
    found = [r.value for r in calibration.find(name, **conditions) if str(r.conditions.get("device")).startswith(kind)]
    return max(found, default=otherwise)


# -- collectives -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Collectives of many groups of ranks at once, by rings (Patarasuk and Yuan, 2009): each rank sends its neighbour
    ``(n − 1) / n`` of the bytes to gather or reduce-scatter them, twice that to all-reduce, in ``n − 1`` or twice as many
    messages.

    Args:
        ranks: of a group.
        bandwidth: B/s of a rank, one way. Groups that span hosts are held up by what each host sends for them.
        latency: seconds of a message.
    """

    ranks: Floats
    bandwidth: Floats
    latency: Floats
    #: gloo has no reduce-scatter of its own: it sums everything everywhere, and keeps a part.
    sums_to_scatter: bool = False

    @classmethod
    def of(cls, pool: Pool, start: int, stride: Ints, ranks: Ints) -> Ring:
        """Of groups of ``ranks`` devices, ``stride`` apart, the first of which begins at ``start``."""
        pairs, where = distinct_pairs(stride, ranks)
        found = np.array([_ring(pool, start, s, n) for s, n in pairs]).reshape(-1, 2)[where]
        return cls(ranks.astype(np.float64), found[:, 0], found[:, 1], pool.device.kind == "cpu")

    def reduce_scatter(self, size: Floats | float) -> Floats:
        """Seconds to sum ``size`` bytes that each rank has, of which each keeps its part."""
        return self.all_reduce(size) if self.sums_to_scatter else self.gather(size)

    def gather(self, size: Floats | float) -> Floats:
        """Seconds to gather ``size`` bytes in all."""
        n = self.ranks
        return np.where(n > 1, (n - 1) / n * size / self.bandwidth + (n - 1) * self.latency, 0.0)

    def all_reduce(self, size: Floats | float) -> Floats:
        """Seconds to sum ``size`` bytes that each rank has."""
        return 2 * self.gather(size)


def reached(tier: Tier) -> float:
    """B/s that a device sends over a tier in practice."""
    return tier.bandwidth * (1.0 if is_measured(tier) else LINK_SHARE)


def _ring(pool: Pool, start: int, stride: int, ranks: int) -> tuple[float, float]:
    """(bandwidth, latency) of a group: of the slowest tier that its ring goes through."""
    span = stride * (ranks - 1) + 1
    widest = pool.tier(start, start + span)
    bandwidth = reached(widest)
    if len(pool.tiers) > 1 and widest is not pool.tiers[0]:
        inner = pool.tiers[0]
        together = max(1, min(ranks, inner.size // stride))  # ranks of the group in one host share its way out
        bandwidth = min(reached(inner), bandwidth * together)
    return bandwidth, widest.latency
