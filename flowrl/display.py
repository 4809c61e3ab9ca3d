"""Pictures of a flow: SVG and HTML for notebooks and reports, one line a call for terminals. No external binary.

The graph is the one that ``RLFlow.graph`` gives: labels as nodes; edges of ``kind`` "data" run down, those of ``kind``
"weights" (dashed) run from the writer of a Model to its readers, across iterations. Whatever comes from users is
escaped, and equal graphs give equal pictures, byte for byte.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from flowrl.layout import Item, Layout, Line, lay_out
from flowrl.routes import STEM, Point, Routes, WeightLine, route

if TYPE_CHECKING:
    import networkx as nx

#: By kind of node: the name in the legend, the line, the fill.
KINDS = {
    "source": ("data source", "#4263eb", "#edf2ff"),
    "rollout": ("rollout", "#099268", "#e6fcf5"),
    "reward": ("reward", "#e67700", "#fff9db"),
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
_INK, _FADED, _PAPER, _BORDER = "#212529", "#5c636a", "#ffffff", "#dee2e6"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_MARGIN = 20.0
_LEGEND_ROW = 20.0
_ILLEGAL = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def graph_svg(graph: nx.MultiDiGraph, title: str = "") -> str:
    """The picture of a flow: top to bottom, weight edges beside it, a legend, tooltips with settings and ``file:line``.

    Args:
        graph: as ``RLFlow.graph`` gives it; missing attributes are drawn as such.
        title: above the picture.
    """
    return _Picture(graph, title).svg()


def flow_html(graph: nx.MultiDiGraph, title: str = "") -> str:
    """The picture, with the calls as a table that can be opened below it."""
    rows = "".join(
        f"<tr><td><code>{escape(label)}</code></td><td>{escape(data.get('title', ''))}</td>"
        f"<td>{escape(_settings_text(data))}</td><td>{escape(_inputs_text(graph, label))}</td>"
        f"<td><code>{escape(data.get('where', ''))}</code></td></tr>"
        for label, data in graph.nodes(data=True)
    )
    return (
        f'<div class="flowrl-flow" style="overflow-x:auto">{graph_svg(graph, title)}'
        '<details style="margin-top:6px"><summary>calls</summary><table><thead><tr><th>call</th><th>node</th>'
        f"<th>settings</th><th>inputs</th><th>where</th></tr></thead><tbody>{rows}</tbody></table></details></div>"
    )


def mimebundle(graph: nx.MultiDiGraph, title: str = "") -> dict[str, str]:
    """What ``_repr_mimebundle_`` returns: the picture for Jupyter, the text for a shell."""
    return {"image/svg+xml": graph_svg(graph, title), "text/plain": graph_text(graph)}


def graph_text(graph: nx.MultiDiGraph) -> str:
    """One line a call: its label, node and settings, and what it reads."""
    heads = []
    for label, data in graph.nodes(data=True):
        name = str(data.get("title", "") or label)
        heads.append((one_line(label), f"{one_line(name)}({one_line(_settings_text(data))})"))
    first = min(max((len(a) for a, _ in heads), default=0), 32)
    second = min(max((len(b) for _, b in heads), default=0), 56)
    lines = []
    for (label, call), (node, data) in zip(heads, graph.nodes(data=True), strict=True):
        inputs = one_line(_inputs_text(graph, node))
        note = "  (left out: equal to the current policy)" if data.get("elided") else ""
        lines.append(f"{label:<{first}}  {call:<{second}}  {'<- ' + inputs if inputs else ''}{note}".rstrip())
    return "\n".join(lines)


def escape(text: Any, limit: int = 2000) -> str:
    """Text for XML and HTML, in element and attribute: escaped, without what XML 1.0 forbids, cut when huge."""
    text = str(text)
    if len(text) > limit:
        text = text[:limit] + f"… ({len(text) - limit:,} more characters)"
    return html.escape(_ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text))


def one_line(text: Any) -> str:
    """Printable text without line breaks, for terminals."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(text).split()))


def _settings_text(data: Mapping[str, Any], only_changed: bool = False) -> str:
    settings = _changed_settings(data) if only_changed else dict(data.get("settings") or {})
    models = set(data.get("models") or ())
    return ", ".join(v if v in models else f"{k}={v}" for k, v in settings.items())


