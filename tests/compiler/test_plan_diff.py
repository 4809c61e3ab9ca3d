"""The difference of two plans, and a mapping to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import Cluster, FunctionReward, GroupAdvantage, GRPOUpdater, Model, RLFlow, Rollout, Strategy, compile
from flowrl.compiler.mapping import Mapping
from flowrl.compiler.plan import Plan, PlannedCall, PlannedModel, PlannedWeightEdge
from flowrl.compiler.plan_diff import diff, mapping_from_json
from flowrl.errors import FlowError
from tests.compiler.mappings import mappings, ppo


@dataclass(frozen=True)
class Placed(Plan):
    """A plan with what the compiler decided about devices."""

    mapping: Mapping | None = None


def call(label: str, **settings: str) -> PlannedCall:
    return PlannedCall(label, "Node", "host", tuple(settings.items()), (("rollouts", ("source",)),), (), (), "cuda")


def plan(mapping: Mapping | None = None, **changes: Any) -> Any:
    made = {
        "calls": (call("rollout", group_size="4", top_p="1.0"), call("reward"), call("update")),
        "models": (PlannedModel("actor", "policy", "cuda", "bfloat16", None, "transformers", "update"),),
        "weight_edges": (PlannedWeightEdge("actor", "update", "rollout", 0),),
        "derived_writers": (("actor.ema", "actor"),),
        "micro_batch_tokens": 4096,
        "device": "cuda",
        "num_devices": 16,
        "mapping": mapping,
    }
    return Placed(**{**made, **changes})


BEFORE = plan(ppo())


def unit(**changes: Any) -> Mapping:
    """The rollout changed."""
    mapping = ppo()
    return replace(mapping, units=(replace(mapping.units[0], **changes), *mapping.units[1:]))


def stretch(**changes: Any) -> Mapping:
    mapping = ppo()
    return replace(mapping, stretches=(replace(mapping.stretches[0], **changes), *mapping.stretches[1:]))


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (plan(ppo(), calls=BEFORE.calls[:2]), "− call update"),
        (plan(ppo(), calls=(*BEFORE.calls, call("ref"))), "+ call ref"),
        (
            plan(ppo(), calls=(call("rollout", group_size="8", n="2"), *BEFORE.calls[1:])),
            "~ call rollout: settings.group_size 4 → 8; settings.top_p 1.0 → nothing; settings.n nothing → 2",
        ),
        (plan(ppo(), calls=BEFORE.calls[::-1]), "~ order, call by call: update, rollout"),
        (
            plan(ppo(), models=(replace(BEFORE.models[0], strategy=Strategy(tensor_parallel=2), autocast="bfloat16"),)),
            "~ model actor: autocast None → bfloat16; strategy.tensor_parallel 1 → 2",
        ),
        (
            plan(ppo(), weight_edges=(PlannedWeightEdge("actor", "update", "rollout", 1),)),
            "~ weight edge actor: update → rollout: max_staleness 0 → 1",
        ),
        (plan(ppo(), derived_writers=()), "− derived writer actor.ema of actor"),
        (plan(ppo(), micro_batch_tokens=8192), "~ micro_batch_tokens 4,096 → 8,192"),
        (plan(None), "− mapping: calls are not placed on devices"),
        (plan(ppo(period=36.0)), "~ period 40.0 s → 36.0 s (−10 %)"),
        (plan(ppo(period=40.000001)), "~ period 40.0 s → 40.0 s (40.0 → 40.000001)"),
        (
            plan(unit(seconds=25.0, mesh="B", flops=1.5)),
            "~ unit rollout: mesh A → B; seconds 30.0 s → 25.0 s (−17 %); flops 7.2e+16 → 1.5",
        ),
        (plan(unit(offload=True)), "~ unit rollout: offload False → True"),
        (plan(stretch(held=14e9)), "~ devices 0–7 of pool 0: held 7.00 GB → 14.0 GB (+100 %)"),
        (plan(ppo(meshes=ppo().meshes[:2])), "− mesh C"),
        (plan(ppo(slots=())), "~ timeline: 16 slots → 0 slots, at other times"),
        (
            plan(ppo(nodes=2, pools=(replace(ppo().pools[0], nodes=3),))),
            "~ pool H100: nodes 2 → 3",
        ),
        (plan(ppo(critical=("update",))), "~ critical (values, ref, update) → (update)"),
    ],
)
def test_a_difference_by_hand(after: Any, text: str) -> None:
    assert diff(BEFORE, after) == text


def test_equal_plans_have_none() -> None:
    assert diff(BEFORE, plan(ppo())) == "" == diff(plan(None), plan(None))
    assert diff(plan(None), BEFORE) == "+ mapping: calls are placed on devices"


def test_plans_of_the_compiler() -> None:
    flow = RLFlow(
        rollout=Rollout(Model("some/policy", name="actor"), group_size=4),
        reward=FunctionReward(len),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(),
    )
    one, four = (compile(flow, Cluster("cpu", n)).plan for n in (1, 4))
    assert "~ num_devices 1 → 4" in diff(one, four).splitlines()
    assert diff(one, one) == ""


@given(st.tuples(mappings(), mappings()))
@settings(max_examples=25, deadline=None)
def test_a_difference_is_never_missed(pair: tuple[Mapping, Mapping]) -> None:
    a, b = pair
    assert bool(diff(plan(a), plan(b))) == (a != b)
    for line in diff(plan(a), plan(b)).splitlines():
        assert line[0] in "+−~" and line.isprintable()


# -- JSON -----------------------------------------------------------------------------------------------------------------


@given(mappings())
@settings(max_examples=40, deadline=None)
def test_there_and_back(mapping: Mapping) -> None:
    text = json.dumps(asdict(mapping))
    back = mapping_from_json(json.loads(text))
    assert back == mapping and hash(back) == hash(mapping)
    assert json.dumps(asdict(back)) == text, "whole numbers stay whole"


def _set(raw: Any, *path: Any, value: Any) -> None:
    for part in path[:-1]:
        raw = raw[part]
    raw[path[-1]] = value


def _drop(raw: Any, *path: Any) -> None:
    for part in path[:-1]:
        raw = raw[part]
    del raw[path[-1]]


@pytest.mark.parametrize(
    ("breaks", "messages"),
    [
        (lambda r: _set(r, "period", value="40"), ["mapping.period is '40'; expected a number"]),
        (lambda r: _set(r, "exact", value=1), ["mapping.exact is 1; expected true or false"]),
        (lambda r: _set(r, "evaluations", value=True), ["mapping.evaluations is True; expected a whole number"]),
        (lambda r: _set(r, "units", value=None), ["mapping.units is None; expected a list"]),
        (lambda r: _set(r, "units", 2, value=[]), ["mapping.units[2] is []; expected an object"]),
        (lambda r: _set(r, "critical", 1, value=3), ["mapping.critical[1] is 3; expected a text"]),
        (
            lambda r: _set(r, "units", 1, "parallelism", "data", value=1.5),
            ["mapping.units[1].parallelism.data is 1.5; expected a whole number"],
        ),
        (
            lambda r: (_drop(r, "pools", 0, "device", "flops"), _set(r, "pools", 0, "device", "flop", value=1)),
            ["mapping.pools[0].device.flops is missing; expected a number",
             "mapping.pools[0].device has 'flop'; expected no such field; did you mean 'flops'?"],
        ),
        (lambda r: _set(r, "alternatives", 0, "seconds", value="no"), ["mapping.alternatives[0].seconds is 'no'"]),
    ],
)  # fmt: skip
def test_malformed(breaks: Callable[[Any], Any], messages: list[str]) -> None:
    raw = json.loads(json.dumps(asdict(ppo())))
    breaks(raw)
    with pytest.raises(FlowError) as caught:
        mapping_from_json(raw)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("raw", [None, [], "mapping", 3])
def test_no_mapping_at_all(raw: Any) -> None:
    with pytest.raises(FlowError, match="mapping is .*; expected an object"):
        mapping_from_json(raw)
