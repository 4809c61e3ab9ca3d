"""LoRA on a base that never changes, quantised bases, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flowrl
from flowrl import (
    GAE,
    AdamW,
    Critic,
    Ema,
    FullKLLoss,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    PolicyLogprobs,
    PPOLoss,
    ReferenceLogprobs,
    RewardModel,
    RLFlow,
    Rollout,
    Sampling,
    Snapshot,
    Updater,
    ValueHead,
    ValueLoss,
    ValueModel,
    ValueUpdater,
    rewards_like,
)
from flowrl.adapters import LoRA
from flowrl.batches import Values
from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings, use_bindings
from flowrl.errors import CheckpointError, ModelError
from flowrl.ragged import Ragged
from flowrl.runtime.engines.transformers_quantization import dequantised, is_quantised
from flowrl.runtime.ranks import Ranks
from flowrl.runtime.worker import follow, open_engine
from tests.flows import FAST, SAMPLING, prompts, reward, tiny_grpo, tiny_ppo
from tests.ranks import launch, shared
from tests.runs import checkpoint_weights, quick_run, saved_weights, training
from tests.runtime.engines import two_layouts
from tests.runtime.engines.engines import GroupReinforce, Regression, Reinforce, gradients, relative_distance, term_rows
from tests.tiny import recorded_rollouts, tiny_folder, tiny_model, tiny_tokenizer

ROLLOUTS = recorded_rollouts()
SMALL = LoRA(rank=4, alpha=8)
#: Of the tiny model with SMALL: rank * (in + out) of each linear layer, two layers.
ADAPTER_NUMBERS = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))


def engine_of(source: Any = None, *, bindings: Bindings | None = None, cls: Any = Model, **settings: Any) -> Any:
    settings = {"name": "actor", "tokenizer": tiny_tokenizer(), "device": "cpu", "lora": SMALL, **settings}
    model = cls(tiny_model() if source is None else source, **settings)
    return (bindings or Bindings(open_engine)).engine(model)


def train(engine: Any, steps: int = 1, loss: Any = None) -> Any:
    result: Any = None
    for _ in range(steps):
        result = engine.train_step(
            [term_rows((loss or Reinforce())(ROLLOUTS))], AdamW(learning_rate=1e-2), max_grad_norm=1.0
        )
        engine.complete_version()
    return result


def logprobs(engine: Any) -> Tensor:
    return engine.logprobs(ROLLOUTS).logprobs.values


def held(*engines: Any) -> int:
    """Bytes of all tensors that these engines hold, shared ones once."""
    found = {}
    for engine in engines:
        for tensor in [*engine.network.module.parameters(), *engine.network.module.buffers()]:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


class TestLoRA:
    def test_a_new_adapter_changes_nothing(self) -> None:
        plain, engine = engine_of(lora=None), engine_of()
        assert engine.network.abilities == plain.network.abilities and engine.network.abilities.packs
        assert torch.equal(logprobs(engine), logprobs(plain))
        expected, found = dict(plain.weights()), dict(engine.weights())
        assert list(found) == list(expected) and all(torch.equal(found[n], t) for n, t in expected.items())

    def test_only_the_adapter_is_trained(self) -> None:
        module = tiny_model()
        before = {n: t.clone() for n, t in module.state_dict().items()}
        engine = engine_of(module)
        names = [n for n, _ in engine.trained_parameters()]
        assert len(names) == 2 * 7 * 2 and all(n.endswith(("lora_A.weight", "lora_B.weight")) for n in names)
        assert sum(p.numel() for _, p in engine.trained_parameters()) == ADAPTER_NUMBERS
        start, adapter = logprobs(engine), dict(engine.adapter_weights())
        result = train(engine, 3)
        assert result.grad_norm > 0 and not torch.equal(logprobs(engine), start)
        assert all(not torch.equal(t, adapter[n]) for n, t in engine.adapter_weights())
        after = module.state_dict()
        assert after.keys() == before.keys() and all(torch.equal(after[n], t) for n, t in before.items())
        assert all(p.grad is None for p in module.parameters())
        optimised = {id(p) for g in engine.optimizer.param_groups for p in g["params"]}
        assert optimised == {id(p) for _, p in engine.trained_parameters()}

    def test_weight_decay_is_of_the_adapter_alone(self) -> None:
        module = tiny_model()
        before = {n: t.clone() for n, t in module.state_dict().items()}
        engine = engine_of(module)
        start = dict(engine.adapter_weights())
        engine.train_step(
            [term_rows(Reinforce()(ROLLOUTS))], AdamW(learning_rate=0.1, weight_decay=1.0), max_grad_norm=1e-9
        )
        name = "model.layers.0.mlp.up_proj.lora_A.weight"  # its gradient is 0, as B is
        torch.testing.assert_close(dict(engine.adapter_weights())[name], 0.9 * start[name], rtol=1e-5, atol=0)
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())

    def test_what_it_computes_is_the_base_with_the_product_added(self) -> None:
        engine = engine_of()
        train(engine, 3)
        merged = tiny_model()
        state, adapter = merged.state_dict(), dict(engine.adapter_weights())
        for name in [n.removesuffix(".lora_A.weight") for n in adapter if "lora_A" in n]:
            product = adapter[f"{name}.lora_B.weight"].double() @ adapter[f"{name}.lora_A.weight"].double()
            state[f"{name}.weight"] += (8 / 4 * product).float()
        found = dict(engine.weights())
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(logprobs(engine), logprobs(engine_of(merged, lora=None)), rtol=0, atol=1e-5)

    def test_rank_stabilised(self) -> None:
        engine = engine_of(lora=LoRA(rank=4, alpha=8, rank_stabilized=True))
        train(engine)
        adapter, name = dict(engine.adapter_weights()), "model.layers.1.self_attn.v_proj"
        product = adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
        change = dict(engine.weights())[f"{name}.weight"] - tiny_model().state_dict()[f"{name}.weight"]
        torch.testing.assert_close(change, 8 / 2 * product, rtol=0, atol=1e-6)

    def test_gradients_do_not_depend_on_micro_batches(self) -> None:
        whole, cut = (gradients(self.moved(tokens), [term_rows(Reinforce()(ROLLOUTS))]) for tokens in (4096, 12))
        assert relative_distance(cut, whole) <= 1e-5

    def moved(self, micro_batch_tokens: int) -> Any:
        """With an adapter that does something, so that both of its matrices have gradients."""
        engine = engine_of(bindings=Bindings(open_engine, micro_batch_tokens=micro_batch_tokens))
        with torch.no_grad():
            for i, (_, parameter) in enumerate(engine.trained_parameters()):
                parameter.add_(0.02 * torch.sin(torch.arange(parameter.numel()) + i).view_as(parameter))
        return engine

    @pytest.mark.parametrize("checkpointing", ["layers", "offload"])
    def test_activation_checkpointing(self, checkpointing: Any) -> None:
        strategies = {"actor": Strategy(activation_checkpointing=checkpointing)}
        expected = gradients(engine_of(), [term_rows(Reinforce()(ROLLOUTS))])
        engine = engine_of(bindings=Bindings(open_engine, strategies=strategies))
        assert float(expected.norm()) > 0
        assert relative_distance(gradients(engine, [term_rows(Reinforce()(ROLLOUTS))]), expected) <= 1e-6

    def test_named_layers(self) -> None:
        engine = engine_of(lora=LoRA(rank=2, alpha=2, target_modules=("q_proj", "1.mlp.up_proj")))
        layers = {n.rsplit(".lora_", 1)[0] for n, _ in engine.trained_parameters()}
        assert layers == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)} | {"model.layers.1.mlp.up_proj"}

    def test_the_same_seed_gives_the_same_adapter(self) -> None:
        first, second = (dict(engine_of().adapter_weights()) for _ in range(2))
        assert all(torch.equal(t, second[n]) for n, t in first.items())
        other = dict(engine_of(lora=LoRA(rank=4, alpha=8, seed=1)).adapter_weights())
        assert not any(torch.equal(t, other[n]) for n, t in first.items() if "lora_A" in n)

    def test_an_adapter_stays_float32_on_a_base_of_half_precision(self) -> None:
        engine = engine_of(dtype="bfloat16")
        assert {p.dtype for _, p in engine.trained_parameters()} == {torch.float32}
        assert {t.dtype for _, t in engine.weights()} == {torch.bfloat16}
        before = logprobs(engine)
        train(engine)
        assert not torch.equal(logprobs(engine), before)

    def test_sampling_and_scoring_agree(self) -> None:
        engine = self.moved(4096)
        start = Ragged.from_rows([torch.arange(5) + 40, torch.arange(3) + 60])
        made = engine.generate(start, [1, 2], Sampling(max_new_tokens=8))
        rollouts = recorded_rollouts(2, 1, prompt_lengths=(5, 3), response_lengths=made.tokens.lengths.tolist())
        tokens = torch.cat([t for pair in zip(start.rows(), made.tokens.rows(), strict=True) for t in pair])
        object.__setattr__(rollouts, "tokens", rollouts.tokens.with_values(tokens))
        assert float((logprobs_of(engine, rollouts) - made.logprobs.values).abs().max()) < 1e-4  # law 10


def logprobs_of(engine: Any, sequences: Any) -> Tensor:
    return engine.logprobs(sequences).logprobs.values


class TestDerived:
    def test_frozen_is_the_base_and_takes_no_memory(self) -> None:
        bindings = Bindings(open_engine)
        engine = engine_of(bindings=bindings)
        alone = held(engine)
        assert alone == held(engine_of(lora=None)) + 4 * ADAPTER_NUMBERS
        frozen: Any = bindings.engine(engine.model.frozen())
        assert held(engine, frozen) == alone
        plain = logprobs(engine_of(lora=None))
        train(engine, 2)
        assert torch.equal(logprobs(frozen), plain) and not torch.equal(logprobs(engine), plain)
        assert frozen.policy_version == 0 and frozen.origin().model == "actor.frozen"
        expected = tiny_model().state_dict()
        assert all(torch.equal(t, expected[n]) for n, t in frozen.weights())
        with pytest.raises(ModelError, match="not trainable"):
            train(frozen)

    def test_a_live_base_is_shared_with_its_owner(self) -> None:
        module = tiny_model()
        assert held(engine_of(module)) - 4 * ADAPTER_NUMBERS == sum(
            t.untyped_storage().nbytes() for t in {id(t): t for t in [*module.parameters(), *module.buffers()]}.values()
        )
        ours = {p.data_ptr() for p in engine_of(module).network.module.parameters()}
        assert all(p.data_ptr() in ours for p in module.parameters())

    def test_an_actor_and_a_critic_on_one_live_base(self) -> None:
        """Two adapters and a head are all that they have for themselves."""
        module, bindings = tiny_model(), Bindings(open_engine)
        before = {n: t.clone() for n, t in module.state_dict().items()}
        actor = engine_of(module, bindings=bindings)
        critic = engine_of(module, bindings=bindings, cls=ValueModel, name="critic")
        assert held(actor, critic) == held(engine_of(module, lora=None)) + 2 * 4 * ADAPTER_NUMBERS
        start = logprobs(actor)
        train(critic, 2, Regression())
        assert critic.values(ROLLOUTS).values.any() and torch.equal(logprobs(actor), start)
        train(actor, 2)
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())

    def test_frozen_can_be_asked_for_late(self) -> None:
        bindings = Bindings(open_engine)
        engine = engine_of(bindings=bindings)
        train(engine, 2)
        frozen: Any = bindings.engine(engine.model.frozen())
        assert torch.equal(logprobs(frozen), logprobs(engine_of(lora=None))) and frozen.policy_version == 0

    def test_a_snapshot_and_an_ema_copy_the_adapter_alone(self) -> None:
        bindings = Bindings(open_engine)
        engine = engine_of(bindings=bindings)
        alone = held(engine)
        snapshot, ema = Snapshot(engine.model, every=2), Ema(engine.model, decay=0.75)
        engines: dict[str, Any] = {m.name: bindings.engine(m) for m in (snapshot, ema)}  # type: ignore[arg-type]
        assert held(engine, *engines.values()) == alone + 2 * 4 * ADAPTER_NUMBERS
        average, seen = dict(engine.adapter_weights()), [logprobs(engine)]
        for _ in range(3):
            train(engine)
            follow(snapshot, bindings)
            follow(ema, bindings)
            average = {n: 0.75 * t + 0.25 * dict(engine.adapter_weights())[n] for n, t in average.items()}
            seen.append(logprobs(engine))
        assert (
            torch.equal(logprobs(engines["actor.snapshot"]), seen[2]) and engines["actor.snapshot"].policy_version == 2
        )
        for name, tensor in engines["actor.ema"].adapter_weights():
            torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(logprobs(engines["actor.ema"]), seen[3])
        assert torch.equal(logprobs(engine), seen[3])  # the others left the trained adapter on

    def test_a_divergence_to_the_base_within_a_pass_of_the_adapter(self) -> None:
        module = tiny_model()
        found = {}
        for name, reference in (("shared", None), ("copied", Model(tiny_model(), name="reference", device="cpu"))):
            bindings = Bindings(open_engine)
            with use_bindings(bindings):
                engine = engine_of(module if reference is None else tiny_model(), bindings=bindings)
                train(engine, 2)
                term = FullKLLoss(reference or engine.model.frozen(), coef=1.0)(ROLLOUTS)
                found[name] = gradients(engine, [term_rows(term)])
        assert float(found["copied"].norm()) > 0
        assert relative_distance(found["shared"], found["copied"]) <= 1e-6

    def test_two_adapters_on_one_live_base(self) -> None:
        bindings, module = Bindings(open_engine), tiny_model()
        first, second = (engine_of(module, bindings=bindings, name=name) for name in ("first", "second"))
        start = logprobs(second)
        train(first)
        assert torch.equal(logprobs(second), start) and not torch.equal(logprobs(first), start)
        with pytest.raises(ModelError, match="share one live model"):
            engine_of(module, bindings=bindings, name="third", lora=None)

    def test_a_value_head_on_the_trunk(self) -> None:
        bindings = Bindings(open_engine)
        engine = engine_of(bindings=bindings)
        head = ValueHead(engine.model)
        view: Any = bindings.engine(head)  # type: ignore[arg-type]
        assert not view.values(ROLLOUTS).values.any()
        train(engine, 3, Regression(value_head=head))
        assert view.values(ROLLOUTS).values.any()
        assert {n for n, _ in engine.trained_parameters() if "value_heads" in n} == {
            f"value_heads.{head.name}.{x}" for x in ("weight", "bias")
        }

    def test_a_critic_from_a_policy_with_an_adapter(self, tmp_path: Path) -> None:
        actor = Model(tiny_model(), name="actor", device="cpu", lora=SMALL)
        critic = ValueModel.from_policy(actor)
        assert critic.lora is SMALL
        bindings = Bindings(open_engine)
        engine: Any = bindings.engine(critic)
        before = {n: t.clone() for n, t in engine.network.module.state_dict().items() if "base_layer" in n}
        snapshot: Any = bindings.engine(Snapshot(critic))  # type: ignore[arg-type]
        train(engine, 3, Regression())
        assert engine.values(ROLLOUTS).values.any() and not snapshot.values(ROLLOUTS).values.any()
        assert all(torch.equal(t, before[n]) for n, t in engine.network.module.state_dict().items() if n in before)
        engine.export(tmp_path / "critic")
        again = engine_of(tmp_path / "critic", cls=ValueModel, lora=None)
        torch.testing.assert_close(again.values(ROLLOUTS).values, engine.values(ROLLOUTS).values, rtol=0, atol=1e-5)

    def test_a_reward_model_with_a_new_head(self, tmp_path: Path) -> None:
        engine = engine_of(cls=RewardModel, new_head=True, trainable=True)
        assert "score.weight" in dict(engine.trained_parameters())
        with torch.no_grad():
            for _, parameter in engine.trained_parameters():
                parameter.add_(0.05)
        scores = engine.score(ROLLOUTS)
        assert scores.any()
        engine.export(tmp_path / "reward")
        again = engine_of(tmp_path / "reward", cls=RewardModel, lora=None, tokenizer=None)
        torch.testing.assert_close(again.score(ROLLOUTS), scores, rtol=0, atol=1e-5)


class TestFiles:
    def test_a_checkpoint_holds_the_adapter_and_the_optimiser_alone(self, tmp_path: Path) -> None:
        engine, other = engine_of(), engine_of()
        train(engine, 2)
        engine.save(tmp_path)
        saved = saved_weights(tmp_path)
        assert sum(t.numel() for t in saved.values()) == ADAPTER_NUMBERS
        other.load(tmp_path)
        assert torch.equal(logprobs(other), logprobs(engine)) and other.policy_version == 2
        train(engine)
        train(other)
        assert torch.equal(logprobs(other), logprobs(engine))

    def test_of_a_frozen_nothing_is_written(self, tmp_path: Path) -> None:
        bindings = Bindings(open_engine)
        frozen: Any = bindings.engine(engine_of(bindings=bindings).model.frozen())
        frozen.save(tmp_path)
        assert saved_weights(tmp_path) == {}
        frozen.load(tmp_path)

    @pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=8), LoRA(rank=4, alpha=16)])
    def test_a_checkpoint_of_another_adapter_is_refused(self, lora: LoRA | None, tmp_path: Path) -> None:
        engine_of().save(tmp_path)
        with pytest.raises(CheckpointError, match=r"another (adapter|model)"):
            engine_of(lora=lora).load(tmp_path)

    def test_an_export_is_an_ordinary_model_and_the_adapter_beside_it(self, tmp_path: Path) -> None:
        engine = engine_of()
        train(engine, 3)
        engine.export(tmp_path / "out")
        merged = engine_of(tmp_path / "out", lora=None, tokenizer=None)
        torch.testing.assert_close(logprobs(merged), logprobs(engine), rtol=0, atol=1e-5)
        assert merged.tokenizer.eos_token == engine.tokenizer.eos_token
        config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
        assert config["r"] == 4 and config["lora_alpha"] == 8 and config["task_type"] == "CAUSAL_LM"
        assert sorted(config["target_modules"]) == [
            "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
        ]  # fmt: skip
        from peft import PeftModel

        theirs = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "out/adapter"))
        row = ROLLOUTS.tokens.row(0)[None]
        with torch.no_grad():
            expected = merged.network.module(input_ids=row).logits
            torch.testing.assert_close(theirs(input_ids=row).logits, expected, rtol=0, atol=1e-4)

    def test_an_export_of_the_adapter_alone(self, tmp_path: Path) -> None:
        engine = engine_of(lora=LoRA(rank=4, alpha=8, merge_on_export=False))
        train(engine)
        engine.export(tmp_path / "out")
        assert not (tmp_path / "out/config.json").exists()
        again = engine_of(lora=LoRA(adapter_source=tmp_path / "out"))
        assert torch.equal(logprobs(again), logprobs(engine))

    def test_starting_from_a_saved_adapter(self, tmp_path: Path) -> None:
        engine = engine_of()
        train(engine, 2)
        engine.export(tmp_path)
        bindings = Bindings(open_engine)
        again = engine_of(lora=LoRA(adapter_source=tmp_path / "adapter"), bindings=bindings)
        start = logprobs(again)
        assert torch.equal(start, logprobs(engine))
        alone = held(again)
        frozen: Any = bindings.engine(again.model.frozen())
        train(again, 2)
        # step 0 is the saved adapter, not the base
        assert torch.equal(logprobs(frozen), start) and held(again, frozen) == alone + 4 * ADAPTER_NUMBERS
        late = Bindings(open_engine)
        trained = engine_of(lora=LoRA(adapter_source=tmp_path / "adapter"), bindings=late)
        train(trained, 2)
        assert torch.equal(logprobs(late.engine(trained.model.frozen())), start)
        critic = engine_of(cls=ValueModel, lora=LoRA(adapter_source=tmp_path / "adapter"))
        assert dict(critic.adapter_weights())["layers.0.mlp.up_proj.lora_B.weight"].any()

    def test_weights_go_out_merged_and_come_in_as_an_adapter(self) -> None:
        engine, other, plain = engine_of(), engine_of(), engine_of(lora=None)
        train(engine, 2)
        plain.load_weights(dict(engine.weights()), policy_version=2)
        torch.testing.assert_close(logprobs(plain), logprobs(engine), rtol=0, atol=1e-5)
        other.load_weights(dict(engine.adapter_weights()), policy_version=2)
        assert torch.equal(logprobs(other), logprobs(engine))
        with pytest.raises(ModelError, match=r"adapter_weights\(\) gives.*give it the adapter alone"):
            other.load_weights(dict(engine.weights()), policy_version=2)


class TestRuns:
    def test_grpo_with_a_penalty_to_the_base(self, tmp_path: Path) -> None:
        """The policy learns, the reference stays, and the source is bit for bit what it was."""
        folder = tiny_folder(tmp_path / "base")
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        actor = Model(folder, name="tiny", device="cpu", lora=SMALL)
        result = quick_run(tiny_grpo(actor, kl_coef=0.05), 4, tmp_path / "run", checkpoint_every=1)
        rows = training(result)
        assert len(rows) == 4 and rows[0]["kl"] == pytest.approx(0, abs=1e-6) and all(r["kl"] > 1e-4 for r in rows[1:])
        assert len({row["loss"] for row in rows}) == 4
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
        models = tmp_path / "run/checkpoints/step-000004/models/tiny"
        assert sum(t.numel() for t in saved_weights(models).values()) == ADAPTER_NUMBERS
        frozen = tmp_path / "run/frozen/tiny.frozen"
        assert saved_weights(frozen) == {} and sum(p.stat().st_size for p in frozen.iterdir()) < 2000

    def test_resume(self, tmp_path: Path) -> None:
        """Law 4: four steps are two, and two more of another process: adapter, optimiser, reference, Ema, critic."""

        def flow() -> RLFlow:
            actor = Model(tiny_folder(tmp_path / "base"), name="tiny", device="cpu", lora=SMALL)
            return tiny_ppo(actor)

        whole = quick_run(flow(), 4, tmp_path / "whole", checkpoint_every=1)
        quick_run(flow(), 2, tmp_path / "parts", checkpoint_every=1)
        parts = quick_run(flow(), 4, tmp_path / "parts", checkpoint_every=1, resume=True)
        assert training(parts) == training(whole)
        assert checkpoint_weights(tmp_path / "whole", 4) == checkpoint_weights(tmp_path / "parts", 4)

    def test_a_resume_on_another_base_is_refused(self, tmp_path: Path) -> None:
        def flow() -> RLFlow:
            return tiny_grpo(Model(tmp_path / "base", name="tiny", device="cpu", lora=SMALL))

        tiny_folder(tmp_path / "base")
        quick_run(flow(), 1, tmp_path / "run", checkpoint_every=1)
        tiny_folder(tmp_path / "base", seed=1)
        with pytest.raises(CheckpointError, match="other weights than when the run began"):
            quick_run(flow(), 2, tmp_path / "run", resume=True)

    def test_impossible_settings_are_in_the_report_of_a_flow(self) -> None:
        actor = Model("m", quantization="nf4")
        flow = RLFlow(
            rollout=Rollout(actor, group_size=2, sampling=SAMPLING),
            reward=reward(),
            advantage_estimator=GroupAdvantage(),
            policy_updater=GRPOUpdater(optimizer=FAST),
        )
        assert "add lora=" in str(flow.check())


class TestRefused:
    def test_no_layer_of_that_name(self) -> None:
        with pytest.raises(ModelError, match=r"'qproj'.*Expected down_proj, gate_proj.*did you mean 'q_proj'"):
            engine_of(lora=LoRA(target_modules=("qproj",)))

    def test_the_head_is_no_layer_of_the_trunk(self) -> None:
        with pytest.raises(ModelError, match="'lm_head'"):
            engine_of(lora=LoRA(target_modules=("lm_head",)))

    def test_no_adapter_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"there is no adapter in .*adapter_config\.json"):
            engine_of(lora=LoRA(adapter_source=tmp_path))

    def test_an_export_is_not_the_adapter_in_it(self, tmp_path: Path) -> None:
        engine_of().export(tmp_path)
        with pytest.raises(ModelError, match=r"adapter_source='.*/adapter'\), and the base .* with that adapter added"):
            engine_of(lora=LoRA(adapter_source=tmp_path))

    def test_an_adapter_of_another_base(self, tmp_path: Path) -> None:
        engine_of(tiny_model(hidden=64)).export(tmp_path)
        with pytest.raises(ModelError, match=r"does not fit: .*has shape"):
            engine_of(lora=LoRA(adapter_source=tmp_path / "adapter"))

    def test_a_model_that_peft_has_wrapped(self) -> None:
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear"))  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=r"peft has wrapped.*adapter_source"):
            engine_of(wrapped, lora=None)

    def test_peft_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without(monkeypatch, "peft")
        with pytest.raises(ModelError, match=r"peft is not installed.*pip install 'flowrl-dataflow\[peft\]'"):
            engine_of()

    @pytest.mark.parametrize(
        ("quantization", "package", "extra"),
        [
            ("nf4", "bitsandbytes", "quantization"),
            ("int8", "bitsandbytes", "quantization"),
            ("gptq", "gptqmodel", "gptq"),
        ],
    )
    def test_packages_of_a_quantisation_are_missing(
        self, quantization: Any, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without(monkeypatch, package)
        with pytest.raises(ModelError, match=rf"{package}.* not installed.*pip install 'flowrl-dataflow\[{extra}\]'"):
            engine_of(tiny_folder(tmp_path), quantization=quantization)

    def test_a_source_that_is_not_gptq(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
        with pytest.raises(ModelError, match=r"holds no GPTQ weights.*quantization='nf4'"):
            engine_of(tiny_folder(tmp_path), quantization="gptq")

    def test_a_gptq_source_that_is_to_be_quantised_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
        config = tiny_folder(tmp_path) / "config.json"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}})
        )
        with pytest.raises(ModelError, match=r"quantised already.*say quantization='gptq'"):
            engine_of(tmp_path, quantization="nf4")

    def test_a_device_that_bitsandbytes_does_not_know(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys
        import types

        fake = types.SimpleNamespace(supported_torch_devices={"cuda"}, __version__="0.40")
        monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
        with pytest.raises(ModelError, match=r"does not run on cpu.*Expected one of cuda.*run on a GPU with CUDA"):
            engine_of(tiny_folder(tmp_path), quantization="nf4")

    def test_strategies_that_adapters_cannot_take(self, tmp_path: Path) -> None:
        ranks = Ranks(0, 2)
        tp = Bindings(open_engine, ranks=ranks, strategies={"actor": Strategy(tensor_parallel=2)})
        with pytest.raises(ModelError, match=r"adapters are not split over ranks, use data parallelism"):
            engine_of(bindings=tp)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if these were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name in packages else found(name, package)
    )


class TestQuantised:
    """On a CPU: bitsandbytes computes there, too."""

    @pytest.fixture(autouse=True)
    def bitsandbytes(self) -> None:
        pytest.importorskip("bitsandbytes")

    def pair(self, folder: Path, quantization: Any, **settings: Any) -> tuple[Any, Any]:
        """A policy with an adapter on a quantised base, and its base alone."""
        bindings = Bindings(open_engine, micro_batch_tokens=settings.pop("micro_batch_tokens", 4096))
        engine = engine_of(tiny_folder(folder), quantization=quantization, bindings=bindings, **settings)
        return engine, bindings.engine(engine.model.frozen())

    @pytest.mark.parametrize(("quantization", "distance"), [("nf4", 0.12), ("int8", 0.01)])
    def test_the_base_is_quantised_and_the_adapter_is_trained(
        self, quantization: str, distance: float, tmp_path: Path
    ) -> None:
        engine, frozen = self.pair(tmp_path, quantization)
        kept = engine.network.module.model.layers[0].self_attn.q_proj.base_layer.weight
        assert kept.dtype in (torch.uint8, torch.int8)
        assert kept.numel() * kept.element_size() == 32 * 32 // (2 if quantization == "nf4" else 1)
        base, weights = tiny_model().state_dict(), dict(frozen.weights())
        name = "model.layers.0.self_attn.q_proj.weight"
        assert 0 < relative_distance(weights[name], base[name]) < distance
        assert list(weights) == list(dict(engine_of(lora=None).weights()))
        assert torch.equal(logprobs(engine), logprobs(frozen))
        before, bits = logprobs(frozen), kept.clone()
        assert train(engine, 3).grad_norm > 0
        assert torch.equal(logprobs(frozen), before) and not torch.equal(logprobs(engine), before)
        assert torch.equal(kept, bits)

    @pytest.mark.parametrize("quantization", ["nf4", "int8"])
    def test_rows_do_not_depend_on_their_neighbours(self, quantization: str, tmp_path: Path) -> None:
        whole, _ = self.pair(tmp_path / "a", quantization)
        cut, _ = self.pair(tmp_path / "b", quantization, micro_batch_tokens=8)
        torch.testing.assert_close(logprobs(cut), logprobs(whole), rtol=0, atol=1e-4)

    def test_an_export_holds_what_the_weights_stand_for(self, tmp_path: Path) -> None:
        engine, _ = self.pair(tmp_path / "base", "nf4")
        train(engine, 3)
        engine.export(tmp_path / "out")
        merged = engine_of(tmp_path / "out", lora=None, tokenizer=None)
        torch.testing.assert_close(logprobs(merged), logprobs(engine), rtol=0, atol=1e-4)

    def test_a_quantised_model_that_nobody_trains(self, tmp_path: Path) -> None:
        engine, frozen = self.pair(tmp_path, "nf4", lora=None, trainable=False)
        assert held(engine, frozen) == held(engine)
        assert torch.equal(logprobs(engine), logprobs(frozen)) and dict(engine.adapter_weights()) == {}

    def test_a_run(self, tmp_path: Path) -> None:
        def flow() -> RLFlow:
            actor = Model(tiny_folder(tmp_path / "base"), name="tiny", device="cpu", lora=SMALL, quantization="nf4")
            return tiny_grpo(actor, kl_coef=0.05)

        whole = quick_run(flow(), 2, tmp_path / "whole", checkpoint_every=1)
        quick_run(flow(), 1, tmp_path / "parts", checkpoint_every=1)
        parts = quick_run(flow(), 2, tmp_path / "parts", checkpoint_every=1, resume=True)
        assert training(parts) == training(whole) and training(whole)[1]["kl"] > 0


def test_weights_of_any_quantised_layer_are_what_it_does_to_unit_vectors() -> None:
    class Layer(torch.nn.Module):
        in_features = 3
        qweight = torch.zeros(1, dtype=torch.int32)
        bias = torch.tensor([1.0, -2.0])
        weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs.float() @ self.weight.T + self.bias).to(inputs.dtype)

    assert is_quantised(Layer()) and not is_quantised(torch.nn.Linear(2, 2))
    assert torch.equal(dequantised(Layer(), torch.float32), Layer.weight)


# -- two ranks ----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "full": Strategy(),
    "optimizer": Strategy(sharding="optimizer"),
    "none": Strategy(sharding="none"),
    "offload": Strategy(activation_checkpointing="offload"),
}
MORE = recorded_rollouts(num_prompts=5, group_size=3, observations=True)


def trained(bindings: Bindings) -> dict[str, Any]:
    """What three steps of a policy with a value head, a divergence to its base and an Ema give, and those of a critic."""
    with use_bindings(bindings), flowrl.step(seed=1):
        actor = Model(tiny_model(), name="tiny", tokenizer=tiny_tokenizer(), device="cpu", lora=SMALL)
        critic, ema, head = ValueModel.from_policy(actor), Ema(actor, 0.5), ValueHead(actor)
        for model in (actor, actor.frozen(), critic, ema, head):
            bindings.engine(model)  # type: ignore[arg-type]
        rewards = rewards_like(MORE, x=MORE.response_lengths.float() + MORE.sample_id)
        values, old = Critic(critic)(MORE), PolicyLogprobs(actor)(MORE)
        reference = ReferenceLogprobs(actor.frozen())
        first = reference(MORE)
        advantages = GAE(kl_coef=0.1)(MORE, rewards, values, old, first)
        update = Updater(actor, epochs=2, num_minibatches=2, optimizer=AdamW(learning_rate=1e-3))
        update_critic = ValueUpdater(critic, optimizer=AdamW(learning_rate=1e-3))
        metrics = []
        for _ in range(3):
            read = Values(MORE.prompt_id, MORE.sample_id, bindings.engine(head).values(MORE))  # type: ignore[arg-type]
            stats = update(
                PPOLoss()(MORE, advantages, old),
                FullKLLoss(actor.frozen(), 0.1)(MORE),
                ValueLoss(head)(MORE, read, advantages),
            )
            critics = update_critic(MORE, values, advantages)
            follow(ema, bindings)
            metrics += [s.metrics[name] for s in (stats, critics) for name in ("loss", "grad_norm")]
        assert torch.equal(reference(MORE).ref_logprobs.values, first.ref_logprobs.values)
        made = Rollout(actor, group_size=3, sampling=Sampling(max_new_tokens=6))(prompts().rows(0, 5, 0))
        engines: dict[str, Any] = {m.name: bindings.engine(m) for m in (actor, ema, critic)}  # type: ignore[arg-type]
        weights = {f"{who} {n}": t for who, e in engines.items() for n, t in e.weights()}
        return {"metrics": metrics, "weights": weights, "reference": first.ref_logprobs.values, "made": made.tokens}


def check_two_ranks(folder: str, *layouts: str) -> None:
    ranks = Ranks.join(200)
    expected = trained(Bindings(open_engine, micro_batch_tokens=60))
    for name in layouts:
        strategy = LAYOUTS[name]
        strategies = {"tiny": strategy, "tiny-value": strategy}
        bindings = Bindings(open_engine, micro_batch_tokens=60, ranks=ranks, strategies=strategies)
        found = trained(bindings)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5), name
        assert found["made"] == expected["made"] and found["weights"].keys() == expected["weights"].keys()
        assert float((found["reference"] - expected["reference"]).abs().max()) <= 1e-5
        for weight, tensor in expected["weights"].items():
            distance = float((found["weights"][weight] - tensor).norm())
            assert distance <= 1e-5 * float(tensor.norm()), f"{name}: {weight}"
        if name == "full":
            actor: Any = next(e for m, e in bindings.engines.items() if m.name == "tiny")
            check_parts(actor, ranks)
            check_files(actor, ranks, Path(folder))
            two_layouts.check(ranks)
        if name == "optimizer":
            two_layouts.check_more(ranks)


def on_two_ranks(folder: str) -> None:
    """What the default tests check."""
    check_two_ranks(folder, "full")
    (Path(folder) / "checked").write_text("full")


def check_parts(engine: Any, ranks: Ranks) -> None:
    """Each rank holds its half of the base and of the adapter."""
    engine.shards.settle()
    lora = engine.adapter.adapters.layers["model.layers.0.self_attn.q_proj"]
    base = [lora.base_layer.weight, lora.lora_A["default"].weight]
    assert [p.to_local().numel() * ranks.size for p in base] == [p.numel() for p in base]


def check_files(engine: Any, ranks: Ranks, folder: Path) -> None:
    """A checkpoint and an export of two ranks are read by one."""
    for name in ("checkpoint", "export"):
        ranks.once((folder / name).mkdir)
    engine.save(folder / "checkpoint")
    engine.export(folder / "export")
    ranks.everyone(None)
    expected = logprobs_of(engine, MORE)
    alone = engine_of(name="tiny")
    alone.add_value_head("tiny.value_head")
    alone.load(folder / "checkpoint")
    assert float((logprobs_of(alone, MORE) - expected).abs().max()) <= 1e-5
    merged = engine_of(folder / "export", lora=None, tokenizer=None)
    assert float((logprobs_of(merged, MORE) - expected).abs().max()) <= 1e-5


@pytest.mark.timeout(900)
def test_two_ranks_are_as_one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """And what else is asked of two ranks: see ``two_layouts``."""
    assert (shared("adapters", request, tmp_path_factory) / "checked").read_text() == "full"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_in_other_layouts(tmp_path: Path) -> None:
    launch(check_two_ranks, str(tmp_path), "optimizer", "none", "offload", num_ranks=2, timeout=570).succeeded()


def test_coupled_groups_see_the_same_adapter() -> None:
    engine = engine_of(bindings=Bindings(open_engine, micro_batch_tokens=12))
    assert train(engine, loss=GroupReinforce()).grad_norm == pytest.approx(train(engine_of()).grad_norm, rel=1e-5)
