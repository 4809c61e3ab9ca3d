"""Node: a class becomes a frozen dataclass, a call records or runs, inputs are checked and aligned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest
import torch

import flowrl
from flowrl import (
    Model,
    Node,
    Prompts,
    Ragged,
    Ref,
    Rewards,
    Rollout,
    Rollouts,
    State,
    WeightedSum,
    rewards_like,
    source,
)
from flowrl.batches import LogprobOrigin
from flowrl.context import StepContext, current_step, use_step
from flowrl.errors import AlignmentError, BatchError, EdgeTypeError, FlowError, GraphError, ModelError
from tests.tiny import recorded_rollouts


class LengthPenalty(Node):
    per_token: float = 0.01

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, length=-self.per_token * rollouts.response_lengths)


class Doubled(LengthPenalty):
    times: int = 2

    def __call__(self, rollouts: Rollouts) -> Rewards:
        once = super().__call__(rollouts)
        return replace(once, components={"length": self.times * once.components["length"]})


@dataclass(frozen=True)
class Explicit(Node):
    names: tuple[str, ...] = field(default_factory=tuple)

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, x=rollouts.response_lengths)


@dataclass(frozen=True, slots=True)
class Slotted(Node):
    factor: float = 1.0

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, one=self.factor * rollouts.response_lengths)


class Difference(Node):
    def __call__(self, rollouts: Rollouts, *, first: Rewards, second: Rewards | None = None) -> Rewards:
        other = 0.0 if second is None else second.totals
        return rewards_like(rollouts, difference=first.totals - other)


class Draws(Node):
    """Draws from the global generators, as careless code does."""

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, noise=torch.rand(rollouts.num_rows))


class Says(Node):
    """Its label, as a reward's reason would be."""

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return replace(
            rewards_like(rollouts, x=rollouts.response_lengths), reasons=(current_step().label,) * rollouts.num_rows
        )


class Twice(Node):
    def __call__(self, rollouts: Rollouts) -> Rewards:
        first, second = Says()(rollouts), Says()(rollouts)
        assert (first.reasons[0], second.reasons[0]) == (
            f"{current_step().label}/Says#0",
            f"{current_step().label}/Says#1",
        )
        return first


@pytest.fixture
def ref() -> Any:
    return Rollout(Model("m"))(source(Prompts, name="prompts"))


def raised(thing: Callable[[], Any], kind: type[FlowError] = GraphError) -> FlowError:
    with pytest.raises(kind) as info:
        thing()
    return info.value