def _changed_settings(data: Mapping[str, Any]) -> dict[str, str]:
    """The settings without Models, and where the call itself is known, without those at their default."""
    settings, models = dict(data.get("settings") or {}), set(data.get("models") or ())
    node = getattr(data.get("call"), "node", None)
    defaults: dict[str, Any] = {}
    if is_dataclass(node):
        for f in fields(node):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            if default is not MISSING and _equal(getattr(node, f.name, MISSING), default):
                defaults[f.name] = default
    return {k: v for k, v in settings.items() if k not in defaults and v not in models}


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # settings are the user's: tensors and arrays have no truth value
        return a is b


def _inputs_text(graph: nx.MultiDiGraph, label: str) -> str:
    parts = []
    for source, _, data in graph.in_edges(label, data=True):
        if data.get("kind") == "weights":
            parts.append(f"weights of {data.get('model', '')} from {source} ({_staleness(data)})")
        else:
            path = f".{data['path']}" if data.get("path") else ""
            parts.append(f"{data.get('argument', '')}={source}{path}: {data.get('type', '')}")
    return ", ".join(parts)


def _staleness(data: Mapping[str, Any]) -> str:
    return f"staleness {data.get('staleness', 0)}"


# -- measuring -------------------------------------------------------------------------------------------------------

_NARROW, _WIDE = set("iIjl.,:;|!'`()[]{}ftr "), set("mwMW@%")


def text_width(text: str, size: float) -> float:
    """About how wide a text is in a sans-serif font, in pixels; a little too wide rather than too narrow."""
    em = sum(
        0.32
        if c in _NARROW
        else 0.92
        if c in _WIDE
        else 0.7
        if c.isupper()
        else 0.58
        if ord(c) < 0x2E80
        else 1.05
        for c in text
    )
    return em * size


def fit(text: str, size: float, width: float) -> str:
    """The text, cut with an ellipsis to a width."""
    text = one_line(text)
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[: max(0, min(len(text) - 1, int(len(text) * 0.95)))]
    return text.rstrip() + "…"


# -- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Box:
    """What is written in a box, and its size."""

    label: str
    subtitle: str
    models: tuple[str, ...]
    settings: str
    width: float
    height: float


def _make_box(label: str, data: Mapping[str, Any]) -> _Box:
    widest = 216.0
    name = fit(label, 13, widest)
    title = str(data.get("title", "") or "")
    # "Rollout#0" says its class already.
    subtitle = "" if label.split("#")[0] == title else fit(title, 11, widest)
    models = tuple(fit(m, 10.5, 120) for m in tuple(data.get("models") or ())[:3])
    settings = fit(_settings_text({**data, "settings": _changed_settings(data)}), 10.5, widest)
    pills = sum(text_width(m, 10.5) + 20 for m in models) - 4
    widths = (text_width(name, 13) * 1.07, text_width(subtitle, 11), text_width(settings, 10.5), pills)
    height = 15 + 16 + 15 * bool(subtitle) + 19 * bool(models) + 15 * bool(settings)
    return _Box(name, subtitle, models, settings, max(112.0, max(widths) + 26), max(42.0, float(height)))


