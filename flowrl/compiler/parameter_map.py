"""What the tensors of a model are called, and how they are put together, by HuggingFace, Megatron-Core and vLLM.

All is said in terms of HuggingFace's tensors, whole and under the names of their files: a tensor of another naming, on one
rank of a tensor-parallel group, is slices of those, one after the other, and padding (:class:`Local`). So moving weights
between two namings is the same as moving them between two layouts: slices are sent.

:data:`TABLE` has the names. What is put together, and in which order:

========================  =============================================  ==================================================
huggingface               megatron (a rank)                              vllm (a rank)
========================  =============================================  ==================================================
q, k, v apart             one group of query heads after the other:      its query heads, its key heads, its value heads;
                          q … q k v, q … q k v                           with fewer of those than ranks, ranks share one
gate, up apart            its rows of gate, then of up                   its rows of gate, then of up
an expert's own tensors   a tensor for each expert                       one of all experts
vocabulary as it is       padded to a multiple of 128 × tensor ranks     padded to a multiple of 64
========================  =============================================  ==================================================

Sources: Megatron-Core's ``SelfAttention.get_query_key_value_tensors`` and ``vocab_size_with_padding``; vLLM's
``QKVParallelLinear``, ``MergedColumnParallelLinear``, ``VocabParallelEmbedding`` and ``FusedMoE``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from flowrl.compiler.architecture import Parameter
from flowrl.compiler.boxes import Box, chunk
from flowrl.compiler.weights import Weights
from flowrl.errors import FlowError, nearest

Naming = Literal["huggingface", "megatron", "vllm"]
NAMINGS: tuple[Naming, ...] = get_args(Naming)

#: To a multiple of what the vocabulary is padded: ``make_vocab_size_divisible_by`` (for each tensor rank), ``padding_size``.
VOCABULARY_MULTIPLE: dict[Naming, int] = {"huggingface": 1, "megatron": 128, "vllm": 64}

#: Families whose tensors are in the table; of others only layouts under HuggingFace's names are known.
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

Kind = Literal["whole", "vocabulary", "column", "row", "q", "k", "v", "gate", "up", "gate_up"]


class Row(NamedTuple):
    """A line of the table.

    Args:
        kind: how tensor parallelism splits it, and what it is put together with.
        megatron: its name there; "" where there is none. ``{}`` is "weight" or "bias".
        vllm: the same there.
    """

    kind: Kind
    megatron: str
    vllm: str


#: By HuggingFace's name: of tensors outside of the layers whole, of others what follows "model.layers.<i>.". ``{}`` stands
#: for "weight" or "bias", ``<e>`` for the index of an expert.
TABLE: dict[str, Row] = {
    "model.embed_tokens.{}": Row("vocabulary", "embedding.word_embeddings.{}", "model.embed_tokens.{}"),
    "model.norm.{}": Row("whole", "decoder.final_layernorm.{}", "model.norm.{}"),
    "lm_head.{}": Row("vocabulary", "output_layer.{}", "lm_head.{}"),
    "value_head.{}": Row("whole", "output_layer.{}", ""),
    "input_layernorm.{}": Row("whole", "self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}"),
    "self_attn.q_proj.{}": Row("q", "self_attention.linear_qkv.{}", "self_attn.qkv_proj.{}"),
    "self_attn.k_proj.{}": Row("k", "self_attention.linear_qkv.{}", "self_attn.qkv_proj.{}"),
    "self_attn.v_proj.{}": Row("v", "self_attention.linear_qkv.{}", "self_attn.qkv_proj.{}"),
    "self_attn.q_norm.{}": Row("whole", "self_attention.q_layernorm.{}", "self_attn.q_norm.{}"),
    "self_attn.k_norm.{}": Row("whole", "self_attention.k_layernorm.{}", "self_attn.k_norm.{}"),
    "self_attn.o_proj.{}": Row("row", "self_attention.linear_proj.{}", "self_attn.o_proj.{}"),
    # Of a layer with experts it is "pre_mlp_layernorm" in Megatron: there it is no part of the first matrix product.
    "post_attention_layernorm.{}": Row("whole", "mlp.linear_fc1.layer_norm_{}", "post_attention_layernorm.{}"),
    "mlp.gate_proj.{}": Row("gate", "mlp.linear_fc1.{}", "mlp.gate_up_proj.{}"),
    "mlp.up_proj.{}": Row("up", "mlp.linear_fc1.{}", "mlp.gate_up_proj.{}"),
    "mlp.down_proj.{}": Row("row", "mlp.linear_fc2.{}", "mlp.down_proj.{}"),
    # Mixtures: as files have them, and as transformers holds them while it runs (all experts in one tensor).
    "mlp.gate.{}": Row("whole", "mlp.router.{}", "mlp.gate.{}"),
    "mlp.experts.<e>.gate_proj.{}": Row("gate", "mlp.experts.linear_fc1.{}<e>", "mlp.experts.w13_{}"),
    "mlp.experts.<e>.up_proj.{}": Row("up", "mlp.experts.linear_fc1.{}<e>", "mlp.experts.w13_{}"),
    "mlp.experts.<e>.down_proj.{}": Row("row", "mlp.experts.linear_fc2.{}<e>", "mlp.experts.w2_{}"),
    "mlp.experts.gate_up_proj": Row("gate_up", "mlp.experts.linear_fc1.weight<e>", "mlp.experts.w13_weight"),
    "mlp.experts.down_proj": Row("row", "mlp.experts.linear_fc2.weight<e>", "mlp.experts.w2_weight"),
    "block_sparse_moe.gate.{}": Row("whole", "mlp.router.{}", "block_sparse_moe.gate.{}"),
    "block_sparse_moe.experts.<e>.w1.{}": Row(
        "gate", "mlp.experts.linear_fc1.{}<e>", "block_sparse_moe.experts.w13_{}"
    ),
    "block_sparse_moe.experts.<e>.w3.{}": Row("up", "mlp.experts.linear_fc1.{}<e>", "block_sparse_moe.experts.w13_{}"),
    "block_sparse_moe.experts.<e>.w2.{}": Row("row", "mlp.experts.linear_fc2.{}<e>", "block_sparse_moe.experts.w2_{}"),
    "mlp.shared_expert.gate_proj.{}": Row(
        "gate", "mlp.shared_experts.linear_fc1.{}", "mlp.shared_expert.gate_up_proj.{}"
    ),
    "mlp.shared_expert.up_proj.{}": Row("up", "mlp.shared_experts.linear_fc1.{}", "mlp.shared_expert.gate_up_proj.{}"),
    "mlp.shared_expert.down_proj.{}": Row("row", "mlp.shared_experts.linear_fc2.{}", "mlp.shared_expert.down_proj.{}"),
    "mlp.shared_expert_gate.{}": Row("whole", "mlp.shared_experts.gate_{}", "mlp.shared_expert_gate.{}"),
}


class Piece(NamedTuple):
    """A slice of a HuggingFace tensor within another tensor.

    Args:
        tensor: its HuggingFace name.
        box: the slice, which may reach past the vocabulary into its padding.
        offset: where its first number lies in the other tensor. Dims are told from the last one on: where one tensor has a
            dim of experts and the other one expert, the slice is one long along it.
    """

    tensor: str
    box: Box
    offset: tuple[int, ...]


class Local(NamedTuple):
    """What one rank holds of a tensor, or of several that are put together.

    Args:
        name: in the naming of the layout; layers are counted over all pipeline stages.
        shape: on this rank.
        pieces: what it is made of. A tensor that several HuggingFace tensors make up comes once for each of them.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


