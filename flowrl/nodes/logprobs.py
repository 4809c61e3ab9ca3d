"""Log-prob nodes: score the responses under the policy before the update, or under a reference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from flowrl import context
from flowrl.batches import LogprobOrigin, OldLogprobs, RefLogprobs, Rollouts, Sequences
from flowrl.models import AnyModel
from flowrl.nodes.base import Node
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from flowrl.runtime.engines.base import TokenScores


class _Logprobs(Node):
    """What the two log-prob nodes share: a Model and a temperature."""

    model: AnyModel
    temperature: float | None = None

    kind: ClassVar[str] = "logprobs"
    wants_kind: ClassVar[str | None] = "policy"

    def problems(self) -> Iterable[str]:
        if self.temperature is not None and not self.temperature > 0:
            yield f"temperature is {self.temperature}; expected more than 0, or None for that of the rollouts"

    def _temperature(self, sequences: Sequences) -> float:
        return scoring_temperature(sequences) if self.temperature is None else self.temperature

    def _score(self, sequences: Sequences, **more: bool) -> tuple[TokenScores, LogprobOrigin]:
        engine = self.model.bound_engine()
        temperature = self._temperature(sequences)
        origin = engine.origin(temperature=temperature)
        return engine.logprobs(sequences, temperature=temperature, **more), origin


class PolicyLogprobs(_Logprobs):
    """Log-probs of the responses under the policy before the update.

    Args:
        model: the policy that is about to be trained.
        temperature: divides the logits; None takes the one that the responses were sampled at (1 where they
            were taken greedily, or are recorded data of unknown origin).
        sum_pi_squared: also compute Σ_v π(v)² at each token, which ``OptimalTokenBaseline`` reads.

    Shapes: one value a response token. Where the sampler's own log-probs are comparable (no truncated
    support, the same temperature), reports how far they are from the trainer's: ``rollout_logprob_gap`` (mean
    over policy tokens) and ``rollout_logprob_gap_max``.
    """

    sum_pi_squared: bool = False

    def __call__(self, sequences: Sequences) -> OldLogprobs:
        scores, origin = self._score(sequences, **({"sum_pi_squared": True} if self.sum_pi_squared else {}))
        _report_gap(sequences, scores.logprobs, origin)
        return OldLogprobs(
            sequences.prompt_id, sequences.sample_id, scores.logprobs, origin, sum_pi_squared=scores.sum_pi_squared
        )

    def placeholder(self, sequences: Sequences) -> OldLogprobs:
        """What stands on the edge when the plan leaves this call out: no values, only the promise that they are
        the current policy's own (:meth:`flowrl.nodes.loss.Current.old`)."""
        import torch

        layout = sequences.response_tokens
        missing = layout.with_values(torch.full((len(layout.values),), torch.nan))
        origin = self.model.bound_engine().origin(temperature=self._temperature(sequences))
        return OldLogprobs(sequences.prompt_id, sequences.sample_id, missing, origin, is_current=True)


class ReferenceLogprobs(_Logprobs):
    """Log-probs of the responses under a reference, such as ``actor.frozen()``.

    Args:
        model: the reference.
        temperature: divides the logits; None takes the one that the responses were sampled at (1 where they
            were taken greedily, or are recorded data of unknown origin).
    """

    def __call__(self, sequences: Sequences) -> RefLogprobs:
        scores, origin = self._score(sequences)
        return RefLogprobs(sequences.prompt_id, sequences.sample_id, scores.logprobs, origin)


def scoring_temperature(sequences: Sequences) -> float:
    """The temperature at which these responses were sampled; 1 for greedy ones and where it is unknown."""
    origin = sequences.origin if isinstance(sequences, Rollouts) else None
    return origin.temperature if origin is not None and origin.temperature > 0 else 1.0


def comparable_origins(rollouts: LogprobOrigin | None, trainer: LogprobOrigin) -> bool:
    """Whether sampler and trainer speak of one distribution: full support, the same temperature."""
    return rollouts is not None and not rollouts.truncated and rollouts.temperature == trainer.temperature


def _report_gap(sequences: Sequences, logprobs: Ragged, origin: LogprobOrigin) -> None:
    if not (isinstance(sequences, Rollouts) and comparable_origins(sequences.origin, origin)):
        return
    gap = (sequences.rollout_logprobs.values - logprobs.values).abs()[sequences.loss_mask.values.bool()]
    if len(gap):
        context.report("rollout_logprob_gap", float(gap.mean()))
        context.report("rollout_logprob_gap_max", float(gap.max()))
