"""All ways to lay one call over a number of devices, as columns; and what a rank holds of a model in each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from flowrl.compiler.architecture import Architecture, Head
from flowrl.compiler.architecture_tensors import outer_tensors
from flowrl.compiler.cluster import Pool
from flowrl.compiler.work import Work

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Pipeline stages that are tried, where a size is divisible by them. More than the layers are never tried.
MAX_PIPELINE = 64


@dataclass(frozen=True)
class Grid:
    """Candidates: one row each. Columns as in :class:`flowrl.compiler.parallelism.Parallelism`."""

    size: Ints
    data: Ints
    tensor: Ints
    pipeline: Ints
    zero: Ints
    checkpointing: Ints
    micro_batches: Ints

    def select(self, rows: Ints | NDArray[np.bool_]) -> Grid:
        """Some of them."""
        return Grid(*(getattr(self, f.name)[rows] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.size)


def rows_of_rank(work: Work, data: Ints) -> Ints:
    """Rows of the fullest data-parallel rank: of one optimiser step in training, else of the iteration."""
    rows = work.sequences * work.epochs / work.optimizer_steps if work.kind == "train" else work.sequences
    return np.ceil(rows / data).astype(np.int64)


def candidates(
    architecture: Architecture, work: Work, pool: Pool, sizes: Sequence[int], fixed: Mapping[str, int]
) -> Grid:
    """All candidates that the shapes allow, memory not yet asked.

    Tensor parallelism divides the query heads, the width of the MLP and a host, and either divides the key-value heads or is
    a multiple of them, which are then replicated. There are at most as many stages as layers, whose numbers differ by at most
    one. No data-parallel rank is without a row. ZeRO-2 and 3 are not combined with stages: each micro-batch would gather or
    reduce anew. Micro-batches: powers of two, and one row each; waves of generation: also the numbers between.

    Args:
        fixed: columns that have one value.
    """
    meshes = np.array([m for s in sizes for m in _meshes(architecture, work, pool, s, fixed)], dtype=np.int64).reshape(
        -1, 4
    )
    zeros = {"train": (0, 1, 2, 3), "score": (0, 3), "generate": (0,)}[work.kind]
    zeros = (fixed["zero"],) if "zero" in fixed else zeros
    checkpointing = (0, 1) if work.kind == "train" else (0,)
    checkpointing = (int(fixed["checkpointing"]),) if "checkpointing" in fixed else checkpointing
    rows = rows_of_rank(work, meshes[:, 1]) if len(meshes) else np.zeros(0, np.int64)
    splits = _splits(work, int(rows.max(initial=1)), fixed)
    options = np.array(list(itertools.product(zeros, checkpointing, splits)), dtype=np.int64)
    mesh_of = np.repeat(np.arange(len(meshes)), len(options))
    all_options = np.tile(options, (len(meshes), 1))
    grid = Grid(*meshes[mesh_of].T, *all_options.reshape(-1, 3).T)
    allowed = grid.micro_batches <= rows[mesh_of]
    if "zero" not in fixed:
        allowed &= ((grid.data > 1) | (grid.zero == 0)) & ((grid.pipeline == 1) | (grid.zero < 2))
    return grid.select(allowed)


def _splits(work: Work, rows: int, fixed: Mapping[str, int]) -> list[int]:
    if "micro_batches" in fixed:
        return [fixed["micro_batches"]]
    powers = [2**k for k in range(rows.bit_length())]
    between = [3 * k for k in powers if 3 * k <= rows] if work.kind == "generate" else []
    return sorted({*powers, *between, rows})


def _meshes(
    a: Architecture, work: Work, pool: Pool, size: int, fixed: Mapping[str, int]
) -> Iterator[tuple[int, int, int, int]]:
    """(size, data, tensor, pipeline) of a size."""
    rows = work.sequences * work.epochs / work.optimizer_steps if work.kind == "train" else work.sequences
    for tensor in tensor_sizes(a, pool, size, fixed.get("tensor")):
        rest = size // tensor
        for pipeline in divisors(rest, min(rest, a.num_layers, MAX_PIPELINE)):
            data = rest // pipeline
            if data > rows or fixed.get("pipeline", pipeline) != pipeline:
                continue
            if fixed.get("data", data) == data:
                yield size, data, tensor, pipeline


@functools.cache
def divisors(number: int, most: int) -> tuple[int, ...]:
    """Of a whole number, those that are no larger than ``most``."""
    return tuple(n for n in range(1, most + 1) if number % n == 0)


@functools.cache
def tensor_sizes(a: Architecture, pool: Pool, size: int, fixed: int | None = None) -> list[int]:
    """Numbers of ranks that can share each layer."""
    tried = [fixed] if fixed else range(1, min(size, pool.tiers[0].size) + 1)
    return [t for t in tried if size % t == 0 and (fixed or pool.tiers[0].size % t == 0) and splits_evenly(a, t)]


def splits_evenly(a: Architecture, tensor: int) -> bool:
    """Whether heads and widths can be shared by so many ranks."""
    widths = [a.intermediate] if not a.num_experts or a.dense_layers else []
    widths += [w for w in (a.moe_intermediate, a.shared_intermediate) if w]
    heads = a.num_heads % tensor == 0 and (a.num_kv_heads % tensor == 0 or tensor % a.num_kv_heads == 0)
    return heads and all(w % tensor == 0 for w in widths)


# -- what a rank holds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What the fullest rank has of a model that is split over ``tensor`` ranks and ``pipeline`` stages. Of several stages, the
    largest of each.

    Args:
        parameters: numbers.
        expert_parameters: of these, in routed experts.
        layers: of a stage.
        largest_layer: numbers of one layer.
        outer: numbers outside of the layers.
        matmul: numbers of matrices of the layers that a token is multiplied with, before the split over ``tensor``.
        last_matmul, last_layers: of the last stage, which has the head.
    """

    parameters: float
    expert_parameters: float
    layers: int
    largest_layer: float
    outer: float
    matmul: float
    last_matmul: float
    last_layers: int


