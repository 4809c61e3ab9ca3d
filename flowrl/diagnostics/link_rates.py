"""Rates between ranks: all-reduce and broadcast over gloo or nccl. Loads torch; runs in ranks of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrl.calibration import Rate
from flowrl.diagnostics.rates import Effort, rate, repeat

#: Bytes of what is sent: what latency decides, and what bandwidth does.
SIZES = (4 << 10, 1 << 20, 64 << 20)
#: Of ``--quick``.
QUICK_SIZES = (4 << 10, 4 << 20)
#: Times as many repetitions as the least of other measurements: links are noisy.
LINK_REPETITIONS = 3


def links(
    say: Callable[..., None], backend: str, sizes: Sequence[int], effort: Mapping[str, Any], where: str = "one machine"
) -> dict[str, Any]:
    """The trial: join, measure, leave. Of every repetition, the slowest rank's time counts.

    Returns:
        ``{"rates": [...]}``, as :meth:`flowrl.calibration.Rate.to_json` gives them.
    """
    from flowrl.runtime.ranks import Ranks

    say("joining the other ranks")
    ranks = Ranks.join(120.0)
    try:
        return {"rates": [r.to_json() for r in measure_links(say, ranks, backend, sizes, Effort(**effort), where)]}
    finally:
        ranks.leave()


def measure_links(
    say: Callable[..., None], ranks: Any, backend: str, sizes: Sequence[int], effort: Effort, where: str
) -> list[Rate]:
    """Every rank calls it, and gets the same rates."""
    import torch
    import torch.distributed as dist

    device = f"cuda:{ranks.rank}" if backend == "nccl" else "cpu"
    # Ranks must agree on the number of repetitions, so time does not decide it.
    number = LINK_REPETITIONS * effort.min_repetitions
    found = []
    for size in sizes:
        column = torch.ones(size // 4, device=device)
        for name, send in (
            ("all_reduce", lambda c=column: dist.all_reduce(c, op=dist.ReduceOp.MAX)),
            ("broadcast", lambda c=column: dist.broadcast(c, src=0)),
        ):
            say(f"measuring {name} of {size} bytes over {backend}")
            mine = _timed(send, effort.warm_up, number, device)
            slowest = [max(times) for times in zip(*ranks.everyone(mine), strict=True)]
            work = 4 * column.numel()
            found.append(rate(name, work, slowest, backend=backend, ranks=ranks.size, bytes=work, where=where))
    return found


def _timed(send: Callable[[], object], warm_up: int, number: int, device: str) -> list[float]:
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(warm_up):
        send()
    wait()
    for _ in range(number):
        dist.barrier()  # all begin together, so that nobody's time is waiting for a late one
        times += repeat(send, Effort(0.0, 1, 1, 0), clock=time.perf_counter, wait=wait)
    return times
