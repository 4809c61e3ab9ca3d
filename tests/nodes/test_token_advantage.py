from dataclasses import replace

import pytest
import torch

from flowrl.batches import OldLogprobs, Rewards, Rollouts
from flowrl.errors import AlignmentError, GraphError, RewardError
from flowrl.nodes import rewards_like
from flowrl.nodes.token_advantage import OptimalTokenBaseline, ReinforcePlusPlus, ReMaxAdvantage
from flowrl.ragged import Ragged
from tests.nodes.advantage_cases import ORIGIN, greedy_rewards, run, with_invalid
from tests.tiny import recorded_rollouts


def close(got: Ragged, *want: list[float]) -> None:
    expected = Ragged.from_rows(list(want), torch.float32)
    torch.testing.assert_close(got.values, expected.values, rtol=1e-5, atol=1e-6)
    assert got.lengths.tolist() == expected.lengths.tolist()


class TestReinforcePlusPlus:
    rollouts = recorded_rollouts(1, 2, response_lengths=(5, 1), observations=True)  # masks 1 1 0 0 1 and 1

    def test_by_hand(self) -> None:
        """γ = ½. The row's score comes last, what an observation earns goes to the token before: 1, 0 + 2, 4 of row 0.
        Returns 3, 4, 4 and 1: mean 3, variance 2."""
        noise = Ragged.from_rows([[1.0, 0.0, 0.0, 2.0, 0.0], [0.0]], torch.float32)
        rewards = rewards_like(self.rollouts, score=[4.0, 1.0], noise=noise)
        advantages, reported = run(ReinforcePlusPlus(gamma=0.5), self.rollouts, rewards)
        assert advantages.returns.to_lists() == [[3.0, 4.0, 0.0, 0.0, 4.0], [1.0]]
        close(advantages.advantages, [0.0, 0.5**0.5, 0.0, 0.0, 0.5**0.5], [-(2**0.5)])
        assert reported == {"dropped_rows": 0, "dropped_rows_invalid": 0}

    def test_with_baseline_by_hand(self) -> None:
        """R − mean is 1.5 at three tokens and −1.5 at one: mean ¾, variance 9/4."""
        rewards = rewards_like(self.rollouts, score=[4.0, 1.0])
        advantages, reported = run(ReinforcePlusPlus(baseline=True), self.rollouts, rewards)
        close(advantages.advantages, [0.5, 0.5, 0.0, 0.0, 0.5], [-1.5])
        assert advantages.returns.to_lists() == [[4.0, 4.0, 0.0, 0.0, 4.0], [1.0]]
        assert reported["degenerate_groups"] == 0

    def test_with_baseline_degenerate_groups_may_be_left_out_before_whitening(self) -> None:
        rollouts = recorded_rollouts(2, 2, response_lengths=(1, 1, 3, 1))
        rewards = rewards_like(rollouts, score=[1.0, 3.0, 0.1, 0.1])
        advantages, reported = run(ReinforcePlusPlus(baseline=True, degenerate="drop"), rollouts, rewards)
        close(advantages.advantages, [-(0.5**0.5)], [0.5**0.5])
        assert reported["degenerate_groups"] == 1 and reported["dropped_rows_degenerate"] == 2

    def test_invalid_rows_do_not_enter_the_statistics(self) -> None:
        rollouts = recorded_rollouts(3, 1, response_lengths=(1, 1, 1))
        rewards = with_invalid(rewards_like(rollouts, score=[1.0, 99.0, 3.0]), 1)
        close(ReinforcePlusPlus()(rollouts, rewards).advantages, [-(0.5**0.5)], [0.5**0.5])

    def test_problems_and_split(self) -> None:
        assert list(ReinforcePlusPlus().problems()) == list(ReinforcePlusPlus(baseline=True).problems()) == []
        assert (ReinforcePlusPlus().needs_groups, ReinforcePlusPlus(baseline=True).needs_groups) == (1, 2)
        assert ReinforcePlusPlus().split == "whole"
        found = [p.split(" ")[0] for p in ReinforcePlusPlus(gamma=2.0, degenerate="drop").problems()]
        assert found == ["gamma", "degenerate"]
        (found,) = ReinforcePlusPlus(gamma=0.9, baseline=True).problems()
        assert "baseline" in found