@functools.lru_cache(maxsize=4096)
def share_of(a: Architecture, head: Head, tensor: int, pipeline: int) -> Share:
    """The share of a rank. The first stage has the embedding, the last the head; one that is tied to the embedding is a copy
    of its own where they are not the same stage."""
    held, matmul, experts = _prefixes(a, tensor)
    small, more = divmod(a.num_layers, pipeline)
    ends = np.cumsum([0] + [small + (stage < more) for stage in range(pipeline)])
    stages = held[ends[1:]] - held[ends[:-1]]
    first, last = (sum(p.size / (1 if p.split is None else tensor) for p in part) for part in outer_tensors(a, head))
    if head == "lm" and a.tied and pipeline > 1:
        last += a.embedding_parameters / tensor
    stages[0] += first
    stages[-1] += last
    per_stage = matmul[ends[1:]] - matmul[ends[:-1]]
    return Share(
        parameters=float(stages.max()),
        expert_parameters=float((experts[ends[1:]] - experts[ends[:-1]]).max()),
        layers=int(small + (more > 0)),
        largest_layer=float(np.diff(held).max()),
        outer=float(first + last if pipeline == 1 else max(first, last)),
        matmul=float(per_stage.max()),
        last_matmul=float(per_stage[-1]),
        last_layers=int(ends[-1] - ends[-2]),
    )


@functools.lru_cache(maxsize=256)
def _prefixes(a: Architecture, tensor: int) -> tuple[Floats, Floats, Floats]:
    """Sums over the layers before each: (numbers on a rank, numbers of the matrices a token is multiplied with, numbers of
    experts on a rank)."""
    held, matmul, experts = [0.0], [0.0], [0.0]
    replicated = 0.0
    if tensor > a.num_kv_heads and not a.kv_rank:  # keys and values on tensor / num_kv_heads ranks each
        keys = a.hidden * a.num_kv_heads * (a.head_dim + a.v_dim)
        replicated = keys / a.num_kv_heads - keys / tensor
    for layer in range(a.num_layers):
        split = a.split_parameters(layer)
        held.append(held[-1] + split / tensor + a.layer_parameters(layer) - split + replicated)
        matmul.append(matmul[-1] + a.layer_matmul(layer))
        experts.append(experts[-1] + a.is_moe(layer) * a.num_experts * a.expert_parameters / tensor)
    return np.array(held), np.array(matmul), np.array(experts)


@dataclass(frozen=True)
class Shares:
    """The shares of all candidates, as columns."""

    parameters: Floats
    expert_parameters: Floats
    layers: Floats
    largest_layer: Floats
    outer: Floats
    matmul: Floats
    last_matmul: Floats
    last_layers: Floats

    @classmethod
    def of(cls, a: Architecture, head: Head, grid: Grid) -> Shares:
        """One row for each row of the grid."""
        pairs, where = distinct_pairs(grid.tensor, grid.pipeline)
        rows = [share_of(a, head, tensor, pipeline) for tensor, pipeline in pairs]
        return cls(*(np.array([getattr(r, f.name) for r in rows], dtype=np.float64)[where] for f in fields(cls)))


def distinct_pairs(first: Ints, second: Ints) -> tuple[list[tuple[int, int]], Ints]:
    """The different pairs of two columns of whole numbers below 2³¹, and for each row the index of its pair."""
    keys, where = np.unique((first << 31) | second, return_inverse=True)
    return [(int(key) >> 31, int(key) & 0x7FFFFFFF) for key in keys], where


def mean_window(a: Architecture, length: float) -> float:
    """Tokens that a layer attends to at most in a row of ``length``, over all layers."""
    if not a.windows:
        return length
    return math.fsum(a.window(layer, length) for layer in range(a.num_layers)) / a.num_layers
