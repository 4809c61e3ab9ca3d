"""Advantage nodes with a number of its own for each token: returns to go, with the baseline of a batch, a greedy
response, or a group at that token. The formulas are in :mod:`flowrl.functional.advantages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from flowrl.batches import Advantages, OldLogprobs, Rewards, Rollouts
from flowrl.errors import GraphError
from flowrl.nodes.advantage import ROLLOUTS_ANCHOR, AdvantageEstimator
from flowrl.nodes.base import Join, Node
from flowrl.nodes.logprobs import PolicyLogprobs
from flowrl.nodes.row_advantage import GroupEstimator


class ReinforcePlusPlus(GroupEstimator):
    """REINFORCE++ (arXiv 2501.03262): returns to go, whitened over all policy tokens of the batch. See
    :func:`flowrl.functional.advantages.reinforce_plus_plus` and ``reinforce_plus_plus_baseline``. The penalty for
    leaving the reference, which the paper has in the reward, is a node of its own: ``KLPenalty``.

    Args:
        gamma: discount a policy token.
        baseline: instead of the return to go take R − mean of the group before whitening; there is no discount then.
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: with ``baseline``, what becomes of a group whose rewards are all equal: "zero" keeps its rows, with
            0 before whitening, "drop" leaves them out. Without it none is degenerate, and groups may have one row.

    Shapes: one advantage and one return a response token; 0 at observations. ``returns`` are the returns to go, with
    ``baseline`` the row's total reward. Rows that were dropped are left out. Reports ``dropped_rows``, and with
    ``baseline`` ``degenerate_groups``.

    Raises:
        GroupSizeError: with ``baseline``, a prompt has fewer than two rollouts.
        RewardError: a reward is invalid, and ``invalid="fail"``.
    """

    gamma: float = 1.0
    baseline: bool = False

    of_batch: ClassVar[bool] = True
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"gamma": 0.9},
        {"baseline": True},
        {"baseline": True, "degenerate": "drop"},
    )

    @property
    def needs_groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """2 where the group's mean is the baseline."""
        return 2 if self.baseline else 1

    def problems(self) -> Iterable[str]:
        if not 0 <= self.gamma <= 1:
            yield f"gamma is {self.gamma}; expected 0 <= gamma <= 1"
        elif self.baseline and self.gamma != 1:
            yield f"gamma is {self.gamma} with baseline=True, which does not discount; expected 1"
        yield from super().problems()

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Advantages:
        from flowrl.functional.advantages import reinforce_plus_plus, reinforce_plus_plus_baseline, spread_over_tokens
        from flowrl.functional.grouping import Groups

        keep = self.usable_rows(rollouts, rewards)
        if self.baseline:
            groups = Groups.of(rollouts.prompt_id[keep])
            varied = groups.varied(rewards.totals[keep])[groups.index]
            keep = self.informative_rows(keep, varied, rollouts.prompt_id[keep])
        mask, prompt_id = rollouts.loss_mask.select(keep), rollouts.prompt_id[keep]
        if self.baseline:
            totals = rewards.totals[keep]
            advantages = reinforce_plus_plus_baseline(totals, prompt_id, mask)
            returns = spread_over_tokens(totals, mask)
        else:
            advantages, returns = reinforce_plus_plus(rewards.select(keep).over_tokens(mask), mask, gamma=self.gamma)
        return Advantages(prompt_id, rollouts.sample_id[keep], advantages, returns)


