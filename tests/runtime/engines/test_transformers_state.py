"""Weights, checkpoints and exports of the transformers engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.context import Bindings
from flowrl.errors import CheckpointError, ModelError
from flowrl.models import Model, ValueHead, ValueModel
from flowrl.nodes.rollout import Sampling
from flowrl.nodes.updater import AdamW
from flowrl.ragged import Ragged
from flowrl.runtime.engines import transformers_sampling
from flowrl.runtime.engines.transformers_network import Network
from flowrl.runtime.worker import open_engine
from tests.runtime.engines.engines import Regression, Reinforce, engine_of, term_rows
from tests.tiny import recorded_rollouts, tiny_model, tiny_tokenizer

ROLLOUTS = recorded_rollouts()
STEP = AdamW(learning_rate=1e-2)


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    engine.complete_version()


def same(a: Any, b: Any) -> bool:
    x, y = dict(a.weights()), dict(b.weights())
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_save_and_load_continue_bit_for_bit(tmp_path: Path, steps_before: int) -> None:
    one = engine_of(tiny_model())
    one.add_value_head("head")
    train(one, steps_before)
    one.save(tmp_path)
    other = engine_of(tiny_model(seed=1))
    train(other, 1)  # an engine that has lived already
    other.load(tmp_path)
    assert same(one, other)
    assert (other.policy_version, other.optimizer_steps) == (one.policy_version, one.optimizer_steps)
    assert not other.is_untrained
    train(one, 2)
    train(other, 2)
    assert same(one, other)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    engine_of(tiny_model(layers=1)).save(tmp_path)
    engine = engine_of(tiny_model())
    before = dict(engine.weights())
    with pytest.raises(CheckpointError, match="another model"):
        engine.load(tmp_path)
    assert all(torch.equal(before[n], t) for n, t in engine.weights())
    with pytest.raises(CheckpointError, match=r"engine\.json"):
        engine.load(tmp_path / "nowhere")


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_named_once_and_copied(tied: bool) -> None:
    engine = engine_of(tiny_model(tied=tied))
    engine.add_value_head("a.head")
    before = dict(engine.weights())
    assert ("lm_head.weight" in before) != tied
    assert "value_heads.a.head.weight" in before
    train(engine, 1)
    assert not same(engine, engine_of(tiny_model(tied=tied))) and len(before) == len(dict(engine.weights()))
    engine.load_weights(before, policy_version=7)
    assert all(torch.equal(before[n], t) for n, t in engine.weights())
    assert engine.policy_version == 7


def test_load_weights_refuses_everything_wrong_at_once() -> None:
    engine = engine_of(tiny_model())
    before = dict(engine.weights())
    wrong = dict(before)
    del wrong["model.norm.weight"]
    wrong["model.extra.weight"] = torch.zeros(1)
    wrong["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 3)
    wrong["lm_head.weight"] = torch.zeros_like(before["model.embed_tokens.weight"])
    with pytest.raises(ModelError) as caught:
        engine.load_weights(wrong, policy_version=1)
    text = str(caught.value)
    assert "model.norm.weight is missing" in text
    assert "model.extra.weight is unknown" in text
    assert "model.layers.0.mlp.up_proj.weight has shape [2, 3], not [64, 32]" in text
    assert "lm_head.weight is tied to model.embed_tokens.weight and differs from it" in text
    assert engine.policy_version == 0 and all(torch.equal(before[n], t) for n, t in engine.weights())
    engine.load_weights(before | {"lm_head.weight": before["model.embed_tokens.weight"]}, policy_version=1)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_a_huggingface_directory(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = engine_of(tiny_model(tied=tied))
    train(engine, 1)
    engine.export(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert module.config._attn_implementation == "sdpa"
    assert torch.equal(module(input_ids=ids).logits, engine.network.module(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tiny_tokenizer().chat_template
    again: Any = open_engine(Model(tmp_path, device="cpu"), Bindings(open_engine))
    assert same(engine, again)


def test_heads_survive_an_export(tmp_path: Path) -> None:
    critic: Any = open_engine(ValueModel(tiny_model(), name="c", tokenizer=tiny_tokenizer()), Bindings(open_engine))
    critic.train_step([term_rows(Regression()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    critic.export(tmp_path / "critic")
    again: Any = open_engine(ValueModel(tmp_path / "critic", device="cpu"), Bindings(open_engine))
    assert same(critic, again) and again.values(ROLLOUTS) == critic.values(ROLLOUTS)

    actor = Model(tiny_model(), name="actor", tokenizer=tiny_tokenizer(), device="cpu")
    engine: Any = open_engine(actor, Bindings(open_engine))
    head = ValueHead(actor)
    engine.train_step([term_rows(Regression(value_head=head)(ROLLOUTS))], STEP, max_grad_norm=1.0)
    engine.export(tmp_path / "actor")
    bindings = Bindings(open_engine)
    second = Model(tmp_path / "actor", name="actor", device="cpu")
    view: Any = bindings.engine(ValueHead(second))  # type: ignore[arg-type]
    assert view.values(ROLLOUTS) == engine.values(ROLLOUTS, head=head.name)


def test_a_live_model_is_trained_in_place_and_left_as_it_was(tmp_path: Path) -> None:
    module = tiny_model()
    before = module.model.layers[0].mlp.up_proj.weight.detach().clone()
    implementation = module.config._attn_implementation
    engine = engine_of(module)
    train(engine, 1)
    engine.logprobs(ROLLOUTS)
    engine.close()
    assert not torch.equal(before, module.model.layers[0].mlp.up_proj.weight)
    assert module.config._attn_implementation == implementation
    module.save_pretrained(tmp_path)


def test_dtype_converts_parameters_and_leaves_buffers() -> None:
    module = tiny_model()
    engine = engine_of(module, dtype="bfloat16")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32}
    assert engine.origin().dtype == "bfloat16"
    scores = engine.logprobs(ROLLOUTS)
    assert scores.logprobs.values.dtype == torch.float32
    result = engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0)
    assert not result.skipped and result.grad_norm > 0


def test_autocast_is_close_to_float32() -> None:
    plain, cast = engine_of(tiny_model()), engine_of(tiny_model(), autocast="bfloat16")
    assert cast.origin().dtype == "bfloat16"
    expected = plain.logprobs(ROLLOUTS).logprobs.values
    found = cast.logprobs(ROLLOUTS).logprobs.values
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.05
    result = cast.train_step([term_rows(Reinforce(entropy_coef=0.1)(ROLLOUTS))], STEP, max_grad_norm=1.0)
    assert not result.skipped


class CountCasts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_sampling_casts_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a frozen copy, which autocast by itself would cast at every token."""

    def casts(engine: Any) -> int:
        with CountCasts() as counter:
            engine.generate(Ragged.from_rows([[1, 2, 3]], torch.int64), [1], sampling)
        return counter.count

    sampling = Sampling(max_new_tokens=8, stop_token_ids=(9999,))
    actor = Model(tiny_model(), device="cpu", autocast="bfloat16")
    engine: Any = open_engine(actor, Bindings(open_engine))
    frozen = engine.copy(actor.frozen())
    assert casts(engine) == casts(frozen)
    assert not any(p.requires_grad for p in frozen.network.module.parameters())
    weights_cast_at_each_token = 2 * 7 + 1  # of two layers, and the head
    monkeypatch.setattr(transformers_sampling, "cached_casts", lambda network: contextlib.nullcontext())
    assert casts(frozen) == casts(engine) + 7 * weights_cast_at_each_token


def test_the_engine_knows_where_a_model_ends() -> None:
    assert Network(tiny_model(max_positions=77), autocast=None, name="x").max_length == 77
