"""compile: check a flow, derive what it implies, place it, and make the Program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flowrl.adapters import strategy_problems
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
from flowrl.compiler.strategy import Strategy, is_whole
from flowrl.display import graph_svg
from flowrl.errors import FlowError, nearest
from flowrl.flow import RLFlow
from flowrl.graph import Call, Ref
from flowrl.models import BaseModel, DerivedModel, Model, ValueHead
from flowrl.nodes.loss import Loss
from flowrl.stable_text import stable_text
from flowrl.weight_edges import follower_label, owner

if TYPE_CHECKING:
    from flowrl.calibration import Calibration
    from flowrl.compiler.work import Lengths

DEFAULT_MICRO_BATCH_TOKENS = 4096
#: Runtimes whose ranks all run every call.
EVERYWHERE = ("local", "spmd")

#: By Model, or by the name of one. (Keys of a Mapping are invariant: a dict by names alone would not be one by either.)
Strategies = Mapping[Any, Strategy]


def compile(
    flow: RLFlow,
    cluster: Cluster | None = None,
    *,
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
    strategies: Strategies | None = None,
    strategy: Strategy | Literal["auto"] | None = None,
    pin: Mapping[Any, Any] | None = None,
    lengths: Lengths | None = None,
    calibration: Calibration | None = None,
    runtime: str | None = None,
    what_if: bool = False,
) -> Program:
    """Make a Program of a flow.

    On a cluster of several nodes or of a GPU by name the compiler **places** every call: it gives it a mesh and a way to run,
    and the Plan says where, why, and how far from the best that can be at most (``plan.mapping``). On the devices of one
    machine all calls run on all of them, held as ``strategies`` say; ``strategy="auto"`` has the compiler choose there too.

    Args:
        cluster: what it runs on; by default the best single device of this machine.
        micro_batch_tokens: token budget of one forward pass in training and scoring.
        strategies: by Model or name of one, how it is held over devices. A derived Model is held as its base is unless it is
            named itself. Where the compiler places calls, they are pins.
        strategy: of all other Models; by default parameters, gradients and optimiser are sharded over all devices. "auto": the
            compiler places all calls.
        pin: parts of the placement that are fixed by hand: by Ref, label of a call, Model or name of one, a ``Mesh``, a
            ``Strategy`` or a ``Pin``.
        lengths: tokens of a row, as they are expected.
        calibration: rates that were measured (``flowrl calibrate``); by default those of data sheets.
        runtime: what will run the plan: with "local" and "spmd" every call is placed on all devices, each Model in one layout.
        what_if: whether to find out also what other clusters and workloads would take.

    Raises:
        CheckError: the flow breaks rules; all of them are in the message.
        FlowError: ``micro_batch_tokens`` is not a positive number, ``cluster`` is no Cluster, strategies or pins do not fit the
            flow or the cluster, or a Model's configuration cannot be read.
        PlacementError: nothing fits: why, with numbers, and the smallest change that would do.

    Example::

        plan = compile(flow, Cluster("H100", nodes=4), lengths=Lengths(response=900)).plan
        print(plan.explain())
    """
    if not is_whole(micro_batch_tokens, 1):
        raise FlowError(
            "micro_batch_tokens cannot work", expected="a whole number, at least 1", received=repr(micro_batch_tokens)
        )
    flow.check().raise_if_broken()
    cluster = cluster_of(cluster)
    elided = elided_calls(flow)
    mapping = None
    if strategy == "auto" or (strategy is None and is_placed(cluster, runtime)) or pin:
        from flowrl.compiler.placed_flow import placed_flow

        held, mapping = placed_flow(
            flow,
            cluster,
            elided,
            strategies=strategies_by_name(strategies),
            pin=pin,
            lengths=lengths,
            calibration=calibration,
            runtime=runtime,
            what_if=what_if,
        )
    else:
        held = strategies_of(flow.models, cluster, strategies, Strategy() if strategy is None else strategy)
    check_teachers(flow, held)
    order = flow.execution_order()
    plan = Plan(
        calls=tuple(_planned_call(flow, call, cluster, elided) for call in order),
        models=_planned_models(flow, cluster, held),
        weight_edges=tuple(
            PlannedWeightEdge(e.model, e.writer, e.reader, e.max_staleness)
            for e in flow.weight_edges
            if e.reader not in elided
        ),
        derived_writers=tuple((follower_label(m), m.base.name) for m in flow.followers),
        micro_batch_tokens=micro_batch_tokens,
        device=cluster.device,
        num_devices=cluster.num_devices,
        mapping=mapping,
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


def is_placed(cluster: Cluster, runtime: str | None = None) -> bool:
    """Whether the compiler places calls without being asked: on several nodes, pools, or GPUs whose name says what they can
    do, unless a runtime is named that runs every call on all devices."""
    known = any(pool.device.name not in ("CPU", "cuda") for pool in cluster.pools)
    several = len(cluster.pools) > 1 or any(pool.nodes > 1 for pool in cluster.pools)
    return cluster.num_devices > 1 and runtime not in EVERYWHERE and (known or several)


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
        once=label not in elided and not call.node.models() and not isinstance(call.node, Loss),
    )


def _bind(flow: RLFlow, value: Ref | tuple[Ref, ...]) -> Any:
    if isinstance(value, tuple):
        return tuple(_bind(flow, v) for v in value)
    return Binding(flow.label(value), value._path)


def _planned_models(flow: RLFlow, cluster: Cluster, held: Mapping[str, Strategy]) -> tuple[PlannedModel, ...]:
    writer_of = {id(owner(t)): flow.label(call) for call in flow.calls for t in call.node.writes()}
    writer_of.update({id(m): follower_label(m) for m in flow.followers})
    return tuple(_planned_model(m, cluster, writer_of.get(id(owner(m)), ""), held[m.name]) for m in flow.models)


def _planned_model(model: BaseModel, cluster: Cluster, writer: str, strategy: Strategy) -> PlannedModel:
    base = base_of(model)
    return PlannedModel(
        name=model.name,
        kind=model.kind if model.kind != "policy" else base.kind,
        device=base.device or cluster.device,
        dtype=base.dtype,
        autocast=base.autocast,
        engine=base.engine,
        writer=writer,
        strategy=strategy,
    )


# -- strategies --------------------------------------------------------------------------------------------------------


def cluster_of(given: Any, num_devices: int = 1) -> Cluster:
    """The cluster that is meant: the best devices of this machine where none is given.

    Raises:
        FlowError: it is something else.
    """
    if given is None:
        return Cluster.detect(num_devices)
    if not isinstance(given, Cluster):
        raise FlowError(
            "cluster is no Cluster",
            expected="a flowrl.Cluster, or None for this machine's best device",
            received=repr(given),
            do=f"Cluster({given!r})" if isinstance(given, str) and given else None,
        )
    return given


def strategies_by_name(given: Any) -> dict[str, Any]:
    """By name of the Model what is given for it, whether it is a Strategy or not; None gives nothing.

    Raises:
        FlowError: this is no mapping, or its keys are neither Models nor names, or mean one Model twice; all of them.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        single = isinstance(given, Strategy)
        raise FlowError(
            "strategies are no mapping",
            expected="a Strategy by Model, or by the name of one: strategies={'actor': Strategy(…)}",
            received=repr(given),
            do="strategy=…, which is that of all Models" if single else None,
        )
    by_name: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in given.items():
        name = key.name if isinstance(key, BaseModel) else key
        if not isinstance(name, str):
            problems.append(f"strategies have the key {key!r}; expected a Model, or the name of one")
        elif name in by_name:
            problems.append(f"strategies name {name!r} twice, as a Model and by its name; expected one of them")
        else:
            by_name[name] = value
    if problems:
        raise FlowError("These strategies do not fit: " + "; ".join(problems))
    return by_name


