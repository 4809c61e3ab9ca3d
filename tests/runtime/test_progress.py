"""What a run shows while it goes on."""

from __future__ import annotations

import io
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.runtime.formats import number, seconds, sparkline
from flowrl.runtime.progress import Progress, find_mode

METRICS: dict[str, Any] = {
    "reward/mean": 0.53,
    "reward/math": 0.5,
    "reward/format": 0.9,
    "kl": 0.0123,
    "entropy": 1.1,
    "clip_fraction": 0.02,
    "grad_norm": math.inf,
    "loss": math.nan,
    "learning_rate": 1e-6,
    "length/mean": 45.2,
    "length/max": 128,
    "ess": 0.93,
    "tokens_per_second": 3210,
    "time/step": 2.0,
    "time/Rollout#0": 1.5,
    "time/Updater#0": 0.5,
    "skipped_steps": 1,
}


def terminal(width: int = 120) -> Any:
    from rich.console import Console

    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, height=50)


def test_plain_is_one_line_a_step() -> None:
    stream = io.StringIO()
    with Progress(3, "ppo", stream=stream) as progress:
        assert progress.mode == "plain"
        for step in (1, 2, 3):
            progress.update(step, METRICS)
        progress.evaluation("heldout", {"eval/heldout/pass@1": 0.25})
        progress.message("saved\ncheckpoint \x1b[31m")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[0] == "ppo: 3 steps"
    assert lines[1].startswith("step 1/3 | reward 0.53 (math 0.5, format 0.9) | loss NaN | kl 0.0123")
    assert "grad ∞" in lines[1] and "skipped 1" in lines[1] and lines[1].endswith("2.0s | ETA 4.0s")
    assert "ETA" not in lines[3]
    assert lines[4] == "eval heldout at step 3: pass@1 0.25"
    assert lines[5] == "saved checkpoint \ufffd[31m"
    assert lines[6].startswith("done: 3 of 3 steps")


def test_absent_metrics_are_left_out() -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.update(1, {"kl": None, "time/step": 1.0})
    assert stream.getvalue().splitlines()[0] == "step 1/2 | 1.0s | ETA 1.0s"


def test_an_error_is_not_reported_as_done() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError):
        with Progress(2, stream=stream) as progress:
            progress.update(1, {"time/step": 1.0})
            raise KeyError
    assert "done" not in stream.getvalue()


def test_the_terminal_shows_all_there_is() -> None:
    console = terminal()
    with Progress(200, "ppo", mode="terminal", console=console) as progress:
        for step in range(1, 6):
            progress.update(step, {**METRICS, "reward/mean": step / 10})
        progress.message("a note [bold]not markup[/bold]")
        progress.evaluation("heldout", {"eval/heldout/pass@1": 0.25})
    out = console.file.getvalue()
    for text in ("step 5/200", "0.5  ▁▃", "math 0.5, format 0.9", "KL", "effective sample size", "3,210", "elapsed"):
        assert text in out, text
    for text in (
        "Rollout#0 75% · Updater#0 25%",
        "5 so far",
        "mean 45.2, longest 128",
        "pass@1 0.25",
        "[bold]not markup[/bold]",
    ):
        assert text in out, text


def test_the_terminal_before_the_first_step() -> None:
    console = terminal()
    with Progress(2, "x", mode="terminal", console=console):
        pass
    assert "the first step is running" in console.file.getvalue()


def test_jupyter_updates_one_display_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[str] = []
    handle = SimpleNamespace(update=lambda page: shown.append(page.data))
    monkeypatch.setattr(IPython.display, "display", lambda page, display_id: shown.append(page.data) or handle)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    with Progress(2, "<script>alert(1)</script>") as progress:
        assert progress.mode == "jupyter"
        progress.update(1, {**METRICS, "eval": 1})
        progress.message("<img src=x onerror=alert(1)>")
        progress.update(2, METRICS)
    assert len(shown) >= 3
    page = shown[-1]
    assert "step 2/2" in page and "width:100.0%" in page and "done" in page
    assert "<script" not in page and "<img" not in page
    assert "color:#e03131;font-weight:600" in page, "what is not finite is red"


def test_how_the_mode_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert find_mode(Terminal()) == "terminal"
    assert find_mode(io.StringIO()) == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert find_mode(Terminal()) == "plain"
    monkeypatch.setattr(sys, "stdout", None)
    assert find_mode() == "silent"


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_closed_pipe_does_not_stop_the_run(error: type[Exception]) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with Progress(2, "x", mode="plain", stream=Closed()) as progress:
        progress.update(1, METRICS)
        progress.message("still going")


def test_a_stream_that_knows_only_ascii() -> None:
    raw = io.BytesIO()
    with Progress(1, "naïve", mode="plain", stream=io.TextIOWrapper(raw, encoding="ascii", write_through=True)) as p:
        p.update(1, METRICS)
    assert b"grad ?" in raw.getvalue()


def test_silent_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, "x", mode="silent") as progress:
        progress.update(1, METRICS)
        progress.evaluation("e", {})
        progress.message("m")
    assert capsys.readouterr().out == ""


def test_steps_after_a_resume() -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream) as progress:
        progress.update(8, {"time/step": 3.0})
    assert "step  8/10 | 3.0s | ETA 6.0s" in stream.getvalue()


def test_numbers_as_people_read_them() -> None:
    assert [number(v) for v in (0, 1.0, 0.53125, 12.3456, 1234.5, 1234567, 3e-6, -0.25, 1e12)] == [
        "0",
        "1",
        "0.5312",
        "12.35",
        "1,234",
        "1,234,567",
        "3.00e-06",
        "-0.25",
        "1.00e+12",
    ]
    assert [number(v) for v in (math.nan, math.inf, -math.inf, "text")] == ["NaN", "∞", "−∞", "text"]
    assert [seconds(v) for v in (0.42, 12.34, 59.99, 187, 3723)] == ["0.42s", "12.3s", "60.0s", "3:07", "1:02:03"]
    assert sparkline([1.0, 1.0]) == "▁▁" and sparkline([]) == "" and sparkline([0.0, 7.0]) == "▁█"
