import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.functional.advantages import discounted_sums, gae, group_advantages, spread_over_tokens
from flowrl.ragged import Ragged

NAN = float("nan")


def ragged(*rows: list[float], dtype: torch.dtype = torch.float32) -> Ragged:
    return Ragged.from_rows(list(rows), dtype)


def mask_of(*rows: list[int]) -> Ragged:
    return Ragged.from_rows(list(rows), torch.uint8)


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


class TestGroupAdvantages:
    prompt_id = torch.tensor([7, 3, 7, 3, 7])
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, 6.0])

    def test_by_hand(self) -> None:
        """Prompt 7: mean 3, deviations −2, −1, 3, std √7. Prompt 3: mean 2, deviations ∓2, std √8."""
        plain = group_advantages(self.rewards, self.prompt_id, normalize_by_std=False)
        assert plain.tolist() == [-2.0, -2.0, -1.0, 2.0, 3.0]
        left_out = group_advantages(self.rewards, self.prompt_id, normalize_by_std=False, leave_one_out=True)
        assert left_out.tolist() == [-3.0, -4.0, -1.5, 4.0, 4.5]  # against the mean of the others: 1 − 4 = −3, …
        normalised = group_advantages(self.rewards, self.prompt_id)
        want = torch.tensor([-2 / 7**0.5, -2 / 8**0.5, -1 / 7**0.5, 2 / 8**0.5, 3 / 7**0.5])
        torch.testing.assert_close(normalised, want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("normalize_by_std", [True, False])
    def test_degenerate_groups_are_exactly_zero(self, normalize_by_std: bool) -> None:
        """0.1 three times has a mean that is not 0.1 in float32; that must not become an advantage."""
        rewards = torch.tensor([0.1, 0.1, 0.1, 5.0])
        got = group_advantages(rewards, torch.tensor([0, 0, 0, 1]), normalize_by_std=normalize_by_std)
        assert got.tolist() == [0.0] * 4
        assert group_advantages(rewards[:0], self.prompt_id[:0]).tolist() == []

    @settings(max_examples=50, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3, width=32)), min_size=1, max_size=12),
        st.randoms(use_true_random=False),
        st.booleans(),
        st.booleans(),
    )
    def test_law_9_equivariant_to_row_order_bit_for_bit(self, rows, random, by_std: bool, left_out: bool) -> None:
        prompt_id = torch.tensor([p for p, _ in rows])
        rewards = torch.tensor([r for _, r in rows])
        order = torch.tensor(random.sample(range(len(rows)), len(rows)))
        settings = {"normalize_by_std": by_std, "leave_one_out": left_out}
        got = group_advantages(rewards[order], prompt_id[order], **settings)
        assert torch.equal(got, group_advantages(rewards, prompt_id, **settings)[order])


def test_spread_over_tokens() -> None:
    spread = spread_over_tokens(torch.tensor([2.0, 3.0, NAN]), mask_of([1, 0, 1], [], [0]))
    assert spread.to_lists() == [[2.0, 0.0, 2.0], [], [0.0]]
