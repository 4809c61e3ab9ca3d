"""What travels on the edges: one frozen dataclass per role, with ragged columns inside.

Rows carry ids: ``prompt_id`` is minted by the source, one per draw, and ``sample_id`` is the index of a sample among
those of its prompt. A node's inputs are aligned by these ids, never by position. Units are in the types: a
:class:`Prompts` has a row per prompt, a :class:`Sequences` a row per sample, and a :class:`Ragged` inside has a value
per token.

**Response layout**: per-token columns (``rollout_logprobs``, ``values``, ``advantages``, …) have one value for every
token after the prompt, observations included. ``loss_mask`` says which of them the policy produced. Masks come from
spans and lengths, never from scanning token values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from flowrl.alignment import align
from flowrl.columns import Batch, check_lengths
from flowrl.errors import BatchError
from flowrl.origins import LogprobOrigin
from flowrl.ragged import Ragged
from flowrl.spans import SpanKind, Spans

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Advantages",
    "Batch",
    "Demonstrations",
    "Feedback",
    "FinishReason",
    "ImportanceWeights",
    "LogprobOrigin",
    "OldLogprobs",
    "Preferences",
    "Prompts",
    "RefLogprobs",
    "Rewards",
    "Rollouts",
    "Sequences",
    "SpanKind",
    "Spans",
    "TrainStats",
    "Values",
    "align",
]

_PROMPT_IDS: Mapping[str, str] = {"prompt_id": "int64"}
_IDS: Mapping[str, str] = {"prompt_id": "int64", "sample_id": "int64"}


class FinishReason(enum.IntEnum):
    """Why a response ended: a stop token was sampled, the length limit cut it, or it was given up."""

    STOP = 0
    LENGTH = 1
    ABORTED = 2


@dataclass(frozen=True, eq=False, repr=False)
class Prompts(Batch):
    """What the policy is asked, one row a prompt.

    Args:
        prompt_id: int64 ``[num_rows]``, unique per draw: two identical prompts, or one prompt in two epochs, differ.
        messages: per row a text, or a list of ``{"role", "content"}``.
        extras: other columns of the data set by name (``answer``, …), one Python object a row.
    """

    prompt_id: Tensor
    messages: tuple[Any, ...]
    extras: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    unit: ClassVar[str] = "prompts"
    column_types: ClassVar[Mapping[str, str]] = {**_PROMPT_IDS, "messages": "objects", "extras": "dict of objects"}


@dataclass(frozen=True, eq=False, repr=False)
class Sequences(Batch):
    """Token sequences with provenance, one row a sample. Scorers annotate any of its kinds.

    Args:
        prompt_id: int64 ``[num_rows]``.
        sample_id: int64 ``[num_rows]``, the index among the samples of the prompt.
        tokens: int64 ragged, the whole sequence: prompt, then everything after it.
        spans: who wrote which tokens; the lengths of a row's spans add up to its tokens.
    """

    prompt_id: Tensor
    sample_id: Tensor
    tokens: Ragged
    spans: Spans

    column_types: ClassVar[Mapping[str, str]] = {**_IDS, "tokens": "int64 ragged"}

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = (self.spans.lengths.sum_rows() != self.tokens.lengths).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            raise BatchError(
                f"{type(self).__name__}: the spans of row {row} do not cover its tokens",
                expected=f"{int(self.tokens.lengths[row])} tokens",
                received=f"spans over {int(self.spans.lengths.sum_rows()[row])}",
            )

    @property
    def span_kind_of_token(self) -> Ragged:
        """uint8 ragged over all tokens: a :class:`SpanKind` each."""
        import torch

        kinds = torch.repeat_interleave(self.spans.kinds.values, self.spans.lengths.values)
        return self.tokens.with_values(kinds)

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 ``[num_rows]``: tokens before the first one that is not of the prompt."""
        import torch

        kinds = self.span_kind_of_token
        after = kinds.values != SpanKind.PROMPT
        place = torch.where(after, kinds.position_of_value, torch.iinfo(torch.int64).max)
        return self.tokens.lengths.scatter_reduce(0, kinds.row_of_value, place, "amin")

    @property
    def response_lengths(self) -> Tensor:
        """int64 ``[num_rows]``: tokens after the prompt, observations included."""
        return self.tokens.lengths - self.prompt_lengths

    def over_response(self, column: Ragged) -> Ragged:
        """Of a per-token column over whole sequences, the part in response layout."""
        return column.slice_rows(self.prompt_lengths, self.response_lengths)

    @property
    def response_tokens(self) -> Ragged:
        """int64 ragged, response layout."""
        return self.over_response(self.tokens)

    @property
    def loss_mask(self) -> Ragged:
        """uint8 ragged, response layout: 1 where the policy wrote the token."""
        import torch

        kinds = self.over_response(self.span_kind_of_token)
        return kinds.with_values((kinds.values == SpanKind.POLICY).to(torch.uint8))


