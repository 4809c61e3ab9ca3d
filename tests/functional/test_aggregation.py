import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import FlowError
from flowrl.functional.aggregation import AGGREGATIONS, aggregate, aggregation_count, row_means, tokens_per_row
from flowrl.nodes.loss import Aggregation
from flowrl.ragged import Ragged

MASK = Ragged.from_rows([[1, 0, 1], [1], [0], []], torch.uint8)
LOSSES = torch.tensor([1.0, float("nan"), 2.0, 9.0, float("inf")])


@pytest.mark.parametrize(
    ("mode", "total", "count"),
    [
        ("token-mean", 12.0, 3.0),
        ("token-sum", 12.0, None),
        ("seq-mean-token-sum", 12.0, 2.0),
        ("seq-mean-token-mean", 10.5, 2.0),
        ("seq-mean-token-sum-norm", 12.0, 8.0),
    ],
)
def test_by_hand(mode: str, total: float, count: float | None) -> None:
    got, got_count = aggregate(LOSSES, MASK, mode, scale=4.0)
    assert float(got) == total
    assert (None if got_count is None else float(got_count)) == count == aggregation_count(MASK, mode, scale=4.0)


def test_the_names_are_those_of_the_loss_setting() -> None:
    assert Aggregation.__args__ == AGGREGATIONS  # type: ignore[attr-defined]
    with pytest.raises(FlowError, match="token-mean"):
        aggregate(LOSSES, MASK, "token_mean")


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("rows", [[], [[]], [[0, 0]]])
def test_nothing_selected_gives_zero(mode: str, rows: list[list[int]]) -> None:
    mask = Ragged.from_rows(rows, torch.uint8)
    losses = torch.full((len(mask.values),), float("nan"), requires_grad=True)
    total, count = aggregate(losses, mask, mode)
    assert float(total.detach()) == 0.0
    assert count is None or float(count) == 0.0
    total.backward()
    assert losses.grad is not None and losses.grad.tolist() == [0.0] * len(mask.values)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_half_precision_is_summed_in_float32(mode: str) -> None:
    mask = Ragged.from_rows([[1] * 4096], torch.uint8)
    total, _ = aggregate(torch.ones(4096, dtype=torch.bfloat16), mask, mode)
    assert total.dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(-9, 9)), max_size=5), max_size=6),
    st.integers(0, 6),
    st.sampled_from(AGGREGATIONS),
)
def test_law_1_parts_add_up(rows: list[list[tuple[bool, float]]], cut: int, mode: str) -> None:
    mask = Ragged.from_rows([[m for m, _ in row] for row in rows], torch.uint8)
    losses = Ragged.from_rows([[v for _, v in row] for row in rows], torch.float64)
    parts = [torch.arange(min(cut, len(rows))), torch.arange(min(cut, len(rows)), len(rows))]
    whole = aggregate(losses.values, mask, mode, 3.0)
    pieces = [aggregate(losses.select(p).values, mask.select(p), mode, 3.0) for p in parts]
    assert sum(float(t) for t, _ in pieces) == pytest.approx(float(whole[0]))
    if whole[1] is None:
        assert [c for _, c in pieces] == [None, None]
    else:
        assert sum(float(c) for _, c in pieces if c is not None) == float(whole[1])


def test_row_means_by_hand() -> None:
    values = LOSSES.clone().requires_grad_()
    means = row_means(values, MASK)
    assert means.tolist() == [1.5, 9.0, 0.0, 0.0] and tokens_per_row(MASK).tolist() == [2, 1, 0, 0]
    means.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.5, 0.0, 0.5, 1.0, 0.0]
    assert row_means(torch.zeros(0), Ragged.from_rows([], torch.uint8)).tolist() == []


def test_row_means_of_long_rows_are_summed_in_float64() -> None:
    """In float32, 16 million and ones stop adding up."""
    values = torch.tensor([2.0**24] + [1.0] * 8)
    mean = row_means(values, Ragged.from_rows([[1] * 9], torch.uint8))
    assert mean.dtype == torch.float32 and float(mean) == pytest.approx((2**24 + 8) / 9, abs=0.1)
