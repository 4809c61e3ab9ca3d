"""From rewarded rollouts to what preference and supervised losses train on, and the mismatched completions of KTO.

All of them look at each prompt's responses alone and choose by value, then by id, so that the order of rows decides nothing.
Rows whose reward is invalid are never chosen. A prompt that gives nothing is left out; a batch may come out empty, and an
updater then trains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from flowrl import context
from flowrl.batches import Demonstrations, Feedback, Preferences, Rewards, Rollouts, Sequences, Spans
from flowrl.errors import BatchError
from flowrl.nodes.base import Join, Node, Split
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: So many pairs of one prompt have a ``pair_id`` of their own.
MAX_PAIRS = 1 << 20


def preferences_of(rollouts: Rollouts, pairs: Sequence[tuple[int, int, int]]) -> Preferences:
    """Preferences among rollouts: two rows a pair, the chosen one first.

    A response may stand in several pairs, and rows must have ids of their own: pair k of a prompt gets ``pair_id`` =
    ``prompt_id`` · 2²⁰ + k, and its rows the ``sample_id`` 2k (chosen) and 2k + 1 (rejected). So ids are unique over pulls
    and iterations too, as ``prompt_id`` is.

    Args:
        pairs: (number of the pair among those of its prompt, row of the chosen, row of the rejected).

    Raises:
        BatchError: a number of a pair, or a ``prompt_id``, is too large for that.
    """
    import torch

    rows = torch.tensor([row for _, chosen, rejected in pairs for row in (chosen, rejected)], dtype=torch.int64)
    number = torch.tensor([k for k, _, _ in pairs for _ in range(2)], dtype=torch.int64)
    prompt_id = rollouts.prompt_id[rows]
    if bool((number >= MAX_PAIRS).any()) or bool((prompt_id.abs() >= (1 << 63) // MAX_PAIRS).any()):
        raise BatchError(
            "These pairs cannot be numbered",
            expected=f"at most {MAX_PAIRS} pairs a prompt, and prompt_id below 2^43",
            received=f"pair {int(number.max())} of a prompt, and prompt_id {int(prompt_id.max())}",
            do="judge fewer pairs of each prompt",
        )
    second = torch.arange(len(rows)) % 2
    return Preferences(
        prompt_id=prompt_id,
        sample_id=2 * number + second,
        tokens=rollouts.tokens.select(rows),
        spans=rollouts.spans.select(rows),
        pair_id=prompt_id * MAX_PAIRS + number,
        chosen=(1 - second).to(torch.uint8),
    )


def groups_of_rows(sequences: Sequences) -> list[list[int]]:
    """The rows of each prompt by ``sample_id``; prompts in the order of their first rows."""
    groups: dict[int, list[int]] = {}
    samples = sequences.sample_id.tolist()
    for row, prompt in enumerate(sequences.prompt_id.tolist()):
        groups.setdefault(prompt, []).append(row)
    return [sorted(rows, key=lambda row: samples[row]) for rows in groups.values()]


def _valid_groups(rollouts: Rollouts, totals: Sequence[float]) -> Iterator[list[int]]:
    """The rows of each prompt that have a reward (an invalid one is NaN), best first, equal ones by ``sample_id``."""
    for rows in groups_of_rows(rollouts):
        yield sorted((row for row in rows if not math.isnan(totals[row])), key=lambda row: -totals[row])


class RewardPairs(Node):
    """Of each prompt the response with the highest reward against that with the lowest: pairs for online DPO.

    A prompt gives one pair, or none where all its valid rewards are (nearly) equal or fewer than two are valid. Among equals
    the lowest ``sample_id`` is taken, so the order of rows does not matter. Ids are minted by :func:`preferences_of`.

    Args:
        min_margin: the reward of the chosen must be higher by more than this.

    Reports ``pairs``, ``ties`` (prompts without such a margin) and ``prompts_without_rewards`` (fewer than two valid).
    """

    min_margin: float = 0.0

    kind: ClassVar[str] = "filter"
    split: ClassVar[Split] = "groups"
    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}
    needs_groups: ClassVar[int] = 2

    def problems(self) -> Iterable[str]:
        if not 0 <= self.min_margin < float("inf"):
            yield f"min_margin is {self.min_margin}; expected a finite number, at least 0"

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Preferences:
        totals = rewards.totals.tolist()
        pairs: list[tuple[int, int, int]] = []
        ties = too_few = 0
        for best_first in _valid_groups(rollouts, totals):
            if len(best_first) < 2:
                too_few += 1
                continue
            best = best_first[0]
            lowest = totals[best_first[-1]]
            worst = next(row for row in best_first if totals[row] == lowest)
            if totals[best] - lowest > self.min_margin:
                pairs.append((0, best, worst))
            else:
                ties += 1
        context.report("pairs", len(pairs))
        context.report("ties", ties)
        context.report("prompts_without_rewards", too_few)
        return preferences_of(rollouts, pairs)


class BestOfN(Node):
    """Of each prompt the response with the highest reward, to imitate: best-of-n distillation, rejection sampling.

    Among equals the lowest ``sample_id`` is taken. Rows keep their ids. A prompt without a valid reward, or whose best is
    not good enough, is left out. A group of one gives its only response.

    Args:
        min_reward: the best must have at least this reward; None takes it as it is.

    Reports ``kept_prompts``, ``dropped_prompts``, and ``best_reward``, the mean over the kept.
    """

    min_reward: float | None = None

    kind: ClassVar[str] = "filter"
    split: ClassVar[Split] = "groups"
    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}

    def problems(self) -> Iterable[str]:
        if self.min_reward is not None and not abs(self.min_reward) < float("inf"):
            yield f"min_reward is {self.min_reward}; expected a finite number, or None"

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Demonstrations:
        import torch

        totals = rewards.totals.tolist()
        groups = list(_valid_groups(rollouts, totals))
        least = -math.inf if self.min_reward is None else self.min_reward
        kept = [rows[0] for rows in groups if rows and totals[rows[0]] >= least]
        context.report("kept_prompts", len(kept))
        context.report("dropped_prompts", len(groups) - len(kept))
        if kept:
            context.report("best_reward", sum(totals[row] for row in kept) / len(kept))
        index = torch.tensor(kept, dtype=torch.int64)
        return Demonstrations(
            rollouts.prompt_id[index],
            rollouts.sample_id[index],
            rollouts.tokens.select(index),
            rollouts.spans.select(index),
        )


class ToFeedback(Node):
    """Rewards as thumbs up or down: a response is desirable where its reward is at least ``threshold``.

    Rows keep their ids; those with an invalid reward are left out.

    Args:
        threshold: the lowest reward of a desirable response.

    Reports ``desirable`` and ``undesirable``, counts of rows, and ``invalid_rows``.
    """

    threshold: float = 0.5

    kind: ClassVar[str] = "filter"
    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}

    def problems(self) -> Iterable[str]:
        if not abs(self.threshold) < float("inf"):
            yield f"threshold is {self.threshold}; expected a finite number"

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Feedback:
        import torch

        index = (~rewards.totals.isnan()).nonzero().flatten()
        desirable = (rewards.totals[index] >= self.threshold).to(torch.uint8)
        liked = int(desirable.sum())
        context.report("desirable", liked)
        context.report("undesirable", len(index) - liked)
        context.report("invalid_rows", rollouts.num_rows - len(index))
        return Feedback(
            rollouts.prompt_id[index],
            rollouts.sample_id[index],
            rollouts.tokens.select(index),
            rollouts.spans.select(index),
            desirable,
        )


class MismatchedCompletions(Node):
    """Each prompt with the completion of another prompt: what KTO estimates its reference point from (arXiv 2402.01306).

    By increasing id, row i takes the completion of the next prompt in the batch (the last that of the first), of its row i
    where prompts have several. The order of rows does not matter. Rows keep their ids and ``desirable``.

    **A batch with one prompt** (a single row, say) has no mismatched completion: its rows come with an empty one, whose
    log-ratio is 0, so that KTO's reference point is 0. (The row's own completion would take its own reward for the reference
    point, and so hide it.)

    Args:
        max_length: tokens of a row at most: longer completions lose their end. A long prompt and a long completion meet here
            that never stood together; None leaves them, and a model whose context is too short then refuses the row.
    """

    max_length: int | None = None

    kind: ClassVar[str] = "host"
    split: ClassVar[Split] = "whole"

    def problems(self) -> Iterable[str]:
        if self.max_length is not None and self.max_length < 2:
            yield f"max_length is {self.max_length}; expected at least 2 tokens, or None"

    def __call__(self, feedback: Feedback) -> Feedback:
        import torch

        partner = _partners(feedback)
        prompts, lengths = feedback.prompt_lengths, feedback.response_lengths[partner]
        if len(set(feedback.prompt_id.tolist())) < 2:
            lengths = torch.zeros_like(lengths)
        if self.max_length is not None:
            lengths = torch.minimum(lengths, (self.max_length - prompts).clamp(min=0))
        kinds, versions = feedback.span_kind_of_token, _version_of_token(feedback)

        def mismatched(column: Ragged) -> Ragged:
            """A per-token column with the prompt part of each row and the response part of its partner."""
            own = column.slice_rows(torch.zeros_like(prompts), prompts)
            return Ragged.join(own, column.select(partner).slice_rows(prompts[partner], lengths))

        return Feedback(
            feedback.prompt_id,
            feedback.sample_id,
            mismatched(feedback.tokens),
            _spans(mismatched(kinds), mismatched(versions)),
            feedback.desirable,
        )


def _partners(sequences: Sequences) -> Tensor:
    """int64 ``[num_rows]``: for each row the row of the next prompt whose response it takes."""
    import torch

    prompts, samples = sequences.prompt_id.tolist(), sequences.sample_id.tolist()
    order = sorted(range(sequences.num_rows), key=lambda row: (prompts[row], samples[row]))
    groups: dict[int, list[int]] = {}
    for row in order:
        groups.setdefault(prompts[row], []).append(row)
    by_id = list(groups.values())
    partner = torch.zeros(sequences.num_rows, dtype=torch.int64)
    for rows, following in zip(by_id, by_id[1:] + by_id[:1], strict=True):
        for place, row in enumerate(rows):
            partner[row] = following[place % len(following)]
    return partner


def _version_of_token(sequences: Sequences) -> Ragged:
    """int64 ragged over all tokens: the version of the policy that wrote each."""
    import torch

    spans = sequences.spans
    return sequences.tokens.with_values(torch.repeat_interleave(spans.policy_versions.values, spans.lengths.values))


def _spans(kinds: Ragged, versions: Ragged) -> Spans:
    """Spans from what is known of each token: one for each run of tokens of one kind and version."""
    import torch

    place = kinds.position_of_value
    new = torch.ones(len(place), dtype=torch.bool)
    same = (kinds.values[1:] == kinds.values[:-1]) & (versions.values[1:] == versions.values[:-1])
    new[1:] = ~same | (place[1:] == 0)
    starts = new.nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([len(place)])])[: len(starts)]
    per_row = torch.zeros(kinds.num_rows, dtype=torch.int64).index_add(
        0, kinds.row_of_value[starts], torch.ones_like(starts)
    )
    return Spans(
        kinds=Ragged.from_lengths(kinds.values[starts].to(torch.uint8), per_row),
        lengths=Ragged.from_lengths(ends - starts, per_row),
        policy_versions=Ragged.from_lengths(versions.values[starts], per_row),
    )
