"""The pictures of docs/benchmarks.md, as SVG that is the same for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: Okabe and Ito's colours, which the colour-blind tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "D")
Line = Sequence[tuple[float, float]]


def lines(
    path: Path,
    named: Mapping[str, Line],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = True,
    log_y: bool = True,
    target: tuple[float, str] | None = None,
) -> None:
    """Draws lines by name, and a dashed one for what is asked for.

    Args:
        target: a height, and what it is.
    """
    matplotlib.rcParams.update({"svg.hashsalt": "flowrl", "svg.fonttype": "none", "font.size": 10})
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for (name, points), color, marker in zip(named.items(), COLORS, MARKERS, strict=False):
        shown = [(a, b) for a, b in points if math.isfinite(b)]
        axes.plot([a for a, _ in shown], [b for _, b in shown], marker=marker, color=color, label=name, linewidth=1.6)
    if target is not None:
        axes.axhline(target[0], color="#666666", linestyle="--", linewidth=1, label=target[1])
    ticks = sorted({a for points in named.values() for a, _ in points})
    if log_x:
        axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{int(tick):,}" for tick in ticks], rotation=0 if len(ticks) < 9 else 30)
    axes.minorticks_off()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "flowrl benchmarks"})
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
