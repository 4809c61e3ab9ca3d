"""What has been published of placements for PPO, and what the estimates say.

HybridFlow (arXiv 2409.19256) compares on A100s with 200 Gb/s a host, prompts and responses of 1,024 tokens, 1,024 rows, 8
updates: which placement is fastest (§8.3), and which tensor parallelism generates fastest (§8.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baselines.hybridflow import best_of_placement
from benchmarks.problems import ppo, ppo_problem
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.placement import place

#: Sets of Models, each on devices of its own, by the paper's names.
PLACEMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "colocated": (("actor", "critic", "reference", "reward"),),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": (("actor",), ("critic",), ("reference",), ("reward",)),
}


@dataclass(frozen=True)
class Ordering:
    """Seconds of an iteration by placement, estimated; None where it does not fit."""

    size: str
    gpus: int
    seconds: tuple[tuple[str, float | None], ...]

    @property
    def best(self) -> str:
        """The fastest placement."""
        found = {name: seconds for name, seconds in self.seconds if seconds is not None}
        return min(found, key=lambda name: found[name])


def ordering(size: str, gpus: int, names: Sequence[str] = tuple(PLACEMENTS)) -> Ordering:
    """How placements of PPO compare."""
    problem = ppo_problem(size, gpus // 8)
    costs = {name: best_of_placement(problem, PLACEMENTS[name]) for name in names}
    return Ordering(size, gpus, tuple((name, cost and cost.period) for name, cost in costs.items()))


def generation_by_tensor(size: str) -> dict[int, float]:
    """By tensor parallelism, estimated seconds of generation with the weights brought into its layout: all Models on 16
    devices, the actor trained on pipeline 1, tensor 8, data 2 (the paper's 1-8-2)."""
    case, whole = ppo(size, 2), Mesh(0, 0, 16)
    found = {}
    for tensor in (1, 2, 4, 8):
        train, generate = {"data": 2, "tensor": 8, "pipeline": 1}, {"tensor": tensor, "pipeline": 1}
        problem = case.problem({"train actor": train, "generate": generate})
        pinned = tuple((u, whole) for u in range(len(problem.units)))
        cost = place(dataclasses.replace(problem, pinned=pinned), exact_budget=0).cost
        found[tensor] = cost.seconds[[unit.label for unit in problem.units].index("generate")]
    return found
