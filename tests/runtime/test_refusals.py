"""Plans that ranks which all run every call refuse, and the layouts that they are given instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import flowrl
from flowrl import Cluster, Strategy, compile
from flowrl.compiler.parallelism import Parallelism
from flowrl.errors import UnsupportedError
from flowrl.runtime.refusals import refuse_meshes
from tests.flows import prompts, tiny_grpo, tiny_ppo


def test_plans_with_a_mesh_a_call_are_refused_with_reasons() -> None:
    program = compile(tiny_ppo(), Cluster("H100", nodes=2, gpus_per_node=1), pin={"Rollout#0": flowrl.Mesh(0, 0, 1)})
    with pytest.raises(UnsupportedError, match=r"not all on all 2 devices.*runtime=\"spmd\""):
        refuse_meshes(program)


def test_stages_and_changing_layouts_are_named() -> None:
    plan = compile(tiny_ppo(), Cluster("cpu", 4), strategy="auto", runtime="spmd").plan
    assert plan.mapping is not None and not plan.not_everywhere()
    (first,) = [u for u in plan.mapping.units if u.kind == "generate"]
    others = [u for u in plan.mapping.units if u is not first]
    same = first.parallelism.tensor
    for changed, said in [
        (Parallelism(2, 1, 2), "cut into pipeline stages"),
        (Parallelism(1, 3 - same), "changes its layout"),
    ]:
        units = (replace(first, parallelism=changed), *others)
        broken = replace(plan, mapping=replace(plan.mapping, units=units))
        assert said in "; ".join(broken.not_everywhere())


def test_stages_are_refused_where_no_engine_has_them() -> None:
    with pytest.raises(
        flowrl.FlowError, match="pipeline_parallel is 2; expected 1: the transformers engine has no stages"
    ):
        compile(tiny_grpo(), Cluster("cpu", 2), strategy=Strategy(pipeline_parallel=2))


def test_one_process_runs_what_the_compiler_chose(tmp_path: Path) -> None:
    """On one device there is nothing to choose: the run is bit for bit the one without."""
    results: dict[str, flowrl.RunResult] = {}
    choices: dict[str, Literal["auto"] | None] = {"auto": "auto", "given": None}
    for name, strategy in choices.items():
        results[name] = flowrl.run(
            tiny_grpo(),
            prompts(),
            1,
            out=tmp_path / name,
            strategy=strategy,
            progress=False,
            report=False,
            export=False,
        )
    a, b = (r.metrics.to_pylist()[-1] for r in results.values())
    assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"]
