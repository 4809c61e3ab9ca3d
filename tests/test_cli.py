"""The command line: flags from recipes, one message on stderr, exit statuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl.cli import run_command
from tests.runs import checkpoints, rows
from tests.test_recipes import write_recipe

RECIPE = '''
from __future__ import annotations
import os, signal, time
from pathlib import Path
from typing import Literal
import flowrl
from flowrl.data import PromptDataset
from tests.flows import SAMPLING, FAST, reward
from tests.tiny import tiny_actor

seen = {}

@flowrl.node
def pause(rollouts: flowrl.Rollouts, marker: str = "", seconds: float = 0.0) -> flowrl.Rollouts:
    if marker:
        Path(marker).touch()
    time.sleep(seconds)
    return rollouts

@flowrl.recipe
def train(
    needed: int,
    rate: float = 0.01,
    name: str = "x",
    flag: bool = False,
    place: Path = Path("here"),
    mode: Literal["fast", "slow"] = "fast",
    maybe: int | None = None,
    several: list[int] = [],
    num_steps: int = 2,
    seed: int = 7,
    marker: str = "",
    seconds: float = 0.0,
    data_file: str = "",
    column: str = "prompt",
    group_size: int = 2,
) -> flowrl.Experiment:
    """Tiny GRPO with many flags.

    Args:
        needed: has no default.
        rate: of learning.
    """
    seen.update(locals())
    actor = tiny_actor()
    prompts_source = flowrl.source(flowrl.Prompts, name="prompts", batch_size=2)
    rollouts = flowrl.Rollout(actor, group_size=group_size, sampling=SAMPLING)(prompts_source)
    paused = pause(rollouts, marker=marker, seconds=seconds)
    advantages = flowrl.GroupAdvantage()(paused, reward()(paused))
    update = flowrl.GRPOUpdater(actor, optimizer=FAST)(paused, advantages, flowrl.PolicyLogprobs(actor)(paused))
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    data = PromptDataset.from_jsonl(data_file, column) if data_file else PromptDataset.from_rows(rows)
    return flowrl.Experiment(
        flowrl.RLFlow.from_outputs(update), data, num_steps,
        on_end=lambda result: print("summary:", result.steps), options={"report": False, "export": False},
    )
'''


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / f"recipe_{abs(hash(tmp_path)) % 10**8}.py"  # one recipe module a test
    file.write_text(RECIPE)
    return file


def seen(recipe: Path) -> dict[str, Any]:
    return sys.modules[f"flowrl_recipe_{recipe.stem}"].seen


def command(*arguments: object) -> int:
    return run_command([str(a) for a in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """Run a command that must fail with one message; the message."""
    capsys.readouterr()
    assert command(*arguments) == status
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("error:") == 1 and "Traceback" not in err + out
    return err


# -- flags -----------------------------------------------------------------------------------------------------------------


def test_every_kind_of_parameter_is_a_flag(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = command(
        "run", recipe, "--needed", 5, "--rate", "1e-3", "--name", "a b", "--flag", "--place", "some/where", "--mode", "slow",
        "--maybe", 3, "--several", 1, "--several", 2, "--num-steps", 1, "--seed", 9, "--out", tmp_path / "run",
    )  # fmt: skip
    assert status == 0
    found = seen(recipe)
    names = ("needed", "rate", "name", "flag", "place", "mode", "maybe", "several", "num_steps", "seed")
    assert {k: found[k] for k in names} == {
        "needed": 5, "rate": 1e-3, "name": "a b", "flag": True, "place": Path("some/where"), "mode": "slow",
        "maybe": 3, "several": [1, 2], "num_steps": 1, "seed": 9,
    }  # fmt: skip
    out = capsys.readouterr().out
    assert f"finished after 1 steps. Run folder: {tmp_path / 'run'}." in out and "summary: 1" in out
    assert '"seed": 9' in (tmp_path / "run" / "run.json").read_text()


def test_defaults_are_the_recipe_s(recipe: Path, tmp_path: Path) -> None:
    assert command("run", recipe, "--needed", 1, "--no-flag", "--out", tmp_path / "run") == 0
    found = seen(recipe)
    assert (found["num_steps"], found["seed"], found["maybe"], found["mode"], found["flag"]) == (
        2,
        7,
        None,
        "fast",
        False,
    )
    assert '"seed": 7' in (tmp_path / "run" / "run.json").read_text(), "one seed: the recipe's is the run's"
    assert len(rows(tmp_path / "run")) == 2


def test_a_seed_on_the_command_line_wins(tmp_path: Path) -> None:
    """Over the recipe's options too, where the recipe has no such parameter."""
    file = tmp_path / "seeded.py"
    text = RECIPE.replace("    seed: int = 7,\n", "").replace('options={"report"', 'options={"seed": 5, "report"')
    file.write_text(text)
    assert command("run", file, "--needed", 1, "--num-steps", 1, "--out", tmp_path / "a") == 0
    assert '"seed": 5' in (tmp_path / "a" / "run.json").read_text()
    assert command("run", file, "--needed", 1, "--num-steps", 1, "--out", tmp_path / "b", "--seed", 9) == 0
    assert '"seed": 9' in (tmp_path / "b" / "run.json").read_text()


