"""The exact KL and distillation, through the engine: against plain softmaxes of the two models' own logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flowrl
from flowrl import AdamW, Model, PolicyLogprobs, Prompts, RLFlow, Rollout, Rollouts, Sampling, State, Updater, source
from flowrl.context import Bindings, use_bindings
from flowrl.errors import ModelError
from flowrl.functional.divergence import DIVERGENCES, divergence
from flowrl.nodes.distillation import DistillLoss, FullKLLoss, TeacherTopK, TopKDistillLoss
from flowrl.nodes.updater import term_rows
from flowrl.runtime.engines import transformers_distribution
from flowrl.runtime.engines.transformers_network import Network
from flowrl.runtime.worker import open_engine
from tests.flows import FAST, prompts
from tests.runs import quick_run, training
from tests.runtime.engines.engines import gradients, relative_distance
from tests.tiny import recorded_rollouts, tiny_actor, tiny_model, tiny_tokenizer

ROLLOUTS = recorded_rollouts(num_prompts=4, group_size=3, observations=True)


@pytest.fixture(autouse=True)
def bindings() -> Iterator[None]:
    with use_bindings(Bindings(open_engine)):
        yield


def teacher_of(**config: Any) -> Model:
    return Model(tiny_model(1, **config), name="teacher", tokenizer=tiny_tokenizer(), trainable=False, device="cpu")


def plain(model: Model, rollouts: Rollouts) -> Tensor:
    """``[num_tokens, vocab]`` log-probs at each response token, the model being called as anybody would."""
    found = []
    for row, start in zip(rollouts.tokens.rows(), rollouts.prompt_lengths.tolist(), strict=True):
        table = torch.log_softmax(model.source(input_ids=row[None]).logits[0].float(), -1)
        found.append(table[start - 1 : len(row) - 1])
    return torch.cat(found)


def by_autograd(actor: Model, teacher: Model, kind: str) -> tuple[float, Tensor]:
    """Mean divergence over policy tokens, and its gradient by plain autograd over whole logits."""
    mask = ROLLOUTS.loss_mask.values.bool()
    with torch.no_grad():
        other = plain(teacher, ROLLOUTS)
    value = divergence(plain(actor, ROLLOUTS), other, kind)[mask].mean()
    actor.source.zero_grad()
    value.backward()
    gradient = torch.cat([p.grad.flatten() for p in actor.source.parameters()])
    actor.source.zero_grad(set_to_none=True)
    return float(value.detach()), gradient


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_value_and_gradient(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_distribution, "SLICE", 7)  # several slices, the last one short
    if padded:
        monkeypatch.setattr(Network, "_probe_packing", lambda self: False)
    actor, teacher = tiny_actor(), teacher_of()
    value, gradient = by_autograd(actor, teacher, kind)
    engine: Any = actor.bound_engine()
    term = DistillLoss(teacher, objective=kind)(ROLLOUTS)
    result = engine.train_step([term_rows(term, engine)], AdamW(learning_rate=0.0), max_grad_norm=None)
    total, count = result.sums["loss"]
    assert total / count == pytest.approx(value, rel=1e-5)
    assert relative_distance(gradients(engine, [term_rows(term, engine)]), gradient) <= 1e-4


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_top_k_of_the_whole_vocabulary_is_the_whole(kind: str) -> None:
    actor, teacher = tiny_actor(), teacher_of()
    engine = actor.bound_engine()
    top = TeacherTopK(teacher, k=264)(ROLLOUTS)
    assert top.k == 264 and int(top.token_ids.offsets[-1]) == 264 * len(ROLLOUTS.loss_mask.values)
    whole = gradients(engine, [term_rows(DistillLoss(teacher, objective=kind)(ROLLOUTS), engine)])
    part = gradients(engine, [term_rows(TopKDistillLoss(objective=kind)(ROLLOUTS, top), engine)])
    assert relative_distance(part, whole) <= 1e-4
    few = TeacherTopK(teacher, k=5)(ROLLOUTS)
    other = gradients(engine, [term_rows(TopKDistillLoss(objective=kind)(ROLLOUTS, few), engine)])
    assert relative_distance(other, whole) > 1e-3


def test_several_divergences_in_one_step_are_kept_apart() -> None:
    actor, teacher = tiny_actor(), teacher_of()
    terms = [
        DistillLoss(teacher)(ROLLOUTS),
        DistillLoss(teacher, objective="forward_kl")(ROLLOUTS),
        FullKLLoss(actor.frozen(), 0.5)(ROLLOUTS),
        TopKDistillLoss()(ROLLOUTS, TeacherTopK(teacher, k=3)(ROLLOUTS)),
        TopKDistillLoss()(ROLLOUTS, TeacherTopK(teacher, k=9)(ROLLOUTS)),
    ]
    engine = actor.bound_engine()
    together = gradients(engine, [term_rows(t, engine) for t in terms])
    alone = [gradients(engine, [term_rows(t, engine)]) for t in terms]
    assert relative_distance(together, sum(alone)) <= 1e-5  # type: ignore[arg-type]


def test_the_divergence_from_itself_is_zero_and_so_is_its_gradient() -> None:
    actor = tiny_actor()
    engine: Any = actor.bound_engine()
    term = FullKLLoss(actor.frozen())(ROLLOUTS)
    result = engine.train_step([term_rows(term, engine)], FAST, max_grad_norm=None)
    assert abs(result.sums["reverse_kl"][0]) < 1e-5 and result.grad_norm < 1e-5


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    actor, teacher = tiny_actor(), teacher_of(vocab=300)
    engine = actor.bound_engine()
    with pytest.raises(ModelError, match=r"same vocabulary, 264 tokens\. Received one with 300"):
        gradients(engine, [term_rows(DistillLoss(teacher)(ROLLOUTS), engine)])


def test_the_sum_of_squares() -> None:
    actor = tiny_actor()
    old = PolicyLogprobs(actor, sum_pi_squared=True)(ROLLOUTS)
    expected = plain(actor, ROLLOUTS).exp().square().sum(-1)
    assert old.sum_pi_squared is not None
    torch.testing.assert_close(old.sum_pi_squared.values, expected, rtol=1e-4, atol=1e-6)
    assert PolicyLogprobs(actor)(ROLLOUTS).sum_pi_squared is None


def test_settings_are_checked() -> None:
    rows = source(Prompts, name="prompts", batch_size=2)
    actor = tiny_actor()
    rollouts = Rollout(actor, sampling=Sampling(4))(rows)
    critic = flowrl.ValueModel.from_policy(actor)
    report = RLFlow.from_outputs(
        Updater(actor)(
            DistillLoss(teacher_of(), objective="kl", beta=1.0)(rollouts),
            FullKLLoss(critic, -1.0)(rollouts),
            TopKDistillLoss()(rollouts, TeacherTopK(teacher_of(), k=0)(rollouts)),
        )
    ).check()
    text = str(report)
    for part in ("objective is 'kl'", "beta is 1.0", "coef is -1.0", "k is 0", "a policy model"):
        assert part in text, text


def test_a_run_comes_nearer_to_its_teacher_and_a_controller_is_read_once_a_step(tmp_path: Any) -> None:
    actor, teacher, coef = tiny_actor(), teacher_of(), State("coef", 0.25)
    rollouts = Rollout(actor, group_size=4, sampling=Sampling(6))(source(Prompts, name="prompts", batch_size=4))
    update = Updater(actor, optimizer=FAST)(DistillLoss(teacher)(rollouts), FullKLLoss(actor.frozen(), coef)(rollouts))
    rows = training(quick_run(RLFlow.from_outputs(update), 8, tmp_path / "run", prompts()))
    losses = [row["distill_loss/reverse_kl"] for row in rows]
    assert losses[-1] < 0.75 * losses[0]  # 0.67 with this seed
    last = rows[-1]
    assert last["full_kl_loss/loss"] == pytest.approx(0.25 * last["full_kl_loss/reverse_kl"], rel=1e-6)
