"""One optimiser step: law 1, equal passes before and in the step, shared passes, and steps that are not finite."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flowrl.batches import LogprobOrigin
from flowrl.context import Bindings
from flowrl.errors import FlowError, ModelError
from flowrl.models import Model, ValueHead, ValueModel
from flowrl.nodes.loss import Current, LossTerm
from flowrl.nodes.updater import AdamW
from flowrl.runtime.engines import transformers_training
from flowrl.runtime.engines.transformers_training import snake_case
from flowrl.runtime.worker import open_engine
from tests.runtime.engines.engines import (
    GroupReinforce,
    Regression,
    Reinforce,
    engine_of,
    gradients,
    relative_distance,
    term_rows,
)
from tests.runtime.engines.test_transformers_packing import build
from tests.tiny import recorded_rollouts, tiny_model

ROLLOUTS = recorded_rollouts(num_prompts=4, group_size=3, observations=True)
TOKENS = int(ROLLOUTS.tokens.lengths.sum())
STEP = AdamW(learning_rate=1e-2)


@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("tied", [True, False])
def test_law_1_gradients_do_not_depend_on_the_split(tied: bool, aggregation: Any) -> None:
    found = [
        gradients(
            engine_of(tiny_model(tied=tied), micro_batch_tokens=budget),
            [term_rows(Reinforce(aggregation=aggregation, entropy_coef=0.1)(ROLLOUTS))],
        )
        for budget in (10_000, TOKENS // 2, 30, 1)
    ]
    for other in found[1:]:
        assert relative_distance(other, found[0]) <= 1e-5


@pytest.mark.parametrize("architecture", ["GPT2", "Gemma2", "Mistral", "Bloom"])
def test_law_1_holds_for_other_architectures(architecture: str) -> None:
    found = [
        gradients(engine_of(build(architecture), micro_batch_tokens=budget), [term_rows(Reinforce()(ROLLOUTS))])
        for budget in (10_000, 30)
    ]
    assert relative_distance(found[1], found[0]) <= 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_the_plain_model(tied: bool) -> None:
    """Against one differentiable forward pass a row of the model as it is."""
    module = tiny_model(tied=tied)
    found = gradients(engine_of(module), [term_rows(Reinforce(entropy_coef=0.1)(ROLLOUTS))])
    losses = []
    for i, row in enumerate(ROLLOUTS.tokens.rows()):
        start = int(ROLLOUTS.prompt_lengths[i])
        if start == len(row):
            continue
        table = torch.log_softmax(module(input_ids=row[None]).logits[0, start - 1 : -1], -1)
        logprobs = table.gather(1, row[start:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        loss = -ROLLOUTS.rollout_logprobs.row(i) * logprobs - 0.1 * entropy
        losses.append(loss[ROLLOUTS.loss_mask.row(i).bool()])
    plain = torch.autograd.grad(torch.cat(losses).mean(), list(module.parameters()))
    assert relative_distance(found, torch.cat([g.flatten() for g in plain])) <= 1e-5


@pytest.mark.parametrize("budget", [10_000, 40])
@pytest.mark.parametrize("loss", [Reinforce, GroupReinforce])
def test_a_pass_before_the_step_equals_the_pass_in_the_step_bit_for_bit(loss: Any, budget: int) -> None:
    """What lets a plan leave out the log-probs of the current policy."""
    seen: list[Tensor] = []

    class Spy(loss):
        def token_losses(self, current: Current, **inputs: Any) -> Any:
            assert current.logprobs is not None
            seen.append(current.logprobs.detach().clone())
            return super().token_losses(current, **inputs)

    engine = engine_of(tiny_model(), micro_batch_tokens=budget)
    before = engine.logprobs(ROLLOUTS).logprobs
    engine.train_step([term_rows(Spy()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    policy = ROLLOUTS.loss_mask.values.bool()
    assert torch.equal(torch.cat(seen)[policy], before.values[policy])


def test_training_lowers_the_loss_and_counts_its_steps() -> None:
    engine = engine_of(tiny_model())
    terms = [term_rows(Reinforce()(ROLLOUTS))]
    results = [engine.train_step(terms, STEP, max_grad_norm=1.0) for _ in range(5)]
    means = [total / count for total, count in (r.sums["loss"] for r in results)]
    assert means == sorted(means, reverse=True) and means[-1] < means[0] - 0.1
    assert engine.optimizer_steps == 5 and engine.policy_version == 0
    engine.complete_version()
    assert engine.policy_version == 1
    assert results[0].sums["logprob"][1] == float(ROLLOUTS.loss_mask.values.sum())


def test_the_learning_rate_follows_its_schedule() -> None:
    engine = engine_of(tiny_model())
    terms = [term_rows(Reinforce()(ROLLOUTS))]
    warm = AdamW(learning_rate=1e-3, warmup_steps=4)
    assert [engine.train_step(terms, warm, max_grad_norm=None).learning_rate for _ in range(3)] == [
        2.5e-4,
        5e-4,
        7.5e-4,
    ]
    engine.train_step(terms, AdamW(learning_rate=2e-3, betas=(0.8, 0.9), weight_decay=0.5), max_grad_norm=None)
    group = engine.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (2e-3, (0.8, 0.9), 0.5)


def test_clipping_scales_the_gradient_to_the_norm() -> None:
    norms = {}
    for limit in (None, 0.1):
        engine = engine_of(tiny_model())
        seen: list[float] = []
        optimizer = engine.torch_optimizer(STEP)
        optimizer.register_step_pre_hook(
            lambda *_, engine=engine, seen=seen: seen.append(
                float(torch.stack([p.grad.norm() for _, p in engine.trained_parameters()]).norm())
            )
        )
        result = engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=limit)
        norms[limit] = (result.grad_norm, seen[0])
    assert norms[None][0] == pytest.approx(norms[None][1], rel=1e-5)
    assert norms[0.1][0] == norms[None][0] and norms[0.1][1] == pytest.approx(0.1, rel=1e-4)


def test_terms_over_the_same_rows_share_one_forward_pass() -> None:
    actor = Model(tiny_model(), name="actor", device="cpu")
    head = ValueHead(actor)
    bindings = Bindings(open_engine)
    engine: Any = bindings.engine(actor)
    view: Any = bindings.engine(head)  # type: ignore[arg-type]
    assert view.values(ROLLOUTS).values.abs().max() == 0  # a head of zeros
    passes = 0
    original = engine.network.hidden

    def counted(layout: Any) -> Tensor:
        nonlocal passes
        passes += 1
        return original(layout)

    engine.network.hidden = counted
    terms = [term_rows(Reinforce()(ROLLOUTS)), term_rows(Regression(value_head=head, weight=0.5)(ROLLOUTS))]
    result = engine.train_step(terms, STEP, max_grad_norm=1.0)
    assert passes == 1
    assert set(result.sums) == {"loss", "reinforce/loss", "reinforce/logprob", "regression/loss"}
    means = {name: total / count for name, (total, count) in result.sums.items()}
    assert means["loss"] == pytest.approx(means["reinforce/loss"] + 0.5 * means["regression/loss"], rel=1e-5)
    assert view.values(ROLLOUTS).values.abs().max() > 0
    assert view.policy_version == engine.policy_version == 0
    # a term over other rows is another pass
    passes = 0
    other = recorded_rollouts(2, 2, seed=5)
    engine.train_step([terms[0], term_rows(Reinforce()(other))], STEP, max_grad_norm=1.0)
    assert passes == 2


def test_rows_without_a_gradient_cost_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose advantages are 0 adds nothing to the gradient."""
    rollouts = recorded_rollouts(num_prompts=4, group_size=3)
    rollouts.rollout_logprobs.values[rollouts.prompt_id[rollouts.rollout_logprobs.row_of_value] != 2] = 0.0
    whole = gradients(engine_of(tiny_model()), [term_rows(Reinforce()(rollouts))])
    engine = engine_of(tiny_model(), micro_batch_tokens=20)
    calls: list[Any] = []
    into_the_model = transformers_training.torch.autograd.backward

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(tensors)
        into_the_model(tensors, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    split = gradients(engine, [term_rows(Reinforce()(rollouts))])
    assert relative_distance(split, whole) <= 1e-5
    touched = [rows for rows in engine._micro_batches(rollouts) if bool((rollouts.prompt_id[rows] == 2).any())]
    assert len([c for c in calls if isinstance(c, list)]) == len(touched) < len(engine._micro_batches(rollouts))


def test_law_1_holds_for_several_terms() -> None:
    found = []
    for budget in (10_000, 40):
        actor = Model(tiny_model(), name="actor", device="cpu")
        engine: Any = open_engine(actor, Bindings(open_engine, micro_batch_tokens=budget))
        head = ValueHead(actor)
        engine.add_value_head(head.name)
        torch.nn.init.constant_(engine.heads[head.name].weight, 0.1)
        terms = [
            term_rows(GroupReinforce()(ROLLOUTS)),
            term_rows(Regression(value_head=head)(ROLLOUTS)),
            term_rows(Reinforce(weight=0.3)(recorded_rollouts(2, 2, seed=5))),
        ]
        found.append(gradients(engine, terms))
    assert relative_distance(found[1], found[0]) <= 1e-5


def test_a_value_model_learns_values() -> None:
    critic = ValueModel(tiny_model(), name="critic", device="cpu")
    engine: Any = open_engine(critic, Bindings(open_engine))
    assert engine.values(ROLLOUTS).values.abs().max() == 0
    terms = [term_rows(Regression()(ROLLOUTS))]
    first, *_, last = [engine.train_step(terms, STEP, max_grad_norm=1.0).sums["loss"][0] for _ in range(10)]
    assert last < first / 2


def test_values_are_those_before_the_token() -> None:
    """The value before a token may not depend on the token."""
    engine: Any = open_engine(ValueModel(tiny_model(), device="cpu"), Bindings(open_engine))
    torch.nn.init.normal_(engine.heads["value"].weight)
    rollouts = recorded_rollouts(1, 1, response_lengths=(4,))
    before = engine.values(rollouts).values
    rollouts.tokens.values[-2:] = 7
    after = engine.values(rollouts).values
    torch.testing.assert_close(before[:3], after[:3], rtol=0, atol=1e-6)
    assert not torch.allclose(before[3], after[3])


def test_logprobs_are_trained_at_the_temperature_of_the_rollouts() -> None:
    import dataclasses

    seen: list[Tensor] = []

    class Spy(Reinforce):
        def token_losses(self, current: Current, **inputs: Any) -> Any:
            assert current.logprobs is not None
            seen.append(current.logprobs.detach().clone())
            return super().token_losses(current, **inputs)

    engine = engine_of(tiny_model())
    for temperature, used in ((0.7, 0.7), (0.0, 1.0)):
        origin = LogprobOrigin("live", 0, "transformers", "float32", temperature=temperature)
        rollouts = dataclasses.replace(recorded_rollouts(), origin=origin)
        expected = engine.logprobs(rollouts, temperature=used).logprobs.values
        engine.train_step([term_rows(Spy()(rollouts))], AdamW(learning_rate=0.0, weight_decay=0), max_grad_norm=None)
        assert torch.equal(seen[-1], expected)


# -- not finite -------------------------------------------------------------------------------------------------------


def weights(engine: Any) -> dict[str, Tensor]:
    return dict(engine.weights())


def unchanged(engine: Any, before: dict[str, Tensor], moments: dict[str, Tensor], steps: int) -> bool:
    after = weights(engine)
    now = {k: s["exp_avg"] for k, s in engine.optimizer.state.items()}
    return (
        all(torch.equal(before[n], after[n]) for n in before)
        and all(torch.equal(moments[k], now[k]) for k in moments)
        and engine.optimizer_steps == steps
        and all(p.grad is None for _, p in engine.trained_parameters())
    )


@pytest.mark.parametrize("budget", [10_000, 30])
def test_a_loss_that_is_not_finite_skips_the_step_and_names_its_rows(budget: int) -> None:
    engine = engine_of(tiny_model(), micro_batch_tokens=budget)
    engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    before = weights(engine)
    moments = {k: s["exp_avg"].clone() for k, s in engine.optimizer.state.items()}
    bad = recorded_rollouts(num_prompts=4, group_size=3, observations=True)
    bad.rollout_logprobs.row(4)[0] = torch.nan  # row 4 is (1, 1)
    bad.rollout_logprobs.row(8)[0] = torch.inf  # row 8 is (2, 2)
    result = engine.train_step([term_rows(Reinforce()(bad))], STEP, max_grad_norm=1.0)
    assert result.skipped and result.nonfinite_rows == ((1, 1), (2, 2))
    assert unchanged(engine, before, moments, 1)
    assert not engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0).skipped


