"""How a flow is drawn: boxes by kind, batches as curves, weights as dashed lines beside them, a legend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from flowrl.drawing import svg
from flowrl.drawing.layout import Item, Line, lay_out
from flowrl.drawing.routes import STEM, WeightLine, route
from flowrl.drawing.svg import Point, element, escape, fit, one_line, text_width

if TYPE_CHECKING:
    import networkx as nx

#: By kind of node: the name in the legend, the line, the fill.
KINDS = {
    "source": ("data source", "#4263eb", "#edf2ff"),
    "rollout": ("rollout", "#099268", "#e6fcf5"),
    "reward": ("reward", "#c76a00", "#fff9db"),
    "logprobs": ("log-probs", "#0c8599", "#e3fafc"),
    "critic": ("critic", "#c2255c", "#fff0f6"),
    "filter": ("filter", "#5c940d", "#f4fce3"),
    "advantage": ("advantage", "#6741d9", "#f3f0ff"),
    "loss": ("loss", "#d9480f", "#fff4e6"),
    "updater": ("updater", "#c92a2a", "#fff5f5"),
    "derived": ("derived weights", "#862e9c", "#f8f0fc"),
    "host": ("other node", "#495057", "#f1f3f5"),
}
#: Colours of Models that are written, by first appearance.
MODEL_COLOURS = ("#7950f2", "#d6336c", "#1098ad", "#e8590c", "#5c940d", "#4263eb")
_OTHER_MODEL = "#868e96"

_MARGIN = 20.0
_LEGEND_ROW = 20.0
_LABEL_WIDTH = 190.0
_WIDEST_BOX_TEXT = 216.0
_FAINT = "0.5"
# How large a step is, whoever chose it; and what label and edges say already.
_ALWAYS_SHOWN = frozenset({"batch_size", "group_size"})
_NEVER_SHOWN = frozenset({"batch_type", "source_name"})
# Prefixed, since the style of an inline picture holds for the whole page.
_STYLE = ".flowrl-edge:hover path{stroke-width:3.2}.flowrl-node:hover rect{stroke-width:2.4}"


# -- words -----------------------------------------------------------------------------------------


def kind_of(data: Mapping[str, Any]) -> str:
    """The kind of a node; "host" where it is unknown."""
    kind = data.get("kind", "host")
    return kind if kind in KINDS else "host"


def settings_text(settings: Mapping[str, Any], models: Iterable[str]) -> str:
    """``actor, group_size=4``: a setting that is a Model is written by its name alone."""
    names = set(models)
    return ", ".join(str(v) if v in names else f"{k}={v}" for k, v in settings.items())


def changed_settings(data: Mapping[str, Any]) -> dict[str, str]:
    """The settings that say something: where the call itself is known, without those at their default."""
    settings = dict(data.get("settings") or {})
    node = getattr(data.get("call"), "node", None)
    unchanged: set[str] = set()
    if is_dataclass(node):
        for f in fields(node):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            if default is not MISSING and _equal(getattr(node, f.name, MISSING), default):
                unchanged.add(f.name)
    unchanged -= _ALWAYS_SHOWN
    return {k: v for k, v in settings.items() if k not in unchanged and k not in _NEVER_SHOWN}


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # settings are the user's: tensors and arrays have no truth value
        return a is b


def edge_text(data: Mapping[str, Any]) -> str:
    """What a data edge carries: its batch type, and the field that is read of it."""
    text = str(data.get("type", "") or "")
    return f".{data['path']}: {text}" if data.get("path") else text


def staleness_text(data: Mapping[str, Any]) -> str:
    """The staleness of a weight edge in words."""
    return f"staleness {data.get('staleness', 0)}"


def _tooltip(label: str, data: Mapping[str, Any]) -> str:
    lines = [f"{label}: {data.get('title', '')} ({KINDS[kind_of(data)][0]})"]
    lines += [f"  {k} = {v}" for k, v in (data.get("settings") or {}).items()]
    lines += ["left out by the compiler"] if data.get("elided") else []
    lines += [str(data["where"])] if data.get("where") else []
    return "\n".join(lines)


# -- boxes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of text in a box: (text, fill) pairs; pills are on a filled background."""

    texts: tuple[tuple[str, str], ...]
    size: float
    height: float
    pills: bool = False
    bold: bool = False

    @property
    def widths(self) -> list[float]:
        return [text_width(t, self.size) * (1.08 if self.bold else 1.0) + 16 * self.pills for t, _ in self.texts]

    @property
    def width(self) -> float:
        return sum(self.widths) + 4 * (len(self.texts) - 1)

    def draw(self, middle: float, top: float, strike: bool) -> str:
        out, x = "", middle - self.width / 2
        for (text, fill), width in zip(self.texts, self.widths, strict=True):
            if self.pills:
                out += element("rect", x=x, y=top + 1, width=width, height=16, rx=8, fill=fill)
            out += svg.label(
                x + width / 2,
                top + (12.8 if self.pills else self.height - 4),
                text,
                size=self.size,
                fill=svg.PAPER if self.pills else fill,
                text_anchor="middle",
                font_weight=600 if self.bold else None,
                text_decoration="line-through" if strike and self.bold else None,
            )
            x += width + 4
        return out


