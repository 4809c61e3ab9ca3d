"""Plan and Program: JSON, comparison, golden plans, and calls that travel between processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import (
    GAE,
    AdamW,
    Cluster,
    Critic,
    Ema,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Rollouts,
    Sampling,
    ValueModel,
    ValueUpdater,
    compile,
    source,
)
from flowrl.compiler.plan import Plan, Program, load_program
from flowrl.errors import CheckError, FlowError
from flowrl.stable_text import stable_text

ROOT = Path(__file__).parents[2]
PLANS = Path(__file__).parents[1] / "plans"
CPU = Cluster("cpu")


def has_answer(response: str, answer: str) -> bool:
    return answer in response


def ppo() -> RLFlow:
    actor, critic = Model("some/policy", name="actor"), ValueModel("some/policy", name="critic")
    rollouts = Rollout(actor, group_size=4)(source(Prompts, name="prompts", batch_size=64))
    rewards = FunctionReward(has_answer)(rollouts)
    values = Critic(critic)(rollouts)
    old = PolicyLogprobs(actor)(rollouts)
    ref = ReferenceLogprobs(actor.frozen())(rollouts)
    advantages = GAE(kl_coef=0.05)(rollouts, rewards, values, old, ref)
    return RLFlow.from_outputs(
        PPOUpdater(actor, epochs=2)(rollouts, advantages, old), ValueUpdater(critic)(rollouts, values, advantages)
    )


def grpo(**updater: Any) -> RLFlow:
    return RLFlow(
        rollout=Rollout(Model("some/policy", name="actor"), group_size=8, sampling=Sampling(max_new_tokens=12)),
        reward=FunctionReward(has_answer),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(optimizer=AdamW(1e-5), **updater),
        batch_size=8,
    )


class TestPlan:
    @pytest.mark.parametrize("flow", [ppo, grpo], ids=["ppo", "grpo"])
    def test_golden_plans(self, flow: Any, request: pytest.FixtureRequest) -> None:
        """When one changes, the commit message says why the new plan is better. FLOWRL_WRITE_PLANS=1 writes them."""
        path = PLANS / f"{flow.__name__}.json"
        text = compile(flow(), CPU).plan.to_json() + "\n"
        if os.environ.get("FLOWRL_WRITE_PLANS"):
            path.write_text(text)
        assert text == path.read_text()

    def test_json_is_the_identity(self) -> None:
        for flow in (ppo(), grpo(), grpo(kl_coef=0.1)):
            plan = compile(flow, CPU, micro_batch_tokens=99).plan
            assert Plan.from_json(plan.to_json()) == plan
            assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()

    def test_texts_that_are_no_plans(self) -> None:
        with pytest.raises(FlowError, match="This is not a plan"):
            Plan.from_json("{")
        for text in ("[]", "3", '{"schema_version": 3}', '{"schema_version": 3, "calls": [{"label": 1}]}'):
            with pytest.raises(FlowError, match="This is not a plan"):
                Plan.from_json(text)
        with pytest.raises(FlowError, match=r"another version. Expected schema 3. Received 99"):
            Plan.from_json(replace(compile(grpo(), CPU).plan, schema_version=99).to_json())

    def test_equal_flows_have_equal_plans(self) -> None:
        assert compile(ppo(), CPU).plan == compile(ppo(), CPU).plan != compile(grpo(), CPU).plan

    @pytest.mark.parametrize("changes", [{"clip": 0.1}, {"epochs": 2}, {"optimizer": AdamW(1.0)}])
    def test_settings_are_in_the_plan_but_not_in_its_structure(self, changes: dict[str, Any]) -> None:
        def plan(**settings: Any) -> Plan:
            flow = RLFlow(
                rollout=Rollout(Model("m", name="actor"), group_size=4),
                reward=FunctionReward(has_answer),
                advantage_estimator=GroupAdvantage(),
                policy_updater=GRPOUpdater(**settings),
            )
            return compile(flow, CPU).plan

        assert plan(**changes) != plan() and plan(**changes).structure == plan().structure

    def test_structure_depends_on_calls_wiring_and_models(self) -> None:
        structures = {compile(f, CPU).plan.structure for f in (ppo(), grpo(), grpo(kl_coef=0.1))}
        assert len(structures) == 3
        assert compile(ppo(), Cluster("cuda")).plan.structure == compile(ppo(), CPU).plan.structure

    def test_plans_do_not_depend_on_the_hash_seed(self) -> None:
        code = (
            "from tests.compiler.test_plan import *\n"
            "plan = compile(ppo(), CPU).plan\nprint(plan.structure, plan.to_json())"
        )
        outputs = {
            subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": seed},
            ).stdout
            for seed in ("0", "77")
        }
        assert len(outputs) == 1 and compile(ppo(), CPU).plan.structure in outputs.pop()

    def test_explain(self) -> None:
        text = compile(grpo(), CPU).plan.explain()
        assert text.startswith(
            "7 calls on cpu, in this order:\n  1. prompts()\n  2. Rollout#0(prompts=prompts)  [reads actor]"
        )
        assert "PolicyLogprobs#0(sequences=Rollout#0)" in text
        assert "left out: it equals the current policy in the single optimiser step of Updater#0" in text
        assert "Weights of actor: Updater#0 → Rollout#0, this iteration's version" in text
        assert "Model actor: policy, transformers on cpu, float32, written by Updater#0" in text
        stale = compile(RLFlow.from_outputs(*_stale()), CPU).plan.explain()
        assert "Weights of actor: Updater#0 → Rollout#0, up to 2 versions back" in stale
        assert "Ema(actor.ema) follows actor after each version of it" in stale
        assert "Model actor.ema: policy, transformers on cpu, float32, written by Ema(actor.ema)" in stale

    def test_the_plan_knows_readers_writers_and_devices(self) -> None:
        plan = compile(ppo(), CPU).plan
        calls = {c.label: c for c in plan.calls}
        assert calls["Updater#0"].writes == ("actor",) and calls["Updater#0"].reads == ()
        assert calls["ReferenceLogprobs#0"].reads == ("actor.frozen",)
        assert calls["GAE#0"].arguments[0] == ("rollouts", ("Rollout#0",))
        assert (
            dict(calls["Rollout#0"].settings)["group_size"] == "4"
            and dict(calls["Rollout#0"].settings)["model"] == "actor"
        )
        assert dict(calls["FunctionReward#0"].settings)["fn"].endswith("test_plan.has_answer")
        assert [(m.name, m.kind, m.writer) for m in plan.models] == [
            ("actor", "policy", "Updater#0"),
            ("critic", "value", "Updater#1"),
            ("actor.frozen", "policy", ""),
        ]
        assert "0x" not in plan.to_json()


def _stale() -> list[Any]:
    actor = Model("some/policy", name="actor")
    rollouts = Rollout(actor, group_size=4, max_staleness=2)(source(Prompts, name="prompts"))
    advantages = GroupAdvantage()(rollouts, FunctionReward(has_answer)(rollouts))
    ref = ReferenceLogprobs(Ema(actor))(rollouts)
    return [GRPOUpdater(actor, kl_coef=0.1)(rollouts, advantages, PolicyLogprobs(actor)(rollouts), ref)]


class TestCompile:
    def test_a_broken_flow_is_refused_with_all_that_is_wrong(self) -> None:
        with pytest.raises(CheckError, match="epochs is 0"):
            compile(grpo(epochs=0), CPU)

    def test_impossible_clusters_and_budgets(self) -> None:
        with pytest.raises(FlowError, match="num_devices is 0; expected a whole number, at least 1"):
            Cluster("cpu", num_devices=0)
        with pytest.raises(FlowError, match=r"2 ranks cannot share cuda:1; .*: Cluster\('cuda', num_devices=2\)"):
            Cluster("cuda:1", num_devices=2)
        with pytest.raises(FlowError, match="micro_batch_tokens"):
            compile(grpo(), CPU, micro_batch_tokens=0)

    def test_the_program_is_in_execution_order_with_its_bindings(self) -> None:
        program = compile(ppo(), CPU)
        labels = [c.label for c in program.calls]
        assert labels == [c.label for c in program.plan.calls] and labels[0] == "prompts"
        for i, call in enumerate(program.calls):
            assert all(b.label in labels[:i] for b in call.bindings())
        assert [o.label for o in program.outputs] == ["Updater#0", "Updater#1"]
        assert [m.name for m in program.models] == ["actor", "critic", "actor.frozen"]
        with pytest.raises(FlowError, match="did you mean 'Rollout#0'"):
            program.call("Rolout#0")

    def test_bindings_of_fields_and_variadic_arguments(self) -> None:
        actor = Model("m")
        rollouts: Any = Rollout(actor, group_size=2)(source(Prompts, name="p"))
        flow = RLFlow.from_outputs(rollouts.tokens.lengths)
        assert str(compile(flow, CPU).outputs[0]) == "Rollout#0.tokens.lengths"
        program = compile(grpo(), CPU)
        assert dict(program.plan.calls[-1].arguments) == {"terms": ("GRPOLoss#0",)}

    def test_the_picture_travels_with_it(self) -> None:
        assert compile(grpo(), CPU).graph_svg.startswith("<svg")


FUTURE = "from __future__ import annotations\n"

SCRIPT = """from __future__ import annotations
import sys
from dataclasses import dataclass, field
import flowrl
from flowrl import *

