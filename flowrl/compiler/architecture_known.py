"""Architecture numbers of well-known models, so that a flow can be planned where neither weights nor a network are at hand.

Each is what the model's public ``config.json`` says, without what no estimate needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def _dense(
    family: str, layers: int, hidden: int, mlp: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return dict(
        model_type=family,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        **more,
    )


_TIED: dict[str, Any] = {"tie_word_embeddings": True}

#: By short name, in lower case.
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": dict(model_type="gpt2", n_layer=12, n_embd=768, n_head=12, n_positions=1024, vocab_size=50257),
    "smollm2-135m": _dense("llama", 30, 576, 1536, 9, 3, 49152, **_TIED),
    "smollm2-360m": _dense("llama", 32, 960, 2560, 15, 5, 49152, **_TIED),
    "smollm2-1.7b": _dense("llama", 24, 2048, 8192, 32, 32, 49152, **_TIED),
    "llama-2-7b": _dense("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _dense("llama", 40, 5120, 13824, 40, 40, 32000),
    # Llama 2 of 34B was never released; Code Llama of that size has its shape.
    "llama-2-34b": _dense("llama", 48, 8192, 22016, 64, 8, 32000),
    "llama-2-70b": _dense("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": _dense("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-8b": _dense("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": _dense("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-70b": _dense("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.2-1b": _dense("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, **_TIED),
    "llama-3.2-3b": _dense("llama", 28, 3072, 8192, 24, 8, 128256, head_dim=128, **_TIED),
    "mistral-7b": _dense("mistral", 32, 4096, 14336, 32, 8, 32000),
    "mixtral-8x7b": _dense("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "mixtral-8x22b": _dense("mixtral", 56, 6144, 16384, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2),
    "qwen2.5-0.5b": _dense("qwen2", 24, 896, 4864, 14, 2, 151936, **_TIED),
    "qwen2.5-1.5b": _dense("qwen2", 28, 1536, 8960, 12, 2, 151936, **_TIED),
    "qwen2.5-3b": _dense("qwen2", 36, 2048, 11008, 16, 2, 151936, **_TIED),
    "qwen2.5-7b": _dense("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _dense("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _dense("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _dense("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": _dense("qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-1.7b": _dense("qwen3", 28, 2048, 6144, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-4b": _dense("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128, **_TIED),
    "qwen3-8b": _dense("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _dense("qwen3", 40, 5120, 17408, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _dense("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _dense(
        "qwen3_moe", 48, 2048, 6144, 32, 4, 151936,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": _dense(
        "qwen3_moe", 94, 4096, 12288, 64, 4, 151936,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "deepseek-v2-lite": _dense(
        "deepseek_v2", 27, 2048, 10944, 16, 16, 102400,
        n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    "deepseek-v3": _dense(
        "deepseek_v3", 61, 7168, 18432, 128, 128, 129280,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
        first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    "gemma-2b": _dense("gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256),
    "gemma-7b": _dense("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256),
    "gemma-2-2b": _dense("gemma2", 26, 2304, 9216, 8, 4, 256000, head_dim=256, sliding_window=4096),
    "gemma-2-9b": _dense("gemma2", 42, 3584, 14336, 16, 8, 256000, head_dim=256, sliding_window=4096),
    "gemma-2-27b": _dense("gemma2", 46, 4608, 36864, 32, 16, 256000, head_dim=128, sliding_window=4096),
    "gemma-3-1b": _dense(
        "gemma3_text", 26, 1152, 6912, 4, 1, 262144, head_dim=256, sliding_window=512, sliding_window_pattern=6
    ),
}  # fmt: skip

#: Ends of names that say how a model was tuned or stored, not what it is made of.
_ENDINGS = re.compile(r"[-_.](hf|base|instruct|chat|it|pt|thinking|fp8|bf16|gptq|awq|v0\.\d|\d{4}|int[48])$")


def known_config(name: str) -> Mapping[str, Any] | None:
    """The numbers of a model by its short name or its name on the Hub ("meta-llama/Llama-2-7b-hf"); None where there are none."""
    short = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while short not in KNOWN_CONFIGS:
        cut = _ENDINGS.sub("", short)
        if cut == short:
            return KNOWN_CONFIGS.get(short.replace("codellama-34b", "llama-2-34b"))
        short = cut
    return KNOWN_CONFIGS[short]