def _rows(label: str, data: Mapping[str, Any], model_colour: Mapping[str, str]) -> list[Row]:
    """What is written in a box: its label, its class where that is news, its Models, its settings."""
    rows = [Row(((fit(label, 13, _WIDEST_BOX_TEXT), svg.INK),), 13, 17, bold=True)]
    title = str(data.get("title", "") or "")
    if title and label.split("#")[0].split("(")[0] != title:
        rows.append(Row(((fit(title, 11, _WIDEST_BOX_TEXT), KINDS[kind_of(data)][1]),), 11, 15))
    models = [str(m) for m in data.get("models") or ()]
    if models:
        pills = tuple((fit(m, 10.5, 130), model_colour.get(m, _OTHER_MODEL)) for m in models[:3])
        rows.append(Row(pills, 10.5, 19, pills=True))
    settings = ", ".join(f"{k}={v}" for k, v in changed_settings(data).items() if v not in models)
    if settings:
        rows.append(Row(((fit(settings, 10.5, _WIDEST_BOX_TEXT), svg.FADED),), 10.5, 15))
    if data.get("elided"):
        rows.append(Row((("left out", svg.FADED),), 10.5, 15))
    return rows


def _size(rows: list[Row]) -> tuple[float, float]:
    width = max(row.width for row in rows) + 26
    return max(112.0, width), max(42.0, sum(row.height for row in rows) + 16)


# -- the picture -----------------------------------------------------------------------------------


