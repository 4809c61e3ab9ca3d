"""What needs the whole distribution over the vocabulary at each response token: a slice of positions at a time, and
computed again in the backward pass, so that only one slice of logits exists at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.runtime.engines.transformers_head import SLICE
from flowrl.runtime.engines.transformers_layout import Layout
from flowrl.runtime.engines.transformers_network import Network


class Distributions:
    """The distributions that a network gives for the response tokens of a micro-batch.

    Args:
        hidden: of :meth:`Network.hidden`; None where the network computes its logits itself.
        temperature: divides the logits.
    """

    def __init__(self, network: Network, layout: Layout, hidden: Tensor | None, temperature: float) -> None:
        self.temperature = temperature
        self._transform = network.abilities.transform
        self._dtype = network.autocast_dtype or network.dtype
        self._head: Any = network.head
        if self._transform is None:
            self._source = network.full_logits(layout)
        else:
            assert hidden is not None
            self._source = hidden[layout.predictors]

    def __len__(self) -> int:
        return len(self._source)

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def vocab_size(self) -> int:
        return int(self._source.shape[-1] if self._transform is None else self._head.weight.shape[0])

    def logprobs(self, part: slice) -> Tensor:
        """float32 ``[positions, vocab]`` of some positions."""
        rows = self._source[part]
        if self._transform is None:
            logits = rows.float()
        else:
            bias = self._head.bias
            with torch.autocast(rows.device.type, enabled=False):
                raw = F.linear(
                    rows.to(self._dtype),
                    self._head.weight.to(self._dtype),
                    None if bias is None else bias.to(self._dtype),
                )
            logits = self._transform(raw.float())
        return torch.log_softmax(logits / self.temperature, dim=-1)

    def map(self, function: Callable[..., Tensor], *columns: Tensor | Distributions) -> Tensor:
        """``function(logprobs, *columns)`` of every position, where ``function`` takes ``[positions, vocab]``.

        Args:
            columns: tensors ``[num_tokens, …]`` on the same device, or further distributions, which carry no gradient.
        """

        def of(part: slice) -> Tensor:
            others = []
            for column in columns:
                if isinstance(column, Distributions):
                    with torch.no_grad():
                        others.append(column.logprobs(part).to(self.device))
                else:
                    others.append(column[part])
            return function(self.logprobs(part), *others)

        parts = [slice(start, start + SLICE) for start in range(0, len(self), SLICE)]
        if not parts:
            return of(slice(0, 0))
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(of, p, use_reentrant=False, preserve_rng_state=False) for p in parts])  # type: ignore[misc]
        return torch.cat([of(p) for p in parts])
