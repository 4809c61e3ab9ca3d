"""Adapters and quantisation: how much of a Model is trained, and how small its base is held. Settings of the Model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from flowrl.errors import nearest

if TYPE_CHECKING:
    from flowrl.compiler.strategy import Strategy

#: How the weights of linear layers are held: 4 bits (NormalFloat), 8 bits, or as a GPTQ file holds them.
Quantization = Literal["nf4", "int8", "gptq"]


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on a base that is not trained (arXiv 2106.09685): ``W x + alpha / rank * B A x``.

    ``A`` starts random and ``B`` at zero, so that a Model with a new adapter is exactly its base.

    Args:
        rank: rows of ``A``, columns of ``B``.
        alpha: the scale of the adapter, times ``rank``.
        target_modules: "all-linear", every linear layer of the trunk (the head is none of them; the experts of a
            mixture that are one tensor are no linear layers), or the last parts of their names: ``("q_proj", "v_proj")``.
        rank_stabilized: scale by ``alpha / sqrt(rank)`` instead (arXiv 2312.03732).
        dropout: 0: the network has no dropout in training either, so that two passes over the same rows agree.
        dtype: of the adapter as it is kept and trained, whatever the base's is.
        seed: of ``A``.
        adapter_source: a folder or a name of the Hub with a saved adapter (peft's format) to start from; rank, alpha,
            target modules and scaling are then the saved adapter's.
        merge_on_export: whether an exported Model is a HuggingFace directory with the adapter added to the weights, and
            the adapter beside it in ``adapter/``; else the folder is the adapter alone.

    Example::

        actor = Model("Qwen/Qwen3-1.7B", lora=LoRA(rank=32, alpha=64))
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    rank_stabilized: bool = False
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    adapter_source: str | os.PathLike[str] | None = None
    merge_on_export: bool = True

    def problems(self) -> Iterator[str]:
        """Settings that cannot work, a sentence each."""
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            yield f"lora.rank is {self.rank!r}; expected a whole number of at least 1"
        if not (isinstance(self.alpha, int | float) and math.isfinite(self.alpha) and self.alpha > 0):
            yield f"lora.alpha is {self.alpha!r}; expected a number above 0"
        if self.dropout != 0:
            yield (
                f"lora.dropout is {self.dropout!r}; expected 0: the network has no dropout in training, so that the ratio "
                "of two passes over the same rows is no noise"
            )
        if self.dtype not in ("float32", "bfloat16", "float16"):
            yield f"lora.dtype is {self.dtype!r}; expected float32, bfloat16 or float16"
        yield from self._target_problems()
        if self.adapter_source is not None:
            for field in fields(self):
                given = getattr(self, field.name)
                if field.name in ("rank", "alpha", "target_modules", "rank_stabilized") and given != field.default:
                    yield f"lora.{field.name} is {given!r} with adapter_source; expected none: a saved adapter has its own"

    def _target_problems(self) -> Iterator[str]:
        targets = self.target_modules
        if isinstance(targets, str) and targets != "all-linear":
            yield f"lora.target_modules is {targets!r}; expected 'all-linear' or a tuple of names: ({targets!r},)"
        elif not isinstance(targets, str) and (
            not isinstance(targets, tuple) or not targets or not all(isinstance(t, str) and t for t in targets)
        ):
            yield f"lora.target_modules is {targets!r}; expected 'all-linear' or a tuple of names such as ('q_proj', 'v_proj')"


def quantization_problems(quantization: object) -> Iterator[str]:
    """What is wrong with a ``quantization`` setting by itself, a sentence each."""
    known = get_args(Quantization)
    if quantization is not None and quantization not in known:
        hint = nearest(str(quantization), known)
        yield f"quantization is {quantization!r}; expected None or one of {', '.join(known)} ({hint.rstrip('?')})"


def strategy_problems(
    lora: LoRA | None, quantization: Quantization | None, strategy: Strategy, num_ranks: int
) -> Iterator[str]:
    """Ways to lie over ranks that an adapter or a quantised base cannot take, a sentence each."""
    if lora is not None and strategy.tensor_parallel > 1:
        yield (
            f"tensor_parallel is {strategy.tensor_parallel} with lora; expected 1: adapters are not split over ranks, "
            "use data parallelism (sharding='full')"
        )
    if quantization is not None and num_ranks > 1 and (strategy.sharding != "none" or strategy.tensor_parallel > 1):
        yield (
            f"sharding is {strategy.sharding!r}, tensor_parallel is {strategy.tensor_parallel} with quantization="
            f"{quantization!r}; expected Strategy(sharding='none'): quantised weights are held whole on every rank"
        )
