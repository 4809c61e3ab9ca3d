"""PPO: a critic, generalised advantage estimation, a clipped ratio."""

from __future__ import annotations

from common import choose

from flowrl import (
    GAE,
    AdamW,
    Critic,
    Experiment,
    PolicyLogprobs,
    PPOLoss,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Updater,
    ValueLoss,
    ValueModel,
    recipe,
    source,
)


@recipe
def ppo(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 8,
    epochs: int = 2,
    kl_coef: float = 0.01,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """PPO: a critic, GAE, several clipped steps on each batch, KL to the start (arXiv 1707.06347).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt.
        epochs: passes over each batch.
        kl_coef: of the KL to the weights at the start, which is taken from the reward of each token.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))
    critic = ValueModel.from_policy(actor)

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    rewards = reward(rollouts)
    values = Critic(critic)(rollouts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    advantages = GAE(lam=0.95, kl_coef=kl_coef)(rollouts, rewards, values, old_logprobs, ref_logprobs)
    flow = RLFlow.from_outputs(
        Updater(actor, epochs=epochs, optimizer=optimizer)(PPOLoss(clip=0.2)(rollouts, advantages, old_logprobs)),
        Updater(critic, epochs=epochs, optimizer=optimizer)(ValueLoss(clip=0.2)(rollouts, values, advantages)),
    )

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=12)
