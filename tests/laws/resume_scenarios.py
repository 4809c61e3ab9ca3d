"""Runs, kills and resumes a run many times: `python -m tests.laws.resume_scenarios FOLDER`; with `smollm2` as a second
argument, one kill of a real model's run.

Heavy imports are paid once: each run is a fork of this process, which itself never computes anything, so that no thread of
torch exists when it forks. Every kill leaves a witness: the functions that were running. Prints one JSON object: by
scenario, how the killed process and the resumed one ended.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NUM_STEPS = 5


@dataclass(frozen=True)
class Kill:
    """Where a process is killed.

    Args:
        point: a name in :func:`points`.
        step: the training step in which it is; 0 is before the first, and a step lasts until the next one begins.
        number: at which passage of the point within that step, from 1.
        after: whether the call is done first.
        inside: functions that must be running then, which the witness proves.
        checkpoint: the newest whole checkpoint that must be there then.
        asynchronous: whether checkpoints are written while training goes on.
    """

    point: str
    step: int
    number: int
    after: bool
    inside: tuple[str, ...]
    checkpoint: int
    asynchronous: bool = False


_TRAINING, _SAVING = ("iterate", "train_step"), ("_checkpoint", "write_folder")
SCENARIOS: dict[str, Kill] = {
    "while the frozen reference is written": Kill("torch.save", 0, 1, True, ("save_frozen", "write_folder"), 0),
    "mid-generation, step 1": Kill("forward", 1, 4, False, ("iterate", "generate"), 0),
    "mid-generation, step 2": Kill("forward", 2, 3, False, ("iterate", "generate"), 1),
    "mid-generation, step 3": Kill("forward", 3, 1, True, ("iterate", "generate"), 2),
    "mid-generation, last step": Kill("forward", 5, 4, False, ("iterate", "generate"), 4),
    "in the reward, step 3": Kill("reward", 3, 2, False, ("iterate", "run_here"), 2),
    "mid-backward, step 2": Kill("backward", 2, 2, True, _TRAINING, 1),
    "before the optimiser, step 2": Kill("optimizer", 2, 1, False, _TRAINING, 1),
    "after the optimiser, step 2": Kill("optimizer", 2, 1, True, _TRAINING, 1),
    "mid-optimiser, step 2": Kill("half of optimizer", 2, 2, True, _TRAINING, 1),
    "mid-optimiser, step 4": Kill("half of optimizer", 4, 3, True, _TRAINING, 3),
    "mid-optimiser of the critic, step 2": Kill("half of optimizer", 2, 5, True, _TRAINING, 1),
    "between two writers, step 3": Kill("optimizer", 3, 4, True, _TRAINING, 2),
    "while the Ema follows, step 3": Kill("follow", 3, 2, False, ("iterate", "follow_writers"), 2),
    "mid-checkpoint, while it is put together, step 2": Kill("torch.save", 2, 1, False, ("_checkpoint",), 1),
    "mid-checkpoint, first tensor, step 2": Kill("torch.save", 2, 2, False, _SAVING, 1),
    "mid-checkpoint, later tensor, step 2": Kill("torch.save", 2, 9, True, _SAVING, 1),
    "mid-checkpoint, while files are synced, step 3": Kill("seal", 3, 4, False, _SAVING, 2),
    "mid-checkpoint, last step": Kill("torch.save", 5, 3, True, _SAVING, 4),
    "between write and rename, step 2": Kill("rename", 2, 1, False, _SAVING, 1),
    "between rename and what follows, step 2": Kill("rename", 2, 1, True, _SAVING, 2),
    "between write and rename, last step": Kill("rename", 5, 1, False, _SAVING, 4),
    "before an old checkpoint is deleted": Kill("discard", 3, 1, False, ("_checkpoint", "prune"), 3),
    "while an old checkpoint is deleted": Kill("half of discard", 5, 1, True, ("_checkpoint", "prune"), 5),
    "before the metrics are replaced": Kill("metrics", 3, 1, False, ("_checkpoint", "flush"), 2),
    "after the metrics are replaced": Kill("metrics", 3, 1, True, ("_checkpoint", "flush"), 2),
    "epoch boundary within a draw, before it": Kill("draw", 2, 1, False, ("iterate", "_drawn"), 1),
    "epoch boundary within a draw, after it": Kill("draw", 3, 1, True, ("iterate", "_drawn"), 2),
    "epoch boundary between draws": Kill("draw", 5, 1, False, ("iterate", "_drawn"), 4),
    "mid-evaluation, step 2": Kill("evaluation forward", 2, 2, False, ("_evaluate", "generate"), 1),
    "after an evaluation is written, step 4": Kill("evaluation rename", 4, 1, True, ("_evaluate", "write_folder"), 3),
    "mid-optimiser, while a checkpoint is written": Kill("late seal", 3, 2, True, _TRAINING, 1, asynchronous=True),
    "mid-generation, while a checkpoint is written": Kill(
        "late seal", 3, 0, False, ("generate",), 1, asynchronous=True
    ),
    "a late checkpoint, after its rename": Kill("late rename", 3, 1, True, ("write_folder",), 2, asynchronous=True),
    "a late checkpoint, before its rename": Kill("late rename", 3, 1, False, ("write_folder",), 1, asynchronous=True),
    "while the trained model is exported": Kill("export", 5, 1, True, ("finish", "replace_folder"), 5),
}


class Killer:
    """Wraps the point of a scenario, so that this process is killed there."""

    def __init__(self, kill: Kill, out: Path) -> None:
        self.kill, self.out = kill, out
        self.step = self.count = 0

    def now(self) -> None:
        """Leave the witness, and die."""
        names = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        found = self.out / "checkpoints"
        whole = max((int(p.name[5:]) for p in found.glob("step-*") if (p / "manifest.json").exists()), default=0)
        witness = {"step": self.step, "running": names, "checkpoint": whole}
        self.out.with_suffix(".witness").write_text(json.dumps(witness))
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(
        self, owner: Any, name: str, counts: Callable[..., bool] | None = None, half: Callable[..., None] | None = None
    ) -> None:
        """Die at the passage asked for of ``owner.name``: before it, after it, or after ``half`` of it.

        Args:
            counts: which calls count.
        """
        function = getattr(owner, name)

        @functools.wraps(function)  # the engine looks at the signatures of a model's methods
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            doomed = False
            if self.step == self.kill.step and (counts is None or counts(*args, **kwargs)):
                self.count += 1
                doomed = self.count == self.kill.number
            if doomed and half is not None:
                half(function, *args, **kwargs)
                self.now()
            if doomed and not self.kill.after:
                self.now()
            result = function(*args, **kwargs)
            if doomed:
                self.now()
            return result

        setattr(owner, name, wrapped)

    def arm(self) -> None:
        from flowrl.runtime.local import LocalRuntime

        step = LocalRuntime._step

        def counted(runtime: Any, *args: Any) -> None:
            self.step, self.count = runtime.state.step + 1, 0
            step(runtime, *args)

        LocalRuntime._step = counted  # type: ignore[method-assign]
        points(self)[self.kill.point]()


def is_whole(path: Any) -> bool:
    """Whether a folder is about to get its name."""
    return str(path).endswith(".writing")


def points(killer: Killer) -> dict[str, Callable[[], None]]:
    """By name, what to wrap."""
    import torch
    from transformers import LlamaModel

    import tests.flows
    from flowrl.runtime import checkpoint, worker
    from flowrl.runtime.engines.transformers import TransformersEngine
    from flowrl.runtime.local import LocalRuntime

    def running(*names: str) -> bool:
        stack = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        return stack.issuperset(names)

    def half_optimizer(step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = group["params"][: len(group["params"]) // 2]
        step(optimizer, *args, **kwargs)

    def half_discard(rmtree: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        next(p for p in Path(path).rglob("*") if p.is_file()).unlink()

    return {
        "forward": lambda: killer.wrap(LlamaModel, "forward", lambda *a, **k: running("iterate", "generate")),
        "evaluation forward": lambda: killer.wrap(
            LlamaModel, "forward", lambda *a, **k: running("_evaluate", "generate")
        ),
        "backward": lambda: killer.wrap(torch.Tensor, "backward"),
        "optimizer": lambda: killer.wrap(torch.optim.AdamW, "step"),
        "half of optimizer": lambda: killer.wrap(torch.optim.AdamW, "step", half=half_optimizer),
        "follow": lambda: killer.wrap(worker, "follow"),
        "torch.save": lambda: killer.wrap(torch, "save"),
        "seal": lambda: killer.wrap(checkpoint, "_seal", lambda *a: running("_checkpoint")),
        "rename": lambda: killer.wrap(
            os, "rename", lambda a, b: str(a).endswith(".writing") and running("_checkpoint", "write_folder")
        ),
        "evaluation rename": lambda: killer.wrap(
            os, "rename", lambda a, b: is_whole(a) and running("_evaluate", "write_folder")
        ),
        "discard": lambda: killer.wrap(
            checkpoint.shutil, "rmtree", lambda path, *a, **k: str(path).endswith(".discarded")
        ),
        "half of discard": lambda: killer.wrap(
            checkpoint.shutil, "rmtree", lambda path, *a, **k: str(path).endswith(".discarded"), half=half_discard
        ),
        "metrics": lambda: killer.wrap(
            os, "replace", lambda a, b: str(b).endswith("metrics.parquet") and running("_checkpoint")
        ),
        "draw": lambda: killer.wrap(LocalRuntime, "draw"),
        "reward": lambda: killer.wrap(tests.flows, "share_of_vowels"),
        "late seal": lambda: late(killer)[0](),
        "late rename": lambda: late(killer)[1](),
        "export": lambda: killer.wrap(TransformersEngine, "export", lambda *a: running("finish")),
    }


def late(killer: Killer) -> tuple[Callable[[], None], Callable[[], None]]:
    """The checkpoint of step 2 is late: the training is in step 3 when its files are sealed, or when it is renamed."""
    import torch
    from transformers import LlamaModel

    from flowrl.runtime import checkpoint

    in_step_3 = threading.Event()

    def is_late(path: Any) -> bool:
        return "checkpoints/.step-000002." in str(path) and is_whole(path)

    def seal() -> None:
        sealing = checkpoint._seal

        def never(path: Path) -> tuple[int, str]:
            if "checkpoints/.step-000002." in str(path):
                time.sleep(600)
            return sealing(path)

        checkpoint._seal = never
        if killer.kill.number:
            killer.wrap(torch.optim.AdamW, "step")
        else:
            killer.kill = replace(killer.kill, number=2)
            killer.wrap(LlamaModel, "forward")

    def rename() -> None:
        step = torch.optim.AdamW.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            if killer.step == 3:
                in_step_3.set()
                time.sleep(600)
            return step(*args, **kwargs)

        torch.optim.AdamW.step = stepped  # type: ignore[method-assign]
        killer.wrap(os, "rename", lambda a, b: is_late(a))
        rename = os.rename

        def held(a: Any, b: Any) -> None:
            if is_late(a):
                assert in_step_3.wait(300)
            rename(a, b)

        os.rename = held

    return seal, rename


def train(out: Path, *, resume: bool, export: bool = False, asynchronous: bool = False) -> None:
    """The run itself."""
    import torch

    import flowrl
    from tests.flows import prompts
    from tests.laws.everything import NUM_PROMPTS, everything, held_out
    from tests.tiny import tiny_actor

    torch.set_num_threads(1)
    actor = tiny_actor()
    flowrl.run(
        everything(actor),
        prompts(NUM_PROMPTS),
        NUM_STEPS,
        out=out,
        resume=resume,
        seed=3,
        evaluations=[held_out(actor, prompts(3))],
        keep_best="eval/heldout/reward",
        checkpoint_every=1,
        async_checkpoints=asynchronous,
        samples_every=2,
        progress=False,
        report=False,
        export=export,
    )


def train_smollm2(out: Path, *, resume: bool) -> None:
    """Three steps of GRPO with a reference on SmolLM2 in float32, on two threads: tiny models hide what threads do."""
    import torch

    import flowrl
    from flowrl.data import PromptDataset
    from tests.flows import FAST
    from tests.smollm2 import smollm2_actor

    torch.set_num_threads(2)
    flow = flowrl.RLFlow(
        rollout=flowrl.Rollout(smollm2_actor(), group_size=2, sampling=flowrl.Sampling(max_new_tokens=4)),
        reward=flowrl.FunctionReward(lambda response: len(set(response)), isolate=False),
        advantage_estimator=flowrl.GroupAdvantage(),
        policy_updater=flowrl.GRPOUpdater(epochs=2, optimizer=flowrl.AdamW(FAST.learning_rate / 1000), kl_coef=0.01),
        batch_size=2,
    )
    data = PromptDataset.from_rows([{"prompt": f"{i} + {i} ="} for i in range(3)], as_chat=False)
    flowrl.run(flow, data, 3, out=out, resume=resume, checkpoint_every=1 if not resume and out.name == "killed" else None,
               keep_last=1, async_checkpoints=False, progress=False, report=False)  # fmt: skip


def main_smollm2(folder: Path) -> None:
    warm_up()
    out = folder / "killed"
    kill = Kill("half of optimizer", 2, 2, True, _TRAINING, 1)
    log = folder / "log"
    print(json.dumps({
        "reference": wait(fork(lambda: train_smollm2(folder / "reference", resume=False), log)),
        "killed": wait(fork(lambda: (Killer(kill, out).arm(), train_smollm2(out, resume=False))[-1], log)),
        "resumed": wait(fork(lambda: train_smollm2(out, resume=True), log)),
    }))  # fmt: skip


def fork(body: Callable[[], None], log: Path) -> int:
    """Run the body in a fork; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        body()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def place(folder: Path, name: str) -> Path:
    """The run folder of a scenario."""
    return folder / name.replace(" ", "_").replace(",", "")


