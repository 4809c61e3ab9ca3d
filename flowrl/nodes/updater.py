"""Writers: an Updater trains a Model on loss terms; PPOUpdater and the like are shorthands for one term."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from flowrl import context
from flowrl.batches import Sequences, TrainStats
from flowrl.models import AnyModel, BaseModel, State
from flowrl.nodes.base import Node
from flowrl.nodes.logprobs import scoring_temperature
from flowrl.nodes.loss import LossTerm, TermRows

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.runtime.engines.base import Engine


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with a learning-rate schedule counted in optimiser steps.

    Args:
        learning_rate: the peak.
        warmup_steps: linear from 0 over so many steps.
        schedule: after the warm-up "constant", or "linear" or "cosine" down to ``final_fraction`` of the peak at
            ``total_steps``.
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None
    final_fraction: float = 0.0

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of optimiser step ``step``, counted from 0."""
        import math

        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or not self.total_steps:
            return self.learning_rate
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        shape = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * shape)

    def problems(self) -> list[str]:
        import math

        found = []
        numbers = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay, "eps": self.eps}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                found.append(f"{name} is {value}; expected a finite number, at least 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            found.append(f"betas are {self.betas}; expected two numbers, 0 <= beta < 1")
        if self.warmup_steps < 0:
            found.append(f"warmup_steps is {self.warmup_steps}; expected at least 0")
        if not 0 <= self.final_fraction <= 1:
            found.append(f"final_fraction is {self.final_fraction}; expected 0 to 1")
        if self.schedule not in ("constant", "linear", "cosine"):
            found.append(f"schedule is {self.schedule!r}; expected constant, linear or cosine")
        elif self.schedule != "constant" and (not self.total_steps or self.total_steps < 1):
            found.append(f"schedule is {self.schedule!r} without total_steps; expected the number of optimiser steps")
        return found


class Updater(Node):
    """Train a Model on loss terms: the one writer of its parameters.

    Args:
        model: the Model to write.
        epochs: passes over the batch.
        num_minibatches: optimiser steps a pass; rows are dealt out by a counter-based shuffle.
        optimizer: AdamW with its schedule.
        max_grad_norm: gradients are scaled down to this L2 norm; None leaves them.

    The version of the Model grows by one per call, however many optimiser steps are inside. A step whose loss or
    gradient is not finite is skipped and counted.
    """

    model: AnyModel | None = None
    epochs: int = 1
    num_minibatches: int = 1
    optimizer: AdamW = field(default_factory=AdamW)
    max_grad_norm: float | None = 1.0

    kind: ClassVar[str] = "updater"
    aligns_variadic: ClassVar[bool] = False

    def writes(self) -> tuple[BaseModel | State, ...]:
        return (self.model,) if self.model is not None else ()

    def problems(self) -> Iterable[str]:
        if self.model is None:
            yield "model is missing; expected the Model to train"
        if self.epochs < 1:
            yield f"epochs is {self.epochs}; expected at least 1"
        if self.num_minibatches < 1:
            yield f"num_minibatches is {self.num_minibatches}; expected at least 1"
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            yield f"max_grad_norm is {self.max_grad_norm}; expected more than 0, or None"
        yield from self.optimizer.problems()

    def __call__(self, *terms: LossTerm) -> TrainStats:
        assert self.model is not None
        engine = self.model.bound_engine()
        totals: dict[str, list[float]] = {}
        grad_norms: list[float] = []
        skipped = steps = 0
        result = None
        for epoch in range(self.epochs):
            for rows in zip(*(self._minibatches(term, epoch) for term in terms), strict=True):
                parts = [term.select(index) for term, index in zip(terms, rows, strict=True) if len(index)]
                batch = [term_rows(part, engine) for part in parts]
                if not batch:
                    continue
                result = engine.train_step(batch, self.optimizer, max_grad_norm=self.max_grad_norm)
                steps += 1
                skipped += result.skipped
                if result.skipped:
                    context.report_nonfinite(result.nonfinite_rows)
                    continue
                grad_norms.append(result.grad_norm)
                for name, (total, count) in result.sums.items():
                    pair = totals.setdefault(name, [0.0, 0.0])
                    pair[0] += total
                    pair[1] += count
        engine.complete_version()
        metrics = {name: total / count if count else 0.0 for name, (total, count) in totals.items()}
        if grad_norms:
            metrics["grad_norm"] = sum(grad_norms) / len(grad_norms)
        if result is not None:
            metrics["learning_rate"] = result.learning_rate
        return TrainStats(metrics, engine.policy_version, steps, skipped)

    def _minibatches(self, term: LossTerm, epoch: int) -> list[Tensor]:
        """int64 row indices of each optimiser step of one epoch: as they come for one, else by a counter-based
        shuffle that keeps together what the loss couples."""
        import torch

        from flowrl.functional.grouping import coupled_units

        if self.num_minibatches == 1:
            return [torch.arange(term.num_rows)]
        units = coupled_units(term.sequences, term.loss.couples)
        here = context.current_step()
        generator = torch.Generator().manual_seed(
            context.random_key(here.seed, here.label, here.iteration, here.pull, epoch) % (1 << 63)
        )
        order = torch.randperm(len(units), generator=generator).tolist()
        parts: list[list[int]] = [[] for _ in range(self.num_minibatches)]
        for place, unit in enumerate(order):
            parts[place * self.num_minibatches // max(1, len(order))] += units[unit]
        return [torch.tensor(part, dtype=torch.int64) for part in parts]


@dataclass(frozen=True)
class EngineScorer:
    """Answers the questions of :meth:`flowrl.nodes.loss.Loss.prepare` with an engine's scoring pass."""

    engine: Engine

    def logprobs(self, sequences: Sequences) -> Tensor:
        """float32 ``[num_tokens]``, detached, at the temperature that the responses were sampled at."""
        return self.engine.logprobs(sequences, temperature=scoring_temperature(sequences)).logprobs.values


def term_rows(term: LossTerm, engine: Engine) -> TermRows:
    """The rows of one optimiser step with their constants and their count."""
    loss = term.loss
    return TermRows(term, loss.prepare(EngineScorer(engine), **term.inputs), loss.count(**term.inputs))