def test_mistakes_on_the_command_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def usage(*arguments: object) -> str:
        return refused(capsys, *arguments, status=2)

    assert "No such option: --num-stps; did you mean '--num-steps'?" in usage(
        "run", recipe, "--needed", 1, "--num-stps", 3
    )
    assert "No such option: --ned; did you mean '--needed'?" in usage("run", recipe, "--ned", 1)
    assert "Missing option '--needed'" in usage("run", recipe)
    assert "Invalid value for '--rate'" in usage("run", recipe, "--needed", 1, "--rate", "fast")
    message = usage("run", recipe, "--needed", 1, "--mode", "medium")
    assert "Invalid value for '--mode'" in message and "'fast'" in message and "'slow'" in message
    assert f"`flowrl run {recipe} --help` lists what there is" in message
    assert "(surplus)" in usage("run", recipe, "surplus", "--needed", 1)
    assert "Missing argument 'FILE'" in usage("run")
    assert "No such command 'rnu'" in usage("rnu")


def test_help(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run", recipe, "--help") == 0
    out = capsys.readouterr().out
    assert "Tiny GRPO with many flags." in out and "Args:" not in out
    assert "has no default." in out and "of learning." in out
    assert "--flag / --no-flag" in out and "--mode <fast|slow>" in out and "[default: 2]" in out and "--resume" in out
    assert command("run", "--help") == 0
    assert "`flowrl run FILE --help` lists its parameters" in " ".join(capsys.readouterr().out.split())
    assert command("check", recipe, "--help") == 0
    out = capsys.readouterr().out
    assert "--num-steps" in out and "--resume" not in out
    assert command("--help") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("run", "check", "replay", "recipes", "version"))
    assert command() == 2
    assert "Usage" in capsys.readouterr().out


def test_a_parameter_that_is_a_flag_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "clash.py"
    file.write_text("import flowrl\n@flowrl.recipe\ndef f(resume: bool = False) -> flowrl.Experiment: ...\n")
    message = refused(capsys, "run", file)
    assert "has a parameter 'resume', which is a flag of `flowrl run`" in message


# -- errors ----------------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_message_and_no_traceback(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad(*flags: object) -> str:
        message = refused(capsys, "run", recipe, "--needed", 1, "--out", tmp_path / "run", *flags)
        assert not (tmp_path / "run").exists()
        return message

    data = tmp_path / "data.jsonl"
    assert "nothing.jsonl" in bad("--data-file", tmp_path / "nothing.jsonl")
    data.write_text('{"promt": "a"}\n')
    assert "did you mean 'promt'?" in bad("--data-file", data)
    data.write_text("")
    assert "data.jsonl is empty" in bad("--data-file", data)
    data.write_text('{"prompt": "a"}\n{"prompt": 7}\n')
    assert "line 2" in bad("--data-file", data)
    data.write_text('{"prompt": "a"}\n{"prompt": "' + "long " * 100 + '"}\n')
    assert "row 2: the prompt does not fit Rollout#0" in bad("--data-file", data)
    assert "num_steps is 0" in bad("--num-steps", 0)
    assert "runtime is 'locla'; did you mean 'local'?" in bad("--runtime", "locla")
    assert "time_limit is -1" in bad("--time-limit", -1)
    assert "group_size" in bad("--group-size", 1)
    assert "tiny: attention is 'flash' with products in float32" in bad("--attention", "flash")
    assert "There is no recipe" in refused(capsys, "run", tmp_path / "nothing.py")
    assert "--resume needs the run folder" in refused(capsys, "run", recipe, "--needed", 1, "--resume")
    assert "There is no run to resume" in bad("--resume")


def test_an_error_in_a_step_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "failing.py"
    file.write_text(
        RECIPE.replace("reward()(paused)", "flowrl.FunctionReward(bad, isolate=False)(paused)")
        + "\ndef bad(response): return 'x'\n"
    )
    message = refused(capsys, "run", file, "--needed", 1, "--out", tmp_path / "run")
    assert "The reward function 'bad' failed on 4 of 4 rows" in message
    assert "\n  in call 'FunctionReward#0' (FunctionReward), step 1" in message


