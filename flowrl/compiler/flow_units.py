"""From a flow to the units that are placed: what each call does with each of its Models, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowrl.batches import Preferences
from flowrl.compiler.problem import WeightEdge
from flowrl.compiler.work import Kind, Lengths, Work
from flowrl.flow import RLFlow
from flowrl.graph import Call
from flowrl.models import BaseModel, DerivedModel, Frozen, Model, ValueHead
from flowrl.nodes.loss import Loss
from flowrl.nodes.rollout import Rollout
from flowrl.nodes.source import Source
from flowrl.weight_edges import owner


@dataclass(frozen=True)
class FlowUnit:
    """One call's use of one Model.

    Args:
        label: the call's; with the Model's name where the call holds several.
        call: label of the call.
        model: that is used.
        weights: name of the Model whose weights these are.
        work: what it does in an iteration.
        trains: whether it writes the weights.
        beside: Models that its losses hold, and that run on its devices on its rows.
        tensor: tensor parallelism that the node itself asks for; None where it does not.
    """

    label: str
    call: str
    model: BaseModel
    weights: str
    work: Work
    trains: bool
    beside: tuple[BaseModel, ...] = ()
    tensor: int | None = None


@dataclass(frozen=True)
class FlowUnits:
    """All of a flow.

    Args:
        units: in execution order.
        data: (before, after), indices of units, within one iteration.
        weights: who reads what whom writes.
    """

    units: tuple[FlowUnit, ...]
    data: tuple[tuple[int, int], ...]
    weights: tuple[WeightEdge, ...]


def units_of(flow: RLFlow, elided: Mapping[str, str], lengths: Lengths) -> FlowUnits:
    """The units of a flow.

    Args:
        elided: labels of calls that do not run.
        lengths: tokens of a row.
    """
    order = flow.execution_order()
    rows, groups = _rows(order)
    longest = max((c.node.sampling.max_new_tokens for c in order if isinstance(c.node, Rollout)), default=None)
    units: list[FlowUnit] = []
    for call in order:
        if flow.label(call) not in elided and not isinstance(call.node, Loss):
            units += _units_of_call(flow, call, rows, groups, lengths, longest)
    of_call: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        of_call.setdefault(unit.call, []).append(index)
    return FlowUnits(tuple(units), _data_edges(flow, order, of_call), _weight_edges(flow, units, of_call))


def _units_of_call(
    flow: RLFlow,
    call: Call,
    rows: Mapping[int, int],
    groups: Mapping[int, int],
    lengths: Lengths,
    longest: int | None,
) -> Iterator[FlowUnit]:
    node, label = call.node, flow.label(call)
    written = {id(owner(t)) for t in node.writes() if isinstance(t, BaseModel)}
    models = list({id(owner(m)): m for m in node.models()}.values())
    losses = [ref._call.node for _, ref in call.inputs() if isinstance(ref._call.node, Loss)]
    beside = [spec.model for loss in losses if (spec := loss.divergence()) is not None]
    kind: Kind
    for model in models:
        trains = id(owner(model)) in written
        kind = "train" if trains else "generate" if node.kind == "rollout" else "score"
        own = node.sampling.max_new_tokens if isinstance(node, Rollout) else longest
        response = lengths.response or own or lengths.prompt
        epochs = getattr(node, "epochs", 1) if trains else 1
        fed = rows[id(call)] if kind == "generate" else max((rows[id(r._call)] for _, r in call.inputs()), default=1)
        yield FlowUnit(
            label=label if len(models) == 1 else f"{label}/{model.name}",
            call=label,
            model=model,
            weights=_weights_name(model),
            work=Work(
                kind=kind,
                sequences=fed,
                prompt_tokens=lengths.prompt,
                response_tokens=response,
                max_response_tokens=max(response, lengths.max_response or own or response),
                epochs=epochs,
                optimizer_steps=epochs * getattr(node, "num_minibatches", 1) if trains else 1,
                head="lm" if base_kind(model) == "policy" else "value",
                group_size=groups[id(call)],
            ),
            trains=trains,
            beside=tuple(dict.fromkeys(beside)) if trains else (),
            tensor=getattr(node, "tensor_parallel_size", None),
        )


def base_kind(model: BaseModel) -> str:
    """ "policy", "value" or "reward": of a derived Model without a head of its own, its base's."""
    if isinstance(model, DerivedModel) and not isinstance(model, ValueHead):
        return model.base.kind
    return model.kind


def _weights_name(model: BaseModel) -> str:
    """The Model whose weights these are: the frozen base of an adapter is the adapter's own base."""
    if isinstance(model, Frozen) and (model.base.lora or model.base.quantization):
        return model.base.name
    return owner(model).name


def _rows(order: tuple[Call, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """By id of a call: (sequences that it gives in an iteration, those of one prompt). Filters are taken to drop none."""
    rows: dict[int, int] = {}
    groups: dict[int, int] = {}
    for call in order:
        fed = max((rows[id(ref._call)] for _, ref in call.inputs()), default=1)
        group = max((groups[id(ref._call)] for _, ref in call.inputs()), default=1)
        node = call.node
        if isinstance(node, Source):
            group = 2 if issubclass(node.batch_type, Preferences) else 1
            fed = node.batch_size * group
        elif node.kind == "rollout":
            samples = getattr(node, "group_size", 1)
            fed, group = fed * samples, group * samples
        rows[id(call)], groups[id(call)] = fed, group
    return rows, groups


def _data_edges(flow: RLFlow, order: tuple[Call, ...], of_call: Mapping[str, list[int]]) -> tuple[tuple[int, int], ...]:
    """Units whose results others wait for, calls without a Model in between left out."""
    makers: dict[int, set[int]] = {}  # by id of a call, the units that its result waits for directly
    edges: set[tuple[int, int]] = set()
    for call in order:
        fed = {u for _, ref in call.inputs() for u in makers[id(ref._call)]}
        mine = of_call.get(flow.label(call), [])
        edges |= {(u, v) for u in fed for v in mine}
        makers[id(call)] = set(mine) if mine else fed
    return tuple(sorted(edges))


def _weight_edges(flow: RLFlow, units: list[FlowUnit], of_call: Mapping[str, list[int]]) -> tuple[WeightEdge, ...]:
    found: dict[tuple[int, int], int] = {}
    for edge in flow.weight_edges:
        writers = [u for u in of_call.get(edge.writer, []) if units[u].trains]
        for reader in of_call.get(edge.reader, []):
            for writer in writers:
                if units[reader].weights == units[writer].weights and reader != writer:
                    found[writer, reader] = edge.max_staleness
    writer_of = {unit.weights: u for u, unit in enumerate(units) if unit.trains}
    for reader, unit in enumerate(units):  # the base of an adapter: the trainer's copy may serve
        if isinstance(unit.model, Frozen) and unit.weights in writer_of and unit.weights != unit.model.name:
            found.setdefault((writer_of[unit.weights], reader), 0)
    return tuple(WeightEdge(writer, reader, lag) for (writer, reader), lag in sorted(found.items()))


def source_model(model: BaseModel) -> Model:
    """The Model that says where the weights come from."""
    base = model.base if isinstance(model, DerivedModel) else model
    assert isinstance(base, Model), "checks.possible_settings lets no derived Model of a derived one through"
    return base
