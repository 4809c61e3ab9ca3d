"""What a calibration says in place of data sheets: rates of a device and its links, and how an engine's passes take longer.

An engine's passes are fitted to two numbers of tokens: ``base + slope · tokens``. The base is seconds of each layer whatever it
does (a tiny model is nothing else); the slope, over what the same tokens take at the rates of matrix products and memory, is a
factor. Both hold for other models of the same engine on the same device. Scoring and training are that, times how much longer
they were measured to take.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl.calibration import Calibration, Rate
from flowrl.compiler.architecture import Architecture
from flowrl.compiler.architecture_known import known_config
from flowrl.compiler.cluster import Cluster, Pool
from flowrl.compiler.presets import Tier

#: The model that ``flowrl calibrate`` takes where none is named (:func:`flowrl.tiny.tiny_model`), and short names that it knows.
TINY = Architecture("llama", 2, 32, 64, 4, 2, 8, 264, tied=True)
_ALIASES = {"smollm2": "smollm2-135m"}


@dataclass(frozen=True)
class Pass:
    """How the engine's passes of one kind differ from FLOP over rate.

    Args:
        factor: times as long.
        layer_seconds: of each layer and pass, on top.
    """

    factor: float = 1.0
    layer_seconds: float = 0.0


@dataclass(frozen=True)
class EngineFit:
    """What was fitted to the rates of an engine.

    Args:
        prefill, score, train, decode: by kind of pass.
        rows: of a decoding step, the most that were measured.
        row_seconds: of a decoding step, for each row up to these.
        row_seconds_beyond: for each row more.
    """

    prefill: Pass
    score: Pass
    train: Pass
    decode: Pass
    rows: float
    row_seconds: float
    row_seconds_beyond: float


def calibrated_cluster(cluster: Cluster, calibration: Calibration | None) -> Cluster:
    """The same cluster with the measured rates of its links inside a host, of memory and of the way to the host, where the
    calibration was made on devices of its kind. Bandwidths are then those that are reached."""
    if calibration is None:
        return cluster
    pools = tuple(_calibrated(pool, calibration) for pool in cluster.pools)
    return Cluster.of(pools, cluster.device)


def _calibrated(pool: Pool, calibration: Calibration) -> Pool:
    device, inner = pool.device, pool.tiers[0]
    if device.kind == "cuda" and calibration.find("host_to_device"):
        both = [best.value for n in ("host_to_device", "device_to_host") if (best := calibration.best(n))]
        device = replace(device, host_bandwidth=min(both))
    found = measured_link(calibration, device.kind)
    if found is not None:
        inner = replace(inner, bandwidth=found[0], latency=found[1], name=f"{inner.name}, measured")
    return replace(pool, device=device, tiers=(inner, *pool.tiers[1:]))


def is_measured(tier: Tier) -> bool:
    """Whether a tier's bandwidth is what was reached, not what a data sheet says."""
    return tier.name.endswith(", measured")


def measured_link(calibration: Calibration, kind: str) -> tuple[float, float] | None:
    """(B/s of a rank one way, seconds of a message) that explain the all-reduces by rings; None where none was measured, or
    where the sizes are too few to tell."""
    backend = "nccl" if kind == "cuda" else "gloo"
    rates = sorted(calibration.find("all_reduce", backend=backend), key=lambda r: r.work)
    if len(rates) < 2 or rates[0].work == rates[-1].work:
        return None
    small, large = rates[0], rates[-1]
    ranks = int(large.conditions["ranks"])
    messages, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    if not large.seconds > small.seconds:
        return None
    bandwidth = share * (large.work - small.work) / (large.seconds - small.seconds)
    return bandwidth, max(small.seconds - share * small.work / bandwidth, 0.0) / messages


# -- the engine ------------------------------------------------------------------------------------------------------------


def engine_fit(
    calibration: Calibration, kind: str, dtype: str, flops: float, memory: float, architecture: Architecture
) -> EngineFit | None:
    """What the engine's rates in a calibration say; None where it has none for this kind of device and dtype, or where nobody
    knows what model they were measured with.

    Args:
        flops, memory: the rates that FLOP and bytes are divided by.
        architecture: of the model that is estimated; the calibrated one where it has as many parameters.
    """
    rates = tuple(_of_engine(calibration, kind, dtype))
    prefills = sorted((r for r in rates if r.name == "prefill"), key=lambda r: r.work)
    if not prefills:
        return None
    measured = _measured_architecture(prefills[0], architecture)
    if measured is None:
        return None
    return _fit(rates, prefills, _Analytic(measured, 4.0 if dtype == "float32" else 2.0, flops, memory))


