"""The spmd runtime: two ranks do what one does, once; and whatever happens to one of them ends the run for both.

Launches are few, because they are slow: most of what is looked at happens in ``spmd_scenarios.everything``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.compiler.plan import Plan
from flowrl.errors import FlowError
from flowrl.runtime.replay import replay_step
from flowrl.runtime.spmd import deadline_of_environment
from flowrl.runtime.tensor_files import contents
from tests.ranks import Launched, launch, shared, torchrun
from tests.runs import checkpoints, rows, saved_weights
from tests.runtime import spmd_nodes
from tests.runtime.spmd_scenarios import train, with_trouble

FULL = {"sharding": "full"}


def close(a: float, b: float) -> bool:
    """Law 1: as near as the order of sums in float32 lets it be."""
    return abs(a - b) <= 1e-4 * max(1.0, abs(a))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    models = sorted((folder / "checkpoints" / f"step-{step:06d}" / "models").iterdir())
    return {f"{place.name}.{name}": tensor for place in models for name, tensor in saved_weights(place).items()}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("local")
    train(folder / "run", runtime="local", log=folder / "calls", export=True)
    return folder


@pytest.fixture(scope="module")
def spmd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared("spmd", request, tmp_path_factory)


@pytest.mark.timeout(900)
def test_two_ranks_do_what_one_does(local: Path, spmd: Path) -> None:
    """Law 2: equal rewards and draws, losses and weights as near as the order of sums lets them be."""
    one, two = rows(local / "run"), rows(spmd / "none")[: 1 + 3]
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys() and "Updater#0/kl_coef" not in a
        assert [k for k in a if not close(a[k], b[k])] == []
        same = ("reward/Calls_mean", "length/mean", "DropUniformGroups#0/groups_dropped")
        assert all(a.get(k) == b.get(k) for k in same), "what was sampled is the same, bit for bit"
    mine, theirs = weights(local / "run", 3), weights(spmd / "none", 3)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert float((tensor - theirs[name]).norm()) <= 1e-5 * float(tensor.norm()), name
    states = [
        torch.load(p / "checkpoints/step-000003/states.pt", weights_only=True) for p in (local / "run", spmd / "none")
    ]
    assert states[0]["kl_coef"] != 0.05 and close(states[0]["kl_coef"], states[1]["kl_coef"])


def test_a_plan_that_the_compiler_chose_is_run(local: Path, spmd: Path) -> None:
    """With strategy="auto": the map of devices is in the plan, and the step is the one of a single process."""
    plan = Plan.from_json((spmd / "auto" / "plan.json").read_text())
    assert plan.mapping is not None and [m.size for m in plan.mapping.meshes] == [2] and not plan.not_everywhere()
    assert {m.name for m in plan.models} >= {u.model for u in plan.mapping.units}
    one, two = rows(local / "run")[1], rows(spmd / "auto")[1]
    assert [k for k in one if "loss" in k and not close(one[k], two[k])] == [] and any("loss" in k for k in one)


def test_a_reward_function_is_called_once_for_each_row(local: Path, spmd: Path) -> None:
    calls = (spmd / "calls").read_text().splitlines()
    assert set(calls) == {"0"}, "on rank 0"
    assert len(calls) == len((local / "calls").read_text().splitlines()) >= 3 * 3 * 2


def test_one_run_folder_and_whole_weights_in_it(local: Path, spmd: Path) -> None:
    from safetensors.torch import load_file

    run = json.loads((spmd / "none" / "run.json").read_text())
    assert run["layout"]["ranks"] == "2" and "2 data-parallel ranks, a copy on each" in run["layout"]["strategies"]
    plan = json.loads((spmd / "none" / "plan.json").read_text())
    assert plan["num_devices"] == 2
    assert {p.name for p in (local / "run").iterdir()} <= {p.name for p in (spmd / "none").iterdir()}
    exported = load_file(spmd / "none" / "export" / "tiny" / "model.safetensors")
    whole = load_file(local / "run" / "export" / "tiny" / "model.safetensors")
    assert {k: v.shape for k, v in exported.items()} == {k: v.shape for k, v in whole.items()}


def test_a_run_goes_on_with_another_strategy_and_in_one_process(spmd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was resumed with tensor parallelism inside of the launch; here on one rank."""
    assert checkpoints(spmd / "none") == [3, 4]
    result = train(spmd / "none", runtime="local", resume=True, num_steps=5, progress=True)
    assert (result.status, result.steps, len(rows(result))) == ("finished", 5, 6)
    said = " ".join(capsys.readouterr().out.split())
    assert "Changed since the run began: ranks from 2 to 1." in said


def test_errors_end_up_in_the_manifest(spmd: Path) -> None:
    for name, error in (("host", "ValueError: nothing to see"), ("actor", "Rank 1 raised ValueError: nothing to see")):
        run = json.loads((spmd / name / "run.json").read_text())
        assert run["status"] == "failed" and error in run["error"]


