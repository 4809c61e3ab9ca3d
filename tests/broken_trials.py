"""Trials that go wrong in every way, and an environment with packages that do: what the doctor's tests run in processes of
their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from flowrl.diagnostics.packages import Installed
from flowrl.errors import FlowError


def good(say: Any, number: int) -> dict[str, int]:
    say("counting")
    print("printed")
    return {"next": number + 1}


def hang(say: Any, pids: str) -> dict[str, Any]:
    """Sleeps with a child that sleeps, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say("waiting for the moon")
    with open(pids, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return {}


def refuse(say: Any) -> dict[str, Any]:
    raise FlowError("The moon is missing", expected="a moon", received="none")


def die(say: Any) -> dict[str, Any]:
    say("dividing by zero in C")
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def one_rank_raises(say: Any, pids: str) -> dict[str, Any]:
    """Rank 1 sleeps; rank 0 raises when it does."""
    rank = os.environ["RANK"]
    with open(f"{pids}{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == "1":
        say("sleeping")
        time.sleep(600)
    while not os.path.exists(f"{pids}1"):
        time.sleep(0.05)
    say("adding up")
    raise ValueError("no numbers")


def meet_and_wait(say: Any, folder: str) -> dict[str, Any]:
    """Ranks that join, say so in a file each, and sleep."""
    from flowrl.runtime.ranks import Ranks

    ranks = Ranks.join(120)
    say("sleeping")
    with open(os.path.join(folder, str(ranks.rank)), "w"):
        pass
    time.sleep(600)
    return {}


class Broken(Installed):
    """This environment, with companions that were built for another torch, and without what is quick to leave out."""

    fakes = {"torchvision": "0.99+cu999", "xformers": "0.1"}  # noqa: RUF012
    hidden = (
        "reasoning-gym", "tensorboard", "matplotlib", "ipykernel", "ipython", "nbclient", "nbformat", "peft", "bitsandbytes",
        "accelerate",
    )  # fmt: skip

    def version(self, name: str) -> str | None:
        return None if name in self.hidden else self.fakes.get(name) or super().version(name)

    def requires(self, name: str) -> list[str]:
        if name == "torchvision":
            return ["torch==9.9.9"]
        return [] if name in self.fakes else super().requires(name)

    def module(self, name: str) -> str | None:
        found = {"torchvision": "tests.broken_module_raises", "xformers": "tests.broken_module_aborts"}
        return found.get(name) or super().module(name)
