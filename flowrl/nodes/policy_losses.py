"""Policy losses, one class an algorithm: its settings, and a line that calls :mod:`flowrl.functional.policy_losses`.
What they share (inputs, entropy bonus, KL penalty, importance weights, metrics) is
:class:`flowrl.nodes.policy_loss_base.PolicyLoss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flowrl.batches import Advantages, ImportanceWeights, OldLogprobs, RefLogprobs, Rollouts
from flowrl.nodes.covariance_losses import ClipCovLoss, KLCovLoss
from flowrl.nodes.loss import Aggregation, LossTerm
from flowrl.nodes.policy_loss_base import PolicyLoss, PolicyTokens, clip_problems, kl_problems, positive_problems
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CISPOLoss",
    "ClipCovLoss",
    "DPPOLoss",
    "DROLoss",
    "DecoupledPPOLoss",
    "GMPOLoss",
    "GPGLoss",
    "GRPOLoss",
    "GSPOLoss",
    "KLCovLoss",
    "PPOLoss",
    "PolicyLoss",
    "PolicyTokens",
    "ReinforceLoss",
    "SAPOLoss",
    "kl_problems",
]

Examples = tuple[Mapping[str, Any], ...]


class PPOLoss(PolicyLoss):
    """PPO's clipped surrogate (arXiv 1707.06347); see :func:`flowrl.functional.policy_losses.ppo_loss`.

    Args:
        clip: the ratio counts down to 1 − clip.
        clip_high: and up to 1 + clip_high; None takes clip ("clip-higher" of DAPO, arXiv 2503.14476).
        dual_clip: caps the loss of tokens with a negative advantage at ``−A · dual_clip`` (arXiv 1912.09729).

    Metric of its own: ``clip_fraction``, the share of tokens whose loss the clip holds.
    """

    clip: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None

    examples: ClassVar[Examples] = (
        {},
        {"clip_high": 0.28, "dual_clip": 3.0},
        {"entropy_coef": 0.1, "kl_coef": 0.1, "kl_estimator": "k3_st"},
        {"aggregation": "seq-mean-token-mean"},
    )

    def problems(self) -> list[str]:
        found = super().problems() + clip_problems(self.clip, self.clip_high, below=1)
        if self.dual_clip is not None and not self.dual_clip > 1:
            found.append(f"dual_clip is {self.dual_clip}; expected more than 1, or None")
        return found

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.policy_losses import ppo_loss

        losses, clipped = ppo_loss(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            clip_low=self.clip,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return losses, {"clip_fraction": clipped}


class GRPOLoss(PPOLoss):
    """PPO's clipped surrogate under the name of GRPO (arXiv 2402.03300), which adds the KL to the loss and not to the
    rewards: ``GRPOLoss(kl_coef=0.01)(rollouts, advantages, old_logprobs, ref_logprobs)``. What makes it GRPO are the
    group-relative advantages. The settings are those of :class:`PPOLoss` and :class:`PolicyLoss`.

    The paper takes the mean over responses of their means (``aggregation="seq-mean-token-mean"``); the default is the
    mean over tokens, as in DAPO. Dr.GRPO (arXiv 2503.20783) is "seq-mean-token-sum-norm" with ``scale`` = max_new_tokens.
    """

    examples: ClassVar[Examples] = (
        {"kl_coef": 0.1},
        {"aggregation": "seq-mean-token-sum-norm", "scale": 8.0},
        {"aggregation": "token-sum"},
        {"aggregation": "seq-mean-token-sum"},
    )


class DecoupledPPOLoss(PPOLoss):
    """Decoupled PPO (Hilton et al., arXiv 2110.00641): three policies. The behaviour policy μ sampled (its log-probs are
    the rollouts' own), the proximal one π_old is what the update stays close to (``old_logprobs``), and the current one
    is trained.

    min(π_old/μ, cap) times PPO's clipped surrogate of π/π_old: how old the samples are no longer decides how far an
    update may go. With several optimiser steps, or with ``max_staleness``, let ``old_logprobs`` be those of recent
    weights.

    Args:
        behaviour_cap: the largest π_old/μ; None leaves it.
        clip, clip_high, dual_clip: as in :class:`PPOLoss`.

    Metrics of its own: ``clip_fraction``, ``behaviour_weight``.
    """

    behaviour_cap: float | None = field(default=None, kw_only=True)

    examples: ClassVar[Examples] = ({}, {"behaviour_cap": 1.5, "clip_high": 0.28})

    def problems(self) -> list[str]:
        cap = self.behaviour_cap
        wrong = [] if cap is None else [f"{p}, or None" for p in positive_problems(behaviour_cap=cap)]
        return super().problems() + wrong

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.importance import importance_weights, truncate_weights

        losses, metrics = super().surrogate(tokens)
        weights = importance_weights(tokens.old_logprobs, tokens.rollout_logprobs, tokens.mask)
        if self.behaviour_cap is not None:
            weights = truncate_weights(weights, self.behaviour_cap)
        return losses * weights, {**metrics, "behaviour_weight": weights}


class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation (arXiv 2507.18071): one ratio a response; see
    :func:`flowrl.functional.policy_losses.gspo_loss`.

    Args:
        clip: the response's ratio counts down to 1 − clip; it is a geometric mean, so it stays close to 1.
        clip_high: and up to 1 + clip_high; None takes clip.

    Metric of its own: ``clip_fraction``. A row without a token that counts has ratio 1 and is not counted.
    """

    clip: float = 3e-4
    clip_high: float | None = 4e-4
    aggregation: Aggregation = field(default="seq-mean-token-mean", kw_only=True)

    examples: ClassVar[Examples] = ({"clip": 0.2, "clip_high": 0.28}, {"clip": 0.5, "clip_high": None}, {})

    def problems(self) -> list[str]:
        return super().problems() + clip_problems(self.clip, self.clip_high, below=1)

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.policy_losses import gspo_loss

        losses, clipped = gspo_loss(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            tokens.mask,
            clip_low=self.clip,
            clip_high=self.clip_high,
        )
        return losses, {"clip_fraction": clipped}


class GMPOLoss(PolicyLoss):
    """Geometric-mean policy optimisation (arXiv 2507.20673); see :func:`flowrl.functional.policy_losses.geo_mean_loss`.

    Args:
        clip: log-ratios count down to −clip.
        clip_high: and up to clip_high; None takes clip.

    Importance weights enter as their geometric mean over the response: one weight of 0 takes out the whole response, so
    prefer ``RejectionMask`` to ``IcePop`` here. Metric of its own: ``clip_fraction``. A row without a token that counts
    is not counted.
    """

    clip: float = 0.4
    clip_high: float | None = None
    aggregation: Aggregation = field(default="seq-mean-token-mean", kw_only=True)

    examples: ClassVar[Examples] = ({}, {"clip": 0.2, "clip_high": 0.28})

    def problems(self) -> list[str]:
        return super().problems() + clip_problems(self.clip, self.clip_high)

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.policy_losses import geo_mean_loss

        losses, clipped = geo_mean_loss(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            tokens.mask,
            clip_low=self.clip,
            clip_high=self.clip_high,
        )
        return losses, {"clip_fraction": clipped}

    def weigh(self, losses: Tensor, weights: Tensor, mask: Ragged) -> Tensor:
        from flowrl.functional.importance import geometric_row_means

        return losses * geometric_row_means(weights, mask)[mask.row_of_value]


class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation (arXiv 2511.20347): a sigmoid gate in place of the clip; see
    :func:`flowrl.functional.policy_losses.sapo_loss`.

    Args:
        tau_pos: temperature of the gate where the advantage is positive.
        tau_neg: that of the other tokens; larger fades faster as the ratio moves away from 1.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    aggregation: Aggregation = field(default="seq-mean-token-mean", kw_only=True)

    examples: ClassVar[Examples] = ({}, {"tau_pos": 2.0, "tau_neg": 4.0})

    def problems(self) -> list[str]:
        return super().problems() + positive_problems(tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def surrogate(self, tokens: PolicyTokens) -> Tensor:
        from flowrl.functional.policy_losses import sapo_loss

        return sapo_loss(
            tokens.logprobs, tokens.old_logprobs, tokens.advantages, tau_pos=self.tau_pos, tau_neg=self.tau_neg
        )


class CISPOLoss(PolicyLoss):
    """Clipped importance-sampling policy optimisation (arXiv 2506.13585): the weight is clipped, and every token keeps
    its gradient; see :func:`flowrl.functional.policy_losses.cispo_loss`.

    Args:
        clip: the weight goes down to 1 − clip; 1 or more is no lower bound.
        clip_high: and up to 1 + clip_high; None takes clip.

    Metric of its own: ``clip_fraction``, the share of tokens whose weight is clipped.
    """

    clip: float = 1.0
    clip_high: float | None = 0.28

    examples: ClassVar[Examples] = ({}, {"clip": 0.2, "clip_high": None})

    def problems(self) -> list[str]:
        return super().problems() + clip_problems(self.clip, self.clip_high)

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.policy_losses import cispo_loss

        losses, clipped = cispo_loss(
            tokens.logprobs, tokens.old_logprobs, tokens.advantages, clip_low=self.clip, clip_high=self.clip_high
        )
        return losses, {"clip_fraction": clipped}


class DROLoss(PolicyLoss):
    """Direct reward optimisation (arXiv 2405.19107), token by token: a quadratic pull towards the old policy; see
    :func:`flowrl.functional.policy_losses.dro_loss`.

    Args:
        beta: strength of the pull.
    """

    beta: float = 0.05

    examples: ClassVar[Examples] = ({}, {"beta": 0.5})

    def problems(self) -> list[str]:
        return super().problems() + positive_problems(beta=self.beta)

    def surrogate(self, tokens: PolicyTokens) -> Tensor:
        from flowrl.functional.policy_losses import dro_loss

        return dro_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, beta=self.beta)


class DPPOLoss(PolicyLoss):
    """Divergence PPO (arXiv 2602.04879), binary form: the trust region is a divergence, not a ratio; see
    :func:`flowrl.functional.policy_losses.dppo_loss`.

    Args:
        distance: "tv" or "kl", of "this token or any other".
        clip: its bound where the advantage is not positive; None takes the paper's, 0.15 for "tv" and 0.05 for "kl".
        clip_high: its bound where the advantage is positive; None takes clip.
        ratio_cap: the largest importance ratio; None leaves it.

    Metric of its own: ``clip_fraction``, the share of tokens outside of the trust region, which have no gradient.
    """

    distance: Literal["tv", "kl"] = "tv"
    clip: float | None = None
    clip_high: float | None = None
    ratio_cap: float | None = field(default=None, kw_only=True)

    examples: ClassVar[Examples] = ({}, {"distance": "kl"}, {"clip": 0.2, "clip_high": 0.28, "ratio_cap": 3.0})

    def problems(self) -> list[str]:
        from flowrl.functional.policy_losses import DPPO_DIVERGENCES

        found = super().problems()
        if self.distance not in DPPO_DIVERGENCES:
            found.append(f"distance is {self.distance!r}; expected one of {', '.join(DPPO_DIVERGENCES)}")
        optional = {"clip": self.clip, "clip_high": self.clip_high, "ratio_cap": self.ratio_cap}
        given = {name: value for name, value in optional.items() if value is not None}
        return found + [f"{problem}, or None" for problem in positive_problems(**given)]

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.policy_losses import dppo_loss

        losses, too_far = dppo_loss(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            divergence=self.distance,
            clip_low={"tv": 0.15, "kl": 0.05}[self.distance] if self.clip is None else self.clip,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
        )
        return losses, {"clip_fraction": too_far}


class ReinforceLoss(PolicyLoss):
    """−A·log π (REINFORCE, Williams 1992). ``old_logprobs`` are optional: it does not read them, but with them it reports
    how far the policy moved. Take one optimiser step a batch: nothing bounds a second one."""

    examples: ClassVar[Examples] = ({}, {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01})

    def __call__(
        self,
        rollouts: Rollouts,
        advantages: Advantages,
        old_logprobs: OldLogprobs | None = None,
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

    def surrogate(self, tokens: PolicyTokens) -> Tensor:
        from flowrl.functional.policy_losses import reinforce_loss

        return reinforce_loss(tokens.logprobs, tokens.advantages)


class GPGLoss(ReinforceLoss):
    """Group policy gradient (arXiv 2504.02546): −A·log π without clip, reference or old policy. What is its own is the
    advantage: that of GPG scales a batch by its share of prompts that teach something."""

    examples: ClassVar[Examples] = ({},)
