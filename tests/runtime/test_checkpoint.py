"""Checkpoints: whole or not at all, verified, and of the run that is resumed."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.errors import CheckpointError, FlowError, RunFolderError
from flowrl.runtime import checkpoint as ckpt
from flowrl.runtime.engines.base import Saving
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.ranks import Ranks
from tests.flows import prompts, tiny_grpo, tiny_ppo
from tests.runs import checkpoints, quick_run
from tests.tiny import tiny_actor


def put(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a reference; copy it before changing it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("finished") / "run"
    quick_run(tiny_grpo(kl_coef=0.1), 2, folder, checkpoint_every=1)
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda c: (c / "models/tiny/__0_0.distcp").write_bytes(b"12"),
        r"__0_0\.distcp has changed.*Received 2 bytes",
    ),
    "flipped byte": (
        lambda c: flip_a_byte(c / "models/tiny/.metadata"),
        r"\.metadata has changed.*SHA-256 of another content",
    ),
    "missing file": (lambda c: (c / "states.pt").unlink(), r"Expected states\.pt\. Received no such file"),
    "manifest is no JSON": (lambda c: (c / "manifest.json").write_text("{"), r"manifest\.json cannot be read"),
    "manifest is other JSON": (lambda c: (c / "manifest.json").write_text("[]"), r"manifest\.json cannot be read"),
    "manifest without sizes": (
        lambda c: (c / "manifest.json").write_text('{"files": {"a": 1}}'),
        r"manifest\.json cannot be read",
    ),
    "manifest is gone": (lambda c: (c / "manifest.json").unlink(), r"manifest\.json cannot be read"),
    "another version": (
        lambda c: (c / "manifest.json").write_text('{"files": {}, "schema_version": 99}'),
        r"of another version\. Expected schema 2\. Received schema 99",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_whole(name: str, run_folder: Path) -> None:
    damage, message = DAMAGE[name]
    newest = run_folder / "checkpoints" / "step-000002"
    damage(newest)
    with pytest.raises(CheckpointError, match=message) as error:
        quick_run(tiny_grpo(kl_coef=0.1), 3, run_folder, resume=True)
    assert str(newest) in str(error.value)
    if name == "truncated":  # the advice works
        assert "delete that folder to go on from the checkpoint before it" in str(error.value)
        shutil.rmtree(newest)
        assert quick_run(tiny_grpo(kl_coef=0.1), 3, run_folder, resume=True).steps == 3


@pytest.mark.parametrize("damage", [lambda f: shutil.rmtree(f), lambda f: flip_a_byte(f / "__0_0.distcp")])
def test_without_the_weights_of_step_0_nothing_goes_on(damage: Callable[[Path], None], run_folder: Path) -> None:
    damage(run_folder / "frozen" / "tiny.frozen")
    with pytest.raises(CheckpointError, match=r"frozen/tiny\.frozen is damaged.*restore it from a copy"):
        quick_run(tiny_grpo(kl_coef=0.1), 3, run_folder, resume=True)


def test_a_checkpoint_of_another_run_is_refused_before_a_model_is_loaded(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRuntime, "open", lambda self: pytest.fail("a model was loaded"))
    with pytest.raises(CheckpointError, match=r"of another flow.*as asked for now.*of the run that wrote it"):
        quick_run(tiny_ppo(), 3, run_folder, resume=True)
    with pytest.raises(CheckpointError, match=r"of another seed. Expected 7, as asked for now. Received 0"):
        quick_run(tiny_grpo(kl_coef=0.1), 3, run_folder, resume=True, seed=7)
    with pytest.raises(CheckpointError, match="of another data"):
        quick_run(tiny_grpo(kl_coef=0.1), 3, run_folder, prompts(5), resume=True)


def test_weights_of_another_shape_are_refused(run_folder: Path) -> None:
    from tests.tiny import tiny_model, tiny_tokenizer

    other = tiny_actor()
    object.__setattr__(other, "source", tiny_model(hidden=16))
    object.__setattr__(other, "tokenizer", tiny_tokenizer())
    with pytest.raises(CheckpointError, match="is a checkpoint of another model"):
        quick_run(tiny_grpo(other, kl_coef=0.1), 3, run_folder, resume=True)


# -- writing -------------------------------------------------------------------------------------------------------------


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", ["write", "rename", "seal"])
def test_a_folder_appears_whole_or_not_at_all(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "step-000001"

    def write(target: Path, ranks: Ranks) -> None:
        (target / "a").write_text("half")
        if at == "write":
            full()

    if at == "rename":
        monkeypatch.setattr(ckpt.os, "rename", full)
    if at == "seal":
        monkeypatch.setattr(ckpt.os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"Cannot write .*step-000001: the disk is full.*MiB free"):
        ckpt.write_folder(final, write)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    ckpt.write_folder(final, lambda target, _: put(target / "a", "whole"))
    ckpt.verify(final)
    assert (final / "a").read_text() == "whole"


def test_an_error_that_is_not_the_disk_s_stays_what_it_is(tmp_path: Path) -> None:
    def write(target: Path, ranks: Ranks) -> None:
        raise ZeroDivisionError("not the disk")

    with pytest.raises(ZeroDivisionError):
        ckpt.write_folder(tmp_path / "x", write)
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_newest_and_the_protected_and_cleans_up(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 1_000_000):
        ckpt.write_folder(tmp_path / f"step-{step:06d}", lambda target, _: None)
    (tmp_path / ".step-000009.writing").mkdir()
    (tmp_path / ".step-000009.writing" / "a").write_text("half")
    ckpt.prune(tmp_path, keep_last=2, protected={2})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-1000000"]
    assert [ckpt.step_of(p) for p in ckpt.list_checkpoints(tmp_path)] == [2, 4, 1_000_000]


def test_export_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "export" / "tiny"
    ckpt.replace_folder(target, lambda t, _: put(t / "old", ""))
    with pytest.raises(RunFolderError, match="the disk is full"):
        ckpt.replace_folder(target, full)
    assert [p.name for p in target.iterdir()] == ["old"]
    ckpt.replace_folder(target, lambda t, _: put(t / "new", ""))
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in target.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "x", (torch.ones(2),)]}, 3, None])
def test_what_a_state_may_hold(value: Any) -> None:
    ckpt._check_state("s", value)


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, [json]])
def test_what_a_state_may_not_hold(value: Any) -> None:
    with pytest.raises(FlowError, match="State 's' cannot be written into a checkpoint"):
        ckpt._check_state("s", value)


# -- a full disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["frozen", "program", "checkpoint", "metrics", "export"])
def test_a_disk_that_fills_up_is_one_error_and_the_run_goes_on_later(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowrl.runtime import metrics, saved_run
    from flowrl.runtime.engines.transformers import TransformersEngine

    folder = tmp_path / "run"
    options: dict[str, Any] = dict(export=True, checkpoint_every=1)
    with monkeypatch.context() as patch:
        if at == "frozen":
            patch.setattr(TransformersEngine, "saving", lambda engine, copy: full)
        elif at == "program":
            patch.setattr(saved_run, "write_atomically", full)
        elif at == "checkpoint":
            saves, saving = [0], TransformersEngine.saving

            def second_full(engine: Any, copy: bool) -> Saving:
                saves[0] += 1
                last = saves[0] == 3  # the frozen reference, step 1, step 2
                write = saving(engine, copy=copy)
                return lambda target, ranks: (write(target, ranks), full() if last else None)[-1]

            patch.setattr(TransformersEngine, "saving", second_full)
        elif at == "metrics":
            writes, write = [0], metrics.write_atomically

            def late_full(path: Path, data: bytes) -> None:
                writes[0] += 1
                if writes[0] >= 2:
                    raise RunFolderError(f"Cannot write {path}: the disk is full")
                write(path, data)

            patch.setattr(metrics, "write_atomically", late_full)
        else:
            exports, export = [0], TransformersEngine.export

            def export_full(engine: Any, target: Path) -> None:
                exports[0] += 1
                export(engine, target)
                if exports[0] == 2:  # the live model at the start, the trained one at the end
                    full()

            patch.setattr(TransformersEngine, "export", export_full)
        with pytest.raises(RunFolderError, match="the disk is full"):
            quick_run(tiny_grpo(kl_coef=0.1), 3, folder, **options)
    begun = folder.exists()
    assert begun == (at != "program"), "what could not begin leaves nothing behind"
    if begun:
        assert [p.name for p in folder.rglob(".*") if p.name not in (".lock", ".metadata")] == []
        assert {"frozen": [], "checkpoint": [1], "metrics": [1], "export": [2, 3]}[at] == checkpoints(folder)
    result = quick_run(tiny_grpo(kl_coef=0.1), 3, folder, resume=begun, **options)
    assert (result.status, result.steps) == ("finished", 3)
    assert (folder / "export" / "tiny" / "config.json").exists()


@pytest.mark.parametrize("room", [0, 60_000, 150_000], ids=["no room", "room for a file", "room for half a checkpoint"])
def test_a_real_disk_that_is_full(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small file system of its own, where this process may mount one: what libraries really raise."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    try:
        with pytest.raises(
            RunFolderError, match=r"too full for this run's checkpoints. Expected \d+ MiB. Received 2 MiB"
        ):
            quick_run(tiny_grpo(), 3, place / "run", keep_last=9)
        assert list(place.iterdir()) == []
        ballast, writer = place / "ballast", ckpt.checkpoint_writer

        def on_a_full_disk(folder: Path, **what: Any) -> Callable[[Ranks], Path]:
            if what["progress"].step == 2:
                ballast.write_bytes(bytes(shutil.disk_usage(place).free - room))
            return writer(folder, **what)

        monkeypatch.setattr(ckpt, "checkpoint_writer", on_a_full_disk)
        with pytest.raises(
            RunFolderError, match=r"Cannot write .*(step-000002|metrics\.parquet): the disk is full.*MiB free.*--resume"
        ):
            quick_run(tiny_grpo(), 3, place / "run", keep_last=1, checkpoint_every=1)
        monkeypatch.undo()
        assert checkpoints(place / "run") == [1]
        ckpt.verify(place / "run" / "checkpoints" / "step-000001")
        assert [p.name for p in (place / "run").rglob(".*") if p.name not in (".lock", ".metadata")] == []
        ballast.unlink()
        assert quick_run(tiny_grpo(), 3, place / "run", resume=True, keep_last=1).steps == 3
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
