"""Batches: what travels on edges, its masks and totals, Arrow both ways, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import (
    Advantages,
    Batch,
    Demonstrations,
    FinishReason,
    LogprobOrigin,
    OldLogprobs,
    Preferences,
    Prompts,
    Ragged,
    RefLogprobs,
    Rewards,
    Rollouts,
    Sequences,
    SpanKind,
    Spans,
    TrainStats,
    Values,
)
from flowrl.alignment import align
from flowrl.errors import AlignmentError, BatchError
from tests.tiny import recorded_rollouts

ORIGIN = LogprobOrigin("m", 3, "test", "float32", temperature=0.7, top_k=5)
quick = settings(max_examples=30, deadline=None)


def column(rollouts: Sequences, seed: int = 0) -> Ragged:
    layout = rollouts.loss_mask
    return layout.with_values(torch.randn(len(layout.values), generator=torch.Generator().manual_seed(seed)))


def every_batch(rollouts: Rollouts) -> list[Batch]:
    """One of each type for these rows."""
    ids = (rollouts.prompt_id, rollouts.sample_id)
    n = rollouts.num_rows
    sequences = (*ids, rollouts.tokens, rollouts.spans)
    valid = torch.tensor([i % 3 != 1 for i in range(n)], dtype=torch.uint8)
    return [
        rollouts,
        replace(rollouts, origin=ORIGIN),
        Prompts(
            torch.arange(n),
            tuple([{"role": "user", "content": f"ü {i}"}] if i % 2 else "text" for i in range(n)),
            {"answer": tuple(range(n)), "a.b": (None,) * n},
        ),
        Demonstrations(*sequences),
        Preferences(*sequences, pair_id=torch.arange(n) // 2, chosen=torch.arange(n).to(torch.uint8) % 2),
        Rewards(
            *ids,
            {"exact": torch.arange(n).float(), "style.tone": torch.full((n,), torch.nan)},
            valid,
            tuple("" if v else "failed" for v in valid),
            {"kl": column(rollouts)},
        ),
        Rewards(*ids, {}, valid, ("",) * n),
        Values(*ids, column(rollouts)),
        OldLogprobs(*ids, column(rollouts), ORIGIN),
        OldLogprobs(*ids, column(rollouts), ORIGIN, is_current=True),
        RefLogprobs(*ids, column(rollouts, 1), ORIGIN),
        Advantages(*ids, column(rollouts), column(rollouts, 2)),
        TrainStats({"loss": 0.5, "kl": float("inf")}, 3, 4, 1),
    ]


TYPES = [type(b).__name__ for b in every_batch(recorded_rollouts())]


def tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in vars(batch).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Ragged):
            found += [value.values, value.offsets]
        elif isinstance(value, Spans):
            found += tensors(value)
        elif isinstance(value, dict):
            for item in value.values():
                found += [item.values, item.offsets] if isinstance(item, Ragged) else []
                found += [item] if isinstance(item, torch.Tensor) else []
    return found


class TestArrow:
    @pytest.mark.parametrize("place", range(len(TYPES)), ids=lambda i: f"{i}-{TYPES[i]}")
    def test_round_trip_bit_for_bit_over_the_same_memory(self, place: int) -> None:
        batch = every_batch(recorded_rollouts(observations=True))[place]
        back = type(batch).from_arrow(batch.to_arrow())
        assert back == batch
        for there, here in zip(tensors(back), tensors(batch), strict=True):
            assert there.data_ptr() == here.data_ptr() and there.dtype == here.dtype

    @pytest.mark.parametrize("place", range(len(TYPES)), ids=lambda i: f"{i}-{TYPES[i]}")
    def test_round_trip_through_a_stream(self, place: int) -> None:
        batch = every_batch(recorded_rollouts())[place]
        sink = pa.BufferOutputStream()
        table = batch.to_arrow()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        received = pa.ipc.open_stream(sink.getvalue()).read_all()
        assert type(batch).from_arrow(received) == batch

    @quick
    @given(st.integers(0, 4), st.integers(1, 3), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.booleans())
    def test_odd_sizes(self, prompts: int, group: int, lengths: list[int], observations: bool) -> None:
        rollouts = recorded_rollouts(prompts, group, response_lengths=lengths, observations=observations)
        for batch in every_batch(rollouts):
            assert type(batch).from_arrow(batch.to_arrow()) == batch
            if batch.num_rows and isinstance(batch, Sequences):
                assert batch.select(range(batch.num_rows)) == batch

    def test_chunks_are_joined(self) -> None:
        rollouts = recorded_rollouts()
        tables = [rollouts.select([0, 1]).to_arrow(), rollouts.select([2, 3, 4, 5]).to_arrow()]
        assert Rollouts.from_arrow(pa.concat_tables(tables)) == rollouts
        nothing = rollouts.select([])
        assert Rollouts.from_arrow(nothing.to_arrow().schema.empty_table()) == nothing

    def test_a_batch_of_ones_own(self) -> None:
        @dataclass(frozen=True, eq=False, repr=False)
        class Scored(Rollouts):
            scores: dict[str, torch.Tensor] = None  # type: ignore[assignment]
            note: str = ""

        rollouts = recorded_rollouts()
        scored = Scored(**vars(rollouts), scores={"a": torch.ones(6)}, note="hi")
        assert Scored.from_arrow(scored.to_arrow()) == scored

    def test_wrong_tables(self) -> None:
        rollouts = recorded_rollouts()
        table = rollouts.to_arrow()
        with pytest.raises(BatchError, match=r"does not hold Values. Expected Values. Received Rollouts"):
            Values.from_arrow(table)
        with pytest.raises(BatchError, match="no flowrl metadata"):
            Rollouts.from_arrow(pa.table({"a": [1]}))
        with pytest.raises(BatchError, match=r"lacks column 'spans.kinds'"):
            Rollouts.from_arrow(table.drop_columns(["spans.kinds"]))
        nulls = pa.array([None] * 6, pa.int64())
        with pytest.raises(BatchError, match=r"Rollouts.prompt_id cannot be read from Arrow: .*nulls"):
            Rollouts.from_arrow(table.set_column(0, "prompt_id", nulls))

    def test_objects_that_are_no_json(self) -> None:
        with pytest.raises(BatchError, match=r"Prompts.extras.tool cannot travel over Arrow"):
            Prompts(torch.arange(1), ("a",), {"tool": (object(),)}).to_arrow()


class TestRows:
    @pytest.mark.parametrize("place", range(len(TYPES) - 1), ids=lambda i: f"{i}-{TYPES[i]}")
    def test_concat_undoes_select(self, place: int) -> None:
        batch = every_batch(recorded_rollouts(observations=True))[place]
        parts = [batch.select([0, 1]), batch.select(torch.tensor([], dtype=torch.int64)), batch.select([2, 3, 4, 5])]
        assert type(batch).concat(parts) == batch
        assert [p.num_rows for p in parts] == [2, 0, 4]
        assert batch.select([3, 3]).num_rows == 2

    def test_parts_that_differ(self) -> None:
        a, b = every_batch(recorded_rollouts())[8], every_batch(recorded_rollouts())[9]
        with pytest.raises(BatchError, match=r"Parts of a batch differ in OldLogprobs.is_current"):
            OldLogprobs.concat([a, b])  # type: ignore[list-item]
        with pytest.raises(BatchError, match=r"differ in Rewards.components. Expected \['x', 'y'\] in every part"):
            Rewards.concat([rewards(x=[1.0]), rewards(y=[1.0], x=[2.0]), rewards(y=[1.0])])
        with pytest.raises(BatchError, match=r"Rewards.concat needs parts"):
            Rewards.concat([])

    def test_a_part_without_a_valid_reward_has_no_say_in_the_components(self) -> None:
        good, nothing = rewards(x=[1.0], y=[2.0]), rewards(f=[float("nan")])
        nothing = replace(nothing, valid=torch.zeros(1, dtype=torch.uint8), reasons=("raised",))
        for parts in ([good, nothing], [nothing, good], [nothing.select([]), good, nothing]):
            joined = Rewards.concat(parts)
            assert list(joined.components) == ["x", "y"] and joined.num_rows == 2
            assert sorted(joined.totals.nan_to_num(-1).tolist()) == [-1, 3]
        assert list(Rewards.concat([nothing, nothing]).components) == ["f"]

    def test_a_column_in_some_parts_only(self) -> None:
        old = OldLogprobs(*(torch.zeros(1, dtype=torch.int64),) * 2, Ragged.from_rows([[1.0]]), ORIGIN)
        more = replace(old, sum_pi_squared=old.old_logprobs)
        for parts in ([old, more], [more, old]):
            with pytest.raises(BatchError, match=r"differ in OldLogprobs.sum_pi_squared. Expected it in every part"):
                OldLogprobs.concat(parts)

    def test_rows_of_different_origin(self) -> None:
        """Fresh and replayed rows may be joined; what ratios of log-probs depend on must be the same."""
        rollouts = recorded_rollouts()
        other = replace(ORIGIN, model="n", policy_version=1, engine="other")
        joined = Rollouts.concat([replace(rollouts, origin=ORIGIN), replace(rollouts, origin=other)]).origin
        assert joined == replace(ORIGIN, model="m+n", policy_version=1, engine="test+other")
        assert Rollouts.concat([rollouts, rollouts]).origin is None
        for wrong in (replace(ORIGIN, temperature=1.0), replace(ORIGIN, top_k=0), None):
            with pytest.raises(BatchError, match=r"differ in Rollouts.origin. Expected one temperature"):
                Rollouts.concat([replace(rollouts, origin=ORIGIN), replace(rollouts, origin=wrong)])

    def test_a_batch_is_a_value(self) -> None:
        rollouts = recorded_rollouts()
        with pytest.raises(TypeError, match="no truth value; ask for num_rows"):
            bool(rollouts)
        with pytest.raises(TypeError, match="not iterable"):
            iter(rollouts)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="unhashable"):
            hash(rollouts)
        assert repr(rollouts) == "Rollouts(6 samples)" and repr(every_batch(rollouts)[2]) == "Prompts(6 prompts)"
        assert rollouts != every_batch(rollouts)[7] and rollouts != recorded_rollouts(seed=1)
        with pytest.raises(AttributeError):
            rollouts.tokens = rollouts.tokens  # type: ignore[misc]

    def test_row_ids(self) -> None:
        prompts, stats = every_batch(recorded_rollouts())[2], every_batch(recorded_rollouts())[-1]
        assert prompts.row_ids is not None and prompts.row_ids.tolist() == [[i] for i in range(6)]
        assert recorded_rollouts().row_ids.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]  # type: ignore[union-attr]
        assert stats.row_ids is None and stats.num_rows == 0 and stats.select([]) == stats


def sequences(*rows: list[tuple[SpanKind, int]]) -> Sequences:
    """Rows from their spans; token ids count up."""
    kinds = Ragged.from_rows([[k for k, _ in row] for row in rows], torch.uint8)
    lengths = Ragged.from_rows([[n for _, n in row] for row in rows], torch.int64)
    versions = kinds.with_values(torch.zeros(len(kinds.values), dtype=torch.int64))
    total = lengths.sum_rows()
    tokens = Ragged.from_lengths(torch.arange(int(total.sum())), total)
    n = len(rows)
    return Sequences(torch.arange(n), torch.zeros(n, dtype=torch.int64), tokens, Spans(kinds, lengths, versions))


P, A, O = SpanKind.PROMPT, SpanKind.POLICY, SpanKind.OBSERVATION  # noqa: E741


class TestSpansAndMasks:
    def test_single_turn(self) -> None:
        rows = sequences([(P, 2), (A, 3)], [(P, 1), (A, 0)])
        assert rows.prompt_lengths.tolist() == [2, 1] and rows.response_lengths.tolist() == [3, 0]
        assert rows.loss_mask.to_lists() == [[1, 1, 1], []] and rows.loss_mask.values.dtype == torch.uint8
        assert rows.response_tokens.to_lists() == [[2, 3, 4], []]
        assert rows.span_kind_of_token.to_lists() == [[0, 0, 1, 1, 1], [0]]

    def test_multi_turn(self) -> None:
        rows = sequences([(P, 1), (A, 2), (O, 3), (A, 1)], [(P, 2), (O, 1), (A, 1)], [(A, 2)])
        assert rows.prompt_lengths.tolist() == [1, 2, 0]
        assert rows.response_lengths.tolist() == [6, 2, 2]
        assert rows.loss_mask.to_lists() == [[1, 1, 0, 0, 0, 1], [0, 1], [1, 1]]

    def test_a_prompt_in_two_spans(self) -> None:
        rows = sequences([(P, 1), (P, 2), (A, 1)])  # a system prompt, and the user's
        assert rows.prompt_lengths.tolist() == [3] and rows.loss_mask.to_lists() == [[1]]

    def test_prompt_then_response(self) -> None:
        spans = Spans.prompt_then_response(torch.tensor([2, 1]), torch.tensor([3, 0]), policy_version=7)
        assert spans.kinds.to_lists() == [[0, 1], [0, 1]] and spans.lengths.to_lists() == [[2, 3], [1, 0]]
        assert spans.policy_versions.to_lists() == [[-1, 7], [-1, 7]]

    def test_no_rows(self) -> None:
        rows = recorded_rollouts().select([])
        assert rows.loss_mask.num_rows == 0 and len(rows.prompt_lengths) == 0

    @quick
    @given(st.lists(st.lists(st.tuples(st.sampled_from([A, O]), st.integers(0, 3)), max_size=4), max_size=5))
    def test_masks_agree_with_a_slow_reading(self, responses: list[list[tuple[SpanKind, int]]]) -> None:
        rows = sequences(*[[(P, 2), *r] for r in responses])
        assert rows.loss_mask.to_lists() == [[int(k == A) for k, n in r for _ in range(n)] for r in responses]
        assert rows.prompt_lengths.tolist() == [2] * len(responses)


def rewards(valid: list[int] | None = None, **components: Any) -> Rewards:
    rows = {k: torch.tensor(v) for k, v in components.items() if isinstance(v, list)}
    tokens = {k: v for k, v in components.items() if isinstance(v, Ragged)}
    n = len(next(iter(rows.values()))) if rows else next(iter(tokens.values())).num_rows
    ok = torch.tensor(valid if valid is not None else [1] * n, dtype=torch.uint8)
    reasons = tuple("" if v else "failed" for v in ok)
    return Rewards(torch.arange(n), torch.zeros(n, dtype=torch.int64), rows, ok, reasons, tokens)


class TestRewards:
    def test_totals(self) -> None:
        tokens = Ragged.from_rows([[0.5, 0.5], [], [1.0]])
        batch = rewards([1, 1, 0], a=[1.0, 2.0, 3.0], b=[10.0, 20.0, 30.0], t=tokens)
        assert batch.totals[:2].tolist() == [12.0, 22.0] and batch.totals[2].isnan()
        assert rewards(t=tokens).totals.tolist() == [1.0, 0.0, 1.0]

    def test_an_invalid_number_stays_in_its_row(self) -> None:
        batch = rewards([0, 1], a=[float("nan"), 2.0])
        assert batch.totals[0].isnan() and batch.totals[1] == 2.0

    def test_over_tokens(self) -> None:
        rows = sequences(
            [(P, 1), (A, 2), (O, 1)],  # ends with an observation: the row's reward is at the last policy token
            [(P, 1), (A, 1)],
            [(P, 1), (O, 2)],  # no policy token: nowhere to put it
            [(P, 1), (A, 0)],  # an empty response
            [(P, 1), (A, 2)],  # invalid
        )
        tokens = rows.loss_mask.with_values(torch.arange(len(rows.loss_mask.values)).float())
        batch = rewards([1, 1, 1, 1, 0], a=[10.0, 20.0, 30.0, 40.0, 50.0], t=tokens)
        over = batch.over_tokens(rows.loss_mask)
        assert over.to_lists()[:4] == [[0.0, 11.0, 2.0], [23.0], [4.0, 5.0], []]
        assert over.row(4).isnan().all()
        only_rows = rewards(a=[1.0, 2.0, 3.0, 4.0, 5.0]).over_tokens(rows.loss_mask)
        assert only_rows.to_lists() == [[0.0, 1.0, 0.0], [2.0], [0.0, 0.0], [], [0.0, 5.0]]


class TestMalformed:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda r: replace(r, sample_id=r.sample_id[:5]),
                r"Rollouts.sample_id has the wrong number of rows. Expected 6, as prompt_id has. Received 5",
            ),
            (
                lambda r: replace(r, prompt_id=r.prompt_id.int()),
                r"Rollouts.prompt_id is not such a column. Expected int64. Received int32",
            ),
            (lambda r: replace(r, prompt_id=[0] * 6), r"Rollouts.prompt_id .* Received list"),
            (lambda r: replace(r, prompt_id=r.prompt_id[:, None]), r"Received int64 of shape \[6, 1\]"),
            (
                lambda r: replace(r, tokens=r.tokens.with_values(r.tokens.values.float())),
                r"Rollouts.tokens .*Expected int64 ragged. Received float32 ragged",
            ),
            (lambda r: replace(r, tokens=r.prompt_id), r"Rollouts.tokens .*Expected int64 ragged. Received int64\."),
            (lambda r: replace(r, finish_reason=r.finish_reason.long()), r"Rollouts.finish_reason .*Expected uint8"),
            (lambda r: replace(r, messages=list(r.messages)), r"Rollouts.messages .*Expected objects. Received list"),
            (
                lambda r: replace(r, extras={"answer": ("1",)}),
                r"Rollouts.extras\['answer'\] has the wrong number of rows",
            ),
            (lambda r: replace(r, extras=("1",) * 6), r"Rollouts.extras .*Expected dict of objects. Received objects"),
            (
                lambda r: replace(r, rollout_logprobs=r.tokens.with_values(r.tokens.values.float())),
                r"Rollouts.rollout_logprobs does not fit row 0. Expected 4 \(a value a response token\). Received 9",
            ),
            (
                lambda r: replace(r, tokens=Ragged.from_rows([[1]] * 6)),
                r"Rollouts: the spans of row 0 do not cover its tokens. Expected 1 tokens. Received spans over 9",
            ),
            (
                lambda r: Values(r.prompt_id, r.sample_id, column(r).with_values(column(r).values.double())),
                r"Values.values .*Received float64 ragged",
            ),
            (
                lambda r: Advantages(r.prompt_id, r.sample_id, column(r), column(r.select([0, 1, 2, 3, 5, 4]))),
                r"Advantages.returns does not fit row 4",
            ),
            (lambda r: rewards(a=[1, 2]), r"Rewards.components\['a'\] .*Expected float32. Received int64"),
            (
                lambda r: Spans(r.spans.kinds, r.spans.lengths.select(torch.arange(5)), r.spans.policy_versions),
                r"Spans.lengths has the wrong number of rows",
            ),
            (
                lambda r: Spans(r.spans.kinds, r.spans.lengths, Ragged.from_rows([[0]] * 6)),
                r"Spans.policy_versions does not fit row 0",
            ),
            (
                lambda r: Spans(
                    *(Ragged.from_rows([[v]], d) for v, d in ((0, torch.uint8), (-1, torch.int64), (0, torch.int64)))
                ),
                r"negative length",
            ),
        ],
    )
    def test_the_message_names_the_column(self, make: Callable[[Rollouts], Any], message: str) -> None:
        with pytest.raises(BatchError, match=message):
            make(recorded_rollouts())


class TestAlign:
    def test_exact_joins(self) -> None:
        rollouts = recorded_rollouts()
        values = Values(rollouts.prompt_id, rollouts.sample_id, column(rollouts))
        assert align(rollouts, values, node="N", argument="a") is values
        assert align(rollouts, values.select([3, 2, 1, 0, 5, 4]), node="N", argument="a") == values

    def test_refusals_name_node_argument_and_ids(self) -> None:
        rollouts = recorded_rollouts()
        values = Values(rollouts.prompt_id, rollouts.sample_id, column(rollouts))
        with pytest.raises(AlignmentError) as info:
            align(rollouts.select([0, 1, 2]), values.select([1, 2, 4]), node="GAE", argument="values")
        assert str(info.value).startswith(
            "GAE: argument 'values' has other rows. Expected the 3 ids of the first input. "
            "Received 1 missing (first: (0, 0)), 1 unknown (first: (2, 0)). Do: feed rows of the same rollouts"
        )
        with pytest.raises(AlignmentError, match=r"argument 'v' holds an id twice.*\(0, 1\) in rows 0 and 1"):
            align(rollouts, values.select([1, 1, 2, 3, 4, 5]), node="N", argument="v")
        with pytest.raises(AlignmentError, match="its first input holds an id twice"):
            align(rollouts.select([0, 0]), values.select([0, 1]), join="subset", node="N", argument="v")

    def test_subset(self) -> None:
        rollouts = recorded_rollouts()
        values = Values(rollouts.prompt_id, rollouts.sample_id, column(rollouts))
        assert align(rollouts.select([4, 0]), values, join="subset", node="N", argument="v") == values.select([4, 0])
        with pytest.raises(AlignmentError, match="2 missing"):
            align(rollouts.select([4, 0, 1]), values.select([0]), join="subset", node="N", argument="v")

    def test_prompt(self) -> None:
        rollouts = recorded_rollouts()
        prompts = Prompts(torch.tensor([2, 0, 1, 9]), ("c", "a", "b", "z"))
        joined = align(rollouts, prompts, join="prompt", node="N", argument="p")
        assert joined.messages == ("a", "a", "b", "b", "c", "c")
        with pytest.raises(AlignmentError, match=r"1 missing \(first: 1\)"):
            align(rollouts, prompts.select([0, 1]), join="prompt", node="N", argument="p")

    def test_batches_without_rows_come_as_they_are(self) -> None:
        stats = TrainStats({}, 0, 0)
        assert align(recorded_rollouts(), stats, node="N", argument="s") is stats


def test_enums_and_origins() -> None:
    assert (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED) == (0, 1, 2)
    assert ORIGIN.truncated and not LogprobOrigin("m", 0, "e", "float32", temperature=0.5).truncated
    assert LogprobOrigin("m", 0, "e", "d", top_p=0.9).truncated and LogprobOrigin("m", 0, "e", "d", min_p=0.1).truncated


def test_a_batch_says_what_a_row_is() -> None:
    units = {cls.__name__: cls.unit for cls in (Prompts, Rollouts, Rewards, TrainStats)}
    assert units == {"Prompts": "prompts", "Rollouts": "samples", "Rewards": "samples", "TrainStats": "step"}
