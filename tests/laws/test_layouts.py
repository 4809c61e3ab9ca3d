"""Law 1 over ranks: PPO (actor, critic, reference, reward model, a filter, two epochs) on recorded rollouts gives what one
rank gives, whatever the layout. Differences are relative, over all of the ten steps.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.laws import layouts_of_ppo
from tests.laws.layouts_of_ppo import FEW_LAYOUTS, FEW_STEPS, STEPS, Outcome, run
from tests.ranks import launch, shared
from tests.smollm2 import smollm2_actor

LOSS, GRAD_NORM, WEIGHTS = 1e-4, 1e-3, 1e-4
#: Seconds of a launch.
TIMEOUT = 560
#: By number of ranks, what is tried in one launch.
LAUNCHES = {2: ("dp", "tp2", "mixed"), 4: ("dp", "dp2 x tp2", "hybrid")}


@functools.cache
def one_rank(steps: int) -> Outcome:
    return run("one", None, steps=steps)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    return launched(tmp_path_factory.mktemp("two"), 2, "tiny", LAUNCHES[2])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    return launched(tmp_path_factory.mktemp("four"), 4, "tiny", LAUNCHES[4])


def launched(
    folder: Path, ranks: int, size: str, layouts: tuple[str, ...], steps: int = STEPS
) -> dict[str, list[Outcome]]:
    """By layout, what every rank has."""
    launch(layouts_of_ppo.main, str(folder), size, layouts, steps, num_ranks=ranks, timeout=TIMEOUT).succeeded()
    return {layout: outcomes(folder, layout, ranks) for layout in layouts}


def outcomes(folder: Path, layout: str, ranks: int) -> list[Outcome]:
    return [Outcome(**torch.load(folder / f"{layout}.{rank}.pt")) for rank in range(ranks)]


def same_as_one_rank(found: list[Outcome], expected: Outcome) -> None:
    for rank, outcome in enumerate(found):
        assert outcome.kept == expected.kept
        assert outcome.actor == found[0].actor and outcome.critic == found[0].critic, (
            f"rank {rank} reports other numbers"
        )
        for who in ("actor", "critic"):
            for step, (a, b) in enumerate(zip(getattr(outcome, who), getattr(expected, who), strict=True)):
                assert a.keys() == b.keys()
                for name, tolerance in (("loss", LOSS), ("grad_norm", GRAD_NORM)):
                    assert a[name] == pytest.approx(b[name], rel=tolerance, abs=0), f"{who}, step {step}: {name}"
        assert outcome.weights.keys() == expected.weights.keys()
        for model, weights in outcome.weights.items():
            assert weights.keys() == expected.weights[model].keys()
            for name, tensor in weights.items():
                other = expected.weights[model][name]
                assert float((tensor - other).norm()) <= WEIGHTS * float(other.norm()), f"{model}: {name}"
                assert torch.equal(tensor, found[0].weights[model][name]), f"rank {rank} has other weights"


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_the_flow_does_something(steps: int) -> None:
    """Without which the others would show nothing: both learn, and the filter drops groups in some steps."""
    alone = one_rank(steps)
    assert len(alone.actor) == len(alone.critic) == steps
    assert {12, 18} <= set(alone.kept) <= {9, 12, 15, 18}
    assert all(row["clip_fraction"] > 0.1 and row["grad_norm"] > 1 and abs(row["loss"]) > 0.01 for row in alone.actor)
    start = run_weights()
    for model in ("actor", "critic"):
        moved = [
            float((t - start[model][n]).norm() / t.norm()) for n, t in alone.weights[model].items() if n in start[model]
        ]
        assert max(moved) > 10 * WEIGHTS * steps
    assert all(torch.equal(t, start["actor"][n]) for n, t in alone.weights["actor.frozen"].items())


def run_weights() -> dict[str, dict[str, torch.Tensor]]:
    """The weights at step 0."""
    actor, critic, _ = layouts_of_ppo.tiny_models()
    return {"actor": actor.source.state_dict(), "critic": critic.source.base_model.state_dict()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_the_first_steps_on_two_ranks(
    layout: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shared("layouts", request, tmp_path_factory)
    same_as_one_rank(outcomes(folder, layout, 2), one_rank(FEW_STEPS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAUNCHES[2])
def test_two_ranks(layout: str, two: dict[str, list[Outcome]]) -> None:
    same_as_one_rank(two[layout], one_rank(STEPS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAUNCHES[4])
def test_four_ranks(layout: str, four: dict[str, list[Outcome]]) -> None:
    same_as_one_rank(four[layout], one_rank(STEPS))


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_smollm2_on_two_ranks(tmp_path: Path) -> None:
    """One after the other: together they would not fit in the memory of a small machine."""
    smollm2_actor()  # skips where it is not installed
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = launched(tmp_path / "one", 1, "smollm2", ("one",), 2)["one"]
    same_as_one_rank(launched(tmp_path / "two", 2, "smollm2", ("mixed",), 2)["mixed"], alone[0])
