"""One PPO flow on recorded rollouts under many layouts, in one launch of ranks.

:func:`main`, on every rank, writes what it has under every layout into ``FOLDER/<layout>.<rank>.pt``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# -- the flow ---------------------------------------------------------------------------------------------------------------

STEPS = 10


@dataclass(frozen=True)
class Outcome:
    """What a layout gave.

    Args:
        actor, critic: the metrics of each step.
        weights: by Model and name, after the last step.
        kept: rows that the filter let through, a step each.
    """

    actor: list[dict[str, float]]
    critic: list[dict[str, float]]
    weights: dict[str, dict[str, Tensor]]
    kept: list[int]


def strategies(layout: str) -> Mapping[str, Any]:
    """By name of the Model, its strategy."""
    from flowrl.compiler.strategy import Strategy

    everybody = {
        "dp": Strategy(),
        "tp2": Strategy(tensor_parallel=2),
        "dp2 x tp2": Strategy(tensor_parallel=2),
        "hybrid": Strategy(sharding="hybrid", shard_size=2),
    }
    mixed = {
        "actor": Strategy(sharding="optimizer"),
        "critic": Strategy(sharding="full"),
        "actor.frozen": Strategy(sharding="none"),
        "judge": Strategy(sharding="full"),
    }
    if layout in everybody:
        return {name: everybody[layout] for name in mixed}
    return mixed if layout == "mixed" else {}


def tiny_models() -> tuple[Any, Any, Any]:
    """Actor, critic, reward model: of three seeds, so that nothing agrees by accident."""
    from transformers import AutoModelForSequenceClassification

    from flowrl import Model, RewardModel, ValueModel
    from tests.tiny import tiny_model, tiny_tokenizer

    body = tiny_model(2)
    body.config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        classifier = AutoModelForSequenceClassification.from_config(body.config).eval()
    tokenizer = tiny_tokenizer()
    return (
        Model(tiny_model(0), name="actor", tokenizer=tokenizer, device="cpu"),
        ValueModel(tiny_model(1), name="critic", device="cpu"),
        RewardModel(classifier, name="judge", device="cpu"),
    )


def smollm2_models() -> tuple[Any, Any, Any]:
    """The same on SmolLM2: the critic and the reward model start from the policy."""
    from flowrl import RewardModel, ValueModel
    from tests.smollm2 import smollm2_actor

    actor = smollm2_actor("actor")
    return actor, ValueModel.from_policy(actor, name="critic"), RewardModel.from_policy(actor, name="judge")


def ppo(
    actor: Any, critic: Any, judge: Any, *, learning_rate: float = 1e-3, band: tuple[float, float] = (-0.75, 1.25)
) -> Any:
    """Actor, critic, reference, reward model, a filter, KL in the reward, two epochs of two minibatches."""
    from flowrl import (
        GAE,
        AdamW,
        Critic,
        KeepAccuracyBand,
        PolicyLogprobs,
        PPOUpdater,
        ReferenceLogprobs,
        RewardModelScore,
        RLFlow,
        Rollouts,
        ValueUpdater,
        source,
    )

    rollouts = source(Rollouts, name="recorded", batch_size=6)
    rewards = RewardModelScore(judge)(rollouts)
    # No mean of a group comes near the edges of the band: rounding may not decide what is trained on.
    kept = KeepAccuracyBand(*band)(rollouts, rewards)
    rewards = RewardModelScore(judge)(kept)
    values = Critic(critic)(kept)
    old, reference = PolicyLogprobs(actor)(kept), ReferenceLogprobs(actor.frozen())(kept)
    advantages = GAE(gamma=1.0, lam=0.95, kl_coef=0.05)(kept, rewards, values, old, reference)
    optimizer = AdamW(learning_rate=learning_rate)
    return RLFlow.from_outputs(
        PPOUpdater(actor, epochs=2, num_minibatches=2, optimizer=optimizer)(kept, advantages, old),
        ValueUpdater(critic, epochs=2, optimizer=optimizer)(kept, values, advantages),
        kept,
    )


def recorded(step: int) -> Any:
    """Six groups of three, with observations and empty responses."""
    from tests.tiny import recorded_rollouts

    return recorded_rollouts(num_prompts=6, group_size=3, seed=100 + step, observations=True)


def run(layout: str, ranks: Any, size: str = "tiny", steps: int = STEPS) -> Outcome:
    """The flow under one layout, step by step; "one" is one rank's own."""
    from flowrl.context import Bindings, use_bindings
    from flowrl.runtime.worker import open_engine

    tiny = size == "tiny"
    actor, critic, judge = tiny_models() if tiny else smollm2_models()
    flow = ppo(actor, critic, judge) if tiny else ppo(actor, critic, judge, learning_rate=1e-5, band=(-1e9, 1e9))
    bindings = Bindings(
        open_engine,
        micro_batch_tokens=100,
        ranks=None if layout == "one" else ranks,
        strategies=strategies(layout),
    )
    outcome = Outcome([], [], {}, [])
    with use_bindings(bindings):
        engines = {m.name: bindings.engine(m) for m in (actor, actor.frozen(), critic, judge)}
        if not tiny:  # a head of zeros would give all rows one reward
            weights = dict(engines["judge"].weights())
            head = torch.randn(weights["score.weight"].shape, generator=torch.Generator().manual_seed(0))
            engines["judge"].load_weights(weights | {"score.weight": 0.01 * head}, policy_version=0)
        for step in range(steps):
            a, c, kept = flow.step(recorded(step), seed=3, iteration=step)
            assert a.num_skipped_steps == c.num_skipped_steps == 0
            outcome.actor.append(dict(a.metrics))
            outcome.critic.append(dict(c.metrics))
            outcome.kept.append(kept.num_rows)
        for name, engine in engines.items():
            outcome.weights[name] = dict(engine.weights())
            engine.close()
    return outcome


def main(folder: str, size: str, layouts: list[str], steps: int = STEPS) -> None:
    """On one rank. ``size`` is "tiny" or "smollm2"."""
    from flowrl.runtime.ranks import Ranks

    ranks = Ranks.join(deadline=300)
    for layout in layouts:
        began = time.perf_counter()
        outcome = run(layout, ranks, size, steps)
        print(ranks.rank, layout, f"{time.perf_counter() - began:.1f} s", flush=True)
        torch.save(vars(outcome), Path(folder) / f"{layout}.{ranks.rank}.pt")


#: What the default tests look at, and after how many steps: both in the launch that they share.
FEW_LAYOUTS, FEW_STEPS = ("mixed",), 2


def on_two_ranks(folder: str) -> None:
    """On one rank."""
    main(folder, "tiny", list(FEW_LAYOUTS), FEW_STEPS)
