"""The generation grouping leaves nothing redundant: HybridFlow's Table 2 (arXiv 2409.19256), byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

from flowrl.compiler.architecture import Parameter
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.generation_layout import generation_layout, grouping, target_layout, volume
from flowrl.compiler.layout import Coordinates, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.resharding import plan_transfers
from flowrl.compiler.weights import Weights
from flowrl.errors import FlowError
from tests.compiler.reference_layouts import Owned, held, numbered, tiny_weights

CLUSTER = Cluster("H100", nodes=8)


def ideal(layers: int, tensor: int) -> Weights:
    """All of whose tensors are split evenly: one matrix by columns and one by rows a layer."""
    shapes = (((2 * tensor, 3), 0), ((4, tensor), 1))
    parameters = [
        Parameter(f"model.layers.{i}.m{j}.weight", shape, i, split)
        for i in range(layers)
        for j, (shape, split) in enumerate(shapes)
    ]
    return Weights(tuple(parameters))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def cases(gpus: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """(p, t, d, p_g, t_g) for each number of GPUs."""
    for size in gpus:
        for p in divisors(size):
            for t in divisors(size // p):
                for p_g in divisors(p):
                    for t_g in divisors(t):
                        yield p, t, size // (p * t), p_g, t_g


def check_table_2(p: int, t: int, d: int, p_g: int, t_g: int) -> None:
    weights = ideal(p, t)
    size, d_g = weights.num_bytes, p * t // (p_g * t_g)
    train = Layout(Mesh(0, 0, p * t * d), Parallelism(data=d, tensor=t, pipeline=p))
    generation = generation_layout(train, t_g, p_g, num_layers=p)
    assert generation.parallelism.data == d * d_g
    plan = plan_transfers(weights, train, generation, CLUSTER, size)
    received = Fraction(d_g - 1, t * p) * size
    assert set(plan.bytes_received.values()) == {received}
    assert volume(size, train.parallelism, generation.parallelism, same_mesh=True) == pytest.approx(float(received))
    before, after = train.num_bytes(weights), generation.num_bytes(weights)
    for device in train.devices:
        peak = after[device]
        assert peak == Fraction(size, t_g * p_g)
        # Redundant is what training holds and generation does not: with 0, training's bytes are generation's too.
        assert before[device] - plan.bytes_kept[device] == 0
        assert plan.bytes_kept[device] + plan.bytes_received[device] == peak


def test_table_2_on_some_numbers_of_gpus() -> None:
    for case in cases([1, 2, 3, 4, 6, 8, 12, 16]):
        check_table_2(*case)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_table_2_on_all_numbers_of_gpus_up_to_64() -> None:
    for case in cases(list(range(1, 65))):
        check_table_2(*case)


def test_groups_are_training_ranks_at_intervals() -> None:
    """HybridFlow's figure 8: training 1-4-2, generation 1-2-2-2."""
    train = Layout(Mesh(0, 0, 8), Parallelism(data=2, tensor=4))
    generation = generation_layout(train, 2, 1)
    groups = [[generation.device(Coordinates(0, data, tensor)).device for tensor in range(2)] for data in range(4)]
    assert groups == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_without_the_grouping_more_is_moved() -> None:
    weights = ideal(4, 4)
    train = Layout(Mesh(0, 0, 32), Parallelism(data=2, tensor=4, pipeline=4))
    grouped = generation_layout(train, 2, 2)
    plain = Layout(train.mesh, grouped.parallelism)
    plans = [plan_transfers(weights, train, x, CLUSTER, 1 << 20) for x in (grouped, plain)]
    assert plans[0].total_bytes < plans[1].total_bytes
    assert target_layout(train, train.mesh, grouped.parallelism).ranks == grouped.ranks
    assert target_layout(train, Mesh(0, 32, 32), grouped.parallelism).ranks == ()
    assert target_layout(train, Mesh(0, 32, 24), Parallelism(data=4, tensor=3, pipeline=2)).ranks == ()


