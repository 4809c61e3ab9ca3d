"""Seconds of a unit in one iteration, from FLOP, bytes and messages.

A pass of a stage takes the longest of: its FLOP at the rate of matrix products, its weights (and cache) at the rate of memory,
and its kernels one by one; tensor-parallel sums come on top, what data-parallel ranks exchange only where it exceeds what it can
hide behind. Time is booked on what binds: ``compute`` is the FLOP; ``memory`` what reading takes longer than that, and the
optimiser; ``link`` what is waited for others; ``bubble`` what stages wait for one another: ``(p − 1) / m`` of the passes (GPipe,
arXiv 1811.06965). Their sum is the time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.candidates import Floats, Grid, Shares, mean_window, rows_of_rank
from flowrl.compiler.cluster import Pool
from flowrl.compiler.precision import Precision
from flowrl.compiler.rates import OVERLAP, Rates, Ring, reached
from flowrl.compiler.work import Work

#: Of the rectangle of scores, what kernels for a GPU compute of a causal mask; elsewhere all.
CAUSAL_SHARE = {"cuda": 0.5, "cpu": 1.0}
#: The products of an attention's backward pass in terms of its forward pass: five for two, the scores being computed again.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Setting:
    """What all of a table's columns are made from.

    Args:
        start: of the mesh in its pool.
    """

    architecture: Architecture
    work: Work
    precision: Precision
    pool: Pool
    rates: Rates
    start: int
    grid: Grid
    shares: Shares

    @functools.cached_property
    def rings(self) -> tuple[Ring, Ring]:
        """Of the tensor-parallel groups, and of the data-parallel ones."""
        grid = self.grid
        tensor = Ring.of(self.pool, self.start, np.ones(len(grid), np.int64), grid.tensor)
        return tensor, Ring.of(self.pool, self.start, grid.tensor, grid.data)

    @property
    def causal(self) -> float:
        return CAUSAL_SHARE[self.pool.device.kind]


def time_columns(setting: Setting) -> dict[str, Floats]:
    """compute, memory, link, bubble (seconds) and flops (of all devices together), a row for each candidate."""
    columns = _generate(setting) if setting.work.kind == "generate" else _passes(setting)
    return {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}


# -- training and scoring ----------------------------------------------------------------------------------------------------


def _passes(s: Setting) -> dict[str, Floats]:
    work, grid, precision = s.work, s.grid, s.precision
    trains = work.kind == "train"
    steps = work.optimizer_steps if trains else 1
    m, stages = grid.micro_batches, grid.pipeline
    rows = rows_of_rank(work, grid.data) / m
    tokens = rows * (work.prompt_tokens + work.response_tokens) * precision.computed_share(work)
    flops, last_flops = _pass_flops(s, rows, s.causal)
    measured = s.rates.passes(work.kind)
    compute = measured.factor * np.maximum(flops, last_flops) / (grid.tensor * s.rates.flops)
    # Forward; backward, once for what came in (and once for the weights, which reads none); again where it was checkpointed.
    reads = 1.0 + (1.0 + (grid.checkpointing == 1) if trains else 0.0)
    read = reads * s.shares.parameters * (precision.cast or precision.weights) / s.rates.memory
    # The backward pass has a kernel for each of two gradients.
    layers = s.shares.layers * np.where(reads > 1, reads + 1, 1.0)
    memory = np.maximum(np.maximum(read, layers * s.rates.layer_seconds) - compute, 0.0)
    memory = memory + layers * measured.layer_seconds
    link = _tensor_sums(s, tokens, reads) + _sends(s, tokens, 2.0 if trains else 1.0)
    each_pass, once = _exchanges(s)
    passing = compute + memory
    hidden = OVERLAP[s.pool.device.kind] * passing
    link = link + np.maximum(each_pass - hidden, 0.0)
    exposed = np.maximum(once - hidden * (2 / 3), 0.0)  # behind the last backward pass
    optimizer = _optimizer_bytes(s) / s.rates.memory if trains else np.zeros(len(grid))
    return dict(
        compute=steps * m * compute,
        memory=steps * (m * memory + optimizer),
        link=steps * (m * link + exposed),
        bubble=steps * (stages - 1) * (passing + link),
        flops=unit_flops(s),
    )


def _pass_flops(s: Setting, rows: Floats, causal: float) -> tuple[Floats, Floats]:
    """FLOP of a micro-batch in the stage with the most layers, and in the last one, which has the head; all tensor-parallel
    ranks together. In training, forward and backward."""
    a, work, grid, shares = s.architecture, s.work, s.grid, s.shares
    length = work.prompt_tokens + work.response_tokens
    tokens = rows * length * s.precision.computed_share(work)
    attention = causal * rows * length * a.attention_flops(1.0, mean_window(a, length))
    matmul, again = 1.0, np.zeros(len(grid))
    attending, of_head = 1.0, 1.0
    if work.kind == "train":
        # Of a base that is not trained no gradient of the weights is computed.
        matmul = 2.0 if s.precision.adapter_parameters else 3.0
        attending, again = 1.0 + ATTENTION_BACKWARD, (grid.checkpointing == 1).astype(np.float64)
        of_head = matmul
    head = of_head * a.head_flops(1.0, work.head) * rows * work.response_tokens
    products = 2.0 * tokens * (matmul + again * recomputed_share(a, s.precision))
    attention = (attending + again) * attention
    inner = products * shares.matmul + attention * shares.layers
    return inner, products * shares.last_matmul + attention * shares.last_layers + head


def recomputed_share(a: Architecture, precision: Precision) -> float:
    """Of the products of a forward pass, those that checkpointing computes again."""
    if precision.fused:  # Megatron-LM's runs the whole layer
        return 1.0
    layers = range(a.num_layers)
    return sum(map(a.layer_recomputed, layers)) / sum(map(a.layer_matmul, layers))


def unit_flops(s: Setting) -> Floats:
    """FLOP of a unit in one iteration, of all devices: matrix products and attention, the masked half of the scores included,
    as torch's FLOP counter has it. What checkpointing computes again is included. Logits are of response tokens."""
    a, work, grid = s.architecture, s.work, s.grid
    tokens = work.tokens * (work.epochs if work.kind == "train" else 1)
    length = work.prompt_tokens + work.response_tokens
    if work.kind == "generate":
        return np.full(len(grid), _prefill_flops(a, work, 1.0) + _decode_flops(a, work))
    products = 2.0 * sum(map(a.layer_matmul, range(a.num_layers)))
    matmul = products * tokens * s.precision.computed_share(work)
    attention = a.num_layers * a.attention_flops(tokens, mean_window(a, length))
    head = a.head_flops(tokens * work.response_tokens / length, work.head)
    if work.kind == "score":
        return np.full(len(grid), matmul + attention + head)
    factor = 2.0 if s.precision.adapter_parameters else 3.0
    once = factor * (matmul + head) + (1.0 + ATTENTION_BACKWARD) * attention
    return once + (grid.checkpointing == 1) * (recomputed_share(a, s.precision) * matmul + attention)


