"""``flowrl calibrate``: measure what this machine does, for the compiler's estimates."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from flowrl.calibration import Calibration, Rate, default_path
from flowrl.diagnostics.packages import Installed, pip
from flowrl.diagnostics.rates import FULL, QUICK, Clock, Effort
from flowrl.errors import FlowError, UnsupportedError
from flowrl.machine import Gpu, Machine

#: Seconds that the ranks of a link measurement get, their start included.
LINK_DEADLINE = 300.0
#: Load a core, over the last minute, from which on the machine counts as busy.
BUSY = 0.5
#: A rate's upper quartile over its lower from which on it says little.
UNSTEADY = 2.0
#: Packages whose versions change rates.
_VERSIONS = ("flowrl-dataflow", "torch", "transformers", "numpy")


def calibrate(
    model: str = "tiny",
    *,
    quick: bool = False,
    device: str | None = None,
    effort: Effort | None = None,
    with_links: bool = True,
    clock: Clock = time.perf_counter,
    show: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measure this machine: matrix products, memory, links between two ranks, and the engine on a model.

    Args:
        model: "tiny", "smollm2", a folder, or a name on a hub.
        quick: fewer sizes and repetitions.
        device: "cpu", "cuda" or "cuda:<index>"; None takes the machine's best.
        effort: how long each thing is measured; None takes that of ``quick``.
        with_links: start two ranks, and measure between them.
        clock: of everything but the links.
        show: is told what happens.

    Raises:
        UnsupportedError: torch or transformers is not installed, or there is no such device.
        ModelError: the model cannot be loaded.
    """
    effort = effort or (QUICK if quick else FULL)
    device = _device(device)
    notes = busy_notes()
    counted = _counted(show, num_steps(quick, device.split(":")[0], with_links))
    rates = list(_rates(model, quick, device, effort, with_links, clock, notes, counted))
    notes += unsteady_notes(rates)
    installed = Installed()
    versions = {name: version for name in _VERSIONS if (version := installed.version(name))}
    return Calibration(
        machine=Machine.here(_gpus()),
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions,
        rates=tuple(rates),
        notes=tuple(notes),
    )


def _rates(
    model: str,
    quick: bool,
    device: str,
    effort: Effort,
    with_links: bool,
    clock: Clock,
    notes: list[str],
    show: Callable[[str], None],
) -> Iterator[Rate]:
    from flowrl.diagnostics.engine_rates import FULL_SHAPE, QUICK_SHAPE, engine_rates, model_of
    from flowrl.diagnostics.hardware_rates import Bench, hardware_rates

    bench = Bench(device, effort, notes, clock, show)
    loaded = model_of(model, device)  # a mistake in its name shows before anything is measured
    yield from hardware_rates(bench)
    if with_links:
        backend = "nccl" if device.startswith("cuda") and len(_gpus()) > 1 else "gloo"
        show(f"measuring links between two ranks over {backend}")
        yield from link_rates(backend, effort, quick, notes)
    show(f"loading {loaded.name}")
    yield from engine_rates(bench, loaded, QUICK_SHAPE if quick else FULL_SHAPE)


def num_steps(quick: bool, kind: str, with_links: bool) -> int:
    """How many things are measured, or found to take too long; loading the model, too."""
    from flowrl.diagnostics import engine_rates, hardware_rates

    shape = engine_rates.QUICK_SHAPE if quick else engine_rates.FULL_SHAPE
    hardware = len(hardware_rates.MATMUL_DTYPES[kind]) * len(hardware_rates.MATMUL_SIZES[kind])
    return hardware + (4 if kind == "cuda" else 2) + with_links + 1 + 2 * len(shape.sampled_rows) + 2


def _counted(show: Callable[[str], None], total: int) -> Callable[[str], None]:
    """Show what happens with its number, so that one sees how much is still to come."""
    done = 0

    def counted(text: str) -> None:
        nonlocal done
        done += 1
        show(f"{done} of {total}: {text}")

    return counted


def link_rates(backend: str, effort: Effort, quick: bool, notes: list[str]) -> Iterator[Rate]:
    """Between two ranks of this machine. Where they do not come together, that is a sentence in ``notes``."""
    from flowrl.diagnostics.link_rates import QUICK_SIZES, SIZES
    from flowrl.diagnostics.trial import run_trial

    outcome = run_trial(
        "flowrl.diagnostics.link_rates:links",
        {"backend": backend, "sizes": QUICK_SIZES if quick else SIZES, "effort": asdict(effort)},
        deadline=LINK_DEADLINE,
        num_ranks=2,
        env={"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {},
    )
    if not outcome.finished:
        notes.append(f"links over {backend}: {outcome.message}; `flowrl doctor` says more")
        return
    yield from (Rate(**found) for found in outcome.result["rates"])


def check_writable(path: Path) -> None:
    """Find out before measuring that the file can be written after it.

    Raises:
        RunFolderError: it cannot.
        FlowError: there is a folder in its place.
    """
    import tempfile

    from flowrl.runtime.disk import disk_errors

    if path.is_dir():
        raise FlowError(f"{path} is a folder", expected="a file", do=f"--out {path / default_path().name}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def busy_notes() -> list[str]:
    """A sentence where others were using the processor just before."""
    import os

    cores = Machine.here().num_usable_cores
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= BUSY * cores:
        return []
    return [f"the load was {load:.1f} on {cores} cores when measuring began: an idle machine has higher rates"]


def unsteady_notes(rates: Iterable[Rate]) -> list[str]:
    """A sentence about rates whose repetitions lie far apart."""
    names = dict.fromkeys(r.name for r in rates if r.high > UNSTEADY * r.low)
    if not names:
        return []
    return [f"repetitions of {', '.join(names)} lie far apart: something else was at work, or they are too short"]


def _device(named: str | None) -> str:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(f"Nothing can be measured without {package}", do=pip("transformers"))
    import torch

    device = named or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    known = device == "cpu" or (kind == "cuda" and (not index or index.isdigit()))
    if not known or (kind == "cuda" and int(index or 0) >= torch.cuda.device_count()):
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise UnsupportedError("There is no such device", expected=there, received=device)
    return device


def _gpus() -> tuple[Gpu, ...]:
    from flowrl.diagnostics.trials import torch_facts

    return tuple(Gpu(**gpu) for gpu in torch_facts()["gpus"])