class _Picture:
    def __init__(self, graph: nx.MultiDiGraph, title: str) -> None:
        self.graph = graph
        self.title = one_line(title)
        self.boxes = {n: _make_box(str(n), d) for n, d in graph.nodes(data=True)}
        edges = list(graph.edges(data=True))
        self.data = [(u, v, d) for u, v, d in edges if d.get("kind") != "weights"]
        self.weights = [(u, v, d) for u, v, d in edges if d.get("kind") == "weights"]
        lines = [Line(u, v, _edge_text(d)) for u, v, d in self.data]
        sizes = {n: (b.width, b.height) for n, b in self.boxes.items()}
        self.layout: Layout = lay_out(sizes, lines, [(u, v) for u, v, _ in self.weights], gap=52.0)
        texts = [fit(f"{d.get('model', '')}, {_staleness(d)}", 11, 150) for _, _, d in self.weights]
        weight_lines = [
            WeightLine(u, v, str(d.get("model", "")), t)
            for (u, v, d), t in zip(self.weights, texts, strict=True)
        ]
        room = max((text_width(t, 11) for t in texts), default=0.0)
        self.routes: Routes = route(self.layout, weight_lines, room)
        written = dict.fromkeys(str(d.get("model", "")) for _, _, d in self.weights)
        self.model_colour = {m: MODEL_COLOURS[i % len(MODEL_COLOURS)] for i, m in enumerate(written)}

    def svg(self) -> str:
        head = 30.0 if self.title else 0.0
        legend, legend_width, legend_height = self._legend()
        inner = max(self.routes.right - self.routes.left, legend_width, text_width(self.title, 15))
        width = inner + 2 * _MARGIN
        height = head + self.routes.height + legend_height + 2 * _MARGIN
        shift = _MARGIN - self.routes.left + (inner - (self.routes.right - self.routes.left)) / 2
        body = [*self._data_edges(), *self._weight_edges(), *self._boxes(), *self._labels()]
        name = escape(self.title or "flow")
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="flowrl-graph" width="{_n(width)}" height="{_n(height)}"'
            f' viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{name}"'
            f' style="max-width:100%;height:auto" font-family="{_FONT}" font-size="11">',
            "<style>.flowrl-edge:hover path{stroke-width:3.2}.flowrl-node:hover rect{stroke-width:2.4}</style>",
            f'<rect x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="10"'
            f' fill="{_PAPER}" stroke="{_BORDER}"/>',
        ]
        if self.title:
            parts.append(_text(_MARGIN, _MARGIN + 13, self.title, size=15, weight=600))
        parts.append(f'<g transform="translate({_n(shift)} {_n(_MARGIN + head)})">{"".join(body)}</g>')
        parts.append(
            f'<g transform="translate({_n(_MARGIN)} {_n(height - _MARGIN - legend_height)})">{legend}</g>'
        )
        return "".join(parts) + "</svg>"

    # edges

    def _data_edges(self) -> Iterable[str]:
        arrivals = self._arrivals()
        for index, (u, v, data) in enumerate(self.data):
            colour = _colours(self.graph.nodes[u])[0]
            path, head = self._curve(self.layout.ways[index], data, arrivals.get(index))
            dim = self.graph.nodes[u].get("elided") or self.graph.nodes[v].get("elided")
            tip = f"{u} → {v}\nargument {data.get('argument', '')}: {_edge_text(data)}"
            yield (
                f'<g class="flowrl-edge" data-source="{escape(u)}" data-target="{escape(v)}"'
                f' data-kind="data"{_DIM if dim else ""}><title>{escape(tip)}</title>'
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
                f'<polygon points="{head}" fill="{colour}"/></g>'
            )

    def _arrivals(self) -> dict[int, float]:
        """By index of a data edge, the x where it enters its target's top: spread in the order they come from."""
        entering: dict[str, list[int]] = {}
        for index, way in enumerate(self.layout.ways):
            if len(way) > 1:
                entering.setdefault(str(way[-1].label), []).append(index)
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
                goals.setdefault(_edge_text(data), []).append(way[1].x)
        order = sorted(goals, key=lambda t: sum(goals[t]) / len(goals[t]))
        widths = [text_width(fit(t, 11, 190), 11) + 16 for t in order]
        x = box.x - sum(widths) / 2
        for other, width in zip(order, widths, strict=True):
            if other == text:
                return x + width / 2
            x += width
        return box.x

    def _curve(self, way: list[Item], data: Mapping[str, Any], arrival: float | None) -> tuple[str, str]:
        """The path of a data edge and the polygon of its arrow head."""
        first, last = way[0], way[-1]
        if arrival is None:  # a loop, which only a wrong graph has
            right, y = first.x + first.width / 2, self.routes.middle(first)
            path = f"M{_n(right)},{_n(y - 8)} c30,-14 30,30 8,16"
            return path, _head((right, y + 8), (-1, 0))
        down = first.layer < last.layer
        if not down:  # it closes a cycle, which only a wrong graph does
            start = (first.x, self._edge_of(first, -1))
            end = (arrival, self._edge_of(last, 1))
            path = f"M{_p(start)} C{_p((start[0], start[1] - 40))} {_p((end[0], end[1] + 40))} {_p(end)}"
            return path, _head(end, (0, -1))
        x = self._stem_x(first, _edge_text(data))
        bottom = self.routes.bottom[first.layer]
        path = f"M{_n(x)},{_n(self._edge_of(first, 1))} L{_n(x)},{_n(bottom + STEM)}"
        here = (x, bottom + STEM)
        for bend in way[1:-1]:
            top = (bend.x, self.routes.top[bend.layer])
            path += _s_curve(here, top)
            here = (bend.x, self.routes.bottom[bend.layer] + STEM)
            path += f" L{_p(here)}"
        end = (arrival, self._edge_of(last, -1))
        return path + _s_curve(here, (end[0], end[1] - 8)) + f" L{_p((end[0], end[1] - 5))}", _head(
            end, (0, 1)
        )

    def _edge_of(self, box: Item, side: int) -> float:
        return self.routes.middle(box) + side * box.height / 2

    def _weight_edges(self) -> Iterable[str]:
        for (u, v, data), points in zip(self.weights, self.routes.weights, strict=True):
            colour = self.model_colour[str(data.get("model", ""))]
            if len(points) == 2:
                path, towards = f"M{_p(points[0])}" + _s_curve(points[0], points[1]), (0.0, 1.0)
            else:
                path = _rounded(points)
                towards = (1.0 if points[-1][0] > points[-2][0] else -1.0, 0.0)
            tip = f"{u} → {v}\nweights of {data.get('model', '')}, {_staleness(data)}"
            yield (
                f'<g class="flowrl-edge" data-source="{escape(u)}" data-target="{escape(v)}" data-kind="weights">'
                f'<title>{escape(tip)}</title><path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"'
                f' stroke-dasharray="6 4"/><polygon points="{_head(points[-1], towards)}" fill="{colour}"/></g>'
            )

    def _labels(self) -> Iterable[str]:
        done: set[tuple[str, str]] = set()
        for (u, _, data), way in zip(self.data, self.layout.ways, strict=True):
            text = _edge_text(data)
            if (u, text) in done or not text or len(way) < 2 or way[0].layer >= way[-1].layer:
                continue
            done.add((u, text))
            x, y = self._stem_x(way[0], text), self.routes.bottom[way[0].layer] + STEM / 2 + 1
            yield _halo(x, y, fit(text, 11, 190), _colours(self.graph.nodes[u])[0])
        for x, y, text, model in self.routes.labels:
            yield _halo(x, y, text, self.model_colour[model])

    # boxes

    def _boxes(self) -> Iterable[str]:
        for label, data in self.graph.nodes(data=True):
            item, box = self.layout.boxes[label], self.boxes[label]
            line, fill = _colours(data)
            left, top = item.x - item.width / 2, self._edge_of(item, -1)
            elided = bool(data.get("elided"))
            parts = [
                f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(item.width)}" height="{_n(item.height)}" rx="8"'
                f' fill="{fill}" stroke="{line}" stroke-width="1.4"{_DASH if elided else ""}/>'
            ]
            y = top + 20.0
            strike = ' text-decoration="line-through"' if elided else ""
            parts.append(_text(item.x, y, box.label, size=13, weight=600, anchor="middle", more=strike))
            if box.subtitle:
                y += 15
                parts.append(_text(item.x, y, box.subtitle, colour=line, anchor="middle"))
            if box.models:
                parts.append(self._pills(item.x, y + 6, box.models, data))
                y += 19
            if box.settings:
                y += 15
                parts.append(_text(item.x, y, box.settings, size=10.5, colour=_FADED, anchor="middle"))
            yield (
                f'<g class="flowrl-node" data-label="{escape(label)}" data-kind="{escape(data.get("kind", ""))}"'
                f"{_DIM if elided else ''}><title>{escape(_tooltip(str(label), data))}</title>{''.join(parts)}</g>"
            )

    def _pills(self, middle: float, top: float, shown: tuple[str, ...], data: Mapping[str, Any]) -> str:
        """The Models of a box, in the colours of their weight edges."""
        widths = [text_width(m, 10.5) + 16 for m in shown]
        x = middle - (sum(widths) + 4 * (len(widths) - 1)) / 2
        out = ""
        for text, model, width in zip(shown, tuple(data.get("models") or ()), widths, strict=False):
            colour = self.model_colour.get(str(model), "#868e96")
            out += (
                f'<rect x="{_n(x)}" y="{_n(top)}" width="{_n(width)}" height="16" rx="8" fill="{colour}"/>'
                + _text(x + width / 2, top + 11.8, text, size=10.5, colour="#ffffff", anchor="middle")
            )
            x += width + 4
        return out

    # legend

    def _legend(self) -> tuple[str, float, float]:
        """The legend, its width and its height, with the space above it."""
        present = {_kind(d) for _, d in self.graph.nodes(data=True)}
        entries = [(name, line, fill) for kind, (name, line, fill) in KINDS.items() if kind in present]
        lines = [("batch", "", "")] if self.data else []
        lines += [("weights, for the next iteration", "6 4", "")] if self.weights else []
        limit = max(self.routes.right - self.routes.left, 420.0)
        x, y, widest, out = 0.0, 24.0, 0.0, ""
        for name, line, fill in [*entries, *lines]:
            mark = 14.0 if fill else 26.0
            width = mark + 6 + text_width(name, 11)
            if x and x + width > limit:
                x, y = 0.0, y + _LEGEND_ROW
            if fill:
                out += f'<rect x="{_n(x)}" y="{_n(y)}" width="14" height="12" rx="3" fill="{fill}" stroke="{line}"/>'
            else:
                dash = f' stroke-dasharray="{line}"' if line else ""
                out += f'<path d="M{_n(x)},{_n(y + 6)} h26" fill="none" stroke="{_FADED}" stroke-width="1.6"{dash}/>'
            out += _text(x + mark + 6, y + 10, name, colour=_FADED)
            widest = max(widest, x + width)
            x += width + 18
        return out, widest, y + 14 if out else 0.0


