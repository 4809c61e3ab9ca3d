from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.batches import Advantages, OldLogprobs, RefLogprobs
from flowrl.context import Bindings, use_bindings
from flowrl.errors import GraphError, GroupSizeError
from flowrl.models import State
from flowrl.nodes import GAE, rewards_like
from flowrl.nodes.advantage import AdvantageEstimator
from tests.nodes.advantage_cases import (
    ESTIMATORS,
    NAN,
    ORIGIN,
    conversations,
    first_values,
    inputs,
    name_of,
    run,
    values_of,
    with_invalid,
)
from tests.tiny import recorded_rollouts

every_estimator = pytest.mark.parametrize("node", ESTIMATORS, ids=name_of)


def _no_engine(*_: object):
    raise AssertionError("nothing here opens an engine")


def same(a: Advantages, b: Advantages) -> bool:
    """Equal rows by id, in any order, bit for bit."""
    place = {tuple(ids): i for i, ids in enumerate(a.row_ids.tolist())}
    return a.num_rows == b.num_rows and a.select([place[tuple(ids)] for ids in b.row_ids.tolist()]) == b


def joined(parts: Sequence[Advantages]) -> dict[tuple[int, ...], tuple[list[float], list[float]]]:
    """Advantages and returns by row id."""
    rows = {}
    for part in parts:
        columns = part.advantages.to_lists(), part.returns.to_lists()
        rows |= dict(zip(map(tuple, part.row_ids.tolist()), zip(*columns, strict=True), strict=True))
    return rows