def killed_then_resumed(folder: Path, name: str) -> None:
    out, kill = place(folder, name), SCENARIOS[name]
    how: dict[str, Any] = {"export": kill.point == "export", "asynchronous": kill.asynchronous}
    log = out.with_suffix(".log")
    killed = wait(fork(lambda: (Killer(kill, out).arm(), train(out, resume=False, **how))[-1], log))
    resumed = wait(fork(lambda: train(out, resume=True, **how), log))
    out.with_suffix(".json").write_text(json.dumps({"killed": killed, "resumed": resumed}))


def warm_up() -> None:
    """Import what every run needs."""
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import flowrl.checks
    import flowrl.data
    import flowrl.functional.advantages
    import flowrl.functional.policy_losses
    import flowrl.runtime.engines.transformers
    import flowrl.runtime.local
    import flowrl.runtime.manifest
    import flowrl.runtime.saved_run
    import flowrl.runtime.tensor_files  # noqa: F401


def main(folder: Path) -> None:
    warm_up()
    folder.mkdir(parents=True, exist_ok=True)
    waiting: list[str | None] = [None, *SCENARIOS]  # None is the undisturbed run
    pids: dict[int, str | None] = {}
    results: dict[str, dict[str, int]] = {}
    while waiting or pids:
        while waiting and len(pids) < 2:  # two at a time
            name = waiting.pop(0)
            if name is None:
                pid = fork(lambda: train(folder / "reference", resume=False, export=True), folder / "reference.log")
            else:
                pid = fork(lambda name=name: killed_then_resumed(folder, name), folder / "scenarios.log")  # type: ignore[misc]
            pids[pid] = name
        pid, status = os.wait()
        name = pids.pop(pid)
        if name is None:
            results["reference"] = {"exit": os.waitstatus_to_exitcode(status)}
        else:
            file = place(folder, name).with_suffix(".json")
            results[name] = json.loads(file.read_text()) if file.exists() else {"killed": 1, "resumed": 1}
    print(json.dumps(results))


if __name__ == "__main__":
    (main_smollm2 if sys.argv[2:] == ["smollm2"] else main)(Path(sys.argv[1]))
