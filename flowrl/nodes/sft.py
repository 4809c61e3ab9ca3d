"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrl.batches import Demonstrations
from flowrl.nodes.loss import Current, LossTerm, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


class SFTLoss(TokenLoss):
    """Negative log-likelihood of demonstrations: −log π of each target token. Metric: ``nll``, its mean over target
    tokens. Demonstrations without a target, and a batch without rows, give 0 and no gradient."""

    def __call__(self, demonstrations: Demonstrations) -> LossTerm:
        return self.term(demonstrations=demonstrations)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -current.logprobs, {"nll": -current.logprobs.detach()}
