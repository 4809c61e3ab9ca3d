"""What a run is asked for, where it stands, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from flowrl.compiler.plan import Program
    from flowrl.runtime.evaluation import EvaluationResult

Status = Literal["finished", "time limit", "interrupted"]


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation as the runtime needs it; see :class:`flowrl.run.Evaluation` for the settings."""

    name: str
    program: Program
    data: Mapping[str, Any]
    every: int
    success_threshold: float = 1.0


@dataclass(frozen=True)
class Settings:
    """What a run is asked for; see :func:`flowrl.run.run` for each."""

    num_steps: int
    seed: int = 0
    checkpoint_every: int | None = 50
    keep_last: int = 2
    keep_best: str | None = None
    async_checkpoints: bool = True
    time_limit: float | None = None
    max_nonfinite_steps: int = 3
    max_empty_steps: int = 20
    dump_steps: tuple[int, ...] = ()
    samples_every: int = 10
    progress: bool = True
    title: str = "flowrl"


@dataclass
class RunState:
    """Where the loop stands; saved in every checkpoint.

    Args:
        step: completed iterations.
        cursors: by source name, the number of the next draw.
        nonfinite_in_a_row: iterations up to now whose optimiser steps were skipped.
        empty_in_a_row: iterations up to now in which an updater had no row to train on.
        best_value: of the metric ``keep_best``, at step ``best_step``.
        carried: what filters carry over to the next iteration: by label, rows.
    """

    step: int = 0
    cursors: dict[str, int] = field(default_factory=dict)
    nonfinite_in_a_row: int = 0
    empty_in_a_row: int = 0
    best_value: float | None = None
    best_step: int | None = None
    carried: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a run ended, after how many steps, and with which evaluations (those before a resume included)."""

    status: Status
    steps: int
    evaluations: tuple[EvaluationResult, ...]
    signal_number: int | None = None
