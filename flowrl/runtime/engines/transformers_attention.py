"""Attention over packed rows: the one place where rows are told apart.

Every other layer of a transformer works token by token, so rows may simply be joined into one ``[1, T]`` sequence.
Here, inside attention only, the packed queries, keys and values are regrouped into right-padded rows and handed to
PyTorch's causal attention, to which padding after the real tokens is invisible. No ``[T, T]`` mask is ever built.

Because a row is described by the places of its tokens, rows may share tokens: the prompt of a group is computed once
and every response of the group attends to it.

That is what a strategy calls "sdpa". A :class:`Backend` does without padding; it comes with the pack, and what it cannot do
for a layer is done here (:mod:`~flowrl.runtime.engines.transformers_varlen`).

The function is registered with transformers under :data:`NAME`. Without a :class:`Pack` around it, it does what a
model's own attention does for padded rows with a cache, so that sampling and training use the same arithmetic; unlike
the library's "sdpa" it honours soft caps and attention sinks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "flowrl"


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length, padded on the right.

    Args:
        places: int64 ``[num_rows * length]``: for each slot the packed token that fills it; padding repeats the row's
            last.
        num_rows: rows in the bucket.
        length: slots a row.
    """

    places: Tensor
    num_rows: int
    length: int


@dataclass(frozen=True)
class Pack:
    """Rows joined in one sequence of T tokens.

    Args:
        tokens: int64 ``[T]``.
        positions: int64 ``[T]``, of each token within its row.
        buckets: the rows, regrouped for attention.
        slots: int64 ``[T]``: for each packed token its slot among the slots of all buckets, one after the other.
        rows: per row int64 ``[length of the row]`` on the CPU: the places of its tokens.
        backend: what computes attention where it can; None for the buckets alone.
    """

    tokens: Tensor
    positions: Tensor
    buckets: tuple[Bucket, ...]
    slots: Tensor
    rows: tuple[Tensor, ...]
    backend: Backend | None = None

    @property
    def longest(self) -> int:
        return max(bucket.length for bucket in self.buckets)


