"""``flowrl.testing`` finds what is there, and catches what breaks a law: each planted fault by the law that it breaks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import flowrl
from flowrl import (
    GAE,
    Advantages,
    Current,
    GroupAdvantage,
    Loss,
    LossTerm,
    Model,
    Node,
    OldLogprobs,
    PPOLoss,
    Rewards,
    Rollouts,
    SFTLoss,
    TokenLoss,
    Values,
)
from flowrl.batches import Batch, Preferences, Sequences
from flowrl.errors import FlowError
from flowrl.functional.advantages import spread_over_tokens
from flowrl.functional.grouping import Groups
from flowrl.nodes.distillation import FullKLLoss
from flowrl.nodes.loss import Scorer, Sums
from flowrl.nodes.sequence_loss import PairLoss, Pairs, RowLoss
from flowrl.ragged import Ragged
from flowrl.testing import LawError, check_advantage, check_loss, registered_advantages, registered_losses
from flowrl.testing.inputs import Draw, make_inputs


def broken(subject: Any, **options: Any) -> LawError:
    """The law that a loss breaks."""
    with pytest.raises(LawError) as info:
        check_loss(subject, **options)
    return info.value


def broken_advantage(subject: Any, **options: Any) -> LawError:
    with pytest.raises(LawError) as info:
        check_advantage(subject, **options)
    return info.value


class OnRollouts(TokenLoss):
    """What the planted losses share."""

    def __call__(self, rollouts: Rollouts, advantages: Advantages) -> LossTerm:
        return self.term(rollouts=rollouts, advantages=advantages)


# -- what is registered ------------------------------------------------------------------------------------------------


class TestRegistry:
    def test_a_new_loss_is_found_without_a_word(self) -> None:
        class Fresh(OnRollouts):
            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                return -current.logprobs

        @flowrl.loss
        def fresher(current: Current, rollouts: Rollouts) -> Tensor:
            return -current.logprobs

        found = registered_losses()
        assert Fresh in found and fresher.node_class in found
        assert {PPOLoss, SFTLoss, FullKLLoss} <= set(found)
        check_loss(Fresh)
        check_loss(fresher)

    def test_bases_are_not_losses(self) -> None:
        from flowrl.nodes.policy_loss_base import PolicyLoss

        class Unfinished(PolicyLoss):
            strength: float = 1.0

        assert not {Loss, TokenLoss, RowLoss, PairLoss, PolicyLoss, OnRollouts, Unfinished} & set(registered_losses())

    def test_advantages(self) -> None:
        @flowrl.node
        def mine(rollouts: Rollouts, rewards: Rewards) -> Advantages: ...  # type: ignore[empty-body]

        @flowrl.node
        def other(rollouts: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

        found = set(registered_advantages())
        assert {GAE, GroupAdvantage, mine.node_class} <= found
        assert other.node_class not in found and not any(issubclass(cls, Loss) for cls in found)

    def test_every_module_of_nodes_is_loaded_and_the_order_is_fixed(self) -> None:
        own = [cls for cls in registered_losses() if cls.__module__.startswith("flowrl.")]
        assert {cls.__module__ for cls in own} >= {"flowrl.nodes.policy_losses", "flowrl.nodes.preference_losses"}
        assert own == sorted(own, key=lambda cls: (cls.__module__, cls.__qualname__))


# -- planted faults ----------------------------------------------------------------------------------------------------


class MicroBatchMean(OnRollouts):
    """Divides by the number of tokens of its own micro-batch: the classic."""

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.logprobs / max(1, int(current.loss_mask.values.sum()))


class MicroBatchBaseline(OnRollouts):
    """Centres the advantages of its own micro-batch."""

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        mask = current.loss_mask.values.bool()
        advantages = torch.where(mask, inputs["advantages"].advantages.values, 0.0)
        return -(advantages - advantages.sum() / max(1, int(mask.sum()))) * current.logprobs


class MultipliesByMask(OnRollouts):
    """NaN × 0 is NaN."""

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.logprobs * inputs["advantages"].advantages.values

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        mask = current.loss_mask.values
        losses = self.token_losses(current, **inputs) * mask
        return {"loss": (losses.sum(), mask.sum().double())}


class LeaksIntoGradient(OnRollouts):
    """Selects the value, but differentiates both branches: 0 × inf."""

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        moved = current.logprobs - inputs["rollouts"].rollout_logprobs.values
        return torch.where(current.loss_mask.values.bool(), moved**2, 0.0)

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        losses = self.token_losses(current, **inputs)
        return {"loss": (losses.sum(), current.loss_mask.values.sum().double())}


class CountsObservations(OnRollouts):
    """Says another count than it gives."""

    def count(self, **inputs: Any) -> float:
        return float(len(inputs["rollouts"].loss_mask.values))

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.logprobs


class CountsOnce(OnRollouts):
    """A count that does not add up over parts."""

    def count(self, **inputs: Any) -> float:
        return 1.0

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        losses = torch.where(current.loss_mask.values.bool(), -current.logprobs, 0.0)
        return {"loss": (losses.sum(), torch.tensor(1.0))}


class CountsByModel(OnRollouts):
    """Counts the tokens that the Model finds unlikely."""

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        unlikely = current.loss_mask.values.bool() & (current.logprobs < -1)
        return {"loss": (torch.where(unlikely, -current.logprobs, 0.0).sum(), unlikely.sum().double())}


class ByPlace(OnRollouts):
    """Weighs a row by where it stands."""

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.logprobs * (1 + current.loss_mask.row_of_value)


class ConstantByPlace(OnRollouts):
    """A constant that is kept by place, and read by place in every micro-batch."""

    def prepare(self, policy: Scorer, **inputs: Any) -> Tensor:
        return 1 + torch.arange(inputs["rollouts"].num_rows)

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.logprobs * inputs["constants"][current.loss_mask.row_of_value]


class NotZeroForNothing(RowLoss):
    """A mean over no rows."""

    def __call__(self, rollouts: Rollouts) -> LossTerm:
        return self.term(rollouts=rollouts)

    def row_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.sequence_logprobs()

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        out = super().sums(current, constants, **inputs)
        return out | {"mean": (-current.sequence_logprobs().detach().mean(), torch.tensor(1.0))}


class DividesByLength(RowLoss):
    """NaN for an empty response."""

    def __call__(self, rollouts: Rollouts) -> LossTerm:
        return self.term(rollouts=rollouts)

    def row_losses(self, current: Current, **inputs: Any) -> Tensor:
        return -current.sequence_logprobs() / current.loss_mask.with_values(current.loss_mask.values.float()).sum_rows()


class MetricOfMicroBatch(OnRollouts):
    """The loss is right, a metric is not."""

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        largest = current.logprobs.detach().abs().max() if len(current.logprobs) else torch.zeros(())
        return -current.logprobs, {"largest": largest.expand(len(current.logprobs))}


@pytest.mark.parametrize(
    ("planted", "law", "what"),
    [
        (MicroBatchMean, "micro-batches", "its value depends on it"),
        (MicroBatchBaseline, "micro-batches", "its value depends on it"),
        (MetricOfMicroBatch, "micro-batches", "its metric 'largest' depends on it"),
        (MultipliesByMask, "masked tokens", "where no token counts change its value"),
        (LeaksIntoGradient, "masked tokens", "change its gradient with respect to logprobs"),
        (CountsObservations, "counts", "sums() counts otherwise than count()"),
        (CountsOnce, "counts", "the counts of its rows do not add up"),
        (CountsByModel, "counts", "sums() counts otherwise than count()"),
        (ByPlace, "row order", "its value depends on it"),
        (ConstantByPlace, "row order", "its value depends on it"),
        (DividesByLength, "finite numbers", "its value is not finite"),
        (NotZeroForNothing, "empty batches", "its metric 'mean' is not 0 for no rows"),
    ],
)
def test_a_planted_fault_is_caught_by_the_law_that_it_breaks(planted: type[Loss], law: str, what: str) -> None:
    error = broken(planted)
    assert error.law == law
    assert what in str(error) and str(error).startswith(f"{planted.__name__}() breaks the law of {error.law}")
    assert error.expected is not None and error.received is not None and error.do


def test_the_deviation_is_said() -> None:
    @flowrl.loss
    def slightly(current: Current, rollouts: Rollouts) -> Tensor:
        return -current.logprobs + 1e-3 * current.logprobs**2 / max(1, rollouts.num_rows)

    assert "Expected at most" in str(broken(slightly)) and "instead of" in str(broken(slightly))


# -- what is right passes ----------------------------------------------------------------------------------------------


class TestRightLosses:
    def test_constants_of_the_whole_batch(self) -> None:
        class Centred(OnRollouts):
            def prepare(self, policy: Scorer, **inputs: Any) -> float:
                mask = inputs["rollouts"].loss_mask.values.bool()
                kept = policy.logprobs(inputs["rollouts"])[mask].double().sort().values
                return float(kept.sum() / max(1, len(kept)))

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                return (current.logprobs - inputs["constants"]) ** 2

        check_loss(Centred)

    def test_groups_stay_together(self) -> None:
        class WithinGroup(OnRollouts):
            couples: ClassVar[str] = "group"

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                groups = Groups.of(inputs["rollouts"].prompt_id)
                sums = current.sequence_logprobs()
                mean = torch.zeros(groups.num_groups, dtype=sums.dtype).index_add(0, groups.index, sums) / groups.sizes
                return ((sums - mean[groups.index]) ** 2)[current.loss_mask.row_of_value]

        class Uncoupled(WithinGroup):
            couples: ClassVar[str] = "row"

        check_loss(WithinGroup)
        assert broken(Uncoupled).law == "micro-batches"

    def test_every_leaf(self) -> None:
        class All(OnRollouts):
            requires: ClassVar[frozenset[str]] = frozenset({"logprobs", "entropy", "values"})

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                return current.logprobs * current.values.sin() + current.entropy**2

        class ByRank(PairLoss):
            requires: ClassVar[frozenset[str]] = frozenset({"scores"})

            def __call__(self, preferences: Preferences) -> LossTerm:
                return self.term(preferences=preferences)

            def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> Tensor:
                return (current.scores[pairs.rejected] - current.scores[pairs.chosen]).exp()

        check_loss(All)
        check_loss(ByRank)

    def test_rows_that_are_not_counted(self) -> None:
        class Finished(RowLoss):
            careful: bool = True

            def __call__(self, rollouts: Rollouts) -> LossTerm:
                return self.term(rollouts=rollouts)

            def counted_rows(self, **inputs: Any) -> Tensor:
                return inputs["rollouts"].finish_reason == 0

            def row_losses(self, current: Current, **inputs: Any) -> Tensor:
                sums = current.sequence_logprobs()
                return (torch.where(self.counted_rows(**inputs), sums, 0.0) if self.careful else sums) ** 2

        check_loss(Finished())
        assert broken(Finished(careful=False)).law == "masked tokens"

    def test_settings_of_a_class_a_function_and_an_instance(self) -> None:
        @flowrl.loss
        def scaled(current: Current, rollouts: Rollouts, factor: float) -> Tensor:
            return -factor * current.logprobs / (max(1, rollouts.num_rows) if factor > 1 else 1)

        check_loss(scaled, settings={"factor": 0.5})
        assert broken(scaled, settings={"factor": 2.0}).subject == "scaled(factor=2.0)"
        with pytest.raises(FlowError, match="cannot be made without factor"):
            check_loss(scaled)
        check_loss(PPOLoss(clip=0.1))
        check_loss(PPOLoss, settings={"clip": 0.3}, num_draws=1)
        check_loss(FullKLLoss, num_draws=1)  # a Model is found
        check_loss(FullKLLoss(Model("m")), num_draws=1)
        with pytest.raises(FlowError, match="impossible settings: clip is -1"):
            check_loss(PPOLoss(clip=-1))

    def test_optional_inputs_are_given_and_left_out(self) -> None:
        seen: set[tuple[str, ...]] = set()

        class Watching(TokenLoss):
            def __call__(
                self, rollouts: Rollouts, old: OldLogprobs | None = None, values: Values | None = None
            ) -> LossTerm:
                return self.term(rollouts=rollouts, old=old, values=values)

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                seen.add(tuple(sorted(inputs)))
                return -current.logprobs

        check_loss(Watching, num_draws=1)
        assert seen == {
            ("rollouts",),
            ("old", "rollouts"),
            ("rollouts", "values"),
            ("old", "rollouts", "values"),
        }

    def test_log_probs_that_a_plan_leaves_out(self) -> None:
        filled: list[bool] = []

        @flowrl.loss
        def ratio(current: Current, rollouts: Rollouts, old: OldLogprobs) -> Tensor:
            filled.append(torch.equal(old.old_logprobs.values, current.logprobs.detach().float()))
            return -(current.logprobs - old.old_logprobs.values).exp()

        check_loss(ratio, num_draws=1)
        assert True in filled and False in filled

    def test_inputs_of_unknown_types(self) -> None:
        @dataclass(frozen=True, eq=False, repr=False)
        class Bonus(Batch):
            prompt_id: Tensor
            sample_id: Tensor
            bonus: Ragged
            column_types: ClassVar[Mapping[str, str]] = {
                "prompt_id": "int64",
                "sample_id": "int64",
                "bonus": "float32 ragged",
            }

        @dataclass(frozen=True, eq=False, repr=False)
        class Odd(Bonus):
            scale: float

        class WithBonus(TokenLoss):
            careful: bool = True

            def __call__(self, rollouts: Rollouts, bonus: Bonus) -> LossTerm:
                return self.term(rollouts=rollouts, bonus=bonus)

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                bonus = inputs["bonus"].bonus.values
                if not self.careful:
                    bonus = bonus - bonus.sum()
                return -bonus * current.logprobs

        class WithOdd(TokenLoss):
            def __call__(self, rollouts: Rollouts, odd: Odd) -> LossTerm:
                return self.term(rollouts=rollouts, odd=odd)

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                return -inputs["odd"].bonus.values * inputs["odd"].scale * current.logprobs

        check_loss(WithBonus)
        assert broken(WithBonus(careful=False)).law == "micro-batches"
        with pytest.raises(FlowError, match=r"cannot make Odd\.scale"):
            check_loss(WithOdd)

        def make(sequences: Sequences, generator: torch.Generator) -> Odd:
            mask = sequences.loss_mask
            column = mask.with_values(torch.rand(len(mask.values), generator=generator))
            return Odd(sequences.prompt_id, sequences.sample_id, column, 2.0)

        check_loss(WithOdd, inputs={"odd": make})


def test_a_loss_that_asks_a_model_is_told_so() -> None:
    class Asking(OnRollouts):
        model: Model

        def token_losses(self, current: Current, **inputs: Any) -> Tensor:
            self.model.bound_engine()
            return -current.logprobs

    with pytest.raises(FlowError, match="holds no engine"):
        check_loss(Asking)


def test_errors_are_assertions_and_travel() -> None:
    error = broken(MicroBatchMean)
    assert isinstance(error, AssertionError) and isinstance(error, FlowError)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.law == error.law == "micro-batches" and copy.subject == "MicroBatchMean()"


# -- the inputs --------------------------------------------------------------------------------------------------------


class TestInputs:
    def test_they_have_what_goes_wrong(self) -> None:
        draws = [make_inputs(PPOLoss(), Draw.random(seed), ["ref_logprobs"]) for seed in range(20)]
        rollouts = [inputs["rollouts"] for inputs in draws]
        kinds = {int(kind) for r in rollouts for kind in r.spans.kinds.values}
        assert kinds == {0, 1, 2}
        assert any(bool((r.response_lengths == 0).any()) for r in rollouts)
        written = [r.loss_mask.with_values(r.loss_mask.values.int()).sum_rows() for r in rollouts]
        assert any(bool(((w == 0) & (r.response_lengths > 0)).any()) for w, r in zip(written, rollouts, strict=True)), (
            "no row that is all observations"
        )
        assert any(len(set(Groups.of(r.prompt_id).sizes.tolist())) > 1 for r in rollouts)
        assert any(inputs["advantages"].num_rows < inputs["rollouts"].num_rows for inputs in draws)
        assert any(inputs["advantages"].row_ids.tolist() != inputs["rollouts"].row_ids.tolist() for inputs in draws)

    def test_ratios_are_clipped_in_some_and_not_in_others(self) -> None:
        shares = []
        for seed in range(4):
            inputs = make_inputs(PPOLoss(), Draw(seed), [])
            mask = inputs["rollouts"].loss_mask.values.bool()
            order = inputs["old_logprobs"].row_ids.tolist()
            aligned = inputs["rollouts"].select([inputs["rollouts"].row_ids.tolist().index(ids) for ids in order])
            ratio = (aligned.rollout_logprobs.values - inputs["old_logprobs"].old_logprobs.values).exp()
            shares.append(float(((ratio - 1).abs() > 0.2).float()[mask].mean()))
        assert 0.05 < sum(shares) / 4 < 0.95

    def test_the_same_draw_gives_the_same_inputs(self) -> None:
        for node in (PPOLoss(), GAE()):
            a, b = (make_inputs(node, Draw(3), ["ref_logprobs"]) for _ in range(2))
            assert a == b and a.keys() >= {"rollouts", "ref_logprobs"}
            assert make_inputs(node, Draw(4), [])["rollouts"] != a["rollouts"]

    def test_rewards_tie_and_some_are_invalid(self) -> None:
        rewards = [make_inputs(GAE(), Draw(seed), [])["rewards"] for seed in range(6)]
        assert any(int(r.valid.sum()) < r.num_rows for r in rewards)
        for r in rewards:
            assert r.totals.isnan().tolist() == (~r.valid.bool()).tolist()
            score = r.components["score"][r.valid.bool()].tolist()
            assert len(set(score)) < len(score)


# -- advantages --------------------------------------------------------------------------------------------------------


class OfRows(Node):
    """What the planted advantages share: a number a row of the valid rows, spread over its tokens."""

    kind: ClassVar[str] = "advantage"

    def numbers(self, rewards: Tensor, prompt_id: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Advantages:
        keep = rewards.valid.nonzero().flatten()
        totals, prompt_id = rewards.totals[keep], rollouts.prompt_id[keep]
        column = spread_over_tokens(self.numbers(totals, prompt_id), rollouts.loss_mask.select(keep))
        return Advantages(prompt_id, rollouts.sample_id[keep], column, column)


class Plain(OfRows):
    def numbers(self, rewards: Tensor, prompt_id: Tensor) -> Tensor:
        return rewards


class AboveMean(OfRows):
    """Of the whole batch, but says that it works row by row."""

    def numbers(self, rewards: Tensor, prompt_id: Tensor) -> Tensor:
        return (rewards.double() - rewards.double().sort().values.sum() / max(1, len(rewards))).float()


class AboveMeanOfWhole(AboveMean):
    split: ClassVar[Any] = "whole"


class ByGroup(OfRows):
    """Compares within groups; its split must say so."""

    def numbers(self, rewards: Tensor, prompt_id: Tensor) -> Tensor:
        groups = Groups.of(prompt_id)
        return (rewards - groups.mean(rewards)[groups.index]).float()


class ByGroupSplitSo(ByGroup):
    split: ClassVar[Any] = "groups"


class NeedsTwo(ByGroupSplitSo):
    needs_groups: ClassVar[int] = 2


class ByRowPlace(OfRows):
    def numbers(self, rewards: Tensor, prompt_id: Tensor) -> Tensor:
        return rewards * (1 + torch.arange(len(rewards)))


class NaiveStd(ByGroupSplitSo):
    """NaN for a group of one."""

    def numbers(self, rewards: Tensor, prompt_id: Tensor) -> Tensor:
        out = torch.zeros_like(rewards)
        for prompt in prompt_id.unique():
            of = prompt_id == prompt
            centred = rewards[of] - rewards[of].mean()
            out[of] = centred / ((centred**2).sum() / (int(of.sum()) - 1)).sqrt()
        return out


class KeepsInvalid(Node):
    """Trains on rows whose reward nobody knows."""

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Advantages:
        column = spread_over_tokens(rewards.components["score"], rollouts.loss_mask)
        return Advantages(rollouts.prompt_id, rollouts.sample_id, column, column)


class ReadsObservations(Node):
    """A running sum over all tokens, observations included."""

    def __call__(self, rollouts: Rollouts, values: Values) -> Advantages:
        column = values.values
        total = column.sum_rows()[column.row_of_value]
        return Advantages(
            rollouts.prompt_id, rollouts.sample_id, column.with_values(total), column.with_values(column.values)
        )


class TestAdvantages:
    @pytest.mark.parametrize("right", [Plain, AboveMeanOfWhole, ByGroupSplitSo])
    def test_right_ones_pass(self, right: type[Node]) -> None:
        check_advantage(right)

    @pytest.mark.parametrize(
        ("planted", "law", "what"),
        [
            (AboveMean, "split", "its advantages depend on it"),
            (ByGroup, "split", "its advantages depend on it"),
            (ByRowPlace, "row order", "its advantages depend on it"),
            (NaiveStd, "finite numbers", "its advantages are not finite"),
            (KeepsInvalid, "finite numbers", "its advantages are not finite"),
            (ReadsObservations, "masked tokens", "its advantages depend on it"),
            (NeedsTwo, "degenerate groups", "it needs groups of 2, and does not refuse smaller ones"),
        ],
    )
    def test_a_planted_fault_is_caught_by_the_law_that_it_breaks(
        self, planted: type[Node], law: str, what: str
    ) -> None:
        error = broken_advantage(planted)
        assert error.law == law and what in str(error)

    def test_functions_and_instances(self) -> None:
        @flowrl.node(split="groups")
        def best(rollouts: Rollouts, rewards: Rewards, factor: float) -> Advantages:
            keep = rewards.valid.nonzero().flatten()
            totals, prompt_id = rewards.totals[keep], rollouts.prompt_id[keep]
            groups = Groups.of(prompt_id)
            is_best = (totals == groups.max(totals)[groups.index]).float()
            column = spread_over_tokens(factor * is_best, rollouts.loss_mask.select(keep))
            return Advantages(prompt_id, rollouts.sample_id[keep], column, column)

        check_advantage(best, settings={"factor": 2.0})
        check_advantage(GroupAdvantage(leave_one_out=True, normalize_by_std=False), num_draws=1)
        check_advantage(GAE(invalid="fail", whiten=False), num_draws=1)
        with pytest.raises(FlowError, match="cannot be made without factor"):
            check_advantage(best)


def test_a_draw_without_rows_that_count(recwarn: pytest.WarningsRecorder) -> None:
    """The trial of a batch in which nobody wrote is such a batch."""
    inputs = make_inputs(SFTLoss(), replace(Draw(1), written=False), [])
    mask = inputs["demonstrations"].loss_mask
    assert len(mask.values) and not bool(mask.values.any())
    assert not recwarn.list


def test_a_check_that_would_look_at_nothing_is_refused() -> None:
    with pytest.raises(FlowError, match="tests nothing"):
        check_loss(flowrl.PPOLoss(), num_draws=0)
