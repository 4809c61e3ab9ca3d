"""Where the boxes of a drawn flow go: a small layered layout (Sugiyama, Tagawa & Toda 1981), pure Python.

Layers run from top to bottom along the longest paths of data edges. An edge that skips layers gets a bend
point in each of them, so that it bends around boxes; edges that leave one box with one label share their
bend points, as a bundle. Within a layer, barycentre sweeps reduce crossings; then isotonic regression gives
each item the x nearest to its neighbours' that keeps the order and the distances.

Everything is decided by the order in which boxes and edges are given: equal input, equal layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SWEEPS = 12
_ALIGNMENTS = 24


@dataclass(frozen=True)
class Line:
    """A data edge to lay out. Lines of one ``source`` and one ``bundle`` share their way."""

    source: str
    target: str
    bundle: str = ""


@dataclass
class Item:
    """A box, or a bend point of a bundle (then ``label`` is None)."""

    key: Hashable
    label: str | None
    layer: int
    width: float
    height: float = 0.0
    x: float = 0.0
    above: list[Item] = field(default_factory=list)
    below: list[Item] = field(default_factory=list)


@dataclass
class Layout:
    """The result: items by layer from left to right, with the x of their centres from 0 on.

    Args:
        layers: from top to bottom.
        boxes: the boxes by label.
        ways: per line its items, from the source's box over bend points to the target's box.
        width: from the left of the leftmost item to the right of the rightmost.
    """

    layers: list[list[Item]]
    boxes: dict[str, Item]
    ways: list[list[Item]]
    width: float


def lay_out(
    sizes: Mapping[str, tuple[float, float]],
    lines: Sequence[Line],
    hints: Sequence[tuple[str, str]] = (),
    *,
    gap: float = 46.0,
    bend_gap: float = 24.0,
) -> Layout:
    """Place boxes of the given (width, height).

    Args:
        lines: the edges; those that close a cycle are laid out backwards, a self-loop's way is the box alone.
        hints: (above, below) pairs that only place a box without lines: it comes below the other.
        gap: between boxes side by side.
        bend_gap: between a bend point and its neighbours.
    """
    layer_of = _assign_layers(list(sizes), lines, hints)
    boxes = {n: Item(("box", n), n, layer_of[n], *sizes[n]) for n in sizes}
    layers: list[list[Item]] = [[] for _ in range(max(layer_of.values(), default=0) + 1)]
    for item in boxes.values():
        layers[item.layer].append(item)
    ways = [_make_way(line, boxes, layers) for line in lines]
    for above, below in hints:
        if not boxes[below].above and boxes[below].layer == boxes[above].layer + 1:
            boxes[above].below.append(boxes[below])
            boxes[below].above.append(boxes[above])
    _reduce_crossings(layers)
    width = _assign_x(layers, gap, bend_gap)
    return Layout(layers, boxes, ways, width)


# -- layers --------------------------------------------------------------------------------------------------


def _assign_layers(names: list[str], lines: Sequence[Line], hints: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Longest path from the top. Then a source sinks to just above its first reader, and so does what hangs
    on such sources alone."""
    after: dict[str, list[str]] = {n: [] for n in names}
    for line in lines:
        if line.source != line.target and line.target not in after[line.source]:
            after[line.source].append(line.target)
    touched = {n for line in lines for n in (line.source, line.target)}
    for above, below in hints:
        if below not in touched and above != below:
            after[above].append(below)
    order = _topological(names, after)
    place = {n: i for i, n in enumerate(order)}
    layer = dict.fromkeys(names, 0)
    sinks = dict.fromkeys(names, True)
    for name in order:
        for target in after[name]:
            if place[target] > place[name]:
                layer[target] = max(layer[target], layer[name] + 1)
                sinks[target] &= sinks[name] and len(after[name]) == 1
    for name in reversed(order):
        readers = [layer[t] for t in after[name] if place[t] > place[name]]
        if readers and sinks[name]:
            layer[name] = min(readers) - 1
    return layer


def _topological(names: list[str], after: Mapping[str, list[str]]) -> list[str]:
    """Depth-first post-order, reversed; edges that close a cycle are as if they were not there.

    Not recursive: a long chain would exceed Python's stack.
    """
    done: list[str] = []
    state: dict[str, int] = {}
    for root in reversed(names):
        stack = [(root, False)]
        while stack:
            name, leave = stack.pop()
            if leave:
                done.append(name)
                state[name] = 2
            elif name not in state:
                state[name] = 1
                stack.append((name, True))
                stack.extend((t, False) for t in after[name] if t not in state)
    return done[::-1]


def _make_way(line: Line, boxes: Mapping[str, Item], layers: list[list[Item]]) -> list[Item]:
    """The items of a line; makes the bend points that its bundle does not have yet, and links neighbours."""
    source, target = boxes[line.source], boxes[line.target]
    if source is target:
        return [source]
    top, bottom = (source, target) if source.layer <= target.layer else (target, source)
    bends = []
    # A bundle shares its bends from the source down; a backward line must not join them.
    bundle = (line.source, line.bundle) if top is source else (line.source, line.bundle, line.target)
    for index in range(top.layer + 1, bottom.layer):
        key = ("bend", *bundle)
        bend = next((i for i in layers[index] if i.key == key), None)
        if bend is None:
            bend = Item(key, None, index, 0.0)
            layers[index].append(bend)
        bends.append(bend)
    way = [top, *bends, bottom]
    if top.layer != bottom.layer:
        for above, below in pairwise(way):
            if below not in above.below:
                above.below.append(below)
                below.above.append(above)
    return way if top is source else way[::-1]


