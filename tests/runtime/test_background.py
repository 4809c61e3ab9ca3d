"""Work beside the training: one piece at a time, and its errors are raised where it is waited for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import RunFolderError
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.background import Background
from flowrl.runtime.ranks import ONE_RANK, Ranks
from tests.runs import checkpoint_weights, checkpoints, quick_run, rows
from tests.runtime.test_local import looked_at


def test_work_runs_on_a_thread_of_its_own_one_piece_after_the_other() -> None:
    background, said, go = Background(ONE_RANK), [], threading.Event()

    def first(ranks: Ranks) -> None:
        assert go.wait(60)
        said.append(("first", threading.current_thread() is threading.main_thread(), ranks.size))

    background.begin(first)
    assert said == [] and not background.has_failed
    go.set()
    background.begin(lambda ranks: said.append(("second",)))
    background.wait()
    background.wait()  # there is nothing any more
    assert said == [("first", False, 1), ("second",)]


def test_an_error_is_raised_by_who_waits_once() -> None:
    background = Background(ONE_RANK)

    def fails(ranks: Ranks) -> None:
        raise ZeroDivisionError("on a thread")

    background.begin(fails)
    with pytest.raises(ZeroDivisionError, match="on a thread"):
        background.wait()
    assert not background.has_failed
    background.begin(fails)
    background.abandon(60)  # another error is under way: this one is not said
    background.begin(fails)
    with pytest.raises(ZeroDivisionError):
        background.begin(lambda ranks: None)


def test_work_that_hangs_is_left_alone_after_a_while() -> None:
    background, go = Background(ONE_RANK), threading.Event()
    background.begin(lambda ranks: go.wait(600))
    background.abandon(0.01)
    background.wait()
    go.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of step 1's are sealed when step 2 is under way; what is in them is step 1's."""
    in_step_2, seal = threading.Event(), ckpt._seal

    def late(path: Path) -> Any:
        if "checkpoints/.step-000001." in str(path):
            assert in_step_2.wait(300), "training waits for the checkpoint"
        return seal(path)

    options = dict(checkpoint_every=1, keep_last=9)
    quick_run(looked_at(lambda step: None), 3, tmp_path / "plain", async_checkpoints=False, **options)
    monkeypatch.setattr(ckpt, "_seal", late)
    quick_run(looked_at(lambda step: in_step_2.set() if step == 2 else None), 3, tmp_path / "run", **options)
    assert checkpoints(tmp_path / "run") == [1, 2, 3]
    assert rows(tmp_path / "run") == rows(tmp_path / "plain")
    for step in (1, 2, 3):
        assert checkpoint_weights(tmp_path / "run", step) == checkpoint_weights(tmp_path / "plain", step)
        ckpt.verify(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    assert checkpoint_weights(tmp_path / "run", 1) != checkpoint_weights(tmp_path / "run", 2)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the next one is due, a thousand steps later."""
    failed, seal = threading.Event(), ckpt._seal

    def broken(path: Path) -> Any:
        if "checkpoints/.step-000002." in str(path):
            failed.set()
            raise OSError(28, "No space left on device")
        return seal(path)

    def wait(step: int) -> None:
        if step == 3:
            assert failed.wait(300)

    monkeypatch.setattr(ckpt, "_seal", broken)
    with pytest.raises(RunFolderError, match=r"step-000002: the disk is full"):
        quick_run(looked_at(wait), 1000, tmp_path / "run", checkpoint_every=2)
    assert checkpoints(tmp_path / "run") == []
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert max(row["step"] for row in rows(tmp_path / "run")) < 20
