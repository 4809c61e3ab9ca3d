"""Law 4: N steps ≡ k steps, kill, resume, N−k steps, bit for bit, wherever the kill falls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.metrics import read_metrics
from tests.laws.resume_scenarios import NUM_STEPS, SCENARIOS, place

ROOT = Path(__file__).parents[2]

#: Sixty short runs, two at a time; this machine's speed varies.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    return folder, run_scenarios(folder, threads=1)


def run_scenarios(folder: Path, *arguments: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.laws.resume_scenarios", str(folder), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Every metric of every step, times aside."""
    rows = read_metrics(folder).to_pylist()
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Files byte for byte."""
    found = {p for pattern in patterns for p in folder.glob(pattern) if p.is_file()}
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(found)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_and_resumed_equals_undisturbed(name: str, scenarios: tuple[Path, dict[str, Any]]) -> None:
    folder, results = scenarios
    out, reference = place(folder, name), folder / "reference"
    log = out.with_suffix(".log").read_text()
    assert results["reference"]["exit"] == 0, (folder / "reference.log").read_text()
    assert results[name]["killed"] == -signal.SIGKILL, log
    assert results[name]["resumed"] == 0, log

    # The kill fell where the name says.
    kill = SCENARIOS[name]
    witness = json.loads(out.with_suffix(".witness").read_text())
    assert witness["step"] == kill.step
    assert set(kill.inside) <= set(witness["running"]), witness["running"]
    assert witness["checkpoint"] == kill.checkpoint

    rows = comparable(reference)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert comparable(out) == rows
    # Everything else that is left: the newest and the best checkpoint, evaluations, samples. (A zip file of torch holds
    # nothing but its content, so it is equal too.)
    kept = ["checkpoints/**/*", "frozen/**/*", "evaluations/**/*", "samples/*"]
    if kill.point == "export":
        kept.append("export/**/*.safetensors")
    assert contents(out, *kept) == contents(reference, *kept)
    weights = contents(out, "checkpoints/step-000005/models/*/__0_0.distcp")
    assert len(weights) == 4  # actor, critic, Ema, Snapshot
    assert [p.name for p in out.rglob(".*") if p.name not in (".lock", ".metadata")] == []


@pytest.mark.smollm2
def test_a_real_model_on_two_threads(tmp_path: Path) -> None:
    """SmolLM2 in float32: killed in the middle of an optimiser step, resumed, equal bit for bit."""
    ended = run_scenarios(tmp_path, "smollm2", threads=2)
    assert ended == {"reference": 0, "killed": -signal.SIGKILL, "resumed": 0}, (tmp_path / "log").read_text()
    witness = json.loads((tmp_path / "killed.witness").read_text())
    assert witness["step"] == 2 and "train_step" in witness["running"] and witness["checkpoint"] == 1
    rows = comparable(tmp_path / "reference")
    assert len(rows) == 3 and rows[2]["kl"] != 0
    assert comparable(tmp_path / "killed") == rows
    exported = "export/**/*.safetensors"
    assert contents(tmp_path / "killed", exported) == contents(tmp_path / "reference", exported) != {}