# -- names ----------------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A tensor and its line of the table."""

    row: Row
    layer: str
    kind: str
    expert: int | None

    def name(self, naming: Naming, expert: int | None = None) -> str:
        """What it is called; ``expert``: of which, where each has its own tensor."""
        text = self.row.megatron if naming == "megatron" else self.row.vllm
        prefix = {"megatron": "decoder", "vllm": "model"}[naming] + f".layers.{self.layer}." if self.layer else ""
        number = self.expert if expert is None else expert
        return prefix + text.replace("{}", self.kind).replace("<e>", str(number))


@functools.lru_cache(maxsize=65536)
def known(name: str) -> Known | None:
    """The line of the table for a HuggingFace name; None where there is none."""
    layer, rest = "", name
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        layer, rest = found.groups()
    expert = None
    if found := re.search(r"\.experts\.(\d+)\.", rest):
        expert, rest = int(found[1]), rest.replace(found[0], ".experts.<e>.")
    stem, _, kind = rest.rpartition(".")
    for text in (f"{stem}.{{}}" if kind in ("weight", "bias") else rest, rest):
        if text in TABLE:
            row = TABLE[text]
            bias_of_row = kind == "bias" and row.kind == "row"  # added once, after the sum over ranks
            return Known(row._replace(kind="whole") if bias_of_row else row, layer, kind, expert)
    return None


