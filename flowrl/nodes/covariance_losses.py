"""Clip-Cov and KL-Cov: losses that hold the tokens whose updates cost the most entropy. Which these are is a question
about the whole optimiser batch, so it is answered once a step, before the micro-batches are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl import context
from flowrl.batches import Sequences
from flowrl.nodes.loss import Scorer
from flowrl.nodes.policy_loss_base import PolicyLoss, PolicyTokens, clip_problems, positive_problems
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class MarkedTokens:
    """Some tokens of an optimiser batch, found again by the ids of their rows in any part of it.

    Args:
        row_of: by (prompt_id, sample_id), the row in ``marked``.
        marked: bool ragged in response layout.
    """

    row_of: dict[tuple[int, ...], int]
    marked: Ragged

    @classmethod
    def of(cls, sequences: Sequences, marked: Ragged) -> MarkedTokens:
        """Tokens of these sequences."""
        return cls({row_id: row for row, row_id in enumerate(_row_ids(sequences))}, marked)

    def find(self, sequences: Sequences) -> Tensor:
        """bool ``[num_tokens]``: which tokens of these sequences are marked."""
        import torch

        rows = [self.row_of[row_id] for row_id in _row_ids(sequences)]
        return self.marked.select(torch.tensor(rows, dtype=torch.int64)).values


def _row_ids(sequences: Sequences) -> list[tuple[int, ...]]:
    return list(zip(sequences.prompt_id.tolist(), sequences.sample_id.tolist(), strict=True))


class CovarianceLoss(PolicyLoss):
    """What the two share: marking tokens by the policy as it is before the optimiser step."""

    share: float = field(default=2e-4, kw_only=True)

    def problems(self) -> list[str]:
        wrong = [] if 0 < self.share <= 1 else [f"share is {self.share}; expected 0 < share <= 1"]
        return super().problems() + wrong

    def marked(self, tokens: PolicyTokens, ids: Tensor) -> Tensor:
        """bool ``[num_tokens]``: the tokens of the whole optimiser batch to hold."""
        raise NotImplementedError(f"{type(self).__name__} does not say which tokens it marks")

    def prepare(self, policy: Scorer, **inputs: Any) -> MarkedTokens:
        mask, rollouts = self.mask(**inputs), inputs["rollouts"]
        tokens = PolicyTokens.of(mask, policy.logprobs(rollouts).detach(), **inputs)
        marked = self.marked(tokens, rollouts.row_ids)
        return MarkedTokens.of(rollouts, mask.with_values(marked))


class ClipCovLoss(CovarianceLoss):
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, without the gradient of a few random tokens of large
    covariance between advantage and log-prob; see :func:`flowrl.functional.covariance.clip_cov_tokens`.

    Args:
        clip: the ratio counts down to 1 − clip.
        clip_high: and up to 1 + clip_high; None takes clip.
        share: of the tokens that count, int(n · share) are detached, at least one (if any qualifies).
        low, high: a token qualifies with a covariance between the two, and a ratio that is not clipped.

    Which of them is a draw from (seed, the updater's label, iteration, pull, ids of the row, place of the token): neither
    micro-batches nor the order of rows change it. Several epochs on one batch draw the same numbers.

    Metrics: ``clip_fraction``, ``detached_fraction``. Needs one more forward pass over the batch each optimiser step.
    """

    clip: float = 0.2
    clip_high: float | None = None
    low: float = field(default=1.0, kw_only=True)
    high: float = field(default=5.0, kw_only=True)

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"share": 0.2, "low": 0.01},
        {"share": 0.5, "low": -1.0, "clip_high": 0.28},
    )

    def problems(self) -> list[str]:
        found = super().problems() + clip_problems(self.clip, self.clip_high, below=1)
        return found + ([] if self.low < self.high else [f"low is {self.low}; expected less than high, {self.high}"])

    def marked(self, tokens: PolicyTokens, ids: Tensor) -> Tensor:
        from flowrl.functional.covariance import clip_cov_tokens

        here = context.current_step()
        return clip_cov_tokens(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            tokens.mask,
            key=context.random_key(here.seed, here.label, here.iteration, here.pull),
            share=self.share,
            low=self.low,
            high=self.high,
            clip_low=self.clip,
            clip_high=self.clip_high,
            ids=ids,
        )

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.covariance import clip_cov_loss

        detached = tokens.constants.find(tokens.rollouts)
        losses, clipped = clip_cov_loss(
            tokens.logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            detached,
            clip_low=self.clip,
            clip_high=self.clip_high,
        )
        return losses, {"clip_fraction": clipped, "detached_fraction": detached.to(losses.dtype)}


class KLCovLoss(CovarianceLoss):
    """KL-Cov (arXiv 2505.22617): −A·ρ without a clip, and a penalty on the change of log π for the tokens of largest
    covariance between advantage and log-prob; see :func:`flowrl.functional.covariance.kl_cov_tokens`.

    Args:
        coef: weight of the penalty \\|log π − log π_old\\|.
        share: of the tokens that count, int(n · share) are penalised, at least one.

    Metric: ``penalised_fraction``. Needs one more forward pass over the batch each optimiser step.
    """

    coef: float = 1.0
    share: float = field(default=2e-3, kw_only=True)

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"share": 0.2}, {"share": 0.5, "coef": 0.1})

    def problems(self) -> list[str]:
        return super().problems() + positive_problems(coef=self.coef)

    def marked(self, tokens: PolicyTokens, ids: Tensor) -> Tensor:
        from flowrl.functional.covariance import kl_cov_tokens

        return kl_cov_tokens(tokens.logprobs, tokens.advantages, tokens.mask, share=self.share, ids=ids)

    def surrogate(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.covariance import kl_cov_loss

        penalised = tokens.constants.find(tokens.rollouts)
        losses = kl_cov_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, penalised, coef=self.coef)
        return losses, {"penalised_fraction": penalised.to(losses.dtype)}