def test_nodes_of_ones_own_see_the_same_on_every_rank(spmd: Path, tmp_path: Path) -> None:
    """One row or none on two ranks, a Snapshot, an Ema, a value head, a State, and a node that finds another thing on each."""
    mine = spmd_nodes.train(tmp_path / "run", runtime="local")
    first, second = (json.loads((spmd / f"seen.{rank}.json").read_text()) for rank in range(2))
    for name in ("rewards", "count"):
        assert first[name] == second[name] == mine[name]
    assert [len(step) for step in first["rewards"]] == [1, 0, 1, 1]
    for rank, seen in enumerate((first, second)):
        assert seen["opened"] == seen["closed"] == [rank], "what setup opened, once on each rank, is closed there"
    one, two = rows(tmp_path / "run"), rows(spmd / "nodes")
    assert len(one) == len(two) == 4 and all(a.keys() == b.keys() for a, b in zip(one, two, strict=True))
    assert [k for a, b in zip(one, two, strict=True) for k in a if not close(a[k], b[k])] == []
    assert two[1]["empty_updates"] == 1


def test_a_step_of_ranks_is_replayed_alone(spmd: Path) -> None:
    replayed = replay_step(spmd / "none", 2)
    assert replayed.recorded.keys() == replayed.replayed.keys()
    assert [k for k, v in replayed.recorded.items() if not close(v, replayed.replayed[k])] == []
    assert "ranks from 2 to 1" in replayed.differences
    assert replayed.equal and "equal up to the order of sums" in replayed.table()


def test_the_deadline_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWRL_DEADLINE", raising=False)
    assert deadline_of_environment() == 1800
    monkeypatch.setenv("FLOWRL_DEADLINE", "12.5")
    assert deadline_of_environment() == 12.5
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("FLOWRL_DEADLINE", text)
        with pytest.raises(FlowError, match=r"FLOWRL_DEADLINE cannot be used. Expected seconds, more than 0"):
            deadline_of_environment()


# -- trouble: a launch each ----------------------------------------------------------------------------------------------------


def trouble(out: Path, options: dict[str, Any] | None = None, **what: Any) -> Launched:
    """A launch in which something happens; which checkpoints there are then is no matter of chance."""
    options = {"strategy": FULL, "async_checkpoints": False, **(options or {})}
    return launch(with_trouble, str(out), what, options, num_ranks=2, timeout=600).ended()


def only_error(launched: Launched) -> str:
    assert launched.status != 0 and len(launched.errors) == 1, launched.output
    return launched.errors[0]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_rank_that_hangs_ends_the_run(tmp_path: Path) -> None:
    """In user code on rank 1, while rank 0 waits for it in an engine."""
    launched = trouble(tmp_path / "run", {"deadline": 40}, kind="hang", place="actor", rank=1, step=2)
    message = only_error(launched)
    assert message.startswith(
        "error: Rank 1 has not come back within 40 s: it was in call 'scored' (scored_by), step 2.\n  rank 0 is at "
    )
    assert "spmd_scenarios.py:" in message.splitlines()[-1] and message.endswith(" in here")
    assert "Traceback" not in launched.output.split("torch.distributed.elastic")[0].split("error: ")[0]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "failed" and "Rank 1 has not come back" in run["error"]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_reward_function_that_hangs_ends_the_run(tmp_path: Path) -> None:
    message = only_error(trouble(tmp_path / "run", {"deadline": 40}, kind="hang", place="reward", rank=0, step=2))
    assert message.startswith(
        "error: Rank 0 has not come back within 40 s: it was in call 'reward' (FunctionReward), step 2."
    )


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_rank_that_raises_while_the_other_is_in_a_conversation_ends_the_run(tmp_path: Path) -> None:
    message = only_error(trouble(tmp_path / "run", kind="raise", place="actor", rank=1, step=2))
    assert message.startswith("error: Rank 1 raised in call 'scored' (scored_by), step 2. ValueError: nothing to see\n")
    assert "spmd_scenarios.py" in message, "with the lines that raised it"


