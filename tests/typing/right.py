"""Flows that are right: type checkers must find nothing here."""

from typing import TYPE_CHECKING

import flowrl
from flowrl import (
    GAE,
    Advantages,
    Current,
    FunctionReward,
    LossTerm,
    Model,
    Node,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    Prompts,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    Updater,
    ValueModel,
    source,
)
from flowrl.nodes import Critic

if TYPE_CHECKING:
    from torch import Tensor

actor, critic = Model("some/policy"), ValueModel("some/policy")
prompts = source(Prompts, name="prompts", batch_size=64)
rollouts = Rollout(actor, group_size=4)(prompts)
rewards = FunctionReward(len)(rollouts)
values = Critic(critic)(rollouts)
old_logprobs = PolicyLogprobs(actor)(rollouts)
advantages = GAE(gamma=1.0)(rollouts, rewards, values)
flow = RLFlow.from_outputs(PPOUpdater(actor, epochs=2)(rollouts, advantages, old_logprobs))
several = Updater(actor)(PPOLoss(clip=0.2)(rollouts, advantages, old_logprobs))


class LengthPenalty(Node):
    per_token: float = 0.01

    def __call__(self, rollouts: Rollouts) -> Rewards: ...


@flowrl.node
def scaled(rewards: Rewards, factor: float = 2.0) -> Rewards: ...


@flowrl.loss
def reinforce(current: Current, rollouts: Rollouts, advantages: Advantages, bonus: float = 0.0) -> "Tensor": ...


penalised = LengthPenalty(per_token=0.02)(rollouts)
doubled = scaled(penalised, factor=3.0)
term: LossTerm = reinforce.options(weight=0.5, label="r")(rollouts, advantages, bonus=0.5)
lengths = rollouts.tokens.lengths
