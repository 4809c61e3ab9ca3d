"""Live progress of a run: a table in a terminal, an HTML table in Jupyter, one line a step elsewhere (CI logs, pipes)."""

from __future__ import annotations

import contextlib
import html
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Mode = Literal["terminal", "plain", "jupyter", "silent"]

#: What is shown, in this order: the name of the metric, the name on the screen.
SHOWN = (
    ("loss", "loss"),
    ("kl", "KL"),
    ("entropy", "entropy"),
    ("clip_fraction", "clip fraction"),
    ("grad_norm", "gradient norm"),
    ("learning_rate", "learning rate"),
    ("ess", "effective sample size"),
    ("tokens_per_second", "tokens/s"),
    ("skipped_steps", "skipped steps"),
)

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 40
_MESSAGES = 6


@dataclass
class State:
    """What is known of the run: what every display draws from."""

    num_steps: int
    title: str
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    first_step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    last_update: float | None = None
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    done: bool = False

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        took = metrics.get("time/step")
        if not _is_number(took):
            took = now - (self.last_update if self.last_update is not None else self.started)
        self.step_seconds.append(float(took))
        self.last_update = now
        self.step = step
        self.metrics = {n: v for n, v in metrics.items() if v is not None}
        if _is_number(self.metrics.get("reward/mean")):
            self.rewards.append(float(self.metrics["reward/mean"]))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """From the mean of the last steps; None before the first."""
        if not self.step_seconds or self.step >= self.num_steps:
            return None
        return sum(self.step_seconds) / len(self.step_seconds) * (self.num_steps - self.step)

    def rows(self) -> Iterator[tuple[str, str]]:
        """(name, text) of what is shown; absent metrics are left out."""
        m = self.metrics
        if "reward/mean" in m:
            parts = _below(m, "reward", skip=("mean",))
            detail = f"   {_pairs(parts)}" if parts else ""
            yield "reward", f"{number(m['reward/mean'])}  {sparkline(self.rewards)}{detail}"
        for name, shown in SHOWN:
            if name in m and not (name == "skipped_steps" and not m[name]):
                yield shown, number(m[name])
        if "length/mean" in m:
            longest = f", longest {number(m['length/max'])}" if "length/max" in m else ""
            yield "response length", f"mean {number(m['length/mean'])}{longest}"
        if "time/step" in m:
            yield "step time", f"{seconds(m['time/step'])}   {self._shares()}".rstrip()
        for name, metrics in self.evaluations.items():
            yield f"eval {name}", _pairs(metrics)

    def _shares(self, limit: int = 4) -> str:
        """The calls that take the most time, with their share of the step."""
        total = self.metrics["time/step"]
        calls = _below(self.metrics, "time", skip=("step",))
        timed = sorted(((n, v) for n, v in calls.items() if _is_number(v)), key=lambda nv: -nv[1])[:limit]
        if not _is_number(total) or total <= 0:
            return ""
        return " · ".join(f"{name} {value / total:.0%}" for name, value in timed)

    def line(self) -> str:
        """The step in one line."""
        m = self.metrics
        width = len(str(self.num_steps))
        parts = [f"step {self.step:>{width}}/{self.num_steps}"]
        if "reward/mean" in m:
            components = _below(m, "reward", skip=("mean",))
            parts.append(
                f"reward {number(m['reward/mean'])}"
                + (f" ({_pairs(components)})" if len(components) > 1 else "")
            )
        short = {
            "clip_fraction": "clip",
            "grad_norm": "grad",
            "tokens_per_second": "tok/s",
            "skipped_steps": "skipped",
        }
        for name in ("loss", "kl", "entropy", "clip_fraction", "grad_norm", "ess", "tokens_per_second"):
            if name in m:
                parts.append(f"{short.get(name, name)} {number(m[name])}")
        if m.get("skipped_steps"):
            parts.append(f"skipped {number(m['skipped_steps'])}")
        if "length/mean" in m:
            parts.append(f"length {number(m['length/mean'])}")
        parts.append(
            seconds(m["time/step"]) if _is_number(m.get("time/step")) else seconds(self.step_seconds[-1])
        )
        if self.seconds_left is not None:
            parts.append(f"ETA {seconds(self.seconds_left)}")
        return " | ".join(parts)


