"""Try something in a process of its own, with a deadline: what crashes or hangs there ends there.

The process (or the ranks that torchrun starts) writes what it does, line by line, into files; so the parent knows how far it
got, however it ended. A process that is too late is asked where it is, then ended with all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

#: Seconds that an ended process gets to take its own children along, before all of them are killed.
GRACE = 5.0
#: Seconds that a process gets to write where it hangs.
_TRACE_SECONDS = 0.5
#: Lines at the end of the output that are kept.
_TAIL_LINES = 30
#: Variables of a launch that a trial must not take for its own.
_LAUNCH = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

Ended = Literal["finished", "failed", "hung", "died"]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Args:
        ended: "finished" with a result; "failed" with an error; "hung" past its deadline; "died" without a word.
        result: what the function returned on rank 0.
        message: one sentence, where it did not finish.
        events: what rank 0 said on its way.
        output: the end of what was printed, by all ranks.
        seconds: how long it took, the start of the process included.
    """

    ended: Ended
    result: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    events: tuple[Mapping[str, Any], ...] = ()
    output: str = ""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.ended == "finished"


def run_trial(
    function: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline: float,
    num_ranks: int = 1,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Call ``function(say, **arguments)`` in a process of its own, or in several ranks.

    Args:
        function: as "package.module:name". It gets ``say(stage, **facts)``, to tell how far it is, and returns a mapping.
        arguments: as JSON can hold them.
        deadline: seconds that all of it may take.
        num_ranks: more than one are started by torchrun.
        env: variables to set.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flowrl-trial-") as name:
        folder = Path(name)
        call = {"function": function, "arguments": dict(arguments or {}), "folder": name, "deadline": deadline}
        call["parent"] = os.getpid()
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                [*_launcher(num_ranks), json.dumps(call)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(env or {}),
                start_new_session=True,  # one signal ends all of its group, and Ctrl-C is the parent's to handle
            )
        try:
            late = _wait(process, deadline)
            stages = _events(folder, num_ranks)
            if late:
                _ask_where(stages)
        finally:
            _end(process, folder, num_ranks)
        outcome = _outcome(process.returncode, late, stages, deadline)
        return _with(outcome, _tail(folder / "output"), time.monotonic() - started)


def _launcher(num_ranks: int) -> list[str]:
    # -P: a file of the folder that one happens to stand in must not replace a library.
    python = [sys.executable, "-P", "-m"]
    child = "flowrl.diagnostics.child"
    if num_ranks == 1:
        return [*python, child]
    return [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", child]


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _LAUNCH and not k.startswith("TORCHELASTIC_")}
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    env["PYTHONUNBUFFERED"] = "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    return {**env, "HF_HUB_OFFLINE": "1", **extra}


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether it is late."""
    try:
        process.wait(deadline)
    except subprocess.TimeoutExpired:
        return True
    return False


def _events(folder: Path, num_ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank said; the last line of one that was killed may be cut off."""
    found = []
    for rank in range(num_ranks):
        said: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            for line in (folder / f"events-{rank}.jsonl").read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    said.append(json.loads(line))
        found.append(said)
    return found


def _ask_where(stages: list[list[dict[str, Any]]]) -> None:
    """Let late processes print where they are."""
    for pid in _pids(stages):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_TRACE_SECONDS)


def _pids(stages: list[list[dict[str, Any]]]) -> list[int]:
    return [event["pid"] for said in stages for event in said if "pid" in event]


def _end(process: subprocess.Popen[bytes], folder: Path, num_ranks: int) -> None:
    """End the process with all that it started. torchrun gives its ranks sessions of their own: it ends them itself when it
    is asked to, and where it does not, they are killed one by one."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if num_ranks > 1:
        for pid in _pids(_events(folder, num_ranks)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if (
                    os.getsid(pid) == pid
                ):  # a rank of ours leads its session; a process that took its number hardly does
                    os.killpg(pid, signal.SIGKILL)
    process.wait()


def _outcome(code: int, late: bool, stages: list[list[dict[str, Any]]], deadline: float) -> Outcome:
    first = tuple(stages[0])
    where = " and ".join(dict.fromkeys(f"while {stage}" for said in stages if (stage := _stage(said))))
    # The first error is the cause; those of other ranks may be its consequences.
    failed = sorted((e["at"], rank, e["error"]) for rank, said in enumerate(stages) for e in said if "error" in e)
    result = next((e["result"] for e in first if "result" in e), None)
    if late and not failed:
        return Outcome("hung", message=f"hung {where or 'while starting'}: no end within {deadline:g} s", events=first)
    if failed:
        _, rank, text = failed[0]
        who = f"rank {rank}: " if len(stages) > 1 else ""
        return Outcome("failed", message=f"{who}{text}{f' ({where})' if where else ''}", events=first)
    if code != 0 or result is None:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return Outcome("died", message=f"died with {how} {where or 'while starting'}", events=first)
    return Outcome("finished", result, events=first)


def _stage(said: list[dict[str, Any]]) -> str:
    return next((str(e["stage"]) for e in reversed(said) if "stage" in e), "")


def _with(outcome: Outcome, output: str, seconds: float) -> Outcome:
    return Outcome(outcome.ended, outcome.result, outcome.message, outcome.events, output, seconds)


def _tail(path: Path) -> str:
    try:
        lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])
