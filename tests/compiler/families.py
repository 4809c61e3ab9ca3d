"""Tiny models of every family that the compiler knows, random, on the CPU."""

from __future__ import annotations

from typing import Any

FAMILIES = (
    "llama",
    "llama_tied_with_biases",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def tiny_config(family: str, **changes: Any) -> Any:
    """A configuration of three layers whose sizes are all different, so that no two can be exchanged unseen."""
    import transformers as t

    base: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    latent = dict(
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (t.LlamaConfig, {}),
        "llama_tied_with_biases": (
            t.LlamaConfig,
            dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=24),
        ),
        "mistral": (t.MistralConfig, {}),
        "mixtral": (t.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
        "qwen2": (t.Qwen2Config, {}),
        "qwen2_moe": (
            t.Qwen2MoeConfig,
            experts | dict(shared_expert_intermediate_size=80, mlp_only_layers=[1]),
        ),
        "qwen3": (t.Qwen3Config, dict(head_dim=24)),
        "qwen3_moe": (t.Qwen3MoeConfig, experts | dict(head_dim=24, decoder_sparse_step=2)),
        "deepseek_v2": (t.DeepseekV2Config, latent | dict(n_shared_experts=2, q_lora_rank=None)),
        "deepseek_v3": (
            t.DeepseekV3Config,
            latent | dict(n_shared_experts=1, q_lora_rank=40, n_group=2, topk_group=1, attention_bias=True),
        ),
        "gemma": (t.GemmaConfig, dict(head_dim=24)),
        "gemma2": (t.Gemma2Config, dict(head_dim=24)),
        "gemma3": (t.Gemma3TextConfig, dict(head_dim=24)),
        "gpt2": (t.GPT2Config, {}),
    }
    kind, own = settings[family]
    if family == "gpt2":
        base = dict(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2)
    return kind(**{**base, **own, **changes})


def tiny_lm(config: Any, attention: str = "sdpa") -> Any:
    """A causal language model of a configuration, without dropout, in eval mode as the engine holds one."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if config.model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
        model.set_experts_implementation("eager")  # a product for each expert, which torch's counter counts
    return model.eval()