@dataclass(frozen=True, eq=False, repr=False)
class Rollouts(Sequences):
    """What the policy answered.

    Args:
        rollout_logprobs: float32 ragged, response layout: the sampler's own log-prob of each token, under the
            distribution that it sampled from; 0 at observations.
        finish_reason: uint8 ``[num_rows]``, a :class:`FinishReason`.
        messages: the prompt of each row, as in :class:`Prompts`.
        response_text: the decoded response of each row; derived, never tokenised again.
        extras: the prompts' other columns.
        origin: of ``rollout_logprobs``; None for recorded data of unknown origin.
    """

    rollout_logprobs: Ragged
    finish_reason: Tensor
    messages: tuple[Any, ...]
    response_text: tuple[str, ...]
    extras: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    origin: LogprobOrigin | None = None

    column_types: ClassVar[Mapping[str, str]] = {
        **Sequences.column_types,
        "rollout_logprobs": "float32 ragged",
        "finish_reason": "uint8",
        "messages": "objects",
        "response_text": "objects",
        "extras": "dict of objects",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(
            "Rollouts", "rollout_logprobs", self.rollout_logprobs, self.response_lengths, "a value a response token"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Demonstrations(Sequences):
    """Sequences to imitate: every token after the prompt is a target."""


@dataclass(frozen=True, eq=False, repr=False)
class Preferences(Sequences):
    """Sequences in pairs: of the rows of one ``pair_id`` one is chosen, one rejected.

    Args:
        pair_id: int64 ``[num_rows]``.
        chosen: uint8 ``[num_rows]``.
    """

    pair_id: Tensor
    chosen: Tensor

    column_types: ClassVar[Mapping[str, str]] = {**Sequences.column_types, "pair_id": "int64", "chosen": "uint8"}


@dataclass(frozen=True, eq=False, repr=False)
class Feedback(Sequences):
    """Sequences that somebody liked or did not, each for itself.

    Args:
        desirable: uint8 ``[num_rows]``: 1 for what the policy should say more often.
    """

    desirable: Tensor

    column_types: ClassVar[Mapping[str, str]] = {**Sequences.column_types, "desirable": "uint8"}


@dataclass(frozen=True, eq=False, repr=False)
class Rewards(Batch):
    """What the answers are worth.

    Args:
        components: by name, float32 ``[num_rows]``, a number a row.
        token_components: by name, float32 ragged in response layout, a number a token.
        valid: uint8 ``[num_rows]``: 0 where the reward could not be had; its numbers then mean nothing.
        reasons: per row why it is invalid, "" where it is valid.
    """

    prompt_id: Tensor
    sample_id: Tensor
    components: dict[str, Tensor]
    valid: Tensor
    reasons: tuple[str, ...]
    token_components: dict[str, Ragged] = field(default_factory=dict)

    column_types: ClassVar[Mapping[str, str]] = {
        **_IDS,
        "components": "dict of float32",
        "valid": "uint8",
        "reasons": "objects",
        "token_components": "dict of float32 ragged",
    }

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rows of all parts, in order. A part without a valid row says nothing about which components there are:
        it is given those of the others, all NaN."""
        valid = [part for part in parts if bool(part.valid.any())]
        return super().concat([p if bool(p.valid.any()) else p._like(valid[0]) for p in parts] if valid else parts)

    def _like(self, other: Rewards) -> Self:
        """These rows, all invalid, with the components of another part."""
        import torch

        layout = next(iter(self.token_components.values()), None)
        if other.token_components and layout is None:
            return self  # the layout of its tokens is not known here: the parts differ, which is an error
        rows = dict.fromkeys(other.components, torch.full((self.num_rows,), torch.nan))
        tokens = dict(self.token_components)
        if layout is not None:
            nothing = layout.with_values(torch.full_like(layout.values, torch.nan))
            tokens = dict.fromkeys(other.token_components, nothing)
        return replace(self, components=rows, token_components=tokens)

    @property
    def totals(self) -> Tensor:
        """float32 ``[num_rows]``: the sum of all components; NaN where the row is invalid."""
        import torch

        total = torch.zeros(self.num_rows)
        for component in self.components.values():
            total = total + component
        for component in self.token_components.values():
            total = total + component.sum_rows()
        return torch.where(self.valid.bool(), total, torch.nan)

    def over_tokens(self, loss_mask: Ragged) -> Ragged:
        """float32 ragged in response layout: token components where they are, row components at the last policy token.

        A row without a policy token keeps its token components alone. Invalid rows are NaN throughout.
        """
        import torch

        out = torch.zeros(len(loss_mask.values))
        for component in self.token_components.values():
            out = out + component.values
        place = torch.where(loss_mask.values.bool(), torch.arange(len(out)), -1)
        last = torch.full((loss_mask.num_rows,), -1).scatter_reduce(0, loss_mask.row_of_value, place, "amax")
        row_total = torch.zeros(self.num_rows)
        for component in self.components.values():
            row_total = row_total + component
        has_token = last >= 0
        out = out.index_add(0, last[has_token], row_total[has_token])
        valid_token = self.valid.bool()[loss_mask.row_of_value]
        return loss_mask.with_values(torch.where(valid_token, out, torch.nan))


@dataclass(frozen=True, eq=False, repr=False)
class Values(Batch):
    """float32 ragged ``values`` in response layout: the return expected before each token is taken."""

    prompt_id: Tensor
    sample_id: Tensor
    values: Ragged

    column_types: ClassVar[Mapping[str, str]] = {**_IDS, "values": "float32 ragged"}


@dataclass(frozen=True, eq=False, repr=False)
class OldLogprobs(Batch):
    """float32 ragged ``old_logprobs`` in response layout: the trainer's log-probs before the update.

    ``is_current``: the plan left their computation out, because they must equal the current policy's own; the values
    are then NaN, and ``TokenLoss.sums`` fills the current ones in before a loss looks at them.

    ``sum_pi_squared``: float32 ragged, response layout: Σ_v π(v)² over the vocabulary at each token, where
    ``PolicyLogprobs(…, sum_pi_squared=True)`` computed it.
    """

    prompt_id: Tensor
    sample_id: Tensor
    old_logprobs: Ragged
    origin: LogprobOrigin
    is_current: bool = False
    sum_pi_squared: Ragged | None = None

    column_types: ClassVar[Mapping[str, str]] = {**_IDS, "old_logprobs": "float32 ragged"}


@dataclass(frozen=True, eq=False, repr=False)
class RefLogprobs(Batch):
    """float32 ragged ``ref_logprobs`` in response layout: log-probs under the reference policy."""

    prompt_id: Tensor
    sample_id: Tensor
    ref_logprobs: Ragged
    origin: LogprobOrigin

    column_types: ClassVar[Mapping[str, str]] = {**_IDS, "ref_logprobs": "float32 ragged"}


@dataclass(frozen=True, eq=False, repr=False)
class ImportanceWeights(Batch):
    """Corrections of off-policy tokens, in response layout.

    Args:
        weights: float32 ragged: the factor of each token's loss.
        keep: uint8 ragged: 0 where the token does not count at all, as if the policy had not written it. (A weight of 0
            takes a token out of the sum, but not out of the number of tokens that the sum is divided by.)
    """

    prompt_id: Tensor
    sample_id: Tensor
    weights: Ragged
    keep: Ragged

    column_types: ClassVar[Mapping[str, str]] = {**_IDS, "weights": "float32 ragged", "keep": "uint8 ragged"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths("ImportanceWeights", "keep", self.keep, self.weights.lengths, "as many values as weights")


@dataclass(frozen=True, eq=False, repr=False)
class Advantages(Batch):
    """float32 ragged ``advantages`` and ``returns`` in response layout. It may hold fewer rows than the rollouts: what
    an advantage node dropped (invalid rewards) is not trained on.
    """

    prompt_id: Tensor
    sample_id: Tensor
    advantages: Ragged
    returns: Ragged

    column_types: ClassVar[Mapping[str, str]] = {
        **_IDS,
        "advantages": "float32 ragged",
        "returns": "float32 ragged",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths("Advantages", "returns", self.returns, self.advantages.lengths, "as many values as advantages")


@dataclass(frozen=True, eq=False, repr=False)
class TrainStats(Batch):
    """What a writer did in one iteration: metrics by name, and the version that its Model has now."""

    metrics: dict[str, float]
    policy_version: int
    num_optimizer_steps: int
    num_skipped_steps: int = 0

    unit: ClassVar[str] = "step"

    def __post_init__(self) -> None:  # numbers by name, no rows
        return

    @property
    def num_rows(self) -> int:
        return 0
