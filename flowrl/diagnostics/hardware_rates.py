"""Rates of a processor or an accelerator: matrix products, memory, the way between host and device. Loads torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.calibration import Condition, Rate
from flowrl.diagnostics.rates import Clock, Effort, rate, repeat

if TYPE_CHECKING:
    import torch

#: n of the n × n matrices that are multiplied, by kind of device.
MATMUL_SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
MATMUL_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
#: Of what is copied or read: beyond the caches of today's processors, small enough for a laptop.
MEMORY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
#: Share of the memory that is free which a measurement may take.
_MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class Bench:
    """What measurements have in common.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".
        notes: sentences are added of what was not measured.
        show: is told of each thing that is measured, or left out.
    """

    device: str
    effort: Effort
    notes: list[str]
    clock: Clock = time.perf_counter
    show: Callable[[str], None] = lambda text: None

    @property
    def kind(self) -> str:
        return self.device.split(":")[0]

    def wait(self) -> None:
        """Until the device is idle."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def measure(self, name: str, work: int, do: Callable[[], object], **conditions: Condition) -> Rate:
        """The rate of ``do``, which does ``work``."""
        import torch

        threads: dict[str, Condition] = {"threads": torch.get_num_threads()} if self.kind == "cpu" else {}
        self.show(f"measuring {name} on {self.device}: " + ", ".join(f"{n} {v}" for n, v in conditions.items()))
        seconds = repeat(do, self.effort, clock=self.clock, wait=self.wait)
        return rate(name, work, seconds, device=self.device, **conditions, **threads)


def hardware_rates(bench: Bench) -> Iterator[Rate]:
    """All of them, one by one."""
    for dtype in MATMUL_DTYPES[bench.kind]:
        yield from matmul_rates(bench, dtype)
    size = memory_bytes(bench)
    yield copy_rate(bench, size)
    yield read_rate(bench, size)
    if bench.kind == "cuda":
        yield from transfer_rates(bench, size)


def matmul_flop(n: int) -> int:
    """Of a product of two n × n matrices: n³ products and as many sums."""
    return 2 * n**3


def matmul_rates(bench: Bench, dtype: str) -> Iterator[Rate]:
    """Products of square matrices, the small ones first: they predict which of the large ones take too long."""
    import torch

    generator = torch.Generator().manual_seed(0)
    fastest = 0.0
    for n in MATMUL_SIZES[bench.kind]:
        if fastest and matmul_flop(n) / fastest > bench.effort.longest:
            seconds = matmul_flop(n) / fastest
            bench.show(f"leaving out matmul on {bench.device}: dtype {dtype}, n {n}")
            bench.notes.append(f"matmul of {dtype} with n = {n} on {bench.device}: predicted {seconds:.1f} s each time")
            continue
        left, right = (torch.randn(n, n, generator=generator).to(bench.device, getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(left)

        def product(a: torch.Tensor = left, b: torch.Tensor = right, to: torch.Tensor = out) -> None:
            torch.mm(a, b, out=to)

        found = bench.measure("matmul", matmul_flop(n), product, dtype=dtype, n=n)
        fastest = max(fastest, found.value)
        yield found


def memory_bytes(bench: Bench) -> int:
    """Of one array of a memory measurement: less than the default where there is little memory."""
    import os

    import torch

    if bench.kind == "cuda":
        free = torch.cuda.mem_get_info(bench.device)[0]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf_names") else 4 << 30
    size = MEMORY_BYTES[bench.kind]
    while size > 1 << 20 and size > free * _MEMORY_SHARE:
        size //= 2
    return size


def copy_rate(bench: Bench, size: int) -> Rate:
    """Copy ``size`` bytes: as many are read as are written."""
    import torch

    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    return bench.measure("copy", 2 * 4 * source.numel(), lambda: target.copy_(source), bytes=size)


def read_rate(bench: Bench, size: int) -> Rate:
    """Multiply a matrix of ``size`` bytes with a vector, as decoding does: each number of the matrix is read once."""
    import torch

    columns = 1024
    matrix = torch.ones(size // 4 // columns, columns, device=bench.device)
    vector, out = torch.ones(columns, device=bench.device), torch.empty(len(matrix), device=bench.device)
    work = 4 * (matrix.numel() + vector.numel() + out.numel())
    return bench.measure("read", work, lambda: torch.mv(matrix, vector, out=out), bytes=size)


def transfer_rates(bench: Bench, size: int) -> Iterator[Rate]:
    """Between pinned host memory and the device."""
    import torch

    host = torch.ones(size // 4, pin_memory=True)
    there: Any = torch.empty(size // 4, device=bench.device)
    yield bench.measure("host_to_device", 4 * host.numel(), lambda: there.copy_(host, non_blocking=True), bytes=size)
    yield bench.measure("device_to_host", 4 * host.numel(), lambda: host.copy_(there, non_blocking=True), bytes=size)
