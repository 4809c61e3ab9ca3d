"""Weight edges: who reads what an updater writes. Derived from a flow, never drawn by hand.

The cycle in reinforcement learning is here: an updater writes a Model, and in the next iteration other calls read it.
Within one iteration every reader runs before the writer, so the version that it reads is the one that the iteration
began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx

from flowrl.graph import Call
from flowrl.models import BaseModel, DerivedModel, Ema, Snapshot, State
from flowrl.nodes.loss import Loss

if TYPE_CHECKING:
    from flowrl.flow import RLFlow


@dataclass(frozen=True)
class WeightEdge:
    """A call that reads what another call writes.

    Args:
        model: name of the Model or State that is read.
        writer: label of the call, or of the derived writer, that writes it.
        reader: label of the call, or of the derived writer, that reads it.
        max_staleness: in iteration i the reader uses a version in [i − max_staleness, i].
    """

    model: str
    writer: str
    reader: str
    max_staleness: int = 0


def owner(thing: BaseModel | State) -> BaseModel | State:
    """The parameter set that a Model belongs to (a value head's is its trunk's); a State is its own."""
    return thing.parameter_set if isinstance(thing, BaseModel) else thing


def follower_label(model: DerivedModel) -> str:
    """The label of the derived writer of a Snapshot or Ema."""
    return f"{type(model).__name__}({model.name})"


def followed_by(call: Call, followers: Sequence[DerivedModel]) -> tuple[DerivedModel, ...]:
    """Those of the followers (Snapshots and Emas) whose base this call writes."""
    written = [owner(thing) for thing in call.node.writes()]
    return tuple(m for m in followers if any(m.base is w for w in written))


def weight_edges(flow: RLFlow) -> tuple[WeightEdge, ...]:
    """Every (writer → reader) pair of a Model or State; the writers of Snapshots and Emas are derived."""
    writers = flow.writers()
    edges: list[WeightEdge] = []
    for follower in flow.followers:
        for writer in writers.get(id(follower.base), []):
            edges.append(WeightEdge(follower.base.name, flow.label(writer), follower_label(follower)))
    for call in flow.calls:
        if isinstance(call.node, Loss):
            continue  # it runs inside of its updater, which does the reading
        for thing in flow.effective_reads(call):
            reading = (flow.label(call), call.node.staleness())
            if isinstance(thing, Snapshot | Ema):
                edges.append(WeightEdge(thing.name, follower_label(thing), *reading))
            for writer in writers.get(id(owner(thing)), []):
                if writer is not call:
                    edges.append(WeightEdge(thing.name, flow.label(writer), *reading))
    return tuple(dict.fromkeys(edges))


def order_with_readers_first(flow: RLFlow) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """(calls in execution order, the calls of a cycle or nothing).

    A call comes after the calls whose output it takes, and a writer after all readers of what it writes. Ties go by
    recording order.
    """
    graph = nx.DiGraph()
    by_id = {id(c): c for c in flow.calls}
    graph.add_nodes_from(by_id)
    graph.add_edges_from((id(ref._call), id(call)) for call in flow.calls for _, ref in call.inputs())
    writers = flow.writers()
    for call in flow.calls:
        if isinstance(call.node, Loss):
            continue
        for thing in flow.effective_reads(call):
            written_by = writers.get(id(owner(thing)), [])
            if call not in written_by:  # two writers are another error
                graph.add_edges_from((id(call), id(writer)) for writer in written_by)
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=lambda key: by_id[key].order))
        return tuple(by_id[key] for key in order), ()
    except nx.NetworkXUnfeasible:
        return flow.calls, tuple(by_id[a] for a, _ in nx.find_cycle(graph))
