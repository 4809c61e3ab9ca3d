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
from flowrl.models import DerivedModel, State
from flowrl.nodes.loss import LossTerm
from flowrl.nodes.source import Source
from flowrl.runtime.ranks import ONE_RANK


@dataclass
class Iteration:
    """What one iteration made.

    Args:
        values: by label, the output of each call that ran.
        seconds: by label, how long it took, over all pulls.
        reports: by "label/name", what nodes reported of their own work. Over the pulls of one iteration whole numbers add up,
            names that end in ``_max`` keep the largest, and the rest is averaged.
        nonfinite_rows: (prompt_id, sample_id) of rows that made an optimiser step non-finite.
        flow_of_groups: by label of a filter, counts of groups: ``emitted`` to it, ``dropped`` by it, ``consumed`` behind it,
            ``surplus`` beyond what was asked for, ``carried_in`` from the iteration before, ``carried_out`` to the next.
            On every filter: emitted + carried_in = consumed + dropped + surplus + carried_out (law 6).
        pulls: how often the sources above filters were drawn from.
        carried: what is carried over to the next iteration, by label; everything behind the filters was then left out.
    """

    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reports: dict[str, float] = field(default_factory=dict)
    nonfinite_rows: list[tuple[int, int]] = field(default_factory=list)
    flow_of_groups: dict[str, dict[str, int]] = field(default_factory=dict)
    pulls: int = 1
    carried: dict[str, Any] = field(default_factory=dict)


Draw = Callable[[str, int], Batch]


