"""Losses over the whole vocabulary: the exact KL to a reference, and distillation from a teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.batches import Batch, Sequences
from flowrl.models import AnyModel, State
from flowrl.nodes.base import Join, Node
from flowrl.nodes.logprobs import scoring_temperature
from flowrl.nodes.loss import Current, Divergence, LossTerm, TokenLoss
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor


class FullKLLoss(TokenLoss):
    """The divergence of the current policy from a reference, exact over the vocabulary, at each token of the policy: the
    KL penalty of RLHF without an estimator.

    The updater holds both Models: their logits exist side by side, a slice of positions at a time, and are computed
    again for the backward pass. The gradient is that of each token's divergence; none flows through the choice of the
    sampled tokens.

    Args:
        reference: the other Model; ``actor.frozen()``, an ``Ema``, or any Model with the same vocabulary.
        coef: factor of the divergence; a number, or a ``State`` that a controller writes.
        objective: "reverse_kl", "forward_kl" or "jsd"; see :func:`flowrl.functional.divergence.divergence`.
        beta: the weight of the reference in the mixture of "jsd".

    Metric: the name of the objective, its mean over policy tokens without the factor.
    """

    reference: AnyModel
    coef: float | State = 1.0
    objective: str = field(default="reverse_kl", kw_only=True)
    beta: float = field(default=0.5, kw_only=True)

    requires: ClassVar[frozenset[str]] = frozenset({"divergence"})
    wants_kind: ClassVar[str | None] = "policy"
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"coef": 0.1}, {"objective": "jsd", "beta": 0.3})

    def problems(self) -> list[str]:
        found = super().problems() + list(divergence_problems(self.objective, self.beta))
        if not isinstance(self.coef, State) and not self.coef >= 0:
            found.append(f"coef is {self.coef}; expected at least 0")
        return found

    def divergence(self) -> Divergence:
        return Divergence(self.reference, self.objective, self.beta)

    def __call__(self, sequences: Sequences) -> LossTerm:
        return self.term(sequences=sequences)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        assert not isinstance(self.coef, State)
        return self.coef * current.divergence, {self.objective: current.divergence.detach()}


class DistillLoss(TokenLoss):
    """Distil a teacher into the policy: their divergence at each token of the responses, exact over the vocabulary. The
    updater holds both Models; see :class:`FullKLLoss`.

    On the student's own rollouts it is on-policy distillation (Agarwal et al., arXiv 2306.13649; with "reverse_kl" the
    per-token part of MiniLLM, arXiv 2306.08543), on demonstrations word-level knowledge distillation (Kim & Rush, arXiv
    1606.07947).

    Args:
        teacher: a Model with the same vocabulary.
        objective: "reverse_kl" seeks the teacher's modes, "forward_kl" covers them, "jsd" lies between.
        beta: the weight of the teacher in the mixture of "jsd".

    Metric: the name of the objective, its mean over policy tokens.
    """

    teacher: AnyModel
    objective: str = field(default="reverse_kl", kw_only=True)
    beta: float = field(default=0.5, kw_only=True)

    requires: ClassVar[frozenset[str]] = frozenset({"divergence"})
    wants_kind: ClassVar[str | None] = "policy"
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"objective": "forward_kl"})

    def problems(self) -> list[str]:
        return super().problems() + list(divergence_problems(self.objective, self.beta))

    def divergence(self) -> Divergence:
        return Divergence(self.teacher, self.objective, self.beta)

    def __call__(self, sequences: Sequences) -> LossTerm:
        return self.term(sequences=sequences)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return current.divergence, {self.objective: current.divergence.detach()}


@dataclass(frozen=True, eq=False, repr=False)
class TopLogprobs(Batch):
    """The likeliest tokens of a teacher at each response token: what travels where the student's updater cannot hold
    the teacher.

    Args:
        token_ids: int64 ragged: ``k`` values for each response token, likeliest first.
        logprobs: float32 ragged, of these tokens.
        k: how many.
    """

    prompt_id: Tensor
    sample_id: Tensor
    token_ids: Ragged
    logprobs: Ragged
    k: int

    column_types: ClassVar[Mapping[str, str]] = {
        "prompt_id": "int64",
        "sample_id": "int64",
        "token_ids": "int64 ragged",
        "logprobs": "float32 ragged",
    }


class TeacherTopK(Node):
    """Score responses with a teacher, and keep the ``k`` likeliest tokens at each place.

    Args:
        teacher: the teacher.
        k: tokens kept.

    Shapes: ``k`` values for each response token. The temperature is that of the responses.
    """

    teacher: AnyModel
    k: int = 64

    kind: ClassVar[str] = "logprobs"
    wants_kind: ClassVar[str | None] = "policy"

    def problems(self) -> Iterable[str]:
        if self.k < 1:
            yield f"k is {self.k}; expected at least 1"

    def __call__(self, sequences: Sequences) -> TopLogprobs:
        engine = self.teacher.bound_engine()
        ids, logprobs = engine.top_logprobs(sequences, self.k, temperature=scoring_temperature(sequences))
        offsets = sequences.response_tokens.offsets * ids.shape[1]
        return TopLogprobs(
            sequences.prompt_id,
            sequences.sample_id,
            Ragged(ids.flatten(), offsets),
            Ragged(logprobs.flatten(), offsets),
            ids.shape[1],
        )


class TopKDistillLoss(TokenLoss):
    """Distil a teacher of which only the ``k`` likeliest tokens are known; all others count as one more token, so that
    it is a lower bound of the divergence over the vocabulary; see
    :func:`flowrl.functional.divergence.top_k_divergence`.

    Args:
        objective: "forward_kl", "reverse_kl" or "jsd".
        beta: the weight of the teacher in the mixture of "jsd".

    Metric: the name of the objective, its mean over policy tokens.
    """

    objective: str = field(default="forward_kl", kw_only=True)
    beta: float = field(default=0.5, kw_only=True)

    requires: ClassVar[frozenset[str]] = frozenset({"candidates"})
    joins: ClassVar[Mapping[str, Join]] = {"teacher": "subset"}
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"objective": "reverse_kl"},
        {"objective": "jsd", "beta": 0.3},
    )

    def problems(self) -> list[str]:
        return super().problems() + list(divergence_problems(self.objective, self.beta))

    def __call__(self, sequences: Sequences, teacher: TopLogprobs) -> LossTerm:
        return self.term(sequences=sequences, teacher=teacher)

    def candidates(self, **inputs: Any) -> Tensor:
        teacher: TopLogprobs = inputs["teacher"]
        return teacher.token_ids.values.reshape(-1, teacher.k)

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.functional.divergence import top_k_divergence

        teacher: TopLogprobs = inputs["teacher"]
        logprobs = teacher.logprobs.values.reshape(-1, teacher.k).to(current.candidates.dtype)
        losses = top_k_divergence(current.candidates, logprobs, self.objective, self.beta)
        return losses, {self.objective: losses.detach()}


def divergence_problems(objective: str, beta: float) -> Iterable[str]:
    """What is wrong with the settings of a divergence, a sentence each."""
    from flowrl.functional.divergence import DIVERGENCES

    if objective not in DIVERGENCES:
        yield f"objective is {objective!r}; expected one of {', '.join(DIVERGENCES)}"
    if not 0 < beta < 1:
        yield f"beta is {beta}; expected 0 < beta < 1"
