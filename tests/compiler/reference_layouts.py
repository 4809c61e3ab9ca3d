"""What every device holds, written a second time from the definitions of the frameworks, with no code of the planner.

Whole tensors are cut and put together as a whole: ``chunk`` and ``concatenate`` of arrays, where the planner has slices. Every
number of a model is one of a kind, so that sets of numbers tell who holds what.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.weights import Weights

Arrays = dict[str, np.ndarray]

#: Rows that arrays of the vocabulary have in stock for padding.
STOCK = 512

TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [1], "head_dim": 4},
    "qwen2_moe": {"num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16},
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A configuration with grouped query heads and sizes that seldom divide one another."""
    common = {
        "model_type": family,
        "num_hidden_layers": 5,
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "vocab_size": 45,
        "num_experts_per_tok": 1,
    }
    return {**common, **TINY[family], **changes}


def tiny_weights(family: str, *, fused_experts: bool = False, dtype_bytes: int = 2, **changes: Any) -> Weights:
    architecture = Architecture.from_config(tiny_config(family, **changes))
    return Weights.of(architecture, fused_experts=fused_experts, dtype_bytes=dtype_bytes)


def numbered(weights: Weights) -> Arrays:
    """Every tensor, each number of it another one from 1 on; of the vocabulary with rows for padding, negative ones."""
    found, count, padding = {}, 1, -1
    for parameter in weights.parameters:
        if parameter.tied_to is None:
            size = math.prod(parameter.shape)
            found[parameter.name] = np.arange(count, count + size, dtype=np.int64).reshape(parameter.shape)
            count += size
            if is_vocabulary(parameter.name):
                more = STOCK * parameter.shape[1]
                rows = np.arange(padding, padding - more, -1, dtype=np.int64).reshape(STOCK, -1)
                found[parameter.name] = np.concatenate([found[parameter.name], rows])
                padding -= more
    return found


def is_vocabulary(name: str) -> bool:
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def held(weights: Weights, layout: Layout, arrays: Arrays) -> dict[DeviceId, Arrays]:
    """Every tensor of every device, by the name that it has there."""
    p = layout.parallelism
    found: dict[DeviceId, Arrays] = {}
    for pipeline in range(p.pipeline):
        for data in range(p.data):
            for tensor in range(p.tensor):
                at = (pipeline * p.data + data) * p.tensor + tensor
                offset = layout.ranks[at] if layout.ranks else at
                stage = _stage(weights, layout, arrays, pipeline)
                make = {"huggingface": _huggingface, "megatron": _megatron, "vllm": _vllm}[layout.naming]
                mine = make(weights, layout, stage, tensor)
                if layout.naming == "megatron" and pipeline > 0 and "embedding.word_embeddings.weight" in mine:
                    mine["output_layer.weight"] = mine.pop(
                        "embedding.word_embeddings.weight"
                    )  # the copy of a tied head
                if p.zero == 3:
                    group = layout.shard_size or p.data
                    mine = {n: _rows(a, group, data % group) for n, a in mine.items()}
                found[DeviceId(layout.mesh.pool, layout.mesh.start + offset)] = mine
    return found


def _rows(array: np.ndarray, parts: int, index: int) -> np.ndarray:
    import torch

    chunks = torch.chunk(torch.from_numpy(np.ascontiguousarray(array)), parts)
    return chunks[index].numpy() if index < len(chunks) else array[:0]


def _stage(weights: Weights, layout: Layout, arrays: Arrays, pipeline: int) -> Arrays:
    """What one pipeline stage holds: whole tensors."""
    stages, layers = layout.parallelism.pipeline, weights.num_layers
    counts = list(layout.stages) or [len(part) for part in np.array_split(np.arange(layers), stages)]
    first = sum(counts[:pipeline])
    mine = set(range(first, first + counts[pipeline]))
    tied = any(x.tied_to for x in weights.parameters)
    found = {}
    for name, array in arrays.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer:
            if int(layer[1]) in mine:
                found[name] = array
        elif "embed" in name:
            if pipeline == 0 or (tied and pipeline == stages - 1):
                found[name] = array
        elif pipeline == stages - 1:
            found[name] = array
    return found


def _part(array: np.ndarray, parts: int, index: int, axis: int = 0) -> np.ndarray:
    return np.split(array, parts, axis=axis)[index]


# -- huggingface: tensors of their own, split as torch's chunk does --------------------------------------------------------