def run_iteration(
    program: Program,
    *,
    draw: Draw,
    seed: int,
    iteration: int,
    followers: Sequence[DerivedModel] = (),
    carried: Mapping[str, Any] | None = None,
    namespace: str = "",
) -> Iteration:
    """Run one iteration with the engines bound in the current context.

    Of several ranks every one calls it, with equal arguments, and has equal values afterwards: a call whose node holds no
    Model runs on rank 0 alone, and its result is given to the others; all other calls run everywhere.

    Args:
        draw: gives the next rows of a source: (source name, count) → batch. Every rank asks it.
        followers: Snapshots and Emas that follow what the program writes.
        carried: what the iteration before carried over.
        namespace: put before every label where randomness is drawn, so that an evaluation differs from the training flow.

    Raises:
        ExhaustedError: a filter let too few groups through, and is to fail then.
    """
    done = Iteration()
    runner = _Runner(program, done, draw, seed, iteration, namespace)
    repeated = upstream_of_filters(program)
    if repeated:
        runner.pull_until_full([c for c in program.calls if c.label in repeated], carried or {})
    if not done.carried:
        for call in program.calls:
            if call.label not in repeated:
                done.values[call.label] = runner.run(call, done.values, pull=0)
        # Last, so that no reader of a Snapshot or Ema sees what this iteration made of it.
        written = [thing for call in program.calls for thing in call.node.writes()]
        runner.ranks.enter(f"following what step {iteration + 1} wrote")
        runner.ranks.together(lambda: context.follow_writers(m for m in followers if m.base in written))
    runner.summarise_reports()
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
        self,
        program: Program,
        done: Iteration,
        draw: Draw,
        seed: int,
        iteration: int,
        namespace: str,
    ) -> None:
        self.done, self.draw = done, draw
        self.seed, self.iteration, self.namespace = seed, iteration, namespace
        self.ranks = context.current_bindings().ranks or ONE_RANK
        self.elided, self.once = program.elided(), program.once()
        self.reported: dict[str, list[float]] = {}

    def run(self, call: ProgramCall, values: Mapping[str, Any], pull: int) -> Any:
        start = time.perf_counter()
        here = context.StepContext(
            self.seed,
            self.iteration,
            pull,
            report=lambda name, value: self.reported.setdefault(f"{call.label}/{name}", []).append(value),
            report_nonfinite=self.done.nonfinite_rows.extend,
        )
        label = self.namespace + call.label
        where = f"call {label!r} ({call.node.name}), step {self.iteration + 1}"
        self.ranks.enter(where)
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
                return self._on_ranks(call, where, lambda: self._run_node(call, arguments, label))
        except Exception as error:
            error.add_note(f"in {where}")
            raise
        finally:
            self.done.seconds[call.label] = self.done.seconds.get(call.label, 0.0) + time.perf_counter() - start

    def _run_node(self, call: ProgramCall, arguments: Mapping[str, Any], label: str) -> Any:
        context.seed_call(label)
        return call.node.run(arguments, label=label)

    def _on_ranks(self, call: ProgramCall, where: str, work: Callable[[], Any]) -> Any:
        """Run a call once or on every rank; the States that it writes are then the same everywhere."""
        if self.ranks.size == 1:
            return work()
        if call.label in self.once:
            result = self.ranks.once(lambda: self._alone(where, work))
        else:
            result = self.ranks.together(work)
            theirs = not type(call.node).__module__.startswith("flowrl.")
            if theirs and isinstance(result, Batch) and not isinstance(result, LossTerm):
                result = self.ranks.from_first(result)  # it may have asked a server, or the time
        written = [thing for thing in call.node.writes() if isinstance(thing, State)]
        if written:
            values = self.ranks.from_first([state.value for state in written])
            context.current_bindings().states.update(zip(written, values, strict=True))
        return result

    def _alone(self, where: str, work: Callable[[], Any]) -> Any:
        bindings = context.current_bindings()
        bindings.alone = where
        try:
            return work()
        finally:
            bindings.alone = ""

    def _drawn(self, node: Source) -> Batch:
        batch = self.draw(node.source_name, node.batch_size)
        if not isinstance(batch, node.batch_type):
            raise FlowError(
                f"The data set of source {node.source_name!r} gives the wrong rows",
                expected=node.batch_type.__name__,
                received=type(batch).__name__,
            )
        return batch

    def summarise_reports(self) -> None:
        """One number for each thing that was reported, also where its call ran once a pull."""
        for name, values in self.reported.items():
            if all(isinstance(v, int) for v in values):
                self.done.reports[name] = float(sum(values))
            elif name.endswith("_max"):
                self.done.reports[name] = float(max(values))
            else:
                self.done.reports[name] = float(sum(values) / len(values))

    # -- filters -----------------------------------------------------------------------------------------------------

    def pull_until_full(self, calls: Sequence[ProgramCall], carried: Mapping[str, Any]) -> None:
        """Run the calls upstream of filters until every filter that feeds the rest of the flow has let the source's batch
        size of groups through."""
        filters = {c.label: _Filter.of(c, calls) for c in calls if c.node.is_filter}
        parts: dict[str, list[Any]] = {c.label: [carried[c.label]] if c.label in carried else [] for c in calls}
        for label, each in filters.items():
            each.carried_in = num_groups(carried[label]) if each.is_last and label in carried else 0
        bound = min(f.max_pulls for f in filters.values())
        while any(f.missing for f in filters.values()) and self.done.pulls <= bound:
            values: dict[str, Any] = {}
            for call in calls:
                values[call.label] = self.run(call, values, self.done.pulls - 1)
                parts[call.label].append(values[call.label])
            for call in calls:
                if call.label in filters:
                    node: Any = call.node
                    given: Any = call.arguments[node.filtered_port()]
                    filters[call.label].count(read(given, values), values[call.label])
            self.done.pulls += 1
        self.done.pulls -= 1
        for label, batches in parts.items():
            if batches:
                self.done.values[label] = _concat(batches)
        carries = self._exhausted([f for f in filters.values() if f.missing])
        for label, each in filters.items():
            if each.is_last and not carries:
                self.done.values[label] = first_groups(self.done.values[label], each.target)
            self.done.flow_of_groups[label] = each.counts(carries)
        if carries:
            kept = {p for f in filters.values() if f.is_last for p in self.done.values[f.label].prompt_id.tolist()}
            self.done.carried = {label: rows_of(value, kept) for label, value in self.done.values.items()}

    def _exhausted(self, short: Sequence[_Filter]) -> bool:
        """What filters that let too few groups through do about it: whether the groups are carried over. One that trains short
        trains on nothing where nothing came through."""
        for each in short:
            if each.on_exhausted == "fail":
                raise ExhaustedError(
                    f"{each.label} let {each.passed} of {each.target} groups through in {self.done.pulls} pulls",
                    expected=f"{each.target} groups, the batch_size of its source",
                    received=each.passed,
                    do="raise max_pulls, loosen the filter, use easier or harder prompts, or set on_exhausted='train_short'",
                )
        return any(f.on_exhausted == "carry_over" for f in short)


