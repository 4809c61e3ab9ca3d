"""What something else would cost: more nodes, longer or shorter responses."""

from __future__ import annotations

from dataclasses import replace

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.flow_units import units_of
from flowrl.compiler.mapper import Request, map_flow
from flowrl.compiler.mapping import Alternative
from flowrl.compiler.placement import ASIDE, PlacementError
from flowrl.compiler.work import Lengths
from flowrl.errors import FlowError


def what_ifs(request: Request, period: float) -> tuple[Alternative, ...]:
    """Seconds of an iteration under some changes, by a shorter search than the plan's own; never worse than the plan where
    the change can be left unused.

    Args:
        period: seconds of the plan.
    """
    lengths = request.lengths
    units = units_of(request.flow, request.elided, lengths).units
    longest = max(u.work.max_response_tokens for u in units)
    mean = max(u.work.response_tokens for u in units)
    more = _with_more(request.cluster, 1)
    asked = [(f"one node more ({_described(more)})", replace(request, cluster=more), True)]
    twice = _with_more(request.cluster, request.cluster.pools[0].nodes)
    asked.append((f"twice the nodes ({_described(twice)})", replace(request, cluster=twice), True))
    for factor, name in ((2.0, "twice the response tokens"), (0.5, "half the response tokens")):
        changed = Lengths(lengths.prompt, mean * factor, longest * factor)
        asked.append((name, replace(request, lengths=changed), False))
    return tuple(_answer(name, other, period if spare else None) for name, other, spare in asked)


def _answer(name: str, request: Request, most: float | None) -> Alternative:
    try:
        seconds = map_flow(request, budget=ASIDE, exact_budget=0).placed.cost.period
    except PlacementError as error:
        return Alternative(name, None, str(error).partition(". ")[0])
    except FlowError as error:
        return Alternative(name, None, str(error))
    return Alternative(name, seconds if most is None else min(seconds, most))


def _with_more(cluster: Cluster, nodes: int) -> Cluster:
    """With more nodes in the first pool."""
    first, *others = cluster.pools
    return Cluster.of((first.with_nodes(first.nodes + nodes), *others), cluster.device)


def _described(cluster: Cluster) -> str:
    return " + ".join(f"{p.nodes}×{p.gpus_per_node} {p.device.name}" for p in cluster.pools)
