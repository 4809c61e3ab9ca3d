"""REINFORCE++: no critic and no groups."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Experiment,
    KLPenalty,
    PolicyLogprobs,
    PPOLoss,
    Prompts,
    ReferenceLogprobs,
    ReinforcePlusPlus,
    RLFlow,
    Rollout,
    Updater,
    recipe,
    source,
)


@recipe
def reinforce_plus_plus(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 1,
    kl_coef: float = 0.01,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """REINFORCE++: returns to go whitened over the batch, without critic or groups (arXiv 2501.03262).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 32 for tiny, else 64]
        group_size: responses to a prompt; with more than one, the mean of the group is a baseline.
        kl_coef: of the KL to the weights at the start.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=32, real=64))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    rewards = KLPenalty(kl_coef)(rollouts, reward(rollouts), old_logprobs, ref_logprobs)
    advantages = ReinforcePlusPlus(baseline=group_size > 1)(rollouts, rewards)
    loss = PPOLoss(clip=0.2)(rollouts, advantages, old_logprobs)
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=12)
