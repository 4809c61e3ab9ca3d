"""The run folder: who may write there, and what it says of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowrl import AdamW, GRPOUpdater, State
from flowrl.errors import RunFolderError
from flowrl.runtime.manifest import changes, describe
from flowrl.runtime.run_folder import LOCK, RunFolder, default_folder
from tests.flows import prompts, tiny_grpo
from tests.runs import quick_run
from tests.tiny import tiny_actor


def test_a_new_run_wants_a_new_or_an_empty_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path / "a" / "b").create(resume=False)
    RunFolder(tmp_path / "a" / "b").create(resume=False)
    (tmp_path / "a" / "b" / LOCK).write_text("1")  # of a run that was killed before it began
    RunFolder(tmp_path / "a" / "b").create(resume=False)
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")
    with pytest.raises(
        RunFolderError, match=r"exists already. Expected a new or an empty folder. Received something else"
    ):
        RunFolder(tmp_path / "a" / "b").create(resume=False)
    (tmp_path / "a" / "b" / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"Received a run. Do: choose another --out, or go on with --resume"):
        RunFolder(tmp_path / "a" / "b").create(resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="exists already"):
        RunFolder(tmp_path / "file").create(resume=False)
    with pytest.raises(RunFolderError, match="Cannot write in"):
        RunFolder(tmp_path / "file" / "below").create(resume=False)


def test_a_resume_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"There is no run to resume in .*Received no such folder.*leave --resume out"
    ):
        RunFolder(tmp_path / "nothing").create(resume=True)
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(RunFolderError, match=r"Expected a run folder with run.json. Received \['photo.jpg'\]"):
        RunFolder(tmp_path).create(resume=True)


def test_one_process_a_folder(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from flowrl.runtime.run_folder import RunFolder
with RunFolder(Path({str(tmp_path)!r})).held():
    print("held", flush=True)
    sys.stdin.read()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"Another process runs in .*Received process {other.pid}"):
            with RunFolder(tmp_path).held():
                pass
    finally:
        other.kill()
        other.wait()
    with RunFolder(tmp_path).held():  # the system let go of it
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_space_is_asked_for(tmp_path: Path) -> None:
    RunFolder(tmp_path).require_space(1)
    with pytest.raises(
        RunFolderError, match=r"too full for this run's checkpoints. Expected \d+ MiB. Received \d+ MiB free"
    ):
        RunFolder(tmp_path).require_space(1 << 60)


def test_default_folders_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_folder("x") == Path("runs/x-001")
    Path("runs/x-001").mkdir(parents=True)
    assert default_folder("x") == Path("runs/x-002")


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    from flowrl import Model
    from flowrl.errors import ModelError

    with pytest.raises(ModelError):
        quick_run(tiny_grpo(Model(str(tmp_path / "no model"))), 1, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_json_tells_what_was_asked_and_how_it_ended(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    quick_run(tiny_grpo(), 2, tmp_path / "run", prompts(), name="my run", seed=4)
    raw = json.loads((tmp_path / "run" / "run.json").read_text())
    expected = {"name": "my run", "status": "finished", "steps": 2, "num_steps": 2, "seed": 4, "error": ""}
    assert {k: raw[k] for k in expected} == expected
    assert raw["layout"]["threads"] == "1" and raw["environment"]["torch"] == torch.__version__
    assert raw["settings"]["Updater#0.optimizer"].startswith("AdamW(learning_rate=0.01, ")
    assert len(raw["weights"]["tiny"]) == 64


def test_settings_as_text_hold_no_addresses() -> None:
    class Thing:
        pass

    assert (
        describe(Thing())
        == "<tests.runtime.test_run_folder.test_settings_as_text_hold_no_addresses.<locals>.Thing object>"
    )
    assert describe(describe) == "describe"
    assert describe([1, {"a": tiny_actor()}, State("s", 0)]) == "[1, {'a': tiny}, s]"
    assert describe(GRPOUpdater(optimizer=AdamW())).startswith("GRPOUpdater(label=None, model=None, epochs=1")


def test_changes() -> None:
    assert changes({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b from 2 to 3", "c from nothing to 4"]
