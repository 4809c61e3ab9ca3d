"""Plans of transfers: who sends, over which links, in how much memory; the same for any order; refused with reasons."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrl.compiler.architecture import Architecture, Parameter
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.resharding import plan_transfers
from flowrl.compiler.transfers import apply
from flowrl.compiler.weights import Weights
from flowrl.errors import FlowError
from tests.compiler.reference_layouts import TINY, Owned, held, numbered, tiny_weights

CLUSTER = Cluster("H100", nodes=4, gpus_per_node=4)
TRAIN = Layout(Mesh(0, 0, 8), Parallelism(data=2, tensor=2, pipeline=2), "megatron", vocabulary_multiple=4)
SHARDED = Layout(Mesh(0, 0, 8), Parallelism(data=4, tensor=2, zero=3))
SERVE = Layout(Mesh(0, 8, 8), Parallelism(data=4, tensor=2), "vllm", vocabulary_multiple=4)


# -- who sends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receivers", [1, 8])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_share_the_sending(replicas: int, receivers: int) -> None:
    """Any of them could send all: nobody sends more than the mean and one tensor more."""
    weights = tiny_weights("llama", num_hidden_layers=12)
    source = Layout(Mesh(0, 0, replicas), Parallelism(data=replicas))
    target = Layout(Mesh(0, 8, receivers), Parallelism(data=receivers))
    plan = plan_transfers(weights, source, target, CLUSTER, 1 << 30)
    largest = max(p.size for p in weights.parameters) * weights.dtype_bytes
    mean = plan.total_bytes / replicas
    assert mean == receivers * weights.num_bytes / replicas
    assert max(plan.bytes_sent.values()) <= mean + largest
    assert min(plan.bytes_sent.values()) >= mean - largest


def test_the_nearest_replica_sends() -> None:
    """A copy on each node: nothing crosses the network."""
    weights = tiny_weights("qwen3")
    source = Layout(Mesh(0, 0, 8), Parallelism(data=2, tensor=4))
    target = Layout(Mesh(0, 0, 8), Parallelism(data=8))
    plan = plan_transfers(weights, source, target, CLUSTER, 1 << 30)
    assert list(plan.bytes_by_tier) == ["nvlink"]
    assert all(t.sender.device // 4 == t.receiver.device // 4 for t in plan.transfers)
    apart = plan_transfers(weights, source, Layout(Mesh(0, 8, 8), Parallelism(data=8)), CLUSTER, 1 << 30)
    assert list(apart.bytes_by_tier) == ["network"]
    assert apart.seconds > plan.seconds


def test_pools_are_joined_by_the_slower_network() -> None:
    weights = tiny_weights("llama")
    cluster = Cluster("H100", nodes=2) + Cluster("L40S", nodes=1)
    target = Layout(Mesh(1, 0, 2), Parallelism(tensor=2), "vllm")
    plan = plan_transfers(weights, Layout(Mesh(0, 0, 1), Parallelism()), target, cluster, 1 << 30)
    assert dict(plan.bytes_by_tier) == {"between pools": plan.total_bytes}
    outer = [pool.tiers[-1] for pool in cluster.pools]
    bandwidth, latency = min(t.bandwidth for t in outer), max(t.latency for t in outer)
    assert plan.seconds == pytest.approx(plan.total_bytes / bandwidth + plan.num_messages * latency)


def test_seconds_are_of_the_device_that_takes_longest() -> None:
    weights = Weights((Parameter("model.layers.0.m.weight", (8, 4), 0, 0),))
    plan = plan_transfers(
        weights, Layout(Mesh(0, 0, 1), Parallelism()), Layout(Mesh(0, 4, 2), Parallelism(tensor=2)), CLUSTER, 64
    )
    tier = CLUSTER.pools[0].tiers[-1]
    assert plan.bytes_sent == {DeviceId(0, 0): 64}
    assert plan.bytes_received == {DeviceId(0, 4): 32, DeviceId(0, 5): 32}
    assert plan.seconds == pytest.approx(64 / tier.bandwidth + plan.num_messages * tier.latency)


# -- memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [2, 3, 16, 100, 1000, 10**6])
@pytest.mark.parametrize("source", [TRAIN, SHARDED], ids=["megatron", "fsdp"])
def test_extra_memory_stays_below_the_bucket(source: Layout, bucket: int) -> None:
    weights = tiny_weights("llama", num_hidden_layers=2, hidden_size=8)
    arrays = numbered(weights)
    before = held(weights, source, arrays)
    plan = plan_transfers(weights, source, SERVE, CLUSTER, bucket)
    staged: dict[tuple[int, DeviceId], int] = {}
    for t in plan.transfers:
        for device in (t.sender, t.receiver):
            staged[t.round, device] = staged.get((t.round, device), 0) + t.bytes
    assert plan.peak_extra_bytes == max(staged.values()) <= bucket
    assert {t.round for t in plan.transfers} == set(range(plan.num_rounds))
    pairs = {(t.round, t.sender, t.receiver) for t in plan.transfers}
    assert plan.num_messages == len(pairs)
    after = held(weights, SERVE, arrays)
    expected = Owned(arrays).as_received(before, after, padding=False)
    found = apply(plan, before)
    assert all(np.array_equal(found[d][n], expected[d][n]) for d in expected for n in expected[d])


def test_larger_buckets_need_fewer_messages() -> None:
    weights = tiny_weights("llama")
    counts = [plan_transfers(weights, SHARDED, SERVE, CLUSTER, b).num_messages for b in (64, 1024, 1 << 20)]
    assert counts[0] > counts[1] > counts[2]


def test_whole_tensors_come_in_one_round() -> None:
    weights = tiny_weights("llama")
    plan = plan_transfers(weights, SHARDED, SERVE, CLUSTER, 64, whole_tensors=True)
    rounds: dict[tuple[DeviceId, str], set[int]] = {}
    for t in plan.transfers:
        rounds.setdefault((t.receiver, t.tensor), set()).add(t.round)
    assert all(len(r) == 1 for r in rounds.values())
    assert plan.peak_extra_bytes > 64
    generous = plan_transfers(weights, SHARDED, SERVE, CLUSTER, plan.peak_extra_bytes)
    assert generous.peak_extra_bytes <= plan.peak_extra_bytes


# -- the same plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TINY))
def test_the_order_of_parameters_does_not_matter(family: str) -> None:
    weights = tiny_weights(family)
    shuffled = list(weights.parameters)
    random.Random(3).shuffle(shuffled)
    plans = [
        plan_transfers(w, SHARDED, replace(SERVE, parallelism=Parallelism(data=4, tensor=2)), CLUSTER, 4096)
        for w in (weights, replace(weights, parameters=tuple(shuffled)))
    ]
    assert plans[0].blocks == plans[1].blocks
    assert plans[0].transfers == plans[1].transfers and plans[0].copies == plans[1].copies
    assert plans[0] == replace(plans[1], weights=weights)


def test_equal_layers_are_planned_once() -> None:
    """The size of a plan does not grow with layers where each number has one holder."""
    counts = [
        len(plan_transfers(tiny_weights("llama", num_hidden_layers=n), SHARDED, SERVE, CLUSTER, 1 << 30).blocks)
        for n in (3, 30)
    ]
    assert counts[1] < 2 * counts[0]


def test_a_large_model_moves_what_its_shares_say() -> None:
    """70B from FSDP on 64 devices to 8 × 8 in vLLM: all of what a rank needs, each number once."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    weights = Weights.of(Architecture.from_config(config))
    cluster = Cluster("H100", nodes=16)
    source = Layout(Mesh(0, 0, 64), Parallelism(data=64, zero=3))
    target = Layout(Mesh(0, 64, 64), Parallelism(data=8, tensor=8), "vllm")
    plan = plan_transfers(weights, source, target, cluster, 1 << 30)
    assert plan.total_bytes == sum(target.num_bytes(weights).values())  # 128256 is a multiple of 64
    assert plan.peak_extra_bytes <= 1 << 30
    mean = plan.total_bytes / 64
    assert max(plan.bytes_sent.values()) <= 1.01 * mean  # each number has one holder, and shards are even