def test_nan_outside_of_the_loss_mask_does_not_matter() -> None:
    engine = engine_of(tiny_model())
    rollouts = recorded_rollouts(num_prompts=4, group_size=3, observations=True)
    rollouts.rollout_logprobs.values[~rollouts.loss_mask.values.bool()] = torch.nan
    result = engine.train_step([term_rows(Reinforce()(rollouts))], STEP, max_grad_norm=1.0)
    assert not result.skipped and result.grad_norm > 0


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_its_rows() -> None:
    class Explode(Reinforce):
        """Finite for every row, with an infinite gradient for prompt 2."""

        def token_losses(self, current: Current, **inputs: Any) -> Any:
            assert current.logprobs is not None
            rows = inputs["rollouts"]
            bad = (rows.prompt_id == 2)[rows.loss_mask.row_of_value].nonzero()[:, 0]
            logprobs = current.logprobs[bad]
            root = (logprobs - logprobs.detach()).abs().sqrt()  # 0, with slope infinity
            return (-current.logprobs).index_add(0, bad, root)

    engine = engine_of(tiny_model(), micro_batch_tokens=30)
    engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    before = weights(engine)
    moments = {k: s["exp_avg"].clone() for k, s in engine.optimizer.state.items()}
    result = engine.train_step([term_rows(Explode()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    assert result.skipped and {p for p, _ in result.nonfinite_rows} == {2}
    assert unchanged(engine, before, moments, 1)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_loss_whose_counts_do_not_add_up_is_named() -> None:
    class Wrong(Reinforce):
        def count(self, **inputs: Any) -> float:
            return 3.0

    engine = engine_of(tiny_model())
    before = weights(engine)
    with pytest.raises(FlowError, match=r"counts of Wrong over micro-batches do not add up.*3\.0"):
        engine.train_step([term_rows(Wrong()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    assert all(torch.equal(before[n], t) for n, t in engine.weights())


def test_a_loss_without_a_loss_is_named() -> None:
    class Nothing(Reinforce):
        def sums(self, current: Current, constants: Any, **inputs: Any) -> Any:
            return {"other": (torch.zeros(()), torch.ones(()))}

    with pytest.raises(FlowError, match=r"Nothing\.sums gives no 'loss'"):
        engine_of(tiny_model()).train_step([term_rows(Nothing()(ROLLOUTS))], STEP, max_grad_norm=1.0)


def test_a_head_of_another_model_is_refused() -> None:
    engine = engine_of(tiny_model())
    other = ValueHead(Model(tiny_model(1), name="other"))
    with pytest.raises(ModelError, match=r"Regression reads ValueHead\('other\.value_head'\).*not a head of"):
        engine.train_step([term_rows(Regression(value_head=other)(ROLLOUTS))], STEP, max_grad_norm=1.0)


def test_a_model_that_is_not_trainable_is_not_trained() -> None:
    engine = engine_of(tiny_model(), trainable=False)
    with pytest.raises(ModelError, match="not trainable"):
        engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0)


def test_rows_without_a_policy_token_give_a_step_without_a_gradient() -> None:
    engine = engine_of(tiny_model())
    empty = recorded_rollouts(2, 2, response_lengths=(0,))
    result = engine.train_step([term_rows(Reinforce()(empty))], STEP, max_grad_norm=1.0)
    assert result.sums["loss"] == (0.0, 0.0) and result.grad_norm == 0.0 and not result.skipped


class Pairwise(Reinforce):
    couples: ClassVar[str] = "pair"


def test_pairs_need_preferences() -> None:
    term = LossTerm(Pairwise(), {"rollouts": ROLLOUTS})
    with pytest.raises(FlowError, match="pair"):
        engine_of(tiny_model()).train_step([term_rows(term)], STEP, max_grad_norm=1.0)


def test_names_of_losses() -> None:
    assert [snake_case(n) for n in ("PPOLoss", "SFTLoss", "ValueLoss", "MyKL2Loss")] == [
        "ppo_loss",
        "sft_loss",
        "value_loss",
        "my_kl2_loss",
    ]