@dataclass(frozen=True)
class _Analytic:
    """What passes over the calibrated model would take at the rates alone."""

    architecture: Architecture
    weight_bytes: float
    flops: float
    memory: float

    def forward(self, tokens: float, length: float, predicted: float) -> float:
        a = self.architecture
        read = self.weight_bytes * a.active_parameters() / self.memory
        return max(a.flops_forward(tokens, length, predicted=predicted) / self.flops, read)


def _fit(rates: tuple[Rate, ...], prefills: list[Rate], analytic: _Analytic) -> EngineFit:
    layers = analytic.architecture.num_layers
    base, slope = _line([(r.work, r.seconds) for r in prefills])
    # What a token more takes at the rates alone: the weights have been read by then.
    a, length = analytic.architecture, float(prefills[-1].conditions["prompt_tokens"])
    token = a.flops_forward(1.0, length) / analytic.flops
    prefill = Pass(slope / token, base / layers)
    found = {"score": prefill, "train": prefill}
    for name, multiple in (("score", 1.0), ("train", 3.0)):
        measured = next((r for r in rates if r.name == name), None)
        if measured is not None:
            length = float(measured.conditions["row_tokens"])
            tokens = float(measured.work)
            # A quarter of each row is the prompt, whose logits nobody asks for.
            products = multiple * a.flops_forward(tokens, length, predicted=0.75 * tokens) / analytic.flops
            passes = 1.0 if name == "score" else 3.0
            scale = measured.seconds / (passes * base + prefill.factor * products)
            found[name] = Pass(scale * prefill.factor, scale * base / layers)
    return EngineFit(prefill, found["score"], found["train"], *_decode(rates, prefills, prefill, analytic))


def _decode(
    rates: tuple[Rate, ...], prefills: list[Rate], prefill: Pass, analytic: _Analytic
) -> tuple[Pass, float, float, float]:
    """What a step takes beside reading weights, or products: a line by rows. Beyond the rows that were measured products are no
    longer small, and a row more takes what a token of a prompt does, and its logits."""
    a, beside = analytic.architecture, []
    for rate in (r for r in rates if r.name == "generate"):
        rows, new = int(rate.conditions["rows"]), int(rate.conditions["new_tokens"])
        alike = [p for p in prefills if p.conditions["rows"] == rows]
        if alike and new > 1:
            step = (rate.seconds - alike[0].seconds) / (new - 1)
            beside.append((float(rows), max(step - analytic.forward(rows, 1.0, rows), 0.0)))
    if not beside:
        return Pass(), 0.0, 0.0, 0.0
    base, row = _line(beside) if len(beside) > 1 else (beside[0][1], 0.0)
    token = a.flops_forward(1.0, 1.0, predicted=1.0) / analytic.flops
    beyond = min(row, max(prefill.factor - 1.0, 0.0) * token)
    return Pass(1.0, base / a.num_layers), max(beside)[0], row, beyond


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(base, slope), none below 0, through the points with the least and the most; noise may have it that more takes less, or
    nothing at first."""
    (few, first), (many, last) = min(points), max(points)
    if many == few:
        return 0.0, last / many
    slope = (last - first) / (many - few)
    if slope <= 0:
        return last, 0.0
    base = first - slope * few
    return (base, slope) if base >= 0 else (0.0, last / many)


def _of_engine(calibration: Calibration, kind: str, dtype: str) -> Iterator[Rate]:
    for rate in calibration.rates:
        known = "parameters" in rate.conditions and "model" in rate.conditions
        if known and rate.matches({"dtype": dtype}) and str(rate.conditions.get("device")).startswith(kind):
            yield rate


@functools.lru_cache(maxsize=64)
def _known(name: str) -> Architecture | None:
    config = known_config(_ALIASES.get(name, name))
    return None if config is None else Architecture.from_config(config)


def _measured_architecture(rate: Rate, architecture: Architecture) -> Architecture | None:
    parameters = rate.conditions["parameters"]
    candidates = (architecture, TINY, _known(str(rate.conditions["model"])))
    return next((a for a in candidates if a is not None and a.num_parameters() == parameters), None)
