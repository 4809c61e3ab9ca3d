"""What a baseline found."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.compiler.problem import Choice, Cost


@dataclass(frozen=True)
class Outcome:
    """The best assignment that a method found that fits.

    Args:
        choices: of the units, in their order; None where none fits.
        cost: of them.
        evaluations: assignments that were rated.
        seconds: that it took, on this machine.
        finished: whether it went through all that it wanted to.
    """

    choices: tuple[Choice, ...] | None
    cost: Cost | None
    evaluations: int
    seconds: float
    finished: bool = True

    @property
    def period(self) -> float:
        """Seconds of an iteration, estimated; infinity where nothing fits."""
        return float("inf") if self.cost is None else self.cost.period
