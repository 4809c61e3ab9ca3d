"""DAPO: four changes to GRPO."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    DropUniformGroups,
    Experiment,
    GroupAdvantage,
    GRPOLoss,
    OverlongPenalty,
    PolicyLogprobs,
    Prompts,
    RLFlow,
    Rollout,
    Updater,
    WeightedSum,
    recipe,
    source,
)


@recipe
def dapo(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 8,
    num_minibatches: int = 2,
    max_pulls: int = 4,
    overlong_coef: float = 0.1,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """DAPO: clip higher, drop uniform groups and sample on, token mean, overlong penalty (arXiv 2503.14476).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt.
        num_minibatches: optimiser steps an iteration.
        max_pulls: batches of prompts to sample at most until enough groups are not uniform.
        overlong_coef: what a response loses that is cut at the limit; less from a third of the limit before it on.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    sampled = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    longest = setup.max_new_tokens
    overlong = OverlongPenalty(longest, buffer=longest // 3, coef=overlong_coef)
    rewards = WeightedSum()(reward(sampled), overlong(sampled))
    # Groups in which all solve the task, or none does, are dropped; prompts are drawn until num_prompts groups are left.
    rollouts = DropUniformGroups(component="task", max_pulls=max_pulls)(sampled, rewards)
    advantages = GroupAdvantage()(rollouts, rewards)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    loss = GRPOLoss(clip=0.2, clip_high=0.28, aggregation="token-mean")(rollouts, advantages, old_logprobs)
    flow = RLFlow.from_outputs(Updater(actor, num_minibatches=num_minibatches, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=10)
