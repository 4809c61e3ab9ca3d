"""Advantage nodes: from rewards (and values) to what each policy token is worth. Here is what they share, and GAE;
``group_advantage.py`` has those with a number a row, ``token_advantage.py`` those with a number a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flowrl import context
from flowrl.batches import Advantages, OldLogprobs, RefLogprobs, Rewards, Rollouts, Values
from flowrl.errors import GraphError, GroupSizeError, RewardError
from flowrl.models import State
from flowrl.nodes.base import Join, Node, Split
from flowrl.nodes.kl_control import coefficient
from flowrl.nodes.policy_losses import kl_problems
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: What becomes of rows whose reward is invalid: the row is dropped, its whole group is, or the step fails.
Invalid = Literal["drop_row", "drop_group", "fail"]

#: A filter may have let only some of the rollouts through.
ROLLOUTS_ANCHOR: Mapping[str, Join] = {
    "rewards": "subset",
    "values": "subset",
    "old_logprobs": "subset",
    "ref_logprobs": "subset",
}


class AdvantageEstimator(Node):
    """The base of advantage nodes: which rows are used, and how a batch may be split.

    Args:
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail". Rows that were
            dropped are left out of the result, so that losses do not train on them; where no row is left the result
            has no rows. A node that compares within groups also drops groups of which fewer than ``needs_groups``
            rows are left. Reports ``dropped_rows``.
    """

    invalid: Invalid = field(default="drop_row", kw_only=True)

    kind: ClassVar[str] = "advantage"
    joins: ClassVar[Mapping[str, Join]] = ROLLOUTS_ANCHOR
    #: Whether a statistic of the whole batch enters: it is then never split.
    of_batch: ClassVar[bool] = False
    #: Settings to try the class with in tests of properties: one entry for each setting that changes the formula.
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    @property
    def split(self) -> Split:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whole where a statistic of the batch enters, else by groups where rows are compared, or dropped, together."""
        if self.of_batch:
            return "whole"
        return "groups" if self.needs_groups > 1 or self.invalid == "drop_group" else "rows"

    def problems(self) -> Iterable[str]:
        if self.invalid not in ("drop_row", "drop_group", "fail"):
            yield f"invalid is {self.invalid!r}; expected drop_row, drop_group or fail"

    def usable_rows(self, rollouts: Rollouts, rewards: Rewards) -> Tensor:
        """int64 indices of the rows to use, in order; reports how many were dropped.

        Raises:
            GroupSizeError: a prompt has fewer than ``needs_groups`` rollouts.
            RewardError: a reward is invalid, and ``invalid="fail"``.
        """
        require_groups(rollouts, self.needs_groups, node=self.name)
        return kept_rows(rollouts, rewards, self.invalid, node=self.name, smallest_group=self.needs_groups)


