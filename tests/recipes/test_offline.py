"""The recipes that learn from recorded answers, and distillation: on held-out prompts they become right more often, and do
not where labels are shuffled over rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import Experiment, RewardModel, RewardModelScore, RunResult
from tests.recipes.harness import (
    QUIET,
    ShuffledLabels,
    ask_about_other_prompts,
    change,
    common,
    experiment,
    held_out_pairs,
    pair_accuracy,
    run,
    sequence_logprobs,
    trained_model,
)

SEEDS = range(3)
CONTROL_SEEDS = [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))]


def run_shuffled(name: str, seed: int, out: Path, **options: bool) -> tuple[Experiment, RunResult]:
    """A recipe on data whose labels say nothing."""
    made = experiment(name, seed=seed)
    made = replace(made, data=ShuffledLabels(made.data))
    return made, made.run(out=out, seed=seed, **QUIET | options)


# -- greedy answers that are right. Chance: the prompts ask for ten answers, so that a constant is right one time in ten ----


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["sft", "distill"])
def test_held_out_answers_become_right(name: str, seed: int, tmp_path: Path) -> None:
    """Measured, seeds 0 to 2: sft from 0 to 0.79 to 0.98, distill from 0 to 0.71 to 0.83."""
    first, last = change(run(name, seed, tmp_path / "run")[1])
    assert first == 0
    assert last > 0.5


@pytest.mark.parametrize("seed", CONTROL_SEEDS)
def test_completions_of_other_prompts_teach_no_answers(seed: int, tmp_path: Path) -> None:
    """Measured, seeds 0 to 2: 0 to 0.02 are right."""
    assert change(run_shuffled("sft", seed, tmp_path / "run")[1])[1] < 0.25


@pytest.mark.parametrize("seed", CONTROL_SEEDS)
def test_a_teacher_that_reads_other_prompts_teaches_no_answers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the teacher would say is shuffled over rows: the student can learn which answers there are, and that they are
    short, but not which one belongs to a prompt. Measured, seeds 0 to 2: 0.08 to 0.21 are right."""
    ask_about_other_prompts(monkeypatch)
    assert change(run("distill", seed, tmp_path / "run")[1])[1] < 0.35


# -- the right answer before the wrong one. Chance: one half, with 100 pairs ± 0.05 ------------------------------------------


def policy_accuracy(made: Experiment, seed: int) -> float:
    """The share of held-out pairs in which the policy has raised the right answer above the wrong one."""
    pairs = held_out_pairs(seed)
    start = common().choose("tiny", seed).actor
    return pair_accuracy(pairs, sequence_logprobs(trained_model(made), pairs) - sequence_logprobs(start, pairs))


def scorer_accuracy(result: RunResult, seed: int) -> float:
    """The share of held-out pairs in which the exported reward model scores the right answer higher."""
    pairs = held_out_pairs(seed)
    scorer = RewardModel(result.folder / "export" / "reward-model", device="cpu")
    return pair_accuracy(pairs, RewardModelScore(scorer, component="score")(pairs).components["score"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_preference_learning_prefers_right_answers(name: str, seed: int, tmp_path: Path) -> None:
    """Measured, seeds 0 to 2: dpo 0.94 to 0.99, kto 0.96 to 0.98."""
    made, _ = run(name, seed, tmp_path / "run")
    assert policy_accuracy(made, seed) > 0.8


@pytest.mark.parametrize("seed", CONTROL_SEEDS)
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_shuffled_preferences_teach_nothing(name: str, seed: int, tmp_path: Path) -> None:
    """Measured, seeds 0 to 2: dpo 0.47 to 0.55, kto 0.53 to 0.55."""
    made, _ = run_shuffled(name, seed, tmp_path / "run")
    assert policy_accuracy(made, seed) < 0.7


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_model_scores_right_answers_higher(seed: int, tmp_path: Path) -> None:
    """Measured, seeds 0 to 2: 0.85 to 0.98."""
    _, result = run("reward_model", seed, tmp_path / "run", export=True)
    assert scorer_accuracy(result, seed) > 0.75


@pytest.mark.parametrize("seed", CONTROL_SEEDS)
def test_shuffled_preferences_teach_a_reward_model_nothing(seed: int, tmp_path: Path) -> None:
    """Measured, seeds 0 to 2: 0.43 to 0.55."""
    _, result = run_shuffled("reward_model", seed, tmp_path / "run", export=True)
    assert scorer_accuracy(result, seed) < 0.65