def naming_problems(weights: Weights, naming: Naming) -> Iterator[str]:
    """Why these weights have no names in a naming, a sentence each."""
    if naming not in NAMINGS:
        yield f"naming is {naming!r}; expected one of {', '.join(NAMINGS)}"
        return
    if naming == "huggingface":
        return
    if weights.family not in FAMILIES:
        yield (
            f"family {weights.family!r} has no names in {naming}; expected one of {', '.join(FAMILIES)} "
            f"({nearest(weights.family, FAMILIES)})"
        )
        return
    names = weights.by_name
    unknown = [
        n for n in names if (k := known(n)) is None or not (k.row.megatron if naming == "megatron" else k.row.vllm)
    ]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        yield f"{', '.join(unknown[:3])}{more}: expected tensors that have a name in {naming}"
    if weights.num_kv_heads < 1 and any(".q_proj." in n for n in names):
        yield f"num_kv_heads is {weights.num_kv_heads}; expected the heads that keys and values are put together by"


# -- how a rank's part is put together ------------------------------------------------------------------------------------


def locals_of(
    weights: Weights, parameter: Parameter, naming: Naming, tensor: int, rank: int, *, vocabulary: bool, multiple: int
) -> list[Local]:
    """What a rank of a tensor-parallel group holds of one HuggingFace tensor.

    Args:
        weights: what it is of; without ``naming_problems``.
        parameter: the tensor.
        naming: whose names, and whose way to put tensors together.
        tensor: ranks of the group.
        rank: which of them.
        vocabulary: whether rows of the vocabulary are split (Megatron and vLLM always do).
        multiple: of what the vocabulary is padded to a multiple (of each rank, in Megatron).

    Raises:
        FlowError: the tensor cannot be split over so many ranks in this naming.
    """
    if naming == "huggingface":
        return [_plain(weights, parameter, tensor, rank, vocabulary)]
    found = known(parameter.name)
    assert found is not None
    cuts, length, axis = _cuts(weights, parameter, found.row.kind, naming, tensor, rank, multiple)
    if naming == "megatron" and parameter.name.endswith("post_attention_layernorm.weight"):
        if parameter.layer in weights.with_experts:
            return [_local(parameter, f"decoder.layers.{parameter.layer}.pre_mlp_layernorm.weight", cuts, length, axis)]
    stacked = ".mlp.experts." in parameter.name and found.expert is None
    if stacked and naming == "megatron":
        return [
            _local(parameter, found.name(naming, e), cuts, length, axis, expert=e) for e in range(parameter.shape[0])
        ]
    name = found.name(naming)
    if naming == "vllm" and stacked and weights.family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    elif naming == "vllm" and weights.family == "mixtral":
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    local = _local(parameter, name, cuts, length, axis)
    if naming == "vllm" and found.expert is not None:  # one of a tensor of all
        pieces = tuple(p._replace(offset=(found.expert, *p.offset)) for p in local.pieces)
        local = Local(name, (weights.num_experts, *local.shape), pieces)
    return [local]


#: (first row, one past the last, where the first one lies on the rank) along the dim that is split.
_Cut = tuple[int, int, int]


def _local(
    parameter: Parameter, name: str, cuts: list[_Cut], length: int, axis: int, expert: int | None = None
) -> Local:
    """The tensor ``name`` that the cuts of ``parameter`` lie in; of a tensor of all experts, with ``expert`` that one alone."""
    whole = Box.whole(parameter.shape)
    shape = (*parameter.shape[:axis], length, *parameter.shape[axis + 1 :])
    pieces = []
    for start, stop, at in cuts:
        box = whole.along(axis, start, stop) if parameter.shape else whole
        offset = tuple(at if i == axis else 0 for i in range(len(parameter.shape)))
        if expert is not None:
            box, offset = box.along(0, expert, expert + 1), offset[1:]
        pieces.append(Piece(parameter.name, box, offset))
    return Local(name, shape[1:] if expert is not None else shape, tuple(pieces))