def _tensor_sums(s: Setting, tokens: Floats, passes: Floats | float) -> Floats:
    """Seconds of the sums of a micro-batch: two in each layer and each direction (arXiv 1909.08053, figure 4)."""
    size = tokens * s.architecture.hidden * s.precision.activation
    return np.where(s.grid.tensor > 1, 2 * passes * s.shares.layers * s.rings[0].all_reduce(size), 0.0)


def _sends(s: Setting, tokens: Floats, directions: float) -> Floats:
    """Seconds in which a micro-batch goes to the next stage, and its gradient back."""
    grid = s.grid
    size = tokens * s.architecture.hidden * s.precision.activation / (grid.tensor if s.precision.fused else 1.0)
    sizes, where = np.unique(grid.size, return_inverse=True)
    tiers = [s.pool.tier(s.start, s.start + int(total)) for total in sizes]
    latency = np.array([t.latency for t in tiers])[where]
    bandwidth = np.array([reached(t) for t in tiers])[where]
    return np.where(grid.pipeline > 1, directions * (latency + size / bandwidth), 0.0)


def _exchanges(s: Setting) -> tuple[Floats, Floats]:
    """Seconds of what data-parallel ranks exchange: with each micro-batch, and once in an optimiser step."""
    grid, precision, ring = s.grid, s.precision, s.rings[1]
    weights = s.shares.parameters * (precision.cast or precision.weights)
    nothing = np.zeros(len(grid))
    # What is gathered or scattered is read and written once more, between its buffer and its tensors.
    gather = ring.gather(weights) + 2 * weights / s.rates.memory
    if s.work.kind != "train":
        return np.where(grid.zero == 3, gather, nothing), nothing
    trained = precision.adapter_parameters / grid.pipeline if precision.adapter_parameters else s.shares.parameters
    gradients = trained * precision.gradients
    scatter = ring.reduce_scatter(gradients) + 2 * gradients / s.rates.memory
    reduced = ring.all_reduce(gradients)
    # ZeRO-3 gathers for the forward pass and again for the backward pass.
    each = np.select([grid.zero == 3, grid.zero == 2], [2 * gather + scatter, scatter], nothing)
    once = np.select([grid.zero == 3, grid.zero == 2, grid.zero == 1], [nothing, gather, scatter + gather], reduced)
    return each, once


