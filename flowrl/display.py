"""Pictures of a flow: SVG and HTML for notebooks and reports, one line a call for terminals.

The graph is the one that ``RLFlow.graph`` gives: labels as nodes; edges of ``kind`` "data" run down, those
of ``kind`` "weights" (dashed) run from the writer of a Model to its readers, across iterations. Whatever
comes from users is escaped, and equal graphs give equal pictures, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrl.drawing.picture import Picture, changed_settings, settings_text, staleness_text
from flowrl.drawing.svg import escape, one_line

if TYPE_CHECKING:
    import networkx as nx


def graph_svg(graph: nx.MultiDiGraph, title: str = "") -> str:
    """The picture of a flow: top to bottom, weight edges beside it, a legend, tooltips with all settings.

    Args:
        graph: as ``RLFlow.graph`` gives it; missing attributes are drawn as such.
        title: above the picture.
    """
    return Picture(graph, title).svg()


def flow_html(graph: nx.MultiDiGraph, title: str = "") -> str:
    """The picture, with the calls as a table that can be opened below it."""
    rows = "".join(
        f"<tr><td><code>{escape(label)}</code></td><td>{escape(data.get('title', ''))}</td>"
        f"<td>{escape(_settings(data, everything=True))}</td><td>{escape(_inputs_text(graph, label))}</td>"
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
    calls = [
        (one_line(label), one_line(f"{data.get('title', '') or label}({_settings(data)})"))
        for label, data in graph.nodes(data=True)
    ]
    # Columns, but one long name must not push all others out of sight.
    first = min(max((len(label) for label, _ in calls), default=0), 32)
    second = min(max((len(call) for _, call in calls), default=0), 56)
    lines = []
    for (label, call), (node, data) in zip(calls, graph.nodes(data=True), strict=True):
        inputs = one_line(_inputs_text(graph, node))
        note = "  (left out by the compiler)" if data.get("elided") else ""
        lines.append(f"{label:<{first}}  {call:<{second}}  {'<- ' + inputs if inputs else ''}{note}".rstrip())
    return "\n".join(lines)


def _settings(data: Mapping[str, Any], everything: bool = False) -> str:
    settings = (data.get("settings") or {}) if everything else changed_settings(data)
    return settings_text(settings, data.get("models") or ())


def _inputs_text(graph: nx.MultiDiGraph, label: str) -> str:
    parts = []
    for source, _, data in graph.in_edges(label, data=True):
        if data.get("kind") == "weights":
            parts.append(f"weights of {data.get('model', '')}={source} ({staleness_text(data)})")
        else:
            path = f".{data['path']}" if data.get("path") else ""
            parts.append(f"{data.get('argument', '')}={source}{path}: {data.get('type', '')}")
    return ", ".join(parts)