class Picture:
    """One drawing of one graph. ``svg()`` is the result; the rest are its parts."""

    def __init__(self, graph: nx.MultiDiGraph, title: str) -> None:
        self.graph = graph
        self.title = fit(title, 15, 600)
        edges = list(graph.edges(data=True))
        self.data = [(u, v, d) for u, v, d in edges if d.get("kind") != "weights"]
        self.weights = [(u, v, d) for u, v, d in edges if d.get("kind") == "weights"]
        written = dict.fromkeys(str(d.get("model", "")) for _, _, d in self.weights)
        self.model_colour = {m: MODEL_COLOURS[i % len(MODEL_COLOURS)] for i, m in enumerate(written)}
        self.rows = {n: _rows(str(n), d, self.model_colour) for n, d in graph.nodes(data=True)}
        lines = [Line(u, v, edge_text(d)) for u, v, d in self.data]
        hints = [(u, v) for u, v, _ in self.weights]
        self.layout = lay_out({n: _size(rows) for n, rows in self.rows.items()}, lines, hints)
        self.routes = route(self.layout, [_weight_line(u, v, d) for u, v, d in self.weights])

    def svg(self) -> str:
        """The whole picture."""
        legend, legend_width, legend_height = self._legend()
        drawn = self.routes.right - self.routes.left
        inner = max(drawn, legend_width, text_width(self.title, 15))
        head = 30.0 if self.title else 0.0
        width, height = inner + 2 * _MARGIN, head + self.routes.height + legend_height + 2 * _MARGIN
        shift = (_MARGIN - self.routes.left + (inner - drawn) / 2, _MARGIN + head)
        body = [*self._data_edges(), *self._weight_edges(), *self._boxes(), *self._labels()]
        return element(
            "svg",
            element("style", ".flowrl-edge:hover path{stroke-width:3.2}.flowrl-node:hover rect{stroke-width:2.4}"),
            element(
                "rect",
                x=0.5,
                y=0.5,
                width=width - 1,
                height=height - 1,
                rx=10,
                fill=svg.PAPER,
                stroke=svg.BORDER,
            ),
            svg.label(_MARGIN, _MARGIN + 13, self.title, size=15, font_weight=600) if self.title else "",
            element("g", *body, transform=f"translate({svg.pair(shift)})"),
            element("g", legend, transform=f"translate({svg.pair((_MARGIN, height - _MARGIN - legend_height))})"),
            xmlns="http://www.w3.org/2000/svg",
            class_="flowrl-graph",
            width=width,
            height=height,
            viewBox=f"0 0 {svg.coordinate(width)} {svg.coordinate(height)}",
            role="img",
            aria_label=self.title or "flow",
            style="max-width:100%;height:auto",
            font_family=svg.FONT,
            font_size=11,
        )

    # edges

    def _data_edges(self) -> Iterable[str]:
        arrivals = self._arrivals()
        for index, (u, v, data) in enumerate(self.data):
            path, head = self._curve(self.layout.ways[index], edge_text(data), arrivals.get(index))
            tip = f"{u} → {v}\nargument {data.get('argument', '')}: {edge_text(data)}"
            yield self._edge(u, v, "data", tip, path, head, self._colour(u))

    def _weight_edges(self) -> Iterable[str]:
        for (u, v, data), points in zip(self.weights, self.routes.weights, strict=True):
            if len(points) == 2:
                (_, y) = end = points[1]
                path = f"M{svg.pair(points[0])}{svg.s_curve(points[0], (end[0], y - 5))}"
                towards = (0.0, 1.0)
            else:
                path = svg.rounded(points)
                towards = (1.0 if points[-1][0] > points[-2][0] else -1.0, 0.0)
            tip = f"{u} → {v}\nweights of {data.get('model', '')}, {staleness_text(data)}"
            colour = self.model_colour[str(data.get("model", ""))]
            yield self._edge(u, v, "weights", tip, path, svg.arrow_head(points[-1], towards), colour)

    def _edge(self, u: str, v: str, kind: str, tip: str, path: str, head: str, colour: str) -> str:
        faint = self.graph.nodes[u].get("elided") or self.graph.nodes[v].get("elided")
        return element(
            "g",
            element("title", escape(tip)),
            element(
                "path",
                d=path,
                fill="none",
                stroke=colour,
                stroke_width=1.6,
                stroke_dasharray="6 4" if kind == "weights" else None,
            ),
            element("polygon", points=head, fill=colour),
            class_="flowrl-edge",
            data_source=u,
            data_target=v,
            data_kind=kind,
            opacity=_FAINT if faint else None,
        )

    def _colour(self, label: str) -> str:
        return KINDS[kind_of(self.graph.nodes[label])][1]

    def _arrivals(self) -> dict[int, float]:
        """By index of a data edge, the x where it enters its target, in the order that they come from."""
        entering: dict[Any, list[int]] = {}
        for index, way in enumerate(self.layout.ways):
            if len(way) > 1:
                entering.setdefault(way[-1].label, []).append(index)
        out: dict[int, float] = {}
        for label, indices in entering.items():
            box = self.layout.boxes[label]
            indices.sort(key=lambda i: self.layout.ways[i][-2].x)
            step = min(26.0, (box.width - 30) / max(1, len(indices) - 1))
            for place, index in enumerate(indices):
                out[index] = box.x + (place - (len(indices) - 1) / 2) * step
        return out

    def _stem_x(self, box: Item, text: str) -> float:
        """x where the edges of this text leave a box: texts side by side, in the order of where they go."""
        goals: dict[str, list[float]] = {}
        for (u, _, data), way in zip(self.data, self.layout.ways, strict=True):
            if u == box.label and len(way) > 1:
                goals.setdefault(edge_text(data), []).append(way[1].x)
        order = sorted(goals, key=lambda t: sum(goals[t]) / len(goals[t]))
        widths = [text_width(fit(t, 11, _LABEL_WIDTH), 11) + 16 for t in order]
        left = box.x - sum(widths) / 2
        place = order.index(text)
        return left + sum(widths[:place]) + widths[place] / 2

    def _curve(self, way: list[Item], text: str, arrival: float | None) -> tuple[str, str]:
        """The path of a data edge and its arrow head."""
        first, last = way[0], way[-1]
        if arrival is None:  # a loop, which only a wrong graph has
            right, y = first.x + first.width / 2, self.routes.middle(first)
            path = f"M{svg.pair((right, y - 8))} c30,-14 30,30 8,16"
            return path, svg.arrow_head((right, y + 8), (-1, 0))
        if first.layer >= last.layer:  # it closes a cycle, which only a wrong graph has
            start, end = (first.x, self._end_of(first, -1)), (arrival, self._end_of(last, 1))
            path = f"M{svg.pair(start)} C{svg.pair((start[0], start[1] - 40))} "
            return path + f"{svg.pair((end[0], end[1] + 40))} {svg.pair(end)}", svg.arrow_head(end, (0, -1))
        x = self._stem_x(first, text)
        here: Point = (x, self.routes.bottom[first.layer] + STEM)
        path = f"M{svg.pair((x, self._end_of(first, 1)))} L{svg.pair(here)}"
        for bend in way[1:-1]:
            path += svg.s_curve(here, (bend.x, self.routes.top[bend.layer]))
            here = (bend.x, self.routes.bottom[bend.layer] + STEM)
            path += f" L{svg.pair(here)}"
        end = (arrival, self._end_of(last, -1))
        path += svg.s_curve(here, (end[0], end[1] - 8)) + f" L{svg.pair((end[0], end[1] - 5))}"
        return path, svg.arrow_head(end, (0, 1))

    def _end_of(self, box: Item, side: int) -> float:
        """y of the upper (-1) or lower (1) end of a box."""
        return self.routes.middle(box) + side * box.height / 2

    def _labels(self) -> Iterable[str]:
        done: set[tuple[str, str]] = set()
        for (u, _, data), way in zip(self.data, self.layout.ways, strict=True):
            text = edge_text(data)
            if text and (u, text) not in done and len(way) > 1 and way[0].layer < way[-1].layer:
                done.add((u, text))
                y = self.routes.bottom[way[0].layer] + STEM / 2 + 1
                yield svg.halo(self._stem_x(way[0], text), y, fit(text, 11, _LABEL_WIDTH), self._colour(u))
        for x, y, text, model in self.routes.labels:
            yield svg.halo(x, y, text, self.model_colour[model])

    def _boxes(self) -> Iterable[str]:
        for label, data in self.graph.nodes(data=True):
            item, rows, elided = self.layout.boxes[label], self.rows[label], bool(data.get("elided"))
            _, line, fill = KINDS[kind_of(data)]
            parts = [
                element(
                    "rect",
                    x=item.x - item.width / 2,
                    y=self._end_of(item, -1),
                    width=item.width,
                    height=item.height,
                    rx=8,
                    fill=fill,
                    stroke=line,
                    stroke_width=1.4,
                    stroke_dasharray="4 3" if elided else None,
                )
            ]
            y = self.routes.middle(item) - sum(row.height for row in rows) / 2
            for row in rows:
                parts.append(row.draw(item.x, y, elided))
                y += row.height
            yield element(
                "g",
                element("title", escape(_tooltip(str(label), data))),
                *parts,
                class_="flowrl-node",
                data_label=label,
                data_kind=kind_of(data),
                opacity=_FAINT if elided else None,
            )

    def _legend(self) -> tuple[str, float, float]:
        """The legend, its width, and its height with the space above it."""
        present = {kind_of(d) for _, d in self.graph.nodes(data=True)}
        entries = [(name, line, fill, "") for kind, (name, line, fill) in KINDS.items() if kind in present]
        entries += [("batch", svg.FADED, "", "")] if self.data else []
        entries += [("weights, for the next iteration", svg.FADED, "", "6 4")] if self.weights else []
        limit = max(self.routes.right - self.routes.left, 460.0)
        x, y, widest, out = 0.0, 24.0, 0.0, ""
        for name, line, fill, dash in entries:
            mark = 14.0 if fill else 26.0
            width = mark + 6 + text_width(name, 11)
            if x and x + width > limit:
                x, y = 0.0, y + _LEGEND_ROW
            if fill:
                out += element("rect", x=x, y=y, width=14, height=12, rx=3, fill=fill, stroke=line)
            else:
                stroke = {
                    "fill": "none",
                    "stroke": line,
                    "stroke_width": 1.6,
                    "stroke_dasharray": dash or None,
                }
                out += element("path", d=f"M{svg.pair((x, y + 6))} h26", **stroke)
            out += svg.label(x + mark + 6, y + 10, name, fill=svg.FADED)
            widest = max(widest, x + width)
            x += width + 16
        return out, widest, y + 14 if out else 0.0


def _weight_line(writer: str, reader: str, data: Mapping[str, Any]) -> WeightLine:
    model = str(data.get("model", ""))
    return WeightLine(writer, reader, model, f"{fit(one_line(model), 11, 130)}, {staleness_text(data)}")
