import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import FlowError
from flowrl.functional.metrics import effective_sample_size, length_stats, pass_at_k, sampled_entropy


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_formula(n: int, data) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    want = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert float(pass_at_k(torch.tensor([n]), torch.tensor([c]), k)) == pytest.approx(want, abs=1e-12)


def test_pass_at_k_refuses_what_it_is_not_defined_for() -> None:
    with pytest.raises(FlowError, match="2 samples"):
        pass_at_k(torch.tensor([4, 2]), torch.tensor([1, 1]), 3)
    with pytest.raises(FlowError):
        pass_at_k(torch.tensor([4]), torch.tensor([1]), 0)
    with pytest.raises(FlowError):
        pass_at_k(torch.tensor([4]), torch.tensor([5]), 1)
    assert pass_at_k(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 2).tolist() == []


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.ones(4)) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_sample_size(torch.zeros(4)) == effective_sample_size(torch.zeros(0)) == 0.0


def test_lengths_and_entropy() -> None:
    assert length_stats(torch.tensor([1, 2, 6])) == pytest.approx(
        {"mean": 3.0, "min": 1.0, "median": 2.0, "p95": 5.6, "max": 6.0}
    )
    assert length_stats(torch.zeros(0)) == {}
    mask = torch.tensor([True, False, True])
    assert sampled_entropy(torch.tensor([-1.0, float("nan"), -3.0]), mask) == 2.0
