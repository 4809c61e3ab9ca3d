"""How each family of models writes its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.strategy import is_whole
from flowrl.errors import FlowError, nearest


class _Config:
    """A configuration whose numbers are asked for one by one; what is missing or no number is collected."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of these that is there; ``default`` where none is, or where it is null."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if not is_whole(value, least):
                self.problems.append(f"{name} is {value!r}; expected a whole number, at least {least}")
                return least
            return value
        if default is None:
            self.problems.append(f"{names[0]} is missing; expected a whole number")
            return 1
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def common(self, *, tied: bool = False, head_dim: int | None = None) -> dict[str, Any]:
        """What nearly all families have. ``tied`` and ``head_dim``: what the family takes where nothing is said."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        return dict(
            family=self.config["model_type"],
            num_layers=self.number("num_hidden_layers"),
            hidden=hidden,
            intermediate=self.number("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self.number("num_key_value_heads", default=heads),
            head_dim=self.number("head_dim", default=head_dim or max(1, hidden // heads)),
            vocab_size=self.number("vocab_size"),
            tied=self.flag("tie_word_embeddings", tied),
        )

    def windows(self, num_layers: int, sliding: Callable[[int], bool] | None = None) -> tuple[int, ...]:
        """Of each layer the sliding window; () where none has one. ``sliding``: which layers have one, where the
        configuration has no list."""
        window = self.number("sliding_window", default=0, least=0)
        kinds = self.config.get("layer_types")
        if not window:
            return ()
        if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
            found = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
        elif sliding is not None:
            found = tuple(window if sliding(layer) else 0 for layer in range(num_layers))
        else:
            found = ()
        return found if any(found) else ()


def read_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a configuration.

    Raises:
        FlowError: its family is not known, or numbers are missing or impossible; all of them.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and config.get("model_type") not in FAMILIES:
        config = text  # of a model that also sees: what it says is said by its text part
    family = config.get("model_type")
    if family not in FAMILIES:
        raise FlowError(
            "The architecture of a model is not known",
            expected="model_type, one of " + ", ".join(FAMILIES),
            received=repr(family),
            do=nearest(str(family), FAMILIES) if family else "give the configuration of a language model",
        )
    reader = _Config(config)
    architecture = Architecture(**FAMILIES[family](reader))
    problems = reader.problems or _impossible(architecture)
    if problems:
        raise FlowError(f"This configuration of {family} cannot be: " + "; ".join(problems))
    return architecture


def _impossible(a: Architecture) -> list[str]:
    problems = []
    if a.num_heads % a.num_kv_heads:
        problems.append(f"{a.num_heads} heads cannot share {a.num_kv_heads} key-value heads evenly")
    if a.num_experts and not 1 <= a.experts_per_token <= a.num_experts:
        problems.append(f"a token cannot go through {a.experts_per_token} of {a.num_experts} experts")
    return problems


def _llama(c: _Config) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    return c.common() | dict(query_bias=bias, output_bias=bias, mlp_bias=c.flag("mlp_bias"))


def _mistral(c: _Config) -> dict[str, Any]:
    found = c.common()
    return found | dict(windows=c.windows(found["num_layers"], lambda layer: True))


def _qwen2(c: _Config) -> dict[str, Any]:
    found = c.common()
    windows: tuple[int, ...] = ()
    if c.flag("use_sliding_window"):
        first = c.number("max_window_layers", default=28, least=0)
        windows = c.windows(found["num_layers"], lambda layer: layer >= first)
    return found | dict(query_bias=True, windows=windows)


def _qwen3(c: _Config) -> dict[str, Any]:
    bias, found = c.flag("attention_bias"), c.common(head_dim=128)
    windows: tuple[int, ...] = ()
    if c.flag("use_sliding_window"):
        first = c.number("max_window_layers", default=28, least=0)
        windows = c.windows(found["num_layers"], lambda layer: layer >= first)
    return found | dict(query_bias=bias, output_bias=bias, qk_norm=True, windows=windows)


def _mixtral(c: _Config) -> dict[str, Any]:
    found = c.common()
    return found | dict(
        num_experts=c.number("num_local_experts", "num_experts", default=8),
        experts_per_token=c.number("num_experts_per_tok", default=2),
        moe_intermediate=found["intermediate"],
        windows=c.windows(found["num_layers"], lambda layer: True),
    )


def _sparse_layers(c: _Config, num_layers: int) -> tuple[int, ...]:
    """The dense layers of a Qwen mixture."""
    step, only = c.number("decoder_sparse_step", default=1), c.config.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(num_layers) if layer in only or (layer + 1) % step)


def _qwen3_moe(c: _Config) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    # Unlike Qwen3's, the library's configuration has no width of its own for a head.
    found = c.common()
    return found | dict(
        query_bias=bias,
        output_bias=bias,
        qk_norm=True,
        num_experts=c.number("num_experts", "num_local_experts", default=128),
        experts_per_token=c.number("num_experts_per_tok", default=8),
        moe_intermediate=c.number("moe_intermediate_size", default=768),
        dense_layers=_sparse_layers(c, found["num_layers"]),
    )


def _qwen2_moe(c: _Config) -> dict[str, Any]:
    found = c.common()
    return found | dict(
        query_bias=c.flag("qkv_bias", True),
        num_experts=c.number("num_experts", default=60),
        experts_per_token=c.number("num_experts_per_tok", default=4),
        moe_intermediate=c.number("moe_intermediate_size", default=1408),
        shared_intermediate=c.number("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
        dense_layers=_sparse_layers(c, found["num_layers"]),
    )


def _deepseek(c: _Config) -> dict[str, Any]:
    found = c.common()
    bias, rope = c.flag("attention_bias"), c.number("qk_rope_head_dim", default=64)
    width = c.number("moe_intermediate_size", default=2048 if found["family"] == "deepseek_v3" else 1407)
    shared = c.number("n_shared_experts", default=1 if found["family"] == "deepseek_v3" else 2, least=0)
    dense = c.number("first_k_dense_replace", default=3 if found["family"] == "deepseek_v3" else 0, least=0)
    return found | dict(
        num_kv_heads=found["num_heads"],
        head_dim=c.number("qk_nope_head_dim", default=128) + rope,
        value_dim=c.number("v_head_dim", default=128),
        query_bias=bias,
        output_bias=bias,
        mlp_bias=c.flag("mlp_bias") and found["family"] == "deepseek_v2",
        num_experts=c.number("n_routed_experts", "num_local_experts", default=256),
        experts_per_token=c.number("num_experts_per_tok", default=8),
        moe_intermediate=width,
        shared_intermediate=width * shared,
        dense_layers=tuple(range(min(dense, found["num_layers"]))),
        kv_rank=c.number("kv_lora_rank", default=512),
        query_rank=c.number("q_lora_rank", default=0, least=0),
        rope_dim=rope,
    )


def _gemma(c: _Config) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    return c.common(tied=True, head_dim=256) | dict(query_bias=bias, output_bias=bias)


def _gemma2(c: _Config) -> dict[str, Any]:
    found = _gemma(c)
    return found | dict(post_norms=True, windows=c.windows(found["num_layers"], lambda layer: layer % 2 == 0))


#: What the text part of a Gemma 3 that also sees may leave out.
_GEMMA3_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "sliding_window": 4096}


def _gemma3(c: _Config) -> dict[str, Any]:
    c.config = _GEMMA3_DEFAULTS | dict(c.config)
    found = _gemma(c)
    every = c.number("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return found | dict(
        family="gemma3_text",
        post_norms=True,
        qk_norm=True,
        windows=c.windows(found["num_layers"], lambda layer: (layer + 1) % every != 0),
    )


def _gpt2(c: _Config) -> dict[str, Any]:
    hidden, heads = c.number("n_embd", "hidden_size"), c.number("n_head", "num_attention_heads")
    return dict(
        family="gpt2",
        num_layers=c.number("n_layer", "num_hidden_layers"),
        hidden=hidden,
        intermediate=c.number("n_inner", default=4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        vocab_size=c.number("vocab_size"),
        tied=c.flag("tie_word_embeddings", True),
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        positions=c.number("n_positions", "max_position_embeddings", default=1024),
    )


#: By ``model_type``.
FAMILIES: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}