class ReMaxAdvantage(AdvantageEstimator):
    """ReMax (arXiv 2310.10505): the return to go minus what the greedy response to the same prompt earns; see
    :func:`flowrl.functional.advantages.remax`.

    Args:
        invalid: what becomes of rows whose reward, or whose greedy response's reward, is invalid: "drop_row",
            "drop_group" or "fail".

    Inputs: ``greedy_rewards`` have one row a prompt: the reward of a response at temperature 0.

    Shapes: one advantage and one return (to go) a response token; 0 at observations. Rows that were dropped are left
    out. Rows are not compared with each other: there are no degenerate groups, and groups may have one row. Reports
    ``dropped_rows``.

    Raises:
        RewardError: a reward is invalid, and ``invalid="fail"``.
        GraphError: the greedy rewards are those of the rollouts.

    Example::

        greedy = Rollout(actor, sampling=Sampling(temperature=0.0))(prompts)
        advantages = ReMaxAdvantage()(rollouts, reward(rollouts), greedy_rewards=reward(greedy))
    """

    joins: ClassVar[Mapping[str, Join]] = {**ROLLOUTS_ANCHOR, "greedy_rewards": "prompt"}

    def __call__(self, rollouts: Rollouts, rewards: Rewards, *, greedy_rewards: Rewards) -> Advantages:
        from flowrl.functional.advantages import remax

        if greedy_rewards is rewards:
            raise GraphError(
                f"{self.name}: the rollouts are their own baseline, and every advantage is 0 at its first token",
                expected="greedy_rewards of greedy responses to the same prompts",
                received="the rewards of the rollouts themselves",
                do="sample them: Rollout(actor, sampling=Sampling(temperature=0.0))(prompts)",
            )
        reasons = [
            a or (b and f"greedy response: {b}") for a, b in zip(rewards.reasons, greedy_rewards.reasons, strict=True)
        ]
        both = replace(rewards, valid=rewards.valid & greedy_rewards.valid, reasons=tuple(reasons))
        keep = self.usable_rows(rollouts, both)
        mask = rollouts.loss_mask.select(keep)
        token_rewards = rewards.select(keep).over_tokens(mask)
        advantages, returns = remax(token_rewards, greedy_rewards.totals[keep], mask)
        return Advantages(rollouts.prompt_id[keep], rollouts.sample_id[keep], advantages, returns)


class OptimalTokenBaseline(GroupEstimator):
    """Compare the return to go at each token with those of the group at the same token, weighted by how far the
    gradient has been moved up to there (arXiv 2602.07078); see
    :func:`flowrl.functional.advantages.optimal_token_baseline`.

    Args:
        invalid: what becomes of rows whose reward is invalid: "drop_row", "drop_group" or "fail".
        degenerate: what becomes of a group in which all returns are equal, or fewer than two responses have a policy
            token: "zero" keeps its rows with advantage 0, "drop" leaves them out.

    Inputs: ``old_logprobs`` with Σπ² of each token, which ``PolicyLogprobs(model, sum_pi_squared=True)`` computes.

    Shapes: one advantage and one return (to go) a response token; 0 at observations. Rows that were dropped are left
    out. Reports ``dropped_rows`` and ``degenerate_groups``.

    Raises:
        GroupSizeError: a prompt has fewer than two rollouts.
        RewardError: a reward is invalid, and ``invalid="fail"``.
        GraphError: the old log-probs come without Σπ².
    """

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"degenerate": "drop"})

    def maker_problems(self, makers: Mapping[str, Node]) -> Iterable[str]:
        maker = makers.get("old_logprobs")
        if isinstance(maker, PolicyLogprobs) and not maker.sum_pi_squared:
            yield "old_logprobs are without sum_pi_squared; expected PolicyLogprobs(model, sum_pi_squared=True)"

    def __call__(self, rollouts: Rollouts, rewards: Rewards, old_logprobs: OldLogprobs) -> Advantages:
        from flowrl.functional.advantages import optimal_token_baseline, reinforce_plus_plus, returns_vary

        if old_logprobs.sum_pi_squared is None:
            raise GraphError(
                f"{self.name} weights tokens by Σπ², which its old log-probs come without",
                expected="old_logprobs with sum_pi_squared",
                received="old_logprobs alone",
                do="compute them with PolicyLogprobs(model, sum_pi_squared=True)",
            )
        assert not old_logprobs.is_current, "the plan removed log-probs that an advantage is computed from"
        keep = self.usable_rows(rollouts, rewards)
        mask, prompt_id = rollouts.loss_mask.select(keep), rollouts.prompt_id[keep]
        _, to_go = reinforce_plus_plus(rewards.select(keep).over_tokens(mask), mask, whiten=False)
        keep = self.informative_rows(keep, returns_vary(to_go, prompt_id, mask), prompt_id)
        mask, prompt_id = rollouts.loss_mask.select(keep), rollouts.prompt_id[keep]
        advantages, returns = optimal_token_baseline(
            rewards.select(keep).over_tokens(mask),
            old_logprobs.old_logprobs.select(keep),
            old_logprobs.sum_pi_squared.select(keep),
            prompt_id,
            mask,
        )
        return Advantages(prompt_id, rollouts.sample_id[keep], advantages, returns)