def strategies_of(models: Sequence[BaseModel], cluster: Cluster, given: Any, default: Any) -> dict[str, Strategy]:
    """By name of the Model, how it is held.

    Args:
        given: by Model or name of one; None for none.
        default: of all other Models.

    Raises:
        FlowError: strategies of what is no Model here or shares another's weights, that are none, whose settings cannot
            work, or that do not fit the cluster; all of them.
    """
    by_name = strategies_by_name(given)
    known = {m.name: m for m in models}
    problems = [
        f"strategies name {name!r}, which is no Model of this flow; {nearest(name, known)}"
        for name in by_name
        if name not in known
    ]
    problems += [
        f"strategies name {name!r}, {what} of {m.base.name!r}; expected the name of that Model"
        for name, m in known.items()
        if name in by_name and isinstance(m, DerivedModel) and (what := _shares(m))
    ]
    if not isinstance(default, Strategy):
        problems.append(f"strategy is {default!r}; expected a flowrl.Strategy, or None")
        default = Strategy()
    found = {
        name: by_name.get(name, by_name.get(m.base.name, default) if isinstance(m, DerivedModel) else default)
        for name, m in known.items()
    }
    for name, strategy in found.items():
        if not isinstance(strategy, Strategy):
            problems.append(f"the strategy of {name} is {strategy!r}; expected a flowrl.Strategy")
            continue
        model, own = known[name], base_of(known[name])
        on, products = own.device or cluster.device, own.autocast or own.dtype
        problems += [f"{name}: {text}" for text in strategy.problems(cluster.num_devices, device=on, dtype=products)]
        if is_whole(strategy.pipeline_parallel, 2):
            problems.append(
                f"{name}: pipeline_parallel is {strategy.pipeline_parallel}; expected 1: the {own.engine} engine has no stages"
            )
        if not list(strategy.problems()):
            of_adapter = strategy_problems(own.lora, own.quantization, strategy, cluster.num_devices)
            problems += [f"{name}: {text}" for text in of_adapter]
        device = getattr(model, "device", None) or ""
        if cluster.num_devices > 1 and ":" in device:
            problems.append(f"{name}: device is {device!r}; expected None or a kind of device, one for each rank")
    if problems:
        raise FlowError(
            "These strategies do not fit: " + "; ".join(dict.fromkeys(problems)),
            do=_more_ranks(found, cluster.num_devices),
        )
    return found


