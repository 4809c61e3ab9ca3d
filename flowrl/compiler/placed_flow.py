"""What compile does with a cluster: place every call, say how each Model is held, and keep the map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrl.compiler.chart import chart
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.compile import EVERYWHERE, base_of
from flowrl.compiler.mapper import Mapped, Request, map_flow
from flowrl.compiler.mapping import Mapping as DeviceMapping
from flowrl.compiler.pins import pins_by_label
from flowrl.compiler.strategy import Strategy
from flowrl.compiler.what_if import what_ifs
from flowrl.compiler.work import Lengths
from flowrl.flow import RLFlow
from flowrl.models import BaseModel, DerivedModel

if TYPE_CHECKING:
    from flowrl.calibration import Calibration


def placed_flow(
    flow: RLFlow,
    cluster: Cluster,
    elided: Mapping[str, str],
    *,
    strategies: Mapping[str, Any],
    pin: Mapping[Any, Any] | None,
    lengths: Lengths | None,
    calibration: Calibration | None,
    runtime: str | None,
    what_if: bool,
) -> tuple[dict[str, Strategy], DeviceMapping]:
    """(by name of the Model how it is held, the map).

    Raises:
        FlowError: pins that do not fit the flow or the cluster, or a Model whose configuration cannot be read.
        PlacementError: nothing fits.
    """
    request = Request(
        flow=flow,
        cluster=cluster,
        elided=elided,
        lengths=lengths or Lengths(),
        calibration=calibration,
        pins=pins_by_label(flow, cluster, pin, strategies),
        together=runtime in EVERYWHERE,
    )
    mapped = map_flow(request)
    others = what_ifs(request, mapped.placed.cost.period) if what_if else ()
    return held_by_model(flow, mapped), chart(mapped, what_ifs=others)


def held_by_model(flow: RLFlow, mapped: Mapped) -> dict[str, Strategy]:
    """By name of the Model, how it is held: as the unit that trains it runs, else as the first that reads it."""
    found: dict[str, Strategy] = {}
    for unit, choice in zip(mapped.flow_units.units, mapped.placed.choices, strict=True):
        strategy = choice.option.parallelism.strategy(cpu_offload=choice.option.offload)
        if unit.trains or unit.model.name not in found:
            found[unit.model.name] = strategy
        if unit.trains:
            found[unit.weights] = strategy
    return {m.name: found.get(m.name) or _of_base(m, found) for m in flow.models}


def _of_base(model: BaseModel, found: Mapping[str, Strategy]) -> Strategy:
    """Of a Model that no call uses by itself: its base's."""
    return found.get(base_of(model).name, Strategy()) if isinstance(model, DerivedModel) else Strategy()
