"""From rewarded rollouts to pairs, demonstrations and feedback; mismatched completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl
from flowrl.batches import Feedback, Preferences, Prompts, Rewards, Rollouts, SpanKind
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.errors import BatchError
from flowrl.nodes import DropUniformGroups, ReferenceLogprobs, Updater
from flowrl.nodes.judge import Judge
from flowrl.nodes.pairs import BestOfN, MismatchedCompletions, RewardPairs, ToFeedback, preferences_of
from flowrl.nodes.preference_losses import DPOLoss
from flowrl.nodes.sequence_loss import Pairs
from flowrl.runtime.worker import open_engine
from tests.flows import FAST, SAMPLING, reward
from tests.runs import quick_run, training
from tests.tiny import recorded_rollouts, tiny_actor

X = math.nan  # an invalid reward


def rollouts_of(num_prompts: int, group_size: int, **options: Any) -> Rollouts:
    """Prompts 10, 11, …, whose responses have different tokens."""
    lengths = (3, 4, 5, 2, 6, 1)
    rows = recorded_rollouts(num_prompts, group_size, response_lengths=lengths, **options)
    return replace(rows, prompt_id=rows.prompt_id + 10)


def rewards_of(rollouts: Rollouts, values: Sequence[float]) -> Rewards:
    """One component; X is invalid (its number is then anything)."""
    valid = [not math.isnan(v) for v in values]
    return Rewards(
        rollouts.prompt_id,
        rollouts.sample_id,
        {"score": torch.tensor([v if ok else 1e9 for v, ok in zip(values, valid, strict=True)], dtype=torch.float32)},
        torch.tensor(valid, dtype=torch.uint8),
        tuple("" if ok else "broken" for ok in valid),
    )


def run(node: Any, *inputs: Any) -> tuple[Any, dict[str, float]]:
    """What a node returns and reports."""
    reports: dict[str, float] = {}
    with use_step(StepContext(label="here", report=reports.__setitem__)):
        return node(*inputs), reports


def pairs_in(preferences: Preferences, rollouts: Rollouts) -> list[tuple[int, int, int]]:
    """(prompt, sample of the chosen, sample of the rejected), found by their tokens."""
    samples = {
        (int(p), tuple(t)): int(s)
        for p, s, t in zip(rollouts.prompt_id, rollouts.sample_id, rollouts.tokens.to_lists(), strict=True)
    }
    found, tokens = Pairs.of(preferences), preferences.tokens.to_lists()
    return [
        (p := int(preferences.prompt_id[c]), samples[p, tuple(tokens[c])], samples[p, tuple(tokens[r])])
        for c, r in zip(found.chosen.tolist(), found.rejected.tolist(), strict=True)
    ]


class TestRewardPairs:
    def test_best_against_worst(self) -> None:
        rollouts = rollouts_of(2, 3)
        preferences, reports = run(RewardPairs(), rollouts, rewards_of(rollouts, [0.5, 2.0, -1.0, 3.0, 0.0, 1.0]))
        assert pairs_in(preferences, rollouts) == [(10, 1, 2), (11, 0, 1)]
        assert preferences.chosen.tolist() == [1, 0, 1, 0] and preferences.sample_id.tolist() == [0, 1, 0, 1]
        assert preferences.pair_id.tolist() == [10 << 20, 10 << 20, 11 << 20, 11 << 20]
        assert preferences.loss_mask == rollouts.loss_mask.select(torch.tensor([1, 2, 3, 4]))
        assert reports == {"pairs": 2, "ties": 0, "prompts_without_rewards": 0}

    def test_degenerate_groups(self) -> None:
        """All equal, one valid, none valid, invalid ones ignored."""
        rollouts = rollouts_of(4, 3)
        rewards = rewards_of(rollouts, [1, 1, 1, X, 2, X, X, X, X, X, 0, 5])
        preferences, reports = run(RewardPairs(), rollouts, rewards)
        assert pairs_in(preferences, rollouts) == [(13, 2, 1)]
        assert reports == {"pairs": 1, "ties": 1, "prompts_without_rewards": 2}

    def test_equals_are_taken_by_sample_id(self) -> None:
        rollouts = rollouts_of(1, 5)
        preferences, _ = run(RewardPairs(), rollouts, rewards_of(rollouts, [1, 2, 2, 0, 0]))
        assert pairs_in(preferences, rollouts) == [(10, 1, 3)]

    def test_a_margin(self) -> None:
        rollouts = rollouts_of(2, 2)
        rewards = rewards_of(rollouts, [0.0, 1.0, 0.0, 1.5])
        preferences, reports = run(RewardPairs(min_margin=1.0), rollouts, rewards)
        assert pairs_in(preferences, rollouts) == [(11, 1, 0)] and reports["ties"] == 1

    @settings(max_examples=30, deadline=None)
    @given(st.permutations(range(12)), st.lists(st.sampled_from([0.0, 1.0, 2.0, X]), min_size=12, max_size=12))
    def test_the_order_of_rows_decides_nothing(self, order: list[int], values: list[float]) -> None:
        rollouts = rollouts_of(3, 4)
        rewards = rewards_of(rollouts, values)
        expected = set(pairs_in(RewardPairs()(rollouts, rewards), rollouts))
        found = RewardPairs()(rollouts.select(order), rewards.select(sorted(order, reverse=True)))
        assert set(pairs_in(found, rollouts)) == expected

    def test_no_pair_trains_nothing(self) -> None:
        rollouts, actor = rollouts_of(2, 2), tiny_actor()
        with use_bindings(Bindings(open_engine)), use_step(StepContext(label="here")):
            preferences = RewardPairs()(rollouts, rewards_of(rollouts, [1, 1, X, 0]))
            assert preferences.num_rows == 0
            reference = ReferenceLogprobs(actor.frozen())(preferences)
            stats = Updater(actor)(DPOLoss()(preferences, reference))
        assert stats.num_optimizer_steps == 0

    def test_a_pair_trains(self) -> None:
        rollouts, actor = rollouts_of(2, 2), tiny_actor()
        with use_bindings(Bindings(open_engine)), use_step(StepContext(label="here")):
            preferences = RewardPairs()(rollouts, rewards_of(rollouts, [1, 0, X, 0]))
            reference = ReferenceLogprobs(actor.frozen())(preferences)
            stats = Updater(actor)(DPOLoss()(preferences, reference))
        assert stats.num_optimizer_steps == 1 and stats.metrics["loss"] == pytest.approx(math.log(2))


def test_an_online_run(tmp_path: Path) -> None:
    """Rollouts, rewards, pairs and their ids through a filter that pulls again, and a judge beside."""
    actor = tiny_actor()
    sampled = flowrl.Rollout(actor, group_size=3, sampling=SAMPLING)(
        flowrl.source(Prompts, name="prompts", batch_size=4)
    )
    rewards = reward()(sampled)
    rollouts = DropUniformGroups()(sampled, rewards)
    made = RewardPairs()(rollouts, rewards)
    judge = Judge(lambda a, b: "a" if a > b else "b", pairs="all", isolate=False)
    terms = [DPOLoss(beta=0.5)(pairs, ReferenceLogprobs(actor.frozen())(pairs)) for pairs in (made, judge(rollouts))]
    flow = flowrl.RLFlow.from_outputs(Updater(actor, optimizer=FAST, num_minibatches=2)(*terms))
    steps = training(quick_run(flow, 2, tmp_path / "run"))
    assert len(steps) == 2
    for step in steps:
        assert step["RewardPairs#0/pairs"] == 4 and step["Judge#0/judged_pairs"] == 12, step
        assert step["Judge#0/pairs"] + step["Judge#0/ties"] == 12 and math.isfinite(step["loss"])


def test_ids_of_pairs_are_unique_and_bounded() -> None:
    rollouts = rollouts_of(2, 3)
    made = preferences_of(rollouts, [(0, 0, 1), (1, 2, 0), (2, 1, 2), (0, 4, 3)])
    assert made.sample_id.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert len(set(map(tuple, made.row_ids.tolist()))) == 8  # type: ignore[union-attr]
    assert len(set(made.pair_id.tolist())) == 4
    for far, pairs in (
        (rollouts, [(1 << 20, 0, 1)]),
        (replace(rollouts, prompt_id=rollouts.prompt_id << 43), [(0, 0, 1)]),
    ):
        with pytest.raises(BatchError, match="cannot be numbered"):
            preferences_of(far, pairs)


class TestBestOfN:
    def test_the_best_of_each_prompt(self) -> None:
        rollouts = rollouts_of(3, 3, observations=True)
        rewards = rewards_of(rollouts, [0.5, 2.0, -1.0, X, X, X, 1.0, X, 1.0])
        best, reports = run(BestOfN(), rollouts, rewards)
        assert list(map(tuple, best.row_ids.tolist())) == [(10, 1), (12, 0)]
        assert best.tokens == rollouts.tokens.select(torch.tensor([1, 6]))
        assert best.loss_mask == rollouts.loss_mask.select(torch.tensor([1, 6]))  # no observation becomes a target
        assert reports == {"kept_prompts": 2, "dropped_prompts": 1, "best_reward": 1.5}

    def test_not_good_enough(self) -> None:
        rollouts = rollouts_of(2, 2)
        rewards = rewards_of(rollouts, [0.0, 0.9, 0.2, 1.0])
        best, reports = run(BestOfN(min_reward=1.0), rollouts, rewards)
        assert best.row_ids.tolist() == [[11, 1]] and reports["dropped_prompts"] == 1

    def test_groups_of_one_and_none(self) -> None:
        rollouts = rollouts_of(2, 1)
        best, _ = run(BestOfN(), rollouts, rewards_of(rollouts, [0.0, X]))
        assert best.prompt_id.tolist() == [10]
        nothing, reports = run(BestOfN(), rollouts.select([]), rewards_of(rollouts, [0.0, X]))
        assert nothing.num_rows == 0 and reports == {"kept_prompts": 0, "dropped_prompts": 0}


class TestToFeedback:
    def test_a_threshold(self) -> None:
        rollouts = rollouts_of(2, 2)
        feedback, reports = run(ToFeedback(0.5), rollouts, rewards_of(rollouts, [0.5, 0.4, X, 1.0]))
        assert feedback.desirable.tolist() == [1, 0, 1]
        assert feedback.row_ids.tolist() == [[10, 0], [10, 1], [11, 1]]
        assert feedback.tokens == rollouts.tokens.select(torch.tensor([0, 1, 3]))
        assert reports == {"desirable": 2, "undesirable": 1, "invalid_rows": 1}

    def test_all_invalid(self) -> None:
        rollouts = rollouts_of(1, 2)
        feedback, _ = run(ToFeedback(), rollouts, rewards_of(rollouts, [X, X]))
        assert feedback.num_rows == 0


def feedback_of(rollouts: Rollouts) -> Feedback:
    desirable = (torch.arange(rollouts.num_rows) % 2).to(torch.uint8)
    return Feedback(rollouts.prompt_id, rollouts.sample_id, rollouts.tokens, rollouts.spans, desirable)


def parts(sequences: Any) -> dict[tuple[int, int], tuple[list[int], list[int], list[int]]]:
    """By id, the tokens of the prompt, those after it, and their mask."""
    lengths = sequences.prompt_lengths.tolist()
    rows = zip(
        sequences.row_ids.tolist(), sequences.tokens.to_lists(), sequences.loss_mask.to_lists(), lengths, strict=True
    )
    return {(p, s): (tokens[:n], tokens[n:], mask) for (p, s), tokens, mask, n in rows}


class TestMismatchedCompletions:
    @pytest.mark.parametrize("group_size", [1, 2])
    def test_each_prompt_takes_the_completion_of_the_next(self, group_size: int) -> None:
        feedback = feedback_of(rollouts_of(3, group_size, observations=True))
        given_, found = parts(feedback), parts(MismatchedCompletions()(feedback))
        assert found.keys() == given_.keys()
        for (prompt, sample), (asked, answered, mask) in found.items():
            other = given_[10 + (prompt - 10 + 1) % 3, sample]
            assert (asked, answered, mask) == (given_[prompt, sample][0], other[1], other[2])

    def test_prompts_with_fewer_responses_are_gone_through_again(self) -> None:
        feedback = feedback_of(rollouts_of(2, 3)).select([0, 1, 2, 3])
        given_, found = parts(feedback), parts(MismatchedCompletions()(feedback))
        assert [found[10, s][1] for s in range(3)] == 3 * [given_[11, 0][1]] and found[11, 0][1] == given_[10, 0][1]

    @settings(max_examples=30, deadline=None)
    @given(st.permutations(range(8)), st.integers(1, 8))
    def test_the_order_of_rows_decides_nothing(self, order: list[int], count: int) -> None:
        feedback = feedback_of(rollouts_of(4, 2, observations=True)).select(order[:count])
        expected = parts(MismatchedCompletions()(feedback.select(sorted(range(count), key=lambda i: order[i]))))
        assert parts(MismatchedCompletions()(feedback)) == expected

    def test_what_is_kept(self) -> None:
        feedback = feedback_of(rollouts_of(3, 1))
        made = MismatchedCompletions()(feedback)
        assert made.row_ids.tolist() == feedback.row_ids.tolist()  # type: ignore[union-attr]
        assert made.desirable.tolist() == feedback.desirable.tolist()
        assert made.spans.policy_versions.to_lists() == [[-1, 0]] * 3
        assert made.spans.kinds.to_lists() == [[SpanKind.PROMPT, SpanKind.POLICY]] * 3

    @pytest.mark.parametrize("rows", [[0], [0, 1]], ids=["one row", "one prompt"])
    def test_without_another_prompt_the_completion_is_empty(self, rows: list[int]) -> None:
        feedback = feedback_of(rollouts_of(1, 2)).select(rows)
        made = MismatchedCompletions()(feedback)
        assert made.response_lengths.tolist() == [0] * len(rows)
        assert made.tokens.to_lists() == [asked for asked, _, _ in parts(feedback).values()]

    def test_no_row(self) -> None:
        assert MismatchedCompletions()(feedback_of(rollouts_of(1, 1)).select([])).num_rows == 0

    def test_a_long_row_loses_its_end(self) -> None:
        """Prompts of 5, 3 and 8 tokens; responses of 3, 4 and 5."""
        feedback = feedback_of(rollouts_of(3, 1))
        given_, found = parts(feedback), parts(MismatchedCompletions(max_length=7)(feedback))
        assert [len(answered) for _, answered, _ in found.values()] == [2, 4, 0]
        assert found[10, 0][1] == given_[11, 0][1][:2]

    def test_an_engine_scores_it(self) -> None:
        made = MismatchedCompletions()(feedback_of(rollouts_of(3, 2, observations=True)))
        with use_bindings(Bindings(open_engine)), use_step(StepContext(label="here")):
            scored = ReferenceLogprobs(tiny_actor())(made)
        assert scored.ref_logprobs.lengths.tolist() == made.response_lengths.tolist()
        assert bool((scored.ref_logprobs.values[made.loss_mask.values.bool()] < 0).all())


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        (RewardPairs(min_margin=-1.0), "min_margin is -1.0"),
        (BestOfN(min_reward=math.nan), "min_reward is nan"),
        (ToFeedback(math.inf), "threshold is inf"),
        (MismatchedCompletions(max_length=1), "max_length is 1"),
    ],
)
def test_settings_that_cannot_work(node: Any, problem: str) -> None:
    assert any(problem in p for p in node.problems())
