"""``@node``: batch-annotated parameters are inputs, the rest are settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flowrl
from flowrl import FunctionReward, Model, Prompts, Ref, Rewards, RLFlow, Rollout, Rollouts, rewards_like, source
from flowrl.errors import EdgeTypeError, FlowError, GraphError
from flowrl.nodes.function import NodeFunction, as_node
from tests.tiny import recorded_rollouts


@flowrl.node
def penalty(rollouts: Rollouts, per_token: float = 0.5) -> Rewards:
    """Short is good."""
    return rewards_like(rollouts, length=-per_token * rollouts.response_lengths)


@flowrl.node(kind="reward", needs_groups=2)
def scaled(rewards: Rewards, factor: float, *, names: list[str] = []) -> Rewards:  # noqa: B006
    names.append("called")
    return Rewards(
        rewards.prompt_id,
        rewards.sample_id,
        {k: factor * v for k, v in rewards.components.items()},
        rewards.valid,
        rewards.reasons,
    )


@flowrl.node
def longest(*rewards: Rewards, margin: float = 0.0) -> Rewards:
    return max(rewards, key=lambda r: float(r.totals.sum()) + margin)


@pytest.fixture
def ref() -> Any:
    return Rollout(Model("m"))(source(Prompts, name="prompts"))


def raised(thing: Callable[[], Any], kind: type[FlowError] = GraphError) -> FlowError:
    with pytest.raises(kind) as info:
        thing()
    return info.value


def test_it_records_and_runs(ref: Any) -> None:
    recorded: Any = penalty(ref, per_token=2.0)
    assert isinstance(recorded, Ref)
    assert recorded._call.node.settings() == {"per_token": 2.0}
    assert recorded._call.node.name == "penalty"
    rollouts = recorded_rollouts()
    assert torch.equal(penalty(rollouts, 2.0).totals, -2.0 * rollouts.response_lengths)
    assert torch.equal(penalty(rollouts).totals, -0.5 * rollouts.response_lengths)
    assert torch.equal(penalty(per_token=1.0, rollouts=rollouts).totals, -1.0 * rollouts.response_lengths)


def test_it_looks_like_the_function() -> None:
    assert penalty.__name__ == "penalty" and penalty.__doc__ == "Short is good."
    assert repr(penalty) == "<node penalty(rollouts: 'Rollouts', per_token: 'float' = 0.5)>"
    assert isinstance(penalty, NodeFunction)


def test_class_attributes_and_settings_without_default(ref: Any) -> None:
    assert scaled.node_class.kind == "reward" and scaled.node_class.needs_groups == 2
    error = raised(lambda: scaled(penalty(ref)), EdgeTypeError)  # type: ignore[call-arg]
    assert "scaled is called with the wrong arguments: missing a required argument: 'factor'" in str(error)
    assert scaled(penalty(ref), 2.0)._call.node.settings()["factor"] == 2.0  # type: ignore[attr-defined]


def test_mutable_defaults_are_shared_as_in_python() -> None:
    rewards = penalty(recorded_rollouts())
    scaled(rewards, 1.0)
    scaled(rewards, 1.0)
    assert scaled.node_class(factor=1.0).names == ["called", "called"]  # type: ignore[attr-defined,call-arg]


def test_variadic_inputs(ref: Any) -> None:
    one, two = penalty(ref), penalty(ref)
    recorded: Any = longest(one, two, margin=1.0)
    assert [name for name, _ in recorded._call.inputs()] == ["rewards[0]", "rewards[1]"]
    rollouts = recorded_rollouts()
    low, high = penalty(rollouts, 1.0), penalty(rollouts, 0.1)
    assert longest(low, high) == high


def test_labels_and_options(ref: Any) -> None:
    assert penalty.options(label="short")(ref, per_token=1.0)._call.node.label == "short"  # type: ignore[attr-defined]
    flow = RLFlow.from_outputs(penalty(ref), penalty(ref), penalty.options(label="short")(ref))
    assert flow.labels[2:] == ("penalty#0", "penalty#1", "short")


def test_wrong_edges_raise_at_the_line(ref: Any) -> None:
    error = raised(lambda: penalty(penalty(ref)), EdgeTypeError)  # type: ignore[arg-type]
    assert "penalty: argument 'rollouts' has the wrong type. Expected Rollouts. Received Rewards" in str(error)
    assert error.where is not None and error.where.startswith(__file__)
    assert "setting 'per_token' is given a Ref" in str(raised(lambda: penalty(ref, per_token=ref), EdgeTypeError))


def test_a_function_with_local_types(ref: Any) -> None:
    class Mine(Rewards):
        pass

    @flowrl.node
    def judge(rollouts: Rollouts) -> Mine: ...  # type: ignore[empty-body]

    @flowrl.node
    def takes(mine: Mine, threshold: float = 1.0) -> Rewards: ...  # type: ignore[empty-body]

    assert isinstance(takes(judge(ref)), Ref)
    raised(lambda: takes(penalty(ref)), EdgeTypeError)  # type: ignore[arg-type]


def test_a_function_without_future_annotations(ref: Any) -> None:
    names: dict[str, Any] = {"flowrl": flowrl, "Rollouts": Rollouts, "Rewards": Rewards}
    code = (
        "@flowrl.node\n"
        "def f(rollouts: Rollouts, a: float = 1.0) -> Rewards:\n"
        "    return flowrl.rewards_like(rollouts, x=rollouts.response_lengths)"
    )
    exec(code, names)
    assert isinstance(names["f"](ref), Ref)
    assert names["f"](recorded_rollouts()).num_rows == 6


def test_definitions_that_cannot_work() -> None:
    def no_input() -> None:
        @flowrl.node
        def nothing(alpha: float) -> Rewards: ...  # type: ignore[empty-body]

    def no_return() -> None:
        @flowrl.node
        def mute(rollouts: Rollouts): ...  # type: ignore[no-untyped-def]

    def keywords() -> None:
        @flowrl.node
        def loose(rollouts: Rollouts, **settings: float) -> Rewards: ...  # type: ignore[empty-body]

    def shadows() -> None:
        @flowrl.node
        def named(rollouts: Rollouts, name: str) -> Rewards: ...  # type: ignore[empty-body]

    def swappable() -> None:
        @flowrl.node
        def two(a: Rewards, b: Rewards) -> Rewards: ...  # type: ignore[empty-body]

    assert "nothing has no input" in str(raised(no_input))
    assert "mute.__call__ has no return type" in str(raised(no_return))
    assert "loose takes **settings" in str(raised(keywords))
    assert "named has a setting 'name', which is something that every Node has" in str(raised(shadows))
    assert "two.__call__ takes 'a' and 'b' by position" in str(raised(swappable))


def test_as_node() -> None:
    class Engine:
        def as_node(self) -> Any:
            return FunctionReward(len)

    reward = FunctionReward(len)
    assert as_node(reward) is reward
    assert as_node(penalty).settings() == {"per_token": 0.5}
    assert as_node(penalty.options(label="p")).label == "p"
    assert isinstance(as_node(Engine()), FunctionReward)
    assert "has settings without a default" in str(raised(lambda: as_node(scaled)))
    assert "wrap a reward function: FunctionReward(fn)" in str(raised(lambda: as_node(len)))  # type: ignore[arg-type]
