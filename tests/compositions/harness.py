"""Runs one composition twice, line by line and as a Program, and compares the two.

A composition is built by a function, anew for each of the two runs, because live models are trained in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flowrl
from flowrl import Batch, Model, Node, RLFlow, Rollouts
from flowrl.context import Bindings, use_bindings
from flowrl.models import AnyModel, BaseModel
from flowrl.runtime.worker import open_engine

Weights = dict[str, Tensor]


@dataclass
class Composition:
    """A flow with its data.

    Args:
        flow: what is shown.
        data: data sets by source name.
        actors: the live Models that it trains.
        seen: what its :class:`Watch` nodes saw, by name, an entry a step.
    """

    flow: RLFlow
    data: Mapping[str, Any]
    actors: Sequence[Model]
    seen: dict[str, list[Any]] = field(default_factory=dict)


class Watch(Node):
    """Remembers the weights of a Model, as a reader of it: at step i, version i."""

    model: AnyModel
    into: dict[str, list[Any]]

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        weights = {name: tensor.clone() for name, tensor in self.model.bound_engine().weights()}
        self.into.setdefault(self.model.name, []).append(weights)
        return rollouts


@dataclass
class Eager:
    """What ``flow.step`` gave, a step each, and the weights before the first step and after the last."""

    outputs: list[tuple[Any, ...]]
    before: dict[str, Weights]
    after: dict[str, Weights]
    seen: dict[str, list[Any]]


@dataclass
class Ran:
    """What ``flowrl.run`` left behind: a row of metrics a step, and the weights of the live modules after the last."""

    metrics: list[dict[str, Any]]
    after: dict[str, Weights]
    seen: dict[str, list[Any]]


def live_weights(actors: Sequence[Model]) -> dict[str, Weights]:
    """The weights of live modules, by the Model's name."""
    return {a.name: {n: t.detach().clone() for n, t in a.source.state_dict().items()} for a in actors}


def draw(composition: Composition, step: int, seed: int = 0) -> dict[str, Batch]:
    """The rows that the runtime draws in a step (from 0)."""
    sources = composition.flow.sources
    return {n: composition.data[n].rows(step * s.batch_size, s.batch_size, seed) for n, s in sources.items()}


def run_eagerly(composition: Composition, steps: int) -> Eager:
    """``flow.step``, ``steps`` times, with engines of its own."""
    before = live_weights(composition.actors)
    outputs = []
    with use_bindings(Bindings(open_engine)):
        for i in range(steps):
            result = composition.flow.step(draw(composition, i), seed=0, iteration=i)
            outputs.append(result if isinstance(result, tuple) else (result,))
    return Eager(outputs, before, live_weights(composition.actors), composition.seen)


def run_as_program(composition: Composition, steps: int, out: Path) -> Ran:
    """Check, compile and run with the local runtime."""
    report = composition.flow.check()
    assert report.ok, str(report)
    result = flowrl.run(composition.flow, composition.data, steps, out=out, progress=False, export=False)
    assert (result.status, result.steps) == ("finished", steps)
    return Ran(result.metrics.to_pylist(), live_weights(composition.actors), composition.seen)


def run_both(build: Callable[[], Composition], out: Path, steps: int = 3) -> tuple[Eager, Ran]:
    """Run a composition both ways; what holds of every one is asserted here.

    The weights change, and are equal bit for bit in the two runs, and so is every metric of the updaters. The version
    of each Model that is written grows by one a step.
    """
    eager = run_eagerly(build(), steps)
    composition = build()
    ran = run_as_program(composition, steps, out)
    for name, after in eager.after.items():
        assert any(not torch.equal(after[n], eager.before[name][n]) for n in after), f"{name} was not trained"
        for n, tensor in after.items():
            assert torch.equal(tensor, ran.after[name][n]), f"{name}: {n} differs"
    flow = composition.flow
    updaters = [c for c in flow.calls if c.node.kind == "updater"]
    first = next(c for c in flow.execution_order() if c in updaters)
    for call in updaters:
        place = [flow.label(r) for r in flow.outputs].index(flow.label(call))
        written = call.node.writes()[0]
        assert isinstance(written, BaseModel)
        prefix = "" if call is first else f"{written.name}/"
        for i, row in enumerate(ran.metrics):
            stats = eager.outputs[i][place]
            assert stats.policy_version == row[prefix + "policy_version"] == i + 1
            assert stats.num_skipped_steps == 0
            for name, value in stats.metrics.items():
                other = row[prefix + name]
                assert other == value, f"step {i + 1}: {name} is {value} eagerly, {other} as a Program"
    return eager, ran
