"""Dr.GRPO: GRPO without its two biases."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Experiment,
    GroupAdvantage,
    GRPOLoss,
    PolicyLogprobs,
    Prompts,
    RLFlow,
    Rollout,
    Updater,
    recipe,
    source,
)


@recipe
def dr_grpo(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 8,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """Dr.GRPO: GRPO without the biases to short answers and to easy and hard prompts (arXiv 2503.20783).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    # Not divided by the group's standard deviation, nor by the length of the response: by one constant for all.
    advantages = GroupAdvantage(normalize_by_std=False)(rollouts, reward(rollouts))
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    loss = GRPOLoss(aggregation="seq-mean-token-sum-norm", scale=setup.max_new_tokens)
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss(rollouts, advantages, old_logprobs)))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=12)
