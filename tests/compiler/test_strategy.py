"""Strategies: from a run's arguments into the plan, and what does not fit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flowrl import (
    Cluster,
    Ema,
    FullKLLoss,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    PolicyLogprobs,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Updater,
    ValueHead,
    ValueLoss,
    Values,
    compile,
    source,
)
from flowrl.adapters import LoRA
from flowrl.compiler.plan import Plan, Program
from flowrl.compiler.strategy import Strategy
from flowrl.errors import FlowError

FOUR = Cluster("cpu", num_devices=4)
TP2 = Strategy(tensor_parallel=2)


def flow(actor: Model | None = None) -> RLFlow:
    actor = actor or Model("some/policy", name="actor")
    rollouts = Rollout(actor, group_size=4)(source(Prompts, name="prompts"))
    advantages = GroupAdvantage()(rollouts, FunctionReward(len)(rollouts))
    old, ref = PolicyLogprobs(actor)(rollouts), ReferenceLogprobs(actor.frozen())(rollouts)
    return RLFlow.from_outputs(GRPOUpdater(actor, kl_coef=0.1, epochs=2)(rollouts, advantages, old, ref))


def held(program: Program) -> dict[str, Strategy]:
    return program.strategies()


def test_a_derived_model_is_held_as_its_base_unless_it_is_named() -> None:
    own = Strategy(sharding="none")
    assert held(compile(flow(), FOUR)) == {"actor": Strategy(), "actor.frozen": Strategy()}
    assert held(compile(flow(), FOUR, strategies={"actor": TP2})) == {"actor": TP2, "actor.frozen": TP2}
    assert held(compile(flow(), FOUR, strategies={"actor.frozen": own})) == {"actor": Strategy(), "actor.frozen": own}
    both = compile(flow(), FOUR, strategies={"actor": TP2}, strategy=own)
    assert held(both) == {"actor": TP2, "actor.frozen": TP2}, "the base's comes before the default"
    assert held(compile(flow(), FOUR, strategy=own)) == {"actor": own, "actor.frozen": own}


def test_models_may_be_named_or_given() -> None:
    actor = Model("some/policy", name="actor")
    given = compile(flow(actor), FOUR, strategies={actor: TP2, actor.frozen(): Strategy()})
    named = compile(flow(actor), FOUR, strategies={"actor": TP2, "actor.frozen": Strategy()})
    assert given.plan == named.plan


def test_json_round_trip() -> None:
    strategy = Strategy(
        tensor_parallel=2, sharding="hybrid", shard_size=2, shard_layers=("A", "B"), activation_checkpointing="layers"
    )
    plan = compile(flow(), FOUR, strategies={"actor": strategy}).plan
    assert Plan.from_json(plan.to_json()) == plan and plan.models[0].strategy == strategy
    raw = json.loads(plan.to_json())
    assert raw["num_devices"] == 4 and raw["models"][0]["strategy"]["shard_layers"] == ["A", "B"]


def test_a_checkpoint_does_not_depend_on_them() -> None:
    plans = [compile(flow(), FOUR, strategy=TP2).plan, compile(flow(), FOUR).plan, compile(flow(), Cluster("cpu")).plan]
    assert len(set(plans)) == 3 and len({p.structure for p in plans}) == 1


def test_the_plan_says_how_models_are_held_and_what_runs_once() -> None:
    strategies = {
        "actor": Strategy(tensor_parallel=2, cpu_offload=True, activation_checkpointing="layers"),
        "actor.frozen": Strategy(sharding="none", compile_layers=True),
    }
    text = compile(flow(), FOUR, strategies=strategies).plan.explain()
    assert text.startswith("8 calls on 4 ranks (cpu), in this order:")
    assert (
        "written by Updater#0; 2 ranks share each layer × 2 data-parallel ranks, parameters, gradients and optimiser "
        "sharded; parameters and optimiser in host memory; activations of layers computed again" in text
    )
    assert "never written; 4 data-parallel ranks, a copy on each; layers compiled" in text
    assert "[on the first rank]" in text
    assert "ranks" not in compile(flow(), Cluster("cpu")).plan.explain(), "a single device has nothing to say of ranks"


def test_what_holds_no_model_runs_once_and_losses_are_put_together_everywhere() -> None:
    program = compile(flow(), FOUR)
    assert program.once() == {"prompts", "FunctionReward#0", "GroupAdvantage#0"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategies": {"acto": TP2}}, r"strategies name 'acto', which is no Model of this flow; did you mean 'actor'\?"),
        ({"strategies": {"actor": "tp2"}}, "the strategy of actor is 'tp2'; expected a flowrl.Strategy"),
        ({"strategy": Strategy(tensor_parallel=0)}, "actor: tensor_parallel is 0; expected a whole number, at least 1"),
        (
            {"strategies": {"actor": Strategy(tensor_parallel=3)}},
            r"actor: tensor_parallel is 3; expected a divisor of the 4 ranks; actor.frozen: .*"
            r"Do: torchrun --nproc-per-node 12 -m flowrl run FILE --runtime spmd, or another tensor_parallel",
        ),
        (
            {"strategy": Strategy(attention="flush")},  # type: ignore[arg-type]
            "actor: attention is 'flush'; expected one of auto, sdpa, flex, flash",
        ),
        (
            {"strategies": {"actor": Strategy(attention="flash")}},
            r"actor: attention is 'flash' on cpu; expected a CUDA device \(its kernels are written for it\), or "
            r"attention='sdpa'; actor: attention is 'flash' with products in float32; expected Model\(autocast='bfloat16'\)",
        ),
        (
            {"strategies": {"actor": Strategy(attention="flex")}},
            r"actor: attention is 'flex' on cpu; expected a CUDA device \(elsewhere torch's flex_attention has no backward",
        ),
        ({"strategy": Strategy(sharding="half")}, "actor: sharding is 'half'; expected one of full, optimizer, none"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_does_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        compile(flow(), FOUR, **arguments)


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("tensor_parallel", ["2", None, [1], 2.0, 1.0, True, NAN, -1], "a whole number, at least 1"),
        ("shard_size", ["1", 1.0, True, NAN, 0, [2]], "a whole number, at least 1, or None"),
        ("sharding", [None, "FULL", 1, [], {}], "one of full, optimizer, none, hybrid"),
        ("activation_checkpointing", [None, True, []], "one of none, layers, offload"),
        ("attention", [None, "FLASH", [], 1], "one of auto, sdpa, flex, flash"),
        ("cpu_offload", ["yes", 1, None], "True or False"),
        ("compile_layers", ["no", 2, None], "True or False"),
        ("shard_layers", ["LlamaDecoderLayer"], r"a tuple of names: \('LlamaDecoderLayer',\)"),
        ("shard_layers", [(1,), ("",), None, 5, {"A"}, (None,)], "a tuple of names of module classes"),
    ],
)
def test_settings_of_the_wrong_type(name: str, values: list[Any], expected: str) -> None:
    """Said by name, with what was expected, before anything is loaded; on one rank as on several."""
    for value in values:
        strategy = Strategy(**{"sharding": "hybrid", "shard_size": 1, name: value})
        message = f"actor: {name} is {re.escape(repr(value))}; expected {expected}"
        for cluster in (FOUR, Cluster("cpu")):
            with pytest.raises(FlowError, match=message):
                compile(flow(), cluster, strategy=strategy)


def test_all_settings_at_once() -> None:
    wrong: dict[str, Any] = dict(tensor_parallel="2", sharding=[], shard_size=1.0, shard_layers="A", cpu_offload="yes")
    wrong |= dict(activation_checkpointing=[], compile_layers=0, attention={})
    found = list(Strategy(**wrong).problems(4, device="cpu", dtype="float32"))
    assert sorted(text.split(" is ")[0] for text in found) == sorted(wrong)
    assert list(Strategy(cpu_offload="no", sharding="none").problems()) == [  # type: ignore[arg-type]
        "cpu_offload is 'no'; expected True or False"
    ]


def test_a_list_of_names_is_a_tuple() -> None:
    strategy = Strategy(shard_layers=["A", "B"])  # type: ignore[arg-type]
    assert strategy == Strategy(shard_layers=("A", "B")) and len({strategy}) == 1 and not list(strategy.problems(2))
    assert list(Strategy(shard_layers=[1]).problems()) == [  # type: ignore[list-item]
        "shard_layers is (1,); expected a tuple of names of module classes"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategies": ["actor"]}, r"strategies are no mapping.*Received \['actor'\]"),
        ({"strategies": []}, r"strategies are no mapping.*Received \[\]"),
        ({"strategies": "full"}, "strategies are no mapping.*Received 'full'"),
        ({"strategies": Strategy()}, "strategies are no mapping.*Do: strategy=…, which is that of all Models"),
        (
            {"strategies": {None: Strategy(), 1: Strategy()}},
            "strategies have the key None; expected a Model, or the name of one; strategies have the key 1; expected",
        ),
        (
            {"strategies": {"actor": TP2, Model("some/policy", name="actor"): Strategy()}},
            "strategies name 'actor' twice, as a Model and by its name; expected one of them",
        ),
        ({"strategy": {}}, "strategy is {}; expected a flowrl.Strategy, or None"),
        ({"strategy": "full"}, "strategy is 'full'; expected a flowrl.Strategy, or None"),
        ({"cluster": "cpu"}, r"cluster is no Cluster.*Received 'cpu'. Do: Cluster\('cpu'\)"),
        ({"cluster": ""}, "cluster is no Cluster.*Received ''"),
        ({"micro_batch_tokens": "9"}, "micro_batch_tokens cannot work. Expected a whole number, at least 1. Received '9'"),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        compile(flow(), **{"cluster": FOUR, **arguments})


@pytest.mark.parametrize("wrong", [{"device": None}, {"device": ""}, {"num_devices": True}, {"num_devices": "2"}])
def test_clusters_that_cannot_be(wrong: dict[str, Any]) -> None:
    (value,) = wrong.values()
    with pytest.raises(FlowError, match=f"is {value!r}; expected"):
        Cluster(**wrong)


def test_a_head_is_held_with_its_trunk() -> None:
    actor = Model("some/policy", name="actor")
    head = ValueHead(actor)
    rollouts = Rollout(actor, group_size=2)(source(Prompts, name="prompts"))
    advantages = GroupAdvantage()(rollouts, FunctionReward(len)(rollouts))
    values = source(Values, name="values")
    flow = RLFlow.from_outputs(Updater(actor)(ValueLoss(head)(rollouts, values, advantages)))
    with pytest.raises(
        FlowError, match=r"'actor.value_head', a head on the weights of 'actor'; expected the name of that"
    ):
        compile(flow, FOUR, strategies={head: TP2})
    assert held(compile(flow, FOUR, strategies={actor: TP2}))["actor.value_head"] == TP2


def test_a_model_on_one_device_cannot_lie_over_ranks() -> None:
    actor = Model("some/policy", name="actor", device="cuda:1")
    with pytest.raises(
        FlowError, match="actor: device is 'cuda:1'; expected None or a kind of device, one for each rank"
    ):
        compile(flow(actor), FOUR)
    compile(flow(actor), Cluster("cpu"))


def test_flash_attention_is_a_matter_of_device_and_precision() -> None:
    flash = Strategy(attention="flash")
    gpus = Cluster("cuda", num_devices=4)
    half = flow(Model("some/policy", name="actor", autocast="bfloat16"))
    program = compile(half, gpus, strategies={"actor": flash, "actor.frozen": Strategy(attention="sdpa")})
    assert "; flash attention" in program.plan.explain() and "; sdpa attention" in program.plan.explain()
    assert "attention" not in compile(half, gpus).plan.explain()
    compile(flow(Model("some/policy", name="actor", dtype="float16")), gpus, strategy=flash)
    with pytest.raises(FlowError, match=r"actor.frozen: attention is 'flash' with products in float32"):
        compile(flow(), gpus, strategy=flash)
    with pytest.raises(FlowError, match=r"actor.frozen: attention is 'flash' on cpu; expected a CUDA device"):
        compile(flow(Model("some/policy", name="actor", autocast="bfloat16", device="cpu")), gpus, strategy=flash)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (
            {"lora": LoRA()},
            {"strategies": {"actor": TP2}},
            r"actor: tensor_parallel is 2 with lora; expected 1: .*; actor.frozen: tensor_parallel is 2 with lora",
        ),
        (
            {"lora": LoRA(), "quantization": "nf4"},
            {},
            r"actor: sharding is 'full', .*quantization='nf4'; expected Strategy\(sharding='none'\)",
        ),
        (
            {"quantization": "int8", "lora": LoRA()},
            {"strategy": Strategy(tensor_parallel=2, sharding="none")},
            r"actor: tensor_parallel is 2 with lora.*actor: sharding is 'none', tensor_parallel is 2 with quantization",
        ),
        (
            {"lora": LoRA()},
            {"strategies": {"actor.frozen": Strategy(sharding="none")}},
            r"strategies name 'actor.frozen', which is held on the base of 'actor'; expected the name of that Model",
        ),
    ],
)
def test_adapters_and_quantised_bases_cannot_be_held_in_every_way(
    settings: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    """Said before anything is loaded: the source of this Model does not exist."""
    with pytest.raises(FlowError, match=message):
        compile(flow(Model("no/such", name="actor", **settings)), FOUR, **arguments)
    alone = {**arguments, "strategies": {}, "strategy": Strategy()}
    compile(flow(Model("no/such", name="actor", **settings)), Cluster("cpu"), **alone)


def test_adapters_and_quantised_bases_over_ranks() -> None:
    none = Strategy(sharding="none")
    assert held(compile(flow(Model("some/policy", name="actor", lora=LoRA())), FOUR))["actor.frozen"] == Strategy()
    small = Model("some/policy", name="actor", lora=LoRA(), quantization="nf4")
    assert held(compile(flow(small), FOUR, strategy=none)) == {"actor": none, "actor.frozen": none}


def test_a_teacher_is_not_split_over_ranks_that_work_on_different_rows() -> None:
    actor = Model("some/policy", name="actor")
    rollouts = Rollout(actor, group_size=2)(source(Prompts, name="prompts"))
    distil = RLFlow.from_outputs(Updater(actor)(FullKLLoss(Ema(actor, 0.9))(rollouts)))
    with pytest.raises(
        FlowError, match=r"actor.ema: tensor_parallel is 2; expected a divisor of 1, that of actor, with which a loss"
    ):
        compile(distil, FOUR, strategies={"actor.ema": TP2})
    compile(distil, FOUR, strategies={"actor": TP2})
    compile(distil, FOUR, strategies={"actor": TP2, "actor.ema": Strategy()})
