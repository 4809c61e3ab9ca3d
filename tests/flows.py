"""Flows on the tiny model that several tests run."""

from __future__ import annotations

from typing import Any

from flowrl import (
    GAE,
    AdamW,
    Critic,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Sampling,
    ValueModel,
    ValueUpdater,
    source,
)
from flowrl.data import PromptDataset
from tests.tiny import tiny_actor

SAMPLING = Sampling(max_new_tokens=6)
FAST = AdamW(learning_rate=1e-2)


def prompts(count: int = 6, **options: Any) -> PromptDataset:
    """Short plain-text prompts, each with an answer."""
    rows = [{"prompt": f"say {'ab' * (i % 3 + 1)} {i}", "answer": str(i)} for i in range(count)]
    return PromptDataset.from_rows(rows, **options)


def share_of_vowels(response: str) -> float:
    """A reward that varies between the random answers of a random model."""
    return sum(c in "aeiouAEIOU" for c in response) / max(1, len(response)) + 0.01 * len(response)


def reward() -> FunctionReward:
    """In process: no deadline is needed here, and no process to start."""
    return FunctionReward(share_of_vowels, isolate=False)


def tiny_grpo(actor: Model | None = None, *, batch_size: int = 4, group_size: int = 3, **updater: Any) -> RLFlow:
    """GRPO in the short form."""
    return RLFlow(
        rollout=Rollout(actor or tiny_actor(), group_size=group_size, sampling=SAMPLING),
        reward=reward(),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(optimizer=FAST, **updater),
        batch_size=batch_size,
    )


def tiny_ppo(actor: Model | None = None, critic: ValueModel | None = None, *, epochs: int = 2) -> RLFlow:
    """PPO as in section 2 of the design: actor, critic, reference, KL in the reward, two epochs."""
    actor = actor or tiny_actor()
    critic = critic or ValueModel.from_policy(actor)
    rows = source(Prompts, name="prompts", batch_size=3)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(rows)
    rewards = reward()(rollouts)
    values = Critic(critic)(rollouts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    advantages = GAE(gamma=1.0, lam=0.95, kl_coef=0.05)(rollouts, rewards, values, old_logprobs, ref_logprobs)
    return RLFlow.from_outputs(
        PPOUpdater(actor, epochs=epochs, num_minibatches=2, optimizer=FAST)(rollouts, advantages, old_logprobs),
        ValueUpdater(critic, optimizer=FAST)(rollouts, values, advantages),
    )
