from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import flowrl
from flowrl import (
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    PolicyLogprobs,
    Preferences,
    Prompts,
    RLFlow,
    Rollout,
    TrainStats,
    source,
)
from flowrl.batches import Advantages, Batch, LogprobOrigin, OldLogprobs, RefLogprobs, Rewards, Rollouts, Values
from flowrl.errors import AlignmentError, BatchError, EdgeTypeError
from flowrl.nodes import rewards_like
from flowrl.nodes.concat import Concat
from tests.flows import FAST, SAMPLING, prompts, share_of_vowels
from tests.runs import quick_run, rows, training
from tests.tiny import recorded_rollouts, tiny_actor

ORIGIN = LogprobOrigin("actor", 3, "transformers", "float32")
WHOLE = recorded_rollouts(3, 2)
FIRST, LAST = WHOLE.select([0, 1]), WHOLE.select([2, 3, 4, 5])


def ids(batch: Any) -> list[tuple[int, int]]:
    return [tuple(row) for row in batch.row_ids.tolist()]


class TestRows:
    def test_rows_of_every_part_in_order(self) -> None:
        assert Concat()(FIRST, LAST) == WHOLE
        assert Concat()(LAST, FIRST) == WHOLE.select([2, 3, 4, 5, 0, 1])
        assert Concat()(FIRST, WHOLE.select([4, 5]), WHOLE.select([2, 3])).num_rows == 6

    def test_one_part_and_empty_parts(self) -> None:
        assert Concat()(FIRST) == FIRST
        empty = WHOLE.select([])
        assert Concat()(empty, FIRST, empty) == FIRST
        assert Concat()(empty, empty) == empty
        with pytest.raises(EdgeTypeError, match="without inputs"):
            Concat()()

    def test_every_kind_of_batch(self) -> None:
        column = WHOLE.loss_mask.with_values(torch.randn(len(WHOLE.loss_mask.values)))
        given = WHOLE.prompt_id, WHOLE.sample_id
        whole: list[Batch] = [
            rewards_like(WHOLE, a=[1.0, 2, 3, 4, 5, float("nan")], steps=column),
            Values(*given, column),
            OldLogprobs(*given, column, ORIGIN),
            RefLogprobs(*given, column, ORIGIN),
            Advantages(*given, column, column),
            Prompts(torch.arange(6), tuple("abcdef"), {"answer": tuple("ABCDEF")}),
        ]
        for batch in whole:
            assert Concat()(batch.select([0, 1]), batch.select([2, 3, 4, 5])) == batch

    def test_origins_keep_the_oldest_version(self) -> None:
        old = replace(FIRST, origin=replace(ORIGIN, policy_version=1))
        fresh = replace(LAST, origin=ORIGIN)
        assert Concat()(fresh, old).origin == replace(ORIGIN, policy_version=1)
        hot = replace(fresh, origin=replace(ORIGIN, temperature=0.7))
        with pytest.raises(BatchError, match="temperature"):
            Concat()(hot, old)

    def test_parts_of_other_columns_are_refused(self) -> None:
        other = replace(LAST, extras={"solution": LAST.extras["answer"]})
        with pytest.raises(BatchError, match="extras"):
            Concat()(FIRST, other)


