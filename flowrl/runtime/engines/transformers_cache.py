"""A key-value cache that grows in place.

The library's copies all keys and values for every token; over a long response that is slower than the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

#: Tokens that a full buffer grows by at least, and its share.
GROW_TOKENS, GROW_SHARE = 32, 0.25


class GrowingLayer(DynamicLayer):
    """One layer, whose ``keys`` and ``values`` ``[rows, num_kv_heads, length, head_dim]`` are views of buffers."""

    buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if self.buffers is None or end > self.buffers[0].shape[-2]:
            capacity = end if length == 0 else end + max(GROW_TOKENS, int(GROW_SHARE * end))
            pairs = ((self.keys, key_states), (self.values, value_states))
            keys, values = (self._grown(old, new, capacity) for old, new in pairs)
            self.buffers = (keys, values)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., length:end, :] = new
        keys, values = (buffer[..., :end, :] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values

    @staticmethod
    def _grown(old: Tensor | None, new: Tensor, capacity: int) -> Tensor:
        buffer = torch.empty((*new.shape[:-2], capacity, new.shape[-1]), dtype=new.dtype, device=new.device)
        if old is not None and old.numel():
            buffer[..., : old.shape[-2], :] = old
        return buffer

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.buffers = None  # what was selected is a copy without room to grow


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model; layers that are neither full attention nor plain stay the library's."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
