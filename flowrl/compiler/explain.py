"""A mapping in words and numbers: what goes where and why, what binds, what else was considered."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence

from flowrl.compiler.figures import change, count, devices_text, flops, listed, pool_text, seconds, share, size
from flowrl.compiler.mapping import Alternative, Mapping, MemoryByCause, PlannedMesh, PlannedMove, PlannedUnit, Stretch
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.schedule import occupancy, utilisation
from flowrl.drawing.svg import one_line

WIDTH = 110
#: What is less than this share of a device's memory is not named by its cause.
_LITTLE = 0.005
_CAUSES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "activations": "activations",
    "logits": "logits",
    "kv_cache": "KV cache",
    "buckets": "buckets",
}
_BINDS = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "link": "links between devices",
    "bubble": "pipeline bubbles",
}


def explain(mapping: Mapping) -> str:
    """What goes where and why, for a terminal of 110 columns. Every time in it is an estimate, and called so."""
    sections = [
        ("", _headline(mapping)),
        ("Where", _meshes(mapping)),
        ("How, and what binds (estimated seconds in one iteration)", _units(mapping)),
        ("Weights that move in every iteration (estimates)", [_move(move) for move in mapping.moves]),
        ("Memory of a device (estimates)", _memory(mapping)),
        ("What sets the pace", _critical(mapping)),
        ("Other placements (estimated seconds of an iteration)", _alternatives(mapping, mapping.alternatives)),
        ("What if (estimated seconds of an iteration, placed anew)", _alternatives(mapping, mapping.what_ifs)),
    ]
    out: list[str] = []
    for title, lines in sections:
        if lines:
            out += [*([""] if out else []), *([title] if title else [])]
            out += [wrapped for line in lines for wrapped in _wrap(line, "  " if title else "")]
    return "\n".join(out)


#: The space between a number and its unit, where no line ends.
_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|[TGMk]?B|%|TFLOP/s)(?![\w/]))")


def _wrap(line: str, indent: str) -> list[str]:
    deeper = indent + "    " + " " * (len(line) - len(line.lstrip(" ")))
    together = _UNIT.sub("\N{NO-BREAK SPACE}", line)
    wrapped = textwrap.wrap(together, WIDTH, initial_indent=indent, subsequent_indent=deeper)
    return [text.replace("\N{NO-BREAK SPACE}", " ").rstrip() for text in wrapped]


def parallelism_text(parallelism: Parallelism, kind: str, offload: bool = False) -> str:
    """``4 data-parallel × 2 tensor-parallel, ZeRO-3, 8 micro-batches``; ``one device`` for one."""
    axes = [
        f"{n} {name}"
        for n, name in (
            (parallelism.data, "data-parallel"),
            (parallelism.tensor, "tensor-parallel"),
            (parallelism.pipeline, "pipeline stages"),
        )
        if n > 1
    ]
    parts = [" × ".join(axes) or "one device"]
    parts += [f"ZeRO-{parallelism.zero}"] if parallelism.zero else []
    parts += ["activations computed again"] if parallelism.checkpointing else []
    nouns = {"train": "micro-batch", "score": "pass", "generate": "wave"}
    if parallelism.micro_batches > 1:
        noun = nouns.get(kind, "part")
        parts.append(f"{parallelism.micro_batches} {noun}{'es' if noun[-1] in 'hs' else 's'}")
    parts += ["in host memory while it does not run"] if offload else []
    return ", ".join(parts)


def bound_text(mapping: Mapping) -> str:
    """How good the placement is known to be, in one sentence."""
    if mapping.exact:
        return "This is the best placement there is under these estimates: all others were tried or excluded."
    if mapping.lower_bound <= 0:
        return "How far it is from the best one is not known."
    near = "as good as the best one" if mapping.gap < 5e-5 else f"within {share(mapping.gap)}"
    return f"No placement can be under {seconds(mapping.lower_bound)}; this one is {near}."


def shape_of(mapping: Mapping) -> str:
    """ "colocated" on one mesh, "split" on meshes that share no device, else "mixed"."""
    if len(mapping.meshes) == 1:
        return "colocated"
    return "mixed" if any(_overlap(a, b) for a, b in itertools.combinations(mapping.meshes, 2)) else "split"


def _overlap(a: PlannedMesh, b: PlannedMesh) -> bool:
    return a.pool == b.pool and a.start < b.start + b.size and b.start < a.start + a.size


# -- sections -------------------------------------------------------------------------------------------------------------


def _headline(mapping: Mapping) -> list[str]:
    lines = [
        f"An iteration takes {seconds(mapping.period)}, by estimate, in the steady state, on "
        f"{listed(pool_text(p) for p in mapping.pools)}.",
        bound_text(mapping) + f" {count(mapping.evaluations, 'assignment')} rated.",
    ]
    best = next((a for a in mapping.alternatives if a.seconds is not None), None)
    shapes = {
        "colocated": "All units share their devices, and take turns.",
        "split": "Units have devices of their own, or share them with few others.",
        "mixed": "Some units share devices and take turns, others run beside them.",
    }
    words = shapes[shape_of(mapping)] if len(mapping.units) > 1 else "There is one unit."
    if best is not None and best.seconds is not None:
        words += f" The runner-up, {one_line(best.name)}, would take {seconds(best.seconds)}"
        words += f" ({_worse(best.seconds, mapping.period)})."
    lines.append(words)
    lines.append(f"Devices are busy {share(utilisation(mapping))} of the time. Rates: {one_line(mapping.calibrated)}.")
    if mapping.prompt_tokens or mapping.response_tokens:
        lines.append(
            f"Lengths assumed: prompts of {mapping.prompt_tokens:,.0f} tokens, responses of "
            f"{mapping.response_tokens:,.0f}, the longest of {mapping.max_response_tokens:,.0f}."
        )
    return lines


def _meshes(mapping: Mapping) -> list[str]:
    lines = []
    names = _column(m.name for m in mapping.meshes)
    places = _column(devices_text(mapping, m.pool, m.start, m.start + m.size) for m in mapping.meshes)
    for mesh, name, place in zip(mapping.meshes, names, places, strict=True):
        units = [one_line(unit.label) for unit in mapping.units if unit.mesh == mesh.name]
        lines.append(f"{name}  {count(mesh.size, 'device'):>13}  {place}  {', '.join(units) or 'nothing'}")
    used = sum(s.stop - s.start for s in mapping.stretches)
    unused = sum(p.nodes * p.gpus_per_node for p in mapping.pools) - used
    if mapping.stretches and unused > 0:
        lines.append(f"{count(unused, 'device')} run{'s' if unused == 1 else ''} nothing.")
    for spent, stretch in zip(occupancy(mapping), mapping.stretches, strict=True):
        if spent.idle > _LITTLE * mapping.period:
            place = devices_text(mapping, stretch.pool, stretch.start, stretch.stop)
            lines.append(f"{place}: busy {seconds(spent.busy)}, idle {seconds(spent.idle)} of each iteration.")
    return lines


def _units(mapping: Mapping) -> list[str]:
    meshes = {mesh.name: mesh for mesh in mapping.meshes}
    lines: list[str] = []
    labels = _column(unit.label for unit in mapping.units)
    for unit, label in zip(mapping.units, labels, strict=True):
        how = parallelism_text(unit.parallelism, unit.kind, unit.offload)
        lines.append(
            f"{label}  {seconds(unit.seconds):>8}  {unit.kind} {one_line(unit.model)} on {one_line(unit.mesh)}: {how}"
        )
        lines.append(f"    {_binding(mapping, unit, meshes.get(unit.mesh))}")
    return lines


def _binding(mapping: Mapping, unit: PlannedUnit, mesh: PlannedMesh | None) -> str:
    parts = {name: getattr(unit, name) for name in _BINDS}
    total = sum(parts.values())
    if not total:
        return "takes no time by estimate"
    order = sorted(parts, key=lambda name: -parts[name])
    text = (
        f"{_BINDS[order[0]]} bind{'s' if order[0] in ('compute', 'memory') else ''} ({share(parts[order[0]] / total)})"
    )
    rest = [f"{_BINDS[n]} {share(parts[n] / total)}" for n in order[1:] if parts[n] > _LITTLE * total]
    text += ", then " + listed(rest) if rest else ""
    if unit.move_seconds:
        text += f"; {seconds(unit.move_seconds)} of it to bring its weights"
    if unit.flops and unit.seconds and mesh is not None:
        rate = unit.flops / (unit.seconds * mesh.size)
        peak = mapping.pools[mesh.pool].device.flops
        text += f"; {flops(rate)} a device" + (f", {share(rate / peak)} of its peak" if peak else "")
    return text


def _move(move: PlannedMove) -> str:
    head = f"{one_line(move.model)}: {one_line(move.writer)} → {one_line(move.reader)}"
    if not move.total_bytes:
        if move.seconds:
            return f"{head}: comes from the host's memory in {seconds(move.seconds)}, where the writer is offloaded"
        return f"{head}: nothing moves, the reader uses what the writer holds"
    over = f" over {one_line(move.tier)}" if move.tier else ""
    transfers = f", {count(move.transfers, 'transfer')}" if move.transfers else ""  # 0 where they were not listed
    return (
        f"{head}: {size(move.total_bytes)}{over} in {seconds(move.seconds)}{transfers}; "
        f"at most {size(move.bytes_received)} to a device, {size(move.bytes_sent)} from one, "
        f"{size(move.peak_extra_bytes)} beside both layouts"
    )


def _memory(mapping: Mapping) -> list[str]:
    lines = []
    places = _column(devices_text(mapping, s.pool, s.start, s.stop) for s in mapping.stretches)
    for stretch, place in zip(mapping.stretches, places, strict=True):
        full = (stretch.held + stretch.transient) / stretch.capacity if stretch.capacity else 0.0
        lines.append(
            f"{place}  {size(stretch.held + stretch.transient)} of the {size(stretch.capacity)} that a plan may use "
            f"({share(full)}): {size(stretch.held)} held, {size(stretch.transient)} more while the largest runs"
        )
    fullest = max(mapping.stretches, key=_fullness, default=None)
    if fullest is not None:
        here = devices_text(mapping, fullest.pool, fullest.start, fullest.stop)
        lines.append(f"By cause{f' on {here}' if len(mapping.stretches) > 1 else ''}, for each unit while it runs:")
        units = [unit for unit in mapping.units if unit.label in fullest.units]
        for unit, label in zip(units, _column(unit.label for unit in units), strict=True):
            lines.append(f"    {label}  {size(unit.by_cause.total)}: {causes_text(unit.by_cause, fullest.capacity)}")
    return lines


def _fullness(stretch: Stretch) -> float:
    return (stretch.held + stretch.transient) / stretch.capacity if stretch.capacity else 0.0


def causes_text(by_cause: MemoryByCause, capacity: float) -> str:
    """``weights 4.00 GB, optimiser 24.0 GB``, the largest first, without what is little."""
    found = {name: getattr(by_cause, cause) for cause, name in _CAUSES.items()}
    order = sorted((name for name in found if found[name] > _LITTLE * capacity), key=lambda name: -found[name])
    return ", ".join(f"{name} {size(found[name])}" for name in order) or "next to nothing"


def _critical(mapping: Mapping) -> list[str]:
    by_label = {unit.label: unit for unit in mapping.units}
    chain = [by_label[label] for label in mapping.critical if label in by_label]
    if not chain:
        return []
    if len(chain) == 1 and mapping.critical_span == 1:
        only = chain[0]
        return [
            f"{one_line(only.label)} runs without a pause, {seconds(only.seconds)} an iteration by estimate; all else runs "
            "while it does. Only a faster one, or more devices for it, would help."
        ]
    later = "the next iteration" if mapping.critical_span == 1 else f"{mapping.critical_span} iterations later"
    steps = " → ".join(f"{one_line(unit.label)} {seconds(unit.seconds)}" for unit in chain)
    total = sum(unit.seconds for unit in chain)
    lines = [
        f"{steps} → {one_line(chain[0].label)} of {later}: each waits for the one before, for its output, its weights or "
        "its devices.",
        f"Once around is {seconds(total)} for {count(mapping.critical_span, 'iteration')}, by estimate"
        + (f": {seconds(total / mapping.critical_span)} each." if mapping.critical_span > 1 else "."),
    ]
    beside = [one_line(unit.label) for unit in mapping.units if unit not in chain]
    if beside:
        lines.append(f"Not on it, so that a little more time for {_them(beside)} costs nothing: {', '.join(beside)}.")
    return lines


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _alternatives(mapping: Mapping, alternatives: Sequence[Alternative]) -> list[str]:
    lines = []
    for other, name in zip(alternatives, _column(a.name for a in alternatives), strict=True):
        if other.seconds is None:
            lines.append(f"{name}  cannot be: {one_line(other.why_not) or 'it does not fit'}")
        else:
            note = f"; {one_line(other.why_not)}" if other.why_not else ""
            lines.append(f"{name}  {seconds(other.seconds):>8}  ({_worse(other.seconds, mapping.period)}){note}")
    return lines


def _worse(value: float, base: float) -> str:
    return change(value, base) or "no comparison"


def _column(texts: Iterable[str], most: int = 30) -> list[str]:
    """Texts of users in one line each, as wide as the widest, but one long one pushes not all others aside."""
    lines = [one_line(text) for text in texts]
    width = min(most, max(map(len, lines), default=0))
    return [f"{line:<{width}}" for line in lines]