class TestTypes:
    def test_parts_of_several_types_are_refused(self) -> None:
        rewards = rewards_like(FIRST, a=[0.0, 0.0])
        with pytest.raises(EdgeTypeError, match=r"one type. Expected 2 times Rollouts. Received Rollouts, Rewards"):
            Concat()(FIRST, rewards)  # type: ignore[arg-type]

    @pytest.mark.parametrize("thing", [TrainStats({}, 0, 0), WHOLE.tokens, 3])
    def test_what_has_no_rows_is_refused(self, thing: Any) -> None:
        with pytest.raises(EdgeTypeError, match="batches that have rows"):
            Concat()(thing, thing)

    def test_refs_are_checked_at_the_line(self) -> None:
        sampled = Rollout(tiny_actor(), sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
        rewards = FunctionReward(share_of_vowels, isolate=False)(sampled)
        joined: Any = Concat(label="joined")(sampled, source(Rollouts, name="replayed", batch_size=2))
        assert joined._type is Rollouts and "test_concat.py" in joined._call.where
        with pytest.raises(EdgeTypeError, match=r"test_concat.py:\d+"):
            Concat()(sampled, rewards)  # type: ignore[arg-type]
        with pytest.raises(EdgeTypeError, match="batches that have rows"):
            Concat()(sampled.tokens, sampled.tokens)  # type: ignore[type-var]
        with pytest.raises(EdgeTypeError, match="data while another argument is a Ref"):
            Concat()(sampled, FIRST)
        with pytest.raises(EdgeTypeError, match="has the wrong type"):  # a consumer of another type
            GroupAdvantage()(joined, joined)  # type: ignore[arg-type]

    def test_it_travels(self) -> None:
        recorded: Any = Concat()(source(Rollouts, name="a", batch_size=2), source(Rollouts, name="b", batch_size=2))
        node = cloudpickle.loads(cloudpickle.dumps(recorded._call.node))
        assert node.name == "Concat" and node.output_type is Rollouts
        assert node.run({"parts": (FIRST, LAST)}, "x") == WHOLE
        with pytest.raises(EdgeTypeError, match="Expected Rollouts"):
            node.run({"parts": (rewards_like(FIRST, a=[0.0, 0.0]),)}, "x")


class TestIds:
    def test_a_clash_is_named(self) -> None:
        with pytest.raises(AlignmentError) as caught:
            Concat()(FIRST, LAST, WHOLE.select([4, 1]))
        message = str(caught.value)
        assert "2 ids occur more than once. Expected a (prompt_id, sample_id) of its own for each row" in message
        assert "Received (2, 0), (0, 1); the first is in parts 1 and 2" in message
        assert "set renumber='prompts' where the parts come from different sources, or 'samples'" in message

    def test_a_row_twice_in_one_part(self) -> None:
        with pytest.raises(
            AlignmentError, match=r"1 id occurs more than once.*\(0, 0\); the first is in part 1, twice"
        ):
            Concat()(LAST, WHOLE.select([0, 0]))

    def test_one_group_over_two_parts_is_fine(self) -> None:
        assert Concat()(WHOLE.select([0, 2]), WHOLE.select([1, 3])).prompt_id.tolist() == [0, 1, 0, 1]

    def test_renumbered_prompts_are_groups_of_their_own(self) -> None:
        joined = Concat(renumber="prompts")(WHOLE, FIRST)
        assert ids(joined) == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1), (1, 0), (1, 1)]
        column = rewards_like(FIRST, a=[1.0, 2.0])
        rewards = Concat(renumber="prompts")(rewards_like(WHOLE, a=range(6)), column)
        assert ids(rewards) == ids(joined)

    def test_renumbered_samples_stay_one_group(self) -> None:
        joined = Concat(renumber="samples")(WHOLE, WHOLE)
        assert joined.prompt_id.tolist() == [0, 0, 1, 1, 2, 2] * 2
        assert joined.sample_id.tolist() == [0, 2] * 3 + [1, 3] * 3
        with pytest.raises(AlignmentError, match="cannot renumber the samples"):
            Concat(renumber="samples")(Prompts(torch.arange(2), ("a", "b")), Prompts(torch.arange(2), ("a", "b")))

    def test_pairs(self) -> None:
        def pairs(*pair_ids: int) -> Preferences:
            count = len(pair_ids)
            rollouts = recorded_rollouts(count, 2)
            pair_id = torch.tensor(pair_ids).repeat_interleave(2)
            chosen = torch.tensor([1, 0] * count, dtype=torch.uint8)
            return Preferences(pair_id, rollouts.sample_id, rollouts.tokens, rollouts.spans, pair_id, chosen)

        assert Concat()(pairs(0, 1), pairs(5)).pair_id.tolist() == [0, 0, 1, 1, 5, 5]
        joined = Concat(renumber="prompts")(pairs(0, 1), pairs(1))
        assert joined.pair_id.tolist() == joined.prompt_id.tolist() == [0, 0, 2, 2, 3, 3]
        other = replace(pairs(1), prompt_id=torch.tensor([8, 8]))
        with pytest.raises(AlignmentError, match=r"Expected a \(pair_id\) of its own for each pair. Received 1;"):
            Concat()(pairs(0, 1), other)

    def test_records(self) -> None:
        @dataclass(frozen=True, eq=False)
        class Match(Batch):
            pro: Rollouts
            con: Rollouts

        joined = Concat()(Match(FIRST, FIRST), Match(LAST, LAST))
        assert joined.pro == WHOLE and joined.con == WHOLE
        with pytest.raises(AlignmentError, match="1 id occurs more than once"):
            Concat()(Match(FIRST, FIRST), Match(LAST, WHOLE.select([0, 3, 4, 5])))

    def test_settings(self) -> None:
        replayed = source(Rollouts, name="replayed", batch_size=2)
        fresh = source(Rollouts, name="fresh", batch_size=2)
        flow = RLFlow.from_outputs(Concat(renumber="rows")(replayed, fresh))  # type: ignore[arg-type]
        assert "renumber is 'rows'" in str(flow.check())


