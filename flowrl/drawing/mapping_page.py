"""A plan's placement as one HTML page that opens offline, without scripts: pictures, tables, and the explanation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowrl.compiler.explain import bound_text, causes_text, explain, parallelism_text
from flowrl.compiler.figures import change, devices_text, listed, pool_text, seconds, share, size
from flowrl.compiler.mapping import Alternative, Mapping
from flowrl.compiler.schedule import utilisation
from flowrl.drawing.placement import placement_svg
from flowrl.drawing.svg import escape
from flowrl.drawing.timeline import timeline_svg

_STYLE = """
:root{--ink:#212529;--faded:#5c636a;--paper:#fff;--panel:#f8f9fa;--line:#dee2e6}
@media(prefers-color-scheme:dark){:root{--ink:#e9ecef;--faded:#a5adb5;--paper:#15171a;--panel:#1e2125;--line:#343a40}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:26px;margin:0 0 14px;overflow-wrap:anywhere}h2{font-size:19px;margin:36px 0 12px}
.cards{display:flex;flex-wrap:wrap;gap:12px}
.card{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:10px 16px;min-width:150px}
.card .name{color:var(--faded);font-size:12.5px}.card .value{font-size:20px;font-variant-numeric:tabular-nums}
.picture{overflow-x:auto}.picture svg{display:block;margin:0 auto}
.wide{overflow-x:auto}table{border-collapse:collapse}
th,td{padding:3px 18px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);font-size:13.5px;
overflow-wrap:break-word;font-variant-numeric:tabular-nums}th{font-weight:500;color:var(--faded)}
pre{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px;overflow-x:auto;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
footer{margin-top:48px;color:var(--faded);font-size:12.5px}
"""


def mapping_html(mapping: Mapping, title: str = "Plan") -> str:
    """The whole page: the pace and how good it is, timeline, placement, tables, and :func:`explain`'s text."""
    sections = [
        ("", _cards(mapping)),
        ("Timeline", f'<div class="picture">{timeline_svg(mapping)}</div>'),
        ("Placement", f'<div class="picture">{placement_svg(mapping)}</div>'),
        ("Units", _units(mapping)),
        ("Weights that move in every iteration", _moves(mapping)),
        ("Memory of a unit while it runs", _memory(mapping)),
        ("Other placements", _alternatives(mapping, mapping.alternatives)),
        ("What if", _alternatives(mapping, mapping.what_ifs)),
        ("In words", f"<pre>{escape(explain(mapping), 200_000)}</pre>"),
    ]
    name = escape(title, 200)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n<body><main><h1>{name}</h1>\n"
        + "\n".join(_section(heading, content) for heading, content in sections if content)
        + "\n<footer>Written by flowrl. Every time and size is an estimate.</footer></main></body></html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section>{f'<h2>{heading}</h2>' if heading else ''}{content}</section>"


def _cards(mapping: Mapping) -> str:
    devices = sum(pool.nodes * pool.gpus_per_node for pool in mapping.pools)
    shown = [
        ("an iteration, estimated", seconds(mapping.period)),
        ("devices", f"{devices:,}"),
        ("busy", share(utilisation(mapping))),
        ("above the lower bound", "nothing" if mapping.exact else f"at most {share(mapping.gap)}"),
        ("rates", mapping.calibrated),
    ]
    cards = "".join(
        f'<div class="card"><div class="name">{name}</div><div class="value">{escape(value, 80)}</div></div>'
        for name, value in shown
    )
    where = listed(pool_text(pool) for pool in mapping.pools)
    return f'<p>{escape(where)}. {escape(bound_text(mapping))}</p><div class="cards">{cards}</div>'


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell, 400)}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _units(mapping: Mapping) -> str:
    meshes = {mesh.name: mesh for mesh in mapping.meshes}
    rows = []
    for unit in mapping.units:
        mesh = meshes.get(unit.mesh)
        where = devices_text(mapping, mesh.pool, mesh.start, mesh.start + mesh.size) if mesh else ""
        how = parallelism_text(unit.parallelism, unit.kind, unit.offload)
        parts = [seconds(s) for s in (unit.compute, unit.memory, unit.link, unit.bubble, unit.move_seconds)]
        rows.append([unit.label, unit.kind, unit.model, f"{unit.mesh}: {where}", how, seconds(unit.seconds), *parts])
    titles = ["unit", "does", "Model", "on", "how", "estimated", "compute", "memory", "link", "bubble", "weights"]
    return _table(titles, rows)


def _moves(mapping: Mapping) -> str:
    titles = ["Model", "from", "to", "bytes", "most received", "most sent", "transfers", "slowest link", "estimated"]
    return _table(
        titles,
        (
            [m.model, m.writer, m.reader, size(m.total_bytes), size(m.bytes_received), size(m.bytes_sent)]
            + [f"{m.transfers:,}", m.tier or "none", seconds(m.seconds)]
            for m in mapping.moves
        ),
    )


def _memory(mapping: Mapping) -> str:
    rows = ([u.label, size(u.by_cause.total), causes_text(u.by_cause, u.by_cause.total)] for u in mapping.units)
    return _table(["unit", "estimated", "by cause"], rows)


def _alternatives(mapping: Mapping, alternatives: Sequence[Alternative]) -> str:
    rows = []
    for other in alternatives:
        if other.seconds is None:
            rows.append([other.name, "cannot be", "", other.why_not or "it does not fit"])
        else:
            rows.append([other.name, seconds(other.seconds), change(other.seconds, mapping.period), other.why_not])
    return _table(["", "estimated", "difference", ""], rows)
