"""The tensors of a model: names and shapes as HuggingFace has them, and the dim that tensor parallelism splits.

Column-parallel layers (queries, keys, values, gate, up) split their output features, dim 0 of ``[out, in]``; row-parallel ones
(attention output, down) their input features, dim 1; embedding and head their vocabulary rows (arXiv 1909.08053, §3). GPT-2
keeps ``[in, out]``, so there the dims are exchanged. Routers, norms and the low-rank parts of MLA are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowrl.compiler.architecture import Architecture, Parameter

if TYPE_CHECKING:
    from flowrl.compiler.architecture import Head

#: Of a value head: the trunk's last hidden state to one number.
VALUE_HEAD = "value_head"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a layer, named within it."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    expert: int | None = None


def all_tensors(architecture: Architecture, head: Head, fused: bool) -> Iterator[Parameter]:
    """Every tensor of a model, in the network's order."""
    before, after = outer_tensors(architecture, head)
    yield from before
    prefix = "transformer.h" if architecture.family == "gpt2" else "model.layers"
    kinds = {moe: list(layer_tensors(architecture, moe, fused)) for moe in (False, True)}
    for layer in range(architecture.num_layers):
        for tensor in kinds[architecture.is_moe(layer)]:
            yield Parameter(f"{prefix}.{layer}.{tensor.name}", tensor.shape, layer, tensor.split, tensor.expert)
    yield from after


def outer_tensors(architecture: Architecture, head: Head) -> tuple[list[Parameter], list[Parameter]]:
    """Those before the layers, and those after them."""
    a, gpt2 = architecture, architecture.family == "gpt2"
    embedding = Parameter(
        "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight", (a.vocab_size, a.hidden), None, 0
    )
    before = [embedding]
    if a.positions:
        before.append(Parameter("transformer.wpe.weight", (a.positions, a.hidden), None, None))
    if gpt2:
        after = [Parameter(f"transformer.ln_f.{kind}", (a.hidden,), None, None) for kind in ("weight", "bias")]
    else:
        after = [Parameter("model.norm.weight", (a.hidden,), None, None)]
    if head == "value":
        after.append(Parameter(f"{VALUE_HEAD}.weight", (1, a.hidden), None, None))
        after.append(Parameter(f"{VALUE_HEAD}.bias", (1,), None, None))
    else:
        logits = Parameter("lm_head.weight", (a.vocab_size, a.hidden), None, 0)
        after.append(replace(logits, tied_to=embedding.name) if a.tied else logits)
    return before, after


def layer_tensors(architecture: Architecture, moe: bool, fused: bool) -> Iterator[Tensor]:
    """Those of one layer, in the network's order.

    Args:
        moe: whether it has experts.
        fused: whether its experts are two tensors.
    """
    if architecture.family == "gpt2":
        yield from _gpt2(architecture)
        return
    yield from _latent_attention(architecture) if architecture.kv_rank else _attention(architecture)
    yield from _experts(architecture, fused) if moe else _mlp(architecture, "mlp", architecture.intermediate)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for norm in norms:
        yield Tensor(f"{norm}.weight", (architecture.hidden,))


def _linear(name: str, out: int, into: int, split: int | None, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (out, into), split)
    if bias:  # of a row-parallel layer it is added once, after the sum
        yield Tensor(f"{name}.bias", (out,), 0 if split == 0 else None)


def _attention(a: Architecture) -> Iterator[Tensor]:
    yield from _linear("self_attn.q_proj", a.num_heads * a.head_dim, a.hidden, 0, a.query_bias)
    yield from _linear("self_attn.k_proj", a.num_kv_heads * a.head_dim, a.hidden, 0, a.query_bias)
    yield from _linear("self_attn.v_proj", a.num_kv_heads * a.v_dim, a.hidden, 0, a.query_bias)
    yield from _linear("self_attn.o_proj", a.hidden, a.num_heads * a.v_dim, 1, a.output_bias)
    if a.qk_norm:
        yield Tensor("self_attn.q_norm.weight", (a.head_dim,))
        yield Tensor("self_attn.k_norm.weight", (a.head_dim,))


