"""Rates: shares of what data sheets say, what a calibration says instead, and rings."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.rates import LINK_SHARE, MATMUL_SHARE, MEMORY_SHARE, Rates, Ring


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
