"""Which log-probs are left out: exactly those that must equal the current policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl
from flowrl import (
    GAE,
    Advantages,
    Cluster,
    Critic,
    Current,
    FunctionReward,
    GroupAdvantage,
    GRPOLoss,
    Loss,
    LossTerm,
    Model,
    Node,
    OldLogprobs,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    Prompts,
    Ragged,
    ReferenceLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    TokenLoss,
    Updater,
    ValueHead,
    ValueLoss,
    ValueModel,
    compile,
    source,
)
from flowrl.compiler.derive import elided_calls


class Parts:
    def __init__(self, **logprobs: Any) -> None:
        self.actor = Model("m", name="actor")
        self.rollouts: Any = Rollout(self.actor, group_size=4)(source(Prompts, name="prompts"))
        self.rewards: Any = FunctionReward(len)(self.rollouts)
        self.advantages: Any = GroupAdvantage()(self.rollouts, self.rewards)
        self.old: Any = PolicyLogprobs(self.actor, **logprobs)(self.rollouts)

    def loss(self, cls: Any = PPOLoss) -> Any:
        return cls()(self.rollouts, self.advantages, self.old)


@flowrl.loss
def plain_ratio(current: Current, rollouts: Rollouts, advantages: Advantages, before: OldLogprobs) -> Any:
    return before.old_logprobs.values


class Entropy(Node):
    def __call__(self, rollouts: Rollouts, old: OldLogprobs) -> Rewards: ...  # type: ignore[empty-body]


class OfAField(TokenLoss):
    def __call__(self, rollouts: Rollouts, old_logprobs: Ragged) -> LossTerm: ...  # type: ignore[empty-body]


class OwnSums(PPOLoss):
    def sums(self, current: Any, constants: Any, **inputs: Any) -> Any:
        return super().sums(current, constants, **inputs)


class Prepares(PPOLoss):
    def prepare(self, policy: Any, **inputs: Any) -> Any:
        return inputs["old_logprobs"].old_logprobs.values.mean()


class Whole(Loss):
    def __call__(self, rollouts: Rollouts, advantages: Advantages, old_logprobs: OldLogprobs) -> LossTerm: ...  # type: ignore[empty-body]


def head_terms(p: Parts) -> Any:
    head = ValueHead(p.actor)
    values = Critic(head)(p.rollouts)
    return Updater(p.actor)(p.loss(), ValueLoss(head)(p.rollouts, values, p.advantages))


def twice(p: Parts) -> list[Any]:
    return [Updater(p.actor)(p.loss(), p.loss(GRPOLoss))]


ELIDED: dict[str, Callable[[Parts], Any]] = {
    "one step of PPO": lambda p: PPOUpdater(p.actor)(p.rollouts, p.advantages, p.old),
    "a loss of the user's own": lambda p: Updater(p.actor)(plain_ratio(p.rollouts, p.advantages, p.old)),
    "beside a value head": head_terms,
    "two terms of one updater": twice,
}
KEPT: dict[str, Callable[[Parts], Any]] = {
    "two epochs": lambda p: PPOUpdater(p.actor, epochs=2)(p.rollouts, p.advantages, p.old),
    "two minibatches": lambda p: PPOUpdater(p.actor, num_minibatches=2)(p.rollouts, p.advantages, p.old),
    "an output": lambda p: [Updater(p.actor)(p.loss()), p.old],
    "a field of it an output": lambda p: [Updater(p.actor)(p.loss()), p.old.old_logprobs],
    "another reader": lambda p: [Updater(p.actor)(p.loss()), Entropy()(p.rollouts, p.old)],
    "the term an output": lambda p: [Updater(p.actor)(term := p.loss()), term],
    "a term that nobody minimises": lambda p: p.loss(),
    "a field": lambda p: Updater(p.actor)(OfAField()(p.rollouts, p.old.old_logprobs)),
    "a loss with sums of its own": lambda p: Updater(p.actor)(p.loss(OwnSums)),
    "a loss that prepares": lambda p: Updater(p.actor)(p.loss(Prepares)),
    "a loss that is no token loss": lambda p: Updater(p.actor)(p.loss(Whole)),
    "an updater of another model": lambda p: Updater(Model("o", name="other"))(p.loss()),
    "two updaters": lambda p: [Updater(p.actor)(p.loss()), Updater(Model("o", name="other"))(p.loss())],
}


def flow_of(made: Any) -> RLFlow:
    return RLFlow.from_outputs(*(made if isinstance(made, list) else [made]))


@pytest.mark.parametrize("case", ELIDED)
def test_left_out(case: str) -> None:
    assert list(elided_calls(flow_of(ELIDED[case](Parts())))) == ["PolicyLogprobs#0"]


@pytest.mark.parametrize("case", KEPT)
def test_kept(case: str) -> None:
    assert elided_calls(flow_of(KEPT[case](Parts()))) == {}


def test_kept_where_an_estimator_reads_them() -> None:
    p = Parts()
    values = Critic(ValueModel("v"))(p.rollouts)
    ref = ReferenceLogprobs(p.actor.frozen())(p.rollouts)
    p.advantages = GAE(kl_coef=0.1)(p.rollouts, p.rewards, values, p.old, ref)
    assert elided_calls(flow_of(Updater(p.actor)(p.loss()))) == {}


def test_kept_at_a_temperature_of_its_own() -> None:
    p = Parts(temperature=1.0)
    assert elided_calls(flow_of(Updater(p.actor)(p.loss()))) == {}


def test_kept_where_only_one_of_two_is_equal() -> None:
    p = Parts()
    second = PolicyLogprobs(p.actor, temperature=2.0, label="hot")(p.rollouts)
    update = Updater(p.actor)(p.loss(), PPOLoss()(p.rollouts, p.advantages, second))
    assert list(elided_calls(flow_of(update))) == ["PolicyLogprobs#0"]


def test_the_plan_says_so() -> None:
    p = Parts()
    program = compile(flow_of(Updater(p.actor)(p.loss())), Cluster("cpu"))
    reason = (
        "it equals the current policy in the single optimiser step of Updater#0; "
        "the loss takes the current log-probs, detached"
    )
    assert program.elided() == {"PolicyLogprobs#0": reason}
    assert f"left out: {reason}" in program.plan.explain()
    assert [e.reader for e in program.plan.weight_edges] == ["Rollout#0"]  # a call that does not run reads nothing
