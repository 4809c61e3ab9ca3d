"""What an assignment costs: the cycle time against every cycle there is; weights and memory against sums made by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.cycle_time import cycle_time
from flowrl.compiler.problem import (
    RESERVE,
    Choice,
    Problem,
    WeightEdge,
    copies,
    evaluate,
    memory_of,
    move_seconds,
    transfer_seconds,
    waits,
)
from tests.compiler.problems import GB, assignments, choice, problem, unit

Edges = list[tuple[int, int, int]]
TWO_NODES = Cluster("H100", nodes=2, gpus_per_node=8)
NVLINK, NETWORK = TWO_NODES.pools[0].tiers
HOST = TWO_NODES.pools[0].device.host_bandwidth


# -- the cycle time -------------------------------------------------------------------------------------------------------


def by_enumeration(seconds: list[float], edges: Edges) -> float:
    """The largest ratio over all simple cycles, each found by walking all orders of all subsets of the units."""
    lag: dict[tuple[int, int], int] = {}
    for u, v, n in edges:
        lag[u, v] = min(n, lag.get((u, v), n))
    best = 0.0
    for size in range(1, len(seconds) + 1):
        for nodes in itertools.permutations(range(len(seconds)), size):
            if nodes[0] != min(nodes):
                continue
            steps = list(zip(nodes, nodes[1:] + nodes[:1], strict=True))
            if all(step in lag for step in steps):
                span = sum(lag[step] for step in steps)
                best = max(best, sum(seconds[u] for u in nodes) / span)
    return best


@st.composite
def event_graphs(draw: st.DrawFn) -> tuple[list[float], Edges]:
    """Every cycle has a lag: edges without one run upwards."""
    count = draw(st.integers(1, 6))
    seconds = draw(st.lists(st.floats(0.0, 100.0), min_size=count, max_size=count))
    node = st.integers(0, count - 1)
    edges = draw(st.lists(st.tuples(node, node, st.integers(0, 3)), max_size=16))
    return seconds, [(u, u, 1) for u in range(count)] + [(u, v, n if u < v else max(1, n)) for u, v, n in edges]


@given(event_graphs())
@settings(max_examples=300, deadline=None)
def test_cycle_time_is_the_largest_of_all_cycles(graph: tuple[list[float], Edges]) -> None:
    seconds, edges = graph
    ratio, cycle, span = cycle_time(seconds, edges)
    assert ratio == pytest.approx(by_enumeration(seconds, edges), rel=1e-9)
    assert ratio == pytest.approx(sum(seconds[u] for u in cycle) / span, rel=1e-9)
    assert len(set(cycle)) == len(cycle)
    steps = zip(cycle, cycle[1:] + cycle[:1], strict=True)
    assert all(any((u, v) == (a, b) for a, b, _ in edges) for u, v in steps), "the cycle is one of the graph"


@given(assignments())
@settings(max_examples=150, deadline=None)
def test_the_period_is_the_largest_of_all_cycles_of_who_waits(placed: tuple[Problem, list[Choice]]) -> None:
    task, choices = placed
    cost = evaluate(task, choices)
    edges = waits(task, [c.mesh for c in choices], cost.order)
    assert cost.period == pytest.approx(by_enumeration(list(cost.seconds), edges), rel=1e-9)
    assert sorted(cost.order) == list(range(len(task.units)))
    assert all(cost.order.index(u) < cost.order.index(v) for u, v in task.data)


def test_a_cycle_that_is_longer_by_little_is_found() -> None:
    """Many small gains along a long cycle are one gain."""
    count = 40
    seconds = [1.0] + [1e-10] * (count - 1)
    edges = [(u, u, 1) for u in range(count)] + [(u, (u + 1) % count, int(u == count - 1)) for u in range(count)]
    ratio, cycle, span = cycle_time(seconds, edges)
    assert (len(cycle), span) == (count, 1)
    assert ratio == pytest.approx(1 + (count - 1) * 1e-10, rel=1e-12)


def test_cycle_time_of_nothing_that_takes_time() -> None:
    assert cycle_time([0.0, 0.0], [(0, 0, 1), (1, 1, 1), (0, 1, 0), (1, 0, 1)])[0] == 0.0


def test_who_waits_for_whom() -> None:
    units = [unit("rollout", kind="generate"), unit("score"), unit("update", kind="train")]
    task = problem(TWO_NODES, units, [(0, 1), (1, 2)], [WeightEdge(2, 0, 1), WeightEdge(2, 1, 0)])
    meshes = [choice(0, 8, 1.0).mesh, choice(8, 8, 1.0).mesh, choice(8, 4, 1.0).mesh]
    assert set(waits(task, meshes, (0, 1, 2))) == {
        (0, 0, 1), (1, 1, 1), (2, 2, 1),
        (0, 1, 0), (1, 2, 0),  # inputs
        (2, 0, 2),  # the rollout may use a version that is one behind
        (2, 1, 1), (1, 2, 0),  # the score may not, and is done before the version is changed
        (2, 1, 1),  # they take turns on devices 8 to 11
    }  # fmt: skip


def test_who_has_most_to_come_goes_first() -> None:
    """Of two on one device, the one with the long rest."""
    units = [unit("reward", "r"), unit("values", "c"), unit("update", kind="train")]
    task = problem(Cluster("H100", gpus_per_node=2), units, [(1, 2)], [])
    cost = evaluate(task, [choice(0, 1, 2.0), choice(0, 1, 2.0), choice(1, 1, 5.0)])
    assert cost.order == (1, 2, 0)


# -- weights --------------------------------------------------------------------------------------------------------------


def trained_and_read(
    *readers: Choice, writer: Choice, staleness: int = 0, weight_bytes: float = 16 * GB
) -> tuple[Problem, list[Choice]]:
    """Readers of one Model, then its writer."""
    units = [unit(f"r{i}", weight_bytes=weight_bytes) for i in range(len(readers))]
    units.append(unit("update", kind="train", weight_bytes=weight_bytes))
    last = len(readers)
    edges = [WeightEdge(last, i, staleness) for i in range(last)]
    return problem(TWO_NODES, units, [(i, last) for i in range(last)], edges), [*readers, writer]


def kinds(task: Problem, choices: list[Choice]) -> list[object]:
    return [key[0] for key in copies(task, choices)]


def test_the_same_layout_on_the_same_mesh_is_the_writers_own() -> None:
    task, choices = trained_and_read(choice(0, 8, 1.0, tensor=8), writer=choice(0, 8, 1.0, tensor=8))
    assert kinds(task, choices) == ["trained", "trained"]
    assert move_seconds(task, choices) == (0.0, 0.0)


def test_another_layout_on_the_same_mesh_is_regrouped() -> None:
    """ZeRO-3 over 8 ranks holds 2 GB of rows a rank, of which a quarter are in its quarter of 4 GB: 3.5 GB are missing."""
    task, choices = trained_and_read(choice(0, 8, 1.0, tensor=4), writer=choice(0, 8, 1.0, zero=3))
    assert kinds(task, choices) == ["regrouped", "trained"]
    assert move_seconds(task, choices) == (pytest.approx(3.5 * GB / NVLINK.bandwidth + NVLINK.latency), 0.0)


def test_nothing_is_fetched_that_a_rank_holds() -> None:
    """Half of the layers' width is on each rank, a quarter is wanted: there is no message."""
    task, choices = trained_and_read(choice(0, 8, 1.0, tensor=4), writer=choice(0, 8, 1.0, tensor=2))
    assert move_seconds(task, choices) == (0.0, 0.0)


