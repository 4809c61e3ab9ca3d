"""What the policy losses share: their inputs, an entropy bonus, a KL penalty, importance weights and metrics. A policy loss
itself is a few lines: its settings and :meth:`PolicyLoss.surrogate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.batches import Advantages, ImportanceWeights, OldLogprobs, RefLogprobs, Rollouts
from flowrl.models import State
from flowrl.nodes.base import Join
from flowrl.nodes.kl_control import coefficient, coefficient_problems
from flowrl.nodes.logprobs import comparable_origins
from flowrl.nodes.loss import Current, LossTerm, TokenLoss
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: Advantages decide which rows are trained on: an advantage node may have dropped some.
ADVANTAGES_ANCHOR: Mapping[str, Join] = {
    "rollouts": "subset",
    "old_logprobs": "subset",
    "ref_logprobs": "subset",
    "importance_weights": "subset",
    "values": "subset",
}


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """What :meth:`PolicyLoss.surrogate` sees: float ``[num_tokens]`` columns in response layout. Where no token counts all
    of them are 0, whatever the batches hold there.

    Args:
        mask: uint8 ragged: the tokens that count (written by the policy, and not rejected).
        logprobs: of the current policy, with gradient.
        advantages: of the tokens.
        old_logprobs: before the update; a loss that can do without must look whether :attr:`has_old`.
        rollouts: the sequences themselves.
        constants: what :meth:`PolicyLoss.prepare` gave, None where it gave nothing.
    """

    mask: Ragged
    logprobs: Tensor
    advantages: Tensor
    rollouts: Rollouts
    old_logprobs: Tensor = None  # type: ignore[assignment]
    constants: Any = None

    @classmethod
    def of(
        cls,
        mask: Ragged,
        logprobs: Tensor,
        rollouts: Rollouts,
        advantages: Advantages,
        old_logprobs: OldLogprobs | None = None,
        constants: Any = None,
        **others: Any,
    ) -> PolicyTokens:
        """From the inputs of a policy loss."""
        old = None if old_logprobs is None else selected(old_logprobs.old_logprobs.values, mask)
        return cls(
            mask,
            selected(logprobs, mask),
            selected(advantages.advantages.values, mask),
            rollouts,
            old,  # type: ignore[arg-type]
            constants,
        )

    @property
    def has_old(self) -> bool:
        """Whether there are old log-probs."""
        return self.old_logprobs is not None

    @property
    def rollout_logprobs(self) -> Tensor:
        """float32 ``[num_tokens]``: the sampler's own log-probs."""
        return selected(self.rollouts.rollout_logprobs.values, self.mask)


