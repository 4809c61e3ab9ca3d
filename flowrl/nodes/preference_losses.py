"""Loss terms of preference learning: DPO and its variants, SimPO, ORPO, KTO, and Bradley–Terry for reward models. The
formulas are in :mod:`flowrl.functional.preferences`.

Pairs are averaged over pairs, feedback over rows. A sequence in which the policy wrote no token has log-prob 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from flowrl.batches import Feedback, Preferences, RefLogprobs
from flowrl.errors import GraphError
from flowrl.nodes.loss import Current, LossTerm, Scorer, Sums
from flowrl.nodes.sequence_loss import PairLoss, Pairs, RowLoss

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.ragged import Ragged

DPOVariant = Literal["sigmoid", "ipo", "hinge", "robust"]


def _sums(values: Tensor, mask: Ragged) -> Tensor:
    """``[num_rows]``: the sum of ``values`` ``[num_tokens]`` over the tokens that count."""
    return mask.with_values(values).sum_rows(mask)


def _num_tokens(mask: Ragged) -> Tensor:
    """float32 ``[num_rows]``: the tokens that count, at least 1, to divide by."""
    import torch

    return mask.with_values(mask.values.to(torch.float32)).sum_rows().clamp(min=1)


def _pair_metrics(chosen: Tensor, rejected: Tensor, what: str = "reward") -> dict[str, Tensor]:
    return {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        f"chosen_{what}": chosen,
        f"rejected_{what}": rejected,
    }


def _logprob_metrics(current: Current, pairs: Pairs) -> dict[str, Tensor]:
    logprobs = current.sequence_logprobs().detach()
    return {"chosen_logprob": logprobs[pairs.chosen], "rejected_logprob": logprobs[pairs.rejected]}


def _positive(**settings: float) -> list[str]:
    return [f"{name} is {value}; expected more than 0" for name, value in settings.items() if not value > 0]


def _not_negative(**settings: float) -> list[str]:
    return [f"{name} is {value}; expected at least 0" for name, value in settings.items() if not value >= 0]


def _smoothing(label_smoothing: float) -> list[str]:
    wrong = not 0 <= label_smoothing < 0.5
    return [f"label_smoothing is {label_smoothing}; expected 0 <= label_smoothing < 0.5"] if wrong else []


class DPOLoss(PairLoss):
    """Direct preference optimisation (arXiv 2305.18290) and its variants; see
    :func:`flowrl.functional.preferences.dpo_loss`.

    Args:
        beta: how closely the policy is held to the reference.
        loss: "sigmoid" (DPO), "ipo" (arXiv 2310.12036), "hinge" (SLiC, arXiv 2305.10425), "robust" (arXiv 2403.00409).
        label_smoothing: the share of labels that are thought to be wrong, below ½ (with "sigmoid" the conservative DPO).
        length_normalised: compare means over tokens instead of sums. (The IPO paper writes sums; with means, as it is often
            run, its margin 1 / (2 beta) is one a token.)
        reference_free: compare the policy's own log-probs; ``ref_logprobs`` are then left out.

    Metrics, as means over pairs: ``accuracy`` (the chosen has the higher implicit reward β log π/π_ref), ``margin`` (by how
    much), ``chosen_reward``, ``rejected_reward``, ``chosen_logprob``, ``rejected_logprob``.

    Example::

        ref_logprobs = ReferenceLogprobs(actor.frozen())(preferences)
        Updater(actor)(DPOLoss(beta=0.1)(preferences, ref_logprobs))
    """

    beta: float = 0.1
    loss: DPOVariant = "sigmoid"
    label_smoothing: float = 0.0
    length_normalised: bool = False
    reference_free: bool = False

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"label_smoothing": 0.1},
        {"loss": "ipo", "beta": 0.5, "length_normalised": True},
        {"loss": "hinge", "beta": 0.3},
        {"loss": "robust", "label_smoothing": 0.2},
        {"reference_free": True},
    )

    def problems(self) -> list[str]:
        found = _positive(beta=self.beta) + _smoothing(self.label_smoothing)
        known = get_args(DPOVariant)
        return found + ([] if self.loss in known else [f"loss is {self.loss!r}; expected one of {', '.join(known)}"])

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        if self.reference_free and "ref_logprobs" in given:
            yield "reference_free is True and ref_logprobs are given; expected one of them"
        if not self.reference_free and "ref_logprobs" not in given:
            yield (
                "ref_logprobs are missing; expected ReferenceLogprobs(actor.frozen())(preferences), or reference_free=True"
            )

    def __call__(self, preferences: Preferences, ref_logprobs: RefLogprobs | None = None) -> LossTerm:
        for problem in self.wiring_problems(frozenset({"ref_logprobs"} if ref_logprobs is not None else ())):
            raise GraphError(f"DPOLoss: {problem}")
        return self.term(preferences=preferences, ref_logprobs=ref_logprobs)

    def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.preferences import dpo_loss

        reference: RefLogprobs | None = inputs.get("ref_logprobs")
        ratios = current.at_policy_tokens().logprobs
        if reference is not None:  # token by token: what is summed is then small, and so is what rounding loses
            ratios = ratios - reference.ref_logprobs.values
        scores = _sums(ratios, current.loss_mask)
        if self.length_normalised:
            scores = scores / _num_tokens(current.loss_mask)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        losses = dpo_loss(chosen, rejected, beta=self.beta, loss=self.loss, label_smoothing=self.label_smoothing)
        metrics = _pair_metrics(self.beta * chosen.detach(), self.beta * rejected.detach())
        return losses, metrics | _logprob_metrics(current, pairs)


class SimPOLoss(PairLoss):
    """SimPO (arXiv 2405.14734): no reference; means over tokens, and a margin that the chosen must win by. See
    :func:`flowrl.functional.preferences.simpo_loss`.

    Args:
        beta: the scale of the reward, β times the mean log-prob of a token.
        gamma: the margin, in units of the reward (the paper also states it as the ratio gamma / beta).
        label_smoothing: the share of labels that are thought to be wrong, below ½.

    Metrics: as :class:`DPOLoss`; a reward is β times the mean log-prob.
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"gamma": 0.3, "label_smoothing": 0.1})

    def problems(self) -> list[str]:
        return _positive(beta=self.beta) + _not_negative(gamma=self.gamma) + _smoothing(self.label_smoothing)

    def __call__(self, preferences: Preferences) -> LossTerm:
        return self.term(preferences=preferences)

    def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.preferences import simpo_loss

        means = current.sequence_logprobs() / _num_tokens(current.loss_mask)
        chosen, rejected = means[pairs.chosen], means[pairs.rejected]
        losses = simpo_loss(chosen, rejected, beta=self.beta, gamma=self.gamma, label_smoothing=self.label_smoothing)
        metrics = _pair_metrics(self.beta * chosen.detach(), self.beta * rejected.detach())
        return losses, metrics | _logprob_metrics(current, pairs)


