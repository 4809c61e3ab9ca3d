"""Law 6 on the edges around filters: every group that was emitted is consumed, dropped, surplus or carried, exactly once.

Flows without a Model, on a scorer that accepts groups by a pattern, are run by the interpreter and compared with a few
lines of arithmetic.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl
from flowrl import DropUniformGroups, Prompts, Rewards, RLFlow, Rollouts, report, rewards_like, source
from flowrl.compiler.plan import Program
from flowrl.context import Bindings, use_bindings
from flowrl.data import PromptDataset
from flowrl.errors import ExhaustedError
from flowrl.nodes.filter import Filter
from flowrl.runtime.interpreter import Iteration, run_iteration
from flowrl.runtime.step_metrics import step_metrics
from tests.runs import quick_run, rows, training
from tests.tiny import recorded_rollouts

GROUP_SIZE = 2


@flowrl.node(kind="rollout")
def sample(prompts: Prompts) -> Rollouts:
    """Two recorded answers to each prompt."""
    recorded = recorded_rollouts(prompts.num_rows, GROUP_SIZE, prompt_lengths=(1,), response_lengths=(1, 0))
    ids = prompts.prompt_id.repeat_interleave(GROUP_SIZE)
    return Rollouts(**{**vars(recorded), "prompt_id": ids})


@flowrl.node(kind="reward")
def score(rollouts: Rollouts, accepted: tuple[bool, ...] = (True,)) -> Rewards:
    """1 and 0 for the prompts that the pattern accepts, else twice the same."""
    varied = torch.tensor([accepted[p % len(accepted)] for p in rollouts.prompt_id.tolist()])
    return rewards_like(rollouts, score=(varied & (rollouts.sample_id == 0)).float())


class Accept(Filter):
    """Lets the prompts through that the pattern accepts."""

    accepted: tuple[bool, ...]

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        ids = rollouts.prompt_id.tolist()
        return rollouts.select([i for i, p in enumerate(ids) if self.accepted[p % len(self.accepted)]])


@flowrl.node
def train(rollouts: Rollouts, into: list[Any] | None = None) -> Rollouts:
    """What stands behind the filters."""
    report("rows", rollouts.num_rows)
    if into is not None:
        into.append(rollouts)
    return rollouts


@dataclass
class Trace:
    """What a few iterations did.

    Args:
        trained: by iteration the prompts behind the filters; None where nothing ran.
        counts: by iteration ``Iteration.flow_of_groups``.
        carried: by iteration, what it left for the next, pickled.
        cursors: by iteration, how many prompts were drawn until then.
        failed: the iteration that was exhausted.
    """

    trained: list[list[int] | None] = field(default_factory=list)
    counts: list[dict[str, dict[str, int]]] = field(default_factory=list)
    carried: list[bytes] = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)
    failed: int | None = None


PATTERN = st.lists(st.booleans(), min_size=1, max_size=7).map(tuple)
POLICY = st.sampled_from(["train_short", "fail", "carry_over"])
DATA = PromptDataset.from_rows([{"prompt": f"prompt {i}", "answer": "0"} for i in range(5)], shuffle=False)


def program_of(patterns: Sequence[tuple[bool, ...]], batch_size: int, max_pulls: int, policy: Any) -> Program:
    """Filters by pattern, the last of them the filter of DAPO behind a scorer."""
    rollouts = sample(source(Prompts, name="prompts", batch_size=batch_size))
    kept = rollouts
    for i, pattern in enumerate(patterns[:-1]):
        kept = Accept(pattern, label=f"filter {i}", max_pulls=max_pulls, on_exhausted=policy)(kept)
    last = DropUniformGroups(label=f"filter {len(patterns) - 1}", max_pulls=max_pulls, on_exhausted=policy)
    kept = last(kept, score(rollouts, accepted=patterns[-1]))
    return flowrl.compile(RLFlow.from_outputs(train.options(label="train")(kept)))


def run(program: Program, iterations: int, start: int = 0, cursor: int = 0, carried: bytes = b"") -> Trace:
    """Iterations ``start`` to ``iterations - 1``, from what an earlier trace left."""
    trace = Trace()

    def draw(name: str, count: int) -> Any:
        nonlocal cursor
        cursor += count
        return DATA.rows(cursor - count, count, 0)

    def no_engine(model: Any, bindings: Bindings) -> Any:
        raise AssertionError("there is no Model here")

    with use_bindings(Bindings(no_engine)):
        for iteration in range(start, iterations):
            given = pickle.loads(carried) if carried else {}
            try:
                done = run_iteration(program, draw=draw, seed=0, iteration=iteration, carried=given)
            except ExhaustedError:
                trace.failed = iteration
                break
            carried = pickle.dumps(done.carried)
            trained: Rollouts | None = done.values.get("train")
            if trained is not None:
                assert trained.sample_id.tolist() == list(range(GROUP_SIZE)) * (trained.num_rows // GROUP_SIZE)
            trace.trained.append(None if trained is None else trained.prompt_id.tolist()[::GROUP_SIZE])
            trace.counts.append(done.flow_of_groups)
            trace.carried.append(carried)
            trace.cursors.append(cursor)
            check_acceptance(program, done)
    return trace


def check_acceptance(program: Program, done: Iteration) -> None:
    """The metrics of a step say which share passed, and how the groups went on."""
    metrics = step_metrics(program, done)
    for label, count in done.flow_of_groups.items():
        share = (count["emitted"] - count["dropped"]) / count["emitted"] if count["emitted"] else 0.0
        assert metrics[f"{label}/acceptance"] == share
        assert metrics[f"{label}/groups_emitted"] == count["emitted"] and metrics[f"{label}/pulls"] == done.pulls


def expected(
    patterns: Sequence[tuple[bool, ...]], batch_size: int, max_pulls: int, policy: str, iterations: int
) -> Trace:
    """The same by arithmetic."""
    trace, cursor, carried = Trace(), 0, list[int]()
    for iteration in range(iterations):
        passed, emitted, pulls = list(carried), [0] * len(patterns), 0
        while len(passed) < batch_size and pulls < max_pulls:
            drawn = list(range(cursor, cursor + batch_size))
            for i, pattern in enumerate(patterns):
                emitted[i] += len(drawn)
                drawn = [p for p in drawn if pattern[p % len(pattern)]]
            passed += drawn
            cursor, pulls = cursor + batch_size, pulls + 1
        short = len(passed) < batch_size
        if short and policy == "fail":
            trace.failed = iteration
            break
        carries = short and policy == "carry_over"
        counts = {
            f"filter {i}": {"emitted": e, "dropped": e - emitted[i + 1], "consumed": emitted[i + 1], "surplus": 0}
            for i, e in enumerate(emitted[:-1])
        }
        new = len(passed) - len(carried)
        last = {
            "emitted": emitted[-1],
            "dropped": emitted[-1] - new,
            "consumed": 0 if carries else min(batch_size, len(passed)),
            "surplus": 0 if carries else max(0, len(passed) - batch_size),
        }
        if policy == "carry_over":
            last |= {"carried_in": len(carried), "carried_out": len(passed) if carries else 0}
        counts[f"filter {len(patterns) - 1}"] = last
        trace.trained.append(None if carries else passed[:batch_size])
        trace.counts.append(counts)
        trace.cursors.append(cursor)
        carried = passed if carries else []
    return trace


@settings(max_examples=30, deadline=None)
@given(st.lists(PATTERN, min_size=1, max_size=2), st.integers(1, 3), st.integers(1, 3), POLICY, st.integers(0, 2))
def test_every_group_goes_somewhere_and_none_twice(
    patterns: list[tuple[bool, ...]], batch_size: int, max_pulls: int, policy: str, cut: int
) -> None:
    program = program_of(patterns, batch_size, max_pulls, policy)
    trace = run(program, 3)
    wanted = expected(patterns, batch_size, max_pulls, policy, 3)
    assert (trace.trained, trace.counts, trace.cursors, trace.failed) == (
        wanted.trained,
        wanted.counts,
        wanted.cursors,
        wanted.failed,
    )
    for counts in trace.counts:
        labels = list(counts)
        for before, after in itertools.pairwise(labels):
            assert counts[before]["consumed"] == counts[after]["emitted"]
        for count in counts.values():
            came = count["emitted"] + count.get("carried_in", 0)
            assert came == count["dropped"] + count["consumed"] + count["surplus"] + count.get("carried_out", 0)
    trained = [p for of_iteration in trace.trained for p in of_iteration or []]
    assert len(set(trained)) == len(trained)
    # What one iteration carries out, the next one carries in: also from a checkpoint.
    if policy == "carry_over":
        rest = run(
            program_of(patterns, batch_size, max_pulls, policy), 3, cut + 1, trace.cursors[cut], trace.carried[cut]
        )
        assert rest.trained == trace.trained[cut + 1 :] and rest.counts == trace.counts[cut + 1 :]
        assert rest.failed == trace.failed and len(rest.carried) == len(trace.carried[cut + 1 :])
        for a, b in zip(rest.carried, trace.carried[cut + 1 :], strict=True):
            assert pickle.loads(a) == pickle.loads(b)


# -- in runs ---------------------------------------------------------------------------------------------------------


def two_filters(
    policy: Any, trained: list[Rollouts] | None = None, *, accepted: tuple[bool, ...] = (True, False)
) -> RLFlow:
    """Of the prompts 0, 1, 2, … the first filter takes two of three, the second one every other."""
    rollouts = sample(source(Prompts, name="prompts", batch_size=2))
    some = Accept((True, True, False), label="first", on_exhausted=policy, max_pulls=2)(rollouts)
    rewards = score(rollouts, accepted=accepted)
    kept = DropUniformGroups(label="second", on_exhausted=policy, max_pulls=2)(some, rewards)
    return RLFlow.from_outputs(train.options(label="train")(kept, into=trained))


def test_a_run_stopped_in_the_middle_of_a_carry_over_goes_on(tmp_path: Path) -> None:
    def go(name: str, steps: int, **options: Any) -> list[list[int]]:
        trained: list[Rollouts] = []
        quick_run(two_filters("carry_over", trained), steps, tmp_path / name, DATA, **options)
        return [r.prompt_id.tolist()[::GROUP_SIZE] for r in trained]

    # Prompts 0, 4, 6, 10, 12, … pass both. Four prompts an iteration: 0 | 4, 6 | 10 | 12 …
    assert go("whole", 6) == [[0, 4], [6, 10], [12, 16]]
    steps = training(tmp_path / "whole")
    assert [row["second/groups_carried_out"] for row in steps] == [1, 0, 1, 0, 1, 0]
    assert [row["second/groups_carried_in"] for row in steps] == [0, 1, 0, 1, 0, 1]
    for cut in (1, 2, 3):
        go(f"cut {cut}", cut)
        go(f"cut {cut}", 6, resume=True)
        assert rows(tmp_path / f"cut {cut}") == rows(tmp_path / "whole")


def test_nothing_came_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting does what it says, also where no group at all is left."""
    nothing = (False,)
    trained: list[Rollouts] = []
    result = quick_run(two_filters("train_short", trained, accepted=nothing), 2, tmp_path / "short", DATA)
    assert [r.num_rows for r in trained] == [0, 0]
    for row in training(result):
        assert (row["second/acceptance"], row["second/groups_consumed"], row["second/pulls"]) == (0.0, 0, 2)
    trained = []
    result = quick_run(two_filters("carry_over", trained, accepted=nothing), 2, tmp_path / "carry", DATA, progress=True)
    assert trained == [] and "Step 2: too few groups passed the filter" in capsys.readouterr().out
    assert [row["second/groups_carried_out"] for row in training(result)] == [0, 0]
    with pytest.raises(ExhaustedError, match=r"second let 0 of 2 groups through in 2 pulls"):
        quick_run(two_filters("fail", accepted=nothing), 1, tmp_path / "fail", DATA)
