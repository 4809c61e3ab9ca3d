import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.functional.advantages import (
    discounted_sums,
    gae,
    num_policy_tokens,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    spread_over_tokens,
)
from flowrl.ragged import Ragged

NAN = float("nan")


def ragged(*rows: list[float], dtype: torch.dtype = torch.float32) -> Ragged:
    return Ragged.from_rows(list(rows), dtype)


def mask_of(*rows: list[int]) -> Ragged:
    return Ragged.from_rows(list(rows), torch.uint8)


def close(got: Ragged, *want: list[float]) -> None:
    torch.testing.assert_close(got.values, ragged(*want).values, rtol=1e-5, atol=1e-6)
    assert got.lengths.tolist() == [len(row) for row in want]


class TestGae:
    def test_by_hand(self) -> None:
        """γ=0.5, λ=0.5. Row 0: δ₁ = 2 − 1 = 1; δ₀ = 1 + 0.5·1 − 3 = −1.5; A₀ = −1.5 + 0.25·1."""
        advantages, returns = gae(
            ragged([1.0, 2.0], [4.0]),
            ragged([3.0, 1.0], [1.0]),
            mask_of([1, 1], [1]),
            gamma=0.5,
            lam=0.5,
        )
        assert advantages.to_lists() == [[-1.25, 1.0], [3.0]]
        assert returns.to_lists() == [[1.75, 2.0], [4.0]]

    def test_observations_are_skipped_and_their_rewards_go_to_the_action_before(self) -> None:
        """As if the tokens between were not there: what an observation earns belongs to the action that led to it."""
        mask = mask_of([0, 1, 0, 0, 1, 0])
        got = gae(ragged([8.0, 1.0, 16.0, 0.0, 2.0, 32.0]), ragged([NAN, 3.0, NAN, NAN, 1.0, NAN]), mask)
        want = gae(ragged([1.0 + 8.0 + 16.0, 2.0 + 32.0]), ragged([3.0, 1.0]), mask_of([1, 1]))
        place = mask.values.bool()
        for g, w in zip(got, want, strict=True):
            assert g.values[place].tolist() == w.values.tolist()
            assert g.values[~place].tolist() == [0.0] * 4

    def test_rows_without_policy_tokens_and_no_rows(self) -> None:
        advantages, returns = gae(ragged([5.0], []), ragged([NAN], []), mask_of([0], []))
        assert advantages.to_lists() == returns.to_lists() == [[0.0], []]
        empty = Ragged.from_rows([], torch.float32)
        assert gae(empty, empty, Ragged.from_rows([], torch.uint8))[0].num_rows == 0

    def test_lambda_one_gives_returns_to_go(self) -> None:
        _, returns = gae(ragged([1.0, 2.0, 3.0]), ragged([0.3, -0.7, 0.1]), mask_of([1, 1, 1]), gamma=1, lam=1)
        torch.testing.assert_close(returns.values, torch.tensor([6.0, 5.0, 3.0]))

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.lists(st.floats(-5, 5), max_size=9), max_size=5), st.floats(0, 1))
    def test_discounted_sums_are_a_backward_scan(self, rows: list[list[float]], discount: float) -> None:
        column = Ragged.from_rows(rows, torch.float64)
        want: list[float] = []
        for values in rows:
            sums = list(itertools.accumulate(reversed(values), lambda total, x: x + discount * total))
            want += reversed(sums)
        got = discounted_sums(column.values.double(), column.row_of_value, discount)
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


class TestReinforcePlusPlus:
    def test_by_hand(self) -> None:
        """γ = ½. Row 0 earns 1 and, at the observation after it, 4 with its first token, 2 with its second: 6 and 2.
        Returns 6, 2, 3: mean 11/3, variance 13/3."""
        mask = mask_of([1, 0, 1], [1])
        advantages, returns = reinforce_plus_plus(ragged([1.0, 4.0, 2.0], [3.0]), mask, gamma=0.5)
        assert returns.to_lists() == [[6.0, 0.0, 2.0], [3.0]]
        scale = (13 / 3) ** 0.5
        close(advantages, [7 / 3 / scale, 0.0, -5 / 3 / scale], [-2 / 3 / scale])
        assert reinforce_plus_plus(ragged([1.0, 4.0, 2.0], [3.0]), mask, gamma=0.5, whiten=False)[0] == returns

    def test_equal_returns_whiten_to_exactly_zero(self) -> None:
        advantages, returns = reinforce_plus_plus(ragged([0.0, 0.1], [0.1], []), mask_of([1, 1], [1], []))
        assert advantages.to_lists() == [[0.0, 0.0], [0.0], []]
        assert returns.values.tolist() == pytest.approx([0.1] * 3)
        one_token, _ = reinforce_plus_plus(ragged([7.0]), mask_of([1]))
        assert one_token.to_lists() == [[0.0]]


