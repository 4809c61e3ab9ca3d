"""The tensors of one Model, as resharding needs to know them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from flowrl.compiler.architecture import Architecture, Head, Parameter


@dataclass(frozen=True)
class Weights:
    """The tensors of one Model, with what their shapes do not tell.

    Args:
        parameters: every tensor, under HuggingFace's names; their order does not matter.
        family: HuggingFace's ``model_type``.
        num_kv_heads: heads of keys and values; 0: not known, and keys are split like any other matrix.
        dtype_bytes: of one number.
    """

    parameters: tuple[Parameter, ...]
    family: str = ""
    num_kv_heads: int = 0
    dtype_bytes: int = 2

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        *,
        head: Head = "lm",
        dtype_bytes: int = 2,
        fused_experts: bool = False,
    ) -> Weights:
        """Those of an architecture.

        Args:
            head: its last layer.
            dtype_bytes: of one number.
            fused_experts: whether the experts of a layer are two tensors, as transformers holds them while it runs.
        """
        parameters = architecture.parameters(head, fused_experts=fused_experts)
        return cls(parameters, architecture.family, architecture.num_kv_heads, dtype_bytes)

    @functools.cached_property
    def by_name(self) -> dict[str, Parameter]:
        """Those with numbers of their own, in an order that does not depend on how they were given."""
        return {p.name: p for p in sorted(self.parameters, key=_order) if p.tied_to is None}

    @functools.cached_property
    def tied(self) -> frozenset[str]:
        """Names of tensors that are another one's, too: an embedding that is the head."""
        return frozenset(p.tied_to for p in self.parameters if p.tied_to is not None)

    @functools.cached_property
    def num_layers(self) -> int:
        """Decoder layers."""
        return max((p.layer + 1 for p in self.parameters if p.layer is not None), default=0)

    @functools.cached_property
    def with_experts(self) -> frozenset[int]:
        """Layers that have experts."""
        return frozenset(p.layer for p in self.parameters if p.layer is not None and ".experts." in p.name)

    @functools.cached_property
    def num_experts(self) -> int:
        """Of a layer, where each has tensors of its own."""
        return max((p.expert + 1 for p in self.parameters if p.expert is not None), default=0)

    @property
    def num_bytes(self) -> int:
        """Of one whole copy."""
        return sum(p.size for p in self.parameters) * self.dtype_bytes


def is_before_layers(parameter: Parameter) -> bool:
    """Whether a tensor outside of the layers is on the side of the embedding."""
    return parameter.layer is None and re.search(r"embed|\bwte\b|\bwpe\b", parameter.name) is not None


def _order(parameter: Parameter) -> tuple[float, int, str]:
    layer = -1.0 if is_before_layers(parameter) else float("inf") if parameter.layer is None else parameter.layer
    return layer, -1 if parameter.expert is None else parameter.expert, parameter.name
