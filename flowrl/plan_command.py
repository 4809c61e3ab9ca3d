"""What ``flowrl plan`` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.calibration import Calibration
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.cluster_file import parse_cluster
from flowrl.compiler.compile import EVERYWHERE, compile
from flowrl.compiler.work import Lengths
from flowrl.errors import FlowError


@dataclass(frozen=True)
class PlanAsked:
    """The flags of ``flowrl plan``.

    Args:
        cluster: as :func:`flowrl.compiler.cluster_file.parse_cluster` reads it; None for this machine.
        prompt_tokens, response_tokens, longest_response: see :class:`flowrl.compiler.work.Lengths`.
        calibration: file of rates.
        runtime: what will run the plan.
        as_json: whether to print the plan as JSON.
        html: where to write a page.
        explain: whether to find out what other clusters and workloads would take.
    """

    cluster: str | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    longest_response: float | None = None
    calibration: Path | None = None
    runtime: str | None = None
    as_json: bool = False
    html: Path | None = None
    explain: bool = False


def plan_recipe(experiment: Any, asked: PlanAsked) -> str:
    """The plan of a recipe's training flow, as text.

    Raises:
        FlowError: a flag that cannot be meant, a flow that breaks rules, or one that does not fit.
    """
    if asked.runtime not in (None, "ray", *EVERYWHERE):
        raise FlowError(
            "There is no such runtime to plan for", expected=", ".join(("ray", *EVERYWHERE)), received=asked.runtime
        )
    defaults = Lengths()
    lengths = Lengths(asked.prompt_tokens or defaults.prompt, asked.response_tokens, asked.longest_response)
    program = compile(
        experiment.flow,
        Cluster.detect() if asked.cluster is None else parse_cluster(asked.cluster),
        strategy="auto",
        strategies=experiment.options.get("strategies"),
        lengths=lengths,
        calibration=None if asked.calibration is None else Calibration.load(asked.calibration),
        runtime=asked.runtime,
        what_if=asked.explain,
    )
    plan = program.plan
    if asked.html is not None:
        from flowrl.runtime.atomic import write_atomically

        write_atomically(asked.html, plan.html().encode())
        if not asked.as_json:
            return f"Written to {asked.html}."
    return plan.to_json() if asked.as_json else plan.explain()
