"""Layouts: who holds which slices, compared with a second account, and with what torch's FSDP2 and tensor parallelism do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.compiler.architecture import Parameter
from flowrl.compiler.boxes import Box, chunk, merged
from flowrl.compiler.layout import Coordinates, DeviceId, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.weights import Weights
from flowrl.errors import FlowError
from tests.compiler.reference_layouts import TINY, Owned, held, numbered, tiny_weights

ROOT = Path(__file__).parents[2]


def layout(data: int = 1, tensor: int = 1, pipeline: int = 1, zero: int = 0, **more: Any) -> Layout:
    return Layout(
        Mesh(0, 0, data * tensor * pipeline),
        Parallelism(data=data, tensor=tensor, pipeline=pipeline, zero=zero),
        **more,
    )


# -- boxes ----------------------------------------------------------------------------------------------------------------


def test_a_chunk_is_torchs() -> None:
    for length in range(20):
        for parts in range(1, 9):
            expected = [list(c) for c in torch.chunk(torch.arange(length), parts)] if length else []
            found = [list(range(*chunk(length, parts, i))) for i in range(parts)]
            assert [f for f in found if f] == [[int(x) for x in e] for e in expected]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_of_a_box_make_it_up(size: int) -> None:
    box = Box((1, 0, 2), (4, 3, 7))
    pieces = box.pieces(size)
    seen = torch.zeros(5, 5, 8)
    for piece in pieces:
        assert 0 < piece.size <= size
        seen[piece.slices] += 1
    assert seen[box.slices].eq(1).all() and seen.sum() == box.size
    assert set(merged(pieces)) == {box}


# -- who holds what -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TINY))
@pytest.mark.parametrize(
    "where",
    [
        layout(),
        layout(data=3, zero=3),
        layout(data=7, zero=3),
        layout(data=2, tensor=2, zero=3, split_vocabulary=True),
        layout(data=4, tensor=1, zero=3, shard_size=2),
        layout(pipeline=4, data=2, zero=1),
        layout(pipeline=3, stages=(1, 0, 4)),
        layout(tensor=4, pipeline=2, naming="vllm"),
        layout(tensor=1, pipeline=2, data=2, naming="megatron", vocabulary_multiple=16),
        layout(tensor=2, data=2, ranks=(3, 1, 0, 2), naming="vllm"),
    ],
    ids=str,
)
def test_devices_hold_what_the_frameworks_would_give_them(family: str, where: Layout) -> None:
    weights = tiny_weights(family)
    arrays = numbered(weights)
    owned, expected = Owned(arrays), held(weights, where, arrays)
    found = where.holdings(weights)
    assert found.keys() == expected.keys()
    for device, slices in found.items():
        mine = owned.by({})
        for name, boxes in slices.items():
            for box in boxes:
                assert not mine[arrays[name][box.slices].ravel()].any()  # no number twice
                mine[arrays[name][box.slices].ravel()] = True
        real = owned.by(expected[device])
        real[owned.real :] = False
        assert (mine == real).all()
        shapes = {name: local.shape for name, local in where.locals_on(weights, device).items()}
        assert shapes == {name: array.shape for name, array in expected[device].items()}
        # Every number is counted, one in tensors that are put together too, and padding.
        assert where.num_bytes(weights)[device] == 2 * sum(a.size for a in expected[device].values())


def test_devices_and_coordinates_are_each_others_inverse() -> None:
    where = Layout(Mesh(1, 4, 8), Parallelism(data=2, tensor=2, pipeline=2), ranks=(5, 3, 0, 1, 2, 7, 6, 4))
    assert where.device(Coordinates(0, 0, 1)) == DeviceId(1, 4 + 3)
    assert [where.device(where.coordinates(d)) for d in where.devices] == where.devices
    assert len({where.coordinates(d) for d in where.devices}) == 8


def test_a_head_that_is_the_embedding_is_on_both_ends() -> None:
    weights = tiny_weights("qwen2")
    ends = layout(pipeline=3, naming="megatron").holdings(weights)
    holders = [d.device for d, slices in ends.items() if "model.embed_tokens.weight" in slices]
    assert holders == [0, 2]
    names = [set(layout(pipeline=3, naming="megatron").locals_on(weights, DeviceId(0, i))) for i in (0, 2)]
    assert "embedding.word_embeddings.weight" in names[0] and "output_layer.weight" not in names[0]
    assert "output_layer.weight" in names[1] and "embedding.word_embeddings.weight" not in names[1]


# -- what torch does ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a process a rank, and each imports all of FSDP
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 1)])
def test_slices_are_those_of_fsdp_over_tensor_parallelism(data: int, tensor: int) -> None:
    from tests.compiler.torch_ranks import SPLITS, Uneven

    shapes = {n: tuple(p.shape) for n, p in Uneven().named_parameters()}
    weights = Weights(tuple(Parameter(f"model.layers.0.{n}", s, 0, SPLITS.get(n)) for n, s in shapes.items()))
    where = layout(data=data, tensor=tensor, zero=3)
    command = [sys.executable, "-m", "tests.compiler.torch_ranks"]
    running = [
        subprocess.Popen([*command, str(rank), str(data), str(tensor)], cwd=ROOT, stdout=subprocess.PIPE)
        for rank in range(data * tensor)
    ]
    for rank, process in enumerate(running):
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        here = where.locals_on(weights, DeviceId(0, rank))
        for name, (shape, expected) in json.loads(out).items():
            local = here[f"model.layers.0.{name}"]
            whole = torch.arange(math.prod(shapes[name])).reshape(shapes[name])
            found = [whole[piece.box.slices].tolist() for piece in local.pieces]
            assert local.shape == tuple(shape)
            assert found == ([expected] if torch.tensor(expected).numel() else [])


# -- what cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "texts"),
    [
        (Layout(Mesh(0, 0, 8), Parallelism(data=3, tensor=2)), ["is 6; expected the 8 devices"]),
        (layout(data=2, ranks=(0, 0)), ["ranks is (0, 0); expected each of 0 … 1 once"]),
        (layout(data=4, shard_size=3), ["shard_size is 3; expected a divisor of the 4"]),
        (layout(data=2, zero=3, naming="megatron"), ["zero is 3 under the names of megatron"]),
        (layout(tensor=2, naming="vllm", split_vocabulary=False), ["split_vocabulary is False"]),
        (layout(naming="vllm", vocabulary_multiple=0), ["vocabulary_multiple is 0"]),
        (layout(pipeline=2, stages=(5,)), ["stages is (5,); expected the number of layers of each of 2 stages"]),
        (layout(pipeline=2, stages=(1, 1)), ["stages holds 2 layers; expected the 5"]),
        (layout(pipeline=6), ["pipeline is 6; expected at most the 5 layers"]),
        (layout(naming="megatorn"), ["naming is 'megatorn'; expected one of huggingface, megatron, vllm"]),  # type: ignore[arg-type]
        (layout(tensor=3), ["the 4 heads", "cannot be split evenly", "3 ranks"]),
        (layout(tensor=6), ["cannot be shared evenly", "a multiple of its 4 heads", "6 ranks"]),
        (layout(tensor=8, naming="megatron"), ["the 4 key-value heads", "8 ranks"]),
        (layout(pipeline=9, stages=(1,), shard_size=0), ["stages is", "pipeline is 9", "shard_size is 0"]),
    ],
)
def test_what_cannot_be_is_refused(where: Layout, texts: list[str]) -> None:
    with pytest.raises(FlowError) as caught:
        where.check(tiny_weights("llama"))
    for text in texts:
        assert text in str(caught.value)
