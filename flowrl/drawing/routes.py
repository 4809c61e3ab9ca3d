"""Where the edges of a drawn flow go, once its boxes have layers and an x: gaps between layers, ports, lanes.

Data edges run down as curves. Weight edges run against them: out of the writer's side, along a lane beside
all boxes, and into the reader's side; where boxes are in the way, along a track in the gap above the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrl.drawing.layout import Item, Layout
from flowrl.drawing.svg import Point, text_width

STEM = 26.0  # below a box: the label of what leaves it
CURVE = 38.0  # where curves go from one x to another
TRACK = 16.0  # one track of weight edges
EDGE = 16.0  # above a box: arrow heads
LANE = 14.0  # between lanes
SIDE = 12.0  # from a box to the turn into its side, less than the gap between boxes
SIDE_STEP = 15.0  # between the ports on one side


@dataclass(frozen=True)
class WeightLine:
    """A weight edge to route. Lines of one writer and one model share their lane."""

    writer: str
    reader: str
    model: str
    text: str


@dataclass
class Routes:
    """The geometry of a picture.

    Args:
        top: y of the top of each layer's band.
        bottom: y of its bottom.
        height: y of the lower end of the picture.
        left: x of the left end, 0 or less: lanes may lie left of all boxes.
        right: x of the right end.
        weights: per weight line its corners.
        labels: (x, y, text, model) of each label of weight lines.
    """

    top: list[float] = field(default_factory=list)
    bottom: list[float] = field(default_factory=list)
    height: float = 0.0
    left: float = 0.0
    right: float = 0.0
    weights: list[list[Point]] = field(default_factory=list)
    labels: list[tuple[float, float, str, str]] = field(default_factory=list)

    def middle(self, item: Item) -> float:
        """y of the centre of a box."""
        return (self.top[item.layer] + self.bottom[item.layer]) / 2


def route(layout: Layout, weights: Sequence[WeightLine]) -> Routes:
    """Place layers and weight lines."""
    return _Router(layout, weights).routes


class _Router:
    def __init__(self, layout: Layout, weights: Sequence[WeightLine]) -> None:
        self.layout = layout
        self.weights = weights
        self.routes = Routes()
        self.sides = self._choose_sides()
        self.room = self._label_room()
        self.ports = self._count_ports()
        self.tracks = self._count_tracks()
        self._place_layers()
        self._place_weights()

    def _box(self, label: str) -> Item:
        return self.layout.boxes[label]

    def _is_direct(self, line: WeightLine) -> bool:
        """Whether the reader is right below the writer: then the line is a curve like a data edge."""
        return self._box(line.reader).layer == self._box(line.writer).layer + 1

    def _choose_sides(self) -> dict[tuple[str, str], int]:
        """-1 (left) or 1 (right) for each lane: where fewer boxes are in its way, or else fewer lanes."""
        ends: dict[tuple[str, str], list[str]] = {}
        for line in self.weights:
            if not self._is_direct(line):
                ends.setdefault((line.writer, line.model), [line.writer]).append(line.reader)
        sides: dict[tuple[str, str], int] = {}
        for lane, labels in ends.items():
            blocked = {s: sum(not self._is_outermost(self._box(n), s) for n in labels) for s in (1, -1)}
            used = {s: list(sides.values()).count(s) for s in (1, -1)}
            sides[lane] = min((1, -1), key=lambda s: (blocked[s], used[s]))
        return sides

    def _label_room(self) -> dict[int, float]:
        """By side, the room beside the boxes that the widest label needs."""
        room = {-1: 0.0, 1: 0.0}
        for line in self.weights:
            side = self.sides.get((line.writer, line.model))
            if side is not None:
                room[side] = max(room[side], text_width(line.text, 11))
        return room

    def _is_outermost(self, box: Item, side: int) -> bool:
        others = [i for i in self.layout.layers[box.layer] if i.label is not None and i is not box]
        return all((other.x < box.x) if side > 0 else (other.x > box.x) for other in others)

    def _count_ports(self) -> dict[tuple[str, int], list[tuple[str, tuple[str, str]]]]:
        """By (box, side), what enters ("in") or leaves ("out") there, with its lane."""
        ports: dict[tuple[str, int], list[tuple[str, tuple[str, str]]]] = {}
        for line in self.weights:
            lane = (line.writer, line.model)
            if self._is_direct(line):
                continue
            for label, port in ((line.writer, ("out", lane)), (line.reader, ("in", lane))):
                there = ports.setdefault((label, self.sides[lane]), [])
                if port not in there:
                    there.append(port)
        return ports

    def _gap_of(self, label: str, way: str) -> int:
        """The gap that a line uses to get around neighbours: above a reader, below a writer."""
        return self._box(label).layer + (1 if way == "out" else 0)

    def _count_tracks(self) -> dict[int, list[tuple[int, tuple[str, str]]]]:
        """By gap, the (side, lane) pairs that need a track of their own there."""
        tracks: dict[int, list[tuple[int, tuple[str, str]]]] = {}
        for (label, side), there in self.ports.items():
            if not self._is_outermost(self._box(label), side):
                for way, lane in there:
                    used = tracks.setdefault(self._gap_of(label, way), [])
                    if (side, lane) not in used:
                        used.append((side, lane))
        return tracks

    def _place_layers(self) -> None:
        layers, y = self.layout.layers, 0.0
        for index, layer in enumerate(layers):
            tracks = len(self.tracks.get(index, ())) * TRACK
            if index == 0:
                y = tracks + (EDGE if tracks else 0.0)
            else:
                crossed = any(item.below for item in layers[index - 1])
                y += (STEM + CURVE if crossed else CURVE) + tracks + EDGE
            self.routes.top.append(y)
            y += max((item.height for item in layer), default=0.0)
            self.routes.bottom.append(y)
        tracks = len(self.tracks.get(len(layers), ())) * TRACK
        self.routes.height = y + tracks + (EDGE if tracks else 0.0)

    def _place_weights(self) -> None:
        lanes = self._lane_positions()
        xs = [*lanes.values(), 0.0, self.layout.width]
        self.routes.left, self.routes.right = min(xs), max(xs)
        labelled: set[tuple[int, float, str]] = set()
        for line in self.weights:
            lane = (line.writer, line.model)
            if self._is_direct(line):
                self._place_direct(line)
                continue
            side, x = self.sides[lane], lanes[lane]
            out, into = self._approach(line.writer, "out", lane), self._approach(line.reader, "in", lane)
            self.routes.weights.append([*out, (x, out[-1][1]), (x, into[-1][1]), *into[::-1]])
            y = into[-1][1]
            if (side, y, line.text) not in labelled:
                labelled.add((side, y, line.text))
                edge = self.layout.width if side > 0 else 0.0
                middle = edge + side * (self.room[side] / 2 + 14)
                self.routes.labels.append((middle, y, line.text, line.model))

    def _place_direct(self, line: WeightLine) -> None:
        writer, reader = self._box(line.writer), self._box(line.reader)
        aside = min(writer.width, reader.width) / 4  # not where data edges leave and arrive
        start = (writer.x + aside, self.routes.middle(writer) + writer.height / 2)
        end = (reader.x + aside, self.routes.middle(reader) - reader.height / 2)
        self.routes.weights.append([start, end])
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        self.routes.labels.append((x, y, line.text, line.model))

    def _lane_positions(self) -> dict[tuple[str, str], float]:
        """x of each lane; those that reach over more layers lie further out."""

        def reach(lane: tuple[str, str]) -> int:
            readers = [line.reader for line in self.weights if (line.writer, line.model) == lane]
            return self._box(lane[0]).layer - min(self._box(r).layer for r in readers)

        positions: dict[tuple[str, str], float] = {}
        for side in (1, -1):
            lanes = sorted((lane for lane in self.sides if self.sides[lane] == side), key=reach)
            start = self.layout.width if side > 0 else 0.0
            for index, lane in enumerate(lanes):
                positions[lane] = start + side * (self.room[side] + 28 + index * LANE)
        return positions

    def _approach(self, label: str, way: str, lane: tuple[str, str]) -> list[Point]:
        """From the side of a box to where nothing is between it and the lane."""
        box, side = self._box(label), self.sides[lane]
        there = self.ports[label, side]
        index = there.index((way, lane))
        y = self.routes.middle(box) + (index - (len(there) - 1) / 2) * SIDE_STEP
        start = (box.x + side * box.width / 2, y)
        if self._is_outermost(box, side):
            return [start]
        gap = self._gap_of(label, way)
        used = self.tracks[gap]
        track = (len(used) - 1 - used.index((side, lane))) * TRACK
        end = self.routes.top[gap] if gap < len(self.routes.top) else self.routes.height
        x = start[0] + side * (SIDE + 5 * index)
        return [start, (x, y), (x, end - EDGE - track)]
