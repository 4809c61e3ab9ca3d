"""Advantage nodes with one number a row: what a response earned beside the other responses to its prompt, or beside
the batch. The formulas are in :mod:`flowrl.functional.group_advantages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from flowrl.functional.group_advantages import Mean, Std
from flowrl.nodes.row_advantage import RowAdvantage, ScoredRows

if TYPE_CHECKING:
    from torch import Tensor


class GroupAdvantage(RowAdvantage):
    """How much better a response is than the other responses to its prompt; see
    :func:`flowrl.functional.group_advantages.group_advantages`.

    Args:
        normalize_by_std: divide by the group's standard deviation: GRPO (arXiv 2402.03300); without it
            Dr.GRPO (arXiv 2503.20783).
        leave_one_out: compare with the mean of the others: RLOO (arXiv 2402.14740).
        eps: added to the standard deviation.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group whose rewards are all equal: "zero" keeps its rows with advantage
            0 (they count in the loss's mean), "drop" leaves them out.

    Shapes: a number a row, spread over its policy tokens; 0 at observations. ``returns`` are the row's total
    reward. Rows that were dropped are left out; a group of which one row is left is dropped too, since
    nothing is left to compare it with; where no row is left the result has no rows. Reports ``dropped_rows``
    and ``degenerate_groups``.

    Raises:
        GroupSizeError: a prompt has fewer than two rollouts.
        RewardError: a reward is invalid, and ``invalid="fail"``.
    """

    normalize_by_std: bool = True
    leave_one_out: bool = False
    eps: float = 1e-6

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"normalize_by_std": False},
        {"normalize_by_std": False, "leave_one_out": True, "invalid": "drop_group"},
        {"degenerate": "drop"},
    )

    def problems(self) -> Iterable[str]:
        yield from _eps_problems(self.eps)
        yield from super().problems()

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import group_advantages

        return group_advantages(
            rows.rewards,
            rows.prompt_id,
            normalize_by_std=self.normalize_by_std,
            leave_one_out=self.leave_one_out,
            eps=self.eps,
        )


class NormalizedAdvantage(RowAdvantage):
    """(R − mean) / (std + eps), with the mean and the standard deviation of your choice; see
    :func:`flowrl.functional.group_advantages.normalize`, which lists the estimators that it contains.

    Args:
        mean: what is subtracted: the mean over the responses to the prompt ("group"), over their tokens ("token"),
            over the batch ("batch"), or nothing ("none").
        std: what is divided by: the standard deviation of the rewards of the prompt ("group"), of the batch
            ("batch"), or nothing ("none").
        leave_one_out: the mean is that of the others alone.
        eps: added to the standard deviation.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group whose rewards are all equal: "zero" or "drop". Where neither the mean nor
            the standard deviation is the group's, groups may have one row and none is degenerate.

    Shapes, reports and errors: see :class:`GroupAdvantage`.
    """

    mean: Mean = "group"
    std: Std = "group"
    leave_one_out: bool = False
    eps: float = 1e-6

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        *({"mean": m, "std": s} for m in ("token", "group", "batch", "none") for s in ("group", "batch", "none")),
        *({"mean": m, "std": "none", "leave_one_out": True} for m in ("token", "group", "batch")),
    )

    @property
    def of_batch(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a mean or standard deviation is that of the batch."""
        return "batch" in (self.mean, self.std)

    @property
    def needs_groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """2 where a mean or standard deviation is that of a group."""
        return 2 if self.mean in ("group", "token") or self.std == "group" else 1

    def problems(self) -> Iterable[str]:
        if self.mean not in get_args(Mean):
            yield f"mean is {self.mean!r}; expected one of {', '.join(get_args(Mean))}"
        if self.std not in get_args(Std):
            yield f"std is {self.std!r}; expected one of {', '.join(get_args(Std))}"
        if self.leave_one_out and self.mean == "none":
            yield "leave_one_out is True with mean='none'; expected a mean to leave a row out of"
        yield from _eps_problems(self.eps)
        yield from super().problems()

    def varied(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.grouping import Groups

        groups = Groups.of(rows.prompt_id)
        counts = rows.num_tokens > 0 if self.mean == "token" else None
        return groups.varied(rows.rewards, counts)[groups.index]

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import normalize

        return normalize(
            rows.rewards,
            rows.prompt_id,
            mean=self.mean,
            std=self.std,
            leave_one_out=self.leave_one_out,
            num_tokens=rows.num_tokens,
            eps=self.eps,
        )


class OPOAdvantage(RowAdvantage):
    """Compare with the mean over the tokens of the group, so that long responses count more (OPO, arXiv 2505.23585);
    see :func:`flowrl.functional.group_advantages.opo_advantages`. ``NormalizedAdvantage(mean="token", std="none")`` is
    the same.

    Args:
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group whose responses with a token have equal rewards: "zero" or "drop".

    Shapes, reports and errors: see :class:`GroupAdvantage`.
    """

    def varied(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.grouping import Groups

        groups = Groups.of(rows.prompt_id)
        return groups.varied(rows.rewards, rows.num_tokens > 0)[groups.index]

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import opo_advantages

        return opo_advantages(rows.rewards, rows.prompt_id, rows.num_tokens)


class GPGAdvantage(RowAdvantage):
    """R − mean of the group, times rows / rows with a reward over the batch (GPG, arXiv 2504.02546); see
    :func:`flowrl.functional.group_advantages.gpg_advantages`.

    Args:
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail". Dropped rows do not
            count in the factor.
        degenerate: what becomes of a group whose rewards are all equal: "zero" or "drop". Groups that are dropped do
            not count in the factor either.

    Shapes, reports and errors: see :class:`GroupAdvantage`.
    """

    of_batch: ClassVar[bool] = True

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import gpg_advantages

        return gpg_advantages(rows.rewards, rows.prompt_id)


class PassKAdvantage(RowAdvantage):
    """Only the best response of a group counts, by its lead over the second best: this trains pass@k, k the size of
    the group (arXiv 2503.19595); see :func:`flowrl.functional.group_advantages.pass_at_k_advantages`.

    Args:
        normalize_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group in which two responses share the best reward, so that all advantages are
            0: "zero" or "drop".

    Shapes, reports and errors: see :class:`GroupAdvantage`.
    """

    normalize_by_std: bool = False
    eps: float = 1e-6

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"normalize_by_std": True})

    def problems(self) -> Iterable[str]:
        yield from _eps_problems(self.eps)
        yield from super().problems()

    def varied(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import leads
        from flowrl.functional.grouping import Groups

        groups = Groups.of(rows.prompt_id)
        return leads(rows.rewards, groups)[groups.index] > 0

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import pass_at_k_advantages

        return pass_at_k_advantages(rows.rewards, rows.prompt_id, normalize_by_std=self.normalize_by_std, eps=self.eps)


class GDPOAdvantage(RowAdvantage):
    """Every component of the reward normalised within its group on its own, their weighted sum normalised over the
    batch (GDPO, arXiv 2601.05242); see :func:`flowrl.functional.group_advantages.gdpo_advantages`.

    Args:
        weights: by component name; a component that is not named has weight 1.
        eps: added to each standard deviation.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group in which no component varies: "zero" or "drop".

    Shapes and reports: see :class:`GroupAdvantage`. ``returns`` are the row's total reward, without the weights.

    Raises:
        GroupSizeError: a prompt has fewer than two rollouts.
        RewardError: a reward is invalid, and ``invalid="fail"``.
        FlowError: a weight names no component.

    Example::

        both = WeightedSum()(FunctionReward(correct)(rollouts), FunctionReward(short)(rollouts))
        advantages = GDPOAdvantage(weights={"short": 0.3})(rollouts, both)
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    eps: float = 1e-6

    of_batch: ClassVar[bool] = True

    def problems(self) -> Iterable[str]:
        for name, weight in self.weights.items():
            if not abs(weight) < float("inf"):
                yield f"weights holds {weight} for {name!r}; expected finite numbers"
        yield from _eps_problems(self.eps)
        yield from super().problems()

    def varied(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import any_varied

        return any_varied(rows.components, rows.prompt_id)

    def row_advantages(self, rows: ScoredRows) -> Tensor:
        from flowrl.functional.group_advantages import gdpo_advantages

        return gdpo_advantages(rows.components, rows.prompt_id, weights=self.weights, eps=self.eps)


def _eps_problems(eps: float) -> Iterable[str]:
    if not eps > 0:
        yield f"eps is {eps}; expected more than 0"
