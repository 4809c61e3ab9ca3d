"""What surrounds a node while it runs: the step, the call's label, the bound engines, and the randomness of each row.

Randomness is counter-based: (seed, call label, iteration, pull, prompt_id, index in group, turn) decides, so neither
placement nor completion order changes a draw.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowrl.errors import FlowError

if TYPE_CHECKING:
    from flowrl.compiler.strategy import Strategy
    from flowrl.models import DerivedModel, Model, State
    from flowrl.runtime.engines.base import Engine
    from flowrl.runtime.ranks import Ranks


@dataclass
class Bindings:
    """Which engine holds each Model, the value of each State, and the opened resources of each node.

    The runtime makes one per run. Outside a run, one lives for the process: it is what makes
    ``Rollout(actor)(prompts)`` work in a Python shell.

    Args:
        open_engine: makes the engine of a Model at first use.
        engines: by Model, its engine.
        states: by State, its value where one was set.
        resources: by id of a node, the node and what its ``setup`` returned.
    """

    open_engine: Callable[[Model, Bindings], Engine]
    engines: dict[Model, Engine] = field(default_factory=dict)
    states: dict[State, Any] = field(default_factory=dict)
    resources: dict[Any, Any] = field(default_factory=dict)
    #: The plan's token budget of one forward pass in training and scoring.
    micro_batch_tokens: int = 4096
    #: The plan's strategy of each Model, by name.
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    #: This process among the ranks of the run; None for a run of one.
    ranks: Ranks | None = None
    #: The call that runs on this rank alone, where there are others: the engines are all ranks'.
    alone: str = ""

    def engine(self, model: Model) -> Engine:
        """The engine that holds this Model, opened at first use.

        Raises:
            FlowError: a call that holds no Model asks, of a run of several ranks: the others would not come.
        """
        if self.alone:
            raise FlowError(
                f"{self.alone} uses {model!r}, which is no setting of its node",
                expected="a node that holds the Models that it uses: it then runs on all ranks, and not on one alone",
                received="a Model from elsewhere (a global variable, a closure, an attribute of a function)",
                do="give the node a field for the Model, and use that",
            )
        if model not in self.engines:
            self.engines[model] = self.open_engine(model, self)
        return self.engines[model]


@dataclass(frozen=True)
class StepContext:
    """Where in a run a node is called. ``pull`` counts the refills of a filter within one iteration."""

    seed: int = 0
    iteration: int = 0
    pull: int = 0
    label: str = ""
    #: Counts of calls by node class: unlabelled eager calls get the labels that recording would give.
    counts: dict[str, int] = field(default_factory=dict, compare=False)
    #: What the running call may write: None outside of a call, where anybody may.
    writes: tuple[Any, ...] | None = field(default=None, compare=False)
    #: Receives what a node reports about its own work (metrics by name), or None when nobody listens.
    report: Callable[[str, float], None] | None = field(default=None, compare=False)
    #: Receives (prompt_id, sample_id) of the rows to blame when an optimiser step is skipped.
    report_nonfinite: Callable[[Sequence[tuple[int, int]]], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63):
            raise FlowError("The seed cannot be used", expected="an integer of 64 bits", received=repr(self.seed))

    def key(self, prompt_id: int, index_in_group: int = 0, turn: int = 0) -> int:
        """The 128-bit key of one row's random stream."""
        return random_key(self.seed, self.label, self.iteration, self.pull, prompt_id, index_in_group, turn)


_current_step: ContextVar[StepContext | None] = ContextVar("flowrl_step", default=None)
_current_bindings: ContextVar[Bindings | None] = ContextVar("flowrl_bindings", default=None)
_process_bindings: list[Bindings] = []


def random_key(seed: int, label: str, *counters: int) -> int:
    """A 128-bit key from a seed, a label and counters: equal inputs, equal key, on every machine."""
    text = label.encode()
    packed = struct.pack(f"<q I {len(text)}s {len(counters)}q", seed, len(text), text, *counters)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=16).digest(), "little")


def current_step() -> StepContext:
    """The step in which the caller runs; seed 0, iteration 0 outside of any."""
    return _current_step.get() or StepContext()


def current_step_or_none() -> StepContext | None:
    """The step that somebody supplied, if any."""
    return _current_step.get()


def seed_call(label: str) -> None:
    """Seed the global generators for one call, so that code which draws from them is reproducible and resumable too."""
    import random

    import numpy as np
    import torch

    here = current_step()
    key = random_key(here.seed, label, here.iteration, here.pull)
    random.seed(key)
    np.random.seed(key % (1 << 32))
    torch.manual_seed(key % (1 << 63))


def follow_writers(models: Iterable[DerivedModel]) -> None:
    """Let Snapshots and Emas follow their base: what the derived writers do after the base's writer."""
    from flowrl.runtime.worker import follow

    bindings = current_bindings()
    for model in models:
        follow(model, bindings)


def current_bindings() -> Bindings:
    """The engines bound here: the run's, or the process's own outside of a run."""
    bindings = _current_bindings.get()
    if bindings is not None:
        return bindings
    if not _process_bindings:
        from flowrl.runtime.worker import open_engine  # the runtime is loaded only when something runs

        _process_bindings.append(Bindings(open_engine))
    return _process_bindings[0]


@contextlib.contextmanager
def step(seed: int = 0, iteration: int = 0, *, pull: int = 0) -> Iterator[StepContext]:
    """Supply randomness to nodes that are called by hand.

    Example::

        with flowrl.step(seed=1, iteration=0):
            rollouts = Rollout(actor, group_size=4)(prompts)
    """
    context = StepContext(seed=seed, iteration=iteration, pull=pull)
    with use_step(context):
        yield context


@contextlib.contextmanager
def use_step(context: StepContext) -> Iterator[None]:
    token = _current_step.set(context)
    try:
        yield
    finally:
        _current_step.reset(token)


@contextlib.contextmanager
def use_label(label: str) -> Iterator[None]:
    """Run the body as the call of this label."""
    with use_step(replace(current_step(), label=label)):
        yield


@contextlib.contextmanager
def use_bindings(bindings: Bindings) -> Iterator[None]:
    token = _current_bindings.set(bindings)
    try:
        yield
    finally:
        _current_bindings.reset(token)


def report(name: str, value: float) -> None:
    """Report a metric of the running call, under its label. Free when nobody listens."""
    listener = current_step().report
    if listener is not None:
        listener(name, value)


def report_nonfinite(rows: Sequence[tuple[int, int]]) -> None:
    """Report the rows that made an optimiser step non-finite."""
    listener = current_step().report_nonfinite
    if listener is not None:
        listener(rows)