GONE, LATE = "Rank {} is gone: it was in ", "Rank {} has not come back within 40 s: it was in "
SAMPLING, LOADING = "call 'Rollout#0' (Rollout), step 2.", "loading Model 'tiny'."


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("kind", "place", "rank", "said"),
    [
        ("kill", "engine", 0, GONE + SAMPLING),
        ("kill", "engine", 1, GONE + SAMPLING),
        ("kill", "load", 0, GONE + LOADING),
        ("kill", "load", 1, GONE + LOADING),
        ("stop", "engine", 1, LATE + SAMPLING),
        ("hang", "engine", 1, LATE + SAMPLING),
        ("raise", "load", 1, "Rank {} raised in " + LOADING + " ValueError: nothing to see\n"),
    ],
)
def test_trouble_in_an_engine(kind: str, place: str, rank: int, said: str, tmp_path: Path) -> None:
    """In the middle of a forward pass, or while a Model is loaded; a run that could not begin leaves nothing behind."""
    step = 1 if place == "load" else 2
    message = only_error(trouble(tmp_path / "run", {"deadline": 40}, kind=kind, place=place, rank=rank, step=step))
    assert message.startswith("error: " + said.format(rank))
    if place == "load":
        assert rank == 0 or not (tmp_path / "run").exists()
    else:
        assert checkpoints(tmp_path / "run") == [1]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("kind", "place", "last"), [("end", "actor", 2), ("interrupt", "engine", 2), ("interrupt twice", "reward", 1)]
)
def test_a_signal_to_torchrun_ends_all_ranks_after_a_step(kind: str, place: str, last: int, tmp_path: Path) -> None:
    """And a second Ctrl-C at once."""
    launched = trouble(tmp_path / "run", {"num_steps": 5}, kind=kind, place=place, rank=0, step=2)
    assert launched.errors == [] and checkpoints(tmp_path / "run")[-1] == last
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_ranks_do_not_outlive_torchrun(tmp_path: Path) -> None:
    launched = trouble(tmp_path / "run", {"num_steps": 1000}, kind="orphan", place="actor", rank=1, step=2)
    assert "torchrun" in only_error(launched) and "is gone" in only_error(launched)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_law4_a_kill_of_either_rank(tmp_path: Path) -> None:
    """SIGKILL of rank 0 in the reward function, of rank 1 in the middle of a step; both go on, and end equal bit for bit."""
    whole = {"num_steps": 4, "keep_last": 4}
    launch(with_trouble, str(tmp_path / "whole"), {}, {"strategy": FULL, **whole}, num_ranks=2, timeout=600).succeeded()
    for rank, place, call in ((0, "reward", "'reward' (FunctionReward)"), (1, "actor", "'scored' (scored_by)")):
        out = tmp_path / f"rank-{rank}"
        message = only_error(trouble(out, whole, kind="kill", place=place, rank=rank, step=3))
        assert message.startswith(f"error: Rank {rank} is gone: it was in call {call}, step 3. ")
        assert checkpoints(out) == [1, 2]
        resumed = {"strategy": FULL, "resume": True, **whole}
        launch(with_trouble, str(out), {}, resumed, num_ranks=2, timeout=600).succeeded()
        assert rows(out) == rows(tmp_path / "whole")
        for step in (3, 4):
            folders = [folder / "checkpoints" / f"step-{step:06d}" for folder in (out, tmp_path / "whole")]
            mine, theirs = (all_of(f) for f in folders)
            assert mine.keys() == theirs.keys() and len(mine) > 50
            assert [k for k in mine if mine[k] != theirs[k]] == []


def all_of(checkpoint: Path) -> dict[str, bytes]:
    """Byte for byte, every tensor and every small file of a checkpoint. (Which rank has written what all hold is chance.)"""
    small = {p.name: p.read_bytes() for p in checkpoint.iterdir() if p.is_file() and p.name != "manifest.json"}
    counters = {str(p.relative_to(checkpoint)): p.read_bytes() for p in checkpoint.glob("models/*/engine.json")}
    tensors = {
        f"{place.name}/{name}": tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for place in (checkpoint / "models").iterdir()
        for name, tensor in contents(place).items()
    }
    return small | counters | tensors


RECIPE = """
import flowrl
from tests.flows import prompts, tiny_grpo

@flowrl.recipe
def grpo(broken: bool = False) -> flowrl.Experiment:
    if broken:
        raise flowrl.FlowError("broken on purpose")
    return flowrl.Experiment(tiny_grpo(), prompts(), 2, on_end=lambda result: print("summary:", result.steps),
                             options={"report": False, "export": False})
"""


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_command_says_everything_once(tmp_path: Path) -> None:
    recipe = tmp_path / "once.py"
    recipe.write_text(RECIPE)

    def command(*flags: str) -> Launched:
        return torchrun(["-m", "flowrl", "run", str(recipe), *flags], num_ranks=2, timeout=300)

    out = str(tmp_path / "run")
    launched = command("--runtime", "spmd", "--tensor-parallel", "2", "--out", out).succeeded()
    for text in ("step 1/2 ", "step 2/2 ", "summary: 2", "finished after 2 steps. Run folder: "):
        assert launched.output.count(text) == 1, launched.output
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [m["strategy"]["tensor_parallel"] for m in plan["models"]] == [2]
    assert "2 processes would each run the whole of this recipe" in only_error(command("--out", out + "2"))
    assert only_error(command("--runtime", "spmd", "--broken")).startswith("error: broken on purpose.")
    message = only_error(command("--runtime", "spmd", "--out", out))
    assert "exists already" in message and "on rank 0 of 2" in message