_DIM = ' opacity="0.5"'
_DASH = ' stroke-dasharray="4 3"'


def _kind(data: Mapping[str, Any]) -> str:
    kind = data.get("kind", "host")
    return kind if kind in KINDS else "host"


def _colours(data: Mapping[str, Any]) -> tuple[str, str]:
    return KINDS[_kind(data)][1:]


def _edge_text(data: Mapping[str, Any]) -> str:
    text = str(data.get("type", "") or "")
    return f"{text} ← .{data['path']}" if data.get("path") else text


def _tooltip(label: str, data: Mapping[str, Any]) -> str:
    lines = [f"{label}: {data.get('title', '')} ({KINDS[_kind(data)][0]})"]
    lines += [f"  {k} = {v}" for k, v in (data.get("settings") or {}).items()]
    if data.get("elided"):
        lines.append("left out by the compiler: it equals the current policy")
    if data.get("where"):
        lines.append(str(data["where"]))
    return "\n".join(lines)


def _n(value: float) -> str:
    """A coordinate, without a trailing ``.0`` and without ``-0``."""
    return f"{round(value, 1) + 0.0:g}"


def _p(point: Point) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def _s_curve(start: Point, end: Point) -> str:
    """A curve that leaves and arrives vertically."""
    half = (end[1] - start[1]) / 2
    return f" C{_p((start[0], start[1] + half))} {_p((end[0], end[1] - half))} {_p(end)}"


