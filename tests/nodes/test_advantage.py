from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.batches import LogprobOrigin, OldLogprobs, RefLogprobs, Rewards, Rollouts, Values
from flowrl.context import StepContext, use_step
from flowrl.errors import AlignmentError, GraphError, GroupSizeError, RewardError
from flowrl.nodes import GAE, GroupAdvantage, rewards_like
from flowrl.ragged import Ragged
from tests.tiny import recorded_rollouts

NAN = float("nan")
ORIGIN = LogprobOrigin("tiny", 0, "test", "float32")


def with_invalid(rewards: Rewards, *rows: int) -> Rewards:
    valid = rewards.valid.clone()
    valid[list(rows)] = 0
    reasons = tuple("timed out" if i in rows else "" for i in range(rewards.num_rows))
    components = {n: torch.where(valid.bool(), c, NAN) for n, c in rewards.components.items()}
    return replace(rewards, valid=valid, reasons=reasons, components=components)


def values_of(rollouts: Rollouts, number: float = 0.0) -> Values:
    column = rollouts.loss_mask.with_values(torch.full((len(rollouts.loss_mask.values),), number))
    return Values(rollouts.prompt_id, rollouts.sample_id, column)


def run(node, *arguments, **named):
    """The node's result and what it reported."""
    reported: dict[str, float] = {}
    with use_step(StepContext(report=reported.__setitem__)):
        return node(*arguments, **named), reported


def first_values(column: Ragged) -> list[float]:
    """Of each row the value at its first token; None for an empty row."""
    return [row[0] if row else None for row in column.to_lists()]


class TestGroupAdvantage:
    rollouts = recorded_rollouts(2, 3, response_lengths=(2, 1, 3))
    rewards = rewards_like(rollouts, score=[0.0, 1.0, 2.0, 5.0, 5.0, 5.0])

    def test_by_hand(self) -> None:
        advantages, reported = run(GroupAdvantage(eps=1e-9), self.rollouts, self.rewards)
        want = [[-1.0, -1.0], [0.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.0], [0.0, 0.0, 0.0]]
        assert advantages.advantages.to_lists() == want
        assert first_values(advantages.returns) == [0.0, 1.0, 2.0, 5.0, 5.0, 5.0]
        assert reported["degenerate_groups"] == 1 and reported["dropped_rows"] == 0

    def test_settings_choose_the_estimator(self) -> None:
        rewards = rewards_like(self.rollouts, score=[0.0, 1.0, 5.0, 0.0, 0.0, 0.0])
        plain, _ = run(GroupAdvantage(normalize_by_std=False), self.rollouts, rewards)
        assert first_values(plain.advantages)[:3] == [-2.0, -1.0, 3.0]
        left_out, _ = run(GroupAdvantage(normalize_by_std=False, leave_one_out=True), self.rollouts, rewards)
        assert first_values(left_out.advantages)[:3] == [-3.0, -1.5, 4.5]

    def test_degenerate_groups_may_be_dropped(self) -> None:
        advantages, reported = run(GroupAdvantage(degenerate="drop"), self.rollouts, self.rewards)
        assert advantages.prompt_id.tolist() == [0, 0, 0]
        assert reported["dropped_rows_degenerate"] == 3

    @pytest.mark.parametrize(
        ("invalid", "rows", "kept", "too_small"),
        [
            ("drop_row", (1,), [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)], 0),
            ("drop_row", (1, 2), [(1, 0), (1, 1), (1, 2)], 1),  # one is left of prompt 0: nothing to compare it with
            ("drop_group", (1,), [(1, 0), (1, 1), (1, 2)], 0),
            ("drop_row", (0, 1, 2, 3, 4, 5), [], 0),
        ],
    )
    def test_invalid_rewards(self, invalid, rows, kept, too_small) -> None:
        advantages, reported = run(GroupAdvantage(invalid=invalid), self.rollouts, with_invalid(self.rewards, *rows))
        assert list(map(tuple, advantages.row_ids.tolist())) == kept
        assert reported["dropped_rows"] == 6 - len(kept)
        assert reported["dropped_rows_invalid"] == len(rows)
        assert reported["dropped_rows_group_too_small"] == too_small
        assert bool(advantages.advantages.values.isfinite().all())

    def test_an_invalid_reward_may_fail_the_step(self) -> None:
        with pytest.raises(RewardError, match=r"2 of 6 .*timed out"):
            GroupAdvantage(invalid="fail")(self.rollouts, with_invalid(self.rewards, 1, 4))

    def test_groups_of_one_are_refused(self) -> None:
        with pytest.raises(GroupSizeError, match=r"at least 2 rollouts.* 1 of prompt_id 1\b"):
            GroupAdvantage()(self.rollouts.select([0, 1, 5]), self.rewards)

    def test_a_filter_may_have_taken_rollouts_away_but_not_rewards(self) -> None:
        kept = self.rollouts.select([0, 1, 2])
        assert GroupAdvantage()(kept, self.rewards).num_rows == 3
        with pytest.raises(AlignmentError):
            GroupAdvantage()(self.rollouts, self.rewards.select([0, 1, 2]))

    def test_observations_get_no_advantage(self) -> None:
        rollouts = recorded_rollouts(1, 2, response_lengths=(5, 2), observations=True)
        advantages = GroupAdvantage(normalize_by_std=False)(rollouts, rewards_like(rollouts, s=[0.0, 2.0]))
        assert advantages.advantages.to_lists() == [[-1.0, -1.0, 0.0, 0.0, -1.0], [1.0, 1.0]]

    @settings(max_examples=30, deadline=None)
    @given(
        st.permutations(range(8)),
        st.lists(st.floats(-2, 2, width=32) | st.just(NAN), min_size=8, max_size=8),
        st.sampled_from(["drop_row", "drop_group"]),
        st.sampled_from(["zero", "drop"]),
    )
    def test_law_9_equivariant_to_row_order(self, order, scores, invalid, degenerate) -> None:
        rollouts = recorded_rollouts(2, 4)
        rewards = rewards_like(rollouts, score=scores)
        node = GroupAdvantage(invalid=invalid, degenerate=degenerate)
        straight, shuffled = node(rollouts, rewards), node(rollouts.select(order), rewards)
        place = {tuple(ids): i for i, ids in enumerate(straight.row_ids.tolist())}
        assert straight.select([place[tuple(ids)] for ids in shuffled.row_ids.tolist()]) == shuffled
        assert straight.num_rows == shuffled.num_rows


