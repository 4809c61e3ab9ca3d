"""Tests on several ranks: a function of a test file under torchrun, with a hard timeout.

A launch costs 10 to 60 seconds on two cores, so one launch checks many things. The function runs on every rank, in processes
of their own; what it asserts fails the launch, and the test shows its output:

    def check_sums() -> None:                       # in a module of tests that other processes can import
        ranks = Ranks.join(60)
        assert ranks.everyone(ranks.rank) == [0, 1]

    def test_sums() -> None:
        launch(check_sums, num_ranks=2).succeeded()

What the default tests check on two ranks is one launch for all of them: :data:`SUITES`, :func:`shared`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: By name, what the one launch of two ranks calls with a folder, and the test file that looks at what is in there then.
SUITES = {
    "conversation": ("tests.runtime.test_ranks:conversation", "runtime/test_ranks.py"),
    "spmd": ("tests.runtime.spmd_scenarios:everything", "runtime/test_spmd.py"),
    "layouts": ("tests.laws.layouts_of_ppo:on_two_ranks", "laws/test_layouts.py"),
    "checkpoints": ("tests.runtime.test_tensor_files:on_ranks", "runtime/test_tensor_files.py"),
    "adapters": ("tests.runtime.engines.test_adapters:on_two_ranks", "runtime/engines/test_adapters.py"),
    "shards": ("tests.runtime.engines.test_shards:on_two_ranks", "runtime/engines/test_shards.py"),
}
MARK = "FLOWRL_TEST_LAUNCH"


@dataclass(frozen=True)
class Launched:
    """How a launch ended.

    Args:
        status: of torchrun; None where it did not end in time and was killed, with all that it started.
        output: of all ranks and torchrun, stdout and stderr together.
        left_behind: command lines of processes that were alive after torchrun had ended. They are killed.
        seconds: how long it took.
    """

    status: int | None
    output: str
    left_behind: tuple[str, ...]
    seconds: float

    def succeeded(self) -> Launched:
        """Fail the test with the output, unless every rank ended well and nothing was left behind."""
        assert self.status == 0, f"status {self.status} after {self.seconds:.0f} s\n{self.output[-20000:]}"
        return self.ended()

    def ended(self) -> Launched:
        """Fail the test where a process was left behind, or the launch had to be killed."""
        assert self.status is not None, f"did not end in time\n{self.output[-20000:]}"
        assert not self.left_behind, f"left behind: {self.left_behind}\n{self.output[-20000:]}"
        return self

    @property
    def errors(self) -> list[str]:
        """The messages that start with "error: ", each up to the next line that is not indented."""
        found: list[str] = []
        for line in self.output.splitlines():
            if line.startswith("error: "):
                found.append(line)
            elif found and line.startswith("  ") and found[-1] is not None and self._follows(found[-1], line):
                found[-1] += "\n" + line
        return found

    def _follows(self, message: str, line: str) -> bool:
        return f"{message}\n{line}" in self.output


def launch(
    function: Callable[..., None],
    *args: Any,
    num_ranks: int,
    timeout: float = 240.0,
    env: Mapping[str, str] | None = None,
) -> Launched:
    """Call ``function(*args)`` on every rank; the arguments travel as JSON."""
    where = f"{function.__module__}:{function.__qualname__}"
    return torchrun(["-m", "tests.ranks", where, json.dumps(args)], num_ranks=num_ranks, timeout=timeout, env=env)


def shared(suite: str, request: Any, tmp_path_factory: Any) -> Path:
    """The folder of a suite, after the launch that runs the suites of all test files of this session, once.

    Whoever asks first launches it; the other processes of pytest-xdist, which collect the same tests, wait for it.
    """
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if hasattr(request.config, "workerinput") else base) / "two-ranks"
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = place / "outcome.json"
        if not outcome.exists():
            files = {str(item.path) for item in request.session.items}
            suites = [name for name, (_, file) in SUITES.items() if any(f.endswith(f"tests/{file}") for f in files)]
            launched = launch(run_suites, str(place), suites, num_ranks=2, timeout=800)
            outcome.write_text(json.dumps(asdict(launched)))
    Launched(**json.loads(outcome.read_text())).succeeded()
    return place / suite


def run_suites(place: str, suites: list[str]) -> None:
    """On every rank: one suite after the other."""
    for suite in suites:
        began = time.perf_counter()
        folder = Path(place) / suite
        folder.mkdir(exist_ok=True)
        print(f"suite {suite}", flush=True)
        main(SUITES[suite][0], json.dumps([str(folder)]))
        print(f"suite {suite}: {time.perf_counter() - began:.1f} s", flush=True)


def torchrun(
    command: list[str], *, num_ranks: int, timeout: float = 240.0, env: Mapping[str, str] | None = None
) -> Launched:
    """Run ``torchrun … command``."""
    mark = uuid.uuid4().hex
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {}), MARK: mark}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=around, cwd=ROOT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in _alive(mark):
            _kill(pid)
        output, _ = process.communicate()
        return Launched(None, output, (), time.monotonic() - started)
    left = _alive(mark)
    until = time.monotonic() + 10
    while left and time.monotonic() < until:  # the system ends the children of the dead in its own time
        time.sleep(0.1)
        left = _alive(mark)
    lines = tuple(_command_line(pid) for pid in left)
    for pid in left:
        _kill(pid)
    return Launched(process.returncode, output, lines, time.monotonic() - started)


def _alive(mark: str) -> list[int]:
    """Processes that were started by the launch of this mark, zombies aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # another user's, or gone
            continue
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"process {pid}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(where: str, arguments: str) -> None:
    """On one rank: import the function and call it."""
    module, name = where.split(":")
    getattr(importlib.import_module(module), name)(*json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
