"""Recipes with ``--model smollm2``: one step each, with small batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.harness import QUIET, experiment
from tests.smollm2 import smollm2_actor

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"num_prompts": 2, "group_size": 2},
    "online_dpo": {"num_prompts": 2, "group_size": 2},
    "kto": {"num_answers": 4},
    "reward_model": {"num_pairs": 2},
    "distill": {"num_prompts": 2, "teacher": "smollm2"},
}


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("name", SMALL)
def test_one_step_on_smollm2(name: str, tmp_path: Path) -> None:
    smollm2_actor()  # skips where its package is not installed
    pytest.importorskip("reasoning_gym")
    made = experiment(name, model="smollm2", **SMALL[name])
    result = made.run(out=tmp_path / "run", seed=0, **QUIET | {"num_steps": 1, "evaluations": ()})
    (row,) = result.metrics.to_pylist()
    assert (result.status, row["step"], row["skipped_steps"]) == ("finished", 1, 0)
    if name == "distill":  # a teacher of the same weights: nothing to learn
        assert row["forward_kl"] == pytest.approx(0, abs=1e-4)