def test_another_mesh_holds_a_copy_which_comes_over_the_network() -> None:
    """Each receiver takes its 2 GB; of 16 GB each of the 8 senders sends 2."""
    task, choices = trained_and_read(choice(8, 8, 1.0, tensor=8), writer=choice(0, 8, 1.0, zero=3))
    assert kinds(task, choices) == ["held", "trained"]
    seconds = 2 * GB / NETWORK.bandwidth + 2 * GB / NETWORK.bandwidth + NETWORK.latency
    assert move_seconds(task, choices) == (pytest.approx(seconds), 0.0)


def test_within_a_node_the_nearer_link_is_used() -> None:
    task, choices = trained_and_read(choice(0, 4, 1.0, tensor=4), writer=choice(4, 4, 1.0, zero=3))
    seconds = 4 * GB / NVLINK.bandwidth + 4 * GB / NVLINK.bandwidth + NVLINK.latency
    assert move_seconds(task, choices)[0] == pytest.approx(seconds)


def test_an_older_version_is_a_copy_even_on_the_writers_mesh() -> None:
    task, choices = trained_and_read(choice(0, 8, 1.0), writer=choice(0, 8, 1.0), staleness=1)
    assert kinds(task, choices) == ["held", "trained"]


def test_readers_that_share_a_copy_are_brought_it_once() -> None:
    readers = [choice(8, 8, 1.0, tensor=8), choice(8, 8, 2.0, tensor=8), choice(8, 8, 1.0, tensor=4)]
    task, choices = trained_and_read(*readers, writer=choice(0, 8, 1.0))
    first, second, other, _ = move_seconds(task, choices)
    assert copies(task, choices)[0] == copies(task, choices)[1] != copies(task, choices)[2]
    assert first > 0 and second == 0 and other > first


