"""Attention over rows of different lengths without padding: what ``Strategy(attention="flash" | "flex")`` means.

======== ============================================================================================================
flash    Rows lie one after another, and a kernel is told where each begins: flash-attn's ``flash_attn_varlen_func``
         where that package is installed (https://github.com/Dao-AILab/flash-attention), else torch's ``varlen_attn``.
         CUDA, 16-bit. Plainly causal layers and sliding windows; soft caps with flash-attn 2.6 or later.
flex     torch's ``flex_attention``, compiled for the model's rule and the rows of the pack as they lie, so that shared
         prompts are not repeated. CUDA. Any rule, soft caps, sinks.
======== ============================================================================================================

A layer whose rule a backend cannot express is computed as under "sdpa". Which backend is used, and that its numbers are
right on this machine, is the matter of :mod:`~flowrl.runtime.engines.transformers_backends`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flowrl.runtime.engines.transformers_attention import Pack, Rule, Settings

logger = logging.getLogger("flowrl")

#: What flash attention's kernels take.
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
INSTALL_FLASH = "pip install flash-attn --no-build-isolation"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A rule as a backend wants it.

    Args:
        window: of flash: :attr:`Rule.window`.
        rows: of flash, one after another.
        blocks: of flex: the block mask.
    """

    rule: Rule
    window: int | None = None
    rows: Joined | None = None
    blocks: Any = None


# -- flash -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """Rows one after another.

    Args:
        places: int64 ``[slots]``: for each slot its packed token. A shared token has a slot in each of its rows.
        starts: int32 ``[rows + 1]``: where rows begin; the last is the number of slots.
        longest: tokens of the longest row.
        slots: int64 ``[T]``: for each packed token one of its slots.
    """

    places: Tensor
    starts: Tensor
    longest: int
    slots: Tensor


def joined_rows(pack: Pack) -> Joined:
    """The rows of a pack, on its device."""
    places = torch.cat(pack.rows)
    lengths = torch.tensor([len(row) for row in pack.rows], dtype=torch.int32)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    slots = torch.full((len(pack.tokens),), -1, dtype=torch.int64)
    for row, start in zip(pack.rows, starts.tolist(), strict=False):
        owned = torch.arange(start, start + len(row))
        slots[row] = torch.where(slots[row] < 0, owned, slots[row])  # of a shared token the first row answers
    device = pack.tokens.device
    return Joined(places.to(device), starts.to(device), int(lengths.max()), slots.to(device))


@dataclass(frozen=True)
class FlashKernel:
    """A function that does variable-length flash attention.

    Args:
        call: ``(query, key, value, joined, scale, window, softcap)`` to ``[slots, heads, head_dim]``, of tensors
            ``[slots, heads, head_dim]``; ``window`` is the tokens that a query sees, its own included, None for all before.
        softcaps: whether it knows soft caps.
    """

    name: str
    call: Callable[..., Tensor]
    softcaps: bool


def flash_kernel() -> FlashKernel | None:
    """The flash attention of this machine; None where there is none."""
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            return _of_flash_attn(importlib.import_module("flash_attn").flash_attn_varlen_func)
        except (ImportError, AttributeError) as error:  # built for another torch, or of version 1
            logger.warning("flash-attn is installed and cannot be used (%s): %s", error, INSTALL_FLASH)
    try:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:  # torch before 2.10
        return None
    known = set(inspect.signature(varlen.varlen_attn).parameters)
    return _of_torch(varlen.varlen_attn) if {"window_size", "scale", "enable_gqa"} <= known else None


def _of_flash_attn(function: Callable[..., Any]) -> FlashKernel:
    softcaps = "softcap" in inspect.signature(function).parameters  # since 2.6

    def call(
        q: Tensor, k: Tensor, v: Tensor, rows: Joined, scale: float | None, window: int | None, cap: float | None
    ) -> Tensor:
        return function(
            q,
            k,
            v,
            cu_seqlens_q=rows.starts,
            cu_seqlens_k=rows.starts,
            max_seqlen_q=rows.longest,
            max_seqlen_k=rows.longest,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({} if cap is None else {"softcap": cap}),
        )

    return FlashKernel("flash-attn", call, softcaps)


def _of_torch(function: Callable[..., Any]) -> FlashKernel:
    def call(
        q: Tensor, k: Tensor, v: Tensor, rows: Joined, scale: float | None, window: int | None, cap: float | None
    ) -> Tensor:
        return function(
            q,
            k,
            v,
            rows.starts,
            rows.starts,
            rows.longest,
            rows.longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # what comes after a query is never seen
            enable_gqa=q.shape[1] != k.shape[1],
        )

    return FlashKernel("torch's varlen_attn", call, softcaps=False)


class Flash:
    """Rows one after another, by a flash attention kernel."""

    name = "flash"

    def __init__(self, kernel: FlashKernel) -> None:
        self.kernel = kernel
        self._rows: tuple[Pack, Joined] | None = None

    def prepare(self, rule: Rule, pack: Pack) -> Prepared:
        if self._rows is None or self._rows[0] is not pack:  # a model may have several rules in one pass
            self._rows = (pack, joined_rows(pack))
        return Prepared(rule, window=rule.window, rows=self._rows[1])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, prepared: Prepared, settings: Settings, pack: Pack
    ) -> Tensor | str:
        dim, window, rows = query.shape[-1], prepared.window, prepared.rows
        assert rows is not None
        if window is None:
            return "its rule is neither causal nor a sliding window"
        if settings.sinks is not None:
            return "it has attention sinks"
        if settings.softcap is not None and not self.kernel.softcaps:
            return f"it has soft caps, which {self.kernel.name} does not know"
        if settings.dropout:
            return "it has dropout"
        if dim > MAX_HEAD_DIM or dim % HEAD_DIM_STEP or value.shape[-1] != dim:
            return f"its heads have {dim} numbers ({value.shape[-1]} in values)"
        q, k, v = (_take(x[0].transpose(0, 1), rows.places) for x in products(query, key, value))
        limit = None if window >= prepared.rule.length else window
        return self.kernel.call(q, k, v, rows, settings.scaling, limit, settings.softcap).index_select(0, rows.slots)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """``[T, heads, head_dim]`` to ``[slots, heads, head_dim]``."""
    return x.reshape(len(x), -1).index_select(0, places).view(len(places), *x.shape[1:])


def products(*tensors: Tensor) -> Sequence[Tensor]:
    """Tensors in the dtype of matrix products: under autocast, rotary embeddings leave queries and keys in float32."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return [x.to(torch.get_autocast_dtype(device)) for x in tensors]
    return tensors