def test_a_bug_in_a_recipe_is_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "bug.py"
    file.write_text("import flowrl\n@flowrl.recipe\ndef f() -> flowrl.Experiment:\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        command("run", file)


# -- check, replay, recipes, version -----------------------------------------------------------------------------------------


def test_check(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", recipe, "--needed", 1) == 0
    out = capsys.readouterr().out
    assert out.startswith("training flow: The flow keeps all")
    assert command("check", recipe, "--needed", 1, "--group-size", 1) == 1
    out, err = capsys.readouterr()
    assert "✗ [groups]" in out and err == ""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n')
    wants = tmp_path / "wants.py"
    wants.write_text(
        RECIPE.replace("reward()(paused)", "flowrl.FunctionReward(f)(paused)") + "\ndef f(response, answer): ...\n"
    )
    assert "reads column 'answer'" in refused(capsys, "check", wants, "--needed", 1, "--data-file", data)


def test_replay(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run", recipe, "--needed", 1, "--out", tmp_path / "run", "--dump-step", 2) == 0
    assert (tmp_path / "run" / "dumps" / "step-000002" / "before" / "step-000001").is_dir()
    capsys.readouterr()
    assert command("replay", tmp_path / "run", 2) == 0
    assert "All metrics are equal." in capsys.readouterr().out
    assert "Step 9 is not in" in refused(capsys, "replay", tmp_path / "run", 9)
    assert "is not a run folder" in refused(capsys, "replay", tmp_path, 1)
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "run" / "metrics.parquet")
    at = table.column_names.index("loss")
    pq.write_table(table.set_column(at, "loss", [[9.0] * table.num_rows]), tmp_path / "run" / "metrics.parquet")
    assert command("replay", tmp_path / "run", 2) == 1
    assert "The replay differs from the record." in capsys.readouterr().out


def test_recipes_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    write_recipe(folder, "good", helper="listed_helper")
    (folder / "broken.py").write_text("import no_such_package\n")
    (folder / "_private.py").write_text("")
    assert command("recipes", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{folder / 'broken.py'}: not a recipe (ModuleNotFoundError: No module named 'no_such_package')"
    )
    assert lines[1:] == [f"{folder / 'good.py'}: Tiny GRPO."]  # a helper beside it is no recipe
    assert "There are no recipes in" in refused(capsys, "recipes", tmp_path / "nowhere")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("version") == 0
    assert capsys.readouterr().out.strip() == flowrl.__version__


# -- how a run ends ------------------------------------------------------------------------------------------------------------


def test_resume_and_time_limit(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["run", recipe, "--needed", 1, "--out", tmp_path / "run"]
    assert command(*start, "--num-steps", 3, "--time-limit", 1e-6) == 124
    assert "time limit after 0 steps" in capsys.readouterr().out
    assert command(*start, "--num-steps", 2, "--checkpoint-every", 1, "--resume") == 0
    assert checkpoints(tmp_path / "run") == [1, 2]
    assert command(*start, "--num-steps", 3, "--resume") == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert command(*start, "--num-steps", 3, "--resume") == 0
    assert "there is nothing to do" in capsys.readouterr().out
    assert "more steps than are asked for" in refused(capsys, *start, "--num-steps", 2, "--resume")
    assert "exists already" in refused(capsys, *start)


@pytest.mark.parametrize(
    ("first", "second", "status"), [(signal.SIGTERM, None, 143), (signal.SIGINT, signal.SIGINT, 130)]
)
def test_signals(
    first: signal.Signals, second: signal.Signals | None, status: int, recipe: Path, tmp_path: Path
) -> None:
    """A real process: the first signal lets the step end, the second does not."""
    marker = tmp_path / "in-a-step"
    seconds = 1.0 if second is None else 60.0
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [
        "run",
        recipe,
        "--needed",
        1,
        "--num-steps",
        99,
        "--marker",
        marker,
        "--seconds",
        seconds,
        "--out",
        tmp_path / "run",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl.cli", *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not marker.exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        process.send_signal(first)
        if second is not None:
            time.sleep(0.3)
            process.send_signal(second)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, out + err
    assert f"{first.name}: finishing this step and writing a checkpoint; once more to end at once." in out
    if second is None:
        assert "interrupted after 1 steps" in out and "summary" not in out and err == ""
        assert checkpoints(tmp_path / "run") == [1]
    else:
        assert "Ended at once." in err and "Traceback" not in err
        assert checkpoints(tmp_path / "run") == []