actor = Model("some/policy", name="actor")

@dataclass(frozen=True)
class Options:
    factor: float = 2.0

class Longer(Node):
    options: Options = field(default_factory=Options)
    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, length=self.options.factor * rollouts.response_lengths)

class Longest(Longer):
    def __call__(self, rollouts: Rollouts) -> Rewards:
        return super().__call__(rollouts)

@flowrl.node
def shorter(rollouts: Rollouts, by: float, weights: list = [1.0]) -> Rewards:
    return rewards_like(rollouts, length=-by * weights[0] * rollouts.response_lengths)

@flowrl.loss
def reinforce(current: Current, rollouts: Rollouts, advantages: Advantages, bonus: float = 0.0) -> Tensor:
    return -(advantages.advantages.values + bonus) * current.logprobs

def in_a_function():
    class Inner(Node):
        def __call__(self, rollouts: Rollouts) -> Rewards:
            return rewards_like(rollouts, inner=rollouts.response_lengths)

    @flowrl.node
    def local(rollouts: Rollouts, scale: float = 3.0) -> Rewards:
        return rewards_like(rollouts, local=scale * rollouts.response_lengths)

    return Inner(), local

def flow(updater):
    inner, local = in_a_function()
    rollouts = Rollout(actor, group_size=2)(source(Prompts, name="prompts", batch_size=3))
    rewards = WeightedSum()(
        Longer()(rollouts), Longest(Options(1.0))(rollouts), shorter(rollouts, by=0.5), inner(rollouts),
        local(rollouts), FunctionReward(lambda response: len(response))(rollouts),
    )
    return RLFlow.from_outputs(Updater(actor)(updater(rollouts, GroupAdvantage()(rollouts, rewards))))