# -- flex --------------------------------------------------------------------------------------------------------------


@cache
def flex_kernel() -> Callable[..., Any]:
    """torch's flex_attention, compiled: as it is, it would hold all scores of all tokens."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def families(pack: Pack) -> tuple[Tensor, Tensor]:
    """Who may see whom in a pack, int64 ``[T]`` each on its device: the first token of a token's row, which is shared
    where the prompt is; and the one row that a token is in, -1 where it is shared."""
    size = len(pack.tokens)
    family, owner = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
    for index, row in enumerate(pack.rows):
        family[row], owner[row] = row[0], index
    count = torch.bincount(torch.cat(pack.rows), minlength=size)
    owner[count > 1] = -1
    # Of rows that share tokens all share the same ones; else one row would see what another two share.
    assert bool(((count == 1) | (count == count[family])).all())
    return family.to(pack.tokens.device), owner.to(pack.tokens.device)


class Flex:
    """The pack as it lies, with a mask made of its rows and the model's rule."""

    name = "flex"

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel

    def prepare(self, rule: Rule, pack: Pack) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask

        (family, owner), position, function = families(pack), pack.positions, rule.function

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = (family[query] == family[key]) & ((owner[key] < 0) | (owner[key] == owner[query]))
            return same & function(row, head, position[query], position[key])

        size = len(pack.tokens)
        blocks = create_block_mask(sees, None, None, size, size, device=pack.tokens.device)
        return Prepared(rule, blocks=blocks)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, prepared: Prepared, settings: Settings, pack: Pack
    ) -> Tensor | str:
        import torch.nn.attention.flex_attention as flex

        if settings.dropout:
            return "it has dropout"
        query, key, value = products(query, key, value)
        groups = query.shape[1] // key.shape[1]
        if groups & (groups - 1):  # one of torch's kernels takes powers of two alone
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        options: dict[str, Any] = {
            "block_mask": prepared.blocks,
            "scale": settings.scaling,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if (cap := settings.softcap) is not None:
            options["score_mod"] = lambda score, row, head, q, k: cap * torch.tanh(score / cap)
        if settings.sinks is None:
            return self.kernel(query, key, value, **options)[0].transpose(0, 1)
        if not hasattr(flex, "AuxRequest"):
            return "it has attention sinks, which need torch 2.9"
        out, more = self.kernel(query, key, value, **options, return_aux=flex.AuxRequest(lse=True))
        # A sink is one more key without a value: it takes exp(sink) / (exp(sink) + sum of exp(scores)).
        lse: Any = more.lse
        kept = torch.sigmoid(lse - settings.sinks[None, :, None].to(lse.dtype))
        return (out * kept[..., None].to(out.dtype))[0].transpose(0, 1)
