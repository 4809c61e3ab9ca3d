"""Nodes of one's own under the spmd runtime, derived Models, States, and fewer rows than ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import flowrl
from flowrl import (
    GAE,
    Critic,
    Ema,
    FunctionReward,
    KeepAccuracyBand,
    Model,
    PolicyLogprobs,
    PPOLoss,
    Prompts,
    ReferenceLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    Snapshot,
    State,
    Updater,
    ValueHead,
    ValueLoss,
    source,
)
from flowrl.context import current_step
from flowrl.nodes.reward import rewards_like
from flowrl.runtime.torchrun import world_rank
from tests.flows import FAST, SAMPLING, prompts
from tests.tiny import tiny_actor

#: What :class:`Look` was given on this rank, and how often :class:`Pool` was opened and closed.
SEEN: dict[str, list[Any]] = {"rewards": [], "count": [], "opened": [], "closed": []}
#: A Model that is no setting of the node that uses it.
ELSEWHERE: list[Model] = []


class Pool:
    """What a node keeps from its setup."""

    def __init__(self) -> None:
        SEEN["opened"].append(world_rank())

    def close(self) -> None:
        SEEN["closed"].append(world_rank())


class Asked(flowrl.Node):
    """Holds a Model, and so runs everywhere, with a resource of its own; each rank finds something else."""

    model: Model

    def setup(self, ctx: Any) -> Pool:
        return Pool()

    def __call__(self, rollouts: Rollouts) -> Rewards:
        assert isinstance(self.resource(), Pool)
        self.model.bound_engine().logprobs(rollouts)
        return rewards_like(rollouts, found=torch.rand(rollouts.num_rows) + world_rank())


class Look(flowrl.Node):
    """Holds a Model, and notes on every rank what it is given, and what its State holds."""

    model: Model
    count: State

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rewards:
        SEEN["rewards"].append(rewards.totals.tolist())
        SEEN["count"].append(self.count.value)
        return rewards


class Count(flowrl.Node):
    """Holds no Model, and so runs on rank 0; all ranks have what it writes into its State."""

    count: State

    def writes(self) -> tuple[Any, ...]:
        return (self.count,)

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rewards:
        self.count.set({"rows": [*self.count.value["rows"], rollouts.num_rows]})
        return rewards


@flowrl.node
def sneaky(rollouts: Rollouts) -> Rollouts:
    """Holds no Model, and uses one."""
    ELSEWHERE[0].bound_engine().logprobs(rollouts)
    return rollouts


def nothing_in_step_two(response: str) -> float:
    return 0.0 if current_step().iteration == 1 else 1.0


def flow(*, sneaks: bool = False) -> RLFlow:
    """One response a step, none in the second one; a value head, a Snapshot and an Ema of the actor."""
    actor = tiny_actor()
    ELSEWHERE[:] = [actor]
    head, count = ValueHead(actor), State("count", {"rows": []})
    sampled = Rollout(actor, group_size=1, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=1))
    scores = FunctionReward(nothing_in_step_two, isolate=False)(sampled)
    kept = KeepAccuracyBand(0.5, 2.0, max_pulls=1)(sampled, scores)
    rollouts = sneaky(kept) if sneaks else kept
    rewards = Count(count)(rollouts, Look(actor, count)(rollouts, Asked(actor)(rollouts)))
    values, old = Critic(head)(rollouts), PolicyLogprobs(actor)(rollouts)
    before = ReferenceLogprobs(Snapshot(actor, every=2))(rollouts)
    mean = ReferenceLogprobs(Ema(actor, 0.5))(rollouts)
    advantages = GAE(gamma=1.0, lam=0.95, kl_coef=0.05)(rollouts, rewards, values, old, before)
    terms = (
        PPOLoss(kl_coef=0.1)(rollouts, advantages, old, mean),
        ValueLoss(head, weight=0.5)(rollouts, values, advantages),
    )
    return RLFlow.from_outputs(Updater(actor, epochs=2, optimizer=FAST)(*terms))


def train(out: Path, *, runtime: str = "spmd", num_steps: int = 4, seed: int = 0, sneaks: bool = False) -> Any:
    """Train quietly; what this rank has seen."""
    for seen in SEEN.values():
        seen.clear()
    torch.set_num_threads(1)
    flowrl.run(
        flow(sneaks=sneaks), prompts(), num_steps, out=out, runtime=runtime, seed=seed,
        progress=False, report=False, export=False, checkpoint_every=2,
    )  # fmt: skip
    return {name: list(seen) for name, seen in SEEN.items()}
