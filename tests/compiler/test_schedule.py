"""The timeline: what waits for what, who shares a device, which version is read, and the pace against an event simulation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.mapping import Mapping, MemoryByCause, PlannedUnit, Slot, Stretch
from flowrl.compiler.problem import Choice, Cost, Problem, WeightEdge, evaluate
from flowrl.compiler.schedule import (
    critical_slots,
    occupancy,
    run_events,
    simulate,
    start_times,
    utilisation,
    warm_up,
)
from tests.compiler.mappings import pools_of
from tests.compiler.problems import assignments, choice, problem, unit

Placed = tuple[Problem, list[Choice]]


def without_moves(placed: Placed) -> tuple[Problem, list[Choice], Cost]:
    """Weights move in no time, so that all seconds are whole numbers."""
    task, choices = placed
    task = replace(task, units=tuple(replace(u, weight_bytes=0.0) for u in task.units))
    pools = tuple(
        replace(pool, tiers=tuple(replace(tier, latency=0.0) for tier in pool.tiers)) for pool in task.cluster.pools
    )
    task = replace(task, cluster=Cluster.of(pools))
    return task, choices, evaluate(task, choices)


def mapping_of(task: Problem, choices: list[Choice], cost: Cost, iterations: int = 3) -> Mapping:
    """What a plan would keep, as far as schedules look at it."""
    labels = [u.label for u in task.units]
    stretches = tuple(
        Stretch(
            pool, start, stop, tuple(labels[u] for u in cost.order if _covers(choices[u], pool, start, stop)), h, t, 1.0
        )
        for (pool, start, stop), h, t in cost.memory
    )
    units = tuple(
        PlannedUnit(
            label, label, "m", "score", "a", c.option.parallelism, False, seconds, 0.0, seconds, 0.0, 0.0, 0.0, 0.0,
            MemoryByCause(0, 0, 0, 0, 0, 0, 0),
        )
        for label, c, seconds in zip(labels, choices, cost.seconds, strict=True)
    )  # fmt: skip
    return Mapping(
        pools_of(task.cluster), (), units, (), stretches, simulate(task, choices, cost, iterations), cost.period,
        tuple(labels[u] for u in cost.critical), cost.critical_span, cost.period, True, 1,
    )  # fmt: skip


def _covers(on: Choice, pool: int, start: int, stop: int) -> bool:
    return on.mesh.pool == pool and on.mesh.start <= start and on.mesh.stop >= stop


# -- laws -----------------------------------------------------------------------------------------------------------------


@given(assignments())
@settings(max_examples=150, deadline=None)
def test_an_event_simulation_reaches_the_period(placed: Placed) -> None:
    """It starts cold, and knows neither edges with lags nor cycles."""
    task, choices, cost = without_moves(placed)
    assert measured_period(task, choices, cost) == pytest.approx(cost.period, rel=1e-9)


def measured_period(task: Problem, choices: list[Choice], cost: Cost) -> float:
    """Seconds an iteration, once iterations repeat: as many consecutive ones as the rules look back, all units a constant
    later than those some iterations before."""
    count = len(choices)
    back = max(3, count)
    for iterations in (60, 300, 1500):
        slots = run_events(task, choices, cost.order, cost.seconds, iterations, in_flight=count)
        starts: dict[int, dict[str, float]] = defaultdict(dict)
        for slot in slots:
            starts[slot.iteration][slot.unit] = slot.start
        last = iterations - 1
        for apart in range(1, 13):
            gaps = {
                starts[i][u.label] - starts[i - apart][u.label]
                for i in range(last - back, last + 1)
                for u in task.units
            }
            if len(gaps) == 1:
                return gaps.pop() / apart
    raise AssertionError("no steady state within 1500 iterations")


@given(assignments())
@settings(max_examples=80, deadline=None)
def test_the_timeline_keeps_every_rule(placed: Placed) -> None:
    task, choices = placed
    task = replace(task, units=tuple(replace(u, weight_bytes=3e9) for u in task.units))
    cost = evaluate(task, choices)
    slots = simulate(task, choices, cost)
    at = {(slot.unit, slot.iteration): slot for slot in slots}
    label = [u.label for u in task.units]
    tolerance = 1e-8 * cost.period
    last = max(slot.iteration for slot in slots)
    for (name, i), slot in at.items():
        assert slot.stop - slot.start == pytest.approx(cost.seconds[label.index(name)])
        assert slot.start >= i * cost.period - tolerance, "nothing starts before its iteration"
    for i in range(last + 1):
        for u, v in task.data:
            assert at[label[v], i].start >= at[label[u], i].stop - tolerance, "an input is there before it is read"
        for edge in task.weights:
            made = i - 1 - edge.staleness
            if made >= 0:
                assert at[label[edge.reader], i].start >= at[label[edge.writer], made].stop - tolerance, "a version"
            if edge.staleness == 0:
                assert at[label[edge.writer], i].start >= at[label[edge.reader], i].stop - tolerance, "not yet read"
    for a in slots:
        for b in slots:
            if a is not b and choices[label.index(a.unit)].mesh.overlaps(choices[label.index(b.unit)].mesh):
                assert a.stop <= b.start + tolerance or b.stop <= a.start + tolerance, "two units on one device"


@given(assignments())
@settings(max_examples=80, deadline=None)
def test_the_cycle_that_binds_is_one_unbroken_chain(placed: Placed) -> None:
    task, choices, cost = without_moves(placed)
    mapping = mapping_of(task, choices, cost)
    chain = critical_slots(mapping)
    assert [slot.unit for slot in chain] == list(mapping.critical)
    around = chain[-1].stop - chain[0].start
    assert around == pytest.approx(cost.critical_span * cost.period)
    assert around == pytest.approx(sum(slot.stop - slot.start for slot in chain)), "nobody on it waits"


@given(assignments())
@settings(max_examples=80, deadline=None)
def test_busy_and_idle_are_the_whole_period(placed: Placed) -> None:
    task, choices, cost = without_moves(placed)
    mapping = mapping_of(task, choices, cost)
    first = warm_up(mapping) * mapping.period
    for stretch, spent in zip(mapping.stretches, occupancy(mapping), strict=True):
        assert spent.busy + spent.idle == pytest.approx(mapping.period) and 0 <= spent.utilisation <= 1 + 1e-9
        inside = [
            max(0.0, min(slot.stop, first + mapping.period) - max(slot.start, first))
            for slot in mapping.slots
            if slot.unit in stretch.units
        ]
        assert sum(inside) == pytest.approx(spent.busy), "the first complete period of the timeline has all of it"
    assert 0 < utilisation(mapping) <= 1 + 1e-9


@given(assignments())
@settings(max_examples=50, deadline=None)
def test_iterations_are_equal_and_numbered(placed: Placed) -> None:
    task, choices, cost = without_moves(placed)
    slots = simulate(task, choices, cost, 2)
    assert list(slots) == sorted(slots, key=lambda s: s.start)
    count = max(s.iteration for s in slots) + 1
    assert count >= 2 and len(slots) == count * len(task.units)
    first = {s.unit: s for s in slots if s.iteration == 0}
    for slot in slots:
        assert slot.start == pytest.approx(first[slot.unit].start + slot.iteration * cost.period)


# -- by hand --------------------------------------------------------------------------------------------------------------


def generate_and_train(staleness: int, apart: bool) -> tuple[Problem, list[Choice], Cost]:
    units = [unit("rollout", kind="generate"), unit("update", kind="train")]
    task = problem(Cluster("H100", gpus_per_node=2), units, [(0, 1)], [WeightEdge(1, 0, staleness)])
    choices = [choice(0, 1, 5.0), choice(1 if apart else 0, 1, 3.0)]
    return without_moves((task, choices))


@pytest.mark.parametrize(
    ("staleness", "apart", "period", "critical"),
    [
        (0, False, 8.0, {"rollout", "update"}),
        (0, True, 8.0, {"rollout", "update"}),  # meshes of their own help nothing where each waits for the other
        (1, True, 5.0, {"rollout"}),  # training hides behind the next iteration's sampling
        (1, False, 8.0, {"rollout", "update"}),  # nor does staleness on the same devices
    ],
)
def test_sampling_and_training(staleness: int, apart: bool, period: float, critical: set[str]) -> None:
    task, choices, cost = generate_and_train(staleness, apart)
    assert cost.period == period
    assert {task.units[u].label for u in cost.critical} == critical
    assert start_times(task, choices, cost) == [0.0, 5.0]


def test_a_writer_waits_for_readers_whose_output_it_does_not_need() -> None:
    """A critic's values that only an advantage reads, say: its weights are not changed under it."""
    units = [unit("values", kind="score"), unit("update", kind="train")]
    for staleness, period in [(0, 8.0), (1, 5.0)]:
        task = problem(Cluster("H100", gpus_per_node=2), units, [], [WeightEdge(1, 0, staleness)])
        task, choices, cost = without_moves((task, [choice(0, 1, 5.0), choice(1, 1, 3.0)]))
        assert cost.period == period == measured_period(task, choices, cost)


