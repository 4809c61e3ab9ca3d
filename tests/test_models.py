"""Models: identity, names, derived Models, State."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import pytest

from flowrl import Ema, Frozen, Model, RewardModel, Snapshot, State, ValueHead, ValueModel
from flowrl.adapters import LoRA, strategy_problems
from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings, use_bindings


def bindings() -> Bindings:
    return Bindings(lambda model, bindings: f"engine of {model.name}")  # type: ignore[arg-type,return-value]


class TestIdentity:
    def test_names_come_from_the_source(self) -> None:
        assert Model("Qwen/Qwen3-1.7B").name == "Qwen3-1.7B"
        assert Model("/models/mine/").name == "mine"
        assert Model(object()).name == "object"
        assert ValueModel("a/b").name == "b-value" and RewardModel("a/b").name == "b-reward"
        assert Model("a/b", name="actor").name == "actor"

    def test_two_models_are_never_equal(self) -> None:
        a = Model("m")
        assert a != Model("m") and a == a and len({a, Model("m")}) == 2

    def test_copies_are_the_model_itself(self) -> None:
        a, state = Model("m"), State("s", 0)
        assert copy.copy(a) is a and copy.deepcopy({"a": a})["a"] is a and copy.deepcopy(state) is state

    def test_pickled_together_they_keep_their_identity(self) -> None:
        a = Model("m")
        first, (second, frozen) = pickle.loads(pickle.dumps((a, [a, a.frozen()])))
        assert first is second and frozen is first.frozen() and frozen.base is first
        assert cloudpickle.loads(cloudpickle.dumps((a, Ema(a))))[1].base.name == "m"

    def test_frozen_dataclasses(self) -> None:
        with pytest.raises(AttributeError):
            Model("m").name = "x"  # type: ignore[misc]
        assert repr(Model("m")) == "Model('m')" and repr(Model("m").frozen()) == "Frozen('m.frozen')"


class TestDerived:
    def test_frozen_is_one_and_the_same(self) -> None:
        a = Model("m")
        assert a.frozen() is a.frozen() and isinstance(a.frozen(), Frozen) and a.frozen().frozen() is a.frozen()

    def test_names_and_parameter_sets(self) -> None:
        a = Model("m")
        assert [d.name for d in (a.frozen(), Snapshot(a), Ema(a), ValueHead(a))] == [
            "m.frozen",
            "m.snapshot",
            "m.ema",
            "m.value_head",
        ]
        assert ValueHead(a).parameter_set is a and Ema(a, name="slow").name == "slow"
        ema = Ema(a)
        assert ema.parameter_set is ema

    def test_who_may_be_written(self) -> None:
        a, closed = Model("m"), Model("m", trainable=False)
        assert a.writable and ValueHead(a).writable
        assert not any(
            m.writable for m in (closed, ValueHead(closed), a.frozen(), Ema(a), Snapshot(a), RewardModel("r"))
        )

    def test_a_critic_starts_from_the_policy(self) -> None:
        a = Model("m", dtype="bfloat16", load_options={"revision": "x"}, device="cpu")
        critic = ValueModel.from_policy(a)
        assert critic.name == "m-value" and critic.kind == "value"
        assert (critic.source, critic.dtype, critic.load_options, critic.device) == (
            "m",
            "bfloat16",
            {"revision": "x"},
            "cpu",
        )


class TestProblems:
    @pytest.mark.parametrize(
        ("model", "problem"),
        [
            (Model(""), "source is empty"),
            (Model("m", dtype="int8"), "dtype is 'int8'"),  # type: ignore[arg-type]
            (Model("m", autocast="int8"), "autocast is 'int8'"),  # type: ignore[arg-type]
            (Snapshot(Model("m"), every=0), "every is 0"),
            (Ema(Model("m"), decay=1.0), "decay is 1.0"),
            (Ema(Model("m").frozen()), "base is Frozen('m.frozen'); expected a Model that is not derived itself"),  # type: ignore[arg-type]
            (State("", 0), "name is empty"),
        ],
    )
    def test_settings_that_cannot_work(self, model: Any, problem: str) -> None:
        assert [p for p in model.problems() if p.startswith(problem)]

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"lora": 16}, "lora is 16; expected None or LoRA("),
            ({"lora": LoRA(rank=0)}, "lora.rank is 0; expected a whole number"),
            ({"lora": LoRA(rank=True)}, "lora.rank is True"),
            ({"lora": LoRA(alpha=float("inf"))}, "lora.alpha is inf"),
            ({"lora": LoRA(alpha=-1)}, "lora.alpha is -1"),
            ({"lora": LoRA(dropout=0.1)}, "lora.dropout is 0.1; expected 0: the network has no dropout"),
            ({"lora": LoRA(dtype="int8")}, "lora.dtype is 'int8'"),  # type: ignore[arg-type]
            ({"lora": LoRA(target_modules="q_proj")}, "lora.target_modules is 'q_proj'; expected 'all-linear' or"),  # type: ignore[arg-type]
            ({"lora": LoRA(target_modules=())}, "lora.target_modules is ()"),
            ({"lora": LoRA(rank=8, adapter_source="a")}, "lora.rank is 8 with adapter_source; expected none"),
            ({"lora": LoRA(), "trainable": False}, "trainable is False with a new adapter in lora"),
            (
                {"quantization": "nf5", "lora": LoRA()},
                "quantization is 'nf5'; expected None or one of nf4, int8, gptq (did",
            ),
            ({"quantization": "nf4"}, "quantization is 'nf4' of a trainable Model without an adapter; expected lora="),
            ({"quantization": "nf4", "trainable": False, "source": object()}, "quantization is 'nf4' of a live object"),
        ],
    )
    def test_adapters_that_cannot_work(self, settings: dict[str, Any], problem: str) -> None:
        found = Model(**{"source": "m", **settings}).problems()
        assert len(found) == 1 and found[0].startswith(problem)

    def test_adapters_that_can(self) -> None:
        cases: list[dict[str, Any]] = [
            {"lora": LoRA()},
            {"lora": LoRA(adapter_source="a"), "trainable": False},
            {"lora": LoRA(target_modules=("q_proj",)), "quantization": "int8"},
            {"quantization": "gptq", "trainable": False},
        ]
        for settings in cases:
            actor = Model("m", **settings)
            assert actor.problems() == [] == actor.frozen().problems()
            assert bool(ValueModel.from_policy(actor).problems()) == (actor.lora is None)  # a critic is trained

    def test_what_copies_a_head_that_is_trained_whole(self) -> None:
        reward = RewardModel.from_policy(Model("m", lora=LoRA()))
        assert reward.problems() == [] == ValueHead(reward).problems()
        for derived in (reward.frozen(), Ema(reward), Snapshot(reward)):
            assert "with lora and a new head" in derived.problems()[0]

    def test_adapters_over_ranks(self) -> None:
        tp, whole = Strategy(tensor_parallel=2), Strategy(sharding="none")
        assert [list(strategy_problems(LoRA(), None, s, 2)) for s in (Strategy(), whole)] == [[], []]
        assert "adapters are not split" in next(iter(strategy_problems(LoRA(), None, tp, 2)))
        assert (
            list(strategy_problems(LoRA(), "nf4", whole, 2))
            == []
            == list(strategy_problems(None, "nf4", Strategy(), 1))
        )
        assert "held whole on every rank" in next(iter(strategy_problems(LoRA(), "nf4", Strategy(), 2)))

    def test_good_ones(self) -> None:
        a = Model("m")
        assert [m.problems() for m in (a, a.frozen(), Ema(a), Snapshot(a), ValueHead(a))] == [[]] * 5


class TestState:
    def test_values_live_in_the_run(self) -> None:
        state = State("coef", {"kl": 0.1})
        with use_bindings(bindings()):
            state.value["kl"] = 5.0
            assert state.value == {"kl": 5.0}
            state.set({"kl": 7.0})
            assert state.value == {"kl": 7.0}
        with use_bindings(bindings()):
            assert state.value == {"kl": 0.1} == state.init

    def test_states_are_compared_by_identity(self) -> None:
        assert State("s", 0) != State("s", 0)


def test_a_bound_engine_is_opened_once() -> None:
    a = Model("m")
    opened = []

    def open_engine(model: Any, where: Bindings) -> Any:
        opened.append(model)
        return object()

    with use_bindings(Bindings(open_engine)):
        assert a.bound_engine() is a.bound_engine() and opened == [a]
