"""Rates: shares of what data sheets say, what a calibration says instead, and rings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flowrl.calibration import UNITS, Calibration, Rate
from flowrl.compiler.architecture import Architecture
from flowrl.compiler.calibrated import TINY, calibrated_cluster
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.estimate import Estimator, Precision
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.rates import LINK_SHARE, MATMUL_SHARE, MEMORY_SHARE, Rates, Ring
from flowrl.compiler.work import Work
from flowrl.machine import Machine


def ring(cluster: Cluster, stride: int, ranks: int) -> Ring:
    return Ring.of(cluster.pools[0], 0, np.array([stride]), np.array([ranks]))


def simulated_all_reduce(pool_bandwidths: list[float], size: float, latency: float) -> float:
    """Seconds of a ring, step by step: in each every rank sends one part to the next over its link."""
    n = len(pool_bandwidths)
    return sum(max(size / n / bandwidth for bandwidth in pool_bandwidths) + latency for _ in range(2 * (n - 1)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_is_what_its_steps_take(ranks: int) -> None:
    cluster = Cluster("A100-80G")
    tier = cluster.pools[0].tiers[0]
    found = ring(cluster, 1, ranks).all_reduce(1e9)
    assert found[0] == pytest.approx(simulated_all_reduce([LINK_SHARE * tier.bandwidth] * ranks, 1e9, tier.latency))
    assert ring(cluster, 1, ranks).gather(1e9)[0] == pytest.approx(found[0] / 2)


def test_one_rank_waits_for_nobody() -> None:
    assert ring(Cluster("A100-80G"), 1, 1).all_reduce(1e9)[0] == 0


def test_ranks_of_a_host_share_its_way_out() -> None:
    """A ring of all 16 devices leaves a host by one of 8 rings each; one of two devices, eight apart, has its own way alone."""
    cluster = Cluster("A100-80G", nodes=2, network_bandwidth=10e9)
    inner, outer = cluster.pools[0].tiers
    share = LINK_SHARE
    assert ring(cluster, 8, 2).bandwidth[0] == share * outer.bandwidth
    assert ring(cluster, 1, 16).bandwidth[0] == share * 8 * outer.bandwidth
    assert ring(cluster, 4, 4).bandwidth[0] == share * 2 * outer.bandwidth
    assert ring(cluster, 1, 8).bandwidth[0] == share * inner.bandwidth
    fast = Cluster("A100-80G", nodes=2, network_bandwidth=1e12)
    assert ring(fast, 1, 16).bandwidth[0] == share * fast.pools[0].tiers[0].bandwidth


def test_without_a_calibration_rates_are_shares_of_the_peaks() -> None:
    pool = Cluster("H100").pools[0]
    rates = Rates.of(pool, "bfloat16")
    assert rates.flops == MATMUL_SHARE * pool.device.flops
    assert rates.memory == MEMORY_SHARE * pool.device.memory_bandwidth
    assert Rates.of(pool, "float32").flops < rates.flops / 10


# -- calibrations -----------------------------------------------------------------------------------------------------------

LAYER_BASE, TOKEN = 2.5e-3, 3e-5
STEP_BASE, ROW = 4e-3, 2e-4
#: A CPU of 10 GFLOP/s and 10 GB/s, and the seconds of an engine's passes over the tiny model of two layers.
SCORE, TRAIN = 1.5, 4.0


def rate(name: str, work: int, seconds: float, **conditions: str | int) -> Rate:
    value = work / seconds
    return Rate(name, UNITS[name][0], value, value, value, 3, work, conditions)


def calibration(**changes: Any) -> Calibration:
    """Passes take ``base + slope · tokens``; steps of decoding ``base + slope · rows``."""
    engine: dict[str, Any] = dict(device="cpu", model="tiny", parameters=TINY.num_parameters(), dtype="float32")
    engine |= changes
    rates = [
        rate("matmul", 10**10, 1.0, device="cpu", dtype="float32", n=1024),
        rate("read", 10**10, 1.0, device="cpu", bytes=1),
    ]
    for rows in (1, 8):
        prefill = 2 * LAYER_BASE + TOKEN * rows * 64
        rates.append(rate("prefill", rows * 64, prefill, rows=rows, prompt_tokens=64, **engine))
        seconds = prefill + 31 * (STEP_BASE + ROW * rows)
        rates.append(rate("generate", rows * 32, seconds, rows=rows, prompt_tokens=64, new_tokens=32, **engine))
    for name, multiple in (("score", SCORE), ("train", TRAIN)):
        seconds = multiple * (2 * LAYER_BASE + TOKEN * 512)
        rates.append(rate(name, 512, seconds, rows=4, row_tokens=128, **engine))
    rates += [
        rate("all_reduce", size, 1e-3 + size / 1e9, backend="gloo", ranks=2, bytes=size) for size in (4096, 1 << 26)
    ]
    return Calibration(Machine.here(()), "2000-01-01", {}, tuple(rates))


def calibrated_seconds(work: Work, made: Calibration, architecture: Architecture = TINY) -> float:
    estimator = Estimator(Cluster("cpu"), made)
    return estimator.estimate(architecture, work, Mesh(0, 0, 1), Parallelism(), precision=Precision()).seconds


def test_a_calibration_replaces_the_rates_of_the_data_sheet() -> None:
    pool = Cluster("cpu").pools[0]
    rates = Rates.of(pool, "float32", calibration())
    assert (rates.flops, rates.memory) == (1e10, 1e10)
    assert Rates.of(pool, "bfloat16", calibration()).flops == Rates.of(pool, "bfloat16").flops  # not measured
    assert Rates.of(Cluster("H100").pools[0], "float32", calibration()) == Rates.of(Cluster("H100").pools[0], "float32")


@pytest.mark.parametrize("rows", [1, 8])
def test_what_was_measured_of_sampling_is_estimated(rows: int) -> None:
    measured = 2 * LAYER_BASE + TOKEN * rows * 64 + 32 * (STEP_BASE + ROW * rows)
    work = Work("generate", rows, 64.0, 32.0, 32.0)
    assert calibrated_seconds(work, calibration()) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("kind", "multiple"), [("score", SCORE), ("train", TRAIN)])
@pytest.mark.parametrize("rows", [4, 16])
def test_what_was_measured_of_passes_is_estimated_and_grows_by_its_slope(kind: Any, multiple: float, rows: int) -> None:
    measured = multiple * (2 * LAYER_BASE + TOKEN * rows * 128)
    found = calibrated_seconds(Work(kind, rows, 32.0, 96.0, 96.0), calibration())
    assert found == pytest.approx(measured, rel=0.15)


def test_what_a_layer_takes_holds_for_another_model_of_the_engine() -> None:
    """Twice the layers of the tiny model: nothing but its overhead, so twice the time."""
    deeper = dataclasses.replace(TINY, num_layers=4)
    work = Work("score", 4, 32.0, 96.0, 96.0)
    once, twice = calibrated_seconds(work, calibration()), calibrated_seconds(work, calibration(), deeper)
    assert twice == pytest.approx(2 * once, rel=0.25)


@pytest.mark.parametrize("changes", [{"parameters": 7, "model": "nobody"}, {"dtype": "bfloat16"}, {"device": "cuda"}])
def test_an_engine_that_was_measured_otherwise_is_not_taken_for_it(changes: dict[str, Any]) -> None:
    assert Rates.of(Cluster("cpu").pools[0], "float32", calibration(**changes), TINY).fit is None
    assert Rates.of(Cluster("cpu").pools[0], "float32", calibration(), TINY).fit is not None


def test_the_tiny_model_is_that_of_the_package() -> None:
    from flowrl.tiny import tiny_model

    assert Architecture.from_config(tiny_model().config) == TINY


def test_a_link_is_what_explains_both_sizes() -> None:
    """Two ranks: a tensor's bytes go over the link once, in two messages."""
    cluster = calibrated_cluster(Cluster("cpu", 2), calibration())
    tier = cluster.pools[0].tiers[0]
    assert tier.bandwidth == pytest.approx(1e9)
    assert tier.latency == pytest.approx(5e-4)
    assert Ring.of(cluster.pools[0], 0, np.array([1]), np.array([2])).all_reduce(1 << 26)[0] == pytest.approx(
        1e-3 + (1 << 26) / 1e9
    )
    assert calibrated_cluster(Cluster("H100"), calibration()) == Cluster("H100")  # gloo says nothing of it
    assert calibrated_cluster(cluster, None) is cluster


def test_noise_in_a_calibration_makes_no_estimate_negative() -> None:
    """Eight rows faster than one."""
    made = calibration()
    rates = tuple(
        dataclasses.replace(r, value=r.value * 50, high=r.high * 50) if r.conditions.get("rows") == 8 else r
        for r in made.rates
    )
    noisy = dataclasses.replace(made, rates=rates)
    for kind in ("generate", "score", "train"):
        assert 0 < calibrated_seconds(Work(kind, 64, 32.0, 96.0, 96.0), noisy) < 1e3  # type: ignore[arg-type]