class TestReinforcePlusPlusBaseline:
    def test_by_hand(self) -> None:
        """R − mean is −1 at two tokens and 1 at one: mean −1/3, variance 4/3."""
        got = reinforce_plus_plus_baseline(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), mask_of([1, 0, 1], [1]))
        close(got, [-(3**-0.5), 0.0, -(3**-0.5)], [2 * 3**-0.5])

    def test_a_degenerate_group_is_moved_with_the_others_and_a_degenerate_batch_is_zero(self) -> None:
        """Group 1 is 0 before whitening; after it, it is −mean/std of the batch: here the mean is −¼, std √(11/12)."""
        prompt, mask = torch.tensor([0, 0, 1, 1]), mask_of([1, 1], [1], [1], [])
        got = reinforce_plus_plus_baseline(torch.tensor([1.0, 3.0, 0.1, 0.1]), prompt, mask)
        assert got.row(2).tolist() == pytest.approx([0.25 / (11 / 12) ** 0.5], rel=1e-6)
        same = reinforce_plus_plus_baseline(torch.full((4,), 0.1), prompt, mask)
        assert same.values.tolist() == [0.0] * 4


class TestRemax:
    def test_by_hand(self) -> None:
        rewards = ragged([1.0, 2.0, 3.0], [5.0], [])
        advantages, returns = remax(rewards, torch.tensor([4.0, 5.0, 1.0]), mask_of([1, 0, 1], [1], []))
        assert advantages.to_lists() == [[2.0, 0.0, -1.0], [0.0], []]
        assert returns.to_lists() == [[6.0, 0.0, 3.0], [5.0], []]

    def test_the_baseline_of_a_row_without_a_policy_token_does_not_matter(self) -> None:
        advantages, _ = remax(ragged([1.0], [2.0]), torch.tensor([NAN, 1.0]), mask_of([0], [1]))
        assert advantages.to_lists() == [[0.0], [1.0]]


class TestOptimalTokenBaseline:
    """π is ½ and ½ in row 0, ¼ in row 1, ¼ and ½ in row 2; Σπ² equals π, so that the energy of a token is 1 − π."""

    prompt = torch.tensor([0, 0, 0])
    pi = ragged([0.5, 0.5], [0.25], [0.25, 0.5])
    rewards = ragged([0.0, 2.0], [4.0], [1.0, 6.0])
    mask = mask_of([1, 1], [1], [1, 1])

    def run(self, rewards: Ragged, pi: Ragged, prompt: torch.Tensor, mask: Ragged):
        return optimal_token_baseline(rewards, pi.with_values(pi.values.log()), pi, prompt, mask)

    def test_by_hand(self) -> None:
        """Step 0: W = ½, ¾, ¾ and G = 2, 4, 7. Step 1: W = 1, 5/4 and G = 2, 6."""
        advantages, returns = self.run(self.rewards, self.pi, self.prompt, self.mask)
        first, second = (1 + 3 + 5.25) / 2, (2 + 7.5) / 2.25
        close(advantages, [2 - first, 2 - second], [4 - first], [7 - first, 6 - second])
        assert returns.to_lists() == [[2.0, 2.0], [4.0], [7.0, 6.0]]

    def test_the_tail_of_the_one_longest_response_has_no_baseline(self) -> None:
        keep = torch.tensor([0, 1])
        advantages, _ = self.run(
            self.rewards.select(keep), self.pi.select(keep), self.prompt[:2], self.mask.select(keep)
        )
        close(advantages, [2 - 3.2, 2.0], [4 - 3.2])  # step 0: (1 + 3) / 1.25

    def test_over_several_turns_the_tokens_of_the_policy_are_compared(self) -> None:
        """Row 0 with a tool call between its tokens, whose reward belongs to the token before."""
        rewards = ragged([0.0, 0.5, 1.5], [4.0], [1.0, 6.0])
        pi = ragged([0.5, NAN, 0.5], [0.25], [0.25, 0.5])
        advantages, returns = self.run(rewards, pi, self.prompt, mask_of([1, 0, 1], [1], [1, 1]))
        first, second = (1 + 3 + 5.25) / 2, (1.5 + 7.5) / 2.25
        close(advantages, [2 - first, 0.0, 1.5 - second], [4 - first], [7 - first, 6 - second])
        assert returns.to_lists()[0] == [2.0, 0.0, 1.5]

    @pytest.mark.parametrize("noise", [0.0, 2.0**-23, 2.0**-22])
    def test_where_the_policy_was_certain(self, noise: float) -> None:
        """The mean is unweighted. Rounding may make 1 − 2π + Σπ² negative in one row and positive in another: the
        baseline stays among the returns, where weights of −a and a would divide by nothing."""
        certain, mask = ragged([0.0], [0.0]), mask_of([1], [1])
        sums = ragged([1.0 - noise], [1.0 + noise])
        got, _ = optimal_token_baseline(ragged([1.0], [4.0]), certain, sums, torch.tensor([0, 0]), mask)
        assert got.to_lists() == ([[-3.0], [0.0]] if noise else [[-1.5], [1.5]])

    def test_degenerate_groups_are_exactly_zero(self) -> None:
        """One response; equal returns (with a longer response); all but one without a token; none with a token."""
        rewards = ragged([3.0], [0.0, 0.1], [0.0, 0.0, 0.1], [2.0], [], [])
        pi = rewards.with_values(torch.full((7,), 0.5))
        advantages, returns = self.run(
            rewards, pi, torch.tensor([0, 1, 1, 2, 2, 3]), rewards.with_values(torch.ones(7, dtype=torch.uint8))
        )
        assert advantages.values.tolist() == [0.0] * 7
        assert returns.to_lists()[0] == [3.0]