@dataclass
class _Filter:
    """The groups that pass one filter in one iteration. Only the last of several in a row must be filled."""

    label: str
    target: int
    max_pulls: int
    on_exhausted: str
    is_last: bool
    carried_in: int = 0
    emitted: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, call: ProgramCall, calls: Sequence[ProgramCall]) -> _Filter:
        node: Any = call.node
        above = _above(call, calls)
        target = max(c.node.batch_size for c in calls if c.label in above and isinstance(c.node, Source))
        is_last = not any(c.node.is_filter and call.label in _above(c, calls) for c in calls)
        return cls(call.label, target, node.max_pulls, node.on_exhausted, is_last)

    def count(self, given: Any, let_through: Any) -> None:
        before, after = num_groups(given), num_groups(let_through)
        self.emitted += before
        self.dropped += before - after

    @property
    def passed(self) -> int:
        return self.carried_in + self.emitted - self.dropped

    @property
    def missing(self) -> int:
        return max(0, self.target - self.passed) if self.is_last else 0

    def counts(self, carries: bool) -> dict[str, int]:
        """The groups by what became of them."""
        if not self.is_last:  # what it lets through, the next one takes
            return {"emitted": self.emitted, "dropped": self.dropped, "consumed": self.passed, "surplus": 0}
        consumed = 0 if carries else min(self.passed, self.target)
        surplus = 0 if carries else self.passed - consumed
        out = {"emitted": self.emitted, "dropped": self.dropped, "consumed": consumed, "surplus": surplus}
        if self.on_exhausted == "carry_over" or carries or self.carried_in:
            out |= {"carried_in": self.carried_in, "carried_out": self.passed if carries else 0}
        return out


def _above(call: ProgramCall, calls: Sequence[ProgramCall]) -> set[str]:
    """Labels of everything that a call needs."""
    by_label = {c.label: c for c in calls}
    found: set[str] = set()
    stack = [b.label for b in call.bindings()]
    while stack:
        label = stack.pop()
        if label not in found:
            found.add(label)
            stack += [b.label for b in by_label[label].bindings()]
    return found


def read(binding: Binding, values: Mapping[str, Any]) -> Any:
    """The value that a binding points at."""
    value = values[binding.label]
    for name in binding.path:
        value = getattr(value, name)
    return value


def _concat(parts: Sequence[Any]) -> Any:
    if len(parts) == 1 or not isinstance(parts[0], Batch):
        return parts[-1]
    return type(parts[0]).concat(parts)


def num_groups(batch: Any) -> int:
    """Distinct prompts in a batch."""
    import torch

    return len(torch.unique(batch.prompt_id))


def first_groups(batch: Any, count: int) -> Any:
    """The rows of the first ``count`` prompts, in order of appearance."""
    ids = dict.fromkeys(batch.prompt_id.tolist())
    return batch if len(ids) <= count else rows_of(batch, set(list(ids)[:count]))


def rows_of(batch: Any, prompt_ids: set[int]) -> Any:
    """The rows of these prompts; a batch without prompts as it is."""
    if not hasattr(batch, "prompt_id"):
        return batch
    return batch.select([i for i, p in enumerate(batch.prompt_id.tolist()) if p in prompt_ids])