def test_weights_of_an_offloaded_trainer_come_from_its_host() -> None:
    writer = choice(0, 8, 1.0, zero=3, weights=2.0 * GB, offload=True)
    task, choices = trained_and_read(choice(0, 8, 1.0, zero=3), writer=writer)
    assert kinds(task, choices) == ["regrouped", "trained"], "what is in host memory is nobody's own"
    assert move_seconds(task, choices)[0] == pytest.approx(2 * GB / HOST)


def test_between_pools_the_slower_network_counts() -> None:
    cluster = Cluster("H100", nodes=2) + Cluster("L40S", nodes=2)
    writer, reader = choice(0, 8, 1.0), choice(0, 8, 1.0, pool=1, tensor=8)
    slow = cluster.pools[1].tiers[-1]
    expected = 2 * GB / slow.bandwidth + 2 * GB / slow.bandwidth + slow.latency
    assert transfer_seconds(cluster, 16 * GB, writer, reader) == pytest.approx(expected)


# -- memory ---------------------------------------------------------------------------------------------------------------


def test_memory_of_stretches() -> None:
    """A trainer on 16 devices, a scorer with a copy of its own on the first 8 of them."""
    writer = choice(0, 16, 1.0, held=30.0, transient=20.0)
    reader = choice(0, 8, 1.0, held=7.0, transient=50.0)
    task, choices = trained_and_read(reader, writer=writer)
    assert memory_of(task, choices) == (((0, 0, 8), 37.0, 50.0), ((0, 8, 16), 30.0, 20.0))


def test_devices_without_a_unit_are_no_stretch() -> None:
    task, choices = trained_and_read(choice(0, 4, 1.0, held=1.0), writer=choice(8, 4, 1.0, held=2.0))
    assert memory_of(task, choices) == (((0, 0, 4), 1.0, 0.0), ((0, 8, 12), 2.0, 0.0))


def test_a_copy_is_held_once() -> None:
    readers = [choice(8, 8, 1.0, held=5.0, transient=1.0), choice(8, 8, 1.0, held=5.0, transient=2.0)]
    task, choices = trained_and_read(*readers, writer=choice(0, 8, 1.0, held=9.0))
    assert memory_of(task, choices) == (((0, 0, 8), 9.0, 0.0), ((0, 8, 16), 5.0, 2.0))


def test_the_writers_own_weights_are_not_held_again() -> None:
    task, choices = trained_and_read(
        choice(0, 8, 1.0, held=5.0, transient=2.0, weights=5.0), writer=choice(0, 8, 1.0, held=9.0, transient=1.0)
    )
    assert memory_of(task, choices) == (((0, 0, 8), 9.0, 2.0),)


def test_a_regrouped_copy_is_there_while_its_reader_runs() -> None:
    reader = choice(0, 8, 1.0, tensor=8, held=5.0, transient=2.0, weights=5.0)
    task, choices = trained_and_read(reader, writer=choice(0, 8, 1.0, held=9.0, transient=1.0))
    assert memory_of(task, choices) == (((0, 0, 8), 9.0, 7.0),)


def test_offloaded_weights_are_counted_once() -> None:
    """What is offloaded has all it needs in its transient: a regrouped copy adds none, the writer's own takes it away."""
    writer = choice(0, 8, 1.0, held=9.0, transient=1.0)
    for tensor, transient in [(8, 7.0), (1, 2.0)]:
        reader = choice(0, 8, 1.0, tensor=tensor, held=0.0, transient=7.0, weights=5.0, offload=True)
        task, choices = trained_and_read(reader, writer=writer)
        assert memory_of(task, choices) == (((0, 0, 8), 9.0, transient),)


def test_what_is_too_large_is_said_by_how_much() -> None:
    capacity = TWO_NODES.pools[0].device.memory_bytes * (1 - RESERVE)
    task, choices = trained_and_read(
        choice(0, 8, 1.0), writer=choice(0, 8, 1.0, held=capacity - 1 * GB, transient=3.0 * GB)
    )
    assert task.memory(0) == capacity
    assert evaluate(task, choices).overfull == pytest.approx(2 * GB)
    smaller = replace(choices[1].option, transient=0.5 * GB)
    assert evaluate(task, [choices[0], replace(choices[1], option=smaller)]).overfull == 0.0
