"""Losses with a number a row or a pair: how they are summed, what they refuse, and a reward model through the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flowrl import Current, LossTerm, Preferences, Ragged, RewardModel, RewardModelScore, Rollouts, Updater
from flowrl.context import Bindings, use_bindings
from flowrl.errors import BatchError, GraphError, UnsupportedError
from flowrl.nodes.sequence_loss import PairLoss, Pairs, RowLoss
from flowrl.nodes.updater import AdamW, term_rows
from flowrl.runtime.worker import open_engine
from tests.flows import FAST
from tests.runtime.engines.engines import gradients, relative_distance
from tests.tiny import recorded_rollouts, tiny_actor


def preferences(num_pairs: int = 4, **options: Any) -> Preferences:
    """Rows of two answers each, the chosen one first in every second pair."""
    rollouts = recorded_rollouts(num_prompts=num_pairs, group_size=2, **options)
    chosen = torch.tensor([(row + row // 2) % 2 == 0 for row in range(rollouts.num_rows)], dtype=torch.uint8)
    ids = (rollouts.prompt_id, rollouts.sample_id)
    return Preferences(*ids, rollouts.tokens, rollouts.spans, rollouts.prompt_id, chosen)


class Margin(PairLoss):
    """The chosen row's score should be larger."""

    requires: ClassVar[frozenset[str]] = frozenset({"scores"})

    def __call__(self, preferences: Preferences) -> LossTerm:
        return self.term(preferences=preferences)

    def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        margin = current.scores[pairs.chosen] - current.scores[pairs.rejected]
        return torch.nn.functional.softplus(-margin), {"margin": margin}


class LongLikelihood(RowLoss):
    """The log-prob of whole rows, of those with more than two tokens."""

    def __call__(self, rollouts: Rollouts) -> LossTerm:
        return self.term(rollouts=rollouts)

    def counted_rows(self, **inputs: Any) -> Tensor:
        return inputs["rollouts"].response_lengths > 2

    def row_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.sequence_logprobs()


class TestPairs:
    def test_rows_are_found_by_pair_wherever_they_stand(self) -> None:
        rows = preferences(3).select([5, 0, 3, 1, 4, 2])
        pairs = Pairs.of(rows)
        assert rows.pair_id[pairs.chosen].tolist() == rows.pair_id[pairs.rejected].tolist() == [0, 1, 2]
        assert rows.chosen[pairs.chosen].tolist() == [1, 1, 1] and rows.chosen[pairs.rejected].tolist() == [0, 0, 0]

    @pytest.mark.parametrize("rows", [[0, 2, 3], [0, 0, 1], [1, 1]])
    def test_what_is_no_pair_is_refused(self, rows: list[int]) -> None:
        with pytest.raises(BatchError, match="Pair 0 is not a pair"):
            Pairs.of(preferences(2).select(rows))

    def test_none(self) -> None:
        empty = preferences(1).select([])
        assert Pairs.of(empty).num_pairs == 0
        assert Margin().count(preferences=empty) == 0
        current = Current(empty.loss_mask, scores=torch.zeros(0, requires_grad=True))
        total, count = Margin().sums(current, None, preferences=empty)["loss"]
        assert total.item() == 0 and count is not None and count.item() == 0


def test_row_losses_select_what_counts() -> None:
    rollouts = recorded_rollouts()  # lengths 4, 1, 7, 0, 6, 3
    logprobs = rollouts.rollout_logprobs.values.clone()
    rows = rollouts.rollout_logprobs.sum_rows()
    logprobs[rollouts.loss_mask.row_of_value == 1] = torch.nan  # of a row that does not count
    current = Current(rollouts.loss_mask, logprobs=logprobs.requires_grad_())
    sums = LongLikelihood().sums(current, None, rollouts=rollouts)
    total, count = sums["loss"]
    assert count is not None and count.item() == 4 == LongLikelihood().count(rollouts=rollouts)
    assert total.item() == pytest.approx(-float(rows[[0, 2, 4, 5]].sum()), rel=1e-6)
    total.backward()
    assert current.logprobs.grad is not None
    expected = -(rollouts.response_lengths > 2).float()[rollouts.loss_mask.row_of_value]
    assert torch.equal(current.logprobs.grad, expected)