def _optimizer_bytes(s: Setting) -> Floats:
    """Read: gradients and state; written: state and weights; on each rank."""
    grid, precision = s.grid, s.precision
    trained = precision.adapter_parameters / grid.pipeline if precision.adapter_parameters else s.shares.parameters
    each = precision.gradients + 2 * precision.optimizer + 2 * precision.weights
    return trained * each / np.where(grid.zero >= 1, grid.data, 1)


# -- generation --------------------------------------------------------------------------------------------------------------


def _generate(s: Setting) -> dict[str, Floats]:
    """Prompts are read once a group, compute bound. Then a token of every row of a wave a step, until the longest response
    ends; a step reads all weights, and the cache. With p stages the rows of a wave are p parts that follow one another: a
    stage reads its weights for each."""
    a, work, grid, shares, rates = s.architecture, s.work, s.grid, s.shares, s.rates
    rows, waves, stages = rows_of_rank(work, grid.data), grid.micro_batches, grid.pipeline
    wave = rows / waves
    steps = waves * work.max_response_tokens
    ranks = grid.tensor * stages
    of_rank = rows / work.sequences
    reading_prompts, step = rates.passes("prefill"), rates.passes("decode")
    prefill = reading_prompts.factor * _prefill_flops(a, work, s.causal) * of_rank / (ranks * rates.flops)
    decode = _decode_flops(a, work) * of_rank / (ranks * rates.flops)
    # Weights: experts that no row of the wave goes to are not read.
    active = wave / np.minimum(stages, wave)
    touched = 1.0 - (1.0 - a.experts_per_token / a.num_experts) ** active if a.num_experts else 1.0
    read = (shares.parameters - shares.expert_parameters * (1.0 - touched)) * (s.precision.cast or s.precision.weights)
    cached = _cache_read(a, work) * s.precision.cache * of_rank / stages
    cached = cached / (1.0 if a.kv_rank else np.minimum(grid.tensor, a.num_kv_heads))
    reading = (steps * np.minimum(stages, wave) * read + cached) / rates.memory
    kernels = steps * a.num_layers * rates.decode_layer_seconds
    host = waves * work.max_response_tokens * rates.rows_seconds(wave * work.response_tokens / work.max_response_tokens)
    memory = np.maximum(np.maximum(reading, kernels) - decode, 0.0) + host
    memory = memory + a.num_layers * (steps * step.layer_seconds + waves * reading_prompts.layer_seconds)
    prompts = wave * work.prompt_tokens / work.group_size
    link = waves * stages * _tensor_sums(s, prompts / stages, 1.0)
    link = link + steps * stages * (_tensor_sums(s, wave / stages, 1.0) + _sends(s, wave / stages, 1.0))
    bubble = (stages - 1) / np.maximum(waves * stages, 1) * prefill
    return dict(compute=prefill + decode, memory=memory, link=link, bubble=bubble, flops=unit_flops(s))


def _prefill_flops(a: Architecture, work: Work, causal: float) -> float:
    """Of all prompts, one of each group."""
    prompts = work.sequences / work.group_size
    tokens = prompts * work.prompt_tokens
    matmul = 2.0 * tokens * sum(map(a.layer_matmul, range(a.num_layers)))
    attention = causal * a.num_layers * a.attention_flops(tokens, mean_window(a, work.prompt_tokens))
    return matmul + attention + a.head_flops(prompts)


def _decode_flops(a: Architecture, work: Work) -> float:
    """Of all sampled tokens; each attends to what is before it."""
    tokens = work.sequences * work.response_tokens
    matmul = 2.0 * tokens * sum(map(a.layer_matmul, range(a.num_layers)))
    reach = mean_window(a, work.prompt_tokens + work.response_tokens / 2)
    return matmul + a.num_layers * a.attention_flops(tokens, reach) + a.head_flops(tokens)


def _cache_read(a: Architecture, work: Work) -> float:
    """Numbers of the cache that all steps read, of all rows and layers."""
    reach = mean_window(a, work.prompt_tokens + work.response_tokens / 2)
    return work.sequences * work.response_tokens * reach * a.cache_width * a.num_layers
