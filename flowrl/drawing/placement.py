"""Where a plan's calls run, as SVG: nodes and their devices in the colours of the meshes, and memory.

Nodes side by side that run the same are drawn once, so that 1,024 devices are as easy to read as eight. Equal mappings give
equal pictures, byte for byte; what comes from users is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from flowrl.compiler.figures import count, devices_text, pool_text, share, size, span
from flowrl.compiler.mapping import Mapping, PlannedMesh, Stretch
from flowrl.drawing import svg
from flowrl.drawing.svg import element, escape, fit, one_line, text_width

#: Colours of meshes, in their order.
MESH_COLOURS = (
    "#4263eb", "#e8590c", "#2b8a3e", "#c2255c", "#0c8599", "#6741d9", "#e67700", "#862e9c", "#5c940d", "#495057",
)  # fmt: skip
_NOTHING = "#e9ecef"
_MARGIN, _WIDTH = 20.0, 1010.0
_BOX, _PER_LINE, _CARD_GAP = 32.0, 8, 18.0
#: Of a node, devices that are drawn one by one; where there are more, those that run the same are one box.
_SINGLE = 16
_BAR = 420.0


def placement_svg(mapping: Mapping) -> str:
    """Nodes with their devices, each in the colours of the meshes that it is of; a legend of the meshes; and for each stretch
    of devices with the same units, its memory."""
    return _Placement(mapping).svg()


@dataclass(frozen=True)
class _Card:
    """Nodes ``first`` … ``last`` of a pool, which run the same: (first device, one past the last, meshes) within a node."""

    pool: int
    first: int
    last: int
    runs: tuple[tuple[int, int, tuple[int, ...]], ...]


class _Placement:
    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.colours = [MESH_COLOURS[i % len(MESH_COLOURS)] for i in range(len(mapping.meshes))]
        self.parts: list[str] = []
        self.y = _MARGIN + 30

    def svg(self) -> str:
        """The whole picture."""
        title = f"Placement on {' and '.join(pool_text(pool) for pool in self.mapping.pools)}"
        for pool in range(len(self.mapping.pools)):
            self._pool(pool)
        self._legend()
        self._memory()
        width, height = _WIDTH + 2 * _MARGIN, self.y + _MARGIN
        return element(
            "svg",
            element("style", ".flowrl-device:hover rect{stroke-width:2.4}"),
            element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=10, fill=svg.PAPER, stroke=svg.BORDER),
            svg.label(_MARGIN, _MARGIN + 13, fit(title, 15, _WIDTH), size=15, font_weight=600),
            *self.parts,
            xmlns="http://www.w3.org/2000/svg",
            class_="flowrl-placement",
            width=width,
            height=height,
            viewBox=f"0 0 {svg.coordinate(width)} {svg.coordinate(height)}",
            role="img",
            aria_label=title,
            style="max-width:100%;height:auto",
            font_family=svg.FONT,
            font_size=11,
        )

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _pool(self, pool: int) -> None:
        if len(self.mapping.pools) > 1:
            text = f"pool {pool}: {pool_text(self.mapping.pools[pool])}"
            self.parts.append(svg.label(_MARGIN, self.y + 10, fit(text, 12, _WIDTH), size=12, font_weight=600))
            self.y += 22
        x, tallest = _MARGIN, 0.0
        for card in cards(self.mapping, pool):
            width, height = self._card_size(card)
            if x > _MARGIN and x + width > _MARGIN + _WIDTH:
                x, self.y, tallest = _MARGIN, self.y + tallest + _CARD_GAP, 0.0
            self.parts.append(self._card(card, x, self.y, width, height))
            x, tallest = x + width + _CARD_GAP, max(tallest, height)
        self.y += tallest + _CARD_GAP

    def _card_size(self, card: _Card) -> tuple[float, float]:
        boxes = list(self._boxes(card))
        right, bottom = max(x + w for x, _, w, _, _, _ in boxes), max(y for _, y, *_ in boxes) + _BOX
        return max(right, 1.1 * text_width(self._card_title(card), 11)) + 20, bottom + 36

    def _card_title(self, card: _Card) -> str:
        nodes = card.last - card.first + 1
        return f"node {card.first}" if nodes == 1 else f"{nodes:,} nodes, {span(card.first, card.last)}"

    def _boxes(self, card: _Card) -> Iterator[tuple[float, float, float, int, int, tuple[int, ...]]]:
        """(x, y, width, first device, one past the last, meshes) of each box, from the card's upper left corner."""
        devices = self.mapping.pools[card.pool].gpus_per_node
        for k, (start, stop, meshes) in enumerate(card.runs):
            if devices > _SINGLE:
                yield (k % 4) * (2 * _BOX + 3), (k // 4) * (_BOX + 3), 2 * _BOX, start, stop, meshes
                continue
            for d in range(start, stop):
                yield (d % _PER_LINE) * (_BOX + 3), (d // _PER_LINE) * (_BOX + 3), _BOX, d, d + 1, meshes

    def _card(self, card: _Card, left: float, top: float, width: float, height: float) -> str:
        paper = {"rx": 6, "fill": svg.PAPER, "stroke": svg.BORDER}
        behind = 2 if card.last > card.first else 0
        parts = [
            element("rect", x=left + 3 * k, y=top + 3 * k, width=width, height=height, **paper)
            for k in range(behind, -1, -1)
        ]
        parts.append(svg.label(left + 10, top + 17, self._card_title(card), font_weight=600))
        per_node = self.mapping.pools[card.pool].gpus_per_node
        for x, y, wide, first, last, meshes in self._boxes(card):
            names = ", ".join(one_line(self.mapping.meshes[m].name) for m in meshes)
            units = [
                unit.label for unit in self.mapping.units if unit.mesh in {self.mapping.meshes[m].name for m in meshes}
            ]
            if card.first == card.last:
                start = card.first * per_node + first
                where = devices_text(self.mapping, card.pool, start, start + last - first)
            else:
                where = f"{'device' if last - first == 1 else 'devices'} {span(first, last - 1)} of {self._card_title(card)}"
            tip = f"{where}\n{f'mesh {names}' if names else 'no mesh'}\n{', '.join(map(one_line, units)) or 'runs nothing'}"
            parts.append(self._box(left + 10 + x, top + 26 + y, wide, span(first, last - 1), meshes, tip))
        return element("g", *parts, class_="flowrl-node-card", data_nodes=card.last - card.first + 1)

    def _box(self, x: float, y: float, width: float, text: str, meshes: tuple[int, ...], tip: str) -> str:
        """A device, or several: a stripe for each mesh."""
        colours = [self.colours[m] for m in meshes] or [_NOTHING]
        each = _BOX / len(colours)
        stripes = [
            element("rect", x=x, y=y + k * each, width=width, height=each, fill=colour)
            for k, colour in enumerate(colours)
        ]
        return element(
            "g",
            element("title", escape(tip)),
            *stripes,
            element("rect", x=x, y=y, width=width, height=_BOX, rx=2, fill="none", stroke=svg.PAPER, stroke_width=1),
            svg.label(
                x + width / 2,
                y + _BOX / 2 + 4,
                text,
                size=10,
                fill=svg.PAPER if meshes else svg.FADED,
                text_anchor="middle",
                font_weight=600,
            ),
            class_="flowrl-device",
        )

    # -- what the colours are, and memory ------------------------------------------------------------------------------

    def _legend(self) -> None:
        for mesh, colour in zip(self.mapping.meshes, self.colours, strict=True):
            units = [one_line(unit.label) for unit in self.mapping.units if unit.mesh == mesh.name]
            text = f"{one_line(mesh.name)}: {count(mesh.size, 'device')}, {', '.join(units) or 'nothing'}"
            self.parts.append(
                element("rect", x=_MARGIN, y=self.y, width=14, height=12, rx=3, fill=colour)
                + svg.label(_MARGIN + 20, self.y + 10, fit(text, 11, _WIDTH - 20))
            )
            self.y += 19
        self.y += 10

    def _memory(self) -> None:
        if not self.mapping.stretches:
            return
        self.parts.append(
            svg.label(_MARGIN, self.y + 10, "Memory of a device, estimated", size=12, font_weight=600)
            + self._key(_MARGIN + 220, "held between calls", "#4263eb")
            + self._key(_MARGIN + 370, "more while the largest runs", "#91a7ff")
            + self._key(_MARGIN + 570, "free", _NOTHING)
        )
        self.y += 22
        for stretch in sorted(self.mapping.stretches, key=lambda s: (s.pool, s.start)):
            self.parts.append(self._memory_bar(stretch))
            self.y += 22

    def _key(self, x: float, text: str, colour: str) -> str:
        box = element("rect", x=x, y=self.y, width=14, height=12, rx=3, fill=colour)
        return box + svg.label(x + 20, self.y + 10, text, fill=svg.FADED)

    def _memory_bar(self, stretch: Stretch) -> str:
        needed = stretch.held + stretch.transient
        scale = _BAR / (max(needed, stretch.capacity) or 1.0)
        name = devices_text(self.mapping, stretch.pool, stretch.start, stretch.stop)
        text = f"{size(needed)} of {size(stretch.capacity)}"
        full = needed / stretch.capacity if stretch.capacity else 0.0
        left, y = _MARGIN + 200, self.y
        fits = needed <= stretch.capacity
        tip = f"{name}\n{size(stretch.held)} held, {size(stretch.transient)} more while the largest runs\n{share(full)} full"
        return element(
            "g",
            element("title", escape(f"{tip}\n{', '.join(map(one_line, stretch.units))}")),
            svg.label(_MARGIN, y + 12, fit(name, 11, 190)),
            element("rect", x=left, y=y, width=stretch.capacity * scale, height=15, fill=_NOTHING),
            element("rect", x=left, y=y, width=stretch.held * scale, height=15, fill="#4263eb"),
            element(
                "rect", x=left + stretch.held * scale, y=y, width=stretch.transient * scale, height=15, fill="#91a7ff"
            ),
            svg.label(left + _BAR + 10, y + 12, text, fill=svg.INK if fits else "#c92a2a"),
            class_="flowrl-memory",
        )


def cards(mapping: Mapping, pool: int) -> Iterator[_Card]:
    """Nodes of a pool; those side by side that run the same are one."""
    here = mapping.pools[pool]
    meshes = [(i, mesh) for i, mesh in enumerate(mapping.meshes) if mesh.pool == pool]
    first, before = 0, None
    for node in range(here.nodes):
        runs = _runs(node * here.gpus_per_node, here.gpus_per_node, meshes)
        if before is not None and runs != before:
            yield _Card(pool, first, node - 1, before)
            first = node
        before = runs
    if before is not None:
        yield _Card(pool, first, here.nodes - 1, before)


def _runs(
    base: int, devices: int, meshes: list[tuple[int, PlannedMesh]]
) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Devices of a node side by side that are of the same meshes."""
    cuts = {base, base + devices}
    for _, mesh in meshes:
        cuts |= {end for end in (mesh.start, mesh.start + mesh.size) if base < end < base + devices}
    ends = sorted(cuts)
    return tuple(
        (start - base, stop - base, tuple(i for i, m in meshes if m.start <= start and stop <= m.start + m.size))
        for start, stop in pairwise(ends)
    )
