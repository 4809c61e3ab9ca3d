"""Measures, and writes docs/benchmarks.md with its pictures: ``.venv/bin/python -m benchmarks.placement_report``.

``--only standard,growth,methods,published`` measures these sections alone and keeps the others as they were;
``--render`` measures nothing. The methods take ReaL's ``--mcmc-seconds`` for each of eight problems: 16 minutes of 120 s.
"""

from __future__ import annotations

import argparse
import platform
from typing import TypeVar

from benchmarks.measure import compared, planned
from benchmarks.problems import judged, largest, ppo, standard
from benchmarks.published import generation_by_tensor, ordering
from benchmarks.render import write
from benchmarks.results import Results
from benchmarks.scales import COMPARED, GROWTH_MODELS, GROWTH_NODES, PUBLISHED
from flowrl.machine import Machine

Row = TypeVar("Row")
SECTIONS = ("standard", "growth", "methods", "published")


def main() -> None:
    """Measures what is asked for, keeps the rest, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to measure, with commas between")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page anew")
    parser.add_argument("--mcmc-seconds", type=float, default=120.0, help="of ReaL's chain for each problem")
    given = parser.parse_args()
    wanted = [] if given.render else given.only.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}; expected some of {', '.join(SECTIONS)}")
    results = Results.load()
    for name in wanted:
        {"standard": _standard, "growth": _growth, "methods": _methods, "published": _published}[name](results, given)
        results.machine = _machine()
        results.save()
    write(results)


def _standard(results: Results, given: argparse.Namespace) -> None:
    results.standard = [_shown(planned(case)) for case in standard()]
    results.largest = [_shown(planned(largest()))]


def _growth(results: Results, given: argparse.Namespace) -> None:
    results.devices = [_shown(planned(ppo("13B", nodes))) for nodes in GROWTH_NODES]
    results.models = [_shown(planned(judged(models))) for models in GROWTH_MODELS]


def _methods(results: Results, given: argparse.Namespace) -> None:
    results.mcmc_seconds = given.mcmc_seconds
    results.methods = []
    for size, nodes in COMPARED:
        for row in compared(ppo(size, nodes), given.mcmc_seconds):
            results.methods.append(_shown(row))


def _published(results: Results, given: argparse.Namespace) -> None:
    results.orderings = [_shown(ordering(size, gpus)) for size, gpus in PUBLISHED]
    results.generation = {size: _shown(list(generation_by_tensor(size).items())) for size in ("7B", "13B")}


def _shown(row: Row) -> Row:
    """The same, printed as soon as it is there."""
    print(row, flush=True)
    return row


def _machine() -> str:
    here = Machine.here()
    return f"one core of {here.cpu}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
