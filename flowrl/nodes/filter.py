"""Filters: let fewer groups through. The runtime pulls new prompts until a filter has let enough through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import ClassVar, Literal

from flowrl import context
from flowrl.batches import Rewards, Rollouts
from flowrl.nodes.base import Join, Node


class Filter(Node):
    """The base of filters. Its call returns some of the groups that it was given, whole, and changes nothing
    in them.

    A filter does not pull: it sees what was sampled and says what is worth training on. The runtime draws
    further prompts through the calls above the filter until the source's ``batch_size`` groups are there.

    Args:
        max_pulls: batches drawn an iteration at most, the first included.
        on_exhausted: what to do when they did not suffice: "train_short" trains on what there is, "fail"
            raises ``ExhaustedError``, "carry_over" skips the update and keeps the groups for the next
            iteration.

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

    def problems(self) -> Iterable[str]:
        if self.max_pulls < 1:
            yield f"max_pulls is {self.max_pulls}; expected at least 1"
        if self.on_exhausted not in ("train_short", "fail", "carry_over"):
            yield f"on_exhausted is {self.on_exhausted!r}; expected train_short, fail or carry_over"


class DropUniformGroups(Filter):
    """Drop the groups whose responses all have the same total reward: a group-relative advantage is 0 there.

    The dynamic sampling of DAPO (arXiv 2503.14476). Invalid rewards are left out of the comparison, and a
    group with fewer than two valid ones is dropped too. Reports ``dropped_groups`` and ``kept_groups``.
    """

    joins: ClassVar[Mapping[str, Join]] = {"rewards": "subset"}
    needs_groups: ClassVar[int] = 2

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Rollouts:
        from flowrl.functional.grouping import Groups

        groups = Groups.of(rollouts.prompt_id)
        valid = rewards.valid.bool()
        varied = groups.max(rewards.totals, valid) > groups.min(rewards.totals, valid)
        context.report("kept_groups", int(varied.sum()))
        context.report("dropped_groups", groups.num_groups - int(varied.sum()))
        return rollouts.select(varied[groups.index].nonzero().flatten())
