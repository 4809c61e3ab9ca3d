"""Evaluation: when it runs, what it measures, that training does not notice, and keep-best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    DropUniformGroups,
    Evaluation,
    FunctionReward,
    Model,
    Prompts,
    Rewards,
    RLFlow,
    Rollout,
    Sampling,
    source,
)
from flowrl.errors import CheckpointError, FlowError
from flowrl.runtime.evaluation import evaluation_metrics
from tests.flows import prompts, reward, tiny_grpo
from tests.laws.everything import held_out
from tests.runs import checkpoint_weights, checkpoints, quick_run, rows, training
from tests.tiny import recorded_rollouts, tiny_actor


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def evaluated_steps(folder: Path, name: str = "heldout") -> list[int]:
    return [row["step"] for row in rows(folder) if f"eval/{name}/reward" in row]


def test_it_runs_before_every_n_steps_and_at_the_end(tmp_path: Path) -> None:
    actor = tiny_actor()
    result = quick_run(tiny_grpo(actor), 5, tmp_path / "run", evaluations=[held_out(actor, prompts(5), every=2)])
    assert evaluated_steps(tmp_path / "run") == [0, 2, 4, 5]
    first, last = result.evaluation(which="first"), result.evaluation(which="last")
    assert first is not None and last is not None
    assert (first.step, last.step) == (0, 5)
    assert first.rollouts.num_rows == 10, "the whole data set: five prompts with two answers each, the last batch short"
    assert first.rollouts.prompt_id.tolist() == [i for i in range(5) for _ in range(2)]
    assert rows(tmp_path / "run")[0]["eval/heldout/reward"] == first.metrics["reward"]
    assert result.evaluation("another") is None


def test_training_does_not_notice(tmp_path: Path) -> None:
    """The same training metrics and weights with and without evaluations, sampled ones included."""
    quick_run(tiny_grpo(), 3, tmp_path / "without")
    actor = tiny_actor()
    quick_run(tiny_grpo(actor), 3, tmp_path / "with", evaluations=[held_out(actor, prompts(2), every=1)])
    assert training(tmp_path / "with") == training(tmp_path / "without")
    assert checkpoint_weights(tmp_path / "with", 3) == checkpoint_weights(tmp_path / "without", 3)


def test_the_same_weights_are_evaluated_with_the_same_draws(tmp_path: Path) -> None:
    """At different steps too, so that a difference between two evaluations is one of the weights."""
    actor = tiny_actor()
    frozen = flowrl.AdamW(learning_rate=0.0, weight_decay=0.0)
    flow = RLFlow(
        rollout=Rollout(actor, group_size=2, sampling=Sampling(4)),
        reward=reward(),
        advantage_estimator=flowrl.GroupAdvantage(),
        policy_updater=flowrl.GRPOUpdater(optimizer=frozen),
        batch_size=2,
    )
    result = quick_run(flow, 2, tmp_path / "run", evaluations=[held_out(actor, prompts(3))])
    first, last = result.evaluation(which="first"), result.evaluation(which="last")
    assert first is not None and last is not None and last.step == 2
    assert first.rollouts.tokens == last.rollouts.tokens
    assert first.metrics == last.metrics


def test_metrics_by_hand() -> None:
    rollouts = recorded_rollouts(num_prompts=2, group_size=4, response_lengths=(2,))
    good = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    style = torch.tensor([0.5] * 8)
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.uint8)
    rewards = Rewards(
        rollouts.prompt_id, rollouts.sample_id, {"good": good, "style": style}, valid, ("",) * 7 + ("late",)
    )
    found = evaluation_metrics(rollouts, rewards, success_threshold=1.5)
    assert found["reward"] == pytest.approx((3 + 7 * 0.5) / 7)
    assert found["good"] == pytest.approx(3 / 7)
    assert found["style"] == 0.5
    assert found["invalid"] == 1 / 8
    assert found["length"] == 2.0
    assert found["pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert found["pass@2"] == pytest.approx((1 - 3 / 6 + 1 - 1 / 6) / 2)
    assert found["pass@4"] == 1.0
    assert "pass@8" not in found


def test_no_valid_row_gives_nan_and_solves_nothing() -> None:
    rollouts = recorded_rollouts(num_prompts=1, group_size=2)
    nothing = torch.full((2,), float("nan"))
    rewards = Rewards(
        rollouts.prompt_id, rollouts.sample_id, {"a": nothing}, torch.zeros(2, dtype=torch.uint8), ("x", "y")
    )
    found = evaluation_metrics(rollouts, rewards, success_threshold=0.0)
    assert found["reward"] != found["reward"]
    assert (found["pass@1"], found["invalid"]) == (0.0, 1.0)


# -- keep-best -----------------------------------------------------------------------------------------------------------


def scripted(values: list[float], calls: list[float]) -> FunctionReward:
    """A reward that gives the next value at each evaluation (of one prompt with one greedy answer)."""

    def score(response: str) -> float:
        calls.append(values[len(calls) % len(values)])
        return calls[-1]

    return FunctionReward(score, isolate=False)


def greedy(actor: Model, score: FunctionReward, *, every: int = 1, name: str = "heldout") -> Evaluation:
    answers = Rollout(actor, sampling=Sampling(2, temperature=0.0))(source(Prompts, name=name, batch_size=1))
    return Evaluation(RLFlow.from_outputs(score(answers)), prompts(1), name=name, every=every)


def test_the_best_checkpoint_is_kept_through_pruning_and_a_resume(tmp_path: Path) -> None:
    # Before training (which does not count) and after steps 1 to 6.
    values, calls = [9.0, 1.0, 3.0, 2.0, 3.0, 0.0, 2.0], list[float]()

    def run(steps: int, **options: Any) -> None:
        actor = tiny_actor()
        evaluation = greedy(actor, scripted(values, calls))
        quick_run(tiny_grpo(actor), steps, tmp_path / "run", evaluations=[evaluation], keep_best="eval/heldout/reward",
                  checkpoint_every=1, keep_last=1, **options)  # fmt: skip

    run(2)
    best = checkpoint_weights(tmp_path / "run", 2)
    run(6, resume=True)
    assert calls == values
    assert checkpoints(tmp_path / "run") == [2, 6], "the first of the two best, and the last"
    assert checkpoint_weights(tmp_path / "run", 2) == best
    assert evaluated_steps(tmp_path / "run") == [0, 1, 2, 3, 4, 5, 6]
    kept = sorted(p.name for p in (tmp_path / "run" / "evaluations" / "heldout").iterdir())
    assert kept == ["step-000000", "step-000002", "step-000006"], "the first, the best, the last"


def test_a_better_one_takes_its_place(tmp_path: Path) -> None:
    actor = tiny_actor()
    evaluation = greedy(actor, scripted([0.0, 1.0, 2.0, 1.0, 1.0], []))
    quick_run(
        tiny_grpo(actor), 4, tmp_path / "run", evaluations=[evaluation], keep_best="eval/heldout/reward", keep_last=1
    )
    assert checkpoints(tmp_path / "run") == [2, 4], "also without checkpoint_every"


def test_a_metric_that_there_is_not_is_named_before_training(tmp_path: Path) -> None:
    actor = tiny_actor()
    evaluations = [greedy(actor, scripted([0.0], []))]
    with pytest.raises(
        FlowError, match=r"keep_best asks for 'eval/heldout/pass@8'.*did you mean 'eval/heldout/pass@1'"
    ):
        quick_run(tiny_grpo(actor), 2, tmp_path / "run", evaluations=evaluations, keep_best="eval/heldout/pass@8")
    assert checkpoints(tmp_path / "run") == []


def test_the_first_evaluation_is_there_after_a_resume(tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> flowrl.RunResult:
        actor = tiny_actor()
        return quick_run(
            tiny_grpo(actor), steps, tmp_path / "run", evaluations=[held_out(actor, prompts(2))], **options
        )

    before = run(2).evaluation(which="first")
    result = run(4, resume=True)
    after = result.evaluation(which="first")
    assert before is not None and after is not None
    assert (after.step, after.rollouts, after.metrics) == (0, before.rollouts, before.metrics)
    assert [e.step for e in result.evaluations] == [0, 4]

    metrics = tmp_path / "run" / "evaluations" / "heldout" / "step-000000" / "metrics.json"
    metrics.write_text("{}")
    with pytest.raises(CheckpointError, match=r"metrics.json has changed.*only the report looks at it"):
        run(6, resume=True)


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_a_flow_without_a_reward_is_no_evaluation(tmp_path: Path) -> None:
    actor = tiny_actor()
    answers = Rollout(actor, sampling=Sampling(2))(source(Prompts, name="p", batch_size=1))
    with pytest.raises(FlowError, match="Evaluation 'heldout' gives no Rewards"):
        quick_run(
            tiny_grpo(actor), 1, tmp_path / "run", evaluations=[Evaluation(RLFlow.from_outputs(answers), prompts(1))]
        )


def test_a_filter_is_no_part_of_an_evaluation(tmp_path: Path) -> None:
    actor = tiny_actor()
    answers = Rollout(actor, group_size=2, sampling=Sampling(2))(source(Prompts, name="p", batch_size=1))
    rewards = reward()(answers)
    flow = RLFlow.from_outputs(rewards, DropUniformGroups()(answers, rewards))
    with pytest.raises(FlowError, match="Evaluation 'heldout' filters"):
        quick_run(tiny_grpo(actor), 1, tmp_path / "run", evaluations=[Evaluation(flow, prompts(1))])


def test_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    evaluation = held_out(tiny_actor(), prompts(2))
    with pytest.raises(
        FlowError, match="Two distinct Models are called 'tiny', in the training flow and in an evaluation"
    ):
        quick_run(tiny_grpo(tiny_actor()), 1, tmp_path / "run", evaluations=[evaluation])
