"""The listings of the cookbook check; the nodes of writing_nodes.md are short, and train the tiny model as printed."""

from __future__ import annotations

import ast
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import PolicyLogprobs, Prompts, RLFlow, Rollout, Updater, WeightedSum, source
from flowrl.nodes.function import NodeFunction
from tests.compositions.harness import Composition, run_both
from tests.flows import FAST, SAMPLING, prompts
from tests.tiny import recorded_rollouts, tiny_actor

DOCS = Path(__file__).parents[2] / "docs"


def listings(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def execute(code: str, name: str) -> dict[str, Any]:
    """Run one listing by itself, as a module of its own."""
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(code, f"<{name}>", "exec", dont_inherit=True), namespace)
    return namespace


@pytest.mark.parametrize("number", range(len(listings("cookbook.md"))))
def test_cookbook(number: int) -> None:
    flow = execute(listings("cookbook.md")[number], f"cookbook_{number}")["flow"]
    report = flow.check()
    assert report.violations == (), str(report)
    flowrl.compile(flow)


def test_nodes_of_the_docs_are_short() -> None:
    lines: dict[str, int] = {}
    for code in listings("writing_nodes.md"):
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                first = min(n.lineno for n in [statement, *statement.decorator_list])
                lines[statement.name] = (statement.end_lineno or first) - first + 1
    assert list(lines) == ["correct", "brevity", "ClipRewards", "Known", "cispo", "above_batch_mean"]
    assert max(lines.values()) < 10, lines


def documented() -> dict[str, Any]:
    """What writing_nodes.md defines, by name."""
    out: dict[str, Any] = {}
    for number, code in enumerate(listings("writing_nodes.md")):
        out |= execute(code, f"writing_nodes_{number}")
    return out


def own_nodes(facts: Path) -> Composition:
    """Everything on that page in one flow."""
    own = documented()
    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    correct = flowrl.FunctionReward(own["correct"], isolate=False)(rollouts)
    known = own["Known"](str(facts))(rollouts)
    rewards = own["ClipRewards"](high=0.5)(WeightedSum()(correct, known, own["brevity"](rollouts, per_token=0.1)))
    assert isinstance(own["cispo"], NodeFunction)
    loss = own["cispo"](rollouts, own["above_batch_mean"](rollouts, rewards), PolicyLogprobs(actor)(rollouts), high=0.5)
    update = Updater(actor, epochs=2, optimizer=FAST)(loss)
    return Composition(RLFlow.from_outputs(update, rollouts, rewards), {"prompts": prompts()}, [actor])


def test_own_reward_node_loss_and_advantage_train(tmp_path: Path) -> None:
    facts = tmp_path / "facts.sqlite"
    with sqlite3.connect(facts) as connection:
        connection.execute("CREATE TABLE facts (fact TEXT)")
    eager, ran = run_both(lambda: own_nodes(facts), tmp_path / "run")
    for i, (_, rollouts, rewards) in enumerate(eager.outputs):
        lengths = torch.tensor([-0.1 * len(r) for r in rollouts.response_tokens.rows()])
        torch.testing.assert_close(rewards.components["brevity"], lengths)
        assert set(rewards.components) == {"correct", "known", "brevity"}
        assert ran.metrics[i]["reward/brevity"] == pytest.approx(float(lengths.mean()), abs=1e-6)


def test_the_documented_advantage_by_hand() -> None:
    own = documented()
    rollouts = recorded_rollouts(num_prompts=2, group_size=2, response_lengths=(2, 1, 3, 1))
    rewards = flowrl.rewards_like(rollouts, score=[1.0, float("nan"), 2.0, 6.0])
    advantages = own["above_batch_mean"](rollouts, rewards)
    assert advantages.sample_id.tolist() == [0, 0, 1]  # the invalid row is left out
    assert advantages.advantages.to_lists() == [[-2.0, -2.0], [-1.0, -1.0, -1.0], [3.0]]
    loss = own["cispo"](rollouts, advantages, old(rollouts))
    assert [s.num_rows for s in (loss.inputs["rollouts"], loss.inputs["advantages"])] == [3, 3]


def old(rollouts: flowrl.Rollouts) -> flowrl.OldLogprobs:
    origin = flowrl.LogprobOrigin("recorded", 0, "none", "float32")
    return flowrl.OldLogprobs(rollouts.prompt_id, rollouts.sample_id, rollouts.rollout_logprobs, origin)
