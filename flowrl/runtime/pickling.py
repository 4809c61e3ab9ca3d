"""Pickling of what ranks send to each other: batches, above all."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dumps(value: Any) -> bytes:
    """Pickle a value; ``pickle.loads`` is the inverse. Tensors that share memory do so no more."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes the numbers of a tensor as they are: torch writes all of the memory that a view is of, and takes its time."""

    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        if not plain or obj.requires_grad or obj.numel() == 0 or obj.is_quantized:
            return NotImplemented
        numbers: Any = obj.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers), obj.dtype, tuple(obj.shape))


def _tensor(numbers: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(numbers, dtype=dtype).view(shape)