TOKEN_ESTIMATORS = {
    "gae": lambda r, v, p, m: gae(r, v, m, gamma=0.9, lam=0.8),
    "reinforce_plus_plus": lambda r, v, p, m: reinforce_plus_plus(r, m, gamma=0.9),
    "reinforce_plus_plus_baseline": lambda r, v, p, m: (reinforce_plus_plus_baseline(r.sum_rows(), p, m),),
    "remax": lambda r, v, p, m: remax(r, p.float(), m),
    "optimal_token_baseline": lambda r, v, p, m: optimal_token_baseline(
        r, v.with_values(-v.values.abs()), v.with_values((-v.values.abs()).exp()), p, m
    ),
}


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS.values(), ids=list(TOKEN_ESTIMATORS))
class TestEveryTokenEstimator:
    """Laws that all of them keep."""

    def test_no_rows(self, estimator) -> None:
        empty, mask = Ragged.from_rows([], torch.float32), Ragged.from_rows([], torch.uint8)
        for column in estimator(empty, empty, torch.zeros(0, dtype=torch.int64), mask):
            assert column.num_rows == 0

    def test_rows_without_policy_tokens(self, estimator) -> None:
        rewards, values = ragged([5.0], [], [1.0, 2.0], [3.0]), ragged([NAN], [], [0.5, 0.2], [0.1])
        results = estimator(rewards, values, torch.tensor([0, 0, 1, 1]), mask_of([0], [], [1, 1], [1]))
        for column in results:
            assert column.to_lists()[:2] == [[0.0], []]
            assert bool(column.values.isfinite().all())

    @settings(max_examples=20, deadline=None)
    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 2), st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), max_size=5)),
            min_size=1,
            max_size=7,
        ),
        random=st.randoms(use_true_random=False),
        poison=st.sampled_from([NAN, float("inf"), -float("inf")]),
    )
    def test_row_order_and_masked_positions_change_nothing(self, estimator, rows, random, poison: float) -> None:
        """Bit for bit: the order of rows, and NaN or inf in values and log-probs at observations."""
        prompt = torch.tensor([p for p, _ in rows])
        mask = mask_of(*([int(m) for _, m in row] for _, row in rows))
        rewards = ragged(*([x for x, _ in row] for _, row in rows))
        values = ragged(*([0.5 * x - 1 for x, _ in row] for _, row in rows))
        poisoned = values.with_values(torch.where(mask.values.bool(), values.values, poison))
        order = torch.tensor(random.sample(range(len(rows)), len(rows)))
        straight = estimator(rewards, values, prompt, mask)
        shuffled = estimator(rewards.select(order), poisoned.select(order), prompt[order], mask.select(order))
        for a, b in zip(straight, shuffled, strict=True):
            assert torch.equal(a.select(order).values, b.values)
            assert bool(a.values.isfinite().all())


def test_spread_over_tokens() -> None:
    spread = spread_over_tokens(torch.tensor([2.0, 3.0, NAN]), mask_of([1, 0, 1], [], [0]))
    assert spread.to_lists() == [[2.0, 0.0, 2.0], [], [0.0]]


def test_num_policy_tokens() -> None:
    assert num_policy_tokens(mask_of([1, 0, 1], [], [0])).tolist() == [2, 0, 0]
