"""Law 2: a flow called line by line, ``flow.step``, and the Program in the local runtime give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    GAE,
    Critic,
    Demonstrations,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    SFTLoss,
    TrainStats,
    Updater,
    ValueHead,
    ValueLoss,
    ValueModel,
    ValueUpdater,
    source,
)
from flowrl.context import Bindings, use_bindings
from flowrl.data import DemonstrationDataset
from flowrl.runtime.worker import open_engine
from tests.flows import FAST, SAMPLING, prompts, reward, tiny_grpo, tiny_ppo
from tests.runs import quick_run, saved_weights, training
from tests.tiny import tiny_actor, tiny_tokenizer

STEPS, SEED = 3, 5


@dataclass
class Case:
    """One flow in its three forms, on Models of its own.

    Args:
        models: whose weights are compared.
        data: data sets by source name.
        flow: recorded.
        by_hand: the same calls, line by line, on batches.
    """

    models: tuple[Any, ...]
    data: dict[str, Any]
    flow: RLFlow
    by_hand: Callable[..., tuple[TrainStats, ...]]


def ppo() -> Case:
    """Section 2 of the design."""
    actor = tiny_actor()
    critic = ValueModel.from_policy(actor)

    def by_hand(prompts: Prompts) -> tuple[TrainStats, ...]:
        rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(prompts)
        rewards = reward()(rollouts)
        values = Critic(critic)(rollouts)
        old_logprobs = PolicyLogprobs(actor)(rollouts)
        ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
        advantages = GAE(gamma=1.0, lam=0.95, kl_coef=0.05)(rollouts, rewards, values, old_logprobs, ref_logprobs)
        return (
            PPOUpdater(actor, epochs=2, num_minibatches=2, optimizer=FAST)(rollouts, advantages, old_logprobs),
            ValueUpdater(critic, optimizer=FAST)(rollouts, values, advantages),
        )

    return Case((actor, critic), {"prompts": prompts()}, tiny_ppo(actor, critic), by_hand)


def grpo() -> Case:
    """The short form; the plan leaves the old log-probs out."""
    actor = tiny_actor()

    def by_hand(prompts: Prompts) -> tuple[TrainStats, ...]:
        rollouts = Rollout(actor, group_size=3, sampling=SAMPLING)(prompts)
        rewards = reward()(rollouts)
        old_logprobs = PolicyLogprobs(actor)(rollouts)
        advantages = GroupAdvantage()(rollouts, rewards)
        return (GRPOUpdater(actor, optimizer=FAST)(rollouts, advantages, old_logprobs),)

    flow = tiny_grpo(actor)
    assert flowrl.compile(flow).elided()
    return Case((actor,), {"prompts": prompts()}, flow, by_hand)


def several_terms() -> Case:
    """A policy loss, a value loss on a head of the same trunk and a supervised term, in one updater."""
    actor = tiny_actor()
    head = ValueHead(actor)
    rows = [{"prompt": f"say {i}", "completion": "aeiou"[i:]} for i in range(4)]
    data = {"prompts": prompts(), "demos": DemonstrationDataset.from_rows(rows, tokenizer=tiny_tokenizer())}

    def by_hand(prompts: Prompts, demos: Demonstrations) -> tuple[TrainStats, ...]:
        rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(prompts)
        rewards = reward()(rollouts)
        values = Critic(head)(rollouts)
        old_logprobs = PolicyLogprobs(actor)(rollouts)
        advantages = GAE()(rollouts, rewards, values)
        updater = Updater(actor, epochs=2, num_minibatches=2, optimizer=FAST)
        return (
            updater(
                PPOLoss(clip=0.2)(rollouts, advantages, old_logprobs),
                ValueLoss(head)(rollouts, values, advantages),
                SFTLoss(weight=0.1)(demos),
            ),
        )

    recorded = by_hand(
        prompts=source(Prompts, name="prompts", batch_size=3),
        demos=source(Demonstrations, name="demos", batch_size=2),
    )
    return Case((actor,), data, RLFlow.from_outputs(*recorded), by_hand)


def weights(models: tuple[Model, ...]) -> list[dict[str, torch.Tensor]]:
    return [dict(m.bound_engine().weights()) for m in models]


def eagerly(case: Case, one_step: Callable[..., Any]) -> tuple[list[list[dict[str, float]]], list[Any]]:
    """Metrics of each writer a step, and the weights at the end."""
    out = []
    with use_bindings(Bindings(open_engine)):
        for i in range(STEPS):
            sizes = {name: node.batch_size for name, node in case.flow.sources.items()}
            batches = {name: case.data[name].rows(i * size, size, SEED) for name, size in sizes.items()}
            stats = one_step(batches, i)
            out.append([dict(s.metrics) for s in (stats if isinstance(stats, tuple) else (stats,))])
        return out, weights(case.models)


@pytest.mark.parametrize("build", [ppo, grpo, several_terms])
def test_three_ways_to_run_a_flow(build: Callable[[], Case], tmp_path: Path) -> None:
    case = build()
    stepped, weights_stepped = eagerly(case, lambda batches, i: case.flow.step(batches, seed=SEED, iteration=i))

    case = build()

    def line_by_line(batches: dict[str, Any], iteration: int) -> Any:
        with flowrl.step(seed=SEED, iteration=iteration):
            return case.by_hand(**batches)

    by_hand, weights_by_hand = eagerly(case, line_by_line)

    case = build()
    result = quick_run(case.flow, STEPS, tmp_path / "run", case.data, seed=SEED)
    ran = training(result)
    saved = tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}" / "models"

    assert by_hand == stepped
    for step, stats in enumerate(stepped):
        for place, metrics in enumerate(stats):
            prefix = f"{case.models[place].name}/" if place else ""
            assert {k: ran[step][prefix + k] for k in metrics} == metrics

    for place, model in enumerate(case.models):
        found = saved_weights(saved / model.name)
        assert found.keys() == weights_stepped[place].keys() == weights_by_hand[place].keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, weights_stepped[place][name]), name
            assert torch.equal(tensor, weights_by_hand[place][name]), name