# -- order within layers -------------------------------------------------------------------------------------


def _reduce_crossings(layers: list[list[Item]]) -> None:
    """Order each layer in place: sweeps by barycentres, swaps of neighbours, the best order is kept."""
    best = [list(layer) for layer in layers]
    least = _count_crossings(layers)
    for sweep in range(_SWEEPS):
        if least == 0:
            break
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            _sort_by_barycentre(layer, layers, downwards)
        _swap_neighbours(layers)
        crossings = _count_crossings(layers)
        if crossings < least:
            least, best = crossings, [list(layer) for layer in layers]
    for layer, items in zip(layers, best, strict=True):
        layer[:] = items


def _sort_by_barycentre(layer: list[Item], layers: list[list[Item]], downwards: bool) -> None:
    if not layer:
        return
    other = layer[0].layer + (-1 if downwards else 1)
    if not 0 <= other < len(layers):
        return
    place = {id(item): i for i, item in enumerate(layers[other])}
    keys: dict[int, float] = {}
    for i, item in enumerate(layer):
        near = [place[id(n)] for n in (item.above if downwards else item.below)]
        keys[id(item)] = sum(near) / len(near) if near else float(i)
    layer.sort(key=lambda item: keys[id(item)])


def _swap_neighbours(layers: list[list[Item]]) -> None:
    """Swap two items side by side wherever that leaves fewer crossings."""
    for index, layer in enumerate(layers):
        around = layers[max(0, index - 1) : index + 2]
        for i in range(len(layer) - 1):
            before = _count_crossings(around)
            layer[i], layer[i + 1] = layer[i + 1], layer[i]
            if _count_crossings(around) >= before:
                layer[i], layer[i + 1] = layer[i + 1], layer[i]


def _count_crossings(layers: list[list[Item]]) -> int:
    total = 0
    for upper, lower in pairwise(layers):
        place = {id(item): i for i, item in enumerate(lower)}
        ends: list[int] = []
        for item in upper:
            targets = sorted(place[id(n)] for n in item.below)
            total += sum(1 for e in ends for t in targets if e > t)
            ends += targets
    return total


# -- x -------------------------------------------------------------------------------------------------------


def _assign_x(layers: list[list[Item]], gap: float, bend_gap: float) -> float:
    """Set the x of all items; return the width."""

    def apart(left: Item, right: Item) -> float:
        both_boxes = left.label is not None and right.label is not None
        return (left.width + right.width) / 2 + (gap if both_boxes else bend_gap)

    for layer in layers:
        x = 0.0
        for i, item in enumerate(layer):
            x += apart(layer[i - 1], item) if i else 0.0
            item.x = x
        middle = (layer[0].x + layer[-1].x) / 2 if layer else 0.0
        for item in layer:
            item.x -= middle
    for sweep in range(_ALIGNMENTS):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            if not layer:
                continue
            # The last sweeps look both ways, so that neither direction wins.
            both = sweep >= _ALIGNMENTS - 6
            wanted, weights = [], []
            for item in layer:
                near = item.above + item.below if both else (item.above if sweep % 2 == 0 else item.below)
                pulls = [(n.x, _pull(item, n)) for n in near]
                weight = sum(w for _, w in pulls)
                wanted.append(sum(x * w for x, w in pulls) / weight if weight else item.x)
                weights.append(weight or 0.1)
            steps = [0.0]
            for item, following in pairwise(layer):
                steps.append(steps[-1] + apart(item, following))
            placed = _isotonic([w - s for w, s in zip(wanted, steps, strict=True)], weights)
            for item, x, step in zip(layer, placed, steps, strict=True):
                item.x = x + step
    _straighten(layers, apart)
    items = [item for layer in layers for item in layer]
    left = min((i.x - i.width / 2 for i in items), default=0.0)
    for item in items:
        item.x -= left
    return max((i.x + i.width / 2 for i in items), default=0.0)


def _straighten(layers: list[list[Item]], apart: Callable[[Item, Item], float]) -> None:
    """Remove small jogs: two items that have only each other, or two bends, get one x where there is room for it."""
    place = {id(item): i for layer in layers for i, item in enumerate(layer)}

    def has_room(item: Item, x: float) -> bool:
        layer, i = layers[item.layer], place[id(item)]
        right_of_left = i == 0 or x - layer[i - 1].x >= apart(layer[i - 1], item) - 1e-6
        return right_of_left and (i == len(layer) - 1 or layer[i + 1].x - x >= apart(item, layer[i + 1]) - 1e-6)

    for layer in layers:
        for lower in layer:
            for upper in lower.above:
                bends = upper.label is None and lower.label is None
                if bends or (len(upper.below) == 1 and len(lower.above) == 1):
                    if has_room(lower, upper.x):
                        lower.x = upper.x
                    elif has_room(upper, lower.x) and (bends or abs(upper.x - lower.x) <= 16):
                        upper.x = lower.x


def _pull(item: Item, neighbour: Item) -> float:
    """Lines between two bend points are kept straight first."""
    return (1.0, 2.0, 8.0)[(item.label is None) + (neighbour.label is None)]


def _isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values``, by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, other_weight, other_count = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight += other_weight
            count += other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
