"""Replay: from a dump, a checkpoint and step 0, of live models and of folders, in this process and in another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Model
from flowrl.errors import CheckpointError, RunFolderError
from flowrl.runtime.replay import replay_step
from tests.flows import prompts, tiny_grpo, tiny_ppo
from tests.runs import quick_run, rows
from tests.tiny import tiny_folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO on a live model, whose object the critic starts from too: checkpoints of steps 2 and 4, a dump of step 4."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("live") / "run"
    quick_run(tiny_ppo(), 5, folder, checkpoint_every=2, keep_last=9, dump_steps=[4])
    shutil.rmtree(folder / "checkpoints" / "step-000005")
    return folder


STARTS = {1: "step 0", 2: "step 0", 3: "step-000002", 4: "before/step-000003", 5: "step-000004"}


@pytest.mark.parametrize(("step", "started_from"), STARTS.items())
def test_a_step_of_a_live_model(step: int, started_from: str, live: Path) -> None:
    replay = replay_step(live, step)
    assert replay.equal, replay.table()
    assert replay.started_from.endswith(started_from)
    assert "loss" in replay.recorded and not any(k.startswith("time/") for k in replay.recorded)
    assert "All metrics are equal." in replay.table()
    assert "Rollout#0" in replay.iteration.values


def test_in_another_process(live: Path, tmp_path: Path) -> None:
    """Nodes and rewards travel by value where they cannot be imported; tests.flows can."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "flowrl.cli", "replay", str(live), "5"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All metrics are equal." in done.stdout


def test_nothing_is_written(live: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in live.rglob("*")}
    replay_step(live, 5)
    assert {p: p.stat().st_mtime_ns for p in live.rglob("*")} == before


def test_a_step_of_a_model_from_a_folder(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    quick_run(tiny_grpo(Model(str(folder), name="tiny"), kl_coef=0.1), 3, tmp_path / "run")
    assert replay_step(tmp_path / "run", 2).equal
    tiny_folder(folder, seed=1)
    with pytest.raises(CheckpointError, match="from step 0, and the source of Model 'tiny' has changed since"):
        replay_step(tmp_path / "run", 2)


def test_a_difference_is_shown(live: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(live, tmp_path / "run"))
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "metrics.parquet")
    loss = table.column_names.index("loss")
    pq.write_table(table.set_column(loss, "loss", [[0.5] * table.num_rows]), folder / "metrics.parquet")
    manifest = (folder / "run.json").read_text()
    (folder / "run.json").write_text(manifest.replace('"threads": "1"', '"threads": "7"'))
    replay = replay_step(folder, 5)
    assert not replay.equal
    assert "≠ loss" in replay.table()
    assert "Changed since the run: threads from 7 to 1." in replay.table()
    assert "The replay differs from the record." in replay.table()


@pytest.mark.parametrize("step", [0, -1, 6])
def test_a_step_that_was_not_run(step: int, live: Path) -> None:
    with pytest.raises(RunFolderError, match=f"Step {step} is not in .*Expected a step from 1 to 5. Received {step}"):
        replay_step(live, step)


def test_what_is_not_a_run_folder(tmp_path: Path, live: Path) -> None:
    with pytest.raises(RunFolderError, match=r"is not a run folder. Expected run.json. Received no such folder"):
        replay_step(tmp_path / "nothing", 1)
    with pytest.raises(RunFolderError, match=r"is not a run folder. Expected run.json. Received no such file"):
        replay_step(tmp_path, 1)
    folder = Path(shutil.copytree(live, tmp_path / "run"))
    (folder / "program.pkl").write_bytes(b"\x80\x05garbage")
    with pytest.raises(RunFolderError, match=r"program\.pkl cannot be loaded"):
        replay_step(folder, 1)
    (folder / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        replay_step(folder, 1)


def test_a_run_that_cannot_be_pickled_runs_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    data: Any = prompts()
    data.lock = threading.Lock()
    quick_run(tiny_grpo(), 1, tmp_path / "run", data, progress=True)
    assert (
        "This run cannot be replayed, because it cannot be pickled: TypeError: cannot pickle" in capsys.readouterr().out
    )
    with pytest.raises(
        RunFolderError, match=r"cannot be replayed. Expected program.pkl. Received TypeError: cannot pickle"
    ):
        replay_step(tmp_path / "run", 1)


def test_a_replay_leaves_the_classes_of_this_process_as_they_are(tmp_path: Path) -> None:
    """Classes that travel by value are the same classes here, and must not be changed by their copies."""
    import dataclasses

    import flowrl
    from flowrl import Prompts, RLFlow, Rollout, Rollouts, TrainStats, source
    from tests.flows import SAMPLING
    from tests.tiny import tiny_actor

    @flowrl.node
    def needs(rollouts: Rollouts, setting: int) -> TrainStats:
        return TrainStats({"setting": float(setting)}, 0, 0, 0)

    rollouts = Rollout(tiny_actor(), sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    quick_run(RLFlow.from_outputs(needs(rollouts, setting=3)), 1, tmp_path / "run")
    assert replay_step(tmp_path / "run", 1).equal
    field = next(f for f in dataclasses.fields(needs.node_class) if f.name == "setting")  # type: ignore[attr-defined]
    assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    assert rows(tmp_path / "run")[0]["setting"] == 3