class TestClasses:
    def test_a_subclass_is_a_frozen_dataclass(self) -> None:
        penalty = LengthPenalty(0.5, label="short")
        assert [f.name for f in fields(penalty)] == ["label", "per_token"]
        assert penalty == LengthPenalty(per_token=0.5, label="short") != LengthPenalty()
        assert penalty.settings() == {"per_token": 0.5}
        assert penalty.name == "LengthPenalty"
        with pytest.raises(FrozenInstanceError, match=r"use dataclasses.replace"):
            penalty.per_token = 1.0  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del penalty.per_token  # type: ignore[misc]

    @pytest.mark.parametrize("cls", [Explicit, Slotted])
    def test_an_explicit_dataclass_on_top(self, cls: type[Node], ref: Any) -> None:
        node = cls()
        assert isinstance(node(ref), Ref)
        assert node(recorded_rollouts()).num_rows == 6
        with pytest.raises(FrozenInstanceError):
            node.label = "x"  # type: ignore[misc]

    def test_a_subclass_of_a_subclass(self, ref: Any) -> None:
        assert [f.name for f in fields(Doubled)] == ["label", "per_token", "times"]
        assert isinstance(Doubled(0.1, 3)(ref), Ref)
        rollouts = recorded_rollouts()
        assert torch.equal(Doubled(0.1, 3)(rollouts).totals, 3 * LengthPenalty(0.1)(rollouts).totals)

    def test_a_subclass_without_a_call_inherits_it(self, ref: Any) -> None:
        class Renamed(LengthPenalty):
            per_token: float = 7.0

        assert Renamed()(ref)._call.node.name == "Renamed" and Renamed().per_token == 7.0
        assert Renamed.ports == LengthPenalty.ports

    def test_settings_need_no_default(self) -> None:
        class Needs(Node):
            limit: int

            def __call__(self, rollouts: Rollouts) -> Rollouts:
                return rollouts

        with pytest.raises(TypeError, match="limit"):
            Needs()  # type: ignore[call-arg]
        assert Needs(3).limit == 3

    def test_mutable_defaults_are_refused_as_in_any_dataclass(self) -> None:
        with pytest.raises(ValueError, match="mutable default"):

            class Shared(Node):
                names: list[str] = []  # noqa: RUF012

    def test_a_local_class_with_local_types(self, ref: Any) -> None:
        @dataclass(frozen=True, eq=False, repr=False)
        class Judged(Rewards):
            pass

        class Judge(Node):
            def __call__(self, rollouts: Rollouts) -> Judged: ...  # type: ignore[empty-body]

        class Takes(Node):
            def __call__(self, judged: Judged) -> Rewards: ...  # type: ignore[empty-body]

        judged = Judge()(ref)
        assert isinstance(Takes()(judged), Ref)
        assert isinstance(WeightedSum()(judged), Ref)  # a Judged is a Rewards
        assert "Expected Judged. Received Rewards" in str(raised(lambda: Takes()(LengthPenalty()(ref)), EdgeTypeError))

    def test_definitions_that_cannot_work(self) -> None:
        def swappable() -> None:
            class Two(Node):
                def __call__(self, a: Rewards, b: Rewards) -> Rewards: ...  # type: ignore[empty-body]

        def overlapping() -> None:
            class Overlap(Node):
                def __call__(self, a: flowrl.Sequences, b: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

        def bare() -> None:
            class Bare(Node):
                def __call__(self, rollouts) -> Rewards: ...  # type: ignore[no-untyped-def,empty-body]

        def no_return() -> None:
            class Mute(Node):
                def __call__(self, rollouts: Rollouts): ...  # type: ignore[no-untyped-def]

        def keywords() -> None:
            class Any_(Node):
                def __call__(self, **inputs: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

        def shadows() -> None:
            class Named(Node):
                name: str = "x"

        assert str(raised(swappable)) == (
            "Two.__call__ takes 'a' and 'b' by position, and one could be given for the other. "
            "Expected same-typed inputs to be keyword-only. Do: write `*` before 'b'. "
            f"(at {__file__}:{swappable.__code__.co_firstlineno + 1})"
        )
        assert "takes 'a' and 'b' by position" in str(raised(overlapping))
        assert "Bare.__call__ input 'rollouts' has no type" in str(raised(bare))
        assert "Mute.__call__ has no return type" in str(raised(no_return))
        assert "Any_.__call__ takes **inputs" in str(raised(keywords))
        assert "Named has a setting 'name', which is something that every Node has" in str(raised(shadows))

    def test_class_attributes_are_no_settings(self) -> None:
        class Grouped(Node):
            kind: ClassVar[str] = "advantage"
            needs_groups: ClassVar[int] = 4

        assert Grouped().settings() == {}


class TestModelsAndStates:
    def test_models_are_found_inside_of_settings(self) -> None:
        a, b, c, state = Model("a"), Model("b"), Model("c"), State("s", 0)

        @dataclass(frozen=True)
        class Options:
            model: Model
            state: State

        class Panel(Node):
            judges: tuple[Model, ...]
            options: Options
            by_name: dict[str, Model] = field(default_factory=dict)

        node = Panel((a, b), Options(c, state), {"again": a})
        assert node.models() == (a, b, c) and node.states() == (state,)
        assert node.reads() == (a, b, c, state) and node.writes() == ()

    def test_a_state_is_written_only_by_who_says_so(self) -> None:
        state = State("count", 0)

        class Counts(Node):
            state: State

            def __call__(self, rollouts: Rollouts) -> Rollouts:
                self.state.set(self.state.value + rollouts.num_rows)
                return rollouts

        class Says(Counts):
            def writes(self) -> tuple[State, ...]:
                return (self.state,)

        rollouts = recorded_rollouts()
        error = raised(lambda: Counts(state)(rollouts), ModelError)
        assert "State 'count' is written by Counts#0, which does not say so" in str(error)
        Says(state)(rollouts)
        Says(state)(rollouts)
        assert state.value == 12

    def test_staleness(self) -> None:
        assert Rollout(Model("m"), max_staleness=2).staleness() == 2 and LengthPenalty().staleness() == 0


class TestRunning:
    def test_called_with_data_it_runs(self) -> None:
        rollouts = recorded_rollouts()
        rewards = LengthPenalty(0.5)(rollouts)
        assert torch.equal(rewards.totals, -0.5 * rollouts.response_lengths)

    def test_inputs_are_aligned_by_id_not_by_position(self) -> None:
        rollouts = recorded_rollouts()
        rewards = rewards_like(rollouts, length=rollouts.response_lengths)
        shuffled = rewards.select([5, 3, 1, 0, 2, 4])
        result = Difference()(rollouts, first=shuffled, second=rewards)
        assert torch.equal(result.totals, torch.zeros(6))

    def test_other_rows_are_refused(self) -> None:
        rollouts = recorded_rollouts()
        rewards = rewards_like(rollouts, one=torch.ones(6))
        error = raised(lambda: Difference()(rollouts, first=rewards.select([0, 1])), AlignmentError)
        assert "Difference: argument 'first' has other rows" in str(error) and "4 missing" in str(error)
        error = raised(lambda: Difference()(rollouts.select([0, 1]), first=rewards), AlignmentError)
        assert "4 unknown" in str(error)
        error = raised(lambda: Difference()(rollouts, first=rewards.select([0, 0, 1, 2, 3, 4])), AlignmentError)
        assert "holds an id twice" in str(error)

    def test_declared_joins(self) -> None:
        class Baseline(Node):
            joins: ClassVar[dict[str, Any]] = {"greedy": "prompt", "more": "subset"}

            def __call__(self, rollouts: Rollouts, *, greedy: Rewards, more: Rewards) -> Rewards:
                return rewards_like(rollouts, better=more.totals - greedy.totals)

        all_rows = recorded_rollouts(3, 2)
        rows = all_rows.select([5, 1, 2])
        greedy = rewards_like(all_rows.select([0, 2, 4]), r=torch.tensor([10.0, 20.0, 30.0]))
        more = rewards_like(all_rows, r=torch.arange(6.0))
        assert Baseline()(rows, greedy=greedy, more=more).totals.tolist() == [5 - 30, 1 - 10, 2 - 20]
        error = raised(lambda: Baseline()(rows, greedy=more, more=more), AlignmentError)
        assert "argument 'greedy' holds an id twice" in str(error) and "unique prompt_id" in str(error)

    def test_a_row_a_prompt_needs_a_declared_join(self) -> None:
        class Both(Node):
            def __call__(self, rollouts: Rollouts, prompts: Prompts) -> Rewards: ...  # type: ignore[empty-body]

        prompts = Prompts(torch.arange(3), ("a", "b", "c"))
        error = raised(lambda: Both()(recorded_rollouts(), prompts), AlignmentError)
        assert "argument 'prompts' has a row a prompt, its first input a row a sample" in str(error)
        assert "joins = {'…': 'prompt'}" in str(error)

    def test_variadic_inputs_are_aligned_with_each_other(self) -> None:
        rollouts = recorded_rollouts()
        rewards = rewards_like(rollouts, a=torch.arange(6.0))
        other = rewards_like(rollouts, b=torch.arange(6.0)).select([5, 4, 3, 2, 1, 0])
        total = WeightedSum()(rewards, other)
        assert torch.equal(total.totals, 2 * torch.arange(6.0))
        error = raised(lambda: WeightedSum()(rewards, other.select([0, 1])), AlignmentError)
        assert "argument 'rewards[1]' has other rows" in str(error)

    def test_wrong_data_are_refused(self) -> None:
        error = raised(lambda: LengthPenalty()(Prompts(torch.arange(1), ("a",))), EdgeTypeError)  # type: ignore[arg-type]
        assert "LengthPenalty: argument 'rollouts' has the wrong type. Expected Rollouts. Received Prompts" in str(
            error
        )
        assert "Received NoneType" in str(raised(lambda: LengthPenalty()(None), EdgeTypeError))  # type: ignore[arg-type]

    def test_a_wrong_result_is_refused(self) -> None:
        class Forgets(Node):
            def __call__(self, rollouts: Rollouts) -> Rewards:
                rewards_like(rollouts, x=rollouts.response_lengths)  # type: ignore[return-value]

        error = raised(lambda: Forgets()(recorded_rollouts()), EdgeTypeError)
        assert "Forgets returned the wrong type. Expected Rewards. Received NoneType" in str(error)

    def test_optional_inputs_may_be_absent_or_none(self) -> None:
        rollouts = recorded_rollouts()
        one = rewards_like(rollouts, one=torch.ones(6))
        assert torch.equal(
            Difference()(rollouts, first=one).totals, Difference()(rollouts, first=one, second=None).totals
        )

    def test_a_field_comes_as_it_is(self) -> None:
        class Longest(Node):
            def __call__(self, tokens: Ragged) -> Ragged:
                return tokens.select(tokens.lengths.argmax()[None])

        assert Longest()(Ragged.from_rows([[1], [2, 3]])).to_lists() == [[2, 3]]

    def test_resources_are_opened_once(self) -> None:
        opened: list[Node] = []

        class Pool(Node):
            def setup(self, ctx: Any) -> str:
                opened.append(self)
                return "pool"

            def __call__(self, rollouts: Rollouts) -> Rollouts:
                assert self.resource() == "pool"
                return rollouts

        node = Pool()
        node(recorded_rollouts())
        node(recorded_rollouts())
        assert opened == [node]


class TestLabelsAndRandomness:
    def test_eager_labels_are_those_of_recording(self) -> None:
        rollouts = recorded_rollouts()
        with flowrl.step(seed=1):
            labels = [Says()(rollouts).reasons[0], Says(label="mine")(rollouts).reasons[0], Says()(rollouts).reasons[0]]
        assert labels == ["Says#0", "mine", "Says#1"]

        ref: Any = Rollout(Model("m"))(source(Prompts, name="prompts"))
        outputs = [Says()(ref), Says(label="mine")(ref), Says()(ref)]
        flow = flowrl.RLFlow.from_outputs(*outputs)
        assert [flow.label(o) for o in outputs] == labels

    def test_labels_inside_of_a_body_hang_below_it(self) -> None:
        with flowrl.step():
            Twice()(recorded_rollouts())
            Twice(label="again")(recorded_rollouts())

    def test_careless_draws_depend_on_the_step_and_the_label_only(self) -> None:
        rollouts = recorded_rollouts()

        def draw(seed: int = 0, iteration: int = 0, pull: int = 0, label: str | None = None) -> list[float]:
            torch.rand(3)  # whatever was drawn before
            with flowrl.step(seed, iteration, pull=pull):
                return Draws(label=label)(rollouts).totals.tolist()

        assert draw() == draw()
        different = [draw(), draw(seed=1), draw(iteration=1), draw(pull=1), draw(label="other")]
        assert len({tuple(d) for d in different}) == 5

    def test_outside_of_a_step_the_users_generator_is_left_alone(self) -> None:
        torch.manual_seed(5)
        expected = torch.rand(6).tolist()
        torch.manual_seed(5)
        assert Draws()(recorded_rollouts()).totals.tolist() == expected

    def test_reports_reach_whoever_listens(self) -> None:
        class Reports(Node):
            def __call__(self, rollouts: Rollouts) -> Rollouts:
                flowrl.report("rows", rollouts.num_rows)
                return rollouts

        heard: dict[str, float] = {}
        with use_step(StepContext(report=heard.__setitem__)):
            Reports()(recorded_rollouts())
        Reports()(recorded_rollouts())
        assert heard == {"rows": 6}


def test_settings_that_cannot_work_are_refused_where_there_is_no_flow_too() -> None:
    """Stepping through an algorithm by hand must not train on what a flow would refuse."""
    rollouts = recorded_rollouts(group_size=3)
    rewards = flowrl.rewards_like(rollouts, x=rollouts.response_lengths.float())
    with pytest.raises(GraphError, match=r"GroupAdvantage cannot run: eps is -5"):
        flowrl.GroupAdvantage(eps=-5.0)(rollouts, rewards)
    with pytest.raises(GraphError, match=r"eps is nan; expected a number"):
        flowrl.GroupAdvantage(eps=float("nan"))(rollouts, rewards)
    advantages = flowrl.GroupAdvantage()(rollouts, rewards)
    origin = LogprobOrigin("m", 0, "test", "float32")
    old = flowrl.OldLogprobs(rollouts.prompt_id, rollouts.sample_id, rollouts.rollout_logprobs, origin)
    with pytest.raises(GraphError, match=r"kl_coef is 0.1 without ref_logprobs"):
        flowrl.GRPOLoss(kl_coef=0.1)(rollouts, advantages, old)
    # Equal ids, as many tokens in all, but other responses: the rows would be shifted against each other.
    order = [1, 0, 2, 3, 4, 5, 6, 7, 8]
    shifted = replace(old, old_logprobs=rollouts.rollout_logprobs.select(order))
    with pytest.raises(BatchError, match=r"GRPOLoss: old_logprobs.values does not fit row 0"):
        flowrl.GRPOLoss()(rollouts, advantages, shifted)
