"""Filters: let fewer groups through. The runtime pulls new prompts until a filter has let enough through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flowrl import context
from flowrl.annotations import type_name
from flowrl.batches import Batch, Rewards, Rollouts
from flowrl.errors import BatchError, GraphError, nearest
from flowrl.graph import user_location
from flowrl.nodes.base import Join, Node

if TYPE_CHECKING:
    from torch import Tensor


class Filter(Node):
    """The base of filters. Its call returns some of the groups that it was given, whole, and changes nothing
    in them.

    A filter does not pull: it sees what was sampled and says what is worth training on. The runtime draws further
    prompts through the calls above the filter until the source's ``batch_size`` groups are there. Groups beyond that
    are dropped, and counted as ``surplus``.

    Args:
        max_pulls: batches drawn an iteration at most, the first included; of several filters the smallest number
            holds.
        on_exhausted: what to do when they did not suffice. "train_short" trains on the groups that there are; where
            there is none that is an empty update, which the run says and counts (``empty_updates``). "fail" raises
            ``ExhaustedError``. "carry_over" skips the update and keeps the groups (none, it may be) for the next
            iteration. Of filters in a row the last one decides: it is the one that has to be filled.

    The metrics of a step have ``<label>/acceptance``, the share of groups that it let through, ``<label>/pulls``, and
    ``<label>/groups_emitted`` (to it), ``_dropped``, ``_consumed``, ``_surplus``, ``_carried_in`` and
    ``_carried_out``.

    Raises:
        BatchError: the call returned part of a group, a row that it was not given or gave twice, or a changed row.

    Example::

        class DropTooLong(Filter):
            limit: int = 512

            def __call__(self, rollouts: Rollouts) -> Rollouts:
                groups = flowrl.functional.grouping.Groups.of(rollouts.prompt_id)
                longest = groups.max(rollouts.response_lengths)[groups.index]
                return rollouts.select((longest <= self.limit).nonzero().flatten())
    """

    max_pulls: int = field(default=8, kw_only=True)
    on_exhausted: Literal["train_short", "fail", "carry_over"] = field(default="train_short", kw_only=True)

    kind: ClassVar[str] = "filter"
    split: ClassVar[Literal["rows", "groups", "whole"]] = "groups"
    is_filter: ClassVar[bool] = True

    @classmethod
    def check_class(cls) -> None:
        super().check_class()
        if not cls.ports:
            return
        grouped = is_dataclass(cls.output_type) and "prompt_id" in {f.name for f in fields(cls.output_type)}
        if cls.filtered_port() is None or not grouped:
            raise GraphError(
                f"Filter {cls.__name__} does not return some groups of what it takes",
                expected="a call that returns the type of one of its inputs, a batch with a prompt_id",
                received=f"({', '.join(map(str, cls.ports))}) -> {type_name(cls.output_type)}",
                where=user_location(),
            )

    @classmethod
    def filtered_port(cls) -> str | None:
        """The name of the input of which it returns some groups: the first one of the type that it returns."""
        return next((port.name for port in cls.ports if port.annotation == cls.output_type), None)

    def problems(self) -> Iterable[str]:
        if self.max_pulls < 1:
            yield f"max_pulls is {self.max_pulls}; expected at least 1"
        if self.on_exhausted not in ("train_short", "fail", "carry_over"):
            yield f"on_exhausted is {self.on_exhausted!r}; expected train_short, fail or carry_over"

    def run(self, arguments: Mapping[str, Any], label: str) -> Any:
        result = super().run(arguments, label)
        given = arguments.get(self.filtered_port() or "")
        if isinstance(given, Batch) and isinstance(result, Batch):
            _check_whole_groups(self.name, given, result)
        return result


def _check_whole_groups(node: str, given: Batch, result: Batch) -> None:
    """Refuse a result that is anything but some of the groups that were given, whole and unchanged."""
    before, after = _ids(given), _ids(result)
    place = {key: row for row, key in enumerate(before)}
    kept, returned = {key[0] for key in after}, set(after)
    missing = [key for key in before if key[0] in kept and key not in returned]
    invented = [key for key in after if key not in place]
    if missing:
        wrong = f"prompt_id {missing[0][0]} without its sample_id {missing[0][-1]}: part of a group"
    elif invented:
        wrong = f"row {invented[0]}, which it was not given"
    elif len(set(after)) < len(after):
        twice = next(key for i, key in enumerate(after) if key in after[:i])
        wrong = f"row {twice} twice"
    elif result != given.select([place[key] for key in after]):
        wrong = "rows of the same ids with other columns"
    else:
        return
    raise BatchError(
        f"{node} is a filter, and changed more than which groups there are",
        expected="some of the groups that it was given, whole and as they are",
        received=wrong,
        do="return given.select(rows) with all rows of each group that is kept; change rows in a node of its own",
    )


def _ids(batch: Batch) -> list[tuple[int, ...]]:
    ids = batch.row_ids
    return [] if ids is None else list(map(tuple, ids.tolist()))


class DropUniformGroups(Filter):
    """Drop the groups whose responses all have the same total reward: a group-relative advantage is 0 there.

    The dynamic sampling of DAPO (arXiv 2503.14476).

    Args:
        component: the row component that is compared, such as the correctness without penalties; None takes the total.

    Rewards that are invalid or not finite are left out of the comparison, and a group with fewer than two others is
    dropped too. No rows stay no rows. Reports ``dropped_groups`` and ``kept_groups``.
    """

    component: str | None = field(default=None, kw_only=True)

    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}
    needs_groups: ClassVar[int] = 2

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rollouts:
        from flowrl.functional.grouping import Groups

        groups = Groups.of(rollouts.prompt_id)
        values, valid = judged(rewards, self.component, node=self.name)
        varied = groups.max(values, valid) > groups.min(values, valid)
        return _kept(rollouts, varied[groups.index], groups.num_groups, int(varied.sum()))


class KeepAccuracyBand(Filter):
    """Keep the groups whose mean reward is within a band: neither too hard nor too easy for the policy of the moment
    (online difficulty filtering, arXiv 2504.03380).

    Args:
        low: the smallest mean that is kept.
        high: the largest one.
        component: the row component that the mean is of; None takes the total.

    The mean is over rewards that are valid and finite; a group without any is dropped. No rows stay no rows. Reports
    ``dropped_groups`` and ``kept_groups``.

    Example::

        kept = KeepAccuracyBand(0.2, 0.8, component="correct")(rollouts, rewards)
    """

    low: float = 0.2
    high: float = 0.8
    component: str | None = field(default=None, kw_only=True)

    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        if not self.low <= self.high:
            yield f"low is {self.low} and high is {self.high}; expected low <= high"

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rollouts:
        import torch

        from flowrl.functional.grouping import Groups

        groups = Groups.of(rollouts.prompt_id)
        values, valid = judged(rewards, self.component, node=self.name)
        count = groups.sum(valid)
        mean = groups.sum(torch.where(valid, values, torch.zeros(()))) / count.clamp(min=1)
        inside = (count > 0) & (mean >= self.low) & (mean <= self.high)
        return _kept(rollouts, inside[groups.index], groups.num_groups, int(inside.sum()))


def judged(rewards: Rewards, component: str | None, *, node: str) -> tuple[Tensor, Tensor]:
    """What rows are judged by, float32 ``[num_rows]``, and where it is valid and finite, bool ``[num_rows]``.

    Args:
        component: a row component of the rewards; None takes the total.

    Raises:
        BatchError: there is no such component.
    """
    if component is not None and component not in rewards.components:
        raise BatchError(
            f"{node}: the rewards have no row component {component!r}",
            expected=f"one of {', '.join(rewards.components) or 'none'}",
            received=repr(component),
            do=nearest(component, rewards.components),
        )
    values = rewards.totals if component is None else rewards.components[component]
    return values, rewards.valid.bool() & values.isfinite()


def _kept(rollouts: Rollouts, rows: Tensor, num_groups: int, num_kept: int) -> Rollouts:
    context.report("kept_groups", num_kept)
    context.report("dropped_groups", num_groups - num_kept)
    return rollouts.select(rows.nonzero().flatten())
