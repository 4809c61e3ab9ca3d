"""ReMax: the greedy response is the baseline."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Experiment,
    Prompts,
    ReinforceLoss,
    ReMaxAdvantage,
    RLFlow,
    Rollout,
    Updater,
    recipe,
    source,
)


@recipe
def remax(
    model: str = "tiny",
    num_prompts: int = 64,
    group_size: int = 1,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """ReMax: REINFORCE against what the greedy response to the same prompt earns (arXiv 2310.10505).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration.
        group_size: responses to a prompt.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=num_prompts)
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    greedy = Rollout(actor, sampling=setup.sampling(temperature=0.0), label="greedy")(prompts)
    advantages = ReMaxAdvantage()(rollouts, reward(rollouts), greedy_rewards=reward(greedy))
    loss = ReinforceLoss(aggregation="seq-mean-token-sum")(rollouts, advantages)
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=10)
