"""Evaluation: a flow without an updater, run over a held-out data set with the weights of the moment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.batches import Batch, Rewards, Rollouts, align
from flowrl.compiler.plan import Program, ProgramCall
from flowrl.errors import FlowError
from flowrl.nodes.source import Source
from flowrl.runtime.checkpoint import step_of, verify, write_folder
from flowrl.runtime.interpreter import run_iteration
from flowrl.runtime.ranks import ONE_RANK, Ranks

if TYPE_CHECKING:
    from flowrl.runtime.run_state import EvaluationPlan


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


def scored_calls(program: Program, name: str) -> tuple[ProgramCall, ProgramCall]:
    """The calls that give the responses and the rewards of an evaluation: outputs where these say so, else the last ones.

    Raises:
        FlowError: there is none, or the flow filters.
    """
    in_order = [*(program.call(b.label) for b in program.outputs if not b.path), *reversed(program.calls)]
    found = []
    for kind in (Rollouts, Rewards):
        call = next((c for c in in_order if _gives(c, kind)), None)
        if call is None:
            raise FlowError(
                f"Evaluation {name!r} gives no {kind.__name__}",
                expected="a flow source → rollout → reward",
                received=", ".join(c.label for c in program.calls),
            )
        found.append(call)
    filters = [c.label for c in program.calls if c.node.is_filter]
    if filters:
        raise FlowError(
            f"Evaluation {name!r} filters ({', '.join(filters)})",
            expected="a flow that scores every prompt of its data set once",
            received="a filter, which would ask for further prompts",
            do="leave the filter out of the evaluation",
        )
    return found[0], found[1]


def _gives(call: ProgramCall, kind: type) -> bool:
    return isinstance(call.node.output_type, type) and issubclass(call.node.output_type, kind)


def evaluate(plan: EvaluationPlan, *, step: int, seed: int) -> EvaluationResult:
    """Run an evaluation program once over the whole of its data set, batch by batch. Every rank of a run calls it.

    Randomness depends on the seed and the name alone, so that evaluations at different steps sample with the same draws, and
    training draws the same with and without them.
    """
    program, name = plan.program, plan.name
    rollout_call, reward_call = scored_calls(program, name)
    sources = {c.node.source_name: c.node for c in program.calls if isinstance(c.node, Source)}
    ranks = context.current_bindings().ranks or ONE_RANK
    total = ranks.once(lambda: min(len(plan.data[source]) for source in sources))
    cursors = dict.fromkeys(sources, 0)

    def draw(source: str, count: int) -> Batch:
        start = cursors[source]
        cursors[source] = min(total, start + count)
        return ranks.once(lambda: plan.data[source].rows(start, cursors[source] - start, seed))

    rollouts: list[Rollouts] = []
    rewards: list[Rewards] = []
    while min(cursors.values()) < total:
        done = run_iteration(program, draw=draw, seed=seed, iteration=0, namespace=f"eval/{name}/")
        rollouts.append(done.values[rollout_call.label])
        scored = done.values[reward_call.label]
        rewards.append(align(rollouts[-1], scored, node=f"evaluation {name}", argument="rewards"))  # type: ignore[arg-type]
    all_rollouts, all_rewards = Rollouts.concat(rollouts), Rewards.concat(rewards)
    metrics = evaluation_metrics(all_rollouts, all_rewards, plan.success_threshold)
    return EvaluationResult(name, step, metrics, all_rollouts, all_rewards)


def evaluation_metrics(rollouts: Rollouts, rewards: Rewards, success_threshold: float) -> dict[str, float]:
    """Means over valid rows, and pass@k over groups; an invalid row solves nothing."""
    import torch

    from flowrl.functional.grouping import Groups
    from flowrl.functional.metrics import pass_at_k

    valid = rewards.valid.bool()
    out = {"reward": _mean(rewards.totals[valid])}
    if len(rewards.components) > 1:
        out.update({name: _mean(column[valid]) for name, column in rewards.components.items()})
    out["invalid"] = _mean(~valid)
    out["length"] = _mean(rollouts.response_lengths)
    solved = torch.nan_to_num(rewards.totals, nan=-torch.inf) >= success_threshold
    groups = Groups.of(rollouts.prompt_id)
    correct = groups.sum(solved).to(torch.int64)
    k = 1
    while k <= int(groups.sizes.min()):
        out[f"pass@{k}"] = _mean(pass_at_k(groups.sizes, correct, k))
        k *= 2
    return out


def _mean(values: Any) -> float:
    return float(values.double().mean()) if len(values) else float("nan")


# -- on disk -----------------------------------------------------------------------------------------------------------


def save_evaluation(folder: Path, result: EvaluationResult, *, kept: set[int]) -> None:
    """Write ``folder/<name>/step-<step>``, and delete all others but the first and those of the steps ``kept``.

    Raises:
        RunFolderError: the disk is full or cannot be written.
    """
    import pyarrow as pa

    def write(target: Path, _: Ranks) -> None:
        for name, batch in (("rollouts", result.rollouts), ("rewards", result.rewards)):
            table = batch.to_arrow()
            with pa.OSFile(str(target / f"{name}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        (target / "metrics.json").write_text(json.dumps(dict(result.metrics)))

    folder = folder / result.name
    write_folder(folder / f"step-{result.step:06d}", write)
    for path in sorted(folder.glob("step-*"), key=step_of)[1:]:
        if step_of(path) not in kept | {result.step}:
            shutil.rmtree(path)


def load_evaluations(folder: Path, name: str, *, up_to: int) -> list[EvaluationResult]:
    """The evaluations of this name at steps up to ``up_to``, in order. Later ones are deleted: the run does them again.

    Raises:
        CheckpointError: one of them is damaged.
    """
    import pyarrow as pa

    found = []
    for path in sorted((folder / name).glob("step-*"), key=step_of):
        step = step_of(path)
        if step > up_to:
            shutil.rmtree(path)
            continue
        verify(path, advice="delete that folder: only the report looks at it")
        files = [(path / f"{name}.arrow").read_bytes() for name in ("rollouts", "rewards")]
        tables = [pa.ipc.open_file(pa.BufferReader(file)).read_all() for file in files]
        metrics = json.loads((path / "metrics.json").read_text())
        found.append(
            EvaluationResult(name, step, metrics, Rollouts.from_arrow(tables[0]), Rewards.from_arrow(tables[1]))
        )
    return found
