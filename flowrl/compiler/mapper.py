"""From a flow and a cluster to a map of devices: units, estimates, placement, transfers, timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowrl.calibration import Calibration
from flowrl.compiler.architecture import Architecture
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.estimate import Estimator
from flowrl.compiler.flow_units import FlowUnit, FlowUnits, source_model, units_of
from flowrl.compiler.model_architecture import architecture_of
from flowrl.compiler.options import options_of
from flowrl.compiler.pins import Pin
from flowrl.compiler.placement import ASIDE, EXACT_BUDGET, Placed, PlacementError, place
from flowrl.compiler.precision import Precision
from flowrl.compiler.problem import RESERVE, Option, Problem, Unit
from flowrl.compiler.work import Lengths
from flowrl.errors import FlowError
from flowrl.flow import RLFlow
from flowrl.models import BaseModel

#: Nodes of the first pool that are tried where there are too few: so many times as many.
LARGER = (2, 4, 8, 16, 32, 64)
#: What a refusal for want of memory says: more devices may do there, and nowhere else.
_NEEDS = " needs "


@dataclass(frozen=True)
class Request:
    """What is asked of the mapper.

    Args:
        flow: whose calls are placed.
        cluster: on what.
        elided: labels of calls that do not run.
        lengths: tokens of a row.
        calibration: rates that were measured; None for those of data sheets.
        pins: by label of a call, what is fixed.
        together: every call on all devices, and each Model in one layout: what the local and the spmd runtime can do.
    """

    flow: RLFlow
    cluster: Cluster
    elided: Mapping[str, str] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    calibration: Calibration | None = None
    pins: Mapping[str, Pin] = field(default_factory=dict)
    together: bool = False


@dataclass(frozen=True)
class Built:
    """A request as a placement problem; options of a unit are empty where it cannot run at all."""

    request: Request
    estimator: Estimator
    flow_units: FlowUnits
    problem: Problem


@dataclass(frozen=True)
class Mapped(Built):
    """The problem with its answer."""

    placed: Placed


def map_flow(request: Request, *, budget: int | None = None, exact_budget: int = EXACT_BUDGET) -> Mapped:
    """Place all units of a flow.

    Raises:
        FlowError: a Model's configuration cannot be read.
        PlacementError: it cannot be: why, with numbers, and the smallest change that would do.
    """
    built = build(request)
    refused = [text for unit in _without_options(built) for text in why_impossible(built, unit)]
    if refused:
        larger = what_would_fit(request) if all(_NEEDS in text for text in refused) else None
        raise PlacementError("This flow does not fit: " + "; ".join(refused), do=larger)
    try:
        placed = _place(built, budget, exact_budget)
    except PlacementError as error:
        raise PlacementError(str(error), do=what_would_fit(request)) from None
    return Mapped(request, built.estimator, built.flow_units, built.problem, placed)


def build(request: Request) -> Built:
    """The placement problem of a request.

    Raises:
        FlowError: the flow holds no Model, or a Model's configuration cannot be read.
    """
    units = units_of(request.flow, request.elided, request.lengths)
    if not units.units:
        raise FlowError("This flow holds no Model, so there is nothing to place", expected="a call with a Model")
    estimator = Estimator(request.cluster, request.calibration)
    read = {edge.reader for edge in units.weights}
    known: dict[object, tuple[Option, ...]] = {}
    placed_units: list[Unit] = []
    options: list[tuple[Option, ...]] = []
    for index, unit in enumerate(units.units):
        architecture, precision = held_as(unit.model)
        pin, beside = _pin_of(request, unit), tuple(held_as(m) for m in unit.beside)
        key = (architecture, precision, unit.work, pin, index in read, beside)
        if key not in known:
            found = options_of(
                estimator,
                architecture,
                unit.work,
                precision,
                read=index in read,
                fixed=pin.columns(),
                sizes=_sizes(request, pin),
                beside=beside,
            )
            known[key] = found if pin.offload is None else tuple(o for o in found if o.offload is pin.offload)
        options.append(known[key])
        weight_bytes = architecture.num_parameters(unit.work.head) * precision.weights
        placed_units.append(
            Unit(unit.label, unit.call, unit.model.name, unit.weights, unit.work, unit.trains, weight_bytes)
        )
    pins = enumerate(_pin_of(request, unit).mesh for unit in units.units)
    pinned = tuple((index, mesh) for index, mesh in pins if mesh is not None)
    problem = Problem(estimator.cluster, tuple(placed_units), units.data, units.weights, tuple(options), pinned)
    return Built(request, estimator, units, problem)


def held_as(model: BaseModel) -> tuple[Architecture, Precision]:
    """What a Model is made of, and in how many bytes it is held."""
    architecture = architecture_of(source_model(model))
    return architecture, Precision.of_model(model, architecture)


def _without_options(built: Built) -> list[FlowUnit]:
    return [u for u, options in zip(built.flow_units.units, built.problem.options, strict=True) if not options]


def _place(built: Built, budget: int | None, exact_budget: int) -> Placed:
    if built.request.together:
        from flowrl.compiler.together import place_together

        return place_together(built.problem)
    return place(built.problem, budget=budget, exact_budget=exact_budget)


def _pin_of(request: Request, unit: FlowUnit) -> Pin:
    pin = request.pins.get(unit.call, Pin())
    if unit.tensor is not None and pin.tensor is None:
        pin = replace(pin, tensor=unit.tensor)
    return replace(pin, pipeline=1) if request.together and pin.pipeline is None else pin


def _sizes(request: Request, pin: Pin) -> dict[int, Sequence[int]] | None:
    if pin.mesh is not None:
        return {pin.mesh.pool: (pin.mesh.size,)}
    return {0: (request.cluster.num_devices,)} if request.together else None


# -- why not, and what would do ------------------------------------------------------------------------------------------


def why_impossible(built: Built, unit: FlowUnit) -> list[str]:
    """Why a unit has no way to run at all, a sentence each: a parallelism that its Model cannot have, or memory."""
    architecture, precision = held_as(unit.model)
    label, request = unit.label, built.request
    cluster, pin = request.cluster, _pin_of(request, unit)
    wrong = []
    if pin.tensor is not None and architecture.num_heads % pin.tensor:
        wrong.append(
            f"{label}: tensor is pinned to {pin.tensor}; expected a divisor of the {architecture.num_heads} attention heads "
            f"of {unit.model.name}"
        )
    if pin.pipeline is not None and pin.pipeline > architecture.num_layers:
        wrong.append(
            f"{label}: pipeline is pinned to {pin.pipeline}; expected at most the {architecture.num_layers} layers of "
            f"{unit.model.name}"
        )
    if pin.mesh is not None:
        pinned = pin.columns()
        product = pinned.get("data", 1) * pinned.get("tensor", 1) * pinned.get("pipeline", 1)
        if pin.mesh.size % product:
            wrong.append(
                f"{label}: data × tensor × pipeline is pinned to a multiple of {product}; expected a divisor of the "
                f"{pin.mesh.size} devices of its mesh"
            )
    if wrong:
        return wrong
    least: tuple[float, float, float] | None = None
    for pool in range(len(cluster.pools)):
        sizes = (_sizes(request, pin) or {}).get(pool, cluster.sizes(pool))
        table = built.estimator.table(
            architecture, unit.work, pool, sizes, precision=precision, memory_limit=math.inf, fixed=pin.columns()
        )
        if len(table.seconds):
            need = table.held + table.transient
            best = int(need.argmin())
            found = (float(need[best]), float(table.held[best]), float(table.transient[best]))
            least = found if least is None or found < least else least
    if least is None:
        pinned = ", ".join(f"{name} {value}" for name, value in vars(pin).items() if value is not None)
        return [
            f"{label}: no parallelism of {unit.model.name} over {cluster.num_devices} devices suits what is pinned "
            f"({pinned or 'nothing'})"
        ]
    room = max(pool.device.memory_bytes for pool in cluster.pools) * (1 - RESERVE)
    return [
        f"{label}{_NEEDS}{least[0] / 1e9:.1f} GB on a device, spread as thinly as it can be ({least[1] / 1e9:.1f} GB of weights "
        f"and optimiser, {least[2] / 1e9:.1f} GB while it runs); a plan may use {room / 1e9:.1f} GB of each"
    ]


def what_would_fit(request: Request) -> str | None:
    """The fewest nodes with which it fits, in words; None where none of a few larger clusters does."""
    free = replace(request, pins={label: replace(pin, mesh=None) for label, pin in request.pins.items()})
    nodes = [pool.nodes for pool in request.cluster.pools]

    def fits(more: int) -> bool:
        return _fits_on(replace(free, cluster=_with_nodes(request.cluster, more)))

    least = 0
    for factor in LARGER:
        most = (factor - 1) * nodes[0]
        if fits(most):
            while most - least > 1:
                middle = (least + most) // 2
                least, most = (least, middle) if fits(middle) else (middle, most)
            pools = _with_nodes(request.cluster, most).pools
            found = " + ".join(f"{p.nodes} nodes of {p.gpus_per_node} {p.device.name}" for p in pools)
            return f"it fits on {found}; or take smaller Models, shorter rows, or fewer pins"
        least = most
    return None


def _with_nodes(cluster: Cluster, more: int) -> Cluster:
    """With more nodes in the first pool."""
    first, *others = cluster.pools
    return Cluster.of((first.with_nodes(first.nodes + more), *others), cluster.device)


def _fits_on(request: Request) -> bool:
    built = build(request)
    if _without_options(built):
        return False
    try:
        _place(built, ASIDE, 0)
    except PlacementError:
        return False
    return True