class TestEveryEstimator:
    """Laws of every estimator of the package, with every setting that changes its formula."""

    @every_estimator
    def test_conversations_give_finite_numbers_and_zeros_at_observations(self, node: AdvantageEstimator) -> None:
        rollouts, rewards = conversations()
        assert list(node.problems()) == []
        advantages = node(**inputs(node, rollouts, rewards))
        mask = rollouts.loss_mask
        assert advantages.advantages.lengths.tolist() == mask.lengths.tolist()
        for column in (advantages.advantages.values, advantages.returns.values):
            assert bool(column.isfinite().all())
            assert set(column[~mask.values.bool()].tolist()) == {0.0}
            assert bool(column.any())

    @every_estimator
    @settings(max_examples=3, deadline=None)
    @given(
        st.permutations(range(8)),
        st.lists(st.floats(-2, 2, width=32) | st.just(NAN), min_size=8, max_size=8),
        st.sampled_from(["drop_row", "drop_group"]),
        st.sampled_from([NAN, float("inf")]),
    )
    def test_order_of_rows_and_what_is_masked_change_nothing(self, node, order, scores, invalid, poison) -> None:
        """Law 9, bit for bit; NaN is an invalid reward."""
        rollouts, rewards = conversations(scores)
        node = replace(node, invalid=invalid)
        shuffled = rollouts.select(order)
        straight = node(**inputs(node, rollouts, rewards))
        assert same(straight, node(**inputs(node, shuffled, rewards.select(order), poison=poison)))
        assert bool(straight.advantages.values.isfinite().all())

    @every_estimator
    def test_no_rows_give_no_rows(self, node: AdvantageEstimator) -> None:
        rollouts, rewards = conversations()
        nothing = node(**inputs(node, rollouts.select([]), rewards))
        assert nothing.num_rows == 0 and len(nothing.returns.values) == 0

    @every_estimator
    def test_where_all_rewards_are_invalid_no_row_is_left(self, node: AdvantageEstimator) -> None:
        rollouts, rewards = conversations([1.0] * 8)
        nothing, reported = run(node, **inputs(node, rollouts, with_invalid(rewards, *range(8))))
        assert nothing.num_rows == 0
        assert reported["dropped_rows"] == reported["dropped_rows_invalid"] == 8

    @every_estimator
    def test_where_all_rewards_are_equal(self, node: AdvantageEstimator) -> None:
        """What compares rows has exactly 0; the rest has what its formula says, and is finite."""
        rollouts, rewards = conversations([0.1] * 8)
        advantages, reported = run(node, **inputs(node, rollouts, rewards))
        assert bool(advantages.advantages.values.isfinite().all())
        if node.needs_groups > 1:
            assert set(advantages.advantages.values.tolist()) <= {0.0}
            assert reported["degenerate_groups"] == 2
            assert advantages.num_rows == (0 if getattr(node, "degenerate", "zero") == "drop" else 8)

    @every_estimator
    def test_responses_of_zero_length(self, node: AdvantageEstimator) -> None:
        """One in the first group, all but one in the second, and a third group of them. The rows stay."""
        rollouts = recorded_rollouts(3, 3, response_lengths=(0, 3, 2, 0, 4, 0, 0, 0, 0))
        rewards = rewards_like(rollouts, score=[0.0, 1.0, 3.0, 0.0, 2.0, 1.0, 5.0, 6.0, 7.0])
        node = replace(node, degenerate="zero") if hasattr(node, "degenerate") else node
        advantages = node(**inputs(node, rollouts, rewards))
        assert advantages.num_rows == 9
        assert advantages.advantages.lengths.tolist() == [0, 3, 2, 0, 4, 0, 0, 0, 0]
        assert bool(advantages.advantages.values.isfinite().all())

    @every_estimator
    def test_groups_of_one(self, node: AdvantageEstimator) -> None:
        """Refused where responses to one prompt are compared."""
        rollouts, rewards = conversations()
        lonely = rollouts.select([0, 1, 7])
        if node.needs_groups > 1:
            with pytest.raises(GroupSizeError, match=r"at least 2 rollouts.* 1 of prompt_id 1\b"):
                node(**inputs(node, lonely, rewards))
        else:
            assert bool(node(**inputs(node, lonely, rewards)).advantages.values.isfinite().all())

    @every_estimator
    def test_a_batch_may_be_split_as_the_node_says(self, node: AdvantageEstimator) -> None:
        """Split like that, every row has what it has in the whole; split further, some row has something else."""
        rollouts, rewards = conversations([0.0, 1.0, 0.5, 2.0, 1.0, 3.0, 2.5, -1.0])
        whole = joined([node(**inputs(node, rollouts, rewards))])
        by_group = [[0, 1, 2, 3], [4, 5, 6, 7]]

        def split(parts: list[list[int]]) -> dict[tuple[int, ...], tuple[list[float], list[float]]]:
            return joined([node(**inputs(node, rollouts.select(rows), rewards)) for rows in parts])

        if node.split == "rows":
            assert split([[row] for row in range(8)]) == whole
        elif node.split == "groups":
            assert split(by_group) == whole
            if node.needs_groups > 1:
                assert split([[0, 1], [2, 3], [4, 5], [6, 7]]) != whole
        else:
            assert split(by_group) != whole


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
        assert reported["kl"] == pytest.approx(0.5) and reported["kl_coef"] == 0.1

    def test_the_coefficient_may_be_a_state(self) -> None:
        """Its value is read when the node runs: 0.1 at first, then what somebody has set."""
        rewards = rewards_like(self.rollouts, score=[1.0, 2.0, 3.0, 4.0])
        logprobs = self.logprobs(-1.0), self.logprobs(-1.5)
        state = State("gae_kl_coef", 0.1)
        node = GAE(lam=1.0, whiten=False, kl_coef=state)
        assert node.states() == (state,) and list(node.problems()) == []
        (missing,) = node.wiring_problems(frozenset())
        assert "State 'gae_kl_coef'" in missing
        with use_bindings(Bindings(open_engine=_no_engine)):
            adaptive = node(self.rollouts, rewards, values_of(self.rollouts), *logprobs)
            fixed = replace(node, kl_coef=0.1)(self.rollouts, rewards, values_of(self.rollouts), *logprobs)
            assert adaptive == fixed
            for number in (0.0, 0.4):
                state.set(number)
                adaptive, reported = run(node, self.rollouts, rewards, values_of(self.rollouts), *logprobs)
                assert first_values(adaptive.advantages)[1] == pytest.approx(2.0 - number * 0.5)
                assert reported["kl"] == pytest.approx(0.5) and reported["kl_coef"] == number

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
    assert list(GAE().problems()) == []
    found = list(GAE(gamma=2.0, lam=-1.0, kl_coef=-1.0, kl_estimator="k9", invalid="ignore").problems())  # type: ignore[arg-type]
    assert [f.split(" ")[0] for f in found] == ["gamma", "lam", "kl_coef", "kl_estimator", "invalid"]
    (found,) = GAE(kl_coef=State("kl", "much")).problems()
    assert "kl_coef" in found and "number" in found
