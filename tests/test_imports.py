"""Imports go one way, `import flowrl` is light, and the public names are pinned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowrl

PACKAGE = Path(flowrl.__file__).parent

#: From the bottom up: a module imports only from its own level and those before it.
LEVELS: list[tuple[str, ...]] = [
    (
        "errors",
        "ragged",
        "columns",
        "alignment",
        "spans",
        "origins",
        "batches",
        "adapters",
        "models",
        "context",
        "stable_text",
        "machine",
        "calibration",
        "tiny",
    ),
    ("annotations", "graph"),
    ("nodes", "functional"),
    ("testing",),
    ("weight_edges", "same_rows", "flow", "short_form"),
    ("violations", "checks"),
    ("compiler",),
    (
        "preflight",
        "preparation",
        "ending",
        "run",
        "recipes",
        "recipe_flags",
        "plan_command",
        "diagnostics",
        "doctor",
        "calibrate",
        "cli",
        "__main__",
    ),
]
LEAVES = ("display", "drawing", "data", "serve", "runtime")
HEAVY = ("torch", "transformers", "vllm", "megatron", "ray", "numpy", "pyarrow", "matplotlib", "tensorboard", "IPython")


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__") or "__init__"] = path
    return found


def imports(path: Path, *, everywhere: bool = False) -> Iterator[str]:
    """Full names that a module imports: at module level, outside of ``if TYPE_CHECKING``; or anywhere but there."""

    def walk(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse)
            elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for block in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, block, []))
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body)

    return walk(ast.parse(path.read_text()).body)


def own(name: str) -> str | None:
    """The top-level part of ours that a full name is in."""
    if name.split(".")[0] != "flowrl":
        return None
    return name.split(".")[1] if "." in name else "__init__"


def level(part: str) -> int:
    return next((i for i, parts in enumerate(LEVELS) if part in parts), -1)


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_level_imports_go_one_way(name: str) -> None:
    part = name.split(".")[0]
    mine = level(part)
    for imported in imports(modules()[name]):
        other = own(imported)
        if other is None or part in LEAVES or part == "__init__":
            continue
        assert mine >= 0, f"{name} is on no level: add it to LEVELS"
        theirs = level(other)
        if theirs >= 0:
            assert theirs <= mine, f"{name} imports {imported}, which is above it"
        elif other != part:
            drawn = other in ("display", "drawing")
            assert (drawn and part == "compiler") or part in LEVELS[-1], f"{name} imports {imported}"


@pytest.mark.parametrize("name", [n for n in sorted(modules()) if n.startswith("runtime.")])
def test_the_runtime_runs_programs_and_knows_no_flow(name: str) -> None:
    for imported in imports(modules()[name], everywhere=True):
        if own(imported) in ("flow", "short_form", "checks", "weight_edges", "run", "recipes", "cli", "compiler"):
            plain = ("flowrl.compiler.plan", "flowrl.compiler.strategy")
            assert imported.startswith(plain), f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_heavy_libraries_only_in_the_files_that_are_loaded_for_them(name: str) -> None:
    if name.startswith(("runtime.engines.transformers", "runtime.ranks", "runtime.pickling", "runtime.tensor_files")):
        return
    for imported in imports(modules()[name]):
        assert imported.split(".")[0] not in set(HEAVY) - {"numpy"}, f"{name} imports {imported} at module level"


def test_import_flowrl_is_light() -> None:
    code = f"import sys, flowrl; print([m for m in {HEAVY} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_building_and_checking_a_flow_needs_no_torch() -> None:
    code = """
import sys
from flowrl import *
actor = Model("m")
flow = RLFlow(rollout=Rollout(actor, group_size=4), reward=FunctionReward(len), advantage_estimator=GroupAdvantage(),
              policy_updater=GRPOUpdater(kl_coef=0.1))
assert flow.check().ok
flow.graph, flow._repr_mimebundle_(), compile(flow, Cluster("cpu")).plan.to_json()
print([m for m in ("torch", "transformers", "pyarrow") if m in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_public_names() -> None:
    assert sorted(flowrl.__all__) == sorted(set(flowrl.__all__))
    assert all(hasattr(flowrl, name) for name in flowrl.__all__)
    assert set(flowrl.__all__) == {
        # models
        "Model", "ValueModel", "RewardModel", "Frozen", "Snapshot", "Ema", "ValueHead", "State",
        # batches
        "Batch", "Prompts", "Sequences", "Rollouts", "Demonstrations", "Preferences", "Rewards", "Values",
        "OldLogprobs", "RefLogprobs", "Advantages", "TrainStats", "Ragged", "Spans", "SpanKind", "FinishReason",
        "LoRA", "LogprobOrigin", "Feedback", "ImportanceWeights", "TopLogprobs",
        # nodes: the base, and how to write one's own
        "Node", "node", "Loss", "TokenLoss", "RowLoss", "PairLoss", "Pairs", "PolicyLoss",
        "PolicyTokens", "LossTerm", "Current", "loss",
        "Filter", "RowAdvantage", "FunctionAdvantage", "ScoredRows", "rewards_like",
        # from the source to rewards, filters, scores
        "Source", "source", "Rollout", "Sampling", "Concat", "FunctionReward", "RewardModelScore", "WeightedSum",
        "KLPenalty", "OverlongPenalty", "LengthPenalty", "GroupLengthReward", "ClipReward", "RunningNormalization",
        "MaskTruncated", "DropTruncated", "DropUniformGroups", "KeepAccuracyBand", "PolicyLogprobs",
        "ReferenceLogprobs", "Critic", "FixedKL", "AdaptiveKL", "ImportanceCorrection",
        "TruncatedImportance", "IcePop", "RejectionMask",
        # advantages
        "GAE", "GroupAdvantage", "NormalizedAdvantage", "OPOAdvantage", "GPGAdvantage", "PassKAdvantage",
        "GDPOAdvantage", "ReinforcePlusPlus", "ReMaxAdvantage", "OptimalTokenBaseline",
        # losses
        "PPOLoss", "GRPOLoss", "DecoupledPPOLoss", "GSPOLoss", "GMPOLoss", "SAPOLoss", "CISPOLoss", "DROLoss",
        "DPPOLoss", "ReinforceLoss", "GPGLoss", "ClipCovLoss", "KLCovLoss", "FullKLLoss", "ValueLoss", "SFTLoss",
        "DistillLoss", "TopKDistillLoss", "TeacherTopK", "DPOLoss", "SimPOLoss", "ORPOLoss", "KTOLoss",
        "BradleyTerryLoss",
        # pairs, labels and demonstrations from rollouts; writers
        "Judge", "RewardPairs", "BestOfN", "ToFeedback", "MismatchedCompletions", "Updater", "AdamW", "PPOUpdater",
        "GRPOUpdater", "PolicyUpdater", "ValueUpdater", "SFTUpdater",
        # flow, plan, run
        "RLFlow", "Ref", "WeightEdge", "Cluster", "Strategy", "Mesh", "Pin", "Lengths",
        "compile", "Plan", "Program", "run", "RunResult", "Evaluation",
        "Experiment", "recipe", "step", "report", "FlowError",
    }  # fmt: skip
