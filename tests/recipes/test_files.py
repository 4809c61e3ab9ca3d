"""What every recipe has: one function with flags that are explained, a paper, a flow that keeps all rules, and few lines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flowrl.cli import run_command
from flowrl.recipes import list_recipes, load_recipe, parameter_help, parameters
from tests.recipes.harness import RECIPES, experiment

NAMES = [
    "cispo",
    "dapo",
    "distill",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "kto",
    "online_dpo",
    "ppo",
    "reinforce_plus_plus",
    "remax",
    "reward_model",
    "rloo",
    "self_play",
    "sft",
]


def test_flowrl_recipes_lists_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    assert run_command(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"recipes/{n}.py" for n in sorted([*NAMES, "quickstart"])]
    assert all(re.search(r"arXiv \d{4}\.\d{5}", line) for line in lines if "quickstart" not in line)
    assert all(len(line) < 140 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_explains_its_flags(name: str) -> None:
    file = RECIPES / f"{name}.py"
    function = load_recipe(file)
    assert function.__name__ == name
    flags = parameters(function)
    assert {"model", "learning_rate", "seed"} <= set(flags)
    assert flags["model"].default == "tiny"
    assert set(parameter_help(function)) == set(flags) - {"seed"}  # the command explains --seed
    assert len(file.read_text().splitlines()) <= 90


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_writes_its_flow_out(name: str) -> None:
    """Everything but model, task and numbers is in the file itself, from public names."""
    tree = ast.parse((RECIPES / f"{name}.py").read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported <= {"__future__", "common", "flowrl", "typing"}
    assert "RLFlow" in ast.unparse(tree)


@pytest.mark.parametrize("name", NAMES)
def test_a_flow_keeps_all_rules(name: str) -> None:
    made = experiment(name)
    for flow in (made.flow, *(e.flow for e in made.evaluations)):
        report = flow.check()
        assert report.ok, str(report)
    made.check_data()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["run", str(RECIPES / "grpo.py"), "--num-steps", "2", "--group-size", "2", "--out", str(out)]
    assert run_command(arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"eval/heldout/reward: 0\.\d{3} at first, 0\.\d{3} at last", shown)
    assert "finished after 2 steps" in shown
    assert (out / "report.html").is_file()


def test_a_real_student_needs_a_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    assert run_command(["check", str(RECIPES / "distill.py"), "--model", "somebody/some-model"]) == 1
    assert "This student has no teacher. Expected --teacher" in capsys.readouterr().err


def test_listing_imports_no_heavy_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from flowrl.recipes import list_recipes;"
        f"list_recipes(Path({str(RECIPES)!r}));"
        "print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=RECIPES.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_recipes_are_found() -> None:
    assert {file.stem for file, _ in list_recipes(RECIPES)} == {*NAMES, "quickstart"}
