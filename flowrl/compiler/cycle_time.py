"""The cycle time of a timed event graph: who waits for whom, over iterations, and the cycle that sets the pace."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cycle_time(
    seconds: Sequence[float],
    edges: Sequence[tuple[int, int, int]],
    order: Sequence[int] | None = None,
    begin: tuple[float, list[int], int] = (-1.0, [], 1),
    heads: Collection[int] | None = None,
) -> tuple[float, tuple[int, ...], int]:
    """(largest ratio of time to lag over all cycles, the units of one such cycle, its lag).

    Starts from a good cycle, and moves to any cycle with a larger ratio until there is none: each move is to a cycle that
    longest paths under the ratio so far have found, so it ends (Dasdan, "Experimental analysis of the fastest optimum cycle
    ratio and mean algorithms", 2004, §3).

    Args:
        seconds: of each unit.
        edges: (u, v, lag); those without a lag make no cycle, and those with one include (u, u, 1) of every unit.
        order: of the units, that all edges without a lag follow; found where it is not given.
        begin: (ratio, cycle, lag) of a cycle that is known.
        heads: units from which better ones to begin with are looked for; by default all.
    """
    place = [0] * len(seconds)
    for position, u in enumerate(_topological(len(seconds), edges) if order is None else order):
        place[u] = position
    within = sorted((e for e in edges if e[2] == 0), key=lambda e: place[e[0]])
    across = [e for e in edges if e[2] > 0]
    ratio, cycle, span = max(begin, _leaving_once(seconds, within, across, heads), key=lambda found: found[0])
    while found := _larger_cycle(seconds, within + across, ratio):
        cycle, span = found
        ratio = sum(seconds[u] for u in cycle) / span
    return ratio, tuple(cycle), span


def _topological(count: int, edges: Sequence[tuple[int, int, int]]) -> list[int]:
    depth = [0] * count
    for _ in range(count):
        for u, v, lag in edges:
            if lag == 0 and depth[v] <= depth[u]:
                depth[v] = depth[u] + 1
    return sorted(range(count), key=lambda u: depth[u])


def _leaving_once(
    seconds: Sequence[float],
    within: Sequence[tuple[int, int, int]],
    across: Sequence[tuple[int, int, int]],
    heads: Collection[int] | None,
) -> tuple[float, list[int], int]:
    """The best of the cycles with one edge that has a lag, where one begins at a head."""
    best: tuple[float, int, int, int] = (-1.0, 0, 0, 1)
    nowhere = float("-inf")
    ways: dict[int, list[int]] = {}
    for head in sorted({v for _, v, _ in across} if heads is None else heads):
        ends = [nowhere] * len(seconds)
        before = [-1] * len(seconds)
        ends[head] = seconds[head]
        for u, v, _ in within:
            if ends[u] + seconds[v] > ends[v]:
                ends[v], before[v] = ends[u] + seconds[v], u
        ways[head] = before
        for tail, v, lag in across:
            if v == head and ends[tail] / lag > best[0]:
                best = (ends[tail] / lag, head, tail, lag)
    ratio, head, at, lag = best
    if ratio < 0:
        return ratio, [], 1
    cycle = [at]
    while at != head:
        at = ways[head][at]
        cycle.append(at)
    return ratio, cycle[::-1], lag


def _larger_cycle(
    seconds: Sequence[float], edges: Sequence[tuple[int, int, int]], ratio: float
) -> tuple[list[int], int] | None:
    """A cycle whose time exceeds ``ratio`` times its lag, and its lag; None where there is none."""
    count = len(seconds)
    ends = [0.0] * count
    before: list[tuple[int, int] | None] = [None] * count
    slack = 1e-12 * ratio  # a cycle of the same ratio must not be found again and again
    changed = -1
    for _ in range(count + 1):
        changed = -1
        for u, v, lag in edges:
            reached = ends[u] + seconds[u] - ratio * lag
            if reached > ends[v] + slack:
                ends[v], before[v], changed = reached, (u, lag), v
        if changed < 0:
            return None
    at = changed
    for _ in range(count):
        at = _previous(before, at)[0]
    cycle, span, here = [], 0, at
    while True:
        earlier, lag = _previous(before, here)
        cycle.append(earlier)
        span += lag
        here = earlier
        if here == at:
            break
    # Rounding may call the same cycle larger; then there is none.
    return (cycle[::-1], span) if sum(seconds[u] for u in cycle) > ratio * span * (1 + 1e-12) else None


def _previous(before: Sequence[tuple[int, int] | None], at: int) -> tuple[int, int]:
    found = before[at]
    assert found is not None, "every unit of a cycle has one before it"
    return found
