"""One flow with everything that a run must bring through a resume: two trained models with two epochs and minibatches, a
frozen reference, an Ema, a Snapshot, a State, sampled and greedy rollouts, and an evaluation that keeps the best.
"""

from __future__ import annotations

from typing import Any

import flowrl
from flowrl import (
    GAE,
    Critic,
    Ema,
    Evaluation,
    Model,
    Node,
    OldLogprobs,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    RefLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    Sampling,
    Snapshot,
    State,
    TrainStats,
    ValueModel,
    ValueUpdater,
    source,
)
from tests.flows import FAST, SAMPLING, reward
from tests.tiny import tiny_actor

#: Prompts a step, and prompts an epoch: epochs end within steps 2 and 3, and step 5 begins one.
BATCH_SIZE, NUM_PROMPTS = 3, 4


class Scaled(Node):
    """Rewards times a coefficient that another node adapts."""

    coefficient: State

    kind = "reward"

    def __call__(self, rewards: Rewards) -> Rewards:
        components = {name: self.coefficient.value["scale"] * column for name, column in rewards.components.items()}
        return Rewards(rewards.prompt_id, rewards.sample_id, components, rewards.valid, rewards.reasons)


class Adapt(Node):
    """The writer of that coefficient."""

    coefficient: State

    kind = "updater"

    def reads(self) -> tuple[Any, ...]:
        return ()

    def writes(self) -> tuple[Any, ...]:
        return (self.coefficient,)

    def __call__(self, rollouts: Rollouts, old_logprobs: OldLogprobs) -> TrainStats:
        before = self.coefficient.value
        gap = float(old_logprobs.old_logprobs.values.mean())
        self.coefficient.set({"scale": before["scale"] * (1.01 if gap < -3 else 0.99), "seen": before["seen"] + [gap]})
        return TrainStats(
            {"scale": self.coefficient.value["scale"], "sum": sum(self.coefficient.value["seen"])}, 0, 1, 0
        )


@flowrl.node
def distance(rollouts: Rollouts, ref_logprobs: RefLogprobs, to: str = "") -> TrainStats:
    """How far a second reference is from the sampler; a metric that shows the weights of an Ema or a Snapshot."""
    gap = float((rollouts.rollout_logprobs.values - ref_logprobs.ref_logprobs.values).double().mean())
    flowrl.report(f"distance_to_{to}", gap)
    return TrainStats({}, 0, 0, 0)


def everything(actor: Model | None = None) -> RLFlow:
    """The flow."""
    actor = actor or tiny_actor()
    critic = ValueModel.from_policy(actor)
    scale = State("scale", {"scale": 1.0, "seen": []})
    rows = source(Prompts, name="prompts", batch_size=BATCH_SIZE)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(rows)
    rewards = Scaled(scale)(reward()(rollouts))
    values = Critic(critic)(rollouts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    ema = ReferenceLogprobs(Ema(actor, decay=0.5), label="ema_logprobs")(rollouts)
    snapshot = ReferenceLogprobs(Snapshot(actor, every=2), label="snapshot_logprobs")(rollouts)
    advantages = GAE(gamma=1.0, lam=0.95, kl_coef=0.05)(rollouts, rewards, values, old_logprobs, ref_logprobs)
    return RLFlow.from_outputs(
        PPOUpdater(actor, epochs=2, num_minibatches=2, optimizer=FAST)(rollouts, advantages, old_logprobs),
        ValueUpdater(critic, optimizer=FAST)(rollouts, values, advantages),
        Adapt(scale)(rollouts, old_logprobs),
        distance(rollouts, ema, to="ema", label="ema"),
        distance(rollouts, snapshot, to="snapshot", label="snapshot"),
    )


def held_out(actor: Model, data: Any, *, every: int = 2) -> Evaluation:
    """An evaluation with two sampled answers a prompt."""
    rows = source(Prompts, name="held_out", batch_size=3)
    answers = Rollout(actor, group_size=2, sampling=Sampling(max_new_tokens=3))(rows)
    return Evaluation(RLFlow.from_outputs(reward()(answers)), data, every=every, success_threshold=0.1)