@pytest.mark.parametrize(
    ("train", "generation"),
    [
        (Parallelism(data=4, tensor=2), Parallelism(data=1, tensor=8)),
        (Parallelism(data=8), Parallelism(data=2, tensor=2, pipeline=2)),
        (Parallelism(data=2, tensor=4), Parallelism(data=1, tensor=2, pipeline=4)),
        (Parallelism(data=2, tensor=1, pipeline=4), Parallelism(data=1, tensor=4, pipeline=2)),
    ],
)
def test_a_larger_degree_keeps_what_it_can(train: Parallelism, generation: Parallelism) -> None:
    weights, mesh = ideal(8, 8), Mesh(0, 0, 8)
    source = Layout(mesh, train)
    plan = plan_transfers(weights, source, target_layout(source, mesh, generation, num_layers=8), CLUSTER, 1 << 20)
    expected = volume(weights.num_bytes, train, generation, same_mesh=True)
    assert set(plan.bytes_received.values()) == {expected}


@pytest.mark.parametrize("zero", [1, 3])
def test_volume_is_what_plans_move(zero: int) -> None:
    weights = ideal(4, 64)
    train = Parallelism(data=4, tensor=2, pipeline=2, zero=zero)
    for generation in (Parallelism(data=16), Parallelism(data=8, tensor=2), Parallelism(data=8, pipeline=2)):
        for mesh in (Mesh(0, 0, 16), Mesh(0, 16, 16)):
            source = Layout(Mesh(0, 0, 16), train)
            plan = plan_transfers(weights, source, target_layout(source, mesh, generation), CLUSTER, 1 << 20)
            expected = volume(weights.num_bytes, train, generation, same_mesh=mesh == source.mesh)
            assert set(plan.bytes_received.values()) == {expected}


def test_volume_of_degrees_that_do_not_divide_one_another_is_a_bound() -> None:
    weights = ideal(6, 12)
    source = Layout(Mesh(0, 0, 12), Parallelism(data=3, tensor=4))
    target = target_layout(source, source.mesh, Parallelism(data=4, tensor=3))
    plan = plan_transfers(weights, source, target, CLUSTER, 1 << 20)
    bound = volume(weights.num_bytes, source.parallelism, target.parallelism, same_mesh=True)
    assert 0 < max(plan.bytes_received.values()) <= bound
    assert volume(1.0, source.parallelism, source.parallelism, same_mesh=True) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_a_real_model_moves_exactly_what_it_lacks(family: str) -> None:
    """Uneven stages, padding, tied ends: more than the ideal, and no byte more than needed."""
    weights = tiny_weights(family)
    arrays = numbered(weights)
    train = Layout(Mesh(0, 0, 16), Parallelism(data=1, tensor=4, pipeline=4), "megatron")
    generation = generation_layout(train, 2, 2, naming="vllm", num_layers=weights.num_layers)
    assert generation.stages == (3, 2)  # of 2, 1, 1, 1
    plan = plan_transfers(weights, train, generation, CLUSTER, 4096)
    lacked = Owned(arrays).missing(held(weights, train, arrays), held(weights, generation, arrays), padding=False)
    assert plan.bytes_received == {d: 2 * int(n.sum()) for d, n in lacked.items()}
    # Within layers nothing of training is redundant: all of it is kept.
    for device in train.devices:
        at = train.devices.index(device)
        layers = [p for p in weights.by_name.values() if p.layer is not None and p.split is not None]
        before = {(p.name, b) for p in layers for b in train.boxes_of(weights, p)[at]}
        kept = {(c, b) for block in plan.copies if block.device == device for c in block.tensors for b in block.boxes}
        for name, box in before:
            assert any((box & other) == box for kept_name, other in kept if kept_name == name)


def test_the_permutation_of_training_is_kept() -> None:
    weights = ideal(4, 4)
    shuffled = Layout(Mesh(0, 0, 16), Parallelism(tensor=4, pipeline=4), ranks=tuple(reversed(range(16))))
    plan = plan_transfers(weights, shuffled, generation_layout(shuffled, 2, 2), CLUSTER, 1 << 20)
    assert set(plan.bytes_received.values()) == {Fraction(3, 16) * weights.num_bytes}


def test_what_cannot_be_grouped_is_refused() -> None:
    train = Layout(Mesh(0, 0, 12), Parallelism(data=3, tensor=4))
    with pytest.raises(FlowError, match="tensor × pipeline to divide 12"):
        generation_layout(train, 5, 1)
    with pytest.raises(FlowError, match="a divisor or a multiple of tensor 4"):
        generation_layout(train, 3, 1)
    with pytest.raises(FlowError, match="tensor × pipeline to divide 12"):
        generation_layout(train, 0, 1)
    assert grouping(train, Parallelism(data=12)) is not None
    assert grouping(train, Parallelism(data=2)) is None
