"""Do estimates rank strategies as measurements do? Six ways to train one model on four ranks of this machine, over gloo.

``python benchmarks/rank_strategies.py`` starts the ranks with torchrun. They first measure themselves, all at once, since ranks
that share cores are slower than one alone: matrix products, memory, all-reduces of four ranks. That is the calibration from
which each strategy is estimated. Then they train a few steps under each. Printed: both times, and Kendall's tau between the
rankings (1 the same, 0 unrelated, −1 reversed).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl.calibration import Calibration, Rate
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.estimate import Estimator, Precision
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.model_architecture import architecture_of
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.strategy import Strategy
from flowrl.compiler.work import Work
from flowrl.diagnostics.rates import Effort, rate

RANKS = 4
ROWS, PROMPT, LENGTH = 16, 32, 128
STEPS = 3
#: Large enough that products and links weigh, not what a layer costs anyway.
MODEL: dict[str, Any] = dict(hidden=512, layers=4, heads=8, kv_heads=8, vocab=2048, tied=False, scale=0.02)
#: By name: what the estimate is asked, what the engine is told.
STRATEGIES: dict[str, tuple[Parallelism, Strategy]] = {
    "data 4": (Parallelism(data=4), Strategy(sharding="none")),
    "data 4, ZeRO-2": (Parallelism(data=4, zero=2), Strategy(sharding="optimizer")),
    "data 4, ZeRO-3": (Parallelism(data=4, zero=3), Strategy(sharding="full")),
    "data 4, ZeRO-3, checkpointing": (
        Parallelism(data=4, zero=3, checkpointing=True),
        Strategy(sharding="full", activation_checkpointing="layers"),
    ),
    "data 2, tensor 2": (Parallelism(data=2, tensor=2), Strategy(tensor_parallel=2, sharding="none")),
    "tensor 4": (Parallelism(tensor=4), Strategy(tensor_parallel=4, sharding="none")),
}


def actor() -> Any:
    from flowrl.models import Model
    from flowrl.tiny import tiny_model

    return Model(tiny_model(**MODEL), name="ranked", device="cpu")


# -- on the ranks -----------------------------------------------------------------------------------------------------------


def measure(out: Path) -> None:
    """On every rank: measure the machine, then each strategy. Rank 0 writes both."""
    from flowrl.runtime.ranks import Ranks

    ranks = Ranks.join(120.0)
    calibration = calibrated(ranks)
    seconds = step_seconds(ranks)
    if ranks.rank == 0:
        out.write_text(json.dumps({"calibration": calibration.to_json(), "seconds": seconds}))
    ranks.leave()


def calibrated(ranks: Any) -> Calibration:
    """What a rank reaches while the others do the same."""
    import torch.distributed as dist

    from flowrl.diagnostics.hardware_rates import Bench, matmul_rates, read_rate
    from flowrl.machine import Machine

    bench = Bench("cpu", Effort(seconds=1.0, min_repetitions=3, max_repetitions=30, longest=0.1), [])
    dist.barrier()
    # Of the sizes the largest: a small product may be over before another rank gets the core.
    rates = list(matmul_rates(bench, "float32"))[-1:]
    dist.barrier()
    rates.append(read_rate(bench, 64 << 20))
    rates += [all_reduce_at_work(ranks, size) for size in (4 << 10, 1 << 20, 32 << 20)]
    return Calibration(Machine.here(()), "now", {}, tuple(rates))


def all_reduce_at_work(ranks: Any, size: int, repetitions: int = 9) -> Rate:
    """An all-reduce as a layer meets it, after a product: of ranks that share cores some are late, and all wait for them."""
    import torch
    import torch.distributed as dist

    column, left, right = torch.ones(size // 4), torch.ones(512, 512), torch.ones(512, 1024)
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        torch.mm(left, right)
        worked = time.perf_counter()
        dist.all_reduce(column, op=dist.ReduceOp.MAX)
        times = ranks.everyone((worked - start, time.perf_counter() - start))
        seconds.append(max(total for _, total in times) - statistics.fmean(work for work, _ in times))
    return rate("all_reduce", size, seconds, backend="gloo", ranks=ranks.size, bytes=size)


def step_seconds(ranks: Any) -> dict[str, float]:
    """By strategy, the median over steps of the slowest rank's time. They take turns, so that what else the machine does meets
    all of them."""
    import torch.distributed as dist

    from flowrl.context import Bindings, step, use_bindings
    from flowrl.diagnostics.rows import demonstrations, random_prompts, sft_rows
    from flowrl.nodes.updater import AdamW
    from flowrl.runtime.worker import open_engine

    prompts = random_prompts(ROWS, PROMPT, MODEL["vocab"])
    rows = demonstrations(prompts, random_prompts(ROWS, LENGTH - PROMPT, MODEL["vocab"], seed=1))
    taken: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    opened: dict[str, tuple[Any, Any]] = {}
    for _ in range(STEPS + 1):
        for name, (_, strategy) in STRATEGIES.items():
            if name not in opened:
                opened[name] = (
                    actor(),
                    Bindings(
                        open_engine,
                        ranks=ranks,
                        strategies={"ranked": strategy},
                        micro_batch_tokens=ROWS * LENGTH // RANKS,
                    ),
                )
            model, bindings = opened[name]
            with use_bindings(bindings), step(seed=0):
                engine: Any = model.bound_engine()
                dist.barrier()
                start = time.perf_counter()
                engine.train_step([sft_rows(engine, rows)], AdamW(learning_rate=0.0), max_grad_norm=1.0)
                taken[name].append(max(ranks.everyone(time.perf_counter() - start)))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first opens and probes


# -- in front ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Seconds of a step by strategy, and the rates that the estimates were made from."""

    calibration: Calibration
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def tau(self) -> float:
        """Kendall's."""
        return kendall([self.predicted[name] for name in STRATEGIES], [self.measured[name] for name in STRATEGIES])

    def __str__(self) -> str:
        lines = [f"{'':32} {'predicted':>10} {'measured':>10}"]
        for name in sorted(STRATEGIES, key=self.measured.__getitem__):
            lines.append(f"{name:32} {self.predicted[name]:9.3f}s {self.measured[name]:9.3f}s")
        rates = [f"{r.name} {r.value:.3g} {r.unit} ({r.work:.3g})" for r in self.calibration.rates]
        return "\n".join([*lines, f"Kendall's tau: {self.tau:.2f}", "from " + ", ".join(rates)])


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Of all pairs, the share in the same order minus the share in the other."""
    signs = [(a - b) * (c - d) for (a, c), (b, d) in itertools.combinations(zip(first, second, strict=True), 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def ranking(deadline: float = 600.0) -> Ranking:
    """Measure in ranks of their own, then estimate from what they found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
        subprocess.run([*command, __file__, str(out)], check=True, timeout=deadline)
        found = json.loads(out.read_text())
    calibration = Calibration.from_json(found["calibration"])
    architecture = architecture_of(actor())
    estimator = Estimator(Cluster("cpu", RANKS), calibration)
    predicted = {}
    for name, (parallelism, _) in STRATEGIES.items():
        # The engine splits rows by tokens, the same number for every strategy.
        split = max(1, RANKS // parallelism.data)
        work = Work("train", ROWS, float(PROMPT), float(LENGTH - PROMPT), float(LENGTH - PROMPT))
        asked = Parallelism(**{**parallelism.__dict__, "micro_batches": split})
        estimate = estimator.estimate(architecture, work, Mesh(0, 0, RANKS), asked, precision=Precision())
        predicted[name] = estimate.seconds
    return Ranking(calibration, predicted, found["seconds"])


@pytest.mark.slow
def test_estimates_rank_strategies_as_measurements_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = ranking()
    with capsys.disabled():
        print(f"\n{found}")
    assert found.tau >= 0.6


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        print(ranking())