class ORPOLoss(PairLoss):
    """ORPO (arXiv 2403.07691): imitate the chosen, and raise its odds over those of the rejected; no reference. See
    :func:`flowrl.functional.preferences.orpo_loss`.

    Args:
        lam: the weight of the odds ratio.

    Metrics, as means over pairs: ``nll`` (of a token of the chosen), ``log_odds_ratio``, ``accuracy`` (the chosen has the
    higher mean log-prob), ``chosen_logprob``, ``rejected_logprob``.
    """

    lam: float = 0.1

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"lam": 1.0})

    def problems(self) -> list[str]:
        return _not_negative(lam=self.lam)

    def __call__(self, preferences: Preferences) -> LossTerm:
        return self.term(preferences=preferences)

    def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.preferences import orpo_loss

        means = current.sequence_logprobs() / _num_tokens(current.loss_mask)
        chosen, rejected = means[pairs.chosen], means[pairs.rejected]
        losses, log_odds_ratio = orpo_loss(chosen, rejected, lam=self.lam)
        metrics = {
            "nll": -chosen.detach(),
            "log_odds_ratio": log_odds_ratio,
            "accuracy": (chosen > rejected).to(chosen.dtype),
        }
        return losses, metrics | _logprob_metrics(current, pairs)


class BradleyTerryLoss(PairLoss):
    """The likelihood of preferences under a reward model's scores: what trains a ``RewardModel``. See
    :func:`flowrl.functional.preferences.bradley_terry_loss`.

    Args:
        margin: by how much the chosen must win (arXiv 2307.09288).
        label_smoothing: the share of labels that are thought to be wrong, below ½.
        center_coef: weight of a term that holds the scores around 0 (arXiv 2312.09244).

    Metrics, as means over pairs: ``accuracy`` (the chosen has the higher score), ``margin`` (by how much),
    ``chosen_score``, ``rejected_score``.

    Example::

        Updater(RewardModel("Qwen/Qwen3-0.6B"))(BradleyTerryLoss()(preferences))
    """

    margin: float = 0.0
    label_smoothing: float = 0.0
    center_coef: float = 0.0

    requires: ClassVar[frozenset[str]] = frozenset({"scores"})
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"margin": 0.5},
        {"label_smoothing": 0.1, "center_coef": 0.01},
    )

    def problems(self) -> list[str]:
        finite = abs(self.margin) < float("inf")
        found = [] if finite else [f"margin is {self.margin}; expected a finite number"]
        return found + _smoothing(self.label_smoothing) + _not_negative(center_coef=self.center_coef)

    def __call__(self, preferences: Preferences) -> LossTerm:
        return self.term(preferences=preferences)

    def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.preferences import bradley_terry_loss

        chosen, rejected = current.scores[pairs.chosen], current.scores[pairs.rejected]
        losses = bradley_terry_loss(
            chosen,
            rejected,
            self.margin,
            label_smoothing=self.label_smoothing,
            center_coef=self.center_coef,
        )
        return losses, _pair_metrics(chosen.detach(), rejected.detach(), "score")


