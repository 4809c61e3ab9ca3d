import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import FlowError
from flowrl.functional.kl_control import adapted_kl_coef, measured_kl
from flowrl.ragged import Ragged


class TestAdaptedCoefficient:
    def test_by_hand(self) -> None:
        # error = 6.6/6 − 1 = 0.1; factor 1 + 0.1·64/10000.
        assert adapted_kl_coef(0.2, 6.6, target=6.0, horizon=1e4, num_rows=64) == pytest.approx(
            0.2 * 1.00064, rel=1e-12
        )

    @pytest.mark.parametrize(("kl", "error"), [(600.0, 0.2), (math.inf, 0.2), (0.0, -0.2), (-50.0, -0.2), (6.0, 0.0)])
    def test_the_error_is_clipped(self, kl: float, error: float) -> None:
        expected = 0.2 * (1 + error * 100 / 1000)
        assert adapted_kl_coef(0.2, kl, target=6.0, horizon=1000.0, num_rows=100) == pytest.approx(expected, rel=1e-12)

    def test_what_was_not_measured_changes_nothing(self) -> None:
        assert adapted_kl_coef(0.2, math.nan, target=6.0, horizon=10.0, num_rows=4) == 0.2
        assert adapted_kl_coef(0.2, 60.0, target=6.0, horizon=10.0, num_rows=0) == 0.2

    def test_a_horizon_that_is_too_short_is_refused(self) -> None:
        assert adapted_kl_coef(1.0, 0.0, target=1.0, horizon=10.0, num_rows=49) == pytest.approx(0.02, abs=1e-12)
        with pytest.raises(FlowError, match=r"more than 10 responses for batches of 50. Received horizon=10"):
            adapted_kl_coef(1.0, 0.0, target=1.0, horizon=10.0, num_rows=50)

    @given(st.floats(1e-6, 1e3), st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.integers(0, 100))
    def test_it_stays_positive_and_moves_towards_the_target(
        self, coef: float, kl: float, target: float, rows: int
    ) -> None:
        new = adapted_kl_coef(coef, kl, target=target, horizon=100.0, num_rows=rows)
        assert 0 < new < math.inf
        assert (new >= coef) if kl >= target else (new <= coef)


MASK = Ragged.from_rows([[1, 0, 1], [], [0], [1, 1]], torch.uint8)
LOGPROBS = torch.tensor([-1.0, math.nan, -2.0, math.inf, -0.5, -1.5])
REFERENCE = torch.tensor([-1.5, 0.0, -4.0, -math.inf, -0.25, -2.0])
# Differences at policy tokens: 0.5, 2.0 in the first row, −0.25, 0.5 in the last.


class TestMeasuredKL:
    def test_per_token_and_per_sequence(self) -> None:
        assert measured_kl(LOGPROBS, REFERENCE, MASK) == pytest.approx(2.75 / 4, abs=1e-12)
        assert measured_kl(LOGPROBS, REFERENCE, MASK, per="sequence") == pytest.approx(2.75 / 4, abs=1e-12)
        three = MASK.select(torch.tensor([0, 1, 2]))
        assert measured_kl(LOGPROBS[:4], REFERENCE[:4], three) == pytest.approx(2.5 / 2, abs=1e-12)
        assert measured_kl(LOGPROBS[:4], REFERENCE[:4], three, per="sequence") == pytest.approx(2.5 / 3, abs=1e-12)

    def test_estimators(self) -> None:
        squares = (0.25 + 4.0 + 0.0625 + 0.25) / 2
        assert measured_kl(LOGPROBS, REFERENCE, MASK, estimator="k2") == pytest.approx(squares / 4, abs=1e-12)

    def test_nothing_to_measure(self) -> None:
        nothing = MASK.select(torch.tensor([1, 2]))
        assert measured_kl(LOGPROBS[3:4], REFERENCE[3:4], nothing) is None
        empty = MASK.select(torch.tensor([], dtype=torch.int64))
        assert measured_kl(LOGPROBS[:0], REFERENCE[:0], empty) is None

    def test_what_is_not_finite_at_a_policy_token_shows(self) -> None:
        row = Ragged.from_rows([[1, 1], [1]], torch.uint8)
        logprobs = torch.zeros(3)
        assert measured_kl(logprobs, torch.tensor([0.0, -math.inf, 0.0]), row) == math.inf
        found = measured_kl(logprobs, torch.tensor([0.0, math.nan, 0.0]), row)
        assert found is not None and math.isnan(found)

    @given(st.permutations(range(4)))
    def test_the_order_of_rows_changes_no_bit(self, order: list[int]) -> None:
        index = torch.tensor(order)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(2, 6, generator=generator)
        a, b = (MASK.with_values(n).select(index).values for n in noise)
        for per in ("token", "sequence"):
            straight = measured_kl(noise[0], noise[1], MASK, per=per)
            assert measured_kl(a, b, MASK.select(index), per=per) == straight

    def test_it_has_no_gradient(self) -> None:
        logprobs = torch.zeros(3, requires_grad=True)
        assert measured_kl(logprobs, torch.ones(3), Ragged.from_rows([[1, 1, 1]], torch.uint8)) == -1.0
