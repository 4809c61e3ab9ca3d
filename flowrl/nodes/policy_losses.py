"""Loss terms: clipped policy losses, the value loss, supervised fine-tuning. See ``flowrl.functional``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.batches import Advantages, Demonstrations, OldLogprobs, RefLogprobs, Rollouts, Values
from flowrl.models import BaseModel, ValueHead
from flowrl.nodes.base import Join
from flowrl.nodes.logprobs import comparable_origins
from flowrl.nodes.loss import Current, LossTerm, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

#: Advantages decide which rows are trained on: an advantage node may have dropped some.
_ADVANTAGES_ANCHOR: Mapping[str, Join] = {
    "rollouts": "subset",
    "old_logprobs": "subset",
    "ref_logprobs": "subset",
    "values": "subset",
}


class ClippedPolicyLoss(TokenLoss):
    """What PPO and GRPO share: the clipped surrogate, an entropy bonus, and their metrics.

    Metrics, as means over policy tokens: ``clip_fraction``, ``ratio`` and ``ratio_squared`` (of which the
    runtime makes the effective sample size), ``approx_kl`` (k3 of the old policy against the current one),
    ``entropy`` where it is asked for, and ``rollout_logprob_gap`` (the sampler's log-probs against the
    trainer's before the update) where the two are comparable.
    """

    clip: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    entropy_coef: float = 0.0

    joins: ClassVar[Mapping[str, Join]] = _ADVANTAGES_ANCHOR

    @property
    def requires(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"logprobs", "entropy"} if self.entropy_coef else {"logprobs"})

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0 < self.clip < 1:
            found.append(f"clip is {self.clip}; expected 0 < clip < 1")
        if self.clip_high is not None and not self.clip_high > 0:
            found.append(f"clip_high is {self.clip_high}; expected more than 0, or None")
        if self.dual_clip is not None and not self.dual_clip > 1:
            found.append(f"dual_clip is {self.dual_clip}; expected more than 1, or None")
        return found

    def surrogate(
        self, current: Current, rollouts: Rollouts, advantages: Advantages, old_logprobs: OldLogprobs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Token losses and metrics, both float32 ``[num_tokens]``."""
        from flowrl.functional.kl import kl_estimate
        from flowrl.functional.losses import importance_ratio, ppo_loss

        assert current.logprobs is not None
        old = current.old(old_logprobs)
        losses, clipped = ppo_loss(
            current.logprobs,
            old,
            advantages.advantages.values,
            clip_low=self.clip,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        ratio = importance_ratio(current.logprobs, old).detach()
        metrics = {
            "clip_fraction": clipped,
            "ratio": ratio,
            "ratio_squared": ratio**2,
            "approx_kl": kl_estimate(old, current.logprobs, "k3").detach(),
        }
        if comparable_origins(rollouts.origin, old_logprobs.origin):
            metrics["rollout_logprob_gap"] = (rollouts.rollout_logprobs.values - old).abs()
        if self.entropy_coef:
            assert current.entropy is not None
            losses = losses - self.entropy_coef * current.entropy
            metrics["entropy"] = current.entropy.detach()
        return losses, metrics


class PPOLoss(ClippedPolicyLoss):
    """PPO's clipped surrogate (arXiv 1707.06347); see :func:`flowrl.functional.losses.ppo_loss`.

    Args:
        clip: the ratio counts down to 1 − clip.
        clip_high: and up to 1 + clip_high; None takes clip ("clip-higher" of DAPO, arXiv 2503.14476).
        dual_clip: caps the loss of tokens with a negative advantage at ``−A · dual_clip`` (arXiv 1912.09729).
        entropy_coef: weight of an entropy bonus.
    """

    def __call__(self, rollouts: Rollouts, advantages: Advantages, old_logprobs: OldLogprobs) -> LossTerm:
        return self.term(rollouts=rollouts, advantages=advantages, old_logprobs=old_logprobs)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.surrogate(current, inputs["rollouts"], inputs["advantages"], inputs["old_logprobs"])


class GRPOLoss(ClippedPolicyLoss):
    """The clipped surrogate with a KL penalty in the loss (GRPO, arXiv 2402.03300).

    Args:
        clip: the ratio counts down to 1 − clip.
        clip_high: and up to 1 + clip_high; None takes clip.
        dual_clip: caps the loss of tokens with a negative advantage at ``−A · dual_clip``.
        entropy_coef: weight of an entropy bonus.
        kl_coef: weight of the KL divergence of the current policy from the reference; more than 0 needs
            ``ref_logprobs``.
        kl_estimator: see :func:`flowrl.functional.kl.kl_estimate`.

    Metric: ``kl``, where ``ref_logprobs`` are given.
    """

    kl_coef: float = 0.0
    kl_estimator: str = "k3"

    def problems(self) -> list[str]:
        return super().problems() + list(kl_problems(self.kl_coef, self.kl_estimator))

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        if self.kl_coef and "ref_logprobs" not in given:
            yield f"kl_coef is {self.kl_coef} without ref_logprobs; expected ReferenceLogprobs(…)(rollouts)"

    def __call__(
        self,
        rollouts: Rollouts,
        advantages: Advantages,
        old_logprobs: OldLogprobs,
        ref_logprobs: RefLogprobs | None = None,
    ) -> LossTerm:
        return self.term(rollouts=rollouts, advantages=advantages, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.kl import kl_estimate

        losses, metrics = self.surrogate(current, inputs["rollouts"], inputs["advantages"], inputs["old_logprobs"])
        reference: RefLogprobs | None = inputs.get("ref_logprobs")
        if reference is not None:
            assert current.logprobs is not None
            kl = kl_estimate(current.logprobs, reference.ref_logprobs.values, self.kl_estimator)
            losses = losses + self.kl_coef * kl if self.kl_coef else losses
            metrics["kl"] = kl.detach()
        return losses, metrics


class ValueLoss(TokenLoss):
    """Half the squared error of the values, optionally clipped around the old ones (PPO, arXiv 1707.06347).

    Args:
        value_head: the head that is trained, where it sits on the policy's trunk; None for a ``ValueModel``.
        clip: values count only within so much of the old ones; None does not clip.

    Metrics: ``value_mean``, ``value_error`` (mean squared error), ``value_clip_fraction``.
    """

    value_head: ValueHead | None = None
    clip: float | None = None

    requires: ClassVar[frozenset[str]] = frozenset({"values"})
    joins: ClassVar[Mapping[str, Join]] = _ADVANTAGES_ANCHOR

    def problems(self) -> list[str]:
        found = super().problems()
        if self.clip is not None and not self.clip > 0:
            found.append(f"clip is {self.clip}; expected more than 0, or None")
        return found

    def head(self) -> BaseModel | None:
        return self.value_head

    def __call__(self, rollouts: Rollouts, values: Values, advantages: Advantages) -> LossTerm:
        return self.term(rollouts=rollouts, values=values, advantages=advantages)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.losses import value_loss

        assert current.values is not None
        returns = inputs["advantages"].returns.values
        losses, clipped = value_loss(current.values, returns, inputs["values"].values.values, clip=self.clip)
        new = current.values.detach()
        metrics = {"value_mean": new, "value_error": (new - returns) ** 2}
        if self.clip is not None:
            metrics["value_clip_fraction"] = clipped
        return losses, metrics


class SFTLoss(TokenLoss):
    """Negative log-likelihood of demonstrations. Metric: ``nll``, its mean over target tokens."""

    def __call__(self, demonstrations: Demonstrations) -> LossTerm:
        return self.term(demonstrations=demonstrations)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        assert current.logprobs is not None
        return -current.logprobs, {"nll": -current.logprobs.detach()}


def kl_problems(kl_coef: float, kl_estimator: str) -> Iterable[str]:
    """What is wrong with the settings of a KL penalty, a sentence each."""
    from flowrl.functional.kl import KL_ESTIMATORS

    if not kl_coef >= 0:
        yield f"kl_coef is {kl_coef}; expected at least 0"
    if kl_estimator not in KL_ESTIMATORS:
        yield f"kl_estimator is {kl_estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}"
