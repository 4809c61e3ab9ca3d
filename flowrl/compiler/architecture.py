"""What a language model is made of, from its HuggingFace configuration alone: every tensor, and the work of a token.

Nothing is loaded and nothing is run: a ``config.json`` is enough. :mod:`flowrl.compiler.architecture_families` knows how each
family writes its configuration, :mod:`flowrl.compiler.architecture_tensors` what its tensors are called.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import FlowError, nearest

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class Parameter:
    """One tensor under its HuggingFace name.

    Args:
        name: "model.layers.3.self_attn.q_proj.weight".
        shape: its dims.
        layer: index of the decoder layer; None: on the side of the embedding or of the head.
        split: dim that tensor parallelism splits (Megatron-LM, arXiv 1909.08053): 0 output features or vocabulary rows,
            1 input features; None is replicated.
        expert: index of the expert that it belongs to; None: of no single one.
        tied_to: name of the tensor that it is, where it has no numbers of its own.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    split: int | None
    expert: int | None = None
    tied_to: str | None = None

    @property
    def size(self) -> int:
        """Numbers in it; those of a tied one are counted where they are."""
        return 0 if self.tied_to else math.prod(self.shape)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model.

    Args:
        family: HuggingFace's ``model_type``.
        num_layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width of a dense MLP.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of a query and a key.
        vocab_size: rows of the embedding.
        tied: whether the head is the embedding.
        value_dim: of a value; 0 for ``head_dim``.
        query_bias: whether queries, keys and values have a bias.
        output_bias: whether the attention's output has one.
        mlp_bias: whether the MLP has one.
        qk_norm: whether each head of queries and keys is normalised.
        post_norms: whether attention and MLP are normalised after as well as before (Gemma 2, 3).
        gated: whether the MLP has a gate (three matrices), or not (two).
        positions: rows of a learned position embedding; 0 for rotary positions.
        num_experts: routed experts of a layer; 0 for a dense model.
        experts_per_token: of these, those that a token goes through.
        moe_intermediate: width of an expert.
        shared_intermediate: width of the experts that all tokens go through, together.
        shared_gate: whether the shared expert has a gate of its own (Qwen2-MoE).
        dense_layers: layers of a mixture that have one dense MLP instead.
        kv_rank: width of the latent that keys and values are made from (MLA, arXiv 2405.04434); 0 for plain attention.
        query_rank: the same of queries; 0 where they are made from the hidden state.
        rope_dim: of a key, the part that carries the position and is shared by all heads (MLA).
        windows: of each layer, how many tokens back it attends to; 0 for all. Empty: all layers attend to all.
    """

    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    value_dim: int = 0
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    gated: bool = True
    positions: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    kv_rank: int = 0
    query_rank: int = 0
    rope_dim: int = 0
    windows: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path | Any) -> Architecture:
        """From a configuration: a mapping, a JSON file, a folder with ``config.json``, or what has ``to_dict()``.

        Raises:
            FlowError: there is no such file, it is no configuration, its family is not known, or it lacks a number.
        """
        from flowrl.compiler.architecture_families import read_config

        return read_config(_mapping(config))

    # -- tensors ----------------------------------------------------------------------------------------------------------

    def parameters(self, head: Head = "lm", *, fused_experts: bool = False) -> tuple[Parameter, ...]:
        """Every tensor, in the order in which the network has them.

        Args:
            head: "lm": the whole model. "value": the trunk and a linear head that gives one number a token
                (``value_head.weight`` and ``value_head.bias``).
            fused_experts: the experts of a layer are two tensors, as transformers 5 holds them while it runs
                (``mlp.experts.gate_up_proj`` of ``[experts, 2 · width, hidden]``); else each has its own, as in files.
        """
        return _parameters(self, head, fused_experts)

    def num_parameters(self, head: Head = "lm") -> int:
        """Numbers in all tensors; tied ones count once."""
        return sum(self.layer_parameters(i) for i in range(self.num_layers)) + self.outer_parameters(head)

    def active_parameters(self, head: Head = "lm") -> int:
        """Of a mixture, the numbers in what one token goes through; else all."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters(head) - self.num_moe_layers * idle * self.expert_parameters

    def layer_parameters(self, layer: int) -> int:
        """Numbers in one decoder layer."""
        return _layer_sizes(self, self.is_moe(layer))[0]

    def split_parameters(self, layer: int) -> int:
        """Of these, the numbers that tensor parallelism splits."""
        return _layer_sizes(self, self.is_moe(layer))[1]

    def outer_parameters(self, head: Head = "lm") -> int:
        """Numbers outside of the layers: embeddings, last norm, head."""
        return sum(p.size for p in _outer(self, head))

    @property
    def embedding_parameters(self) -> int:
        """Numbers in the token embedding, and as many in a head that is not tied to it."""
        return self.vocab_size * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Numbers in one routed expert."""
        return self.mlp_matrices * self.hidden * self.moe_intermediate if self.num_experts else 0

    @property
    def mlp_matrices(self) -> int:
        """Of an MLP."""
        return 3 if self.gated else 2

    # -- layers -----------------------------------------------------------------------------------------------------------

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.is_moe, range(self.num_layers)))

    @property
    def v_dim(self) -> int:
        """Width of a value of one head."""
        return self.value_dim or self.head_dim

    @property
    def cache_width(self) -> int:
        """Numbers that the key-value cache keeps of a token in a layer; with MLA the latent and the shared part of the key."""
        if self.kv_rank:
            return self.kv_rank + self.rope_dim
        return self.num_kv_heads * (self.head_dim + self.v_dim)

    def window(self, layer: int, length: float) -> float:
        """Tokens that a layer keeps of ``length``."""
        window = self.windows[layer] if self.windows else 0
        return min(window, length) if window else length

    # -- work -------------------------------------------------------------------------------------------------------------

    def layer_matmul(self, layer: int) -> int:
        """Numbers in the matrices of a layer that a token is multiplied with; two FLOP each in a forward pass."""
        return _layer_matmul(self, self.is_moe(layer))

    def layer_recomputed(self, layer: int) -> int:
        """Of :meth:`layer_matmul`, what torch's checkpointing computes again: it stops when it has all that the backward pass
        reads, and that is not what the last product of a layer gives, unless something other than a sum follows it."""
        last = self.intermediate
        if self.post_norms:
            last = 0
        elif self.is_moe(layer):
            last = 0 if self.shared_gate else self.shared_intermediate
        return self.layer_matmul(layer) - last * self.hidden

    def attention_flops(self, queries: float, keys: float) -> float:
        """FLOP of scores and weighted values of ``queries`` × ``keys`` pairs, all heads of a layer: the whole rectangle,
        as torch's FLOP counter has it; kernels that skip what causality masks do half of a square."""
        return 2.0 * self.num_heads * (self.head_dim + self.v_dim) * queries * keys

    def flops_forward(self, tokens: float, length: float, *, predicted: float = 0.0, head: Head = "lm") -> float:
        """FLOP of one forward pass.

        Args:
            tokens: of all rows.
            length: tokens of a row; each attends to all of its row (the masked half counts, see :meth:`attention_flops`).
            predicted: tokens whose logits are computed.
            head: with "value", one product a token instead.
        """
        matmul = 2.0 * tokens * sum(map(self.layer_matmul, range(self.num_layers)))
        attention = self.num_layers * self.attention_flops(tokens, length)
        return matmul + attention + self.head_flops(predicted, head)

    def head_flops(self, tokens: float, head: Head = "lm") -> float:
        """FLOP of the head on ``tokens``."""
        return 2.0 * tokens * self.hidden * (self.vocab_size if head == "lm" else 1)

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Numbers in low-rank adapters (arXiv 2106.09685) of a rank on linear layers of the trunk.

        Args:
            targets: last parts of their names; empty for all. Routers, and experts that are one tensor, are no linear layers.
        """
        total = 0
        for parameter in _parameters(self, "value", True):
            module = parameter.name.removesuffix(".weight").rpartition(".")[2]
            linear = parameter.layer is not None and len(parameter.shape) == 2 and parameter.name.endswith(".weight")
            if linear and module != "gate" and (not targets or module in targets):
                total += rank * sum(parameter.shape)
        return total

    def __str__(self) -> str:
        active = f", {self.active_parameters() / 1e9:.1f}B active" if self.num_experts else ""
        return f"{self.family} of {self.num_parameters() / 1e9:.3g}B parameters{active}"


@functools.lru_cache(maxsize=64)
def _parameters(architecture: Architecture, head: Head, fused: bool) -> tuple[Parameter, ...]:
    from flowrl.compiler.architecture_tensors import all_tensors

    return tuple(all_tensors(architecture, head, fused))


def _outer(architecture: Architecture, head: Head) -> Iterator[Parameter]:
    from flowrl.compiler.architecture_tensors import outer_tensors

    before, after = outer_tensors(architecture, head)
    yield from (*before, *after)


@functools.lru_cache(maxsize=256)
def _layer_sizes(architecture: Architecture, moe: bool) -> tuple[int, int]:
    """(numbers, numbers that tensor parallelism splits) of a layer."""
    from flowrl.compiler.architecture_tensors import layer_tensors

    tensors = list(layer_tensors(architecture, moe, fused=True))
    return sum(math.prod(t.shape) for t in tensors), sum(math.prod(t.shape) for t in tensors if t.split is not None)


@functools.lru_cache(maxsize=256)
def _layer_matmul(architecture: Architecture, moe: bool) -> int:
    from flowrl.compiler.architecture_tensors import layer_tensors

    a, total = architecture, 0
    for tensor in layer_tensors(a, moe, fused=True):
        if len(tensor.shape) == 3:  # all experts of the layer
            total += math.prod(tensor.shape) // a.num_experts * a.experts_per_token
        elif len(tensor.shape) == 2:
            total += math.prod(tensor.shape)
    return total


def _mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if not isinstance(config, str | Path):
        raise FlowError(
            "This is no configuration of a model",
            expected="a mapping, a JSON file, a folder with config.json, or a transformers configuration",
            received=f"{type(config).__name__} {str(config)[:80]!r}",
        )
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FlowError(f"{path} cannot be read", expected="a config.json of a model", received=error) from error
    if not isinstance(found, dict):
        raise FlowError(f"{path} is no configuration", expected="a JSON object", received=type(found).__name__)
    return found


def known_architecture(name: str) -> Architecture:
    """The architecture of a well-known model, by short name or name on the Hub; case does not matter.

    Raises:
        FlowError: it is not in the table (nearest name).
    """
    from flowrl.compiler.architecture_known import KNOWN_CONFIGS, known_config

    found = known_config(name)
    if found is None:
        raise FlowError(f"No numbers of {name!r} are known", expected=nearest(name.lower(), KNOWN_CONFIGS))
    return Architecture.from_config(found)
