"""Reward shaping: penalties of length, truncated responses, clipping, and running normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from flowrl import context
from flowrl.batches import Advantages, FinishReason, Rewards, Rollouts
from flowrl.models import BaseModel, State
from flowrl.nodes.base import Join, Node
from flowrl.nodes.reward import distinct_name, rewards_like

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.functional.reward_shaping import Moments

TRUNCATED = "cut at the length limit"
NOT_FINITE = "the reward is not finite"


class OverlongPenalty(Node):
    """The soft punishment of overlong responses (DAPO, arXiv 2503.14476, eq. 13); see
    :func:`flowrl.functional.reward_shaping.overlong_penalty`.

    Args:
        max_length: the longest response, in tokens that the policy wrote (observations do not count). Where it is the
            sampling limit (``max_new_tokens``), every truncated response of one turn gets the full penalty.
        buffer: tokens before ``max_length`` over which the penalty grows from 0 to 1.
        coef: the full penalty.

    Shapes: a number a row, the component "overlong", from −``coef`` to 0. Reports ``penalized_rows``.

    Example::

        rewards = WeightedSum()(FunctionReward(correct)(rollouts), OverlongPenalty(20480, 4096)(rollouts))
    """

    max_length: int
    buffer: int
    coef: float = 1.0

    kind: ClassVar[str] = "reward"

    def problems(self) -> Iterable[str]:
        if self.max_length < 1:
            yield f"max_length is {self.max_length}; expected at least 1"
        if not 0 <= self.buffer <= self.max_length:
            yield f"buffer is {self.buffer}; expected 0 to max_length, {self.max_length}"
        yield from _weight_problems("coef", self.coef)

    def __call__(self, rollouts: Rollouts) -> Rewards:
        from flowrl.functional.reward_shaping import overlong_penalty

        penalty = overlong_penalty(policy_lengths(rollouts), max_length=self.max_length, buffer=self.buffer)
        context.report("penalized_rows", int((penalty < 0).sum()))
        return rewards_like(rollouts, overlong=self.coef * penalty)


class LengthPenalty(Node):
    """A penalty on each token that the policy wrote beyond the first ``free_tokens``.

    Args:
        per_token: the penalty of one token.
        free_tokens: tokens that cost nothing.

    Shapes: a number a row, the component "length_penalty", 0 or less.
    """

    per_token: float
    free_tokens: int = 0

    kind: ClassVar[str] = "reward"

    def problems(self) -> Iterable[str]:
        yield from _weight_problems("per_token", self.per_token)
        if self.free_tokens < 0:
            yield f"free_tokens is {self.free_tokens}; expected at least 0"

    def __call__(self, rollouts: Rollouts) -> Rewards:
        from flowrl.functional.reward_shaping import length_penalty

        lengths = policy_lengths(rollouts)
        penalty = length_penalty(lengths, per_token=self.per_token, free_tokens=self.free_tokens)
        return rewards_like(rollouts, length_penalty=penalty)


class GroupLengthReward(Node):
    """Rewards with a bonus for being shorter than the other responses to the prompt (Kimi k1.5, arXiv 2501.12599,
    section 2.3.3); see :func:`flowrl.functional.reward_shaping.group_length_rewards`.

    Args:
        coef: the weight: a correct response gets up to ``coef``/2 for being the shortest, any down to −``coef``/2 for
            being the longest.
        correct_at: a response is correct whose total reward (or ``component``) is at least this.
        component: the row component of the rewards that says whether it is correct; None takes the total.

    Shapes: the rewards with one more row component, "group_length": 0 in a group of one row, in a group whose rows
    are all of one length, and in invalid rows, which are not compared. Lengths are in tokens that the policy wrote.

    Raises:
        BatchError: the rewards have no such component.
    """

    coef: float = 1.0
    correct_at: float = 1.0
    component: str | None = None

    kind: ClassVar[str] = "reward"
    split: ClassVar[Literal["rows", "groups", "whole"]] = "groups"
    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}

    def problems(self) -> Iterable[str]:
        yield from _weight_problems("coef", self.coef)

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rewards:
        from flowrl.functional.reward_shaping import group_length_rewards
        from flowrl.nodes.filter import judged

        values, valid = judged(rewards, self.component, node=self.name)
        bonus = group_length_rewards(policy_lengths(rollouts), rollouts.prompt_id, values >= self.correct_at, valid)
        name = distinct_name("group_length", rewards.components, rewards.token_components)
        return replace(rewards, components={**rewards.components, name: self.coef * bonus})


class MaskTruncated(Node):
    """Rewards of truncated responses as invalid: a response without its end cannot be judged (overlong filtering, DAPO,
    arXiv 2503.14476, section 3.4).

    What becomes of the rows is the ``invalid=`` setting of the advantage node: "drop_row" trains on the others of the
    group and compares these with each other alone. To leave the rows out of the loss but in the comparison, take
    :class:`DropTruncated`.

    Shapes: the rewards, where rows whose ``finish_reason`` is LENGTH are invalid with the reason "cut at the length
    limit"; a reason that was there stays. Without ``rewards``, rewards with one component "truncated", 0 in each row,
    to be summed with others: a sum is valid only where all are. Reports ``truncated_rows``.
    """

    kind: ClassVar[str] = "reward"
    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}

    def __call__(self, rollouts: Rollouts, rewards: Rewards | None = None) -> Rewards:
        import torch

        cut = rollouts.finish_reason == FinishReason.LENGTH
        context.report("truncated_rows", int(cut.sum()))
        if rewards is None:
            rewards = rewards_like(rollouts, truncated=torch.zeros(rollouts.num_rows))
        return invalidated(rewards, cut, TRUNCATED)


class DropTruncated(Node):
    """Advantages without the rows whose response was cut at the length limit: they are compared with the others of their
    group, but not trained on (overlong filtering as a mask of the loss, DAPO, arXiv 2503.14476, section 3.4).

    Shapes: the advantages, rows whose ``finish_reason`` is LENGTH left out; where all are, no rows. Reports
    ``truncated_rows``.
    """

    kind: ClassVar[str] = "advantage"
    joins: ClassVar[Mapping[str, Join]] = {"rollouts": "subset"}

    def __call__(self, advantages: Advantages, rollouts: Rollouts) -> Advantages:
        cut = rollouts.finish_reason == FinishReason.LENGTH
        context.report("truncated_rows", int(cut.sum()))
        return advantages.select((~cut).nonzero().flatten())


class ClipReward(Node):
    """Rewards whose totals are clipped to [``low``, ``high``].

    Args:
        low: the smallest total; −inf does not clip.
        high: the largest total; inf does not clip.

    Shapes: a reward that is one row component stays one. Of several, each stays as it is, and a row component "clip"
    takes what is too much. Invalid rows stay invalid, and a total that is not finite becomes invalid. Reports
    ``clipped_rows`` and ``unclipped_mean`` over valid rows.
    """

    low: float = -float("inf")
    high: float = float("inf")

    kind: ClassVar[str] = "reward"

    def problems(self) -> Iterable[str]:
        if not self.low < self.high:
            yield f"low is {self.low} and high is {self.high}; expected low < high"

    def __call__(self, rewards: Rewards) -> Rewards:
        rewards = invalidated(rewards, ~rewards.totals.isfinite(), NOT_FINITE)
        totals = rewards.totals
        clipped = totals.clamp(self.low, self.high)
        context.report("clipped_rows", int(((totals != clipped) & rewards.valid.bool()).sum()))
        _report_mean("unclipped_mean", rewards)
        return _with_totals(rewards, clipped, factor=1.0, rest="clip")


class RunningNormalization(Node):
    """Rewards by the mean and standard deviation of all valid rewards so far: (R − mean) / (std + eps).

    The statistics are over totals, and those of an iteration include its own rewards, as is usual: the first batch is
    normalised by itself. They are a ``State``: checkpointed, with this node as the one writer. Merged as Chan, Golub
    & LeVeque do, in float64; they do not depend on the order of rows, bit for bit; see
    :class:`flowrl.functional.reward_shaping.Moments`.

    Args:
        state: the State that keeps the statistics, or the name of one to make. Its init is None.
        center: subtract the mean.
        scale: divide by the (unbiased) standard deviation. Not where it is 0: all rewards so far are equal, or there
            is one.
        clip: what is left is clipped to ±``clip``; None does not clip.
        eps: added to the standard deviation.

    Shapes: a reward that is one row component stays one. Of several (or at tokens), each is divided alike, and a row
    component "normalization" takes the rest, so that they still add up. A row that is invalid stays so, and counts
    nowhere; a total that is not finite becomes invalid. With no valid row at all the statistics stay as they are.

    It works on whole batches, so it stands behind a filter, not before it. It sees all rewards that it is given,
    those of dropped groups too. Reports ``running_mean`` and ``running_std`` with this batch in them, and
    ``raw_mean`` of the batch.

    Example::

        rewards = RunningNormalization("reward_statistics", clip=5.0)(RewardModelScore(judge)(rollouts))
    """

    state: State | str = "reward_statistics"
    center: bool = True
    scale: bool = True
    clip: float | None = None
    eps: float = 1e-8

    kind: ClassVar[str] = "reward"
    #: Metrics show the rewards as they were before.
    rescales: ClassVar[bool] = True
    split: ClassVar[Literal["rows", "groups", "whole"]] = "whole"

    def __post_init__(self) -> None:
        if isinstance(self.state, str):
            object.__setattr__(self, "state", State(self.state, None))

    @property
    def statistics(self) -> State:
        """The State that keeps the statistics."""
        return cast(State, self.state)

    def writes(self) -> tuple[BaseModel | State, ...]:
        return (self.statistics,)

    def problems(self) -> Iterable[str]:
        if not isinstance(self.state, State):
            yield f"state is {self.state!r}; expected a State or the name of one"
        elif self.state.init is not None:
            yield f"state is State {self.state.name!r} with init {self.state.init!r}; expected None: no reward seen yet"
        if self.clip is not None and not self.clip > 0:
            yield f"clip is {self.clip}; expected more than 0, or None"
        if not self.eps >= 0:
            yield f"eps is {self.eps}; expected at least 0"

    def __call__(self, rewards: Rewards) -> Rewards:
        import torch

        rewards = invalidated(rewards, ~rewards.totals.isfinite(), NOT_FINITE)
        totals, valid = rewards.totals.to(torch.float64), rewards.valid.bool()
        moments = self.moments().merged(totals[valid].tolist())
        if bool(valid.any()):
            self.statistics.set(moments.to_dict())
        context.report("running_mean", moments.mean)
        context.report("running_std", moments.std)
        _report_mean("raw_mean", rewards)
        factor = 1 / (moments.std + self.eps) if self.scale and moments.std > 0 else 1.0
        normalized = (totals - moments.mean if self.center else totals) * factor
        if self.clip is not None:
            normalized = normalized.clamp(-self.clip, self.clip)
        return _with_totals(rewards, normalized.float(), factor=factor, rest="normalization")

    def moments(self) -> Moments:
        """The statistics as they are."""
        from flowrl.functional.reward_shaping import Moments

        return Moments(**(self.statistics.value or {}))


# -- what they share -------------------------------------------------------------------------------------------------


def policy_lengths(rollouts: Rollouts) -> Tensor:
    """int64 ``[num_rows]``: tokens that the policy wrote."""
    import torch

    mask = rollouts.loss_mask
    return mask.with_values(mask.values.to(torch.int64)).sum_rows()


def invalidated(rewards: Rewards, rows: Tensor, reason: str) -> Rewards:
    """Rewards of which bool ``rows`` ``[num_rows]`` are invalid too, for this reason where they had none."""
    import torch

    reasons = tuple(r or reason if bad else r for r, bad in zip(rewards.reasons, rows.tolist(), strict=True))
    valid = torch.where(rows, torch.zeros((), dtype=torch.uint8), rewards.valid)
    return replace(rewards, valid=valid, reasons=reasons)


def _with_totals(rewards: Rewards, totals: Tensor, *, factor: float, rest: str) -> Rewards:
    """Rewards with float32 ``totals`` ``[num_rows]``: each component times ``factor``, and what is missing as a row
    component of its own; one row component alone becomes the total."""
    import torch

    valid = rewards.valid.bool()
    if len(rewards.components) == 1 and not rewards.token_components:
        return replace(rewards, components=dict.fromkeys(rewards.components, torch.where(valid, totals, torch.nan)))
    scaled = replace(
        rewards,
        components={name: factor * column for name, column in rewards.components.items()},
        token_components={n: c.with_values(factor * c.values) for n, c in rewards.token_components.items()},
    )
    name = distinct_name(rest, rewards.components, rewards.token_components)
    missing = torch.where(valid, totals - scaled.totals, torch.nan)
    return replace(scaled, components={**scaled.components, name: missing})


def _report_mean(name: str, rewards: Rewards) -> None:
    valid = rewards.totals[rewards.valid.bool()].double()
    if len(valid):
        context.report(name, float(valid.mean()))


def _weight_problems(name: str, value: Any) -> Iterable[str]:
    if not 0 <= value < float("inf"):
        yield f"{name} is {value}; expected a finite number, at least 0"
