"""RLOO: REINFORCE with the mean of the other responses as baseline."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Experiment,
    GroupAdvantage,
    KLPenalty,
    PolicyLogprobs,
    Prompts,
    ReferenceLogprobs,
    ReinforceLoss,
    RLFlow,
    Rollout,
    Updater,
    recipe,
    source,
)


@recipe
def rloo(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 8,
    kl_coef: float = 0.01,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """RLOO: REINFORCE against the mean of the other responses, KL in the reward (arXiv 2402.14740).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt.
        kl_coef: of the KL to the weights at the start.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    rewards = KLPenalty(kl_coef)(rollouts, reward(rollouts), old_logprobs, ref_logprobs)
    advantages = GroupAdvantage(normalize_by_std=False, leave_one_out=True)(rollouts, rewards)
    # The whole response is one action: its log-prob is the sum over its tokens.
    loss = ReinforceLoss(aggregation="seq-mean-token-sum")(rollouts, advantages)
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=12)