def check_teachers(flow: RLFlow, held: Mapping[str, Strategy]) -> None:
    """A loss that compares with another Model runs it on the rows of the Model that is trained, rank by rank.

    Raises:
        FlowError: the other one's layers are split over ranks that work on different rows; all such pairs.
    """
    problems: list[str] = []
    for call in flow.calls:
        losses = [ref._call.node for _, ref in call.inputs() if isinstance(ref._call.node, Loss)]
        others = [spec.model.name for loss in losses if (spec := loss.divergence()) is not None]
        for student in (t.name for t in call.node.writes() if isinstance(t, BaseModel)):
            problems += [
                f"{name}: tensor_parallel is {held[name].tensor_parallel}; expected a divisor of "
                f"{held[student].tensor_parallel}, that of {student}, with which a loss compares it"
                for name in others
                if held[student].tensor_parallel % held[name].tensor_parallel
            ]
    if problems:
        raise FlowError("These strategies do not fit: " + "; ".join(dict.fromkeys(problems)))


def base_of(model: BaseModel) -> Model:
    """The Model whose settings say how the weights are held: itself, or what it was made from."""
    base = model.base if isinstance(model, DerivedModel) else model
    assert isinstance(base, Model), "checks.possible_settings lets no derived Model of a derived one through"
    return base


def _shares(model: DerivedModel) -> str:
    """What a derived Model holds of its base's weights and cannot hold otherwise; empty where it has its own."""
    if isinstance(model, ValueHead):
        return "a head on the weights"
    return "which is held on the base" if model.base.lora or model.base.quantization else ""


def _more_ranks(strategies: Mapping[str, Strategy], num_ranks: int) -> str | None:
    """What to type where tensor parallelism needs more ranks than there are."""
    asked = [s.tensor_parallel for s in strategies.values() if isinstance(s, Strategy)]
    wanted = max((n for n in asked if is_whole(n, 1)), default=1)
    if num_ranks % wanted == 0:
        return None
    enough = math.lcm(num_ranks, wanted)
    return f"torchrun --nproc-per-node {enough} -m flowrl run FILE --runtime spmd, or another tensor_parallel"
