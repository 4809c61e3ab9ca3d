"""Whose rows a column is about.

Rows are matched by id, and two rollouts of one source mint the same ids: a reward of the one would fit the responses of the
other without a word. In a graph it can be seen, because a column descends from the sequences that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.batches import Advantages, Batch, Prompts, Sequences
from flowrl.graph import Call, Ref
from flowrl.nodes.loss import Loss, owner_of


def columns_of_other_rows(call: Call) -> Iterator[tuple[str, str, str]]:
    """(argument, the sequences' argument, whose rows the column is about) of each input of a loss or an advantage that
    comes from other sequences than those it stands beside. What is matched by prompt may come from anywhere."""
    node = call.node
    if not (isinstance(node, Loss) or node.output_type is Advantages):
        return
    refs = {port.name: ref for port in node.ports if isinstance(ref := call.arguments.get(port.name), Ref)}
    sequences = {name: ref for name, ref in refs.items() if _is(ref, Sequences)}
    for port in node.ports:
        ref = refs.get(port.name)
        if ref is None or port.name in sequences or not _is(ref, Batch) or _is(ref, Prompts):
            continue
        if node.joins.get(port.name) == "prompt" or not sequences:
            continue
        beside = owner_of(port.name, tuple(sequences))
        about = _nearest_sequences(ref._call)
        if about and not any(c in _ancestors(sequences[beside]._call) for c in about):
            yield port.name, beside, " and ".join(c.node.label or f"{c.node.name} at {c.where}" for c in about)


def _is(ref: Ref, kind: type) -> bool:
    return isinstance(ref._type, type) and issubclass(ref._type, kind)


def _nearest_sequences(call: Call) -> list[Call]:
    """The calls whose sequences a column was made from. A filter only lets through, so what it filters counts too; a call
    that makes sequences and columns at once (a record of both) is one of them."""
    found: dict[int, Call] = {}
    seen: set[int] = set()
    stack = [call]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if _makes_a_record(current):
            found[id(current)] = current
        for _, ref in current.inputs():
            if _is(ref, Sequences) or _makes_a_record(ref._call):
                found[id(ref._call)] = ref._call
                if ref._call.node.is_filter:
                    found |= {id(c): c for c in _ancestors(ref._call)}
            else:
                stack.append(ref._call)
    return list(found.values())


def _makes_a_record(call: Call) -> bool:
    kind = call.output_type
    return isinstance(kind, type) and not kind.__module__.startswith("flowrl.")


def _ancestors(call: Call) -> list[Call]:
    """A call and those that its rows come from."""
    found: dict[int, Call] = {}
    stack = [call]
    while stack:
        current = stack.pop()
        if id(current) not in found:
            found[id(current)] = current
            stack += [r._call for _, r in current.inputs() if _is(r, Sequences) or _makes_a_record(r._call)]
    return list(found.values())
