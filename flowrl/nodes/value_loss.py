"""The loss of critics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.batches import Advantages, Rollouts, Values
from flowrl.models import BaseModel, ValueHead
from flowrl.nodes.base import Join
from flowrl.nodes.loss import Current, LossTerm, TokenLoss
from flowrl.nodes.policy_loss_base import ADVANTAGES_ANCHOR, positive_problems

if TYPE_CHECKING:
    from torch import Tensor


class ValueLoss(TokenLoss):
    """Half the squared error of the values, optionally clipped around the old ones (PPO, arXiv 1707.06347).

    Args:
        value_head: the head that is trained, where it sits on the policy's trunk; None for a ``ValueModel``.
        clip: values count only within so much of the old ones; None does not clip.

    Metrics: ``value_mean``, ``value_error`` (mean squared error), ``value_clip_fraction``. A row without a policy token,
    and a batch without rows, give 0 and no gradient.
    """

    value_head: ValueHead | None = None
    clip: float | None = None

    requires: ClassVar[frozenset[str]] = frozenset({"values"})
    joins: ClassVar[Mapping[str, Join]] = ADVANTAGES_ANCHOR
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"clip": 0.2})

    def problems(self) -> list[str]:
        wrong = [] if self.clip is None else [f"{p}, or None" for p in positive_problems(clip=self.clip)]
        return super().problems() + wrong

    def head(self) -> BaseModel | None:
        return self.value_head

    def __call__(self, rollouts: Rollouts, values: Values, advantages: Advantages) -> LossTerm:
        return self.term(rollouts=rollouts, values=values, advantages=advantages)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.value_loss import value_loss

        returns = inputs["advantages"].returns.values
        losses, clipped = value_loss(current.values, returns, inputs["values"].values.values, clip=self.clip)
        new = current.values.detach()
        metrics = {"value_mean": new, "value_error": (new - returns) ** 2}
        if self.clip is not None:
            metrics["value_clip_fraction"] = clipped
        return losses, metrics