class TestReMax:
    rollouts = recorded_rollouts(2, 2, response_lengths=(5, 1, 2, 0), observations=True)
    rewards = rewards_like(rollouts, score=[4.0, 1.0, 2.0, 7.0])

    def test_by_hand(self) -> None:
        """Prompt 0 earns 0 greedily, prompt 1 earns 0.3."""
        greedy = greedy_rewards(self.rollouts)
        advantages, reported = run(ReMaxAdvantage(), self.rollouts, self.rewards, greedy_rewards=greedy)
        close(advantages.advantages, [4.0, 4.0, 0.0, 0.0, 4.0], [1.0], [1.7, 1.7], [])
        assert advantages.returns.to_lists() == [[4.0, 4.0, 0.0, 0.0, 4.0], [1.0], [2.0, 2.0], []]
        assert reported == {"dropped_rows": 0, "dropped_rows_invalid": 0}
        assert ReMaxAdvantage().split == "rows"

    def test_rows_are_joined_by_prompt(self) -> None:
        """The greedy rewards stand in another order, and know prompts that were filtered out."""
        greedy = greedy_rewards(self.rollouts).select([1, 0])
        kept = self.rollouts.select([3, 2])
        got = ReMaxAdvantage()(kept, self.rewards, greedy_rewards=greedy)
        close(got.advantages, [], [1.7, 1.7])
        with pytest.raises(AlignmentError, match="greedy_rewards"):
            ReMaxAdvantage()(self.rollouts, self.rewards, greedy_rewards=greedy.select([0]))

    def test_without_a_greedy_reward_there_is_no_baseline(self) -> None:
        greedy = with_invalid(greedy_rewards(self.rollouts), 0)
        advantages, reported = run(ReMaxAdvantage(), self.rollouts, self.rewards, greedy_rewards=greedy)
        assert advantages.prompt_id.tolist() == [1, 1] and reported["dropped_rows_invalid"] == 2
        with pytest.raises(RewardError, match="greedy response: timed out"):
            ReMaxAdvantage(invalid="fail")(self.rollouts, self.rewards, greedy_rewards=greedy)

    def test_the_rollouts_are_not_their_own_baseline(self) -> None:
        one_each = self.rollouts.select([0, 2])
        rewards = self.rewards.select([0, 2])
        with pytest.raises(GraphError, match="temperature=0"):
            ReMaxAdvantage()(one_each, rewards, greedy_rewards=rewards)


class TestOptimalTokenBaseline:
    rollouts = recorded_rollouts(1, 3, response_lengths=(2, 1, 2))

    def old_logprobs(self, rollouts: Rollouts, pi: list[float]) -> OldLogprobs:
        """Σπ² equals π: the energy of a token is 1 − π."""
        column = rollouts.loss_mask.with_values(torch.tensor(pi))
        return OldLogprobs(
            rollouts.prompt_id,
            rollouts.sample_id,
            column.with_values(column.values.log()),
            ORIGIN,
            sum_pi_squared=column,
        )

    def test_by_hand(self) -> None:
        """Step 0: W = ½, ¾, ¾ and G = 2, 4, 6. Step 1: W = 1, 5/4 and G = 2, 6."""
        old = self.old_logprobs(self.rollouts, [0.5, 0.5, 0.25, 0.25, 0.5])
        rewards = rewards_like(self.rollouts, score=[2.0, 4.0, 6.0])
        advantages, reported = run(OptimalTokenBaseline(), self.rollouts, rewards, old)
        first, second = (1 + 3 + 4.5) / 2, (2 + 7.5) / 2.25
        close(advantages.advantages, [2 - first, 2 - second], [4 - first], [6 - first, 6 - second])
        assert advantages.returns.to_lists() == [[2.0, 2.0], [4.0], [6.0, 6.0]]
        assert reported["degenerate_groups"] == 0 and OptimalTokenBaseline().split == "groups"

    def test_degenerate_groups(self) -> None:
        """Equal returns, and one response with a token beside one without."""
        rollouts = recorded_rollouts(3, 2, response_lengths=(2, 1, 3, 0, 1, 1))
        old = self.old_logprobs(rollouts, [0.5] * 8)
        rewards = rewards_like(rollouts, score=[0.1, 0.1, 5.0, 1.0, 0.0, 1.0])
        advantages, reported = run(OptimalTokenBaseline(), rollouts, rewards, old)
        assert advantages.advantages.to_lists() == [[0.0, 0.0], [0.0], [0.0] * 3, [], [-0.5], [0.5]]
        assert reported["degenerate_groups"] == 2
        advantages, reported = run(OptimalTokenBaseline(degenerate="drop"), rollouts, rewards, old)
        assert advantages.advantages.to_lists() == [[-0.5], [0.5]] and reported["dropped_rows_degenerate"] == 4

    def test_old_logprobs_without_sum_pi_squared_are_refused(self) -> None:
        old = replace(self.old_logprobs(self.rollouts, [0.5] * 5), sum_pi_squared=None)
        rewards = rewards_like(self.rollouts, score=[2.0, 4.0, 6.0])
        with pytest.raises(GraphError, match=r"PolicyLogprobs\(model, sum_pi_squared=True\)"):
            OptimalTokenBaseline()(self.rollouts, rewards, old)


def test_rewards_of_conversations_are_not_lost() -> None:
    """Whatever a response earns, at an observation too, is in the return of its first policy token."""
    rollouts = recorded_rollouts(1, 2, response_lengths=(5, 6), observations=True)
    earned = rollouts.loss_mask.with_values(torch.arange(11, dtype=torch.float32))
    rewards: Rewards = rewards_like(rollouts, score=[100.0, 200.0], earned=earned)
    old = TestOptimalTokenBaseline().old_logprobs(rollouts, [0.5] * 11)
    greedy = greedy_rewards(rollouts)
    for got in (
        ReinforcePlusPlus()(rollouts, rewards),
        ReMaxAdvantage()(rollouts, rewards, greedy_rewards=greedy),
        OptimalTokenBaseline()(rollouts, rewards, old),
    ):
        assert [row[0] for row in got.returns.to_lists()] == rewards.totals.tolist() == [110.0, 245.0]
