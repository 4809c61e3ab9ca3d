"""Ragged columns: rows of different lengths, and Arrow over the same memory."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import Ragged
from flowrl.errors import BatchError
from flowrl.ragged import arrow_to_tensor, tensor_to_arrow

ROWS = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=5), max_size=8)
quick = settings(max_examples=60, deadline=None)


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, torch.int64)


class TestMaking:
    def test_from_rows(self) -> None:
        column = Ragged.from_rows([[1, 2], [], [3]])
        assert column.to_lists() == [[1, 2], [], [3]] and column.values.dtype == torch.int64
        assert column.lengths.tolist() == [2, 0, 1] and column.offsets.tolist() == [0, 2, 2, 3]
        assert column.row_of_value.tolist() == [0, 0, 2] and column.position_of_value.tolist() == [0, 1, 0]
        assert column.row(0).tolist() == [1, 2] and column.num_rows == 3
        assert repr(column) == "Ragged(3 rows, 3 values, torch.int64)"

    def test_no_rows_and_empty_rows(self) -> None:
        assert Ragged.from_rows([], torch.int64).num_rows == 0
        assert Ragged.from_rows([[], [1.5]]).values.dtype == torch.float32
        assert Ragged.from_rows([torch.tensor([1], dtype=torch.uint8)]).values.dtype == torch.uint8

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            (torch.tensor([0, 2], dtype=torch.int32), "int64 of shape"),
            (torch.tensor([[0, 2]]), "int64 of shape"),
            (torch.empty(0, dtype=torch.int64), "int64 of shape"),
            (torch.tensor([1, 2]), "offsets from 1 to 2"),
            (torch.tensor([0, 3]), "offsets from 0 to 3"),
            (torch.tensor([0, 2, 1, 2]), "increasing from 0 to 2"),
        ],
    )
    def test_malformed_offsets(self, offsets: torch.Tensor, message: str) -> None:
        with pytest.raises(BatchError, match=message):
            Ragged(torch.zeros(2), offsets)

    def test_it_is_a_value(self) -> None:
        with pytest.raises(TypeError, match="no truth value"):
            bool(ragged([[1]]))
        assert ragged([[1], [2]]) == ragged([[1], [2]]) != ragged([[1, 2], []])
        nan = Ragged.from_rows([[float("nan")]])
        assert nan == Ragged.from_rows([[float("nan")]])
        assert Ragged.from_rows([[0.0]]) != Ragged.from_rows([[-0.0]])


class TestLaws:
    @quick
    @given(ROWS, st.data())
    def test_select(self, rows: list[list[int]], data: st.DataObject) -> None:
        index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
        assert ragged(rows).select(torch.tensor(index, dtype=torch.int64)).to_lists() == [rows[i] for i in index]

    @quick
    @given(st.lists(ROWS, min_size=1, max_size=4))
    def test_concat(self, parts: list[list[list[int]]]) -> None:
        whole = Ragged.concat([ragged(p) for p in parts])
        assert whole.to_lists() == [row for part in parts for row in part]

    @quick
    @given(ROWS, st.data())
    def test_join_then_slice_is_the_identity(self, rows: list[list[int]], data: st.DataObject) -> None:
        tails = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=len(rows), max_size=len(rows)))
        first, second = ragged(rows), ragged(tails)
        joined = Ragged.join(first, second)
        assert joined.to_lists() == [a + b for a, b in zip(rows, tails, strict=True)]
        assert joined.slice_rows(torch.zeros_like(first.lengths), first.lengths) == first
        assert joined.slice_rows(first.lengths, second.lengths) == second

    @quick
    @given(ROWS)
    def test_sums(self, rows: list[list[int]]) -> None:
        assert ragged(rows).sum_rows().tolist() == [sum(r) for r in rows]

    def test_masked_sums_select_and_do_not_multiply(self) -> None:
        values = Ragged.from_rows([[1.0, float("nan")], [float("inf")], []])
        mask = values.with_values(torch.tensor([1, 0, 0], dtype=torch.uint8))
        assert values.sum_rows(mask).tolist() == [1.0, 0.0, 0.0]

    def test_slices_stay_in_their_row(self) -> None:
        column = ragged([[1, 2], [3]])
        for starts, lengths in ([0, 1], [2, 1]), ([-1, 0], [1, 1]), ([1, 0], [-1, 1]):
            with pytest.raises(BatchError, match="out of its row"):
                column.slice_rows(torch.tensor(starts), torch.tensor(lengths))

    def test_join_needs_equal_rows(self) -> None:
        with pytest.raises(BatchError, match="needs equal rows"):
            Ragged.join(ragged([[1]]), ragged([]))


class TestArrow:
    @quick
    @given(ROWS, st.sampled_from([torch.int64, torch.uint8, torch.float32, torch.float64, torch.int32]))
    def test_round_trip_without_a_copy(self, rows: list[list[int]], dtype: torch.dtype) -> None:
        column = Ragged.from_rows([[v % 200 for v in row] for row in rows], dtype)
        back = Ragged.from_arrow(column.to_arrow())
        assert back == column
        if len(column.values):
            assert back.values.data_ptr() == column.values.data_ptr()
        assert back.offsets.data_ptr() == column.offsets.data_ptr()

    @quick
    @given(ROWS, st.data())
    def test_slices_are_rebased(self, rows: list[list[int]], data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(rows)))
        stop = data.draw(st.integers(start, len(rows)))
        array = ragged(rows).to_arrow().slice(start, stop - start)
        back = Ragged.from_arrow(array)
        assert back.to_lists() == rows[start:stop] and int(back.offsets[0]) == 0

    def test_nulls_are_refused(self) -> None:
        with pytest.raises(BatchError, match="nulls"):
            Ragged.from_arrow(pa.array([[1], None], pa.large_list(pa.int64())))
        with pytest.raises(BatchError, match="nulls"):
            arrow_to_tensor(pa.array([1, None]))

    def test_dtypes_that_arrow_has_not(self) -> None:
        assert arrow_to_tensor(tensor_to_arrow(torch.tensor([True, False]))).dtype == torch.uint8
        assert arrow_to_tensor(tensor_to_arrow(torch.tensor([1.5], dtype=torch.bfloat16))).tolist() == [1.5]

    def test_gradients_stay_behind(self) -> None:
        values = torch.ones(3, requires_grad=True)
        assert not arrow_to_tensor(tensor_to_arrow(values)).requires_grad