class Display(Protocol):
    """One way of showing a State."""

    def start(self) -> None: ...
    def changed(self) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...


class Progress:
    """Shows how a run goes.

    Args:
        num_steps: how many steps the whole run has, those before a resume included.
        title: the name of the run.
        mode: "terminal", "plain", "jupyter" or "silent"; None finds out.
        stream: where "plain" and "terminal" write; by default ``sys.stdout``.
        console: the rich console of "terminal", for tests.

    Trouble of the display (a closed pipe, a lost terminal) silences it and never stops the run.

    Example::

        with Progress(200, "ppo") as progress:
            progress.update(1, {"reward/mean": 0.5, "time/step": 1.2})
    """

    def __init__(
        self,
        num_steps: int,
        title: str = "",
        *,
        mode: Mode | None = None,
        stream: IO[str] | None = None,
        console: Console | None = None,
    ) -> None:
        self.state = State(num_steps, clean(title))
        self.mode: Mode = mode or find_mode(stream)
        self._display: Display = _open_display(self.mode, self.state, stream, console)
        self._broken = False

    def __enter__(self) -> Progress:
        self._show(self._display.start)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.state.done = kind is None
        self._show(self._display.stop)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done. ``step`` counts completed steps: 1 after the first, ``num_steps`` after the last."""
        self.state.update(step, metrics)
        self._show(self._display.changed)

    def message(self, text: str) -> None:
        """Say something in a line of its own: a checkpoint, a note, a warning."""
        self._show(lambda: self._display.message(clean(text)))

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """An evaluation is done; its numbers stay on the screen until the next one of that name."""
        shown = {n.removeprefix(f"eval/{name}/"): v for n, v in metrics.items() if v is not None}
        self.state.evaluations[clean(name)] = shown
        if self.mode == "plain":
            self.message(f"eval {name}: {_pairs(shown)}")
        else:
            self._show(self._display.changed)

    def _show(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except (OSError, ValueError):  # BrokenPipeError, and "I/O operation on closed file"
            self._broken = True


def find_mode(stream: IO[str] | None = None) -> Mode:
    """Jupyter where a kernel runs this process, a terminal where the stream is one, plain lines elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if stream is None and shell is not None and hasattr(shell, "kernel"):
        return "jupyter"
    stream = stream or sys.stdout
    if stream is None:  # a process without standard streams
        return "silent"
    with contextlib.suppress(Exception):
        from rich.console import Console

        # rich knows TERM=dumb, NO_COLOR and FORCE_COLOR; a dumb terminal cannot redraw.
        console = Console(file=stream)
        return "terminal" if console.is_terminal and not console.is_dumb_terminal else "plain"
    return "plain"


def _open_display(mode: Mode, state: State, stream: IO[str] | None, console: Console | None) -> Display:
    if mode == "terminal":
        return _Terminal(state, stream, console)
    if mode == "jupyter":
        return _Jupyter(state)
    return _Plain(state, stream) if mode == "plain" else _Silent()


class _Silent:
    def start(self) -> None: ...

    def changed(self) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


class _Plain:
    """One line a step, flushed, so that a log can be followed."""

    def __init__(self, state: State, stream: IO[str] | None) -> None:
        self._state = state
        self._stream = stream

    def start(self) -> None:
        if self._state.title:
            self.message(f"{self._state.title}: {self._state.num_steps} steps")

    def changed(self) -> None:
        if self._state.step_seconds:
            self.message(self._state.line())

    def message(self, text: str) -> None:
        stream = self._stream or sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    def stop(self) -> None:
        state = self._state
        if state.done:
            self.message(f"done: {state.step} of {state.num_steps} steps in {seconds(state.elapsed)}")


