"""The reference interpreter: one iteration of a Program, call by call.

A filter may return fewer groups than it was given. Everything upstream of filters is then pulled again, with a new pull
number and so with new randomness, until the source's ``batch_size`` groups are there or the filter's bound is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl import context
from flowrl.batches import Batch
from flowrl.compiler.plan import Binding, Program, ProgramCall
from flowrl.errors import ExhaustedError, FlowError
from flowrl.models import Ema, Snapshot
from flowrl.nodes.source import Source


@dataclass
class Iteration:
    """What one iteration made.

    Args:
        values: by label, the output of each call.
        seconds: by label, how long it took, over all pulls.
        reports: metrics that nodes reported about themselves, by name.
        nonfinite_rows: (prompt_id, sample_id) of rows that made an optimiser step non-finite.
        flow_of_groups: at each filter: groups emitted to it, consumed after it, dropped by it, and surplus.
    """

    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reports: dict[str, float] = field(default_factory=dict)
    nonfinite_rows: list[tuple[int, int]] = field(default_factory=list)
    flow_of_groups: dict[str, dict[str, int]] = field(default_factory=dict)
    pulls: int = 1


Draw = Callable[[str, int], Batch]


def run_iteration(
    program: Program,
    *,
    draw: Draw,
    seed: int,
    iteration: int,
    namespace: str = "",
) -> Iteration:
    """Run one iteration with the engines bound in the current context.

    Args:
        draw: gives the next rows of a source: (source name, count) → batch.
        namespace: put before every label where randomness is drawn, so that an evaluation differs from the training flow.
    """
    done = Iteration()
    runner = _Runner(program, done, draw, seed, iteration, namespace)
    repeated = upstream_of_filters(program)
    if repeated:
        runner.pull_until_full([c for c in program.calls if c.label in repeated])
    for call in program.calls:
        if call.label not in repeated:
            done.values[call.label] = runner.run(call, done.values, pull=0)
    return done


def upstream_of_filters(program: Program) -> set[str]:
    """Labels of all filters and of everything that they need."""
    needed: set[str] = set()
    for call in reversed(program.calls):
        if call.node.is_filter or call.label in needed:
            needed.add(call.label)
            needed.update(b.label for b in call.bindings())
    return needed


class _Runner:
    def __init__(
        self, program: Program, done: Iteration, draw: Draw, seed: int, iteration: int, namespace: str
    ) -> None:
        self.program, self.done, self.draw = program, done, draw
        self.seed, self.iteration, self.namespace = seed, iteration, namespace
        self.elided = program.elided()

    def run(self, call: ProgramCall, values: Mapping[str, Any], pull: int) -> Any:
        start = time.perf_counter()
        here = context.StepContext(
            self.seed,
            self.iteration,
            pull,
            report=self._report,
            report_nonfinite=self.done.nonfinite_rows.extend,
        )
        label = self.namespace + call.label
        try:
            with context.use_step(here):
                if isinstance(call.node, Source):
                    return self._drawn(call.node)
                arguments = {
                    name: tuple(read(b, values) for b in value) if isinstance(value, tuple) else read(value, values)
                    for name, value in call.arguments.items()
                }
                if call.label in self.elided:
                    return call.node.placeholder(**arguments)  # type: ignore[attr-defined]
                context.seed_call(label)
                result = call.node.run(arguments, label=label)
                context.follow_writers(
                    m for m in self.program.models if isinstance(m, Snapshot | Ema) and m.base in call.node.writes()
                )
                return result
        except FlowError:
            raise
        except Exception as error:
            error.add_note(f"in call {call.label!r} ({call.node.name}), iteration {self.iteration}")
            raise
        finally:
            self.done.seconds[call.label] = self.done.seconds.get(call.label, 0.0) + time.perf_counter() - start

    def _drawn(self, node: Source) -> Batch:
        batch = self.draw(node.source_name, node.batch_size)
        if not isinstance(batch, node.batch_type):
            raise FlowError(
                f"The data set of source {node.source_name!r} gives the wrong rows",
                expected=node.batch_type.__name__,
                received=type(batch).__name__,
            )
        return batch

    def _report(self, name: str, value: float) -> None:
        self.done.reports[name] = self.done.reports.get(name, 0.0) + value

    def pull_until_full(self, calls: Sequence[ProgramCall]) -> None:
        """Run the calls upstream of filters until every filter has let the source's batch size of groups through."""
        filters = [c for c in calls if c.node.is_filter]
        target = max(c.node.batch_size for c in calls if isinstance(c.node, Source))
        bound = min(int(getattr(c.node, "max_pulls", 1)) for c in filters)
        parts: dict[str, list[Any]] = {c.label: [] for c in calls}
        passed: dict[str, int] = {c.label: 0 for c in filters}
        pull = 0
        while min(passed.values()) < target:
            if pull == bound:
                self._exhausted(filters, passed, target, pull)
                break
            values: dict[str, Any] = {}
            for call in calls:
                values[call.label] = self.run(call, values, pull)
                parts[call.label].append(values[call.label])
            for call in filters:
                before = num_groups(read(next(iter(call.bindings())), values))
                after = num_groups(values[call.label])
                passed[call.label] += after
                counts = self.done.flow_of_groups.setdefault(call.label, {"emitted": 0, "dropped": 0})
                counts["emitted"] += before
                counts["dropped"] += before - after
            pull += 1
        self.done.pulls = pull
        for label, batches in parts.items():
            self.done.values[label] = _concat(batches)
        for call in filters:
            kept = self.done.values[call.label]
            surplus = max(0, passed[call.label] - target)
            if surplus:
                self.done.values[call.label] = first_groups(kept, target)
            self.done.flow_of_groups[call.label] |= {
                "surplus": surplus,
                "consumed": passed[call.label] - surplus,
            }

    def _exhausted(self, filters: Sequence[ProgramCall], passed: Mapping[str, int], target: int, pulls: int) -> None:
        for call in filters:
            short = passed[call.label] < target
            if short and (getattr(call.node, "on_exhausted", "fail") == "fail" or passed[call.label] == 0):
                raise ExhaustedError(
                    f"{call.label} let {passed[call.label]} of {target} groups through in {pulls} pulls",
                    expected=f"{target} groups, the batch_size of its source",
                    received=passed[call.label],
                    do="raise max_pulls, loosen the filter, use easier or harder prompts, or set on_exhausted='train_short'",
                )


def read(binding: Binding, values: Mapping[str, Any]) -> Any:
    """The value that a binding points at."""
    value = values[binding.label]
    for name in binding.path:
        value = getattr(value, name)
    return value


def _concat(parts: Sequence[Any]) -> Any:
    if len(parts) == 1 or not isinstance(parts[0], Batch):
        return parts[0]
    return type(parts[0]).concat(parts)


def num_groups(batch: Any) -> int:
    """Distinct prompts in a batch."""
    import torch

    return len(torch.unique(batch.prompt_id))


def first_groups(batch: Any, count: int) -> Any:
    """The rows of the first ``count`` prompts, in order of appearance."""
    seen: dict[int, None] = dict.fromkeys(batch.prompt_id.tolist())
    keep = set(list(seen)[:count])
    return batch.select([i for i, p in enumerate(batch.prompt_id.tolist()) if p in keep])
