"""Shorthands record what they are short for, and train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl import context
from flowrl.batches import Demonstrations, Prompts
from flowrl.context import Bindings, use_bindings
from flowrl.flow import RLFlow
from flowrl.graph import Ref, walk
from flowrl.models import Model, State, ValueHead, ValueModel
from flowrl.nodes.critic import Critic
from flowrl.nodes.group_advantage import GroupAdvantage
from flowrl.nodes.logprobs import PolicyLogprobs, ReferenceLogprobs
from flowrl.nodes.policy_losses import (
    ClipCovLoss,
    DecoupledPPOLoss,
    DPPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    KLCovLoss,
    PPOLoss,
)
from flowrl.nodes.reward import FunctionReward, rewards_like
from flowrl.nodes.rollout import Rollout
from flowrl.nodes.sft import SFTLoss
from flowrl.nodes.shorthands import GRPOUpdater, PolicyUpdater, PPOUpdater, SFTUpdater, ValueUpdater
from flowrl.nodes.source import source
from flowrl.nodes.updater import AdamW, Updater
from flowrl.nodes.value_loss import ValueLoss
from tests.tiny import recorded_rollouts, tiny_actor

ACTOR, CRITIC = Model("actor"), ValueModel("critic")
HEAD, COEF = ValueHead(ACTOR), State("kl_coef", 0.1)
ADAM = AdamW(learning_rate=1e-3)
TRAINING: dict[str, Any] = {"epochs": 2, "num_minibatches": 3, "optimizer": ADAM, "max_grad_norm": None}
KEEP: Any = {"aggregation": "seq-mean-token-sum-norm", "scale": 9.0}
REFERENCE = ("rollouts", "advantages", "old_logprobs", "ref_logprobs")
SHORTHANDS = [
    (PPOUpdater(ACTOR), Updater(ACTOR), PPOLoss(), REFERENCE[:3]),
    (
        PPOUpdater(ACTOR, **TRAINING, clip=0.1, clip_high=0.3, dual_clip=2.0, entropy_coef=0.1, label="train"),
        Updater(ACTOR, **TRAINING, label="train"),
        PPOLoss(0.1, 0.3, 2.0, entropy_coef=0.1),
        REFERENCE[:3],
    ),
    (
        GRPOUpdater(ACTOR, **TRAINING, clip=0.1, kl_coef=0.2, kl_estimator="k2", **KEEP),
        Updater(ACTOR, **TRAINING),
        GRPOLoss(0.1, kl_coef=0.2, kl_estimator="k2", **KEEP),
        REFERENCE,
    ),
    (GRPOUpdater(ACTOR, kl_coef=COEF), Updater(ACTOR), GRPOLoss(kl_coef=COEF), REFERENCE),
    (GRPOUpdater(ACTOR), Updater(ACTOR), GRPOLoss(), REFERENCE[:3]),
    (PolicyUpdater(ACTOR), Updater(ACTOR), PPOLoss(), REFERENCE[:3]),
    (
        PolicyUpdater(ACTOR, **TRAINING, loss=GSPOLoss(kl_coef=0.1), label="train"),
        Updater(ACTOR, **TRAINING, label="train"),
        GSPOLoss(kl_coef=0.1),
        REFERENCE,
    ),
    (
        ValueUpdater(CRITIC, **TRAINING, clip=0.2),
        Updater(CRITIC, **TRAINING),
        ValueLoss(clip=0.2),
        ("rollouts", "values", "advantages"),
    ),
    (ValueUpdater(HEAD), Updater(ACTOR), ValueLoss(HEAD), ("rollouts", "values", "advantages")),
    (
        SFTUpdater(ACTOR, 2, aggregation="token-sum"),
        Updater(ACTOR, 2),
        SFTLoss(aggregation="token-sum"),
        ("demonstrations",),
    ),
]


def recorded(output: Any) -> list[Any]:
    """A flow as plain data: each call's node and where its inputs come from."""
    assert isinstance(output, Ref)
    calls = walk([output])
    place = {id(call): i for i, call in enumerate(calls)}
    return [(call.node, [(name, place[id(ref._call)], ref._path) for name, ref in call.inputs()]) for call in calls]


def edges() -> dict[str, Any]:
    rollouts = Rollout(ACTOR, group_size=2)(source(Prompts, name="prompts", batch_size=4))
    return {
        "rollouts": rollouts,
        "values": Critic(CRITIC)(rollouts),
        "old_logprobs": PolicyLogprobs(ACTOR)(rollouts),
        "ref_logprobs": ReferenceLogprobs(ACTOR.frozen())(rollouts),
        "advantages": GroupAdvantage()(rollouts, FunctionReward(len)(rollouts)),
        "demonstrations": source(Demonstrations, name="demonstrations", batch_size=4),
    }