class KTOLoss(RowLoss):
    """KTO (arXiv 2402.01306): learn from completions that were liked or not, each for itself. See
    :func:`flowrl.functional.preferences.kto_loss`.

    The reference point z₀ is the mean log-ratio of mismatched completions over the whole optimiser batch, taken once before
    the step (a forward pass more): micro-batches cannot change it. With one prompt in the batch there is no mismatched
    completion, and z₀ is 0: see :class:`flowrl.nodes.pairs.MismatchedCompletions`.

    Args:
        beta: how closely the policy is held to the reference.
        desirable_weight: λ_D. The weights should make up for a batch that has more of one kind.
        undesirable_weight: λ_U.

    Metrics, as means over rows: ``reference_point``, and over the desirable or undesirable ones ``desirable_reward``,
    ``undesirable_reward`` (β log π/π_ref), ``desirable_logprob``, ``undesirable_logprob``; ``accuracy`` is the share of rows
    whose reward lies on the right side of β z₀.

    Example::

        mismatched = MismatchedCompletions()(feedback)
        reference = ReferenceLogprobs(actor.frozen())
        loss = KTOLoss()(feedback, reference(feedback), mismatched=mismatched, mismatched_ref=reference(mismatched))
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    )

    def problems(self) -> list[str]:
        return _positive(beta=self.beta) + _not_negative(
            desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight
        )

    def __call__(
        self, feedback: Feedback, ref_logprobs: RefLogprobs, *, mismatched: Feedback, mismatched_ref: RefLogprobs
    ) -> LossTerm:
        return self.term(
            feedback=feedback, ref_logprobs=ref_logprobs, mismatched=mismatched, mismatched_ref=mismatched_ref
        )

    def prepare(self, policy: Scorer, **inputs: Any) -> Tensor:
        """float64 scalar: z₀."""
        from flowrl.functional.preferences import kto_reference_point

        mismatched: Feedback = inputs["mismatched"]
        mask = mismatched.loss_mask
        ratios = policy.logprobs(mismatched) - inputs["mismatched_ref"].ref_logprobs.values
        totals = _sums(ratios, mask)
        return kto_reference_point(totals, totals.new_zeros(len(totals)))

    def row_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from flowrl.functional.preferences import kto_loss

        point: Tensor = inputs["constants"]
        gains = self._log_ratios(current, inputs)
        liked = inputs["feedback"].desirable.bool()
        losses = kto_loss(
            gains,
            torch.zeros_like(gains),
            liked,
            point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        right = torch.where(liked, gains > point, gains < point)
        return losses, {
            "reference_point": torch.full_like(gains, float(point)),
            "accuracy": right.to(losses.dtype),
        }

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        import torch

        out = super().sums(current, constants, **inputs)
        liked = inputs["feedback"].desirable.bool()
        rewards = self.beta * self._log_ratios(current, inputs).detach()
        logprobs = current.sequence_logprobs().detach()
        for name, rows in (("desirable", liked), ("undesirable", ~liked)):
            number = rows.sum().to(torch.float64)
            out[f"{name}_reward"] = (rewards[rows].sum(), number)
            out[f"{name}_logprob"] = (logprobs[rows].sum(), number)
        return out

    def _log_ratios(self, current: Current, inputs: Mapping[str, Any]) -> Tensor:
        """``[num_rows]``: log π − log π_ref of each row, summed token by token."""
        ratios = current.at_policy_tokens().logprobs - inputs["ref_logprobs"].ref_logprobs.values
        return _sums(ratios, current.loss_mask)
