"""Updaters with one loss term, under the names that people look for. Each is a shorthand: what a flow records
is ``Updater(…)(Loss(…)(…))``, written out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import ClassVar

from flowrl.batches import Advantages, Demonstrations, OldLogprobs, RefLogprobs, Rollouts, TrainStats, Values
from flowrl.models import AnyModel, BaseModel, State, ValueHead
from flowrl.nodes.base import Node
from flowrl.nodes.loss import Aggregation, LossTerm
from flowrl.nodes.policy_losses import GRPOLoss, PolicyLoss, PPOLoss
from flowrl.nodes.sft import SFTLoss
from flowrl.nodes.updater import AdamW, Updater
from flowrl.nodes.value_loss import ValueLoss


class OneLossUpdater(Node):
    """The settings of :class:`flowrl.nodes.updater.Updater`, for an updater with one loss term."""

    model: AnyModel | None = None
    epochs: int = 1
    num_minibatches: int = 1
    optimizer: AdamW = field(default_factory=AdamW)
    max_grad_norm: float | None = 1.0

    kind: ClassVar[str] = "updater"
    composite: ClassVar[bool] = True

    def writes(self) -> tuple[BaseModel | State, ...]:
        return (self.model,) if self.model is not None else ()

    def update(self, term: LossTerm) -> TrainStats:
        """The call of the Updater that this is short for."""
        model = self.model.base if isinstance(self.model, ValueHead) else self.model
        updater = Updater(
            model, self.epochs, self.num_minibatches, self.optimizer, self.max_grad_norm, label=self.label
        )
        return updater(term)


class PolicyUpdater(OneLossUpdater):
    """``Updater(model, …)(loss(rollouts, advantages, old_logprobs, ref_logprobs))`` for any policy loss:
    ``PolicyUpdater(actor, loss=GSPOLoss())``; for the settings see the two.
    """

    loss: PolicyLoss = field(default_factory=PPOLoss, kw_only=True)

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        """The short form asks here whether reference log-probs are to be wired."""
        yield from self.loss.wiring_problems(given)

    def __call__(
        self,
        rollouts: Rollouts,
        advantages: Advantages,
        old_logprobs: OldLogprobs,
        ref_logprobs: RefLogprobs | None = None,
    ) -> TrainStats:
        return self.update(self.loss(rollouts, advantages, old_logprobs, ref_logprobs))


class OneTermUpdater(OneLossUpdater):
    """The settings of an updater and of the aggregation of its one token loss."""

    aggregation: Aggregation = field(default="token-mean", kw_only=True)
    scale: float = field(default=1.0, kw_only=True)


class PPOUpdater(OneTermUpdater):
    """``Updater(model, …)(PPOLoss(…)(rollouts, advantages, old_logprobs))``; for the settings see the two."""

    clip: float = field(default=0.2, kw_only=True)
    clip_high: float | None = field(default=None, kw_only=True)
    dual_clip: float | None = field(default=None, kw_only=True)
    entropy_coef: float | State = field(default=0.0, kw_only=True)

    def __call__(self, rollouts: Rollouts, advantages: Advantages, old_logprobs: OldLogprobs) -> TrainStats:
        loss = PPOLoss(
            self.clip,
            self.clip_high,
            self.dual_clip,
            entropy_coef=self.entropy_coef,
            aggregation=self.aggregation,
            scale=self.scale,
        )
        return self.update(loss(rollouts, advantages, old_logprobs))


class GRPOUpdater(OneTermUpdater):
    """``Updater(model, …)(GRPOLoss(…)(rollouts, advantages, old_logprobs, ref_logprobs))``; for the settings
    see the two.
    """

    clip: float = field(default=0.2, kw_only=True)
    clip_high: float | None = field(default=None, kw_only=True)
    dual_clip: float | None = field(default=None, kw_only=True)
    entropy_coef: float | State = field(default=0.0, kw_only=True)
    kl_coef: float | State = field(default=0.0, kw_only=True)
    kl_estimator: str = field(default="k3", kw_only=True)

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        """The short form asks here whether reference log-probs are to be wired."""
        yield from GRPOLoss(kl_coef=self.kl_coef).wiring_problems(given)

    def __call__(
        self,
        rollouts: Rollouts,
        advantages: Advantages,
        old_logprobs: OldLogprobs,
        ref_logprobs: RefLogprobs | None = None,
    ) -> TrainStats:
        loss = GRPOLoss(
            self.clip,
            self.clip_high,
            self.dual_clip,
            entropy_coef=self.entropy_coef,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            aggregation=self.aggregation,
            scale=self.scale,
        )
        return self.update(loss(rollouts, advantages, old_logprobs, ref_logprobs))


class ValueUpdater(OneTermUpdater):
    """``Updater(model, …)(ValueLoss(…)(rollouts, values, advantages))``; for the settings see the two.

    A critic with a trunk of its own is trained by this. A ``ValueHead`` belongs in its trunk's updater, next
    to the policy's loss; given one, this trains the trunk on the value loss alone.
    """

    clip: float | None = field(default=None, kw_only=True)

    def __call__(self, rollouts: Rollouts, values: Values, advantages: Advantages) -> TrainStats:
        head = self.model if isinstance(self.model, ValueHead) else None
        loss = ValueLoss(head, self.clip, aggregation=self.aggregation, scale=self.scale)
        return self.update(loss(rollouts, values, advantages))


class SFTUpdater(OneTermUpdater):
    """``Updater(model, …)(SFTLoss(…)(demonstrations))``; for the settings see the two."""

    def __call__(self, demonstrations: Demonstrations) -> TrainStats:
        loss = SFTLoss(aggregation=self.aggregation, scale=self.scale)
        return self.update(loss(demonstrations))