def test_a_plan_says_what_it_does() -> None:
    weights = tiny_weights("llama")
    text = str(plan_transfers(weights, TRAIN, SERVE, CLUSTER, 4096))
    assert "over network" in text and "rounds" in text and "estimated" in text
    same = plan_transfers(weights, TRAIN, TRAIN, CLUSTER, 4096)
    assert "nothing is sent" in str(same) and not same.transfers


# -- what cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "bucket", "texts"),
    [
        (TRAIN, SERVE, 1, ["bucket_bytes is 1; expected at least 2"]),
        (TRAIN, SERVE, 1.5, ["bucket_bytes is 1.5"]),
        (
            TRAIN,
            replace(SERVE, mesh=Mesh(0, 12, 8)),
            64,
            ["the target is on 8 devices from 12 on in pool 0; it has 16"],
        ),
        (replace(TRAIN, mesh=Mesh(2, 0, 8)), SERVE, 64, ["the source is on 8 devices", "there are 1 pools"]),
        (
            replace(TRAIN, stages=(1, 1)),
            replace(SERVE, mesh=Mesh(0, 0, 4)),
            0,
            ["bucket_bytes is 0", "source: stages holds 2 layers", "target: data 4"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_all_reasons(
    source: Layout, target: Layout, bucket: Any, texts: list[str]
) -> None:
    with pytest.raises(FlowError) as caught:
        plan_transfers(tiny_weights("llama"), source, target, CLUSTER, bucket)
    for text in texts:
        assert text in str(caught.value)
