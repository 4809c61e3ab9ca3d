"""Is the estimate of a step right on this machine? Calibrate, predict a step of GRPO on the quickstart's model, run it, compare.

``python benchmarks/predict_quickstart.py [tiny|smollm2]`` measures this machine with the code of ``flowrl calibrate``, predicts
each unit of the step from its rows and their mean lengths, runs some steps, and prints both. As a test it takes the tiny model:
``pytest benchmarks/predict_quickstart.py``. One thread: processes that share the cores would change what a thread does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.calibrate import calibrate
from flowrl.compiler.estimate import Estimator, Precision
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.model_architecture import architecture_of
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.work import Work

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

#: Of the model, how much is sampled: prompts of a step, responses to each, tokens of a response.
SIZES = {"tiny": (8, 8, 32), "smollm2": (8, 8, 12)}


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step, and of its units by label: what was predicted, and the median of what was measured."""

    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def error(self) -> float:
        """Of the whole step, relative to the measured one."""
        return sum(self.predicted.values()) / sum(self.measured.values()) - 1

    def __str__(self) -> str:
        lines = [f"{'':22} {'predicted':>10} {'measured':>10}"]
        for label, measured in self.measured.items():
            lines.append(f"{label:22} {self.predicted[label]:9.4f}s {measured:9.4f}s")
        return "\n".join([*lines, f"whole step: {self.error:+.0%}"])


def compare(name: str, num_steps: int) -> Comparison:
    """Calibrate with a model, then predict and run a step of generating, scoring with the reference, and training."""
    from common import load_model, next_digit, share_of_digits, sums  # pyright: ignore[reportMissingImports]

    calibration = calibrate(name, with_links=False)
    num_prompts, group, new = SIZES[name]
    actor = load_model(name)
    never = (1 << 30,)  # nothing stops a response early: its length is known before
    rollout = flowrl.Rollout(actor, group_size=group, sampling=flowrl.Sampling(new, stop_token_ids=never))
    prompts = flowrl.source(flowrl.Prompts, name="prompts", batch_size=num_prompts)
    rollouts = rollout(prompts)
    rewards = flowrl.FunctionReward(share_of_digits, isolate=False)(rollouts)
    advantages = flowrl.GroupAdvantage()(rollouts, rewards)
    old = flowrl.PolicyLogprobs(actor)(rollouts)
    reference = flowrl.ReferenceLogprobs(actor.frozen())(rollouts)
    loss = flowrl.GRPOLoss(kl_coef=0.01)(rollouts, advantages, old, reference)
    flow = flowrl.RLFlow.from_outputs(flowrl.Updater(actor, optimizer=flowrl.AdamW(1e-6))(loss))
    data = next_digit(200) if name == "tiny" else sums(200)
    with tempfile.TemporaryDirectory() as folder:
        result = flowrl.run(flow, data, num_steps, out=Path(folder) / "run", runtime="local")
        rows = result.metrics.to_pylist()[1:]  # the first opens engines and probes them
    units = {"Rollout#0": "generate", "ReferenceLogprobs#0": "score", "Updater#0": "train"}
    measured = {label: statistics.median(row[f"time/{label}"] for row in rows) for label in units}
    prompt = statistics.fmean(row["length/prompt_mean"] for row in rows)
    architecture = architecture_of(actor)
    estimator = Estimator(flowrl.Cluster("cpu"), calibration)
    predicted = {}
    for label, kind in units.items():
        work: Any = Work(kind, num_prompts * group, prompt, float(new), float(new), group_size=group)  # type: ignore[arg-type]
        estimate = estimator.estimate(
            architecture, work, Mesh(0, 0, 1), Parallelism(), precision=Precision.of_model(actor, architecture)
        )
        predicted[label] = estimate.seconds
    return Comparison(predicted, measured)


@pytest.mark.slow
def test_the_predicted_step_of_the_tiny_model_is_within_30_percent(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare("tiny", num_steps=12)
    with capsys.disabled():
        print(f"\n{found}")
    assert abs(found.error) < 0.3


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    print(compare(model, num_steps=12 if model == "tiny" else 4))