def _cuts(
    weights: Weights, parameter: Parameter, kind: Kind, naming: Naming, tensor: int, rank: int, multiple: int
) -> tuple[list[_Cut], int, int]:
    """(cuts, length of the rank's tensor along the dim, the dim)."""
    shape, name = parameter.shape, parameter.name
    axis = {"row": len(shape) - 1, "gate_up": 1}.get(kind, 0)
    if kind == "whole":
        return [(0, shape[0], 0)], shape[0], 0
    if kind == "vocabulary":
        padded = -(-shape[0] // multiple) * multiple
        part = _share(padded, tensor, name)
        return [(rank * part, (rank + 1) * part, 0)], part, 0
    if kind in ("q", "k", "v"):
        return _qkv(weights, parameter, kind, naming, tensor, rank)
    if kind in ("gate", "up"):
        part = _share(shape[0], tensor, name)
        return [(rank * part, (rank + 1) * part, part if kind == "up" else 0)], 2 * part, 0
    if kind == "gate_up":
        half = shape[1] // 2
        part = _share(half, tensor, name)
        first = (rank * part, (rank + 1) * part, 0)
        return [first, (first[0] + half, first[1] + half, part)], 2 * part, 1
    part = _share(shape[axis], tensor, name)
    return [(rank * part, (rank + 1) * part, 0)], part, axis


def _qkv(
    weights: Weights, parameter: Parameter, kind: Kind, naming: Naming, tensor: int, rank: int
) -> tuple[list[_Cut], int, int]:
    stem = parameter.name.rpartition("_proj.")[0][:-1]
    suffix = "_proj." + parameter.name.rpartition(".")[2]
    rows = {part: weights.by_name[f"{stem}{part}{suffix}"].shape[0] for part in "qkv"}
    groups = weights.num_kv_heads
    head = {part: rows[part] // groups for part in "qkv"}  # rows of one group of heads
    if naming == "megatron":
        mine = _share(groups, tensor, f"the {groups} key-value heads of {stem[:-1]}")
        each = sum(head.values())
        before = {"q": 0, "k": head["q"], "v": head["q"] + head["k"]}[kind]
        first = rank * mine
        cuts = [(g * head[kind], (g + 1) * head[kind], (g - first) * each + before) for g in range(first, first + mine)]
        return cuts, mine * each, 0
    part = {p: _kv_range(rows[p], groups, tensor, rank, f"{stem}{p}{suffix}") for p in "kv"}
    queries = _share(rows["q"], tensor, f"{stem}q{suffix}")
    part["q"] = (rank * queries, (rank + 1) * queries)
    sizes = {p: b - a for p, (a, b) in part.items()}
    before = {"q": 0, "k": sizes["q"], "v": sizes["q"] + sizes["k"]}[kind]
    return [(*part[kind], before)], sum(sizes.values()), 0


def _kv_range(rows: int, heads: int, tensor: int, rank: int, name: str) -> tuple[int, int]:
    """Rows of keys or values of a rank: its heads; with fewer heads than ranks, the one that it shares with others."""
    if tensor > heads:
        if tensor % heads:
            raise FlowError(
                f"{name} cannot be shared evenly",
                expected=f"a multiple of its {heads} heads, or a divisor",
                received=f"tensor parallelism over {tensor} ranks",
                do="choose another degree of tensor parallelism",
            )
        head = rank * heads // tensor
        return head * rows // heads, (head + 1) * rows // heads
    part = _share(heads, tensor, f"the {heads} heads of {name}") * rows // heads
    return rank * part, (rank + 1) * part


#: Tensors that hold several matrices one after the other along the dim that is split, each of which is split.
_PACKED = {"experts.gate_up_proj": 2, "attn.c_attn.weight": 3, "attn.c_attn.bias": 3}


def _plain(weights: Weights, parameter: Parameter, tensor: int, rank: int, vocabulary: bool) -> Local:
    """A tensor under its own name: torch's ``Shard`` of its dim, heads of keys and values kept whole where they are known."""
    name, shape, dim = parameter.name, parameter.shape, parameter.split
    if dim is None or tensor == 1 or (parameter.layer is None and not vocabulary):
        return Local(name, shape, (Piece(name, Box.whole(shape), (0,) * len(shape)),))
    if weights.num_kv_heads and re.search(r"self_attn\.[kv]_proj\.", name):
        ranges = [_kv_range(shape[0], weights.num_kv_heads, tensor, rank, name)]
    else:
        packed = next((n for text, n in _PACKED.items() if name.endswith(text)), 1)
        each = shape[dim] // packed
        start, stop = chunk(each, tensor, rank)
        ranges = [(i * each + start, i * each + stop) for i in range(packed)]
    cuts, at = [], 0
    for start, stop in ranges:
        cuts.append((start, stop, at))
        at += stop - start
    return _local(parameter, name, cuts, at, dim)


def _share(length: int, parts: int, name: str) -> int:
    if length % parts:
        raise FlowError(
            f"{name} cannot be split evenly",
            expected=f"a divisor of {length}",
            received=f"tensor parallelism over {parts} ranks",
            do="choose another degree of tensor parallelism",
        )
    return length // parts