"""

SAVE = """
import pickle, cloudpickle
first = compile(flow(reinforce), Cluster("cpu"))
second = compile(RLFlow.from_outputs(Rollout(actor, label="eval")(source(Prompts, name="prompts"))), Cluster("cpu"))
from pathlib import Path
Path(sys.argv[1]).write_bytes(first.to_bytes())
Path(sys.argv[2]).write_bytes(cloudpickle.dumps((first, second)))
"""

#: Runs the nodes of a program that another process wrote; they are not importable here.
LOAD = """
import dataclasses, pickle, sys
from pathlib import Path
from flowrl.compiler.plan import load_program
from flowrl.nodes.calling import Port
from tests.nodes.test_loss import advantages_of, current_of
from tests.tiny import recorded_rollouts

rollouts = recorded_rollouts()
lengths = float(rollouts.response_lengths.sum())
for folder in map(Path, sys.argv[1:]):
    program = load_program((folder / "one").read_bytes())
    totals = {}
    for call in program.calls:
        node = call.node
        if tuple(call.arguments) == ("rollouts",) and node.name != "FunctionReward":
            totals[node.name] = float(node.run({"rollouts": rollouts}, call.label).totals.sum())
        assert [f.name for f in dataclasses.fields(node)][0] == "label", node
        assert dataclasses.replace(node, label="x").label == "x"
        assert dataclasses.replace(node).settings() == node.settings()
        assert all(isinstance(p, Port) for p in node.ports)
    assert totals == {
        "Longer": 2 * lengths, "Longest": lengths, "shorter": -0.5 * lengths, "Inner": lengths, "local": 3 * lengths
    }, totals
    try:
        node.label = "y"
    except dataclasses.FrozenInstanceError:
        pass
    else:
        raise AssertionError("not frozen")
    loss = program.call("reinforce#0").node
    term = loss.run({"rollouts": rollouts, "advantages": advantages_of(rollouts)}, "reinforce#0")
    assert term.loss.sums(current_of(rollouts), None, **term.inputs)["loss"][0].requires_grad
    first, second = pickle.loads((folder / "both").read_bytes())
    assert first.models[0] is second.models[0] is second.call("eval").node.model is first.call("Updater#0").node.model
    print(folder.name, len(program.calls))
