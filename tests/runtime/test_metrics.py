"""The record of a run: complete after a kill and a resume, never half-written."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import RunFolderError
from flowrl.runtime import atomic
from flowrl.runtime.metrics import MetricsLog, SampleLog, read_metrics, read_samples, sample_rows


def log_of(folder: Path, resume: int | None = None, **options: Any) -> MetricsLog:
    return MetricsLog(folder, resume, tensorboard=False, **options)


def test_columns_are_the_union_of_all_names(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        log.log(1, {"loss": 0.5, "reward/mean": None})
        log.log(2, {"reward/mean": 1, "note": "eval"})
        log.log(1, {"kl": math.nan})
    table = read_metrics(tmp_path)
    assert table.schema.field("step").type == "int64" and table.schema.field("loss").type == "double"
    rows = table.to_pylist()
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[0]["loss"] == 0.5 and math.isnan(rows[0]["kl"]) and rows[0]["reward/mean"] is None
    assert rows[1] == {"step": 2, "loss": None, "reward/mean": 1.0, "kl": None, "note": "eval"}


def test_a_resume_drops_the_rows_that_come_again(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        for step in range(1, 8):
            log.log(step, {"loss": float(step), "old": 1.0})
    with log_of(tmp_path, 5) as log:
        assert read_metrics(tmp_path).num_rows == 7, "the file is left alone until there is something to write"
        log.log(5, {"loss": -5.0})
    table = read_metrics(tmp_path).to_pydict()
    assert table["step"] == [1, 2, 3, 4, 5]
    assert table["loss"] == [1.0, 2.0, 3.0, 4.0, -5.0]
    assert table["old"] == [1.0] * 4 + [None]


def test_resuming_equals_not_stopping(tmp_path: Path) -> None:
    def rows(first: int, last: int) -> list[tuple[int, dict[str, float]]]:
        return [(s, {"loss": 1 / s, **({"eval": s / 7} if s % 2 else {})}) for s in range(first, last + 1)]

    for folder, parts in (("whole", [(None, 1, 6)]), ("parts", [(None, 1, 5), (4, 4, 6)])):
        for resume, first, last in parts:
            with log_of(tmp_path / folder, resume) as log:
                for step, metrics in rows(first, last):
                    log.log(step, metrics)
    assert read_metrics(tmp_path / "whole").equals(read_metrics(tmp_path / "parts"))


def test_a_new_run_refuses_the_metrics_of_another(tmp_path: Path) -> None:
    with log_of(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    with pytest.raises(RunFolderError, match=r"metrics\.parquet exists already"):
        log_of(tmp_path)


def test_flushing_is_not_done_at_every_step(tmp_path: Path) -> None:
    log = log_of(tmp_path, flush_seconds=3600)
    log.log(1, {"loss": 1.0})
    assert not (tmp_path / "metrics.parquet").exists()
    log.flush()
    first = (tmp_path / "metrics.parquet").stat().st_mtime_ns
    log.flush()
    assert (tmp_path / "metrics.parquet").stat().st_mtime_ns == first, "nothing new, nothing written"
    eager = log_of(tmp_path / "eager", flush_seconds=0)
    eager.log(1, {"loss": 1.0})
    assert read_metrics(tmp_path / "eager").num_rows == 1


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"not parquet", None])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes | None) -> None:
    with log_of(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    path = tmp_path / "metrics.parquet"
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    for act in (lambda: read_metrics(tmp_path), lambda: log_of(tmp_path, 1)):
        with pytest.raises(RunFolderError, match=r"metrics\.parquet is damaged"):
            act()


def test_no_metrics_at_all(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no metrics\.parquet"):
        read_metrics(tmp_path)
    with log_of(tmp_path, 1) as log:
        log.log(1, {})
    assert read_metrics(tmp_path).column_names == ["step"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_good_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    log = log_of(tmp_path, flush_seconds=3600)
    log.log(1, {"loss": 1.0})
    log.flush()
    good = (tmp_path / "metrics.parquet").read_bytes()
    log.log(2, {"loss": 2.0})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, call, full)
        with pytest.raises(RunFolderError, match=r"metrics\.parquet: the disk is full.* MiB free"):
            log.flush()
    assert (tmp_path / "metrics.parquet").read_bytes() == good
    assert os.listdir(tmp_path) == ["metrics.parquet"], "no rubbish is left"
    log.flush()
    assert read_metrics(tmp_path).num_rows == 2, "nothing was lost"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = log_of(tmp_path / "file" / "run")
    log.log(1, {"loss": 1.0})
    with pytest.raises(RunFolderError, match="Cannot write"):
        log.flush()


names = st.text(min_size=1, max_size=8).filter(lambda n: n != "step")
values = st.none() | st.floats() | st.integers(-(2**53), 2**53) | st.text(max_size=5)


@given(st.dictionaries(st.integers(0, 50), st.dictionaries(names, values, max_size=4), max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_names_and_values_come_back(tmp_path_factory: pytest.TempPathFactory, rows: dict[int, Any]) -> None:
    folder = tmp_path_factory.mktemp("run")
    with log_of(folder) as log:
        for step, metrics in rows.items():
            log.log(step, metrics)
    if rows:
        assert read_metrics(folder).column("step").to_pylist() == sorted(rows)


def test_tensorboard_gets_the_numbers_and_a_resume_purges(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("torch")
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": float(step), "note": "text", "absent": None})
    with MetricsLog(tmp_path, 3) as log:
        log.log(3, {"reward/mean": 30.0})
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_tensorboard_there_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notes: list[str] = []
    with MetricsLog(tmp_path, note=notes.append) as log:
        for step in (1, 2):
            log.log(step, {"loss": 1.0})
    assert len(notes) == 1 and "pip install tensorboard" in notes[0] and "metrics.parquet" in notes[0]
    assert read_metrics(tmp_path).num_rows == 2


def test_samples_survive_whatever_a_model_says(tmp_path: Path) -> None:
    said = "</script> \x00 \ud800 \u2028 \N{PILE OF POO}\n{}"
    log = SampleLog(tmp_path)
    path = log.log(10, [{"prompt": said, "response": said, "rewards": {"a": math.nan, "b": None}, "ids": (1, 2)}])
    assert path == tmp_path / "samples" / "step-000010.jsonl"
    assert path.read_bytes().isascii() and path.read_bytes().count(b"\n") == 1
    assert "NaN" not in json.loads(path.read_text(), parse_constant=pytest.fail)
    (sample,) = read_samples(tmp_path)
    assert sample == {"step": 10, "prompt": said, "response": said, "rewards": {"a": "NaN", "b": None}, "ids": [1, 2]}


def test_samples_after_a_resume(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    for step in (1, 10, 20):
        log.log(step, [{"response": str(step)}])
    SampleLog(tmp_path, 10)
    assert [s["step"] for s in read_samples(tmp_path)] == [1]
    (tmp_path / "samples" / "step-000002.jsonl").write_text("{")
    with pytest.raises(RunFolderError, match=r"step-000002\.jsonl is damaged"):
        read_samples(tmp_path)


def test_sample_rows_take_each_prompt_first() -> None:
    torch = pytest.importorskip("torch")
    from flowrl.batches import Rewards, Rollouts, Spans
    from flowrl.ragged import Ragged

    ids, samples = torch.tensor([3, 3, 8, 8]), torch.tensor([0, 1, 0, 1])
    tokens = Ragged.from_rows([[1, 2], [1, 3], [4, 5], [4, 6]], torch.int64)
    ones = torch.ones(4, dtype=torch.int64)
    rollouts = Rollouts(
        prompt_id=ids,
        sample_id=samples,
        tokens=tokens,
        spans=Spans.prompt_then_response(ones, ones, 0),
        rollout_logprobs=Ragged.from_rows([[-0.1]] * 4, torch.float32),
        finish_reason=torch.tensor([0, 1, 0, 2], dtype=torch.uint8),
        messages=("a", "a", "b", "b"),
        response_text=("w", "x", "y", "z"),
    )
    rewards = Rewards(
        prompt_id=ids.flip(0),
        sample_id=samples.flip(0),
        components={"math": torch.tensor([4.0, 3.0, 2.0, 1.0])},
        valid=torch.tensor([1, 0, 1, 1], dtype=torch.uint8),
        reasons=("", "timeout", "", ""),
    )
    rows = sample_rows(rollouts, rewards, limit=3)
    assert [(r["prompt_id"], r["sample_id"]) for r in rows] == [(3, 0), (8, 0), (3, 1)]
    assert [r["finish_reason"] for r in rows] == ["stop", "stop", "length"]
    assert rows[0]["reward"] == 1.0 and rows[0]["rewards"] == {"math": 1.0}
    assert rows[1]["reward"] is None and rows[1]["invalid"] == "timeout"
    assert "reward" not in sample_rows(rollouts)[0]
