"""Runs, kills and resumes a tiny PPO run many times: `python -m tests.laws.resume_scenarios FOLDER`.

Heavy imports are paid once: each run is a fork of this process, which itself never computes anything, so that no thread of
torch exists when it forks. Prints one JSON object: by scenario, how the killed process and the resumed one ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_STEPS = 5

#: By name: (what is wrapped, at which call of it the process is killed, whether the call is done first).
#: The run takes 5 steps with a checkpoint after each. A step draws 3 prompts; an epoch has 4: it ends within steps 2 and 3.
SCENARIOS: dict[str, tuple[str, int, bool]] = {
    "mid-generation, step 2": ("forward while generating", 10, False),
    "mid-generation, step 3": ("forward while generating", 16, True),
    "mid-generation, last step": ("forward while generating", 30, False),
    "before the optimiser, step 2": ("optimizer.step", 7, False),
    "after the optimiser, step 2": ("optimizer.step", 7, True),
    "mid-optimiser, step 2": ("half of optimizer.step", 8, True),
    "mid-optimiser of the critic, step 2": ("half of optimizer.step", 10, True),
    "mid-optimiser, step 4": ("half of optimizer.step", 18, True),
    "mid-checkpoint, first file, step 2": ("torch.save", 4, False),
    "mid-checkpoint, later file, step 2": ("torch.save", 5, True),
    "mid-checkpoint, last step": ("torch.save", 13, True),
    "between write and rename, step 2": ("checkpoint rename", 2, False),
    "between rename and what follows, step 2": ("checkpoint rename", 2, True),
    "between write and rename, last step": ("checkpoint rename", 5, False),
    "while old checkpoints are deleted": ("rmtree", 6, False),
    "before the metrics are replaced": ("metrics replace", 3, False),
    "after the metrics are replaced": ("metrics replace", 3, True),
    "epoch boundary, before its draw": ("draw", 3, False),
    "epoch boundary, after its draw": ("draw", 3, True),
    "in the reward, step 3": ("reward", 3, False),
}


def kill_at(point: str, number: int, after: bool) -> None:
    """Wrap the point so that this process is killed at its call of this number."""
    import shutil

    import torch

    from flowrl.runtime import checkpoint
    from flowrl.runtime.engines.transformers import TransformersEngine
    from flowrl.runtime.local import LocalRuntime

    calls = 0

    def deadly(function: Callable[..., Any], counts: Callable[..., bool] = lambda *a, **k: True) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += counts(*args, **kwargs)
            doomed = calls == number and counts(*args, **kwargs)
            if doomed and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if doomed:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    if point == "forward while generating":
        generating = False
        generate = TransformersEngine.generate

        def flagged(*args: Any, **kwargs: Any) -> Any:
            nonlocal generating
            generating = True
            try:
                return generate(*args, **kwargs)
            finally:
                generating = False

        TransformersEngine.generate = flagged  # type: ignore[method-assign]
        from transformers import LlamaModel

        LlamaModel.forward = deadly(LlamaModel.forward, lambda *a, **k: generating)  # type: ignore[method-assign]
    elif point == "optimizer.step":
        torch.optim.AdamW.step = deadly(torch.optim.AdamW.step)  # type: ignore[method-assign]
    elif point == "half of optimizer.step":
        step = torch.optim.AdamW.step

        def half(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                for group in self.param_groups:
                    group["params"] = group["params"][: len(group["params"]) // 2]
                step(self, *args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *args, **kwargs)

        torch.optim.AdamW.step = half  # type: ignore[method-assign]
    elif point == "torch.save":
        torch.save = deadly(torch.save)
    elif point == "checkpoint rename":
        is_checkpoint = lambda a, b: ".step-" in str(a) and str(a).endswith(".writing")  # noqa: E731
        checkpoint.os.rename = deadly(os.rename, is_checkpoint)  # type: ignore[assignment]
    elif point == "rmtree":
        shutil.rmtree = deadly(shutil.rmtree)
    elif point == "metrics replace":
        os.replace = deadly(os.replace, lambda a, b: str(b).endswith("metrics.parquet"))
    elif point == "draw":
        LocalRuntime.draw = deadly(LocalRuntime.draw)  # type: ignore[method-assign]
    elif point == "reward":
        import tests.flows

        tests.flows.share_of_vowels = deadly(tests.flows.share_of_vowels)
        calls = -2 * 6  # six rows a step: the first row of step 3 is the one
        calls += number - 1
    else:
        raise ValueError(point)


def train(out: Path, *, resume: bool) -> None:
    """The run itself."""
    import torch

    import flowrl
    from tests.flows import prompts, tiny_ppo

    torch.set_num_threads(1)
    flowrl.run(tiny_ppo(), prompts(4), NUM_STEPS, out=out, resume=resume, seed=3, checkpoint_every=1, progress=False)


def fork(body: Callable[[], None], log: Path) -> int:
    """Run the body in a fork; its wait status."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        body()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path) -> None:
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import flowrl.runtime.engines.transformers
    import flowrl.runtime.local  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, int]] = {}
    reference = fork(lambda: train(folder / "reference", resume=False), folder / "reference.log")
    results["reference"] = {"exit": wait(reference)}

    def killed_then_resumed(name: str) -> None:
        out = folder / name.replace(" ", "_").replace(",", "")
        log = out.with_suffix(".log")
        doomed = fork(lambda: (kill_at(*SCENARIOS[name]), train(out, resume=False))[-1], log)
        killed = wait(doomed)
        resumed = wait(fork(lambda: train(out, resume=True), log))
        out.with_suffix(".json").write_text(json.dumps({"killed": killed, "resumed": resumed}))

    names = list(SCENARIOS)
    for pair in zip(names[::2], [*names[1::2], None], strict=False):  # two at a time
        pids = [fork(lambda n=n: killed_then_resumed(n), folder / "scenarios.log") for n in pair if n]  # type: ignore[misc]
        for pid in pids:
            wait(pid)
    for name in names:
        file = (folder / name.replace(" ", "_").replace(",", "")).with_suffix(".json")
        results[name] = json.loads(file.read_text()) if file.exists() else {"killed": 1, "resumed": 1}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
