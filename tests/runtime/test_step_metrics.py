"""Metrics of a step: names, numbers, several rollouts and writers in one flow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    FinishReason,
    GroupAdvantage,
    GRPOUpdater,
    LogprobOrigin,
    OldLogprobs,
    PolicyLogprobs,
    Prompts,
    RefLogprobs,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    TrainStats,
    source,
)
from flowrl.compiler.plan import Program
from flowrl.runtime.interpreter import Iteration
from flowrl.runtime.step_metrics import main_rollouts, step_metrics, timing_metrics
from tests.flows import FAST, SAMPLING, prompts, reward, tiny_grpo, tiny_ppo
from tests.runs import quick_run, training
from tests.tiny import recorded_rollouts, tiny_actor


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rewards_of(rollouts: Rollouts, valid: list[int], **components: list[float]) -> Rewards:
    columns = {name: torch.tensor(values) for name, values in components.items()}
    reasons = tuple("" if v else "late" for v in valid)
    return Rewards(rollouts.prompt_id, rollouts.sample_id, columns, torch.tensor(valid, dtype=torch.uint8), reasons)


def ppo_values(program: Program, **changes: Any) -> dict[str, Any]:
    """What the calls of the PPO flow might have made, by hand."""
    rollouts = recorded_rollouts(num_prompts=1, group_size=2, response_lengths=(3, 1), prompt_lengths=(4,))
    object.__setattr__(
        rollouts, "finish_reason", torch.tensor([FinishReason.LENGTH, FinishReason.STOP], dtype=torch.uint8)
    )
    sampled = rollouts.rollout_logprobs
    origin = LogprobOrigin("tiny", 0, "transformers", "float32")
    old = sampled.with_values(sampled.values + torch.tensor([0.1, -0.2, 0.0, 0.1]))
    ref = sampled.with_values(old.values - 0.5)
    return {
        "Rollout#0": rollouts,
        "FunctionReward#0": rewards_of(rollouts, [1, 0], share_of_vowels=[2.0, float("nan")]),
        "PolicyLogprobs#0": OldLogprobs(rollouts.prompt_id, rollouts.sample_id, old, origin),
        "ReferenceLogprobs#0": RefLogprobs(rollouts.prompt_id, rollouts.sample_id, ref, origin),
        "Updater#0": TrainStats({"loss": 1.0}, 3, 4, 1),
        "Updater#1": TrainStats({"loss": 2.0}, 3, 1, 1),
    } | changes


def test_numbers_by_hand() -> None:
    program = flowrl.compile(tiny_ppo())
    found = step_metrics(program, Iteration(ppo_values(program), reports={"Rollout#0/x": 7.0}))
    assert found["length/mean"] == 2.0 and found["length/max"] == 3.0 and found["length/prompt_mean"] == 4.0
    assert found["length/truncated"] == 0.5
    assert (found["reward/mean"], found["reward/std"], found["reward/invalid"]) == (2.0, 0.0, 0.5)
    assert found["logprob_difference/mean"] == pytest.approx(0.1)
    assert found["logprob_difference/max"] == pytest.approx(0.2)
    assert found["kl"] == pytest.approx(0.5)
    assert found["loss"] == 1.0 and found["tiny-value/loss"] == 2.0
    assert found["policy_version"] == 3.0 and found["skipped_steps"] == 2.0
    assert found["Rollout#0/x"] == 7.0


def test_no_valid_reward_and_no_token_leave_out_what_they_cannot_give() -> None:
    program = flowrl.compile(tiny_ppo())
    empty = recorded_rollouts(num_prompts=1, group_size=2, response_lengths=(0, 0))
    values = {"Rollout#0": empty, "FunctionReward#0": rewards_of(empty, [0, 0], a=[float("nan")] * 2)}
    found = step_metrics(program, Iteration(values))
    assert "reward/mean" not in found and found["reward/invalid"] == 1.0
    assert "entropy" not in found and "kl" not in found
    assert found["length/mean"] == 0.0
    assert step_metrics(program, Iteration({})) == {}
    assert main_rollouts(program, Iteration({})) is None


def test_times_and_tokens() -> None:
    program = flowrl.compile(tiny_ppo())
    done = Iteration(ppo_values(program), seconds={"Rollout#0": 1.5})
    assert timing_metrics(program, done, 2.0) == {"time/step": 2.0, "time/Rollout#0": 1.5, "tokens_per_second": 6.0}


def test_two_policies_keep_their_numbers_apart(tmp_path: Path) -> None:
    rows = source(Prompts, name="prompts", batch_size=2)
    outputs = []
    for name, size in (("first", 2), ("second", 3)):
        actor = tiny_actor(seed=size, name=name)
        rollouts = Rollout(actor, group_size=size, sampling=SAMPLING, label=f"{name}_rollout")(rows)
        rewards = reward()(rollouts)
        update = GRPOUpdater(actor, optimizer=FAST, epochs=2)
        outputs.append(update(rollouts, GroupAdvantage()(rollouts, rewards), PolicyLogprobs(actor)(rollouts)))
    row = training(quick_run(RLFlow.from_outputs(*outputs), 1, tmp_path / "run", prompts()))[0]
    assert {
        "reward/mean",
        "second_rollout/reward/mean",
        "loss",
        "second/loss",
        "length/mean",
        "second_rollout/length/mean",
    } <= row.keys()
    assert row["reward/mean"] != row["second_rollout/reward/mean"]
    assert row["logprob_difference/mean"] < 1e-4, "compared with the rollout that it belongs to"


def test_several_rewards_show_their_sum_and_their_parts(tmp_path: Path) -> None:
    @flowrl.node
    def shorter(rollouts: Rollouts) -> Rewards:
        from flowrl.nodes import rewards_like

        return rewards_like(rollouts, shorter=-rollouts.response_lengths)

    flow = RLFlow(
        rollout=Rollout(tiny_actor(), group_size=2, sampling=SAMPLING),
        reward_models=[reward(), shorter],
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(optimizer=FAST),
        batch_size=2,
    )
    row = training(quick_run(flow, 1, tmp_path / "run"))[0]
    assert row["reward/mean"] == pytest.approx(row["reward/share_of_vowels"] + row["reward/shorter"])
    assert row["reward/shorter"] == -row["length/mean"]


def test_effective_sample_size(tmp_path: Path) -> None:
    """1 where every ratio is 1 (a single step on fresh rollouts), less where the policy has moved; by hand in between."""
    assert training(quick_run(tiny_grpo(), 1, tmp_path / "a"))[0]["ess"] == 1.0
    moved = training(quick_run(tiny_grpo(epochs=3), 1, tmp_path / "b"))[0]
    assert 0 < moved["ess"] < 0.99
    program = flowrl.compile(tiny_ppo())
    stats = TrainStats({"ppo_loss/ratio": 2.0, "ppo_loss/ratio_squared": 5.0}, 1, 1, 0)
    assert step_metrics(program, Iteration({"Updater#0": stats}))["ess"] == 0.8


def test_entropy_of_the_loss_wins_over_the_sampler_s_estimate(tmp_path: Path) -> None:
    plain = training(quick_run(tiny_grpo(), 1, tmp_path / "a"))[0]
    computed = training(quick_run(tiny_grpo(entropy_coef=1e-9), 1, tmp_path / "b"))[0]
    assert plain["entropy"] != computed["entropy"]
    assert plain["entropy"] == pytest.approx(computed["entropy"], rel=0.5)
