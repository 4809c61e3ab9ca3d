"""Group-relative training: the short form and by hand, KL in the loss, ReMax, and that the objective improves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    AdamW,
    Advantages,
    FunctionReward,
    GroupAdvantage,
    GRPOLoss,
    GRPOUpdater,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    Sampling,
    Updater,
    node,
    source,
)
from flowrl.data import PromptDataset
from flowrl.functional.advantages import spread_over_tokens
from tests.compositions.harness import Composition, Watch, run_both, run_eagerly
from tests.flows import FAST, SAMPLING, prompts, reward
from tests.tiny import tiny_actor


def short_form() -> Composition:
    actor = tiny_actor()
    flow = RLFlow(
        rollout=Rollout(actor, group_size=3, sampling=SAMPLING),
        reward=reward(),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(kl_coef=0.2, epochs=2, optimizer=FAST),
        batch_size=3,
    )
    return Composition(flow, {"prompts": prompts()}, [actor])


def by_hand(*, watch: bool = False) -> Composition:
    actor = tiny_actor()
    seen: dict[str, list[Any]] = {}
    rollouts = Rollout(actor, group_size=3, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    advantages = GroupAdvantage()(rollouts, reward()(rollouts))
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(rollouts)
    loss = GRPOLoss(kl_coef=0.2)(rollouts, advantages, old_logprobs, ref_logprobs)
    outputs: list[Any] = [Updater(actor, epochs=2, optimizer=FAST)(loss)]
    if watch:
        outputs.append(Watch(actor.frozen(), seen)(rollouts))
    return Composition(RLFlow.from_outputs(*outputs), {"prompts": prompts()}, [actor], seen)


def test_grpo_with_kl_in_the_loss(tmp_path: Path) -> None:
    eager, ran = run_both(lambda: by_hand(watch=True), tmp_path / "run")
    assert ran.metrics[0]["kl_before_update"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference
    assert ran.metrics[2]["kl_before_update"] > 0.01
    for seen in (eager.seen, ran.seen):
        assert len(seen["tiny.frozen"]) == 3
        for weights in seen["tiny.frozen"]:
            assert all(torch.equal(t, eager.before["tiny"][n]) for n, t in weights.items())


def test_the_short_form_is_the_flow_by_hand(tmp_path: Path) -> None:
    eager, _ = run_both(short_form, tmp_path / "run")
    other = run_eagerly(by_hand(), 3)
    for name, tensor in other.after["tiny"].items():
        assert torch.equal(tensor, eager.after["tiny"][name])
    assert [o[0].metrics for o in other.outputs] == [o[0].metrics for o in eager.outputs]


@node(kind="advantage", joins={"baseline": "prompt"})
def remax(rollouts: Rollouts, rewards: Rewards, *, baseline: Rewards) -> Advantages:
    """ReMax (Li et al., arXiv 2310.10505): the reward above that of the greedy response to the same prompt."""
    better = spread_over_tokens(rewards.totals - baseline.totals, rollouts.loss_mask)
    return Advantages(rollouts.prompt_id, rollouts.sample_id, better, better)


def remax_flow() -> Composition:
    actor = tiny_actor(1)
    rows = source(Prompts, name="prompts", batch_size=3)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(rows)
    greedy = Rollout(actor, sampling=Sampling(max_new_tokens=6, temperature=0.0), label="greedy")(rows)
    rewards, baseline = reward()(rollouts), reward()(greedy)
    advantages = remax(rollouts, rewards, baseline=baseline)
    update = PPOUpdater(actor, epochs=2, optimizer=FAST)(rollouts, advantages, PolicyLogprobs(actor)(rollouts))
    flow = RLFlow.from_outputs(update, rollouts, rewards, baseline, advantages)
    return Composition(flow, {"prompts": prompts()}, [actor])


def test_remax(tmp_path: Path) -> None:
    eager, _ = run_both(remax_flow, tmp_path / "run")
    distinct = set()
    for _, rollouts, rewards, baseline, advantages in eager.outputs:
        assert (rollouts.num_rows, baseline.num_rows) == (6, 3)
        of_prompt = dict(zip(baseline.prompt_id.tolist(), baseline.totals.tolist(), strict=True))
        for row, values in enumerate(advantages.advantages.rows()):
            expected = float(rewards.totals[row]) - of_prompt[int(rollouts.prompt_id[row])]
            assert values.tolist() == pytest.approx([expected] * len(values), abs=1e-6)
        distinct.add(len(set(of_prompt.values())))
        shuffled = remax(rollouts, rewards, baseline=baseline.select([2, 0, 1]))
        assert shuffled == advantages
    assert max(distinct) > 1  # a wrong join would have been seen


def improvement(seed: int, out: Path, *, shuffled: bool) -> list[float]:
    """Train towards the byte "e"; the mean reward of each step, before any shuffling."""
    history: list[float] = []

    def share_of_e(responses: list[str]) -> list[float]:
        shares = [r.count("e") / max(1, len(r)) for r in responses]
        history.append(sum(shares) / len(shares))
        if shuffled:
            random.Random(len(history)).shuffle(shares)
        return shares

    flow = RLFlow(
        rollout=Rollout(tiny_actor(seed), group_size=16, sampling=Sampling(max_new_tokens=6)),
        reward=FunctionReward(share_of_e, isolate=False),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(optimizer=AdamW(learning_rate=3e-2)),
        batch_size=2,
    )
    data = PromptDataset.from_rows([{"prompt": c} for c in "abcdefgh"], as_chat=False)
    flowrl.run(flow, data, 18, out=out, seed=seed, checkpoint_every=None, progress=False, export=False)
    return history


@pytest.mark.parametrize("seed", range(3))
def test_the_objective_improves_and_chance_does_not(seed: int, tmp_path: Path) -> None:
    trained = improvement(seed, tmp_path / "trained", shuffled=False)
    chance = improvement(seed, tmp_path / "chance", shuffled=True)
    assert trained[0] == chance[0] < 0.05
    assert sum(trained[-3:]) / 3 > 0.6
    assert sum(chance[-3:]) / 3 < 0.1
