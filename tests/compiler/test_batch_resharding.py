"""Batches between meshes: every device gets the rows of its rank, once, groups whole, from who is near and has sent least."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.compiler.batch_resharding import plan_batch, split_rows
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.generation_layout import generation_layout
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.errors import FlowError

CLUSTER = Cluster("H100", nodes=4, gpus_per_node=4)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 12))
def test_rows_are_split_at_groups_as_evenly_as_these_allow(groups: list[int], parts: int) -> None:
    found = split_rows(groups, parts)
    ends = [0, *itertools.accumulate(groups)]
    assert len(found) == parts and found[0][0] == 0 and found[-1][1] == ends[-1]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    for start, stop in found:
        assert start in ends and stop in ends
        assert 0 <= stop - start <= ends[-1] / parts + max(groups, default=0)


def test_ungrouped_rows_differ_by_one_at_most() -> None:
    for rows in range(40):
        for parts in range(1, 9):
            sizes = [b - a for a, b in split_rows([1] * rows, parts)]
            assert max(sizes) - min(sizes) <= 1


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    data, tensor, pipeline = draw(st.sampled_from([(1, 1, 1), (3, 2, 1), (4, 1, 2), (2, 2, 2), (8, 1, 1), (5, 1, 1)]))
    size = data * tensor * pipeline
    ranks: Any = draw(st.one_of(st.just(()), st.permutations(range(size)).map(tuple)))
    mesh = Mesh(0, draw(st.integers(0, 16 - size)), size)
    return Layout(mesh, Parallelism(data=data, tensor=tensor, pipeline=pipeline), ranks=ranks)


@given(st.lists(st.integers(1, 5), max_size=20), layouts(), layouts(), st.data())
def test_each_device_gets_its_rows_once(groups: list[int], source: Layout, target: Layout, data: st.DataObject) -> None:
    rows = sum(groups)
    sizes = data.draw(st.lists(st.integers(0, 99), min_size=rows, max_size=rows))
    plan = plan_batch(groups, sizes, source, target, CLUSTER)

    def rows_of(layout: Layout, parts: tuple[tuple[int, int], ...]) -> dict[DeviceId, set[int]]:
        return {d: set(range(*parts[layout.coordinates(d).data])) for d in layout.devices}

    have, need = rows_of(source, plan.source_rows), rows_of(target, plan.target_rows)
    got: dict[DeviceId, list[int]] = {d: [] for d in need}
    for t in plan.transfers:
        mine = range(t.start, t.stop)
        assert set(mine) <= have[t.sender] and t.bytes == sum(sizes[r] for r in mine)
        got[t.receiver] += mine
    for device, wanted in need.items():
        assert sorted(got[device]) == sorted(wanted - have.get(device, set()))
        assert plan.bytes_received[device] == sum(sizes[r] for r in got[device])
        kept = [r for c in plan.copies if c.device == device for r in range(c.start, c.stop)]
        assert sorted(kept) == sorted(wanted & have.get(device, set()))
    assert sum(plan.bytes_sent.values()) == sum(plan.bytes_received.values()) == sum(plan.bytes_by_tier.values())


def test_replicas_share_the_sending() -> None:
    """Four tensor ranks with the same rows, sixteen receivers of as many rows each."""
    cluster = Cluster("H100", nodes=5, gpus_per_node=4)
    source = Layout(Mesh(0, 0, 4), Parallelism(tensor=4))
    plan = plan_batch([1] * 32, 10, source, Layout(Mesh(0, 4, 16), Parallelism(data=16)), cluster)
    assert set(plan.bytes_sent.values()) == {80}
    assert set(plan.bytes_by_tier) == {"network"}


def test_the_nearest_replica_sends() -> None:
    source = Layout(Mesh(0, 0, 8), Parallelism(tensor=8))
    target = Layout(Mesh(0, 0, 8), Parallelism(data=8), ranks=(4, 5, 6, 7, 0, 1, 2, 3))
    assert not plan_batch([1] * 8, 10, source, target, CLUSTER).transfers  # all have all
    both = Layout(Mesh(0, 0, 8), Parallelism(data=2, tensor=4), ranks=(0, 4, 1, 5, 2, 6, 3, 7))
    plan = plan_batch([1] * 8, 10, both, Layout(Mesh(0, 0, 8), Parallelism(data=1, tensor=8)), CLUSTER)
    assert set(plan.bytes_by_tier) == {"nvlink"}
    assert all(t.sender.device // 4 == t.receiver.device // 4 for t in plan.transfers)


def test_generation_ranks_keep_rows_that_training_gives_them() -> None:
    """Micro data-parallel ranks of generation lie within the data-parallel rank of training whose rows they make."""
    train = Layout(Mesh(0, 0, 8), Parallelism(data=2, tensor=4))
    generation = generation_layout(train, 2, 1)
    plan = plan_batch([4] * 8, 10, generation, train, CLUSTER)
    half = sum(c.bytes for c in plan.copies)
    assert half == sum(plan.bytes_received.values())  # each has half of what its training rank needs


@pytest.mark.parametrize(
    ("groups", "row_bytes", "target", "text"),
    [
        ([2, 0], 1, Mesh(0, 0, 2), "groups holds 0"),
        ([2], [1], Mesh(0, 0, 2), "row_bytes holds 1 numbers; expected one of each of 2 rows"),
        ([2], [1, -1], Mesh(0, 0, 2), "row_bytes"),
        ([2], 1, Mesh(0, 15, 2), "the target is on 2 devices from 15 on in pool 0; it has 16 devices"),
        ([2], 1, Mesh(1, 0, 2), "there are 1 pools"),
        ([2], 1, Mesh(0, 0, 3), "expected the 3 devices of the mesh"),
    ],
)
def test_what_cannot_be_is_refused(groups: list[int], row_bytes: Any, target: Mesh, text: str) -> None:
    with pytest.raises(FlowError) as caught:
        plan_batch(
            groups, row_bytes, Layout(Mesh(0, 0, 1), Parallelism()), Layout(target, Parallelism(data=2)), CLUSTER
        )
    assert text in str(caught.value)
