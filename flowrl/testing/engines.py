"""Try an engine on everything that the protocol promises; see ``docs/engines.md``.

The checks are the same for every engine and for every layout over ranks: what they expect is what the plain HuggingFace
module computes, row by row, and what the plain optimiser makes of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.testing import (
    engine_checks_sampling,
    engine_checks_scoring,
    engine_checks_training,
    engine_checks_weights,
)
from flowrl.testing.engine_bench import ABILITIES, CHECKS, Bench, EngineCheck, EngineError, MakeEngine

if TYPE_CHECKING:
    from flowrl.runtime.ranks import Ranks

__all__ = [
    "ABILITIES",
    "Bench",
    "EngineCheck",
    "EngineError",
    "MakeEngine",
    "Outcome",
    "bench",
    "check_engine",
    "engine_checks",
    "run_checks",
]

#: Where checks are defined; importing them is what lists them.
MODULES = (engine_checks_sampling, engine_checks_scoring, engine_checks_training, engine_checks_weights)


@dataclass(frozen=True)
class Outcome:
    """What came of one check: ``error`` is None where the promise is kept."""

    name: str
    error: Exception | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.name}: kept"
        return f"{self.name}: {type(self.error).__name__}: {self.error}"


def engine_checks(abilities: Iterable[str] = ABILITIES) -> tuple[EngineCheck, ...]:
    """The checks of an engine that can do this much.

    Example::

        @pytest.mark.parametrize("check", engine_checks(), ids=lambda check: check.name)
    """
    able = set(abilities)
    unknown = sorted(able - set(ABILITIES))
    if unknown:
        raise ValueError(f"Unknown abilities {unknown}; expected some of {ABILITIES}")
    return tuple(c for c in CHECKS if c.needs <= able)


@contextmanager
def bench(
    make_engine: MakeEngine,
    folder: Path,
    *,
    tolerance: float = 1e-5,
    tiny: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Iterator[Bench]:
    """A place to run checks at one by one: engines that change nothing are opened once.

    Args:
        make_engine: ``make_engine(model, micro_batch_tokens=…)`` opens the engine. ``model.kind`` is "policy", "value" or
            "reward", its source a HuggingFace folder.
        folder: scratch space, which all ranks see.
        tolerance: largest difference from the plain float32 model, relative to the largest number where that is above 1.
        tiny: settings of :func:`flowrl.tiny.tiny_model` that differ.
        ranks: of the run, for an engine over several.
    """
    from flowrl.runtime.ranks import ONE_RANK

    made = Bench(make_engine, folder, tolerance, dict(tiny or {}), ranks or ONE_RANK)
    try:
        yield made
    finally:
        made.done()


def run_checks(
    make_engine: MakeEngine,
    folder: Path,
    *,
    abilities: Iterable[str] = ABILITIES,
    only: Iterable[str] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Run all checks that an engine of these abilities must pass, also after one has failed.

    Args:
        only: names of checks; None runs all.
        options: of :func:`bench`.
    """
    wanted = None if only is None else set(only)
    chosen = [c for c in engine_checks(abilities) if wanted is None or c.name in wanted]
    with bench(make_engine, folder, **options) as place:
        return [Outcome(c.name, place.run(c.work)) for c in chosen]


def check_engine(make_engine: MakeEngine, folder: Path, **options: Any) -> None:
    """Try an engine on everything; options are those of :func:`run_checks`.

    Raises:
        EngineError: it breaks a promise; the message has all that are broken.

    Example::

        def make_engine(model: Model, *, micro_batch_tokens: int) -> Engine:
            return MyEngine(model, micro_batch_tokens)

        def test_my_engine(tmp_path: Path) -> None:
            check_engine(make_engine, tmp_path)
    """
    outcomes = run_checks(make_engine, folder, **options)
    broken = [o for o in outcomes if o.error is not None]
    if broken:
        raise EngineError(
            f"{len(broken)} of {len(outcomes)} promises of the engine protocol are broken:\n"
            + "\n".join(f"- {o}" for o in broken)
        ) from broken[0].error