class GAE(AdvantageEstimator):
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438); see
    :func:`flowrl.functional.advantages.gae`.

    Args:
        gamma: discount.
        lam: λ of the estimator.
        kl_coef: a penalty on each policy token of ``kl_coef`` times the KL estimate of the policy against the
            reference; more than 0, or a ``State`` that holds a number (an adaptive coefficient), needs
            ``old_logprobs`` and ``ref_logprobs``.
        kl_estimator: see :func:`flowrl.functional.kl.kl_estimate`.
        whiten: bring the advantages over all policy tokens of the batch to mean 0 and variance 1. Returns
            stay as they are.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".

    Shapes: one advantage and one return a response token; 0 at observations. Rows that were dropped are left
    out. Rows are not compared with each other: there are no degenerate groups. A row without a policy token is kept,
    with zeros. Reports ``dropped_rows``, ``explained_variance`` of the values, and with a penalty ``kl`` (mean over
    policy tokens) and ``kl_coef``.

    Raises:
        RewardError: a reward is invalid, and ``invalid="fail"``.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float | State = 0.0
    kl_estimator: str = "k1"
    whiten: bool = True

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"gamma": 0.9, "lam": 0.8, "whiten": False},
        {"kl_coef": 0.1, "kl_estimator": "k3", "whiten": False, "invalid": "drop_group"},
    )

    @property
    def of_batch(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whitening needs all policy tokens."""
        return self.whiten

    def problems(self) -> Iterable[str]:
        if not 0 <= self.gamma <= 1:
            yield f"gamma is {self.gamma}; expected 0 <= gamma <= 1"
        if not 0 <= self.lam <= 1:
            yield f"lam is {self.lam}; expected 0 <= lam <= 1"
        yield from kl_problems(self.kl_coef, self.kl_estimator)
        yield from super().problems()

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        missing = [n for n in ("old_logprobs", "ref_logprobs") if n not in given]
        if self.kl_coef and missing:
            names = " and ".join(missing)
            shown = f"State {self.kl_coef.name!r}" if isinstance(self.kl_coef, State) else self.kl_coef
            yield f"kl_coef is {shown} without {names}; expected them wired, or kl_coef=0"

    def __call__(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        values: Values,
        old_logprobs: OldLogprobs | None = None,
        ref_logprobs: RefLogprobs | None = None,
    ) -> Advantages:
        from flowrl.functional.advantages import gae, whitened
        from flowrl.functional.masking import explained_variance

        keep = self.usable_rows(rollouts, rewards)
        mask = rollouts.loss_mask.select(keep)
        token_rewards = rewards.select(keep).over_tokens(mask)
        if self.kl_coef:
            penalty = self._penalty(rollouts, old_logprobs, ref_logprobs).select(keep)
            token_rewards = mask.with_values(token_rewards.values + penalty.values)
        kept_values = values.values.select(keep)
        advantages, returns = gae(token_rewards, kept_values, mask, gamma=self.gamma, lam=self.lam)
        fit = explained_variance(kept_values.values, returns.values, mask.values.bool())
        context.report("explained_variance", fit)
        if self.whiten:
            advantages = whitened(advantages, mask)
        return Advantages(rollouts.prompt_id[keep], rollouts.sample_id[keep], advantages, returns)

    def _penalty(self, rollouts: Rollouts, old: OldLogprobs | None, ref: RefLogprobs | None) -> Ragged:
        from flowrl.functional.masking import masked_mean

        coef = coefficient(self.kl_coef)
        kl = kl_of_tokens(rollouts, self.kl_estimator, old, ref, node=self.name)
        context.report("kl", float(masked_mean(kl.values, rollouts.loss_mask.values.bool())))
        context.report("kl_coef", coef)
        return kl.with_values(-coef * kl.values)


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
    kl = kl_of_tokens(rollouts, kl_estimator, old_logprobs, ref_logprobs, node=node)
    return kl.with_values(0.0 - kl_coef * kl.values)  # not −0.0 at observations


def kl_of_tokens(
    rollouts: Rollouts,
    kl_estimator: str,
    old_logprobs: OldLogprobs | None,
    ref_logprobs: RefLogprobs | None,
    *,
    node: str,
) -> Ragged:
    """float32 ragged in response layout: the estimate of the KL of the policy before the update against the reference
    at policy tokens, 0 at observations.

    Raises:
        GraphError: a log-prob is missing.
    """
    import torch

    from flowrl.functional.kl import kl_estimate

    if old_logprobs is None or ref_logprobs is None:
        missing = [n for n, v in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs)) if v is None]
        raise GraphError(
            f"{node}: a KL penalty needs two log-probs",
            expected="old_logprobs and ref_logprobs",
            received=f"a penalty (kl_coef) without {' and '.join(missing)}",
            do="pass both, or set kl_coef=0",
        )
    assert not old_logprobs.is_current, "the plan removed log-probs that a reward is computed from"
    mask = rollouts.loss_mask
    kl = kl_estimate(old_logprobs.old_logprobs.values, ref_logprobs.ref_logprobs.values, kl_estimator)
    return mask.with_values(torch.where(mask.values.bool(), kl, torch.zeros(())))
