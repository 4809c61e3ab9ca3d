"""Off-policy corrections: from what the sampler and the trainer say of the same tokens to weights of the token losses, and to
tokens that are left out.

Each node takes the ``importance_weights`` of another one, multiplies the weights and leaves out what either rejects. A node
looks at all tokens that the policy wrote, rejected ones too, so the order in which nodes are chained changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

from flowrl import context
from flowrl.batches import ImportanceWeights, OldLogprobs, Rollouts
from flowrl.nodes.base import Join, Node
from flowrl.nodes.logprobs import comparable_origins
from flowrl.nodes.policy_loss_base import positive_problems
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceCorrection(Node):
    """The base of the corrections. A subclass says in :meth:`correct` what it makes of the tokens.

    Reports, over the tokens that the policy wrote: ``kl_k1`` and ``kl_k3``, two estimates of the KL divergence of the
    sampler from the trainer; ``comparable``, 1 where sampler and trainer speak of one distribution and 0 where the sampler
    cut its support (top-p, top-k, min-p), had another temperature, or is unknown. (Then the ratio corrects for that, too, but
    only on the tokens that could be sampled: its mean is below 1. ``flow.check()`` warns of it before a run.) And of what
    leaves the node: ``weight_mean``, ``weight_min``, ``weight_max`` and ``effective_sample_size`` over the tokens that count
    still, ``rejected_fraction`` of those that do not.

    Observations have weight 1 and are kept, whatever the columns hold there. A row without a policy token, and a batch
    without rows, are legal; without any policy token nothing is reported.
    """

    kind: ClassVar[str] = "logprobs"
    joins: ClassVar[Mapping[str, Join]] = {"old_logprobs": "subset", "importance_weights": "subset"}

    def correct(self, old: Tensor, rollout: Tensor, mask: Ragged) -> tuple[Tensor | None, Tensor | None]:
        """The factors of the tokens' weights (float ``[num_tokens]``) and which are rejected (bool ``[num_tokens]``); None
        for a correction that has no opinion.

        Args:
            old: float32 ``[num_tokens]`` of the trainer before the update.
            rollout: float32 ``[num_tokens]`` of the sampler.
            mask: uint8 ragged: the tokens that the policy wrote.
        """
        raise NotImplementedError(f"{type(self).__name__} corrects nothing")

    def __call__(
        self, rollouts: Rollouts, old_logprobs: OldLogprobs, importance_weights: ImportanceWeights | None = None
    ) -> ImportanceWeights:
        import torch

        assert not old_logprobs.is_current, "the plan removed log-probs that a correction reads"
        mask = rollouts.loss_mask
        written = mask.values.bool()
        old, rollout = old_logprobs.old_logprobs.values, rollouts.rollout_logprobs.values
        factors, rejected = self.correct(old, rollout, mask)
        weights, keep = torch.ones(len(written)), torch.ones(len(written), dtype=torch.bool)
        if importance_weights is not None:
            weights, keep = importance_weights.weights.values, importance_weights.keep.values.bool()
        weights = weights if factors is None else weights * factors
        keep = keep if rejected is None else keep & ~rejected
        weights = torch.where(written, weights, torch.ones(()))
        keep = keep | ~written
        if bool(written.any()):
            _report(weights[written], keep[written], old[written], rollout[written])
            context.report("comparable", float(comparable_origins(rollouts.origin, old_logprobs.origin)))
        return ImportanceWeights(
            rollouts.prompt_id,
            rollouts.sample_id,
            mask.with_values(weights.to(torch.float32)),
            mask.with_values(keep.to(torch.uint8)),
        )


def _report(weights: Tensor, keep: Tensor, old: Tensor, rollout: Tensor) -> None:
    """Statistics over the tokens that the policy wrote, ``[n]`` each, n > 0."""
    from flowrl.functional.kl import kl_estimate
    from flowrl.functional.metrics import effective_sample_size

    for estimator in ("k1", "k3"):
        context.report(f"kl_{estimator}", float(kl_estimate(rollout, old, estimator).double().mean()))
    context.report("rejected_fraction", 1 - float(keep.double().mean()))
    kept = weights[keep]
    if len(kept):
        context.report("weight_mean", float(kept.double().mean()))
        context.report("weight_min", float(kept.min()))
        context.report("weight_max", float(kept.max()))
    context.report("effective_sample_size", effective_sample_size(kept))


class TruncatedImportance(ImportanceCorrection):
    """Truncated importance sampling (Ionides 2008; arXiv 1802.01561): weight min(π_old/μ, threshold), μ being the sampler.

    Args:
        threshold: the largest weight.
        level: "token": the ratio of each token; "sequence": that of the whole response, the product over its tokens, which
            is unbiased without the threshold and varies a lot.
        low: the smallest weight; None leaves small ones.

    Reports ``truncated_fraction`` of the policy's tokens whose ratio is above the threshold or below ``low``, besides what
    :class:`ImportanceCorrection` does.

    Example::

        weights = TruncatedImportance(2.0)(rollouts, old_logprobs)
        term = PPOLoss()(rollouts, advantages, old_logprobs, importance_weights=weights)
    """

    threshold: float = 2.0
    level: Literal["token", "sequence"] = "token"
    low: float | None = field(default=None, kw_only=True)

    def problems(self) -> Iterable[str]:
        from flowrl.functional.importance import WEIGHT_LEVELS

        yield from positive_problems(threshold=self.threshold)
        yield from _level_problems(self.level, WEIGHT_LEVELS)
        if self.low is not None and not 0 <= self.low <= self.threshold:
            yield f"low is {self.low}; expected 0 <= low <= threshold, or None"

    def correct(self, old: Tensor, rollout: Tensor, mask: Ragged) -> tuple[Tensor, None]:
        from flowrl.functional.importance import importance_weights, truncate_weights

        weights = importance_weights(old, rollout, mask, level=self.level)
        truncated = truncate_weights(weights, self.threshold, self.low)
        _report_share("truncated_fraction", weights != truncated, mask)
        return truncated, None


class IcePop(ImportanceCorrection):
    """A two-sided band (IcePop, arXiv 2510.18855): a token whose ratio π_old/μ lies in it is weighted with the ratio, one
    outside with 0. It still counts among the tokens that the loss is divided by; to leave it out of these too, see
    :class:`RejectionMask`.

    Args:
        low, high: the band.

    Reports ``masked_fraction`` of the policy's tokens outside of the band, besides what :class:`ImportanceCorrection` does.
    """

    low: float = 0.5
    high: float = 5.0

    def problems(self) -> Iterable[str]:
        yield from positive_problems(high=self.high)
        if not 0 <= self.low < self.high:
            yield f"low is {self.low}; expected 0 <= low < high"

    def correct(self, old: Tensor, rollout: Tensor, mask: Ragged) -> tuple[Tensor, None]:
        from flowrl.functional.importance import icepop_weights, importance_weights

        weights = icepop_weights(importance_weights(old, rollout, mask), self.low, self.high)
        _report_share("masked_fraction", weights == 0, mask)
        return weights, None


class RejectionMask(ImportanceCorrection):
    """Leave out tokens, or whole responses, on which sampler and trainer are too far apart, as if the policy had not written
    them; the weights of the others stay as they are. See :func:`flowrl.functional.importance.rejected_tokens`.

    Args:
        threshold: the largest distance that is kept.
        level: "token"; or "sequence_mean" and "sequence_max", where the mean distance of a response, or one token of it,
            rejects the whole response.
        estimator: of the distance, a KL estimate of sampler and trainer with Δ = log μ − log π_old: "k1" Δ, "k2" Δ²/2, "k3"
            exp(−Δ) − 1 + Δ.
        low: the smallest distance that is kept; None takes −threshold, which only k1 can go below.

    A response of which every token is rejected counts for nothing, and so does a batch of such: its loss is 0 and the step
    changes nothing.
    """

    threshold: float
    level: Literal["token", "sequence_mean", "sequence_max"] = "token"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    low: float | None = field(default=None, kw_only=True)

    def problems(self) -> Iterable[str]:
        from flowrl.functional.importance import REJECTION_ESTIMATORS, REJECTION_LEVELS

        yield from positive_problems(threshold=self.threshold)
        yield from _level_problems(self.level, REJECTION_LEVELS)
        if self.estimator not in REJECTION_ESTIMATORS:
            yield f"estimator is {self.estimator!r}; expected one of {', '.join(REJECTION_ESTIMATORS)}"
        if self.low is not None and not self.low < self.threshold:
            yield f"low is {self.low}; expected less than threshold, or None"

    def correct(self, old: Tensor, rollout: Tensor, mask: Ragged) -> tuple[None, Tensor]:
        from flowrl.functional.importance import rejected_tokens

        rejected = rejected_tokens(
            old, rollout, mask, threshold=self.threshold, low=self.low, level=self.level, estimator=self.estimator
        )
        return None, rejected


def _report_share(name: str, tokens: Tensor, mask: Ragged) -> None:
    written = mask.values.bool()
    if bool(written.any()):
        context.report(name, float(tokens[written].double().mean()))


def _level_problems(level: str, known: tuple[str, ...]) -> Iterable[str]:
    if level not in known:
        yield f"level is {level!r}; expected one of {', '.join(known)}"