class TestGae:
    rollouts = recorded_rollouts(2, 2, response_lengths=(2, 1, 0, 3))

    def test_without_values_and_discount_each_token_gets_the_rows_reward(self) -> None:
        rewards = rewards_like(self.rollouts, score=[1.0, 2.0, 3.0, 4.0])
        node = GAE(lam=1.0, whiten=False)
        advantages, reported = run(node, self.rollouts, rewards, values_of(self.rollouts))
        assert advantages.advantages.to_lists() == [[1.0, 1.0], [2.0], [], [4.0, 4.0, 4.0]]
        assert advantages.returns == advantages.advantages
        assert reported == {"dropped_rows": 0, "dropped_rows_invalid": 0, "explained_variance": 0.0}

    def test_whitened(self) -> None:
        rollouts = recorded_rollouts(2, 2, response_lengths=(5, 4), observations=True)
        advantages = GAE()(rollouts, rewards_like(rollouts, s=[1.0, 2.0, 3.0, 4.0]), values_of(rollouts, 0.3))
        mask = rollouts.loss_mask.values.bool()
        kept = advantages.advantages.values[mask]
        assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(kept.var()) == pytest.approx(1.0, rel=1e-5)
        assert set(advantages.advantages.values[~mask].tolist()) == {0.0}

    def test_kl_penalty(self) -> None:
        rewards = rewards_like(self.rollouts, score=[1.0, 2.0, 3.0, 4.0])
        old, ref = self.logprobs(-1.0), self.logprobs(-1.5)
        node = GAE(lam=1.0, whiten=False, kl_coef=0.1)
        advantages, reported = run(node, self.rollouts, rewards, values_of(self.rollouts), old, ref)
        want = [[0.9, 0.95], [1.95], [], [3.85, 3.9, 3.95]]
        for got_row, want_row in zip(advantages.advantages.to_lists(), want, strict=True):
            assert got_row == pytest.approx(want_row)
        assert reported["kl"] == pytest.approx(0.5)

    def logprobs(self, number: float):
        column = values_of(self.rollouts, number).values
        ids = self.rollouts.prompt_id, self.rollouts.sample_id
        if number == -1.0:
            return OldLogprobs(*ids, column, ORIGIN)
        return RefLogprobs(*ids, column, ORIGIN)

    def test_a_kl_penalty_needs_log_probs(self) -> None:
        node = GAE(kl_coef=0.1)
        (problem,) = node.wiring_problems(frozenset({"rollouts", "rewards", "values", "old_logprobs"}))
        assert "ref_logprobs" in problem and "old_logprobs" not in problem
        assert list(GAE().wiring_problems(frozenset())) == []
        rewards = rewards_like(self.rollouts, score=[1.0, 2.0, 3.0, 4.0])
        with pytest.raises(GraphError, match="kl_coef"):
            node(self.rollouts, rewards, values_of(self.rollouts))

    def test_invalid_rows_are_dropped_before_whitening(self) -> None:
        rewards = with_invalid(rewards_like(self.rollouts, score=[1.0, 2.0, 3.0, 4.0]), 1)
        advantages, reported = run(GAE(), self.rollouts, rewards, values_of(self.rollouts))
        assert advantages.prompt_id.tolist() == [0, 1, 1]
        assert bool(advantages.advantages.values.isfinite().all())
        assert reported["dropped_rows"] == 1
        advantages, _ = run(GAE(invalid="drop_group"), self.rollouts, rewards, values_of(self.rollouts))
        assert advantages.prompt_id.tolist() == [1, 1]

    def test_values_outside_of_the_mask_do_not_matter(self) -> None:
        rollouts = recorded_rollouts(1, 2, response_lengths=(5, 4), observations=True)
        rewards = rewards_like(rollouts, score=[1.0, 2.0])
        values = values_of(rollouts, 0.3)
        poisoned = values.values.values.clone()
        poisoned[~rollouts.loss_mask.values.bool()] = NAN
        with_nan = replace(values, values=values.values.with_values(poisoned))
        assert GAE()(rollouts, rewards, with_nan) == GAE()(rollouts, rewards, values)

    def test_how_it_may_be_split(self) -> None:
        assert [GAE().split, GAE(whiten=False).split] == ["whole", "rows"]
        assert GAE(whiten=False, invalid="drop_group").split == "groups"


def test_problems() -> None:
    assert list(GAE().problems()) == list(GroupAdvantage().problems()) == []
    found = list(GAE(gamma=2.0, lam=-1.0, kl_coef=-1.0, kl_estimator="k9", invalid="ignore").problems())  # type: ignore[arg-type]
    assert [f.split(" ")[0] for f in found] == ["gamma", "lam", "kl_coef", "kl_estimator", "invalid"]
    found = list(GroupAdvantage(eps=0.0, invalid="?", degenerate="?").problems())  # type: ignore[arg-type]
    assert len(found) == 3
