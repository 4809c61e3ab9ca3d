"""What advantage nodes with one number a row share, and those of a user's own: a function, or a subclass with one
method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flowrl import context
from flowrl.batches import Advantages, Rewards, Rollouts
from flowrl.errors import GraphError, nearest
from flowrl.nodes.advantage import AdvantageEstimator

if TYPE_CHECKING:
    from torch import Tensor


class GroupEstimator(AdvantageEstimator):
    """The base of advantage nodes that compare the responses to one prompt.

    Args:
        degenerate: what becomes of a group without any advantage but 0, usually since its rewards are all equal:
            "zero" keeps its rows (they count in the loss's mean), "drop" leaves them out before anything is computed.
            Reports ``degenerate_groups``.
    """

    degenerate: Literal["zero", "drop"] = field(default="zero", kw_only=True)

    needs_groups: ClassVar[int] = 2

    def problems(self) -> Iterable[str]:
        if self.degenerate not in ("zero", "drop"):
            yield f"degenerate is {self.degenerate!r}; expected zero or drop"
        elif self.degenerate == "drop" and self.needs_groups < 2:
            yield "degenerate is 'drop' where rows are not compared within groups; expected zero"
        yield from super().problems()

    def informative_rows(self, keep: Tensor, varied: Tensor, prompt_id: Tensor) -> Tensor:
        """Of the rows ``keep`` (int64) those to use; reports what degenerate groups there are.

        Args:
            varied: bool, one a row of ``keep``: whether its group is not degenerate.
            prompt_id: int64, one a row of ``keep``.
        """
        context.report("degenerate_groups", len(prompt_id[~varied].unique()))
        if self.degenerate == "zero":
            return keep
        context.report("dropped_rows_degenerate", int((~varied).sum()))
        return keep[varied]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The rows that an estimator compares: those with a valid reward.

    Args:
        rewards: float32 ``[num_rows]``: the total reward.
        prompt_id: int64 ``[num_rows]``.
        num_tokens: int64 ``[num_rows]``: how many tokens the policy wrote.
        components: by name, float32 ``[num_rows]``: what the total is the sum of; numbers a token are summed.
    """

    rewards: Tensor
    prompt_id: Tensor
    num_tokens: Tensor
    components: dict[str, Tensor]

    def select(self, index: Tensor) -> ScoredRows:
        """The rows that bool or int64 ``index`` selects."""
        components = {name: column[index] for name, column in self.components.items()}
        return ScoredRows(self.rewards[index], self.prompt_id[index], self.num_tokens[index], components)


class RowAdvantage(GroupEstimator):
    """The base of estimators with one number a row, which is spread over the row's policy tokens.

    A subclass says what the number is. It says ``needs_groups = 1`` where rows are not compared within groups, and
    ``of_batch = True`` where a statistic of the whole batch enters.

    Example::

        class AboveBest(RowAdvantage):
            margin: float = 0.0

            def row_advantages(self, rows: ScoredRows) -> Tensor:
                groups = Groups.of(rows.prompt_id)
                return rows.rewards - groups.max(rows.rewards)[groups.index] + self.margin

    Shapes: one advantage and one return a response token; 0 at observations. ``returns`` are the row's total reward.
    Rows that were dropped are left out; a row without a policy token is kept, and has nothing to spread over.

    Raises:
        GroupSizeError: a prompt has fewer than ``needs_groups`` rollouts.
        RewardError: a reward is invalid, and ``invalid="fail"``.
    """

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        """float ``[num_rows]``: the advantage of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its row_advantages are")

    def varied(self, rows: ScoredRows) -> Tensor:
        """bool ``[num_rows]``: whether the row's group is not degenerate: its rewards differ."""
        from flowrl.functional.grouping import Groups

        groups = Groups.of(rows.prompt_id)
        return groups.varied(rows.rewards)[groups.index]

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Advantages:
        from flowrl.functional.advantages import spread_over_tokens

        keep = self.usable_rows(rollouts, rewards)
        rows = scored_rows(rollouts, rewards, keep)
        if self.needs_groups > 1:
            varied = self.varied(rows)
            keep = self.informative_rows(keep, varied, rows.prompt_id)
            rows = rows.select(varied) if self.degenerate == "drop" else rows
        number = _checked(self.row_advantages(rows) if len(keep) else rows.rewards, rows, self.name)
        mask = rollouts.loss_mask.select(keep)
        advantages, returns = spread_over_tokens(number, mask), spread_over_tokens(rows.rewards, mask)
        return Advantages(rows.prompt_id, rollouts.sample_id[keep], advantages, returns)


def scored_rows(rollouts: Rollouts, rewards: Rewards, keep: Tensor) -> ScoredRows:
    """The rows ``keep`` (int64) as estimators see them."""
    from flowrl.functional.advantages import num_policy_tokens

    components = {name: column[keep] for name, column in rewards.components.items()}
    for name, column in rewards.token_components.items():
        components[name] = column.select(keep).sum_rows()
    num_tokens = num_policy_tokens(rollouts.loss_mask)[keep]
    return ScoredRows(rewards.totals[keep], rollouts.prompt_id[keep], num_tokens, components)


def _checked(number: Any, rows: ScoredRows, node: str) -> Tensor:
    """float32 ``[num_rows]``; refused where it would broadcast, or carry a NaN into the loss."""
    import torch

    expected = f"a finite number a row: a tensor of shape [num_rows] = {list(rows.rewards.shape)}"
    if not isinstance(number, torch.Tensor) or number.shape != rows.rewards.shape:
        shape = f" of shape {list(number.shape)}" if isinstance(number, torch.Tensor) else ""
        raise GraphError(
            f"{node}: its advantages have the wrong shape",
            expected=expected,
            received=f"{type(number).__name__}{shape}",
            do="return one number for each of the rows that it is given; they are spread over the tokens for you",
        )
    bad = (~number.isfinite()).nonzero().flatten()
    if len(bad):
        raise GraphError(
            f"{node}: its advantages are not finite",
            expected=expected,
            received=f"{float(number[bad[0]])} for a response to prompt_id {int(rows.prompt_id[bad[0]])}",
            do="say what a group of one, of equal rewards, or without a token gets",
        )
    return number.detach().to(torch.float32)


class FunctionAdvantage(RowAdvantage):
    """An advantage that a function gives: a tensor ``[num_rows]`` from the rewards of the batch.

    The function's parameters are filled **by name** with the fields of :class:`ScoredRows`: ``rewards``,
    ``prompt_id``, ``num_tokens``, ``components``. A function that needs one argument of another name gets the rewards. Rows
    with invalid rewards are not among them; what it returns is spread over the tokens that the policy wrote.

    Args:
        fn: the function; closures, lambdas and functions of a notebook or script are fine.
        within_groups: it compares only responses to one prompt, so groups need at least two, and a batch may be split
            between groups. Say False where it looks at the whole batch.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group whose rewards are all equal: "zero" keeps what the function gives, "drop"
            leaves it out before the function is called.

    Raises:
        GraphError: the function returns another shape, or a number that is not finite.

    Example::

        def beats_batch(rewards: Tensor) -> Tensor:
            return torch.sign(rewards - rewards.median())

        advantages = FunctionAdvantage(beats_batch, within_groups=False)(rollouts, rewards)
    """

    fn: Callable[..., Tensor]
    within_groups: bool = True

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ()  # there is none without a function

    @property
    def of_batch(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the function looks at the whole batch."""
        return not self.within_groups

    @property
    def needs_groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """2 where the function compares within groups."""
        return 2 if self.within_groups else 1

    def problems(self) -> Iterable[str]:
        if not callable(self.fn):
            yield f"fn is {self.fn!r}; expected a function"
        else:
            parameters = _parameters(self.fn)
            unknown = [n for n, needed in parameters.items() if needed and n not in _FIELDS]
            if len(unknown) > 1 or (unknown and any(n in _FIELDS for n in parameters)):
                hint = nearest(unknown[0], _FIELDS)
                yield f"fn needs {unknown[0]!r}; expected some of {', '.join(_FIELDS)}" + (f" ({hint})" if hint else "")
        yield from super().problems()

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        parameters = _parameters(self.fn)
        known = {name: getattr(rows, name) for name in parameters if name in _FIELDS}
        return self.fn(**known) if known else self.fn(rows.rewards)


#: What a function may ask for by name.
_FIELDS = ("rewards", "prompt_id", "num_tokens", "components")


def _parameters(fn: Callable[..., Any]) -> dict[str, bool]:
    """By name, whether a parameter of ``fn`` must be given; empty for a built-in that does not say."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is p.empty for p in parameters if p.kind in by_name}
