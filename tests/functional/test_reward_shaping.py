import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.reward_shaping import Moments, group_length_rewards, length_penalty, overlong_penalty

Int = torch.int64


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=Int)


class TestOverlong:
    def test_the_three_pieces(self) -> None:
        # L_max = 100, L_cache = 20: free up to 80, then linear to −1 at 100, then −1.
        penalty = overlong_penalty(lengths(0, 79, 80, 81, 90, 99, 100, 101, 500), max_length=100, buffer=20)
        assert penalty.dtype == torch.float32
        expected = [0.0, 0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0]
        torch.testing.assert_close(penalty, torch.tensor(expected), rtol=1e-6, atol=0.0)

    def test_without_a_buffer_it_is_a_step(self) -> None:
        assert overlong_penalty(lengths(0, 100, 101), max_length=100, buffer=0).tolist() == [0.0, 0.0, -1.0]

    def test_a_buffer_as_wide_as_the_limit(self) -> None:
        assert overlong_penalty(lengths(0, 1, 4, 5), max_length=4, buffer=4).tolist() == [0.0, -0.25, -1.0, -1.0]

    def test_no_rows(self) -> None:
        assert overlong_penalty(lengths(), max_length=4, buffer=2).tolist() == []


def test_length_penalty() -> None:
    penalty = length_penalty(lengths(0, 3, 4, 10), per_token=0.25, free_tokens=3)
    assert penalty.dtype == torch.float32 and penalty.tolist() == [0.0, 0.0, -0.25, -1.75]
    assert not bool(torch.signbit(penalty[:2]).any())  # 0, not −0
    assert length_penalty(lengths(2), per_token=0.5).tolist() == [-1.0]
    assert length_penalty(lengths(), per_token=0.5).tolist() == []


class TestGroupLength:
    def test_against_the_paper(self) -> None:
        # One group of lengths 10 to 30: λ = 1/2 − (length − 10)/20.
        given = lengths(10, 20, 30, 15, 30)
        correct = torch.tensor([True, True, True, False, False])
        reward = group_length_rewards(given, torch.zeros(5, dtype=Int), correct)
        assert reward.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5]

    def test_degenerate_groups(self) -> None:
        # A group of one, a group of one length, and one with an empty response.
        prompts = lengths(0, 1, 1, 2, 2)
        reward = group_length_rewards(lengths(7, 5, 5, 0, 4), prompts, torch.ones(5, dtype=torch.bool))
        assert reward.tolist() == [0.0, 0.0, 0.0, 0.5, -0.5]
        assert group_length_rewards(lengths(), lengths(), torch.ones(0, dtype=torch.bool)).tolist() == []

    def test_invalid_rows_are_not_compared(self) -> None:
        valid = torch.tensor([True, True, False, False, False])
        reward = group_length_rewards(
            lengths(1, 3, 9, 2, 5), lengths(0, 0, 0, 1, 1), torch.ones(5, dtype=torch.bool), valid
        )
        assert reward.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]

    @given(st.permutations(range(6)))
    def test_the_order_of_rows_does_not_matter(self, order: list[int]) -> None:
        given_lengths, prompts = lengths(3, 9, 4, 8, 5, 5), lengths(0, 1, 0, 1, 0, 1)
        correct = torch.tensor([True, False, True, True, False, True])
        straight = group_length_rewards(given_lengths, prompts, correct)
        shuffled = group_length_rewards(given_lengths[order], prompts[order], correct[order])
        assert shuffled.tolist() == straight[order].tolist()


values = st.lists(st.floats(-1e3, 1e3, width=32), max_size=12)


class TestMoments:
    @given(st.lists(values, max_size=5))
    def test_merging_batches_is_as_good_as_all_at_once(self, batches: list[list[float]]) -> None:
        moments = Moments()
        for batch in batches:
            moments = moments.merged(batch)
        together = [v for batch in batches for v in batch]
        assert moments.count == len(together)
        if together:
            assert moments.mean == pytest.approx(statistics.fmean(together), rel=1e-9, abs=1e-9)
        if len(together) > 1:
            assert moments.std == pytest.approx(statistics.stdev(together), rel=1e-6, abs=1e-6)

    @given(values, st.randoms(use_true_random=False))
    def test_the_order_within_a_batch_changes_no_bit(self, batch: list[float], random: object) -> None:
        shuffled = list(batch)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        start = Moments().merged([0.5, -2.0])
        assert start.merged(shuffled) == start.merged(batch)

    def test_by_hand(self) -> None:
        moments = Moments().merged([1.0, 3.0]).merged([]).merged([5.0])
        assert (moments.count, moments.mean, moments.low, moments.high) == (3, 3.0, 1.0, 5.0)
        assert moments.m2 == pytest.approx(8.0, abs=1e-12) and moments.std == pytest.approx(2.0, abs=1e-12)

    def test_equal_values_have_no_spread_at_all(self) -> None:
        """Also where their mean does not round to them."""
        moments = Moments()
        for _ in range(7):
            moments = moments.merged([0.1] * 3)
        assert moments.std == 0.0

    def test_nothing_and_one_value(self) -> None:
        assert Moments().std == 0.0 and Moments().merged([]) == Moments()
        assert Moments().merged([4.0]).std == 0.0

    def test_its_numbers_make_it_again(self) -> None:
        moments = Moments().merged([1.0, math.pi, 7.0])
        assert Moments(**moments.to_dict()) == moments