@pytest.mark.parametrize(("short", "updater", "loss", "names"), SHORTHANDS)
def test_a_shorthand_records_what_it_is_short_for(short: Any, updater: Any, loss: Any, names: tuple[str, ...]) -> None:
    given = {name: value for name, value in edges().items() if name in names}
    assert recorded(short(**given)) == recorded(updater(loss(**given)))


def test_any_policy_loss_in_the_short_form() -> None:
    """The loss asks for reference log-probs where it has a KL coefficient; its settings are checked."""

    def labels(loss: Any) -> set[str]:
        flow = RLFlow(
            rollout=Rollout(ACTOR, group_size=2),
            reward=FunctionReward(len),
            advantage_estimator=GroupAdvantage(),
            policy_updater=PolicyUpdater(loss=loss),
        )
        assert flow.check().ok == (not loss.problems()), str(flow.check())
        return set(flow.labels)

    plain, with_kl = labels(GSPOLoss()), labels(GSPOLoss(kl_coef=0.1))
    assert "GSPOLoss#0" in plain and with_kl - plain == {"ReferenceLogprobs#0"}
    assert "KLCovLoss#0" in labels(KLCovLoss(share=2.0))


@pytest.fixture
def bindings():
    from flowrl.runtime.worker import open_engine

    bindings = Bindings(open_engine)
    with use_bindings(bindings), context.step(seed=3):
        yield bindings
    for engine in bindings.engines.values():
        engine.close()


def test_training_a_tiny_model(bindings: Bindings) -> None:
    """Better answers become likelier, and what the terms report comes out as means."""
    actor = tiny_actor()
    rollouts = recorded_rollouts(2, 3)
    old = PolicyLogprobs(actor)(rollouts)
    ref = ReferenceLogprobs(actor.frozen())(rollouts)
    assert torch.equal(old.old_logprobs.values, ref.ref_logprobs.values)
    rewards = rewards_like(rollouts, score=[1.0, 0.0, 0.5, 0.0, 1.0, 0.2])
    advantages = GroupAdvantage()(rollouts, rewards)
    updater = GRPOUpdater(actor, epochs=3, optimizer=AdamW(learning_rate=1e-3), kl_coef=0.01)
    stats = updater(rollouts, advantages, old, ref)
    assert (stats.policy_version, stats.num_optimizer_steps, stats.num_skipped_steps) == (1, 3, 0)
    assert {"loss", "clip_fraction", "ratio", "approx_kl", "kl", "grad_norm"} <= stats.metrics.keys()
    assert stats.metrics["kl"] > 0
    moved = PolicyLogprobs(actor)(rollouts).old_logprobs.values - old.old_logprobs.values
    assert float((moved * advantages.advantages.values).sum()) > 0
    assert ReferenceLogprobs(actor.frozen())(rollouts) == ref


@pytest.mark.parametrize(
    "loss",
    [
        GSPOLoss(0.2, 0.3),
        GMPOLoss(kl_coef=0.01, kl_estimator="k3_st"),
        DPPOLoss("kl"),
        KLCovLoss(share=0.2),
        ClipCovLoss(share=0.1, low=0.0),
        DecoupledPPOLoss(behaviour_cap=2.0),
    ],
    ids=lambda v: type(v).__name__,
)
def test_other_losses_train_too(loss: Any, bindings: Bindings) -> None:
    """Also those that ask the policy before each optimiser step."""
    actor = tiny_actor()
    rollouts = recorded_rollouts(2, 3, response_lengths=(4, 3, 5))
    old = PolicyLogprobs(actor)(rollouts)
    ref = ReferenceLogprobs(actor.frozen())(rollouts) if loss.kl_coef else None
    advantages = GroupAdvantage()(rollouts, rewards_like(rollouts, score=[1.0, 0.0, 0.5, 0.0, 1.0, 0.2]))
    updater = PolicyUpdater(actor, epochs=2, num_minibatches=2, optimizer=AdamW(learning_rate=1e-3), loss=loss)
    stats = updater(rollouts, advantages, old, ref)
    assert (stats.num_optimizer_steps, stats.num_skipped_steps) == (4, 0)
    moved = PolicyLogprobs(actor)(rollouts).old_logprobs.values - old.old_logprobs.values
    assert float((moved * advantages.advantages.values).sum()) > 0