def test_iterations_overlap_within_the_staleness() -> None:
    task, choices, cost = generate_and_train(staleness=1, apart=True)
    mapping = mapping_of(task, choices, cost, iterations=2)
    assert warm_up(mapping) == 1
    assert mapping.slots == (
        Slot("rollout", 0, 0.0, 5.0),
        Slot("update", 0, 5.0, 8.0),
        Slot("rollout", 1, 5.0, 10.0),
        Slot("update", 1, 10.0, 13.0),
        Slot("rollout", 2, 10.0, 15.0),
        Slot("update", 2, 15.0, 18.0),
    )
    assert [(o.busy, o.idle) for o in occupancy(mapping)] == [(5.0, 0.0), (3.0, 2.0)]
    assert utilisation(mapping) == pytest.approx(8 / 10)
    assert critical_slots(mapping) == (Slot("rollout", 1, 5.0, 10.0),)


def test_a_cold_start_by_hand() -> None:
    """The first rollouts need no update; with staleness 0 the second one waits for the first."""
    for staleness, starts in [(0, [0, 5, 8, 13]), (1, [0, 5, 5, 10])]:
        task, choices, cost = generate_and_train(staleness, apart=True)
        slots = run_events(task, choices, cost.order, cost.seconds, 2)
        assert [s.start for s in sorted(slots, key=lambda s: (s.iteration, s.unit))] == starts


def test_what_nothing_holds_back_runs_ahead_in_a_cold_run_and_keeps_pace_in_the_timeline() -> None:
    units = [unit("fast"), unit("slow", "other")]
    task = problem(Cluster("H100", gpus_per_node=2), units, [(0, 1)], [])
    task, choices, cost = without_moves((task, [choice(0, 1, 1.0), choice(1, 1, 4.0)]))
    cold = run_events(task, choices, cost.order, cost.seconds, 3)
    assert [s.start for s in cold if s.unit == "fast"] == [0.0, 1.0, 2.0]
    bounded = run_events(task, choices, cost.order, cost.seconds, 3, in_flight=2)
    assert [s.start for s in bounded if s.unit == "fast"] == [0.0, 1.0, 5.0]
    assert [s.start for s in simulate(task, choices, cost) if s.unit == "fast"][:3] == [0.0, 4.0, 8.0]


def test_a_period_that_is_too_short_is_noticed() -> None:
    task, choices, cost = generate_and_train(staleness=0, apart=True)
    with pytest.raises(AssertionError, match="shorter than a cycle"):
        simulate(task, choices, replace(cost, period=7.9))
