"""Loss terms: what the edge to an updater carries, sums and counts, ``@loss``, and old log-probs that are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flowrl
from flowrl import (
    Advantages,
    Current,
    Demonstrations,
    Loss,
    LossTerm,
    Model,
    OldLogprobs,
    PPOLoss,
    Prompts,
    Ref,
    Rewards,
    Rollout,
    Rollouts,
    TokenLoss,
    source,
)
from flowrl.batches import LogprobOrigin
from flowrl.errors import EdgeTypeError, FlowError, GraphError
from flowrl.nodes.loss import Scorer
from tests.tiny import recorded_rollouts

if TYPE_CHECKING:
    from torch import Tensor

NO_POLICY: Any = None  # for losses that ask it nothing
ORIGIN = LogprobOrigin("m", 0, "test", "float32")


@flowrl.loss
def reinforce(current: Current, rollouts: Rollouts, advantages: Advantages, bonus: float = 0.0) -> Tensor:
    assert current.logprobs is not None
    return -(advantages.advantages.values + bonus) * current.logprobs


@flowrl.loss(requires={"logprobs", "entropy"}, couples="group")
def entropic(current: Current, rollouts: Rollouts, coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    assert current.entropy is not None
    return -coef * current.entropy, {"entropy": current.entropy}


@flowrl.loss
def naive_ratio(current: Current, rollouts: Rollouts, old: OldLogprobs) -> Tensor:
    """Reads the old log-probs as they are, without knowing that a plan may leave them out."""
    assert current.logprobs is not None
    return -(current.logprobs - old.old_logprobs.values).exp()


def advantages_of(rollouts: Rollouts, value: float = 1.0) -> Advantages:
    column = rollouts.loss_mask.with_values(torch.full((len(rollouts.loss_mask.values),), value))
    return Advantages(rollouts.prompt_id, rollouts.sample_id, column, column)


def old_of(rollouts: Rollouts) -> OldLogprobs:
    return OldLogprobs(rollouts.prompt_id, rollouts.sample_id, rollouts.rollout_logprobs, ORIGIN)


def current_of(rollouts: Rollouts, **columns: Any) -> Current:
    logprobs = (rollouts.rollout_logprobs.values + 0.5).requires_grad_()
    return Current(rollouts.loss_mask, logprobs, **columns)


def raised(thing: Callable[[], Any], kind: type[FlowError] = GraphError) -> FlowError:
    with pytest.raises(kind) as info:
        thing()
    return info.value


class TestTerms:
    def test_a_term_holds_the_loss_and_its_inputs(self) -> None:
        rollouts = recorded_rollouts()
        term = reinforce(rollouts, advantages_of(rollouts), bonus=0.5)
        assert isinstance(term, LossTerm) and term.loss.settings()["bonus"] == 0.5
        assert set(term.inputs) == {"rollouts", "advantages"} and term.sequences is rollouts
        assert term.num_rows == 6 and repr(term) == "LossTerm(6 samples)"
        assert term.select([4, 0]).sequences == rollouts.select([4, 0])
        assert term.select(torch.tensor([1])).num_rows == 1

    def test_advantages_decide_the_rows(self) -> None:
        rollouts = recorded_rollouts()
        term = reinforce(rollouts, advantages_of(rollouts.select([5, 1])))
        assert term.sequences == rollouts.select([5, 1])

    def test_a_joins_of_ones_own_wins(self) -> None:
        @flowrl.loss(joins={})
        def strict(current: Current, rollouts: Rollouts, advantages: Advantages) -> Tensor: ...  # type: ignore[empty-body]

        rollouts = recorded_rollouts()
        raised(lambda: strict(rollouts, advantages_of(rollouts.select([5, 1]))), FlowError)

    def test_recorded_as_any_node(self) -> None:
        rollouts: Any = Rollout(Model("m"))(source(Prompts, name="prompts"))
        term: Any = entropic(rollouts, coef=0.1)
        assert isinstance(term, Ref) and term._type is LossTerm
        assert term._call.node.requires == {"logprobs", "entropy"} and term._call.node.couples == "group"
        assert reinforce.options(weight=0.5, label="r").node_class.kind == "loss"
        assert entropic.options(weight=0.5)(rollouts, coef=1.0)._call.node.weight == 0.5  # type: ignore[attr-defined]

    def test_wrong_inputs(self) -> None:
        rollouts: Any = Rollout(Model("m"))(source(Prompts, name="prompts"))
        assert "argument 'advantages' has the wrong type" in str(
            raised(lambda: reinforce(rollouts, rollouts), EdgeTypeError)
        )
        assert "missing a required argument: 'coef'" in str(raised(lambda: entropic(rollouts), EdgeTypeError))  # type: ignore[call-arg]

    def test_losses_that_cannot_work(self) -> None:
        def no_sequences() -> None:
            @flowrl.loss
            def lost(current: Current, advantages: Advantages) -> Tensor: ...  # type: ignore[empty-body]

        def shadows() -> None:
            @flowrl.loss
            def shadow(current: Current, rollouts: Rollouts, scale: float = 1.0) -> Tensor: ...  # type: ignore[empty-body]

        assert "Loss lost has no sequences to train on" in str(raised(no_sequences))
        assert "shadow has a setting 'scale', which is something that every TokenLoss has" in str(raised(shadows))

    def test_impossible_settings(self) -> None:
        found = PPOLoss(aggregation="mean", scale=0).problems()  # type: ignore[arg-type]
        assert [p.split(";")[0] for p in found] == ["aggregation is 'mean'", "scale is 0"] or len(found) == 2


class TestSums:
    def test_sums_and_counts_of_a_token_loss(self) -> None:
        rollouts = recorded_rollouts()
        term = reinforce(rollouts, advantages_of(rollouts, 2.0), bonus=1.0)
        current = current_of(rollouts)
        total, count = term.loss.sums(current, None, **term.inputs)["loss"]
        assert current.logprobs is not None and count is not None
        assert torch.allclose(total, -3 * current.logprobs.sum())
        assert float(count) == term.loss.count(**term.inputs) == len(rollouts.loss_mask.values)

    def test_counts_of_disjoint_rows_add_up(self) -> None:
        rollouts = recorded_rollouts(observations=True)
        for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
            term = reinforce.options(aggregation=aggregation)(rollouts, advantages_of(rollouts))
            parts = [term.select(i) for i in ([0, 3], [1, 2, 4, 5])]
            assert sum(p.loss.count(**p.inputs) or 0 for p in parts) == pytest.approx(term.loss.count(**term.inputs))

    def test_metrics_are_means_over_policy_tokens_without_gradient(self) -> None:
        rollouts = recorded_rollouts(observations=True)
        entropy = torch.rand(len(rollouts.loss_mask.values), requires_grad=True)
        term = entropic(rollouts, coef=2.0)
        sums = term.loss.sums(current_of(rollouts, entropy=entropy), None, **term.inputs)
        mask = rollouts.loss_mask.values.bool()
        total, count = sums["entropy"]
        assert count is not None and not total.requires_grad and sums["loss"][0].requires_grad
        assert torch.allclose(total, entropy[mask].sum()) and float(count) == int(mask.sum())

    def test_nan_outside_of_the_mask_cannot_get_out(self) -> None:
        rollouts = recorded_rollouts(observations=True)
        mask = rollouts.loss_mask.values.bool()
        logprobs = torch.where(mask, -1.0, torch.nan).requires_grad_()
        term = reinforce(rollouts, advantages_of(rollouts))
        total, _ = term.loss.sums(Current(rollouts.loss_mask, logprobs), None, **term.inputs)["loss"]
        total.backward()
        assert total.isfinite() and logprobs.grad is not None
        assert bool(logprobs.grad.isfinite().all()) and bool((logprobs.grad[~mask] == 0).all())

    def test_old_logprobs_that_were_left_out_are_the_current_ones(self) -> None:
        rollouts = recorded_rollouts()
        left_out = replace(
            old_of(rollouts),
            old_logprobs=rollouts.rollout_logprobs.with_values(
                torch.full_like(rollouts.rollout_logprobs.values, torch.nan)
            ),
            is_current=True,
        )
        current = current_of(rollouts)
        assert current.logprobs is not None
        assert torch.equal(current.old(left_out), current.logprobs.detach()) and not current.old(left_out).requires_grad
        for term in (naive_ratio(rollouts, left_out), PPOLoss()(rollouts, advantages_of(rollouts), left_out)):
            total, _ = term.loss.sums(current, None, **term.inputs)["loss"]
            assert torch.allclose(
                total, torch.tensor(-float(len(rollouts.loss_mask.values)))
            )  # a ratio of 1 everywhere
            (gradient,) = torch.autograd.grad(total, current.logprobs)
            assert torch.allclose(gradient, -torch.ones_like(gradient))

    def test_constants_are_handed_to_the_loss(self) -> None:
        class Centred(TokenLoss):
            def __call__(self, demonstrations: Demonstrations) -> LossTerm:
                return self.term(demonstrations=demonstrations)

            def prepare(self, policy: Scorer, **inputs: Any) -> Any:
                return 3.0

            def token_losses(self, current: Current, **inputs: Any) -> Tensor:
                assert current.logprobs is not None
                return inputs["constants"] * current.logprobs

        rollouts = recorded_rollouts()
        demonstrations = Demonstrations(rollouts.prompt_id, rollouts.sample_id, rollouts.tokens, rollouts.spans)
        term = Centred()(demonstrations)
        constants = term.loss.prepare(NO_POLICY, **term.inputs)
        total, _ = term.loss.sums(current_of(rollouts), constants, **term.inputs)["loss"]
        assert torch.allclose(total, 3 * (rollouts.rollout_logprobs.values + 0.5).sum())

    def test_the_base_says_what_is_missing(self) -> None:
        class Empty(Loss):
            def __call__(self, rollouts: Rollouts) -> LossTerm:
                return self.term(rollouts=rollouts)

        with pytest.raises(NotImplementedError):
            Empty().count()
        assert Empty().head() is None and Empty().prepare(NO_POLICY) is None
        assert isinstance(Empty()(recorded_rollouts()), LossTerm)
        assert not isinstance(Rewards, LossTerm)
