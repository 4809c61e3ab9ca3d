"""Plans that ranks which all run every call cannot run."""

from __future__ import annotations

from flowrl.compiler.plan import Program
from flowrl.errors import UnsupportedError


def refuse_staleness(program: Program) -> None:
    """This runtime runs every reader at the version of its iteration.

    Raises:
        UnsupportedError: a reader asks for ``max_staleness`` above 0.
    """
    stale = [e for e in program.plan.weight_edges if e.max_staleness > 0]
    if stale:
        raise UnsupportedError(
            f"{stale[0].reader} asks for max_staleness={stale[0].max_staleness}",
            expected="max_staleness=0 on the local runtime, which runs one iteration after the other",
            received=stale[0].max_staleness,
            do="leave max_staleness out",
        )


def refuse_meshes(program: Program) -> None:
    """Every rank of this runtime runs every call, and holds each Model in one layout.

    Raises:
        UnsupportedError: the plan asks for something else.
    """
    problems = program.plan.not_everywhere()
    if problems:
        raise UnsupportedError(
            "This plan is for a runtime with a mesh a call: " + "; ".join(problems),
            expected="all calls on all devices, each Model in one layout, on the local and the spmd runtime",
            received=f"a plan for {program.plan.num_devices} × {program.plan.device}",
            do='compile(flow, cluster, strategy="auto", runtime="spmd")',
        )
