"""What surrounds a running node: the step, its randomness, bindings."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowrl
from flowrl.context import (
    Bindings,
    StepContext,
    current_bindings,
    current_step,
    current_step_or_none,
    random_key,
    seed_call,
    use_bindings,
    use_label,
    use_step,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


class TestKeys:
    def test_every_counter_matters(self) -> None:
        here = StepContext(seed=1, iteration=2, pull=3, label="Rollout#0")
        keys = {
            here.key(0),
            here.key(1),
            here.key(0, 1),
            here.key(0, 0, 1),
            StepContext(2, 2, 3, "Rollout#0").key(0),
            StepContext(1, 3, 3, "Rollout#0").key(0),
            StepContext(1, 2, 4, "Rollout#0").key(0),
            StepContext(1, 2, 3, "Rollout#1").key(0),
        }
        assert len(keys) == 8 and all(0 <= k < 2**128 for k in keys)

    @given(INT64, st.text(max_size=5), st.lists(INT64, max_size=4))
    def test_equal_inputs_give_equal_keys(self, seed: int, label: str, counters: list[int]) -> None:
        assert random_key(seed, label, *counters) == random_key(seed, label, *counters)

    def test_labels_and_counters_do_not_run_into_each_other(self) -> None:
        assert random_key(0, "a", 1, 2) != random_key(0, "a", 1) != random_key(0, "a1")

    def test_keys_are_the_same_in_every_process(self) -> None:
        code = "from flowrl.context import random_key; print(random_key(7, 'Rollout#0', 1, 2, 3))"
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert int(output) == random_key(7, "Rollout#0", 1, 2, 3) == 78561838154789828633847905542852054825


class TestStep:
    def test_outside_of_any_step(self) -> None:
        assert current_step() == StepContext(0, 0, 0, "") and current_step_or_none() is None

    def test_steps_nest_and_end(self) -> None:
        with flowrl.step(seed=3, iteration=4, pull=1) as here:
            assert current_step() is here and (here.seed, here.iteration, here.pull) == (3, 4, 1)
            with use_label("inner"):
                assert current_step().label == "inner" and current_step().seed == 3
            assert current_step().label == ""
        assert current_step_or_none() is None

    def test_a_step_ends_when_its_body_fails(self) -> None:
        with pytest.raises(ZeroDivisionError), flowrl.step():
            1 / 0  # noqa: B018
        assert current_step_or_none() is None

    def test_seed_call_seeds_all_three_generators(self) -> None:
        import random

        import numpy as np
        import torch

        def draw(label: str) -> tuple[float, float, float]:
            seed_call(label)
            return random.random(), float(np.random.rand()), float(torch.rand(()))

        with use_step(StepContext(seed=1)):
            assert draw("a") == draw("a") != draw("b")

    def test_reports(self) -> None:
        heard: list[object] = []
        with use_step(StepContext(report=lambda n, v: heard.append((n, v)), report_nonfinite=heard.extend)):
            flowrl.report("kl", 0.5)
            flowrl.context.report_nonfinite([(1, 2)])
        flowrl.report("kl", 0.5)
        assert heard == [("kl", 0.5), (1, 2)]


def test_bindings_of_a_run_and_of_the_process() -> None:
    mine = Bindings(lambda model, bindings: None)  # type: ignore[arg-type,return-value]
    with use_bindings(mine):
        assert current_bindings() is mine
    assert current_bindings() is current_bindings() is not mine