class Recorded:
    """A data set of rollouts: what an earlier run sampled."""

    batch_type, columns, fingerprint = Rollouts, ("answer",), "recorded"

    def __len__(self) -> int:
        return 8

    def rows(self, start: int, count: int, seed: int) -> Rollouts:
        all_rows = recorded_rollouts(start + count, 2, response_lengths=(4, 2, 3))
        rollouts = all_rows.select(range(2 * start, 2 * (start + count)))
        origin = LogprobOrigin("actor", -1, "recorder", "float32")
        return replace(rollouts, origin=origin, response_text=tuple("aeiou"[: i % 5] for i in range(2 * count)))


def mixed(trained: list[Rollouts]) -> RLFlow:
    @flowrl.node
    def keep(rollouts: Rollouts) -> Rollouts:
        trained.append(rollouts)
        return rollouts

    actor = tiny_actor()
    fresh = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    replayed = source(Rollouts, name="replayed", batch_size=1)
    rollouts = keep(Concat(renumber="prompts")(fresh, replayed))
    rewards = FunctionReward(share_of_vowels, isolate=False)(rollouts)
    update = GRPOUpdater(actor, optimizer=FAST, epochs=2)
    return RLFlow.from_outputs(
        update(rollouts, GroupAdvantage()(rollouts, rewards), PolicyLogprobs(actor, temperature=1.0)(rollouts))
    )


def test_fresh_and_replayed_rollouts_train_together(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trained: list[Rollouts] = []
    flow = mixed(trained)
    assert "Concat#0" in flow.labels
    data = {"prompts": prompts(), "replayed": Recorded()}
    whole = quick_run(flow, 2, tmp_path / "whole", data)
    assert [r.num_rows for r in trained] == [6, 6]
    assert ids(trained[1]) == [(4, 0), (4, 1), (6, 0), (6, 1), (3, 0), (3, 1)]
    assert trained[1].origin is not None and trained[1].origin.policy_version == -1
    assert all(row["loss"] == row["loss"] and row["policy_version"] > 0 for row in training(whole))
    quick_run(mixed([]), 1, tmp_path / "parts", data)
    assert rows(quick_run(mixed([]), 2, tmp_path / "parts", data, resume=True)) == rows(whole)


def test_eager_and_recorded_are_the_same() -> None:
    flow = RLFlow.from_outputs(
        Concat()(source(Rollouts, name="a", batch_size=2), source(Rollouts, name="b", batch_size=4))
    )
    assert flow.step({"a": FIRST, "b": LAST}) == Concat()(FIRST, LAST)


def test_rewards_type() -> None:
    """Statically: what comes out is typed as what goes in."""
    joined: Rewards = Concat()(rewards_like(FIRST, a=[0.0, 1.0]), rewards_like(LAST, a=[0.0] * 4))
    assert joined.components["a"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
