"""What a machine is: processor, memory, accelerators. Read without loading torch; accelerators are filled in by whom has it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

#: Instruction sets that matter to matrix products, by the names that the kernel gives their flags.
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}
#: Flags of processors that multiply bfloat16 matrices themselves; on others they are converted, several times slower.
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Gpu:
    """An accelerator.

    Args:
        memory_bytes: all of it.
        capability: compute capability, as in "9.0".
    """

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """A machine, as one process sees it.

    Args:
        cpu: the processor's name.
        num_cores: logical cores of the machine.
        num_usable_cores: those that this process may use (affinity, container quota, rounded down but at least 1).
        instruction_sets: of :data:`INSTRUCTION_SETS`.
        fast_bfloat16: whether the processor has instructions for products of bfloat16 matrices.
        memory_bytes: of the machine, or of the container where that has less.
    """

    system: str
    cpu: str
    num_cores: int
    num_usable_cores: int
    instruction_sets: tuple[str, ...]
    fast_bfloat16: bool
    memory_bytes: int
    gpus: tuple[Gpu, ...] = field(default=())

    @classmethod
    def here(cls, gpus: tuple[Gpu, ...] = ()) -> Machine:
        """This machine. ``gpus`` are given by whom has asked torch."""
        cpu, flags = _processor()
        cores = os.cpu_count() or 1
        return cls(
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            cpu=cpu,
            num_cores=cores,
            num_usable_cores=_usable_cores(cores),
            instruction_sets=tuple(name for flag, name in INSTRUCTION_SETS.items() if flag in flags),
            fast_bfloat16=any(flag in flags for flag in BFLOAT16_FLAGS),
            memory_bytes=_memory_bytes(),
            gpus=gpus,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "instruction_sets": list(self.instruction_sets), "gpus": [asdict(g) for g in self.gpus]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """The machine of a mapping that :meth:`to_json` made; its types are the caller's to check."""
        gpus = tuple(Gpu(**g) for g in data["gpus"])
        return cls(**{**data, "instruction_sets": tuple(data["instruction_sets"]), "gpus": gpus})

    def differences(self, other: Machine) -> list[str]:
        """What makes rates of this machine wrong for the other, a text each; empty where they may be used."""
        names = [f.name for f in fields(self) if f.name not in ("system", "memory_bytes")]
        pairs = ((n, getattr(self, n), getattr(other, n)) for n in names)
        return [f"{name} is {mine!r} here and {theirs!r} there" for name, mine, theirs in pairs if mine != theirs]


def _processor() -> tuple[str, set[str]]:
    """Its name, and its flags."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine(), _sysctl_flags()
    lines = [line.partition(":") for line in text.split("\n\n")[0].splitlines()]
    found = {name.strip().lower(): value.strip() for name, _, value in lines}
    name = found.get("model name") or found.get("cpu model") or platform.processor() or platform.machine()
    return name, set((found.get("flags") or found.get("features") or "").split())


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _sysctl_flags() -> set[str]:
    flags = set(_sysctl("machdep.cpu.features").lower().split()) | set(
        _sysctl("machdep.cpu.leaf7_features").lower().split()
    )
    if _sysctl("hw.optional.arm64") == "1":
        flags.add("asimd")
    if _sysctl("hw.optional.arm.FEAT_BF16") == "1":
        flags.add("bf16")
    return flags


def _usable_cores(cores: int) -> int:
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _memory_bytes() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = int(_sysctl("hw.memsize") or 0)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() and int(limit) else total


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