def test_wrong_shapes_and_lost_gradients_are_refused() -> None:
    rollouts = recorded_rollouts()
    current = Current(rollouts.loss_mask, logprobs=rollouts.rollout_logprobs.values.clone().requires_grad_())

    class Scalar(LongLikelihood):
        def row_losses(self, current: Current, **inputs: Any) -> Tensor:
            return current.logprobs.mean()

    class Detached(LongLikelihood):
        def row_losses(self, current: Current, **inputs: Any) -> Tensor:
            return current.sequence_logprobs().detach()

    with pytest.raises(GraphError, match=r"shape \[num_rows\] = \[6\]. Received of shape \[\]"):
        Scalar().sums(current, None, rollouts=rollouts)
    with pytest.raises(GraphError, match="has no gradient"):
        Detached().sums(current, None, rollouts=rollouts)


class TestRewardModel:
    @pytest.fixture(autouse=True)
    def bindings(self) -> Iterator[None]:
        with use_bindings(Bindings(open_engine)):
            yield

    def test_from_policy_starts_at_zero_and_leaves_the_policy_alone(self) -> None:
        actor = tiny_actor()
        before = [p.detach().clone() for p in actor.source.parameters()]
        model = RewardModel.from_policy(actor)
        assert model.trainable and model.name == "tiny-reward"
        rows = preferences()
        assert RewardModelScore(model)(rows).totals.tolist() == [0.0] * 8
        losses = [Updater(model, optimizer=FAST)(Margin()(rows)).metrics["loss"] for _ in range(12)]
        assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.3
        pairs, scores = Pairs.of(rows), RewardModelScore(model)(rows).totals
        assert bool((scores[pairs.chosen] > scores[pairs.rejected]).all())
        assert all(torch.equal(a, b) for a, b in zip(before, actor.source.parameters(), strict=True))

    def test_gradients_do_not_depend_on_the_split(self) -> None:
        rows = preferences(observations=True)

        def gradient(budget: int) -> Tensor:
            model = RewardModel.from_policy(tiny_actor())
            engine: Any = open_engine(model, Bindings(open_engine, micro_batch_tokens=budget))
            torch.nn.init.normal_(engine.network.module.score.weight, generator=torch.Generator().manual_seed(0))
            return gradients(engine, [term_rows(Margin()(rows), engine)])

        whole = gradient(4096)
        for budget in (1, 40):
            assert relative_distance(gradient(budget), whole) <= 1e-5

    def test_from_a_folder(self, tmp_path: Any) -> None:
        actor = tiny_actor()
        actor.source.save_pretrained(tmp_path)
        model = RewardModel(tmp_path, tokenizer=actor.tokenizer, new_head=True, trainable=True, device="cpu")
        live = RewardModel.from_policy(actor)
        rows = preferences()
        for each in (model, live):
            Updater(each, optimizer=AdamW(learning_rate=1e-3))(Margin()(rows))
        a, b = (RewardModelScore(m)(rows).totals for m in (model, live))
        assert float(a.abs().max()) > 0 and torch.equal(a, b)

    def test_a_policy_has_no_scores(self) -> None:
        actor = tiny_actor()
        with pytest.raises(UnsupportedError, match="scores no sequences"):
            Updater(actor)(Margin()(preferences()))


def test_arrow_takes_what_is_optional() -> None:
    rows = preferences()
    assert Preferences.from_arrow(rows.to_arrow()) == rows
    assert replace(rows, chosen=1 - rows.chosen) != rows
    assert isinstance(rows.tokens, Ragged)
