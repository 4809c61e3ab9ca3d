"""Live progress of a run: a table in a terminal or in Jupyter, one line a step elsewhere (CI logs, pipes)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from flowrl.drawing.svg import escape, one_line
from flowrl.runtime.formats import is_bad, pairs, seconds
from flowrl.runtime.run_view import RunView

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Mode = Literal["terminal", "plain", "jupyter", "silent"]


class Display(Protocol):
    """One way of showing a RunView."""

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
        self.state = RunView(num_steps, one_line(title))
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
        self._show(lambda: self._display.message(one_line(text)))

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """An evaluation is done; its numbers stay on the screen until the next one of that name."""
        shown = {n.removeprefix(f"eval/{name}/"): v for n, v in metrics.items() if v is not None}
        self.state.evaluations[one_line(name)] = shown
        if self.mode == "plain":
            self.message(f"eval {name} at step {self.state.step}: {pairs(shown)}")
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


def _open_display(mode: Mode, state: RunView, stream: IO[str] | None, console: Console | None) -> Display:
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

    def __init__(self, state: RunView, stream: IO[str] | None) -> None:
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

    def __init__(self, state: RunView, stream: IO[str] | None, console: Console | None) -> None:
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
        head.add_row(bar, Text(state.clock(), style="dim"))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, text in state.rows():
            table.add_row(Text(name), Text(text, style="bold red" if is_bad(text) else ""))
        if not state.metrics:
            table.add_row(Text("waiting"), Text("the first step is running", style="dim"))
        title = Text.assemble((state.title or "flowrl", "bold"), f"  step {state.step}/{state.num_steps}")
        return Panel(Group(head, table), title=title, title_align="left", border_style="blue")


class _Jupyter:
    """An HTML table that is replaced in place, a few times a second at most."""

    def __init__(self, state: RunView) -> None:
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
        # Colours of the notebook's own theme, so that it is readable in a light and a dark one; not a table, which
        # notebooks style in their own way.
        bad = ";color:#e03131;font-weight:600"
        rows = "".join(
            f'<span style="opacity:.7">{escape(name)}</span>'
            f'<span style="white-space:pre-wrap{bad if is_bad(text) else ""}">{escape(text)}</span>'
            for name, text in state.rows()
        )
        notes = "".join(f'<div style="opacity:.75">{escape(m)}</div>' for m in state.messages)
        return (
            '<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:60em;border:1px solid #8884;'
            'border-radius:8px;padding:10px 14px">'
            f'<div style="display:flex;justify-content:space-between;gap:2em"><b>{escape(state.title or "flowrl")}'
            f"</b><span>step {state.step}/{state.num_steps} · {escape(state.clock())}</span></div>"
            '<div style="background:#8883;border-radius:3px;height:6px;margin:6px 0 8px">'
            f'<div style="background:#4c6ef5;border-radius:3px;height:6px;width:{share:.1%}"></div></div>'
            f'<div style="display:grid;grid-template-columns:max-content 1fr;gap:1px 18px">{rows}</div>{notes}</div>'
        )