class PolicyLoss(TokenLoss):
    """The base of the losses of a policy on its own samples: a surrogate of −A·log π, an entropy bonus and a KL penalty.

    loss = w·surrogate − ``entropy_coef``·entropy + ``kl_coef``·KL(π ‖ π_ref), token by token, w being the importance
    weights where they are given. Tokens that these reject do not count at all.

    Args:
        entropy_coef: weight of the entropy bonus; a number or a State.
        kl_coef: weight of the KL penalty; a number, or a State that a controller writes. More than 0 needs
            ``ref_logprobs``.
        kl_estimator: see :func:`flowrl.functional.kl.kl_estimate`; it is the gradient that matters here ("k3_st" has
            that of the divergence itself).

    Metrics, as means over the tokens that count: ``ratio`` and ``ratio_squared`` (of which the runtime makes the
    effective sample size) and ``approx_kl`` (k3 of the old policy against the current one) where ``old_logprobs`` are
    given; ``kl`` where ``ref_logprobs`` are; ``entropy`` where it is asked for; ``rollout_logprob_gap`` (the sampler's
    log-probs against the trainer's before the update) where the two are comparable; and what the surrogate reports.

    A row without a token that counts, and a batch without rows, give 0 and no gradient.

    Example::

        class Quadratic(PolicyLoss):
            pull: float = 0.1

            def surrogate(self, tokens: PolicyTokens) -> Tensor:
                moved = tokens.logprobs - tokens.old_logprobs
                return -tokens.advantages * tokens.logprobs + self.pull * moved**2
    """

    entropy_coef: float | State = field(default=0.0, kw_only=True)
    kl_coef: float | State = field(default=0.0, kw_only=True)
    kl_estimator: str = field(default="k3", kw_only=True)

    joins: ClassVar[Mapping[str, Join]] = ADVANTAGES_ANCHOR

    @property
    def requires(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"logprobs", "entropy"} if self.entropy_coef else {"logprobs"})

    def problems(self) -> list[str]:
        coef = self.entropy_coef
        value = coef.init if isinstance(coef, State) else coef
        finite = isinstance(value, int | float) and math.isfinite(value)
        found = [] if finite else [f"entropy_coef is {_shown(coef)}; expected a finite number"]
        return [*super().problems(), *found, *kl_problems(self.kl_coef, self.kl_estimator)]

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        if self.kl_coef and "ref_logprobs" not in given:
            yield f"kl_coef is {_shown(self.kl_coef)} without ref_logprobs; expected ReferenceLogprobs(…)(rollouts)"

    def __call__(
        self,
        rollouts: Rollouts,
        advantages: Advantages,
        old_logprobs: OldLogprobs,
        ref_logprobs: RefLogprobs | None = None,
        importance_weights: ImportanceWeights | None = None,
    ) -> LossTerm:
        return self.term(
            rollouts=rollouts,
            advantages=advantages,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            importance_weights=importance_weights,
        )

    def surrogate(self, tokens: PolicyTokens) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Token losses with gradient, float ``[num_tokens]``, and metrics of that shape by name."""
        raise NotImplementedError(f"{type(self).__name__} defines no surrogate")

    def weigh(self, losses: Tensor, weights: Tensor, mask: Ragged) -> Tensor:
        """Token losses times their importance weights, ``[num_tokens]`` each; the weights are 1 where no token counts."""
        return losses * weights

    def mask(self, **inputs: Any) -> Ragged:
        mask = super().mask(**inputs)
        weights: ImportanceWeights | None = inputs.get("importance_weights")
        return mask if weights is None else mask.with_values(mask.values * weights.keep.values.bool())

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        mask = current.loss_mask
        tokens = PolicyTokens.of(mask, current.logprobs, **inputs)
        result = self.surrogate(tokens)
        losses, metrics = result if isinstance(result, tuple) else (result, {})
        weights: ImportanceWeights | None = inputs.get("importance_weights")
        if weights is not None:
            losses = self.weigh(losses, selected(weights.weights.values, mask, 1.0), mask)
        metrics = {**_movement(tokens, inputs.get("old_logprobs")), **metrics}
        if self.entropy_coef:
            losses = losses - coefficient(self.entropy_coef) * current.entropy
            metrics["entropy"] = current.entropy.detach()
        reference: RefLogprobs | None = inputs.get("ref_logprobs")
        if reference is not None:
            from flowrl.functional.kl import kl_estimate

            kl = kl_estimate(tokens.logprobs, reference.ref_logprobs.values, self.kl_estimator)
            losses = losses + coefficient(self.kl_coef) * kl if self.kl_coef else losses
            metrics["kl"] = kl.detach()
        return losses, metrics


def selected(values: Tensor, mask: Ragged, otherwise: float = 0.0) -> Tensor:
    """``values`` ``[num_tokens]`` where the mask is set, elsewhere a number: neither a NaN there nor its gradient gets
    any further."""
    import torch

    return torch.where(mask.values.bool(), values, torch.tensor(otherwise, dtype=values.dtype))


def _movement(tokens: PolicyTokens, old_logprobs: OldLogprobs | None) -> dict[str, Tensor]:
    """Metrics of how far the policy has moved, and how far the sampler was from it."""
    from flowrl.functional.kl import kl_estimate
    from flowrl.functional.policy_losses import importance_ratio

    if old_logprobs is None:
        return {}
    new, old = tokens.logprobs.detach(), tokens.old_logprobs
    ratio = importance_ratio(new, old)
    metrics = {"ratio": ratio, "ratio_squared": ratio**2, "approx_kl": kl_estimate(old, new, "k3")}
    if comparable_origins(tokens.rollouts.origin, old_logprobs.origin):
        metrics["rollout_logprob_gap"] = (tokens.rollout_logprobs - old).abs()
    return metrics


def kl_problems(kl_coef: float | State, kl_estimator: str) -> Iterable[str]:
    """What is wrong with the settings of a KL penalty, a sentence each."""
    from flowrl.functional.kl import KL_ESTIMATORS

    yield from coefficient_problems(kl_coef, "kl_coef")
    if kl_estimator not in KL_ESTIMATORS:
        yield f"kl_estimator is {kl_estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}"


def clip_problems(clip: float, clip_high: float | None, *, below: float = math.inf) -> list[str]:
    """What is wrong with two bounds of a clip, a sentence each. ``clip`` must be more than 0 and less than ``below``."""
    found = []
    if not 0 < clip < below:
        found.append(f"clip is {clip}; expected 0 < clip" + (f" < {below:g}" if below < math.inf else ""))
    if clip_high is not None and not 0 < clip_high < math.inf:
        found.append(f"clip_high is {clip_high}; expected more than 0, or None")
    return found


def positive_problems(**settings: float) -> list[str]:
    """A sentence for each setting that is not a finite number above 0."""
    wrong = {name: value for name, value in settings.items() if not 0 < value < math.inf}
    return [f"{name} is {value}; expected a finite number above 0" for name, value in wrong.items()]


def _shown(setting: float | State) -> str:
    return f"State({setting.name!r}, {setting.init})" if isinstance(setting, State) else str(setting)