def _head(tip: Point, towards: Point) -> str:
    """The corners of an arrow head."""
    (x, y), (dx, dy) = tip, towards
    back = (x - 8 * dx, y - 8 * dy)
    return f"{_p(tip)} {_p((back[0] - 4 * dy, back[1] - 4 * dx))} {_p((back[0] + 4 * dy, back[1] + 4 * dx))}"


def _rounded(points: list[Point], radius: float = 8.0) -> str:
    """A path along horizontal and vertical pieces, with rounded corners."""
    path = f"M{_p(points[0])}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        pieces = [max(abs(corner[0] - q[0]), abs(corner[1] - q[1])) for q in (before, after)]
        r = min(radius, *(p / 2 for p in pieces))
        if r < 0.5:
            continue
        path += f" L{_p(_towards(corner, before, r))} Q{_p(corner)} {_p(_towards(corner, after, r))}"
    last, before = points[-1], points[-2]
    return path + f" L{_p(_towards(last, before, 5.0))}"


def _towards(point: Point, other: Point, distance: float) -> Point:
    dx, dy = other[0] - point[0], other[1] - point[1]
    length = max(abs(dx), abs(dy)) or 1.0
    return (point[0] + dx / length * distance, point[1] + dy / length * distance)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 11,
    weight: int = 400,
    colour: str = _INK,
    anchor: str = "start",
    more: str = "",
) -> str:
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    bold = "" if weight == 400 else f' font-weight="{weight}"'
    return f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size:g}"{bold} fill="{colour}"{place}{more}>{escape(text)}</text>'


def _halo(x: float, y: float, text: str, colour: str) -> str:
    """A text in the middle of a line, on white."""
    width = text_width(text, 11) + 4
    return (
        f'<rect x="{_n(x - width / 2)}" y="{_n(y - 8)}" width="{_n(width)}" height="16" rx="4" fill="{_PAPER}"'
        f' fill-opacity="0.92"/>' + _text(x, y + 4, text, colour=colour, anchor="middle")
    )
