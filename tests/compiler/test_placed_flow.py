"""Flows that the compiler places: from the public interface alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl import (
    GAE,
    Cluster,
    Critic,
    FlowError,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Lengths,
    Mesh,
    Model,
    Pin,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Sampling,
    Strategy,
    ValueModel,
    ValueUpdater,
    compile,
    source,
)
from flowrl.compiler.mapping import Mapping
from flowrl.compiler.placement import PlacementError
from flowrl.compiler.plan import Plan
from flowrl.models import Dtype

TWO_NODES = Cluster("H100", nodes=2, gpus_per_node=8)


def ppo(name: str = "Qwen/Qwen3-8B", *, staleness: int = 0) -> RLFlow:
    actor = Model(name, name="actor", autocast="bfloat16")
    critic = ValueModel(name, name="critic", autocast="bfloat16")
    prompts = source(Prompts, name="prompts", batch_size=64)
    rollout = Rollout(actor, group_size=4, sampling=Sampling(max_new_tokens=1024), max_staleness=staleness)
    rollouts = rollout(prompts)
    values = Critic(critic)(rollouts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    rewards = FunctionReward(len)(rollouts)
    advantages = GAE(kl_coef=0.05)(rollouts, rewards, values, old_logprobs, ref_logprobs)
    return RLFlow.from_outputs(
        PPOUpdater(actor, epochs=2)(rollouts, advantages, old_logprobs),
        ValueUpdater(critic)(rollouts, values, advantages),
    )


def grpo(name: str = "Qwen/Qwen2.5-7B", dtype: Dtype = "bfloat16") -> RLFlow:
    actor = Model(name, name="actor", dtype=dtype)
    rollouts = Rollout(actor, group_size=8)(source(Prompts, name="prompts", batch_size=32))
    advantages = GroupAdvantage()(rollouts, FunctionReward(len)(rollouts))
    return RLFlow.from_outputs(GRPOUpdater(actor)(rollouts, advantages, PolicyLogprobs(actor)(rollouts)))


def mapping_of(flow: RLFlow, cluster: Cluster = TWO_NODES, **settings: Any) -> Mapping:
    found = compile(flow, cluster, **settings).plan.mapping
    assert found is not None
    return found


def check_hard_limits(mapping: Mapping) -> None:
    """Memory, node boundaries, and that a parallelism fills its mesh."""
    for stretch in mapping.stretches:
        assert stretch.held + stretch.transient <= stretch.capacity * (1 + 1e-9)
    for mesh in mapping.meshes:
        pool = mapping.pools[mesh.pool]
        within = mesh.size < pool.gpus_per_node
        assert pool.gpus_per_node % mesh.size == 0 if within else mesh.size % pool.gpus_per_node == 0
        assert mesh.start % min(mesh.size, pool.gpus_per_node) == 0
        assert mesh.start + mesh.size <= pool.nodes * pool.gpus_per_node
    size_of = {mesh.name: mesh.size for mesh in mapping.meshes}
    assert all(unit.parallelism.size == size_of[unit.mesh] for unit in mapping.units)


def test_several_nodes_of_named_gpus_are_placed_without_asking() -> None:
    program = compile(ppo(), TWO_NODES)
    mapping = program.plan.mapping
    assert mapping is not None and mapping.period >= mapping.lower_bound > 0
    check_hard_limits(mapping)
    labels = {unit.call for unit in mapping.units}
    assert {"Rollout#0", "Critic#0", "PolicyLogprobs#0", "ReferenceLogprobs#0", "Updater#0", "Updater#1"} == labels
    assert compile(ppo(), Cluster("cpu", 2)).plan.mapping is None


def test_equal_inputs_have_equal_plans_and_json_is_the_identity() -> None:
    plan = compile(ppo(), TWO_NODES).plan
    again = compile(ppo(), TWO_NODES).plan
    assert plan == again and plan.to_json() == again.to_json() and plan.diff(again) == ""
    assert Plan.from_json(plan.to_json()) == plan
    assert "estimate" in plan.explain() and "Updater#0" in plan.explain()
    assert "<svg" in plan.html() and "text/html" in plan._repr_mimebundle_()
    other = compile(ppo(), Cluster("H100", nodes=4)).plan
    assert "32" in plan.diff(other)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(lambda flow: "Rollout#0", id="label"),
        pytest.param(lambda flow: next(m for m in flow.models if m.name == "actor"), id="Model"),
        pytest.param(lambda flow: "actor", id="name"),
    ],
)
def test_pins_are_kept(key: Callable[[RLFlow], Any]) -> None:
    flow = ppo()
    mapping = mapping_of(flow, pin={key(flow): Pin(tensor=4, mesh=TWO_NODES.mesh(8, 8))})
    (unit,) = [u for u in mapping.units if u.call == "Rollout#0"]
    mesh = next(m for m in mapping.meshes if m.name == unit.mesh)
    assert unit.parallelism.tensor == 4 and (mesh.start, mesh.size) == (8, 8)
    check_hard_limits(mapping)


def test_a_mesh_and_a_strategy_are_pins() -> None:
    flow = grpo()
    mapping = mapping_of(
        flow, pin={"Rollout#0": Mesh(0, 0, 8), "Updater#0": Strategy(tensor_parallel=2, sharding="full")}
    )
    by_call = {u.call: u for u in mapping.units}
    assert by_call["Updater#0"].parallelism.tensor == 2 and by_call["Updater#0"].parallelism.zero == 3
    assert next(m for m in mapping.meshes if m.name == by_call["Rollout#0"].mesh).size == 8


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"Rolout#0": Pin(tensor=2)}, "did you mean 'Rollout#0'"),
        ({"Rollout#0": 3}, "expected a Mesh, a Pin or a Strategy"),
        ({"Rollout#0": Mesh(0, 3, 2)}, "begins at device 3; expected a multiple of 2"),
        ({"Rollout#0": Mesh(0, 8, 16)}, "an end within the 16 devices"),
        ({"Rollout#0": Mesh(1, 0, 8)}, "pool 1; expected one of the 1 pools"),
        ({"Rollout#0": Mesh(0, 0, 5)}, "has 5 devices; expected a divisor of the 8"),
        ({"Updater#0": Pin(zero=4)}, "zero is 4; expected 0, 1, 2 or 3"),
        ({"Updater#0": Pin(tensor=3)}, "tensor is pinned to 3; expected a divisor of the 28 attention heads"),
        ({"Updater#0": Pin(pipeline=29)}, "pipeline is pinned to 29; expected at most the 28 layers"),
        ({"Updater#0": Pin(data=4, tensor=4, pipeline=2)}, r"over 16 devices suits .*data 4, tensor 4, pipeline 2"),
        ({"Updater#0": Pin(tensor=4, data=4, mesh=Mesh(0, 0, 8))}, "expected a divisor of the 8 devices of its mesh"),
    ],
)
def test_impossible_pins_say_why(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        compile(grpo(), TWO_NODES, pin=pin)


def test_all_impossible_pins_are_said_at_once() -> None:
    with pytest.raises(FlowError, match=r"Rolout#0.*zero is 4"):
        compile(grpo(), TWO_NODES, pin={"Rolout#0": Pin(tensor=2), "Updater#0": Pin(zero=4)})


def test_what_fits_nowhere_says_what_would_do_and_that_is_true() -> None:
    flow, cluster = grpo("meta-llama/Llama-2-70b-hf", "float32"), Cluster("H100", nodes=1)
    with pytest.raises(PlacementError, match=r"Updater#0 needs \d+\.\d GB on a device.* may use 73\.6 GB") as refused:
        compile(flow, cluster)
    assert "it fits on 2 nodes of 8 H100" in str(refused.value)
    check_hard_limits(mapping_of(flow, Cluster("H100", nodes=2)))


def test_staleness_is_used_to_overlap() -> None:
    lengths = Lengths(prompt=512, response=1024, max_response=8192)
    late, prompt = (mapping_of(ppo(staleness=k), Cluster("H100", nodes=4), lengths=lengths) for k in (1, 0))
    assert late.period < prompt.period


def test_a_mesh_lies_within_one_pool() -> None:
    cluster = TWO_NODES + Cluster("L40S", nodes=1)
    mapping = mapping_of(ppo(), cluster)
    check_hard_limits(mapping)
    assert mapping.period <= mapping_of(ppo(), TWO_NODES).period * 1.02, "devices that are added may be left unused"


def test_what_if_another_node() -> None:
    mapping = mapping_of(grpo(), TWO_NODES, what_if=True)
    found = {other.name: other.seconds for other in mapping.what_ifs}
    assert len(found) == 4
    more, longer = (
        next(s for name, s in found.items() if text in name) for text in ("one node more", "twice the response")
    )
    assert more is not None and more <= mapping.period
    assert longer is not None and longer > mapping.period


def test_layouts_for_ranks_that_run_everything() -> None:
    program = compile(ppo(), Cluster("H100", num_devices=8), strategy="auto", runtime="spmd")
    mapping = program.plan.mapping
    assert mapping is not None and [m.size for m in mapping.meshes] == [8] and not program.plan.not_everywhere()
    check_hard_limits(mapping)
    tensor = {u.model: set[int]() for u in mapping.units}
    for unit in mapping.units:
        tensor[unit.model].add(unit.parallelism.tensor)
    assert all(len(found) == 1 for found in tensor.values())
    assert program.strategies()["actor"].tensor_parallel in tensor["actor"]


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["H100", "A100-40G", "L40S"]),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "llama-2-13b"]),
)
def test_every_plan_respects_memory_and_boundaries(device: str, nodes: int, per_node: int, model: str) -> None:
    try:
        mapping = mapping_of(grpo(model), Cluster(device, nodes=nodes, gpus_per_node=per_node), strategy="auto")
    except PlacementError:
        return
    check_hard_limits(mapping)
    assert replace(mapping) == mapping and mapping.lower_bound <= mapping.period