def _latent_attention(a: Architecture) -> Iterator[Tensor]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1)."""
    if a.query_rank:
        yield from _linear("self_attn.q_a_proj", a.query_rank, a.hidden, None, a.query_bias)
        yield Tensor("self_attn.q_a_layernorm.weight", (a.query_rank,))
        yield Tensor("self_attn.q_b_proj.weight", (a.num_heads * a.head_dim, a.query_rank), 0)
    else:
        yield Tensor("self_attn.q_proj.weight", (a.num_heads * a.head_dim, a.hidden), 0)
    yield from _linear("self_attn.kv_a_proj_with_mqa", a.kv_rank + a.rope_dim, a.hidden, None, a.query_bias)
    yield Tensor("self_attn.kv_a_layernorm.weight", (a.kv_rank,))
    width = a.num_heads * (a.head_dim - a.rope_dim + a.v_dim)
    yield Tensor("self_attn.kv_b_proj.weight", (width, a.kv_rank), 0)
    yield from _linear("self_attn.o_proj", a.hidden, a.num_heads * a.v_dim, 1, a.output_bias)


def _mlp(a: Architecture, name: str, width: int) -> Iterator[Tensor]:
    yield from _linear(f"{name}.gate_proj", width, a.hidden, 0, a.mlp_bias)
    yield from _linear(f"{name}.up_proj", width, a.hidden, 0, a.mlp_bias)
    yield from _linear(f"{name}.down_proj", a.hidden, width, 1, a.mlp_bias)


def _experts(a: Architecture, fused: bool) -> Iterator[Tensor]:
    mixtral = a.family == "mixtral" and not fused
    block = "block_sparse_moe" if mixtral else "mlp"
    gate = Tensor(f"{block}.gate.weight", (a.num_experts, a.hidden))
    first = a.family in ("mixtral", "qwen2_moe")  # where the router stands before the experts
    if first:
        yield gate
    if fused:
        yield Tensor("mlp.experts.gate_up_proj", (a.num_experts, 2 * a.moe_intermediate, a.hidden), 1)
        yield Tensor("mlp.experts.down_proj", (a.num_experts, a.hidden, a.moe_intermediate), 2)
    else:
        gate_name, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for expert in range(a.num_experts):
            inside = f"{block}.experts.{expert}"
            yield Tensor(f"{inside}.{gate_name}.weight", (a.moe_intermediate, a.hidden), 0, expert)
            yield Tensor(f"{inside}.{up}.weight", (a.moe_intermediate, a.hidden), 0, expert)
            yield Tensor(f"{inside}.{down}.weight", (a.hidden, a.moe_intermediate), 1, expert)
    if not first:
        yield gate
    if a.shared_intermediate:
        shared = "mlp.shared_expert" if a.family == "qwen2_moe" else "mlp.shared_experts"
        yield from _mlp(a, shared, a.shared_intermediate)
    if a.shared_gate:
        yield Tensor("mlp.shared_expert_gate.weight", (1, a.hidden))


def _gpt2(a: Architecture) -> Iterator[Tensor]:
    """Conv1D keeps ``[in, out]``; queries, keys and values are one tensor."""
    width = a.num_heads * a.head_dim
    for norm in ("ln_1", "ln_2"):
        if norm == "ln_2":
            yield Tensor("attn.c_attn.weight", (a.hidden, 3 * width), 1)
            yield Tensor("attn.c_attn.bias", (3 * width,), 0)
            yield Tensor("attn.c_proj.weight", (width, a.hidden), 0)
            yield Tensor("attn.c_proj.bias", (a.hidden,))
        yield Tensor(f"{norm}.weight", (a.hidden,))
        yield Tensor(f"{norm}.bias", (a.hidden,))
    yield Tensor("mlp.c_fc.weight", (a.hidden, a.intermediate), 1)
    yield Tensor("mlp.c_fc.bias", (a.intermediate,), 0)
    yield Tensor("mlp.c_proj.weight", (a.intermediate, a.hidden), 0)
    yield Tensor("mlp.c_proj.bias", (a.hidden,))
