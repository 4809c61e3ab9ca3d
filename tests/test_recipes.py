"""Recipes: loading a file, its parameters, what it defines itself, files beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flowrl.recipes
from flowrl.errors import FlowError
from flowrl.recipes import build, list_recipes, load_recipe, parameter_help, parameters, recipe_folder

RECIPE = '''
"""A recipe with a node, a reward and a loss of its own, and a file beside it."""

from __future__ import annotations

import flowrl
from flowrl import Rewards, Rollouts
from flowrl.data import PromptDataset
from flowrl.nodes import rewards_like

from {helper} import bonus
from tests.flows import SAMPLING
from tests.tiny import tiny_actor


class LengthReward(flowrl.Node):
    per_token: float

    kind = "reward"

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, length=self.per_token * rollouts.response_lengths + bonus("x"))


@flowrl.node
def shorter(rollouts: Rollouts, by: float = 0.5) -> Rewards:
    return rewards_like(rollouts, shorter=-by * rollouts.response_lengths)


def vowels(response: str) -> float:
    return bonus(response) + sum(c in "aeiou" for c in response)


@flowrl.recipe
def train(group_size: int = 2, per_token: float = 0.1, num_steps: int = 2) -> flowrl.Experiment:
    """Tiny GRPO.

    More about it.

    Args:
        group_size: how many answers a prompt
            gets.
        per_token: of the length reward.
    """
    flow = flowrl.RLFlow(
        rollout=flowrl.Rollout(tiny_actor(), group_size=group_size, sampling=SAMPLING),
        reward_models=[LengthReward(per_token), shorter, flowrl.FunctionReward(vowels)],
        advantage_estimator=flowrl.GroupAdvantage(),
        policy_updater=flowrl.GRPOUpdater(),
        batch_size=2,
    )
    data = PromptDataset.from_rows([{{"prompt": "a"}}, {{"prompt": "b"}}])
    return flowrl.Experiment(flow, data, num_steps, options={{"report": False, "export": False, "progress": False}})
'''


def write_recipe(folder: Path, name: str = "recipe", helper: str = "helper_beside") -> Path:
    (folder / f"{helper}.py").write_text("def bonus(text):\n    return 0.25 * len(text)\n")
    file = folder / f"{name}.py"
    file.write_text(RECIPE.format(helper=helper))
    return file


def test_what_a_recipe_defines_travels_to_other_processes(tmp_path: Path) -> None:
    """Its reward runs in a process of its own, and a step is replayed in a process that knows nothing of the recipe."""
    (tmp_path / "recipes").mkdir()
    file = write_recipe(tmp_path / "recipes", helper="helper_that_travels")
    experiment = build(load_recipe(file), {})
    result = experiment.run(out=tmp_path / "run")
    row = result.metrics.to_pylist()[-1]
    assert row["reward/invalid"] == 0
    assert row["reward/mean"] == pytest.approx(row["reward/length"] + row["reward/shorter"] + row["reward/vowels"])
    file.unlink()
    (tmp_path / "recipes" / "helper_that_travels.py").unlink()
    here = [p for p in sys.path if p and not p.startswith(str(tmp_path))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(here)}
    done = subprocess.run(
        [sys.executable, "-m", "flowrl.cli", "replay", str(tmp_path / "run"), "1"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert "All metrics are equal." in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_parameters_and_their_help(tmp_path: Path) -> None:
    function = load_recipe(write_recipe(tmp_path))
    found = parameters(function)
    assert {n: (p.annotation, p.default) for n, p in found.items()} == {
        "group_size": (int, 2), "per_token": (float, 0.1), "num_steps": (int, 2)
    }  # fmt: skip
    assert parameter_help(function) == {
        "group_size": "how many answers a prompt gets.",
        "per_token": "of the length reward.",
    }
    assert parameter_help(lambda: None) == {}


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("x", r"Parameter 'x' of recipe f cannot become a flag. Expected int, .*Received no annotation"),
        ("x: dict", r"Parameter 'x: dict' of recipe f cannot become a flag.*Received <class 'dict'>"),
        ("x: int | str", r"cannot become a flag"),
        ("x: list", r"cannot become a flag"),
        ("*x: int", r"Parameter '\*x: int' of recipe f cannot become a flag"),
        ("**x: int", r"cannot become a flag"),
        ("x: int, /", r"cannot become a flag"),
    ],
)
def test_parameters_that_no_flag_can_carry(signature: str, message: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def f({signature}): ...", namespace)
    with pytest.raises(FlowError, match=message):
        parameters(namespace["f"])


@pytest.mark.parametrize(
    "annotation",
    ["int", "float", "str", "bool", "Path", "int | None", "Optional[float]", "Literal['a', 'b']", "list[int]",
     "Literal['a'] | None", "Annotated[int, 'x']"],
)  # fmt: skip
def test_parameters_that_flags_can_carry(annotation: str) -> None:
    import typing

    namespace: dict[str, Any] = {"Path": Path, **vars(typing)}
    exec(f"def f(x: {annotation}): ...", namespace)
    assert list(parameters(namespace["f"])) == ["x"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    with pytest.raises(
        FlowError, match=r"There is no recipe .*god\.py. Expected a Python file. Received no such file.*good\.py"
    ):
        load_recipe(tmp_path / "god.py")
    with pytest.raises(FlowError, match=r"Received a folder"):
        load_recipe(tmp_path)
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(FlowError, match=r"text\.txt is not a Python file"):
        load_recipe(tmp_path / "text.txt")


def test_a_file_with_no_recipe_or_two(tmp_path: Path) -> None:
    file = tmp_path / "several.py"
    file.write_text("import flowrl\n")
    with pytest.raises(FlowError, match=r"does not hold one recipe.*Received none. Do: decorate the function"):
        load_recipe(file)
    body = "@flowrl.recipe\ndef {}() -> flowrl.Experiment: ...\n"
    file.write_text("import flowrl\n" + body.format("one") + body.format("two"))
    with pytest.raises(FlowError, match=r"Received one, two. Do: put each into a file of its own"):
        load_recipe(file)
    # One that is imported from a recipe beside it does not count.
    (tmp_path / "base_recipe.py").write_text("import flowrl\n" + body.format("base"))
    file.write_text("import flowrl\nfrom base_recipe import base\n" + body.format("mine"))
    assert load_recipe(file).__name__ == "mine"


def test_a_relative_import_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "relative.py"
    file.write_text("from .helper import x\n")
    with pytest.raises(FlowError, match=r"imports a file beside it as if it were in a package.*leave out the dot"):
        load_recipe(file)
    file.write_text("import no_such_package_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        load_recipe(file)


def test_a_recipe_returns_an_experiment(tmp_path: Path) -> None:
    file = tmp_path / "nothing.py"
    file.write_text("import flowrl\n@flowrl.recipe\ndef nothing(): ...\n")
    with pytest.raises(FlowError, match=r"Recipe nothing returned no Experiment.*Received NoneType"):
        build(load_recipe(file), {})


def test_listing_a_folder(tmp_path: Path) -> None:
    body = "import flowrl\n@flowrl.recipe\ndef {}() -> flowrl.Experiment:\n    {}\n"
    (tmp_path / "plain.py").write_text("x = 1\n")
    with pytest.raises(FlowError, match=r"There are no recipes in .*Expected Python files with a @flowrl.recipe"):
        list_recipes(tmp_path)
    (tmp_path / "told.py").write_text(body.format("told", '"Does this.\\n\\nAnd that."'))
    (tmp_path / "untold.py").write_text(body.format("untold", "..."))
    (tmp_path / "two.py").write_text(body.format("a", "...") + body.format("b", "..."))
    listed = {file.name: line for file, line in list_recipes(tmp_path)}
    assert list(listed) == ["told.py", "two.py", "untold.py"]
    assert (listed["told.py"], listed["untold.py"]) == ("Does this.", "no description")
    assert "does not hold one recipe" in listed["two.py"]


def test_the_folder_that_is_listed_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this directory, else that of the clone; an installed package says that it has none."""
    monkeypatch.chdir(tmp_path)
    assert recipe_folder() == Path(flowrl.recipes.__file__).parents[1] / "recipes"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text("")
    assert recipe_folder() == Path("recipes")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(flowrl.recipes, "__file__", str(tmp_path / "site-packages" / "flowrl" / "recipes.py"))
    with pytest.raises(FlowError, match=r"There are no recipes here.*an installed package brings none along.*FOLDER"):
        recipe_folder()
