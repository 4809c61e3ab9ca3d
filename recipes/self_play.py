"""Self-play: the policy against its own past."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Evaluation,
    Experiment,
    GroupAdvantage,
    PolicyLogprobs,
    PPOLoss,
    Prompts,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    Snapshot,
    Updater,
    node,
    recipe,
    rewards_like,
    source,
)


@node(kind="reward", joins={"theirs": "prompt"})
def match(rollouts: Rollouts, mine: Rewards, *, theirs: Rewards) -> Rewards:
    """The judge of the game: 1 for the better response to a prompt, 0 for the worse one, ½ for a draw."""
    ahead = mine.totals - theirs.totals
    return rewards_like(rollouts, won=(ahead.sign() + 1) / 2)


@recipe
def self_play(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 8,
    opponent_every: int = 3,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """Self-play: win against a snapshot of the policy's own past, which follows (as in arXiv 1712.01815).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt; each plays against the one of the opponent.
        opponent_every: iterations after which the opponent is taken anew from the policy.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    actor, reward = setup.actor, setup.reward()
    past = Snapshot(actor, every=opponent_every)
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=1e-5))

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    opponent = Rollout(past, sampling=setup.sampling(), label="opponent")(prompts)
    won = match(rollouts, reward(rollouts), theirs=reward(opponent))
    advantages = GroupAdvantage()(rollouts, won)
    loss = PPOLoss(clip=0.2)(rollouts, advantages, PolicyLogprobs(actor)(rollouts))
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss))

    # Held out: against the policy as it was at the start.
    problems = source(Prompts, name="held_out", batch_size=len(setup.held_out))
    now = Rollout(actor, sampling=setup.sampling(), label="now")(problems)
    start = Rollout(actor.frozen(), sampling=setup.sampling(), label="start")(problems)
    win_rate = RLFlow.from_outputs(now, match(now, reward(now), theirs=reward(start)))
    evaluation = Evaluation(win_rate, setup.held_out, every=50)
    return setup.experiment(flow, setup.train, "eval/heldout/reward", evaluation, tiny_steps=12)
