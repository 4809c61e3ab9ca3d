"""Evaluation: a flow without an updater, run over a held-out data set with the weights of the moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.batches import Batch, Rewards, Rollouts, align
from flowrl.compiler.plan import Program
from flowrl.nodes.source import Source
from flowrl.runtime.interpreter import run_iteration


@dataclass(frozen=True)
class EvaluationResult:
    """What one evaluation found.

    Args:
        name: of the evaluation.
        step: completed training steps when it ran.
        metrics: by name: ``reward`` and each reward component as means over valid rows, ``pass@k`` for powers of two up to
            the group size, ``length``, ``invalid`` (share of rows without a reward).
        rollouts: every response.
        rewards: of them, in the same order.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    rollouts: Rollouts = field(repr=False)
    rewards: Rewards = field(repr=False)


def evaluate(
    program: Program,
    data: Mapping[str, Any],
    *,
    name: str,
    step: int,
    seed: int,
    success_threshold: float = 1.0,
) -> EvaluationResult:
    """Run an evaluation program once over the whole of its data set, batch by batch.

    Randomness depends on the seed and the name alone, so that evaluations at different steps sample with the same draws.

    Args:
        success_threshold: a response solves its prompt when its total reward reaches this; for pass@k.
    """
    sources = {c.node.source_name: c.node for c in program.calls if isinstance(c.node, Source)}
    total = min(len(data[source]) for source in sources)
    cursors = dict.fromkeys(sources, 0)

    def draw(source: str, count: int) -> Batch:
        start = cursors[source]
        cursors[source] = min(total, start + count)
        return data[source].rows(start, cursors[source] - start, seed)

    rollouts: list[Rollouts] = []
    rewards: list[Rewards] = []
    while min(cursors.values()) < total:
        done = run_iteration(program, draw=draw, seed=seed, iteration=0, namespace=f"eval/{name}/")
        rollouts.append([v for v in done.values.values() if isinstance(v, Rollouts)][-1])
        found = [v for v in done.values.values() if isinstance(v, Rewards)][-1]
        rewards.append(align(rollouts[-1], found, node=f"evaluation {name}", argument="rewards"))  # type: ignore[arg-type]
    all_rollouts, all_rewards = Rollouts.concat(rollouts), Rewards.concat(rewards)
    return EvaluationResult(
        name,
        step,
        evaluation_metrics(all_rollouts, all_rewards, success_threshold),
        all_rollouts,
        all_rewards,
    )


def evaluation_metrics(rollouts: Rollouts, rewards: Rewards, success_threshold: float) -> dict[str, float]:
    """Means over valid rows, and pass@k over groups; an invalid row solves nothing."""
    import torch

    from flowrl.functional.metrics import pass_at_k

    valid = rewards.valid.bool()
    out = {"reward": float(rewards.totals[valid].double().mean()) if bool(valid.any()) else float("nan")}
    if len(rewards.components) > 1:
        out.update({n: float(c[valid].double().mean()) for n, c in rewards.components.items()})
    out["invalid"] = float((~valid).double().mean())
    out["length"] = float(rollouts.response_lengths.double().mean())
    solved = torch.nan_to_num(rewards.totals, nan=-torch.inf) >= success_threshold
    sizes = torch.unique(rollouts.prompt_id, return_counts=True)[1]
    k = 1
    while k <= int(sizes.min()):
        out[f"pass@{k}"] = float(pass_at_k(solved, rollouts.prompt_id, k))
        k *= 2
    return out
