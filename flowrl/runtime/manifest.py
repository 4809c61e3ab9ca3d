"""What ``run.json`` says of how a run was made: versions, layout, settings. A resume compares it with how things are now."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flowrl.compiler.plan import Program
from flowrl.models import BaseModel, State


def environment() -> dict[str, str]:
    """Versions and machine, for the manifest and the report."""
    import flowrl

    out = {"flowrl": flowrl.__version__, "python": platform.python_version(), "machine": platform.machine()}
    out["cpus"] = str(os.cpu_count())
    for package in ("torch", "transformers", "pyarrow"):
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            out[package] = "not installed"
    return out


def layout(program: Program, num_ranks: int | None = None) -> dict[str, str]:
    """What must stay as it is for a resumed run to be equal bit for bit (design, section 6).

    Args:
        num_ranks: on which it runs; by default those that it was planned for.
    """
    import torch

    num_ranks = num_ranks or program.plan.num_devices
    return {
        "device": program.plan.device,
        "threads": str(torch.get_num_threads()),
        "ranks": str(num_ranks),
        "strategies": "; ".join(f"{m.name}: {m.strategy}" for m in program.plan.models) if num_ranks > 1 else "none",
        "micro_batch_tokens": str(program.plan.micro_batch_tokens),
        "torch": torch.__version__,
    }


def settings_of(program: Program) -> dict[str, str]:
    """By "label.setting", the settings of every node as text; by "Model.setting", how it computes."""
    models = {f"{m.name}.autocast": str(m.autocast) for m in program.plan.models}
    return models | {
        f"{call.label}.{name}": describe(value)
        for call in program.calls
        for name, value in call.node.settings().items()
    }


def describe(value: Any) -> str:
    """A setting as text that is the same in every process: without addresses."""
    if isinstance(value, BaseModel | State):
        return value.name
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return value.__qualname__
    if is_dataclass(value):
        inner = ", ".join(f"{f.name}={describe(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{describe(k)}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe, value)) + "]"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is other than it was, a text each."""
    names = [n for n in (*before, *(n for n in now if n not in before)) if before.get(n) != now.get(n)]
    return [f"{n} from {before.get(n, 'nothing')} to {now.get(n, 'nothing')}" for n in names]
