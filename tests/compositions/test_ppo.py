"""PPO and its variants, from the same few nodes: a shared trunk, a supervised term, KL in the reward, adaptive KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import (
    GAE,
    Critic,
    Demonstrations,
    GroupAdvantage,
    KLPenalty,
    Node,
    OldLogprobs,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    RefLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    SFTLoss,
    State,
    Updater,
    ValueHead,
    ValueLoss,
    WeightEdge,
    report,
    source,
)
from flowrl.data import DemonstrationDataset
from flowrl.models import BaseModel
from tests.compositions.harness import Composition, Watch, run_both, run_eagerly
from tests.flows import FAST, SAMPLING, prompts, reward
from tests.tiny import tiny_actor, tiny_tokenizer


def shared_trunk(value_weight: float = 0.5) -> Composition:
    actor = tiny_actor()
    head = ValueHead(actor)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    values = Critic(head)(rollouts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    advantages = GAE(lam=0.9)(rollouts, reward()(rollouts), values)
    update = Updater(actor, epochs=2, optimizer=FAST)(
        PPOLoss()(rollouts, advantages, old_logprobs),
        ValueLoss(head, weight=value_weight)(rollouts, values, advantages),
    )
    return Composition(RLFlow.from_outputs(update, values), {"prompts": prompts()}, [actor])


def test_shared_trunk(tmp_path: Path) -> None:
    eager, ran = run_both(shared_trunk, tmp_path / "run")
    for row in ran.metrics:
        assert row["loss"] == pytest.approx(row["ppo_loss/loss"] + 0.5 * row["value_loss/loss"], abs=1e-6)
    first, second = eager.outputs[0][1].values.values, eager.outputs[1][1].values.values
    assert not first.any()  # a head of zeros
    assert second.all()  # which the one updater has trained
    edges = shared_trunk().flow.weight_edges
    assert WeightEdge("tiny.value_head", "Updater#0", "Critic#0") in edges
    assert {e.writer for e in edges} == {"Updater#0"}


def test_the_value_loss_trains_the_shared_trunk() -> None:
    trained, untouched = (run_eagerly(shared_trunk(weight), 1) for weight in (0.5, 0.0))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(trained.after["tiny"][name], untouched.after["tiny"][name])


def with_demonstrations(weight: float = 0.1) -> Composition:
    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    demos = source(Demonstrations, name="demos", batch_size=2)
    advantages = GroupAdvantage()(rollouts, reward()(rollouts))
    update = Updater(actor, optimizer=FAST)(
        PPOLoss()(rollouts, advantages, PolicyLogprobs(actor)(rollouts)), SFTLoss(weight=weight)(demos)
    )
    rows = [{"prompt": f"say {c}", "completion": c * 3} for c in "abc"]
    demonstrations = DemonstrationDataset.from_rows(rows, tokenizer=tiny_tokenizer())
    return Composition(RLFlow.from_outputs(update), {"prompts": prompts(), "demos": demonstrations}, [actor])


def test_ppo_with_a_supervised_term(tmp_path: Path) -> None:
    _, ran = run_both(with_demonstrations, tmp_path / "run", steps=4)
    for row in ran.metrics:
        assert row["loss"] == pytest.approx(row["ppo_loss/loss"] + 0.1 * row["sft_loss/loss"], abs=1e-5)
        assert row["sft_loss/nll"] == row["sft_loss/loss"]
    assert ran.metrics[-1]["sft_loss/nll"] < ran.metrics[0]["sft_loss/nll"] - 0.5
    without = run_eagerly(with_demonstrations(0.0), 4)
    nll = [output[0].metrics["sft_loss/nll"] for output in without.outputs]
    assert nll[-1] > ran.metrics[-1]["sft_loss/nll"] + 0.5


COEF = 0.3


def kl_in_the_reward(*, as_reward: bool) -> Composition:
    """The same penalty twice: as a token component of the reward, or inside of GAE."""
    actor = tiny_actor()
    seen: dict[str, list[Any]] = {}
    head = ValueHead(actor)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    rewards, values = reward()(rollouts), Critic(head)(rollouts)
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    if as_reward:
        rewards = KLPenalty(COEF)(rollouts, rewards, old_logprobs, ref_logprobs)
        advantages = GAE()(rollouts, rewards, values)
    else:
        advantages = GAE(kl_coef=COEF)(rollouts, rewards, values, old_logprobs, ref_logprobs)
    update = Updater(actor, epochs=2, optimizer=FAST)(
        PPOLoss()(rollouts, advantages, old_logprobs), ValueLoss(head)(rollouts, values, advantages)
    )
    watched = Watch(actor.frozen(), seen)(rollouts)
    flow = RLFlow.from_outputs(update, advantages, watched, old_logprobs, ref_logprobs)
    return Composition(flow, {"prompts": prompts()}, [actor], seen)


@pytest.mark.parametrize("as_reward", [True, False], ids=["KLPenalty", "GAE"])
def test_kl_in_the_reward(as_reward: bool, tmp_path: Path) -> None:
    eager, ran = run_both(lambda: kl_in_the_reward(as_reward=as_reward), tmp_path / "run")
    assert ran.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference
    assert ran.metrics[2]["kl"] > 0.01
    if as_reward:
        for i, row in enumerate(ran.metrics):
            _, _, rollouts, old, ref = eager.outputs[i]
            gap = old.old_logprobs.with_values(old.old_logprobs.values - ref.ref_logprobs.values)
            expected = -COEF * gap.sum_rows(rollouts.loss_mask).mean()
            assert row["reward/kl"] == pytest.approx(float(expected), abs=1e-5)
    for seen in (eager.seen, ran.seen):
        for weights in seen["tiny.frozen"]:
            assert all(torch.equal(t, eager.before["tiny"][n]) for n, t in weights.items() if n in eager.before["tiny"])


def test_both_places_of_the_kl_penalty_give_the_same_advantages() -> None:
    as_reward, in_gae = (run_eagerly(kl_in_the_reward(as_reward=where), 2) for where in (True, False))
    for a, b in zip(as_reward.outputs, in_gae.outputs, strict=True):
        torch.testing.assert_close(a[1].advantages.values, b[1].advantages.values, atol=1e-4, rtol=1e-4)
    assert in_gae.outputs[1][1].returns.values.any()


class AdaptivePenalty(Node):
    """Reads the coefficient, which another node writes."""

    coef: State

    def __call__(
        self, rollouts: Rollouts, rewards: Rewards, old_logprobs: OldLogprobs, ref_logprobs: RefLogprobs
    ) -> Rewards:
        report("kl_coef", self.coef.value)
        return KLPenalty(self.coef.value)(rollouts, rewards, old_logprobs, ref_logprobs)


class AdaptCoefficient(Node):
    """The controller of Ziegler et al., arXiv 1909.08593: a tenth up or down a step, towards a KL of ``target``."""

    coef: State
    target: float

    def writes(self) -> tuple[BaseModel | State, ...]:
        return (self.coef,)

    def __call__(self, old_logprobs: OldLogprobs, ref_logprobs: RefLogprobs) -> RefLogprobs:
        kl = (old_logprobs.old_logprobs.values - ref_logprobs.ref_logprobs.values).mean()
        self.coef.set(self.coef.value * (1 + 0.1 * float((kl / self.target - 1).clamp(-1, 1))))
        return ref_logprobs


def adaptive_kl() -> Composition:
    actor, coef = tiny_actor(), State("kl_coef", 0.2)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    adapted = AdaptCoefficient(coef, target=0.05)(old_logprobs, ref_logprobs)
    rewards = AdaptivePenalty(coef)(rollouts, reward()(rollouts), old_logprobs, ref_logprobs)
    update = PPOUpdater(actor, optimizer=FAST)(rollouts, GroupAdvantage()(rollouts, rewards), old_logprobs)
    return Composition(RLFlow.from_outputs(update, adapted), {"prompts": prompts()}, [actor])


def test_adaptive_kl_with_a_state(tmp_path: Path) -> None:
    _, ran = run_both(adaptive_kl, tmp_path / "run", steps=4)
    read = [row["AdaptivePenalty#0/kl_coef"] for row in ran.metrics]
    expected = [0.2]
    for row in ran.metrics[:-1]:  # the reader of a step sees what was written in the step before
        expected.append(expected[-1] * (1 + 0.1 * max(-1.0, min(1.0, row["kl"] / 0.05 - 1))))
    assert read == pytest.approx(expected, rel=1e-6)
    assert read[1] == pytest.approx(0.18)  # no KL in the first step: a tenth down
    assert read[3] > read[2]  # and up again, now that the policy has moved away
    assert WeightEdge("kl_coef", "AdaptCoefficient#0", "AdaptivePenalty#0") in adaptive_kl().flow.weight_edges
