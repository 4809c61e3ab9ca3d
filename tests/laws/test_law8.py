"""Law 8: resharding moves exactly the bytes that are missing at the target, and A → B → A is the identity, bit for bit.

What devices hold is worked out a second time in ``tests.compiler.reference_layouts``, and compared number by number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.resharding import plan_transfers
from flowrl.compiler.transfers import ReshardPlan, apply
from tests.compiler.reference_layouts import (
    TINY,
    Arrays,
    Owned,
    held,
    numbered,
    tiny_config,
    tiny_weights,
)

CLUSTER = Cluster("H100", nodes=3, gpus_per_node=4)
GENEROUS = 1 << 20


@st.composite
def layouts(draw: st.DrawFn, *, kv_heads: int = 4) -> Layout:
    """Any layout of up to 8 of the 12 devices that a model of 5 layers and 8 heads can have."""
    naming = draw(st.sampled_from(["huggingface", "megatron", "vllm"]))
    tensors = [t for t in (1, 2, 4) if naming != "megatron" or kv_heads % t == 0]
    tensor = draw(st.sampled_from(tensors))
    pipeline = draw(st.integers(1, 8 // tensor).filter(lambda p: p <= 5))
    data = draw(st.integers(1, 8 // (tensor * pipeline)))
    zero = draw(st.sampled_from([0, 1, 3])) if naming == "huggingface" else 0
    size = data * tensor * pipeline
    ranks: Any = draw(st.one_of(st.just(()), st.permutations(range(size)).map(tuple)))
    cuts = draw(
        st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=pipeline - 1, max_size=pipeline - 1).map(sorted))
    )
    stages = () if cuts is None else tuple(b - a for a, b in zip([0, *cuts], [*cuts, 5], strict=True))
    return Layout(
        Mesh(0, draw(st.integers(0, 12 - size)), size),
        Parallelism(data=data, tensor=tensor, pipeline=pipeline, zero=zero),
        naming,
        stages,
        ranks,
        shard_size=draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0])) if zero == 3 else None,
        split_vocabulary=draw(st.sampled_from([None, True])) if naming == "huggingface" else None,
        vocabulary_multiple=draw(st.sampled_from([None, 8])),
    )


families = st.sampled_from(sorted(TINY)).flatmap(
    lambda family: st.tuples(st.just(family), st.booleans() if "mix" in family or "moe" in family else st.just(False))
)


def equal(a: dict[DeviceId, Arrays], b: dict[DeviceId, Arrays]) -> bool:
    return a.keys() == b.keys() and all(
        a[d].keys() == b[d].keys()
        and all(a[d][n].shape == b[d][n].shape and np.array_equal(a[d][n], b[d][n]) for n in a[d])
        for d in a
    )


def check_each_gets_what_it_lacks(
    plan: ReshardPlan, owned: Owned, source: dict[DeviceId, Arrays], arrays: Arrays
) -> None:
    """Each number once, from who has it, to who has it not."""
    here = {device: owned.by(held) for device, held in source.items()}
    nothing = owned.by({})
    received: dict[DeviceId, np.ndarray] = {}
    for transfer in plan.transfers:
        sent = arrays[transfer.tensor][transfer.box.slices].ravel()
        assert transfer.bytes == sent.size * plan.weights.dtype_bytes
        assert here[transfer.sender][sent].all()
        had = received.setdefault(transfer.receiver, here.get(transfer.receiver, nothing).copy())
        assert not had[sent].any()
        had[sent] = True


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_exactly_what_is_missing_moves_and_lands_where_it_belongs(data: st.DataObject) -> None:
    family, fused = data.draw(families)
    kv_heads = tiny_config(family)["num_key_value_heads"]
    weights = tiny_weights(family, fused_experts=fused)
    a, b = (data.draw(layouts(kv_heads=kv_heads)) for _ in range(2))
    bucket = data.draw(st.sampled_from([64, 500, GENEROUS]))
    arrays = numbered(weights)
    source, target, owned = held(weights, a, arrays), held(weights, b, arrays), Owned(arrays)
    padding = a.naming == b.naming
    plan = plan_transfers(weights, a, b, CLUSTER, bucket)

    lacked = owned.missing(source, target, padding=padding)
    assert plan.bytes_received == {d: weights.dtype_bytes * int(n.sum()) for d, n in lacked.items()}
    check_each_gets_what_it_lacks(plan, owned, source, arrays)
    assert plan.total_bytes == sum(plan.bytes_received.values())
    assert plan.peak_extra_bytes <= bucket
    assert equal(apply(plan, source), owned.as_received(source, target, padding=padding))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_there_and_back_is_the_identity(data: st.DataObject) -> None:
    family, fused = data.draw(families)
    kv_heads = tiny_config(family)["num_key_value_heads"]
    weights = tiny_weights(family, fused_experts=fused)
    a, b = (data.draw(layouts(kv_heads=kv_heads)) for _ in range(2))
    arrays = {name: np.maximum(x, 0) for name, x in numbered(weights).items()}  # padding that frameworks make is zero
    source = held(weights, a, arrays)
    there = apply(plan_transfers(weights, a, b, CLUSTER, GENEROUS), source)
    assert equal(there, held(weights, b, arrays))
    assert equal(apply(plan_transfers(weights, b, a, CLUSTER, GENEROUS), there), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("between", ["megatron", "vllm"])
@pytest.mark.parametrize("family", sorted(TINY))
def test_tensors_of_a_real_model_come_back_bit_for_bit(family: str, between: Any, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**tiny_config(family))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = tiny_weights(family, fused_experts=True, dtype_bytes=dtype.itemsize)
    tensors = dict(model.named_parameters())
    assert set(tensors) == set(weights.by_name)
    for tensor in tensors.values():  # norms are all ones, biases zeros: anything may stand anywhere
        torch.nn.init.normal_(tensor)
    tensors["model.norm.weight"].data[0] = float("nan")
    file = Layout(Mesh(0, 0, 1), Parallelism())
    tensor = 2 if weights.num_kv_heads % 2 == 0 or between == "vllm" else 1
    split = Layout(Mesh(0, 4, 4), Parallelism(tensor=tensor, pipeline=4 // tensor), between)
    source = {DeviceId(0, 0): {name: t.detach() for name, t in tensors.items()}}
    there = apply(plan_transfers(weights, file, split, CLUSTER, 4096), source)
    back = apply(plan_transfers(weights, split, file, CLUSTER, 4096), there)[DeviceId(0, 0)]
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n].view(bits), tensors[n].detach().view(bits)) for n in tensors)


@pytest.mark.parametrize("family", sorted(TINY))
def test_what_is_there_already_is_not_sent(family: str) -> None:
    weights = tiny_weights(family)
    layout = Layout(Mesh(0, 0, 4), Parallelism(data=2, tensor=1, pipeline=2, zero=3))
    plan = plan_transfers(weights, layout, layout, CLUSTER, GENEROUS)
    assert plan.total_bytes == 0 and not plan.blocks and plan.seconds == 0
    assert sum(plan.bytes_kept.values()) == sum(layout.num_bytes(weights).values())
