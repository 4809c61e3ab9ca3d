"""Opening engines: derived Models, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.context import Bindings
from flowrl.errors import ModelError
from flowrl.models import Ema, Model, RewardModel, Snapshot, ValueHead, ValueModel
from flowrl.nodes.updater import AdamW
from flowrl.runtime.worker import follow, open_engine
from tests.runtime.engines.engines import Reinforce, term_rows
from tests.tiny import recorded_rollouts, tiny_folder, tiny_model, tiny_tokenizer

ROLLOUTS = recorded_rollouts()
NORM = "model.norm.weight"


def actor_and_bindings(**settings: Any) -> tuple[Model, Bindings]:
    return Model(tiny_model(), name="actor", device="cpu", **settings), Bindings(open_engine)


def train(engine: Any) -> None:
    engine.train_step([term_rows(Reinforce()(ROLLOUTS))], AdamW(learning_rate=1e-2), max_grad_norm=1.0)
    engine.complete_version()


def norm_of(engine: Any) -> torch.Tensor:
    return dict(engine.weights())[NORM]


def test_an_engine_is_opened_once() -> None:
    actor, bindings = actor_and_bindings()
    assert bindings.engine(actor) is bindings.engine(actor)
    assert bindings.engine(actor).micro_batch_tokens == bindings.micro_batch_tokens  # type: ignore[attr-defined]


def test_frozen_keeps_the_weights_of_step_0() -> None:
    actor, bindings = actor_and_bindings()
    base, frozen = bindings.engine(actor), bindings.engine(actor.frozen())  # type: ignore[arg-type]
    before = base.logprobs(ROLLOUTS).logprobs
    assert frozen.logprobs(ROLLOUTS).logprobs == before
    train(base)
    assert frozen.logprobs(ROLLOUTS).logprobs == before != base.logprobs(ROLLOUTS).logprobs
    assert frozen.policy_version == 0 and frozen.origin().model == "actor.frozen"
    with pytest.raises(ModelError, match="not trainable"):
        train(frozen)


def test_a_frozen_of_a_trained_live_model_is_refused() -> None:
    actor, bindings = actor_and_bindings()
    train(bindings.engine(actor))
    with pytest.raises(ModelError, match=r"weights of step 0 are gone.*before the first update"):
        bindings.engine(actor.frozen())  # type: ignore[arg-type]


def test_a_frozen_of_a_trained_folder_is_loaded_again(tmp_path: Path) -> None:
    actor = Model(tiny_folder(tmp_path), device="cpu")
    bindings = Bindings(open_engine)
    base = bindings.engine(actor)
    before = norm_of(base)
    train(base)
    assert torch.equal(norm_of(bindings.engine(actor.frozen())), before)  # type: ignore[arg-type]


def test_a_snapshot_is_taken_every_n_versions() -> None:
    actor, bindings = actor_and_bindings()
    snapshot = Snapshot(actor, every=2)
    base, engine = bindings.engine(actor), bindings.engine(snapshot)  # type: ignore[arg-type]
    seen = [norm_of(base)]
    for _ in range(3):
        train(base)
        follow(snapshot, bindings)
        seen.append(norm_of(base))
        expected = len(seen) - 1 - (len(seen) - 1) % 2
        assert torch.equal(norm_of(engine), seen[expected]) and engine.policy_version == expected


def test_an_ema_averages() -> None:
    actor, bindings = actor_and_bindings()
    ema = Ema(actor, decay=0.75)
    base, engine = bindings.engine(actor), bindings.engine(ema)  # type: ignore[arg-type]
    average = norm_of(base)
    for version in (1, 2):
        train(base)
        follow(ema, bindings)
        average = 0.75 * average + 0.25 * norm_of(base)
        torch.testing.assert_close(norm_of(engine), average)
        assert engine.policy_version == version


def test_a_value_head_shares_the_trunk() -> None:
    actor, bindings = actor_and_bindings()
    view: Any = bindings.engine(ValueHead(actor))  # type: ignore[arg-type]
    base: Any = bindings.engine(actor)
    assert view.network is base.network and list(base.heads) == ["actor.value_head"]
    assert view.values(ROLLOUTS) == base.values(ROLLOUTS, head="actor.value_head")
    with pytest.raises(ModelError, match=r"no value head 'other'.*actor\.value_head"):
        base.values(ROLLOUTS, head="other")


def test_a_critic_from_a_live_policy_has_a_trunk_of_its_own() -> None:
    actor, bindings = actor_and_bindings()
    critic = ValueModel.from_policy(actor)
    base, engine = bindings.engine(actor), bindings.engine(critic)
    train(base)
    assert not torch.equal(norm_of(base), dict(engine.weights())["norm.weight"])


def test_two_models_on_one_live_module_are_refused() -> None:
    actor, bindings = actor_and_bindings()
    bindings.engine(actor)
    reference = Model(actor.source, name="reference", trainable=False)
    with pytest.raises(ModelError, match=r"share one live model.*actor\.frozen\(\)"):
        bindings.engine(reference)


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ModelError, match=r"no engine 'transfomers'.*did you mean 'transformers'"):
        open_engine(Model(tiny_model(), engine="transfomers"), Bindings(open_engine))


def reward_module(**config: Any) -> Any:
    from transformers import LlamaForSequenceClassification

    policy = tiny_model(num_labels=1, **config)
    torch.manual_seed(0)
    return LlamaForSequenceClassification(policy.config).eval()


def test_a_reward_model_scores_the_last_token_whatever_it_is() -> None:
    module = reward_module()
    judge = RewardModel(module, tokenizer=tiny_tokenizer(), device="cpu")
    engine = Bindings(open_engine, micro_batch_tokens=20).engine(judge)
    rollouts = recorded_rollouts()
    rollouts.tokens.values[rollouts.tokens.offsets[1:] - 1] = module.config.pad_token_id
    scores = engine.score(rollouts)
    for row, score in zip(rollouts.tokens.rows(), scores, strict=True):
        with torch.no_grad():
            hidden = module.model(input_ids=row[None]).last_hidden_state[0, -1]
            torch.testing.assert_close(score, module.score(hidden)[0], rtol=0, atol=1e-5)


def test_a_policy_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks weights.*a sequence classifier.*score\.weight"):
        open_engine(RewardModel(tiny_folder(tmp_path)), Bindings(open_engine))