"""


def _python(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class TestTravel:
    def test_nodes_of_a_script_and_of_a_notebook_travel(self, tmp_path: Path) -> None:
        """Written by one process, where they live in ``__main__`` and in functions; run by another, which cannot import
        them. Cells of a notebook are executed in a namespace that is no module's file, as IPython does it."""
        script, kernel, load = tmp_path / "script.py", tmp_path / "kernel.py", tmp_path / "load.py"
        script.write_text(SCRIPT + SAVE)
        kernel.write_text(
            "import sys, types\n"
            "main = types.ModuleType('__main__'); sys.modules['__main__'] = main\n"
            f"for i, cell in enumerate([{SCRIPT.replace(FUTURE, '')!r}, {SAVE!r}]):\n"
            f"    exec(compile({FUTURE!r} + cell, f'<ipython-input-{{i}}-abc>', 'exec'), main.__dict__)\n"
        )
        load.write_text(LOAD)
        for name in ("script", "kernel"):
            (tmp_path / name).mkdir()
            _python(str(tmp_path / f"{name}.py"), str(tmp_path / name / "one"), str(tmp_path / name / "both"))
        assert _python(str(load), str(tmp_path / "script"), str(tmp_path / "kernel")) == "script 12\nkernel 12\n"

    def test_a_program_travels_with_its_plan(self) -> None:
        program = compile(grpo(), CPU)
        back = load_program(program.to_bytes())
        assert isinstance(back, Program) and back.plan == program.plan and back.graph_svg == program.graph_svg
        assert back.elided() == program.elided() and back.models[0] is back.call("Rollout#0").node.models()[0]

    def test_bytes_that_are_no_program(self) -> None:
        with pytest.raises(FlowError, match=r"not a program. Expected Program.to_bytes\(\). Received list"):
            load_program(pickle.dumps([1]))


class TestStableText:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (1e-5, "1e-05"),
            ("a", "'a'"),
            (None, "None"),
            (Model("m", name="actor"), "actor"),
            ([1, "b"], "[1, 'b']"),
            ((1,), "(1,)"),
            ({"x": Model("m")}, "{'x': m}"),
            (frozenset({"b", "a", "c"}), "{'a', 'b', 'c'}"),
            (Rollouts, "flowrl.batches.Rollouts"),
            (len, "builtins.len"),
            (
                Sampling(),
                "Sampling(max_new_tokens=256, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop_token_ids=())",
            ),
        ],
    )
    def test_settings_in_words(self, value: Any, text: str) -> None:
        assert stable_text(value) == text

    def test_no_memory_addresses(self) -> None:
        import functools

        import torch

        class Thing:
            pass

        assert "0x" not in stable_text([Thing(), lambda: 1, functools.partial(print, Thing())])
        assert stable_text(functools.partial(round, ndigits=2)) == "partial(builtins.round, ndigits=2)"
        assert stable_text(torch.zeros(2, 3)) == "Tensor([2, 3], torch.float32)"
