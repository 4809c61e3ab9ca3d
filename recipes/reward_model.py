"""A reward model from preferences."""

from __future__ import annotations

from common import choose

from flowrl import AdamW, BradleyTerryLoss, Experiment, Preferences, RewardModel, RLFlow, Updater, recipe, source


@recipe
def reward_model(
    model: str = "tiny",
    num_pairs: int = 32,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """A reward model: the score of chosen answers above that of rejected ones (Bradley–Terry; arXiv 2203.02155).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model: the reward model starts from its weights.
        num_pairs: in an iteration.
        learning_rate: of AdamW. [default: 1e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    scorer = RewardModel.from_policy(setup.actor, name="reward-model")
    optimizer = AdamW(setup.default(learning_rate, tiny=1e-2, real=1e-5))

    preferences = source(Preferences, name="preferences", batch_size=num_pairs)
    loss = BradleyTerryLoss(center_coef=0.01)(preferences)
    flow = RLFlow.from_outputs(Updater(scorer, optimizer=optimizer)(loss))

    # Use it with RewardModelScore(RewardModel("runs/reward_model-001/export/reward-model")).
    return setup.experiment(flow, setup.preferences(), "accuracy", tiny_steps=25)