def _huggingface(weights: Weights, layout: Layout, stage: Arrays, tensor: int) -> Arrays:
    parts, found = layout.parallelism.tensor, {}
    real = {p.name: p for p in weights.parameters}
    for name, array in stage.items():
        array = array[: real[name].shape[0]]
        outside = real[name].layer is None
        if parts == 1 or (outside and not (is_vocabulary(name) and layout.split_vocabulary)):
            found[name] = array
        elif is_vocabulary(name):
            found[name] = _rows(array, parts, tensor)
        elif re.search(r"[kv]_proj", name) and parts > weights.num_kv_heads:
            found[name] = _part(array, weights.num_kv_heads, tensor * weights.num_kv_heads // parts)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            found[name] = np.concatenate([_part(gate, parts, tensor, 1), _part(up, parts, tensor, 1)], axis=1)
        elif re.search(r"(q|k|v|gate|up)_proj|\.w[13]\.", name):
            found[name] = _rows(array, parts, tensor)
        elif re.search(r"(o|down)_proj|\.w2\.", name) and array.ndim > 1:
            found[name] = np.moveaxis(_rows(np.moveaxis(array, -1, 0), parts, tensor), 0, -1)
        else:
            found[name] = array
    return found


# -- megatron ---------------------------------------------------------------------------------------------------------------


def _megatron(weights: Weights, layout: Layout, stage: Arrays, tensor: int) -> Arrays:
    parts, found = layout.parallelism.tensor, {}
    real = {p.name: p.shape for p in weights.parameters}
    multiple = (layout.vocabulary_multiple or 128) * parts
    for name, array in stage.items():
        if is_vocabulary(name):
            padded = math.ceil(real[name][0] / multiple) * multiple
            mine = _part(array[:padded], parts, tensor)
            there = "output_layer.weight" if name == "lm_head.weight" else "embedding.word_embeddings.weight"
            found[there] = mine
        elif name == "model.norm.weight":
            found["decoder.final_layernorm.weight"] = array
    for layer in sorted({int(m[1]) for n in stage if (m := re.match(r"model\.layers\.(\d+)\.", n))}):
        a = {
            n.removeprefix(f"model.layers.{layer}."): x
            for n, x in stage.items()
            if n.startswith(f"model.layers.{layer}.")
        }
        out = _megatron_layer(weights, a, parts, tensor)
        found.update({f"decoder.layers.{layer}.{n}": x for n, x in out.items()})
    return found


def _megatron_layer(weights: Weights, a: Arrays, parts: int, tensor: int) -> Arrays:
    groups, out = weights.num_kv_heads, {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in a:
            q, k, v = (a[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            fused = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
            whole = np.concatenate(fused, axis=1)
            whole = whole.reshape(-1, *whole.shape[2:])
            out[f"self_attention.linear_qkv.{kind}"] = _part(whole, parts, tensor)
    out["self_attention.linear_proj.weight"] = _part(a["self_attn.o_proj.weight"], parts, tensor, 1)
    out["self_attention.linear_qkv.layer_norm_weight"] = a["input_layernorm.weight"]
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in a:
            out[f"self_attention.{x}_layernorm.weight"] = a[f"self_attn.{x}_norm.weight"]
    experts = experts_of(a)
    norm = "pre_mlp_layernorm.weight" if experts else "mlp.linear_fc1.layer_norm_weight"
    out[norm] = a["post_attention_layernorm.weight"]
    if experts:
        router = next(x for n, x in a.items() if n in ("mlp.gate.weight", "block_sparse_moe.gate.weight"))
        out["mlp.router.weight"] = router
    for e, (gate, up, down) in enumerate(experts):
        out[f"mlp.experts.linear_fc1.weight{e}"] = np.concatenate([_part(x, parts, tensor) for x in (gate, up)])
        out[f"mlp.experts.linear_fc2.weight{e}"] = _part(down, parts, tensor, 1)
    for there, here in (("mlp", "mlp"), ("mlp.shared_experts", "mlp.shared_expert")):
        if f"{here}.gate_proj.weight" in a:
            both = [_part(a[f"{here}.{x}_proj.weight"], parts, tensor) for x in ("gate", "up")]
            out[f"{there}.linear_fc1.weight"] = np.concatenate(both)
            out[f"{there}.linear_fc2.weight"] = _part(a[f"{here}.down_proj.weight"], parts, tensor, 1)
    if "mlp.shared_expert_gate.weight" in a:
        out["mlp.shared_experts.gate_weight"] = a["mlp.shared_expert_gate.weight"]
    return out


def experts_of(a: Arrays) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(gate, up, down) of each expert of a layer, however they are kept."""
    if "mlp.experts.gate_up_proj" in a:
        both, downs = a["mlp.experts.gate_up_proj"], a["mlp.experts.down_proj"]
        return [(*np.split(x, 2), down) for x, down in zip(both, downs, strict=True)]  # type: ignore[misc]
    found = []
    for e in range(1000):
        for block, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
            if f"{block}.experts.{e}.{names[0]}.weight" in a:
                found.append(tuple(a[f"{block}.experts.{e}.{n}.weight"] for n in names))
    return found


# -- vllm ---------------------------------------------------------------------------------------------------------------------


def _vllm(weights: Weights, layout: Layout, stage: Arrays, tensor: int) -> Arrays:
    parts, found = layout.parallelism.tensor, {}
    real = {p.name: p.shape for p in weights.parameters}
    multiple = layout.vocabulary_multiple or 64
    for name, array in stage.items():
        if is_vocabulary(name):
            found[name] = _part(array[: math.ceil(real[name][0] / multiple) * multiple], parts, tensor)
        elif name == "model.norm.weight":
            found[name] = array
    for layer in sorted({int(m[1]) for n in stage if (m := re.match(r"model\.layers\.(\d+)\.", n))}):
        a = {
            n.removeprefix(f"model.layers.{layer}."): x
            for n, x in stage.items()
            if n.startswith(f"model.layers.{layer}.")
        }
        out = _vllm_layer(weights, a, parts, tensor)
        found.update({f"model.layers.{layer}.{n}": x for n, x in out.items()})
    return found


def _vllm_layer(weights: Weights, a: Arrays, parts: int, tensor: int) -> Arrays:
    heads, out = weights.num_kv_heads, {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in a:
            mine = [_part(a[f"self_attn.q_proj.{kind}"], parts, tensor)]
            for x in "kv":
                array = a[f"self_attn.{x}_proj.{kind}"]
                replicas = max(1, parts // heads)
                mine.append(_part(array, parts // replicas, tensor // replicas))
            out[f"self_attn.qkv_proj.{kind}"] = np.concatenate(mine)
    out["self_attn.o_proj.weight"] = _part(a["self_attn.o_proj.weight"], parts, tensor, 1)
    out.update({n: x for n, x in a.items() if "layernorm" in n or "_norm" in n})
    block = "block_sparse_moe" if weights.family == "mixtral" else "mlp"
    if experts := experts_of(a):
        out[f"{block}.gate.weight"] = a.get("mlp.gate.weight", a.get("block_sparse_moe.gate.weight"))
        w13 = [np.concatenate([_part(gate, parts, tensor), _part(up, parts, tensor)]) for gate, up, _ in experts]
        out[f"{block}.experts.w13_weight"] = np.stack(w13)
        out[f"{block}.experts.w2_weight"] = np.stack([_part(down, parts, tensor, 1) for _, _, down in experts])
    for name in ("mlp", "mlp.shared_expert"):
        if f"{name}.gate_proj.weight" in a:
            both = [_part(a[f"{name}.{x}_proj.weight"], parts, tensor) for x in ("gate", "up")]
            out[f"{name}.gate_up_proj.weight"] = np.concatenate(both)
            out[f"{name}.down_proj.weight"] = _part(a[f"{name}.down_proj.weight"], parts, tensor, 1)
    if "mlp.shared_expert_gate.weight" in a:
        out["mlp.shared_expert_gate.weight"] = a["mlp.shared_expert_gate.weight"]
    return out


# -- what is missing ----------------------------------------------------------------------------------------------------------


class Owned:
    """Sets of numbers as masks: entry n tells whether n is in it; padding's negative ones count from the end.

    Args:
        arrays: all numbers that there are.
    """

    def __init__(self, arrays: Arrays) -> None:
        every = [int(n) for a in arrays.values() if a.size for n in (a.min(), a.max())]
        self.size = max(every) + 1 - min(0, *every)
        self.real = max(every) + 1

    def by(self, arrays: Arrays) -> np.ndarray:
        """What one device holds."""
        mask = np.zeros(self.size, dtype=bool)
        for array in arrays.values():
            mask[array.ravel()] = True
        mask[0] = False  # no number: padding that was made
        return mask

    def missing(
        self, source: dict[DeviceId, Arrays], target: dict[DeviceId, Arrays], *, padding: bool
    ) -> dict[DeviceId, np.ndarray]:
        """Of each device of the target, what it lacks and some device of the source holds.

        Args:
            padding: whether numbers of the padding count.
        """
        here = {device: self.by(arrays) for device, arrays in source.items()}
        somewhere = np.logical_or.reduce(list(here.values()))
        if not padding:
            somewhere[self.real :] = False
        nothing = np.zeros(self.size, dtype=bool)
        return {d: self.by(a) & ~here.get(d, nothing) & somewhere for d, a in target.items()}

    def as_received(
        self, source: dict[DeviceId, Arrays], target: dict[DeviceId, Arrays], *, padding: bool
    ) -> dict[DeviceId, Arrays]:
        """What the target's devices are to hold: padding that nobody has, or that has no meaning there, is zero."""
        somewhere = np.logical_or.reduce([self.by(arrays) for arrays in source.values()])
        return {
            device: {n: np.where((a > 0) | (somewhere[a] & padding), a, 0) for n, a in arrays.items()}
            for device, arrays in target.items()
        }
