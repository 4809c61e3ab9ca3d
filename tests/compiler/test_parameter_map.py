"""Names and fusions: by hand on small tensors, complete for each family, refused by name elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.parameter_map import FAMILIES, known, naming_problems
from flowrl.compiler.resharding import plan_transfers
from flowrl.compiler.transfers import apply
from flowrl.compiler.weights import Weights
from flowrl.errors import FlowError
from tests.compiler.reference_layouts import TINY, held, numbered, tiny_weights

CLUSTER = Cluster("H100", nodes=2)
FILE = Layout(Mesh(0, 0, 1), Parallelism())


def moved(weights: Weights, tensors: dict[str, np.ndarray], target: Layout) -> dict[int, dict[str, np.ndarray]]:
    plan = plan_transfers(weights, FILE, target, CLUSTER, 1 << 20)
    return {d.device: t for d, t in apply(plan, {DeviceId(0, 0): tensors}).items()}


def one_layer(**changes: Any) -> tuple[Weights, dict[str, np.ndarray]]:
    """A layer of hidden size 1: four query heads and two of keys and values, of two numbers each."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 1,
        "intermediate_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 3,
        **changes,
    }
    weights = Weights.of(Architecture.from_config(config))
    at = "model.layers.0."
    tensors = {name: np.zeros(p.shape) for name, p in weights.by_name.items()}
    tensors[f"{at}self_attn.q_proj.weight"] = np.array([[10], [11], [20], [21], [30], [31], [40], [41.0]])
    tensors[f"{at}self_attn.k_proj.weight"] = np.array([[50], [51], [60], [61.0]])
    tensors[f"{at}self_attn.v_proj.weight"] = np.array([[70], [71], [80], [81.0]])
    tensors[f"{at}mlp.gate_proj.weight"] = np.array([[1], [2], [3], [4.0]])
    tensors[f"{at}mlp.up_proj.weight"] = np.array([[5], [6], [7], [8.0]])
    tensors["model.embed_tokens.weight"] = np.array([[1], [2], [3.0]])
    return weights, tensors


def test_megatron_by_hand() -> None:
    weights, tensors = one_layer()
    target = Layout(Mesh(0, 8, 2), Parallelism(tensor=2), "megatron", vocabulary_multiple=2)
    found = moved(weights, tensors, target)
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    # A group of two query heads, their key head, their value head; a group a rank.
    assert found[8][qkv].ravel().tolist() == [10, 11, 20, 21, 50, 51, 70, 71]
    assert found[9][qkv].ravel().tolist() == [30, 31, 40, 41, 60, 61, 80, 81]
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    assert found[8][fc1].ravel().tolist() == [1, 2, 5, 6]
    assert found[9][fc1].ravel().tolist() == [3, 4, 7, 8]
    # Three tokens on two ranks, padded to a multiple of two a rank.
    assert found[8]["embedding.word_embeddings.weight"].ravel().tolist() == [1, 2]
    assert found[9]["embedding.word_embeddings.weight"].ravel().tolist() == [3, 0]


def test_megatron_interleaves_groups_on_one_rank() -> None:
    weights, tensors = one_layer()
    found = moved(weights, tensors, Layout(Mesh(0, 1, 1), Parallelism(), "megatron"))[1]
    qkv = found["decoder.layers.0.self_attention.linear_qkv.weight"].ravel().tolist()
    assert qkv == [10, 11, 20, 21, 50, 51, 70, 71, 30, 31, 40, 41, 60, 61, 80, 81]
    assert found["output_layer.weight"].shape == (128, 1)


def test_vllm_by_hand() -> None:
    weights, tensors = one_layer()
    found = moved(weights, tensors, Layout(Mesh(0, 8, 4), Parallelism(tensor=4), "vllm"))
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    # Four ranks share two heads of keys and values.
    assert [found[r][qkv].ravel().tolist() for r in range(8, 12)] == [
        [10, 11, 50, 51, 70, 71],
        [20, 21, 50, 51, 70, 71],
        [30, 31, 60, 61, 80, 81],
        [40, 41, 60, 61, 80, 81],
    ]
    gate_up = "model.layers.0.mlp.gate_up_proj.weight"
    assert [found[r][gate_up].ravel().tolist() for r in range(8, 12)] == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert [found[r]["model.embed_tokens.weight"].ravel().sum() for r in range(8, 12)] == [6, 0, 0, 0]
    assert found[8]["model.embed_tokens.weight"].shape == (64 // 4, 1)


@pytest.mark.parametrize("naming", ["megatron", "vllm"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_family_has_a_name(family: str, fused: bool, naming: Any) -> None:
    """And what it is put together from fills it, but for padding, which comes last."""
    weights = tiny_weights(family, fused_experts=fused)
    assert list(naming_problems(weights, naming)) == []
    arrays = {n: np.maximum(a, 0) for n, a in numbered(weights).items()}
    target = Layout(Mesh(0, 0, 1), Parallelism(), naming)
    (expected,) = held(weights, target, arrays).values()
    locals_here = target.locals_on(weights, DeviceId(0, 0))
    assert locals_here.keys() == expected.keys()
    for name, local in locals_here.items():
        assert sum(p.box.size for p in local.pieces) == expected[name].size, name


def test_families_are_tested() -> None:
    assert set(FAMILIES) == set(TINY)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "gpt2", ""])
@pytest.mark.parametrize("naming", ["megatron", "vllm"])
def test_an_unknown_family_is_refused_by_name(family: str, naming: Any) -> None:
    weights = Weights(tiny_weights("llama").parameters, family, 4)
    with pytest.raises(FlowError, match=f"family '{family}' has no names in {naming}; expected one of llama, .*qwen3"):
        plan_transfers(weights, FILE, Layout(Mesh(0, 1, 1), Parallelism(), naming), CLUSTER, 1 << 20)
    plan_transfers(weights, FILE, Layout(Mesh(0, 1, 1), Parallelism()), CLUSTER, 1 << 20)  # under its own names


def test_tensors_without_a_name_are_refused_by_name() -> None:
    architecture = Architecture.from_config({**tiny("llama"), "model_type": "llama"})
    value = Weights.of(architecture, head="value")
    assert list(naming_problems(value, "megatron")) == []
    (problem,) = naming_problems(value, "vllm")
    assert "value_head.bias, value_head.weight" in problem and "vllm" in problem
    first = value.parameters[1]
    odd = Weights((*value.parameters[:-2], type(first)("model.layers.0.self_attn.sinks", (8,), 0, 0)), "llama", 4)
    assert "model.layers.0.self_attn.sinks" in next(naming_problems(odd, "vllm"))


def tiny(family: str) -> dict[str, Any]:
    from tests.compiler.reference_layouts import tiny_config

    return tiny_config(family)


def test_heads_are_needed_to_put_queries_and_keys_together() -> None:
    weights = Weights(tiny_weights("llama").parameters, "llama")
    (problem,) = naming_problems(weights, "megatron")
    assert "num_kv_heads is 0" in problem


def test_names() -> None:
    found = known("model.layers.12.block_sparse_moe.experts.3.w1.weight")
    assert found is not None
    assert found.name("megatron") == "decoder.layers.12.mlp.experts.linear_fc1.weight3"
    assert found.name("vllm") == "model.layers.12.block_sparse_moe.experts.w13_weight"
    assert known("model.layers.12.mlp.gate.weight.scale") is None
    assert known("transformer.h.0.attn.c_attn.weight") is None