class Rule:
    """Which keys a query of the same row sees, by their positions in the row.

    Args:
        function: the model's: ``(row, head, query's position, key's position)`` to bool, of any broadcastable shapes.
        length: positions that are asked for.
    """

    #: Queries that are looked at together: no ``[length, length]`` is ever whole in :attr:`window`.
    LINES = 1024

    def __init__(self, function: Callable[..., Any], length: int, device: torch.device | str) -> None:
        self.function, self.length, self.device = function, length, device

    def lines(self, queries: Tensor) -> Tensor:
        """bool ``[1, 1, len(queries), length]``."""
        keys = torch.arange(self.length, device=self.device)
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.device)
        mask = self.function(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
        return mask.expand(1, 1, len(queries), self.length)

    @cached_property
    def window(self) -> int | None:
        """Where each query sees the last so many keys up to its own and no others, how many; :attr:`length` where it sees
        all of them. None for any other rule."""
        if self.function is causal_mask_function:
            return self.length
        places = torch.arange(self.length, device=self.device)
        window = self.lines(places[-1:]).sum()
        fits = torch.ones((), dtype=torch.bool, device=self.device)
        for queries in places.split(self.LINES):
            back = queries[:, None] - places
            fits &= (self.lines(queries)[0, 0] == ((back >= 0) & (back < window))).all()
        return int(window) if bool(fits & (window > 0)) else None

    @cached_property
    def mask(self) -> Tensor | None:
        """bool ``[1, 1, length, length]``; None where the rule is plainly causal."""
        if self.window == self.length:
            return None
        return self.lines(torch.arange(self.length, device=self.device))


class Prepared(Protocol):
    """A rule as a backend wants it."""

    @property
    def rule(self) -> Rule:
        """The rule, for what the backend cannot do."""
        ...


class Backend(Protocol):
    """Attention over packed rows without padding."""

    @property
    def name(self) -> str:
        """As a strategy calls it."""
        ...

    def prepare(self, rule: Rule, pack: Pack) -> Prepared:
        """What the layers of one forward pass are given for a mask."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, prepared: Any, settings: Settings, pack: Pack
    ) -> Tensor | str:
        """Attention of one layer, or why this layer is none of the backend's.

        Args:
            query, key, value: ``[1, heads, T, head_dim]``.
            prepared: of :meth:`prepare`.

        Returns:
            ``[T, heads, head_dim]``.
        """
        ...


_pack: ContextVar[Pack | None] = ContextVar("flowrl_pack", default=None)


@contextlib.contextmanager
def packed(pack: Pack) -> Iterator[None]:
    """Attention inside the body is over the rows of ``pack``."""
    token = _pack.set(pack)
    try:
        yield
    finally:
        _pack.reset(token)


def current_pack() -> Pack | None:
    """The rows over which attention goes here; None outside of :func:`packed`."""
    return _pack.get()


def pack_rows(rows: Sequence[Tensor], tokens: Tensor, positions: Tensor) -> Pack:
    """Make the attention layout of rows.

    Args:
        rows: per row int64 ``[length of the row]``, the places of its tokens among ``tokens``; no row is empty.
        tokens: int64 ``[T]``, every one in some row.
        positions: int64 ``[T]``.
    """
    device = tokens.device
    slots = torch.full((len(tokens),), -1, dtype=torch.int64)
    buckets: list[Bucket] = []
    first_slot = 0
    for members in _bucket_rows([len(row) for row in rows]):
        length = max(len(rows[i]) for i in members)
        places = torch.empty(len(members), length, dtype=torch.int64)
        for line, i in enumerate(members):
            row = rows[i]
            places[line, : len(row)] = row
            places[line, len(row) :] = row[-1]
            owned = torch.arange(len(row)) + first_slot + line * length
            slots[row] = torch.where(slots[row] < 0, owned, slots[row])  # of a shared token the first row answers
        buckets.append(Bucket(places.flatten().to(device), len(members), length))
        first_slot += len(members) * length
    assert bool((slots >= 0).all()), "a packed token belongs to no row"
    return Pack(tokens, positions, tuple(buckets), slots.to(device), tuple(rows))


def _bucket_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Row indices in buckets whose padding is at most half: one long row must not stretch a hundred short ones."""
    total, longest = sum(lengths), max(lengths)
    if longest * len(lengths) <= 2 * total:
        return [list(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        if buckets and 2 * lengths[i] > lengths[buckets[-1][0]]:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets


# -- what transformers calls -------------------------------------------------------------------------------------------


@torch.compiler.disable  # tracing ends at the pack anyway; what follows would be traced again for each number of rows
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Prepared | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of :class:`transformers.AttentionInterface`.

    Args:
        query: ``[rows, num_heads, num_queries, head_dim]``; packed: ``[1, num_heads, T, head_dim]``.
        key, value: the same with ``num_kv_heads`` and ``num_keys``.
        attention_mask: bool ``[rows or 1, 1, num_queries, num_keys]``, True where a query sees a key; None for causal.
            Of a pack with a backend, what :func:`attention_mask` gave.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        s_aux: ``[num_heads]``, logits of an attention sink (GPT-OSS).

    Returns:
        ``[rows, num_queries, num_heads, head_dim]``.
    """
    if position_bias is not None:
        raise NotImplementedError("attention with a position bias")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    settings = Settings(dropout, scaling, causal, softcap, s_aux)
    pack = _pack.get()
    if pack is None:
        assert attention_mask is None or isinstance(attention_mask, Tensor)
        return _attend(query, key, value, attention_mask, settings).transpose(1, 2).contiguous(), None
    if not causal:
        raise NotImplementedError("packed rows with attention to later tokens")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        assert pack.backend is not None
        found = pack.backend.attend(query, key, value, attention_mask, settings, pack)
        if isinstance(found, Tensor):
            return found[None], None
        attention_mask = attention_mask.rule.mask
    return attend_in_buckets(query, key, value, attention_mask, settings, pack)[None], None


def attend_in_buckets(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings, pack: Pack
) -> Tensor:
    """``[T, heads, head_dim]`` of packed rows, by way of padded ones.

    Args:
        query, key, value: ``[1, heads, T, head_dim]``.
        mask: bool ``[1, 1, longest row, longest row]``; None for causal.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
    outputs = []
    for bucket in pack.buckets:
        part = None if mask is None else mask[..., : bucket.length, : bucket.length]
        out = _attend(_regroup(q, bucket), _regroup(k, bucket), _regroup(v, bucket), part, settings)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [slots, heads, head_dim]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, pack.slots)


@dataclass(frozen=True)
class Settings:
    """What a layer asks of attention, as :func:`attention` is given it."""

    dropout: float
    scaling: float | None
    causal: bool
    softcap: float | None
    sinks: Tensor | None


def _regroup(x: Tensor, bucket: Bucket) -> Tensor:
    """``[T, heads, head_dim]`` to ``[num_rows, heads, length, head_dim]``."""
    heads, dim = x.shape[1:]
    rows = x.reshape(x.shape[0], heads * dim).index_select(0, bucket.places)
    return rows.view(bucket.num_rows, bucket.length, heads, dim).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
    """``[rows, heads, num_queries, head_dim]``."""
    if settings.softcap is not None or settings.sinks is not None:
        return _attend_plainly(query, key, value, mask, settings)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.shape[2] == 1:
        # One token a row: the heads that share a key become queries of it, and no key or value is copied.
        rows, heads, _, dim = query.shape
        grouped_query = query.reshape(rows, heads // groups, groups, dim)
        settings = replace(settings, causal=False)
        return _attend(grouped_query, key, value, mask, settings).reshape(rows, heads, 1, value.shape[-1])
    grouped = groups > 1 and mask is None and key.shape[-1] == value.shape[-1]
    if groups > 1 and not grouped:  # with a mask the kernels that know groups do not apply
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=settings.dropout,
        scale=settings.scaling,
        is_causal=settings.causal and mask is None and query.shape[2] > 1,
        enable_gqa=grouped,
    )


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
    """What no fused kernel does: soft caps and sinks, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling
    logits = (query @ key.transpose(2, 3)) * scaling
    if settings.softcap is not None:
        logits = torch.tanh(logits / settings.softcap) * settings.softcap
    num_queries, num_keys = logits.shape[-2:]
    if mask is None and settings.causal and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if settings.sinks is not None:
        sinks = settings.sinks.reshape(1, -1, 1, 1).expand(logits.shape[0], -1, num_queries, 1)
        logits = torch.cat([logits, sinks.to(logits.dtype)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)[..., :num_keys]
    return F.dropout(weights, settings.dropout) @ value


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | Prepared | None:
    """The mask function of :class:`transformers.AttentionMaskInterface`.

    Packed, it evaluates the model's rule (causal, sliding window, chunks) once on places within a row: bool
    ``[1, 1, longest row, longest row]``, or None where the rule is plainly causal; for a backend, what that makes of the rule.
    """
    pack = _pack.get()
    if pack is None:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            device=device,
            **kwargs,
        )
    rule = Rule(mask_function, pack.longest, device)
    return rule.mask if pack.backend is None else pack.backend.prepare(rule, pack)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, attention_mask)


def configs_of(module: torch.nn.Module) -> list[PreTrainedConfig]:
    """The config objects that the layers of a model read."""
    found = {id(c): c for m in module.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    return list(found.values())


@contextlib.contextmanager
def attention_implementation(configs: Sequence[PreTrainedConfig], name: str) -> Iterator[None]:
    """Run the body with this attention; a live model keeps its own outside."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation_internal = value
