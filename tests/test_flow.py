"""RLFlow: three ways to write PPO are one graph; labels, weight edges, order, the short form, eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch

import flowrl
from flowrl import (
    GAE,
    Critic,
    Demonstrations,
    DropUniformGroups,
    Ema,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    Node,
    OldLogprobs,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    Prompts,
    Ref,
    ReferenceLogprobs,
    RefLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    SFTLoss,
    Snapshot,
    State,
    TrainStats,
    Updater,
    ValueHead,
    ValueLoss,
    ValueModel,
    ValueUpdater,
    WeightEdge,
    WeightedSum,
    rewards_like,
    source,
)
from flowrl.errors import EdgeTypeError, FlowError, GraphError

ACTOR, CRITIC = Model("some/policy", name="actor"), ValueModel("some/policy", name="critic")


def reward(rollouts: Any = None) -> Any:
    return FunctionReward(len) if rollouts is None else FunctionReward(len)(rollouts)


def design_ppo() -> RLFlow:
    """Design §2, line by line."""
    prompts = source(Prompts, name="prompts", batch_size=64)
    rollouts = Rollout(ACTOR, group_size=4)(prompts)
    rewards = reward(rollouts)
    values = Critic(CRITIC)(rollouts)
    old_logprobs = PolicyLogprobs(ACTOR)(rollouts)
    ref_logprobs = ReferenceLogprobs(ACTOR.frozen())(rollouts)
    advantages = GAE(gamma=1.0, lam=0.95, kl_coef=0.05)(rollouts, rewards, values, old_logprobs, ref_logprobs)
    return RLFlow.from_outputs(
        PPOUpdater(ACTOR, epochs=2)(rollouts, advantages, old_logprobs),
        ValueUpdater(CRITIC)(rollouts, values, advantages),
    )


def short_ppo(**changes: Any) -> RLFlow:
    parts: dict[str, Any] = dict(
        rollout=Rollout(ACTOR, group_size=4),
        reward=reward(),
        advantage_estimator=GAE(gamma=1.0, lam=0.95, kl_coef=0.05),
        policy_updater=PPOUpdater(epochs=2),
        critic=CRITIC,
        reference=ACTOR.frozen(),
    )
    return RLFlow(**{**parts, **changes})


def terms_ppo() -> RLFlow:
    """With loss terms, and recorded in another order."""
    rollouts = Rollout(ACTOR, group_size=4)(source(Prompts, name="prompts", batch_size=64))
    old_logprobs = PolicyLogprobs(ACTOR)(rollouts)
    ref_logprobs = ReferenceLogprobs(ACTOR.frozen())(rollouts)
    values = Critic(CRITIC)(rollouts)
    advantages = GAE(kl_coef=0.05)(
        rollouts, reward(rollouts), values, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs
    )
    value_update = Updater(CRITIC)(ValueLoss()(rollouts, values=values, advantages=advantages))
    return RLFlow.from_outputs(
        Updater(ACTOR, epochs=2)(PPOLoss(clip=0.2)(rollouts, advantages, old_logprobs)), value_update
    )


def nodes_match(a: dict[str, Any], b: dict[str, Any]) -> bool:
    keys = ("title", "kind", "settings", "models")
    return {k: a[k] for k in keys} == {k: b[k] for k in keys}


def edges_match(a: dict[Any, dict[str, Any]], b: dict[Any, dict[str, Any]]) -> bool:
    def texts(edges: dict[Any, dict[str, Any]]) -> list[str]:
        return sorted(str(sorted((k, str(v)) for k, v in e.items())) for e in edges.values())

    return texts(a) == texts(b)


def isomorphic(a: RLFlow, b: RLFlow) -> bool:
    return nx.is_isomorphic(a.graph, b.graph, node_match=nodes_match, edge_match=edges_match)


def raised(thing: Callable[[], Any], kind: type[FlowError] = GraphError) -> FlowError:
    with pytest.raises(kind) as info:
        thing()
    return info.value


class TestOneGraph:
    def test_design_short_form_and_terms_are_isomorphic(self) -> None:
        flows = [design_ppo(), short_ppo(), terms_ppo()]
        assert all(f.check().ok for f in flows), [str(f.check()) for f in flows]
        assert isomorphic(flows[0], flows[1]) and isomorphic(flows[0], flows[2])

    @pytest.mark.parametrize(
        "changes",
        [
            {"policy_updater": PPOUpdater(epochs=3)},
            {"rollout": Rollout(ACTOR, group_size=5)},
            {"critic": ValueModel("some/policy", name="other")},
            {"reference": Model("some/policy", name="third", trainable=False)},
            {"rollout": Rollout(ACTOR, group_size=4, max_staleness=1)},
            {"reward": None, "reward_models": [reward(), reward()]},
        ],
    )
    def test_the_comparison_sees_differences(self, changes: dict[str, Any]) -> None:
        assert not isomorphic(design_ppo(), short_ppo(**changes))

    def test_several_terms_have_one_writer(self) -> None:
        head = ValueHead(ACTOR)
        rollouts = Rollout(ACTOR, group_size=4)(source(Prompts, name="prompts"))
        values, old = Critic(head)(rollouts), PolicyLogprobs(ACTOR)(rollouts)
        advantages = GAE()(rollouts, reward(rollouts), values)
        update: Any = Updater(ACTOR, epochs=2)(
            PPOLoss(clip=0.2)(rollouts, advantages, old),
            ValueLoss(head)(rollouts, values, advantages),
            SFTLoss(weight=0.1)(source(Demonstrations, name="demos", batch_size=8)),
        )
        flow = RLFlow.from_outputs(update)
        assert flow.check().ok, str(flow.check())
        assert [name for name, _ in update._call.inputs()] == ["terms[0]", "terms[1]", "terms[2]"]
        assert {k: len(v) for k, v in flow.writers().items()} == {id(ACTOR): 1}
        assert set(flow.sources) == {"prompts", "demos"}
        assert WeightEdge("actor.value_head", "Updater#0", "Critic#0") in flow.weight_edges


class TestLooking:
    def test_labels(self) -> None:
        flow = design_ppo()
        assert flow.labels == (
            "prompts", "Rollout#0", "FunctionReward#0", "Critic#0", "PolicyLogprobs#0", "ReferenceLogprobs#0", "GAE#0",
            "PPOLoss#0", "Updater#0", "ValueLoss#0", "Updater#1",
        )  # fmt: skip
        assert flow.label(flow.outputs[1]) == "Updater#1" == flow.label(flow.call("Updater#1"))
        assert "PPOLoss#0" in repr(flow)

    def test_labels_count_what_the_flow_reaches_in_recording_order(self) -> None:
        rollouts = Rollout(ACTOR)(source(Prompts, name="p"))
        _unused, first, second = reward(rollouts), reward(rollouts), reward(rollouts)
        flow = RLFlow.from_outputs(WeightedSum(label="sum")(second, first))
        assert flow.label(first) == "FunctionReward#0" and flow.label(second) == "FunctionReward#1"
        assert flow.labels[-1] == "sum"

    def test_unknown_labels_and_foreign_refs(self) -> None:
        flow = design_ppo()
        assert "Do: did you mean 'Rollout#0'?" in str(raised(lambda: flow.call("Rolout#0")))
        assert "is not part of this flow" in str(raised(lambda: flow.label(source(Prompts, name="other"))))

    def test_models_and_states(self) -> None:
        assert [m.name for m in design_ppo().models] == ["actor", "critic", "actor.frozen"]
        assert design_ppo().states == ()

    def test_graph_attributes(self) -> None:
        graph = design_ppo().graph
        rollout = graph.nodes["Rollout#0"]
        assert rollout["kind"] == "rollout" and rollout["models"] == ("actor",)
        assert rollout["settings"]["group_size"] == "4" and rollout["where"].startswith(__file__)
        (edge,) = graph.get_edge_data("Critic#0", "GAE#0").values()
        assert edge == {"kind": "data", "argument": "values", "type": "Values", "path": ""}
        (edge,) = graph.get_edge_data("Updater#0", "Rollout#0").values()
        assert edge == {"kind": "weights", "model": "actor", "staleness": 0}

    def test_it_draws_itself(self) -> None:
        shown = design_ppo()._repr_mimebundle_()
        assert shown["image/svg+xml"].startswith("<svg") and "Rollout#0" in shown["text/plain"]

    def test_outputs_must_be_refs(self) -> None:
        assert "needs outputs" in str(raised(lambda: RLFlow.from_outputs()))
        error = raised(lambda: RLFlow.from_outputs(design_ppo().outputs[0], 3), EdgeTypeError)
        assert "output 1 is not a Ref" in str(error) and error.where is not None and error.where.startswith(__file__)


class TestWeightEdges:
    def test_every_writer_reader_pair_and_no_other(self) -> None:
        assert set(design_ppo().weight_edges) == {
            WeightEdge("actor", "Updater#0", "Rollout#0"),
            WeightEdge("actor", "Updater#0", "PolicyLogprobs#0"),
            WeightEdge("critic", "Updater#1", "Critic#0"),
        }

    def test_staleness_is_the_readers(self) -> None:
        flow = short_ppo(rollout=Rollout(ACTOR, group_size=4, max_staleness=2))
        staleness = {e.reader: e.max_staleness for e in flow.weight_edges}
        assert staleness == {"Rollout#0": 2, "PolicyLogprobs#0": 0, "Critic#0": 0}

    @pytest.mark.parametrize(("make", "title"), [(Ema, "Ema"), (Snapshot, "Snapshot")])
    def test_derived_writers(self, make: Callable[[Model], Any], title: str) -> None:
        slow = make(ACTOR)
        flow = short_ppo(reference=slow)
        label = f"{title}({slow.name})"
        assert flow.followers == (slow,)
        assert WeightEdge("actor", "Updater#0", label) in flow.weight_edges
        assert WeightEdge(slow.name, label, "ReferenceLogprobs#0") in flow.weight_edges
        assert flow.graph.nodes[label]["kind"] == "derived"

    def test_frozen_weights_have_no_edge(self) -> None:
        assert not [e for e in design_ppo().weight_edges if "frozen" in e.model]

    def test_a_state_is_a_weight_edge_too(self) -> None:
        coef = State("kl_coef", 0.1)

        class Reads(Node):
            coef: State

            def __call__(self, rollouts: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

        class Adapts(Node):
            coef: State

            def writes(self) -> tuple[State, ...]:
                return (self.coef,)

            def __call__(self, rewards: Rewards) -> Rewards: ...  # type: ignore[empty-body]

        flow = RLFlow.from_outputs(Adapts(coef)(Reads(coef)(Rollout(ACTOR)(source(Prompts, name="p")))))
        assert flow.states == (coef,) and flow.weight_edges == (WeightEdge("kl_coef", "Adapts#0", "Reads#0"),)
        assert flow.check().ok

    def test_flows_without_a_writer_have_none(self) -> None:
        rollouts = Rollout(ACTOR)(source(Prompts, name="p"))
        assert RLFlow.from_outputs(reward(rollouts)).weight_edges == ()


class TestOrder:
    def test_readers_run_before_writers(self) -> None:
        rollouts = Rollout(ACTOR, group_size=2)(source(Prompts, name="p"))
        advantages = GroupAdvantage()(rollouts, reward(rollouts))
        updated = PPOUpdater(ACTOR)(rollouts, advantages, PolicyLogprobs(ACTOR)(rollouts))
        late = Rollout(ACTOR, label="late")(source(Prompts, name="held_out"))
        order = [c.node.label or c.node.name for c in RLFlow.from_outputs(updated, reward(late)).execution_order()]
        assert order.index("late") < order.index("Updater")
        assert order.index("PPOLoss") < order.index("Updater")

    def test_a_cycle_through_weights(self) -> None:
        class After(Node):
            model: Model

            def __call__(self, rollouts: Rollouts, stats: TrainStats) -> Rewards: ...  # type: ignore[empty-body]

        rollouts = Rollout(ACTOR, group_size=2)(source(Prompts, name="p"))
        advantages = GroupAdvantage()(rollouts, reward(rollouts))
        stats = PPOUpdater(ACTOR)(rollouts, advantages, PolicyLogprobs(ACTOR)(rollouts))
        flow = RLFlow.from_outputs(After(ACTOR)(rollouts, stats))
        error = raised(flow.execution_order)
        assert "This flow has a cycle" in str(error) and "Updater#0" in str(error) and "After#0" in str(error)

    def test_a_snapshot_may_be_read_after_the_writer(self) -> None:
        class After(Node):
            model: Any

            def __call__(self, rollouts: Rollouts, stats: TrainStats) -> Rewards: ...  # type: ignore[empty-body]

        rollouts = Rollout(ACTOR, group_size=2)(source(Prompts, name="p"))
        advantages = GroupAdvantage()(rollouts, reward(rollouts))
        stats = PPOUpdater(ACTOR)(rollouts, advantages, PolicyLogprobs(ACTOR)(rollouts))
        flow = RLFlow.from_outputs(After(Snapshot(ACTOR))(rollouts, stats))
        assert [c.node.name for c in flow.execution_order()][-1] == "After"


class TestUnreached:
    def test_only_the_ends_are_named(self) -> None:
        rollouts = Rollout(ACTOR)(source(Prompts, name="p"))
        used = reward(rollouts)
        WeightedSum()(reward(rollouts), reward(rollouts))
        flow = RLFlow.from_outputs(used)
        assert [c.node.name for c in flow.unreached()] == ["WeightedSum"]

    def test_two_flows_from_one_source(self) -> None:
        rollouts = Rollout(ACTOR)(source(Prompts, name="p"))
        first, second = reward(rollouts), FunctionReward(len, label="other")(rollouts)
        one = RLFlow.from_outputs(first)
        assert [c.node.label for c in one.unreached()] == ["other"]
        two = RLFlow.from_outputs(second)
        assert one.unreached() == two.unreached() == () and one.labels != two.labels

    def test_the_short_form_leaves_nothing_over(self) -> None:
        assert short_ppo().unreached() == ()


class TestShortForm:
    def test_no_more_than_is_needed(self) -> None:
        flow = RLFlow(
            rollout=Rollout(ACTOR, group_size=4),
            reward=reward(),
            advantage_estimator=GroupAdvantage(),
            policy_updater=GRPOUpdater(),
        )
        assert flow.labels == (
            "prompts", "Rollout#0", "FunctionReward#0", "GroupAdvantage#0", "PolicyLogprobs#0", "GRPOLoss#0",
            "Updater#0",
        )  # fmt: skip
        assert flow.call("Updater#0").node.models() == (ACTOR,)

    def test_a_kl_coefficient_asks_for_a_reference(self) -> None:
        flow = RLFlow(
            rollout=Rollout(ACTOR, group_size=4),
            reward=reward(),
            advantage_estimator=GroupAdvantage(),
            policy_updater=GRPOUpdater(kl_coef=0.1),
        )
        assert flow.call("ReferenceLogprobs#0").node.models() == (ACTOR.frozen(),)

    def test_reference_alone_wires_it_into_an_updater_that_takes_it(self) -> None:
        flow = RLFlow(
            rollout=Rollout(ACTOR, group_size=4),
            reward=reward(),
            advantage_estimator=GroupAdvantage(),
            policy_updater=GRPOUpdater(),
            reference=ACTOR.frozen(),
        )
        assert "ref_logprobs" in flow.call("GRPOLoss#0").arguments

    def test_a_critic_is_started_from_the_policy(self) -> None:
        flow = short_ppo(critic=None)
        critic = flow.call("Critic#0").node.models()[0]
        assert isinstance(critic, ValueModel) and critic.name == "actor-value" and critic.source == ACTOR.source
        assert flow.call("Updater#1").node.models() == (critic,)

    def test_several_rewards_are_summed(self) -> None:
        flow = short_ppo(reward=None, reward_models=[reward(), reward(), reward()])
        assert [n for n, _ in flow.call("WeightedSum#0").inputs()] == ["rewards[0]", "rewards[1]", "rewards[2]"]

    def test_a_reward_may_need_what_can_be_made(self) -> None:
        class Surprise(Node):
            def __call__(self, rollouts: Rollouts, old: OldLogprobs, ref: RefLogprobs) -> Rewards: ...  # type: ignore[empty-body]

        flow = short_ppo(
            reward_models=[Surprise()], advantage_estimator=GAE(), policy_updater=PPOUpdater(), reference=None
        )
        assert set(flow.call("Surprise#0").arguments) == {"rollouts", "old", "ref"}
        assert len([x for x in flow.labels if x.startswith("PolicyLogprobs")]) == 1

    def test_functions_and_engines_are_parts(self) -> None:
        @flowrl.node
        def short(rollouts: Rollouts, per_token: float = 0.1) -> Rewards: ...  # type: ignore[empty-body]

        class Engine:
            def as_node(self) -> Node:
                return Rollout(ACTOR, group_size=4)

        flow = short_ppo(rollout=Engine(), reward=short)
        assert flow.labels[:3] == ("prompts", "Rollout#0", "short#0")

    def test_an_updater_of_another_model_gets_that_models_logprobs(self) -> None:
        student = Model("student")
        flow = short_ppo(policy_updater=PPOUpdater(student))
        assert flow.call("PolicyLogprobs#0").node.models() == (student,)
        assert flow.check().ok

    def test_prompts_may_be_given(self) -> None:
        mine = source(Prompts, name="mine", batch_size=3)
        assert short_ppo(prompts=mine).sources["mine"].batch_size == 3
        assert short_ppo(batch_size=5).sources["prompts"].batch_size == 5

    def test_a_missing_part_lists_what_there_is(self) -> None:
        error = raised(lambda: RLFlow(rollout=Rollout(ACTOR), policy_updater=PPOUpdater()))
        assert str(error).startswith(
            "RLFlow lacks reward, advantage_estimator. Expected rollout, reward (or reward_models), "
            "advantage_estimator and policy_updater. Received rollout, policy_updater. Do: give the missing part"
        )
        assert error.where is not None and error.where.startswith(__file__)
        assert "Received none of them" in str(raised(lambda: RLFlow()))

    def test_an_unfit_part_lists_what_there_is(self) -> None:
        class Preferring(Node):
            def __call__(self, rollouts: Rollouts, preferences: flowrl.Preferences) -> flowrl.Advantages: ...  # type: ignore[empty-body]

        error = raised(lambda: short_ppo(advantage_estimator=Preferring(), critic=None))
        assert "RLFlow: nothing fits argument 'preferences' of Preferring. Expected Preferences." in str(error)
        assert "Rollouts (rollout), Rewards (reward), OldLogprobs (on demand)" in str(error)

    def test_two_candidates_are_an_error(self) -> None:
        class Sharpened(Node):
            """Returns rollouts: then there are two kinds of them to choose from."""

            def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rollouts: ...  # type: ignore[empty-body]

        error = raised(lambda: short_ppo(advantage_estimator=Sharpened(), critic=None))
        assert "RLFlow: 2 candidates for argument 'rollouts' of PPOUpdater. Expected one Rollouts." in str(error)
        assert "Received rollout, advantage_estimator" in str(error)

    def test_two_inputs_of_one_type_are_an_error(self) -> None:
        error = raised(lambda: short_ppo(advantage_estimator=flowrl.ReMaxAdvantage(), critic=None, reference=None))
        assert "ReMaxAdvantage needs two Rewards, 'rewards' and 'greedy_rewards'" in str(error)

    def test_log_probs_are_made_as_the_estimator_wants_them(self) -> None:
        flow = short_ppo(advantage_estimator=flowrl.OptimalTokenBaseline(), critic=None, reference=None)
        made = [call.node for call in flow.calls if isinstance(call.node, flowrl.PolicyLogprobs)]
        assert [node.sum_pi_squared for node in made] == [True]

    def test_parts_that_would_be_ignored_are_errors(self) -> None:
        error = raised(lambda: short_ppo(advantage_estimator=GroupAdvantage(), reference=None))
        assert "RLFlow is given a critic, but GroupAdvantage takes no Values" in str(error)
        error = raised(lambda: short_ppo(advantage_estimator=GAE()))
        assert "RLFlow is given a reference, but no part asks for reference log-probs" in str(error)

    def test_parts_that_are_no_nodes(self) -> None:
        assert "wrap a reward function: FunctionReward(fn)" in str(raised(lambda: short_ppo(reward=len)))
        assert "FunctionReward has no Model" in str(raised(lambda: short_ppo(rollout=reward())))


class Ask(Node):
    """A rollout without a model: tests of eager steps need no engine."""

    group_size: int = 2

    def __call__(self, prompts: Prompts) -> Rollouts:
        from tests.tiny import recorded_rollouts

        return recorded_rollouts(prompts.num_rows, self.group_size)


class Noise(Node):
    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, noise=torch.rand(rollouts.num_rows))


def three() -> Prompts:
    return Prompts(torch.arange(3), ("a", "b", "c"))


class TestStep:
    def flow(self) -> RLFlow:
        rollouts = Ask()(source(Prompts, name="prompts", batch_size=3))
        return RLFlow.from_outputs(WeightedSum()(Noise()(rollouts), Noise()(rollouts)), rollouts.tokens)

    def test_a_step_runs_all_calls(self) -> None:
        total, tokens = self.flow().step(three(), seed=1)
        assert total.num_rows == 6 and isinstance(tokens, flowrl.Ragged)
        assert self.flow().step({"prompts": three()}, seed=1)[0] == total
        assert self.flow().step(three(), seed=2)[0] != total != self.flow().step(three(), seed=1, iteration=1)[0]

    def test_line_by_line_gives_the_same(self) -> None:
        total, _ = self.flow().step(three(), seed=5, iteration=2)
        with flowrl.step(seed=5, iteration=2):
            rollouts = Ask()(three())
            assert WeightedSum()(Noise()(rollouts), Noise()(rollouts)) == total
        with flowrl.step(seed=5, iteration=2):
            assert self.flow().step(three())[0] == total

    def test_wrong_data(self) -> None:
        flow = self.flow()
        assert "No data for source 'prompts'" in str(raised(lambda: flow.step({})))
        assert "There is no source 'promts'. Do: did you mean 'prompts'?" in str(
            raised(lambda: flow.step({"promts": three()}))
        )
        error = raised(lambda: flow.step(flowrl.TrainStats({}, 0, 0)), EdgeTypeError)
        assert "Source 'prompts' is given the wrong batch. Expected Prompts. Received TrainStats" in str(error)
        two = RLFlow.from_outputs(Ask()(source(Prompts, name="a")), Ask()(source(Prompts, name="b")))
        assert "This flow has 2 sources. Expected batches by name: ['a', 'b']" in str(raised(lambda: two.step(three())))

    def test_filters_and_refs_of_filters(self) -> None:
        rollouts = Ask()(source(Prompts, name="prompts", batch_size=3))
        kept: Any = DropUniformGroups()(rollouts, Noise()(rollouts))
        assert isinstance(kept, Ref)
        assert RLFlow.from_outputs(kept).step(three()).num_rows == 6
