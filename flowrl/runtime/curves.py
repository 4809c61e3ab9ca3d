"""Curves of a run as inline SVG, drawn by matplotlib in the colours of the page around them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.drawing.svg import escape
from flowrl.runtime.formats import number

#: Readable on white and on near-black.
COLOURS = ("#4c6ef5", "#f76707", "#12b886", "#e64980", "#7950f2", "#fab005", "#15aabf", "#868e96")
# A colour that nothing else has: it becomes the colour of the text around the picture.
_TEXT = "#010203"
_RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flowrl",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "axes.unicode_minus": True,
}
_MAX_POINTS = 2000


@dataclass(frozen=True)
class Curve:
    """One chart: by name of the metric, its (step, value) points by step."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


def draw_curves(curves: Sequence[Curve]) -> tuple[list[str], str]:
    """A ``<figure>`` for each chart; without matplotlib none, and a note that says so."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except Exception as error:  # a broken install raises more than ImportError; a report must come all the same
        return [], (
            f"There are no curves: matplotlib cannot be used ({type(error).__name__}: {error}). The numbers are in "
            "metrics.parquet. To draw them: pip install matplotlib, then write the report again."
        )
    with matplotlib.rc_context(_RC):
        return [_figure(curve, Figure) for curve in curves], ""


def _figure(curve: Curve, figure_class: Any) -> str:
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(curve.lines)}
    keys, lost = "", 0
    for name, points in curve.lines.items():
        lost += sum(not math.isfinite(v) for _, v in points)
        if len(curve.lines) > 1:
            keys += f'<span><i style="background:{colours[name]}"></i>{escape(name, 80)} {_last(points)}</span>'
    last = _last(next(iter(curve.lines.values()))) if len(curve.lines) == 1 else ""
    notes = f'<span class="bad">{lost} not finite (marked ×)</span>' if lost else ""
    return (
        f'<figure class="curve"><figcaption>{escape(curve.title, 120)}'
        f'{f"""<span class="last">{last}</span>""" if last else ""}</figcaption>'
        f'{_svg(curve, colours, figure_class)}<div class="key">{keys}{notes}</div></figure>'
    )


def _last(points: Sequence[tuple[int, float]]) -> str:
    value = points[-1][1]
    return number(value) if math.isfinite(value) else f'<span class="bad">{number(value)}</span>'


def _svg(curve: Curve, colours: Mapping[str, str], figure_class: Any) -> str:
    from matplotlib.ticker import MaxNLocator

    figure = figure_class(figsize=(4.2, 2.1))
    axes = figure.add_axes((0.125, 0.12, 0.86, 0.8))  # room for tick labels; to measure them takes ten times as long
    for name, points in curve.lines.items():
        points = _thin(points)
        steps = [s for s, _ in points]
        values = [v if math.isfinite(v) else math.nan for _, v in points]
        finite = [v for v in values if not math.isnan(v)]
        marker = "o" if len(finite) <= 30 else None
        axes.plot(steps, values, color=colours[name], linewidth=1.5, marker=marker, markersize=2.6)
        missing = [s for s, v in points if not math.isfinite(v)]
        if missing:
            transform = axes.get_xaxis_transform()
            axes.plot(missing, [0.04] * len(missing), "x", color="#e03131", markersize=5, transform=transform)
    for spine in axes.spines.values():
        spine.set_color(_TEXT)
        spine.set_alpha(0.35)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_TEXT, labelsize=8, length=3)
    axes.grid(True, color=_TEXT, alpha=0.12, linewidth=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :]  # without the XML declaration, which HTML must not have
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    return drawn.replace(_TEXT, "currentColor").strip()


def _thin(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most about ``_MAX_POINTS`` points, first and last among them: a screen shows no more."""
    stride = -(-len(points) // _MAX_POINTS)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
