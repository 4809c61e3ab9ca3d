"""The timeline of a plan as SVG: devices down, estimated seconds across, a bar for each unit of each iteration.

Equal mappings give equal pictures, byte for byte; what comes from users is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowrl.compiler.figures import devices_text, seconds
from flowrl.compiler.mapping import Mapping, PlannedUnit, Slot
from flowrl.compiler.schedule import critical_slots, occupancy, warm_up
from flowrl.drawing import svg
from flowrl.drawing.picture import MODEL_COLOURS
from flowrl.drawing.svg import element, escape, fit, one_line, text_width

_MARGIN, _LABELS, _PLOT = 20.0, 190.0, 820.0
_ROW, _GAP, _HEAD = 34.0, 6.0, 52.0
#: Periods that are shown.
_PERIODS = 3
#: Iterations side by side are told apart by how strong their colour is.
_SHADES = ("1", "0.8", "0.62")
_LEAST_TEXT = 30.0


def timeline_svg(mapping: Mapping) -> str:
    """A few periods of the steady state, whatever runs in them: rows are stretches of devices with the same units, bars are
    units in the colour of their Model, hatched is what idles, and the outline is the cycle that sets the pace."""
    return _Timeline(mapping).svg()


def model_colours(mapping: Mapping) -> dict[str, str]:
    """By name of a Model its colour, in the order of the units."""
    names = dict.fromkeys(unit.model for unit in mapping.units)
    return {name: MODEL_COLOURS[i % len(MODEL_COLOURS)] for i, name in enumerate(names)}


class _Timeline:
    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.units: dict[str, PlannedUnit] = {unit.label: unit for unit in mapping.units}
        self.colours = model_colours(mapping)
        self.rows = sorted(mapping.stretches, key=lambda s: (s.pool, s.start))
        self.first = warm_up(mapping)
        complete = max((slot.iteration for slot in mapping.slots), default=-1) + 1 - self.first
        self.periods = max(1, min(_PERIODS, complete))
        self.start = self.first * mapping.period
        self.stop = self.start + self.periods * mapping.period
        self.critical = {(slot.unit, slot.iteration) for slot in critical_slots(mapping)}

    def svg(self) -> str:
        """The whole picture."""
        bottom = _HEAD + len(self.rows) * (_ROW + _GAP)
        legend, legend_height = self._legend()
        width, height = 2 * _MARGIN + _LABELS + _PLOT, 2 * _MARGIN + bottom + 26 + legend_height
        title = f"Timeline, estimated: {seconds(self.mapping.period)} an iteration in the steady state"
        empty = self.mapping.period <= 0 or not self.rows or not self.mapping.slots
        body = (
            [svg.label(0, 60, "Nothing takes time here.")]
            if empty
            else [*self._rows(), *self._axis(bottom), *self._bars()]
        )
        return element(
            "svg",
            element("style", ".flowrl-slot:hover rect{stroke-width:3}"),
            element(
                "defs",
                element(
                    "pattern",
                    element("path", d="M0,6 L6,0", stroke=svg.BORDER, stroke_width=1.2),
                    id="flowrl-idle",
                    width=6,
                    height=6,
                    patternUnits="userSpaceOnUse",
                ),
            ),
            element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=10, fill=svg.PAPER, stroke=svg.BORDER),
            svg.label(_MARGIN, _MARGIN + 13, title, size=15, font_weight=600),
            element("g", *body, transform=f"translate({svg.pair((_MARGIN, _MARGIN))})"),
            element("g", legend, transform=f"translate({svg.pair((_MARGIN, _MARGIN + bottom + 26))})"),
            xmlns="http://www.w3.org/2000/svg",
            class_="flowrl-timeline",
            width=width,
            height=height,
            viewBox=f"0 0 {svg.coordinate(width)} {svg.coordinate(height)}",
            role="img",
            aria_label=title,
            style="max-width:100%;height:auto",
            font_family=svg.FONT,
            font_size=11,
        )

    def _x(self, time: float) -> float:
        """Of a time within the window, else of its nearer end."""
        inside = min(max(time, self.start), self.stop)
        return _LABELS + _PLOT * (inside - self.start) / (self.stop - self.start)

    def _y(self, row: int) -> float:
        return _HEAD + row * (_ROW + _GAP)

    def _rows(self) -> Iterator[str]:
        by_place = {(o.pool, o.start): o for o in occupancy(self.mapping)}
        for i, row in enumerate(self.rows):
            y = self._y(i)
            name = devices_text(self.mapping, row.pool, row.start, row.stop)
            spent = by_place[row.pool, row.start]
            note = f"{100 * spent.utilisation:.0f} % busy, {seconds(spent.idle)} idle"
            yield element(
                "g",
                element("title", escape(f"{name}\n{note} of each iteration\n{', '.join(map(one_line, row.units))}")),
                svg.label(0, y + 14, fit(name, 11, _LABELS - 22), font_weight=600),
                svg.label(0, y + 28, fit(note, 10, _LABELS - 10), size=10, fill=svg.FADED),
            )
            yield element("rect", x=_LABELS, y=y, width=_PLOT, height=_ROW, fill="#f8f9fa")
            for start, stop in self._idle(row.units):
                yield element(
                    "rect",
                    element("title", escape(f"idle {seconds(stop - start)}")),
                    class_="flowrl-idle",
                    x=self._x(start),
                    y=y,
                    width=self._x(stop) - self._x(start),
                    height=_ROW,
                    fill="url(#flowrl-idle)",
                )

    def _idle(self, units: tuple[str, ...]) -> Iterator[tuple[float, float]]:
        """Times within the window in which none of these runs."""
        least, until = 1e-3 * self.mapping.period, self.start
        for slot in sorted((s for s in self.mapping.slots if s.unit in units), key=lambda s: s.start):
            if slot.start - until > least:
                yield until, min(slot.start, self.stop)
            until = max(until, slot.stop)
            if until >= self.stop:
                return
        if self.stop - until > least:
            yield until, self.stop

    def _bars(self) -> Iterator[str]:
        outlines = []
        for slot in self.mapping.slots:
            if slot.stop <= self.start or slot.start >= self.stop or slot.unit not in self.units:
                continue
            for first, last in self._spans(slot.unit):
                box = {
                    "x": self._x(slot.start),
                    "y": self._y(first),
                    "width": max(1.0, self._x(slot.stop) - self._x(slot.start)),
                    "height": self._y(last) + _ROW - self._y(first),
                }
                yield self._bar(slot, box)
                if (slot.unit, slot.iteration) in self.critical:
                    outlines.append(
                        element(
                            "rect", **box, rx=3, fill="none", stroke=svg.INK, stroke_width=2, class_="flowrl-critical"
                        )
                    )
        yield from outlines

    def _spans(self, unit: str) -> Iterator[tuple[int, int]]:
        """(first, last) of rows side by side that it runs on."""
        on = [i for i, row in enumerate(self.rows) if unit in row.units]
        first = None
        for i in on:
            first = i if first is None else first
            if i + 1 not in on:
                yield first, i
                first = None

    def _bar(self, slot: Slot, box: dict[str, float]) -> str:
        unit = self.units[slot.unit]
        colour = self.colours[unit.model]
        number = slot.iteration - self.first
        name = (
            f"{one_line(unit.label)} {number:+d}".replace("-", "−")
            if number < 0
            else f"{one_line(unit.label)} {number}"
        )
        moved = self._x(min(slot.start + unit.move_seconds, slot.stop)) - box["x"]
        tip = [
            f"{unit.label}, iteration {number}",
            f"{seconds(slot.stop - slot.start)}, estimated: from {seconds(max(0.0, slot.start - self.start))}",
            f"{unit.kind} {unit.model} on {unit.mesh}",
        ]
        tip += [f"{seconds(unit.move_seconds)} to bring its weights"] if unit.move_seconds else []
        tip += ["of the cycle that sets the pace"] if (slot.unit, slot.iteration) in self.critical else []
        middle = box["y"] + box["height"] / 2
        wide = box["width"] - 8 > _LEAST_TEXT
        return element(
            "g",
            element("title", escape("\n".join(tip))),
            element("rect", **box, rx=3, fill=svg.PAPER),
            element(
                "rect",
                **box,
                rx=3,
                fill=colour,
                fill_opacity=_SHADES[number % len(_SHADES)],
                stroke=svg.PAPER,
                stroke_width=1,
            ),
            element("rect", **{**box, "width": moved}, fill=svg.INK, fill_opacity="0.35") if moved >= 0.5 else "",
            svg.label(
                box["x"] + box["width"] / 2,
                middle + 4,
                fit(name, 11, box["width"] - 8),
                fill=svg.PAPER,
                text_anchor="middle",
                font_weight=600,
            )
            if wide
            else "",
            class_="flowrl-slot",
            data_unit=slot.unit,
            data_iteration=number,
        )

    def _axis(self, bottom: float) -> Iterator[str]:
        for k in range(self.periods + 1):
            x = self._x(self.start + k * self.mapping.period)
            yield element(
                "path",
                d=f"M{svg.pair((x, _HEAD - 14))} V{svg.coordinate(bottom)}",
                stroke=svg.FADED,
                stroke_dasharray="3 3",
            )
            if k < self.periods:
                yield svg.label(x + 5, _HEAD - 6, f"period {k}", size=10, fill=svg.FADED)
        step = _nice(self.stop - self.start)
        ticks = math.floor((self.stop - self.start) / step + 1e-9)
        for i in range(ticks + 1):
            x = self._x(self.start + i * step)
            yield element("path", d=f"M{svg.pair((x, bottom))} v5", stroke=svg.FADED)
            yield svg.label(x, bottom + 17, _tick(i * step), size=10, fill=svg.FADED, text_anchor="middle")

    def _legend(self) -> tuple[str, float]:
        """The legend, and its height."""
        entries: list[tuple[str, dict[str, object]]] = [
            (one_line(name), {"fill": colour, "rx": 3}) for name, colour in self.colours.items()
        ]
        entries.append(("weights brought", {"fill": svg.FADED}))
        entries.append(("idle", {"fill": "url(#flowrl-idle)", "stroke": svg.BORDER}))
        if self.critical:
            entries.append(("the cycle that sets the pace", {"fill": "none", "stroke": svg.INK, "stroke_width": 2}))
        x, y, out = 0.0, 6.0, ""
        for name, style in entries:
            name = fit(name, 11, 260)
            width = 20 + text_width(name, 11) + 18
            if x and x + width > _LABELS + _PLOT:
                x, y = 0.0, y + 20
            out += element("rect", x=x, y=y, width=14, height=12, **style) + svg.label(
                x + 20, y + 10, name, fill=svg.FADED
            )
            x += width
        return out, y + 16


def _nice(length: float) -> float:
    """A step of 1, 2 or 5 times a power of ten, of which a length has at most ten."""
    power = 10.0 ** math.floor(math.log10(length / 10))
    return next(m * power for m in (1, 2, 5, 10, 20) if length / (m * power) <= 10 + 1e-9)


def _tick(value: float) -> str:
    return f"{value * 1e3:.6g} ms" if 0 < value < 0.1 else f"{value:,.6g} s"
