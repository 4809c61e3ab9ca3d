"""Advantage nodes: from rewards (and values) to what each policy token is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from flowrl import context
from flowrl.batches import Advantages, OldLogprobs, RefLogprobs, Rewards, Rollouts, Values
from flowrl.errors import GraphError, GroupSizeError, RewardError
from flowrl.nodes.base import Join, Node
from flowrl.nodes.policy_losses import kl_problems
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: What becomes of rows whose reward is invalid: the row is dropped, its whole group is, or the step fails.
Invalid = Literal["drop_row", "drop_group", "fail"]

#: A filter may have let only some of the rollouts through.
_ROLLOUTS_ANCHOR: Mapping[str, Join] = {
    "rewards": "subset",
    "values": "subset",
    "old_logprobs": "subset",
    "ref_logprobs": "subset",
}


class GAE(Node):
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438); see
    :func:`flowrl.functional.advantages.gae`.

    Args:
        gamma: discount.
        lam: λ of the estimator.
        kl_coef: a penalty on each policy token of ``kl_coef`` times the KL estimate of the policy against the
            reference; more than 0 needs ``old_logprobs`` and ``ref_logprobs``.
        kl_estimator: see :func:`flowrl.functional.kl.kl_estimate`.
        whiten: bring the advantages over all policy tokens of the batch to mean 0 and variance 1. Returns
            stay as they are.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".

    Shapes: one advantage and one return a response token; 0 at observations. Rows that were dropped are left
    out. Reports ``dropped_rows``, ``explained_variance`` of the values, and ``kl`` with a penalty.

    Raises:
        RewardError: a reward is invalid, and ``invalid="fail"``.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    whiten: bool = True
    invalid: Invalid = "drop_row"

    kind: ClassVar[str] = "advantage"
    joins: ClassVar[Mapping[str, Join]] = _ROLLOUTS_ANCHOR

    @property
    def split(self) -> Literal["rows", "groups", "whole"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whitening needs all policy tokens."""
        return "whole" if self.whiten else "groups" if self.invalid == "drop_group" else "rows"

    def problems(self) -> Iterable[str]:
        if not 0 <= self.gamma <= 1:
            yield f"gamma is {self.gamma}; expected 0 <= gamma <= 1"
        if not 0 <= self.lam <= 1:
            yield f"lam is {self.lam}; expected 0 <= lam <= 1"
        yield from kl_problems(self.kl_coef, self.kl_estimator)
        yield from _invalid_problems(self.invalid)

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        missing = [n for n in ("old_logprobs", "ref_logprobs") if n not in given]
        if self.kl_coef and missing:
            names = " and ".join(missing)
            yield f"kl_coef is {self.kl_coef} without {names}; expected them wired, or kl_coef=0"

    def __call__(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        values: Values,
        old_logprobs: OldLogprobs | None = None,
        ref_logprobs: RefLogprobs | None = None,
    ) -> Advantages:
        import torch

        from flowrl.functional.advantages import gae
        from flowrl.functional.masking import explained_variance, masked_whiten

        keep = kept_rows(rollouts, rewards, self.invalid, node=self.name)
        mask = rollouts.loss_mask.select(keep)
        token_rewards = rewards.select(keep).over_tokens(mask)
        if self.kl_coef:
            penalty = self._penalty(rollouts, old_logprobs, ref_logprobs).select(keep)
            token_rewards = mask.with_values(token_rewards.values + penalty.values)
        kept_values = values.values.select(keep)
        advantages, returns = gae(token_rewards, kept_values, mask, gamma=self.gamma, lam=self.lam)
        selected = mask.values.bool()
        context.report("explained_variance", explained_variance(kept_values.values, returns.values, selected))
        if self.whiten:
            whitened = masked_whiten(advantages.values, selected)
            advantages = mask.with_values(torch.where(selected, whitened, torch.zeros(())))
        return Advantages(rollouts.prompt_id[keep], rollouts.sample_id[keep], advantages, returns)

    def _penalty(self, rollouts: Rollouts, old: OldLogprobs | None, ref: RefLogprobs | None) -> Ragged:
        from flowrl.functional.masking import masked_mean

        penalty = kl_penalty(rollouts, self.kl_coef, self.kl_estimator, old, ref, node=self.name)
        mean = masked_mean(penalty.values, rollouts.loss_mask.values.bool())
        context.report("kl", -float(mean) / self.kl_coef)
        return penalty


