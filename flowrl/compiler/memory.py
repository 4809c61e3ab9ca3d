"""Bytes on the fullest rank, by cause.

**Weights, gradients, optimiser**: numbers of the fullest stage, split over the tensor-parallel ranks, and by the stage of ZeRO
over the data-parallel ones (arXiv 1910.02054, figure 1).

**Activations**: what autograd saves for the backward pass, for attention that never keeps its scores (torch's sdpa with its
flash or memory-efficient kernels, flash attention). Counted module by module (:func:`saved_per_token`), for the modules of
transformers, or for fused kernels as Megatron-LM's, where they come to the ``34 s·b·h`` of arXiv 2205.05198 without dropout's
masks. With checkpointing the input of each layer, and what one layer saves. A stage keeps as many micro-batches as there are
stages after it, one for itself (1F1B, arXiv 2104.04473).

**Logits**: of the positions that exist at once. **KV cache**: of the rows of one wave, each at its full length. **Buckets**:
what is gathered, reduced or cast at once.

Each is the largest over the stages, so for several stages their sum is an upper bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.candidates import Floats, Grid, Shares, rows_of_rank
from flowrl.compiler.precision import Precision
from flowrl.compiler.work import Work

#: Bytes of log-probs of a micro-batch that the head of the transformers engine keeps rather than computes twice.
KEPT_LOGITS = 512 * 2**20
#: Tokens of prompts that an inference engine reads at once (vLLM's ``max_num_batched_tokens``).
PREFILL_TOKENS = 8192


def memory_columns(a: Architecture, work: Work, precision: Precision, grid: Grid, shares: Shares) -> dict[str, Floats]:
    """Bytes by cause, a row for each candidate."""
    trains = work.kind == "train"
    sharded = np.where(grid.zero == 3, grid.data, 1)
    adapters = precision.adapter_parameters / grid.pipeline
    trained = adapters if precision.adapter_parameters else shares.parameters
    weights = shares.parameters * precision.weights / sharded
    if precision.adapter_parameters:
        weights = weights + adapters * 4.0 / sharded
    zeros = np.zeros(len(grid))
    columns = dict(
        weights=weights,
        gradients=trained * precision.gradients / np.where(grid.zero >= 2, grid.data, 1) if trains else zeros,
        optimizer=trained * precision.optimizer / np.where(grid.zero >= 1, grid.data, 1) if trains else zeros,
        activations=_activations(a, work, precision, grid, shares),
        logits=_logits(a, work, precision, grid),
        kv_cache=_cache(a, work, precision, grid, shares) if work.kind == "generate" else zeros,
        buckets=_buckets(precision, grid, shares, trains),
    )
    return {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}


# -- activations -----------------------------------------------------------------------------------------------------------


def saved_per_token(a: Architecture, precision: Precision, moe: bool) -> tuple[float, float]:
    """Bytes that one layer saves of a token for its backward pass: (of what every tensor-parallel rank has whole, of what they
    split)."""
    if precision.fused:
        return _saved_fused(a, precision, moe)
    return _saved_by_modules(a, precision, moe)


def _saved_by_modules(a: Architecture, precision: Precision, moe: bool) -> tuple[float, float]:
    """By the modules of transformers. r: bytes in the residual stream; c: of a product; f: of float32.

    A norm saves its input in float32 and what it makes of it before the weight. Products that multiply with the weights
    themselves share their input; autocast makes a copy for each. Sdpa saves queries, keys and values, its output, and a
    float32 for each head; with MLA keys and values are first made whole, and the output is copied. A chosen expert saves a
    row's input, its own output, and that times the router's weight.
    """
    r, c, f = precision.residual, precision.activation, 4.0
    casts = precision.cast > 0
    norm = 2 * f if a.family.startswith("gemma") else f + r
    if a.family == "gpt2":
        norm, inputs = r, 2
    else:
        to_attention = (2 if a.kv_rank else 3) if casts else 1
        to_mlp = (1 + 2 * (a.shared_intermediate > 0) + a.shared_gate if moe else 2) if casts else 1
        inputs = to_attention + to_mlp
    whole = a.hidden * ((4 if a.post_norms else 2) * norm + inputs * c)
    if a.kv_rank:
        heads = a.num_heads * (2 * a.head_dim + 3 * a.v_dim) * c
        whole += (a.kv_rank + a.rope_dim) * f + a.kv_rank * (r + c) + a.query_rank * (f + r + c)
    else:
        heads = (a.num_heads + a.num_kv_heads) * (a.head_dim + a.v_dim) * c
    if a.qk_norm:
        heads += (a.num_heads + a.num_kv_heads) * a.head_dim * (2 * f if a.family.startswith("gemma") else f + c)
    heads += a.num_heads * f
    mlp = 4 if a.gated else 5  # gate, its activation, up, their product; or gelu, which is written out
    if not moe:
        return whole, heads + mlp * a.intermediate * c
    chosen = a.experts_per_token
    whole += chosen * (a.hidden * (2 * c + r) + 2 * 8 + 2 * f) + a.num_experts * f + a.shared_gate * a.hidden * c
    if a.kv_rank and r < f:  # DeepSeek's router works in float32
        whole += a.hidden * f
    return whole, heads + mlp * (chosen * a.moe_intermediate + a.shared_intermediate) * c


def _saved_fused(a: Architecture, precision: Precision, moe: bool) -> tuple[float, float]:
    """Fused norms save their input and what they give; queries, keys, values and the output of attention; gate and up together,
    and their product. All of it is split over the ranks (sequence parallelism)."""
    c = precision.activation
    between = 4 * a.hidden * c
    heads = (a.num_heads * (a.head_dim + a.v_dim) + a.num_kv_heads * (a.head_dim + a.v_dim)) * c + 4 * a.num_heads
    widths = 3 if a.gated else 2
    if not moe:
        return 0.0, between + heads + widths * a.intermediate * c
    chosen = a.experts_per_token
    inside = widths * (chosen * a.moe_intermediate + a.shared_intermediate) * c
    return 0.0, between + heads + inside + 2 * chosen * a.hidden * c + 4 * a.num_experts


def _activations(a: Architecture, work: Work, precision: Precision, grid: Grid, shares: Shares) -> Floats:
    length = (work.prompt_tokens + work.response_tokens) * precision.computed_share(work)
    rows = np.ceil(rows_of_rank(work, grid.data) / grid.micro_batches)
    tensor = grid.tensor.astype(np.float64)
    if work.kind != "train":  # the widest moment of one layer: residual, what a product reads and gives
        tokens = rows * length if work.kind == "score" else _prefill_tokens(work, precision, rows)
        widest = max(a.intermediate, a.experts_per_token * a.moe_intermediate + a.shared_intermediate)
        return tokens * (
            a.hidden * (2 * precision.residual + precision.activation) + 3 * widest / tensor * precision.activation
        )
    tokens = rows * length
    dense_share = len(a.dense_layers) / a.num_layers if a.num_experts else 1.0
    whole = split = largest_whole = largest_split = 0.0
    for moe, part in ((False, dense_share), (True, 1 - dense_share)):
        if part:
            w, s = saved_per_token(a, precision, moe)
            whole, split = whole + part * w, split + part * s
            largest_whole, largest_split = max(largest_whole, w), max(largest_split, s)
    in_flight = np.minimum(grid.pipeline, grid.micro_batches)
    kept = whole + split / tensor
    one_layer = largest_whole + largest_split / tensor
    entering = a.hidden * (precision.activation / tensor if precision.fused else precision.residual)
    last_norm = 3 * a.hidden * precision.residual / (tensor if precision.fused else 1.0)
    full = shares.layers * kept * in_flight
    checkpointed = shares.layers * entering * in_flight + one_layer
    return tokens * (np.where(grid.checkpointing == 1, checkpointed, full) + last_norm)


def _prefill_tokens(work: Work, precision: Precision, rows: NDArray[np.float64]) -> Floats:
    tokens = rows * work.prompt_tokens
    return np.minimum(tokens, PREFILL_TOKENS) if precision.fused else tokens


# -- the others ------------------------------------------------------------------------------------------------------------


def _logits(a: Architecture, work: Work, precision: Precision, grid: Grid) -> Floats:
    """Train: the logits, their log-probs and gradients; what the head of the transformers engine keeps counts once more."""
    rows = np.ceil(rows_of_rank(work, grid.data) / grid.micro_batches)
    if work.head == "value":
        return np.zeros(len(grid))
    if work.kind == "generate":  # logits, and the same sorted or as probabilities
        return rows * a.vocab_size * 4.0 * 2
    predicted = rows * work.response_tokens
    if not precision.logit_positions:
        each = precision.activation + (8.0 if work.kind == "train" else 4.0)
        return predicted * a.vocab_size * each / grid.tensor
    at_once = np.minimum(predicted, precision.logit_positions) * a.vocab_size * 4.0
    if work.kind == "score":
        return 2 * at_once
    whole = predicted * a.vocab_size * 4.0
    return np.where(whole <= KEPT_LOGITS, whole, 0.0) + 2 * at_once


def _cache(a: Architecture, work: Work, precision: Precision, grid: Grid, shares: Shares) -> Floats:
    """Of all rows of a wave at their longest. A latent (MLA) and replicated heads are on every tensor-parallel rank."""
    rows = np.ceil(rows_of_rank(work, grid.data) / grid.micro_batches)
    length = work.prompt_tokens + work.max_response_tokens
    kept = sum(a.window(layer, length) for layer in range(a.num_layers)) / a.num_layers
    split = np.ones(len(grid)) if a.kv_rank else np.minimum(grid.tensor, a.num_kv_heads)
    return rows * kept * shares.layers * a.cache_width * precision.cache / split


def _buckets(precision: Precision, grid: Grid, shares: Shares, trains: bool) -> Floats:
    """ZeRO-3: two layers (one computes, the next arrives) and what is outside of the layers, in the dtype of the products; in
    training also the gradients of one layer before they are scattered. Other data-parallel ranks: those gradients. Copies of
    the layers that autocast makes are kept until the backward pass."""
    product = precision.cast or precision.weights
    gathered = (2 * shares.largest_layer + shares.outer) * product
    reduced = shares.largest_layer * precision.gradients if trains and not precision.adapter_parameters else 0.0
    cast = np.minimum(shares.parameters, shares.layers * shares.largest_layer) * precision.cast
    return np.where(grid.zero == 3, gathered + reduced, np.where(grid.data > 1, reduced, 0.0) + cast)
