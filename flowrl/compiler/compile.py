"""compile: check a flow, derive what it implies, place it, and make the Program."""

from __future__ import annotations

from collections.abc import Mapping
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
from flowrl.errors import FlowError
from flowrl.flow import RLFlow
from flowrl.graph import Call, Ref
from flowrl.models import BaseModel, DerivedModel, Model
from flowrl.stable_text import stable_text
from flowrl.weight_edges import follower_label, owner

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
        FlowError: ``micro_batch_tokens`` is not a positive number.
    """
    if micro_batch_tokens < 1:
        raise FlowError("micro_batch_tokens cannot work", expected="at least 1", received=micro_batch_tokens)
    flow.check().raise_if_broken()
    cluster = cluster or Cluster.detect()
    elided = elided_calls(flow)
    order = flow.execution_order()
    plan = Plan(
        calls=tuple(_planned_call(flow, call, cluster, elided) for call in order),
        models=_planned_models(flow, cluster),
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
            ProgramCall(flow.label(c), c.node, {name: _bind(flow, value) for name, value in c.arguments.items()})
            for c in order
        ),
        outputs=tuple(Binding(flow.label(ref), ref._path) for ref in flow.outputs),
        models=flow.models,
        states=flow.states,
        plan=plan,
        graph_svg=graph_svg(graph),
    )


def _planned_call(flow: RLFlow, call: Call, cluster: Cluster, elided: Mapping[str, str]) -> PlannedCall:
    label, writes = flow.label(call), call.node.writes()
    arguments = [(name, value if isinstance(value, tuple) else (value,)) for name, value in call.arguments.items()]
    return PlannedCall(
        label=label,
        node=call.node.name,
        kind=call.node.kind,
        settings=tuple((name, stable_text(value)) for name, value in call.node.settings().items()),
        arguments=tuple((name, tuple(str(_bind(flow, ref)) for ref in refs)) for name, refs in arguments),
        reads=tuple(thing.name for thing in flow.effective_reads(call) if thing not in writes),
        writes=tuple(thing.name for thing in writes),
        device=cluster.device,
        elided=elided.get(label, ""),
    )


def _bind(flow: RLFlow, value: Ref | tuple[Ref, ...]) -> Any:
    if isinstance(value, tuple):
        return tuple(_bind(flow, v) for v in value)
    return Binding(flow.label(value), value._path)


def _planned_models(flow: RLFlow, cluster: Cluster) -> tuple[PlannedModel, ...]:
    writer_of = {id(owner(t)): flow.label(call) for call in flow.calls for t in call.node.writes()}
    writer_of.update({id(m): follower_label(m) for m in flow.followers})
    return tuple(_planned_model(m, cluster, writer_of.get(id(owner(m)), "")) for m in flow.models)


def _planned_model(model: BaseModel, cluster: Cluster, writer: str) -> PlannedModel:
    base: Any = model.base if isinstance(model, DerivedModel) else model
    assert isinstance(base, Model), "checks.possible_settings lets no derived Model of a derived one through"
    return PlannedModel(
        name=model.name,
        kind=model.kind if model.kind != "policy" else base.kind,
        device=base.device or cluster.device,
        dtype=base.dtype,
        autocast=base.autocast,
        engine=base.engine,
        writer=writer,
    )