class GroupAdvantage(Node):
    """How much better a response is than the other responses to its prompt; see
    :func:`flowrl.functional.advantages.group_advantages`.

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
    invalid: Invalid = "drop_row"
    degenerate: Literal["zero", "drop"] = "zero"

    kind: ClassVar[str] = "advantage"
    split: ClassVar[Literal["rows", "groups", "whole"]] = "groups"
    joins: ClassVar[Mapping[str, Join]] = _ROLLOUTS_ANCHOR
    needs_groups: ClassVar[int] = 2

    def problems(self) -> Iterable[str]:
        if not self.eps > 0:
            yield f"eps is {self.eps}; expected more than 0"
        if self.degenerate not in ("zero", "drop"):
            yield f"degenerate is {self.degenerate!r}; expected zero or drop"
        yield from _invalid_problems(self.invalid)

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Advantages:
        import torch

        from flowrl.functional.advantages import group_advantages, spread_over_tokens
        from flowrl.functional.grouping import Groups

        require_groups(rollouts, self.needs_groups, node=self.name)
        keep = kept_rows(rollouts, rewards, self.invalid, node=self.name, smallest_group=self.needs_groups)
        totals, prompt_id = rewards.totals[keep], rollouts.prompt_id[keep]
        groups = Groups.of(prompt_id)
        varied = groups.max(totals) > groups.min(totals)
        context.report("degenerate_groups", groups.num_groups - int(varied.sum()))
        if self.degenerate == "drop":
            stay = varied[groups.index]
            context.report("dropped_rows_degenerate", int((~stay).sum()))
            keep, totals, prompt_id = keep[stay], totals[stay], prompt_id[stay]
        row = group_advantages(
            totals,
            prompt_id,
            normalize_by_std=self.normalize_by_std,
            leave_one_out=self.leave_one_out,
            eps=self.eps,
        )
        mask = rollouts.loss_mask.select(keep)
        return Advantages(
            prompt_id,
            rollouts.sample_id[keep],
            spread_over_tokens(row, mask),
            spread_over_tokens(totals.to(torch.float32), mask),
        )


def kept_rows(rollouts: Rollouts, rewards: Rewards, invalid: Invalid, *, node: str, smallest_group: int = 1) -> Tensor:
    """int64 indices of the rows to use, in order; reports how many were dropped.

    Args:
        invalid: what becomes of rows whose reward is invalid.
        smallest_group: groups with fewer rows left are dropped whole.

    Raises:
        RewardError: a reward is invalid, and ``invalid="fail"``.
    """
    from flowrl.functional.grouping import Groups

    keep = rewards.valid.bool()
    num_invalid = int((~keep).sum())
    if num_invalid and invalid == "fail":
        reasons = Counter(r for r, v in zip(rewards.reasons, keep.tolist(), strict=True) if not v)
        reason, count = reasons.most_common(1)[0]
        raise RewardError(
            f"{node}: {num_invalid} of {rewards.num_rows} rewards are invalid",
            expected="valid rewards, since invalid='fail'",
            received=f"{count} rows with: {reason}",
            do="repair the reward, or choose invalid='drop_row' or 'drop_group'",
        )
    groups = Groups.of(rollouts.prompt_id)
    if invalid == "drop_group":
        keep = keep & (groups.sum((~keep).float()) == 0)[groups.index]
    lonely = keep & (groups.sum(keep.float()) < smallest_group)[groups.index]
    keep = keep & ~lonely
    context.report("dropped_rows", int((~keep).sum()))
    context.report("dropped_rows_invalid", num_invalid)
    if smallest_group > 1:
        context.report("dropped_rows_group_too_small", int(lonely.sum()))
    return keep.nonzero().flatten()


def require_groups(rollouts: Rollouts, smallest: int, *, node: str) -> None:
    """Refuse rollouts with fewer than ``smallest`` samples of some prompt.

    Raises:
        GroupSizeError: with the prompt_id.
    """
    from flowrl.functional.grouping import Groups

    groups = Groups.of(rollouts.prompt_id)
    short = (groups.sizes < smallest).nonzero().flatten().tolist()
    if short:
        raise GroupSizeError(
            f"{node} compares the responses to a prompt, and some prompts have too few",
            expected=f"at least {smallest} rollouts of each prompt",
            received=f"{int(groups.sizes[short[0]])} of prompt_id {int(groups.prompt_id[short[0]])}"
            + (f", and {len(short) - 1} more such prompts" if len(short) > 1 else ""),
            do=f"sample groups: Rollout(…, group_size={max(smallest, 4)}), and never split a group",
        )


def kl_penalty(
    rollouts: Rollouts,
    kl_coef: float,
    kl_estimator: str,
    old_logprobs: OldLogprobs | None,
    ref_logprobs: RefLogprobs | None,
    *,
    node: str,
) -> Ragged:
    """float32 ragged in response layout: −``kl_coef`` times the KL at policy tokens, 0 at observations.

    Raises:
        GraphError: a log-prob is missing.
    """
    import torch

    from flowrl.functional.kl import kl_estimate

    if old_logprobs is None or ref_logprobs is None:
        raise GraphError(
            f"{node}: a KL penalty needs two log-probs",
            expected="old_logprobs and ref_logprobs",
            received=f"kl_coef={kl_coef} without both",
            do="pass both, or set kl_coef=0",
        )
    assert not old_logprobs.is_current, "the plan removed log-probs that a reward is computed from"
    kl = kl_estimate(old_logprobs.old_logprobs.values, ref_logprobs.ref_logprobs.values, kl_estimator)
    mask = rollouts.loss_mask
    return mask.with_values(torch.where(mask.values.bool(), -kl_coef * kl, torch.zeros(())))


def _invalid_problems(invalid: str) -> Iterable[str]:
    if invalid not in ("drop_row", "drop_group", "fail"):
        yield f"invalid is {invalid!r}; expected drop_row, drop_group or fail"
