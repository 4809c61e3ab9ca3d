"""compile: check a flow, derive what it implies, place it, and make the Program."""

from __future__ import annotations

from typing import Any

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.derive import elided_calls
from flowrl.compiler.plan import (
    Binding,
    Plan,
    PlannedCall,
    PlannedModel,
    PlannedWeightEdge,
    Program,
    ProgramCall,
)
from flowrl.display import graph_svg
from flowrl.flow import RLFlow, follower_label
from flowrl.graph import Ref
from flowrl.models import BaseModel, DerivedModel, Model

DEFAULT_MICRO_BATCH_TOKENS = 4096


def compile(
    flow: RLFlow, cluster: Cluster | None = None, *, micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
) -> Program:
    """Make a Program of a flow.

    Args:
        cluster: what it runs on; by default the best single device of this machine.
        micro_batch_tokens: token budget of one forward pass in training and scoring.

    Raises:
        CheckError: the flow breaks rules; all of them are in the message.
    """
    flow.check().raise_if_broken()
    cluster = cluster or Cluster.detect()
    elided = elided_calls(flow)
    order = flow.execution_order()
    writer_of = {
        id(thing): flow.label(call) for call in flow.calls for thing in call.node.writes()
    }
    writer_of.update({id(m): follower_label(m) for m in flow.followers})
    plan = Plan(
        calls=tuple(
            PlannedCall(
                label=flow.label(call),
                node=call.node.name,
                kind=call.node.kind,
                arguments=tuple(
                    (name, tuple(str(b) for b in _as_tuple(_bind(flow, value)))) for name, value in call.arguments.items()
                ),
                reads=tuple(t.name for t in flow.effective_reads(call) if t not in call.node.writes()),
                writes=tuple(t.name for t in call.node.writes()),
                device=cluster.device,
                elided=elided.get(flow.label(call), ""),
            )
            for call in order
        ),
        models=tuple(_planned_model(m, cluster, writer_of.get(id(m), "")) for m in flow.models),
        weight_edges=tuple(
            PlannedWeightEdge(e.model, e.writer, e.reader, e.max_staleness)
            for e in flow.weight_edges
            if e.reader not in elided
        ),
        derived_writers=tuple((follower_label(m), m.base.name) for m in flow.followers),
        micro_batch_tokens=micro_batch_tokens,
        device=cluster.device,
    )
    graph = flow.graph
    for label in elided:
        graph.nodes[label]["elided"] = True
    return Program(
        calls=tuple(
            ProgramCall(
                flow.label(call),
                call.node,
                {name: _bind(flow, value) for name, value in call.arguments.items()},
            )
            for call in order
        ),
        outputs=tuple(Binding(flow.label(ref), ref._path) for ref in flow.outputs),
        models=flow.models,
        states=flow.states,
        plan=plan,
        graph_svg=graph_svg(graph),
    )


def _bind(flow: RLFlow, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_bind(flow, v) for v in value)
    assert isinstance(value, Ref)
    return Binding(flow.label(value), value._path)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _planned_model(model: BaseModel, cluster: Cluster, writer: str) -> PlannedModel:
    base: Any = model.base if isinstance(model, DerivedModel) else model
    assert isinstance(base, Model)
    return PlannedModel(
        name=model.name,
        kind=model.kind if model.kind != "policy" else base.kind,
        device=base.device or cluster.device,
        dtype=base.dtype,
        autocast=base.autocast,
        engine=base.engine,
        writer=writer,
    )