class _Terminal:
    """A rich Live panel; messages scroll by above it."""

    def __init__(self, state: State, stream: IO[str] | None, console: Console | None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._state = state
        self._console = console or Console(file=stream)
        self._live = Live(
            get_renderable=self._panel, console=self._console, refresh_per_second=4, vertical_overflow="crop"
        )

    def start(self) -> None:
        self._live.start()

    def changed(self) -> None:
        self._live.refresh()

    def message(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text))

    def stop(self) -> None:
        self._live.stop()

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state = self._state
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(1, state.num_steps), completed=state.step)
        head.add_row(bar, Text(_clock(state), style="dim"))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, text in state.rows():
            table.add_row(Text(name), Text(text, style="bold red" if _is_bad(text) else ""))
        if not state.metrics:
            table.add_row(Text("waiting"), Text("the first step is running", style="dim"))
        title = Text.assemble((state.title or "flowrl", "bold"), f"  step {state.step}/{state.num_steps}")
        return Panel(Group(head, table), title=title, title_align="left", border_style="blue")


class _Jupyter:
    """An HTML table that is replaced in place, a few times a second at most."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._handle: Any = None
        self._last = 0.0

    def start(self) -> None:
        from IPython.display import HTML, display

        self._handle = display(HTML(self.html()), display_id=True)

    def changed(self) -> None:
        if time.monotonic() - self._last >= 0.25:
            self._draw()

    def message(self, text: str) -> None:
        self._state.messages.append(text)
        self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        self._last = time.monotonic()
        if self._handle is not None:
            self._handle.update(HTML(self.html()))

    def html(self) -> str:
        state = self._state
        share = min(1.0, state.step / max(1, state.num_steps))
        # Colours of the notebook's own theme, so that it is readable in a light and a dark one.
        rows = "".join(
            f'<tr><th style="text-align:left;font-weight:600;padding:1px 16px 1px 0;opacity:.75">{_h(name)}</th>'
            f'<td style="text-align:left;{"color:#e03131;font-weight:600" if _is_bad(text) else ""}">{_h(text)}</td></tr>'
            for name, text in state.rows()
        )
        notes = "".join(f'<div style="opacity:.75">{_h(m)}</div>' for m in state.messages)
        return (
            '<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:60em;border:1px solid #8884;'
            'border-radius:8px;padding:10px 14px">'
            f'<div style="display:flex;justify-content:space-between;gap:2em"><b>{_h(state.title or "flowrl")}'
            f"</b><span>step {state.step}/{state.num_steps} · {_h(_clock(state))}</span></div>"
            '<div style="background:#8883;border-radius:3px;height:6px;margin:6px 0 8px">'
            f'<div style="background:#4c6ef5;border-radius:3px;height:6px;width:{share:.1%}"></div></div>'
            f'<table style="border-collapse:collapse;margin:0">{rows}</table>{notes}</div>'
        )


def _clock(state: State) -> str:
    text = f"elapsed {seconds(state.elapsed)}"
    if state.done and state.step >= state.num_steps:
        return text + " · done"
    return text + (f" · ETA {seconds(state.seconds_left)}" if state.seconds_left is not None else "")


def _h(text: str) -> str:
    return html.escape(clean(text))


def _below(metrics: Mapping[str, Any], prefix: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The metrics under ``prefix/``, by the rest of their names."""
    start = f"{prefix}/"
    found = {n.removeprefix(start): v for n, v in metrics.items() if n.startswith(start)}
    return {n: v for n, v in found.items() if n not in skip}


def _pairs(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{clean(name)} {number(value)}" for name, value in metrics.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_bad(text: str) -> bool:
    return text.startswith(("NaN", "∞", "−∞"))


def number(value: Any) -> str:
    """A number in about four digits: ``0.5312``, ``12.3``, ``1,234``, ``3e-06``, ``NaN``, ``∞``."""
    if not isinstance(value, int | float):
        return clean(str(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration: ``0.42s``, ``12.3s``, ``3:07``, ``1:02:03``."""
    if not math.isfinite(value):
        return number(value)
    if value < 60:
        return f"{value:.2f}s" if value < 1 else f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: deque[float]) -> str:
    """The last values as a row of bars, from the least to the greatest of them."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in values)


def clean(text: str) -> str:
    """One line of printable text: names and messages may come from users and must not steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
