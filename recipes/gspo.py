"""GSPO: one importance ratio a response."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Experiment,
    GroupAdvantage,
    GSPOLoss,
    PolicyLogprobs,
    Prompts,
    RLFlow,
    Rollout,
    Updater,
    recipe,
    source,
)


@recipe
def gspo(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 8,
    num_minibatches: int = 2,
    clip: float | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """GSPO: group-relative, with one clipped importance ratio for a whole response (arXiv 2507.18071).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt.
        num_minibatches: optimiser steps an iteration; from the second on, the ratio differs from 1.
        clip: how far the ratio may be from 1. [default: 0.2 for tiny, whose steps are large, else 4e-4]
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    advantages = GroupAdvantage()(rollouts, reward(rollouts))
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    bound = setup.default(clip, tiny=0.2, real=4e-4)
    loss = GSPOLoss(clip=0.75 * bound, clip_high=bound)(rollouts, advantages, old_logprobs)
    flow = RLFlow.from_outputs(Updater(actor, num_minibatches=num_minibatches, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=12)
