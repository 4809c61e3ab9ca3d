"""A user's function in a process of its own: every way to fail is a typed outcome, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowrl.errors import FlowError
from flowrl.runtime import isolation
from flowrl.runtime.isolation import Died, IsolatedPool, Raised, Returned, TimedOut, run_here

pytestmark = pytest.mark.skipif(not hasattr(os, "waitid"), reason="POSIX only")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture
def pools():
    opened: list[IsolatedPool] = []

    def make(function, timeout: float = 20.0, **settings) -> IsolatedPool:
        opened.append(IsolatedPool(function, timeout=timeout, **settings))
        return opened[-1]

    yield make
    for pool in opened:
        pool.close()


def test_every_outcome_stays_with_its_call(pools) -> None:
    offset = 10

    def misbehave(how: str) -> object:
        if how == "raise":
            raise ValueError("no number here")
        if how == "exit":
            sys.exit(4)
        if how == "_exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)
        if how == "print":
            print("noise " * 20_000)
            os.write(1, b"x" * 100_000)
        if how == "huge":
            return "x" * (64 << 20)
        if how == "unpicklable":
            return threading.Lock()
        return offset + len(how)  # a closure

    hows = ["ok", "raise", "_exit", "ok", "kill", "hang", "ok", "exit", "print", "huge", "unpicklable", "ok"]
    outcomes = dict(enumerate(pools(misbehave, timeout=8.0, num_workers=2).map([{"how": h} for h in hows])))
    for call in (0, 3, 6, 11):
        assert outcomes[call] == Returned(12)
    assert isinstance(outcomes[1], Raised) and outcomes[1].message == "ValueError: no number here"
    assert "test_isolation.py:" in outcomes[1].where and "misbehave" in outcomes[1].traceback
    assert outcomes[2] == Died(3) and str(outcomes[2]) == "process exited with code 3"
    assert outcomes[4] == Died(-signal.SIGKILL) and "SIGKILL" in str(outcomes[4])
    assert outcomes[5] == TimedOut(8.0) and "8 s" in str(outcomes[5])
    assert isinstance(outcomes[7], Raised) and "SystemExit" in outcomes[7].message
    assert outcomes[8] == Returned(15)
    assert isinstance(outcomes[9], Raised) and "too large" in outcomes[9].message
    assert isinstance(outcomes[10], Raised) and "cannot be sent" in outcomes[10].message


def test_results_come_in_order_from_several_workers(pools) -> None:
    def slow(x: int) -> tuple[int, int]:
        time.sleep(0.05 if x % 2 else 0.0)
        return x, os.getpid()

    pool = pools(slow, num_workers=2)
    results = [o.value for o in pool.map([{"x": i} for i in range(20)])]
    assert [x for x, _ in results] == list(range(20))
    again = [o.value[1] for o in pool.map([{"x": i} for i in range(4)])]
    assert set(again) <= {pid for _, pid in results}, "the processes are kept"
    assert os.getpid() not in again
    assert pool.map([]) == []


def test_starting_is_on_no_calls_clock(pools) -> None:
    """Importing what the function needs takes 1 s here, and a call may take 0.5 s."""

    class Slow:
        def __call__(self, die: bool) -> str:
            if die:
                os._exit(1)
            return "done"

        def __setstate__(self, state: object) -> None:
            time.sleep(3.0)

        def __getstate__(self) -> dict[str, int]:
            return {"a": 1}

    outcomes = pools(Slow(), timeout=2.5).map([{"die": False}, {"die": True}, {"die": False}])
    assert outcomes == [Returned("done"), Died(1), Returned("done")]


def test_a_loop_inside_c_is_ended(pools) -> None:
    """A signal handler or a thread could not: the regular expression never gives the interpreter back."""

    def backtrack(text: str) -> bool:
        import re

        return bool(re.fullmatch(r"(a+)+b", text))

    outcomes = pools(backtrack, timeout=4.0).map([{"text": "ab"}, {"text": "a" * 60}, {"text": "aab"}])
    assert outcomes == [Returned(True), TimedOut(4.0), Returned(True)]


def test_subprocesses_of_the_function_end_with_it(pools, tmp_path: Path) -> None:
    def spawn(path: str) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(path).write_text(str(child.pid))
        time.sleep(1000)

    note = tmp_path / "pid"
    assert pools(spawn, timeout=6.0).map([{"path": str(note)}]) == [TimedOut(6.0)]
    assert wait_until_gone(int(note.read_text()))


def test_a_death_between_calls_is_nobodys_fault(pools) -> None:
    pool = pools(lambda x: (x, os.getpid()))
    (first,) = pool.map([{"x": 1}])
    os.kill(first.value[1], signal.SIGKILL)
    assert wait_until_gone(first.value[1])
    (second,) = pool.map([{"x": 2}])
    assert second.value[0] == 2 and second.value[1] != first.value[1]


def test_an_interrupt_leaves_no_half_done_call(pools, monkeypatch) -> None:
    pool = pools(lambda x: (time.sleep(0.3), x)[1])
    assert pool.map([{"x": 0}]) == [Returned(0)]
    with monkeypatch.context() as patched:
        patched.setattr(pool, "_wait", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.map([{"x": 1}])
    assert pool.map([{"x": 2}]) == [Returned(2)], "not the answer to the interrupted call"


def test_close_leaves_no_process(pools) -> None:
    pool = pools(lambda: os.getpid(), num_workers=2)
    pids = {o.value for o in pool.map([{}] * 8)}
    pool.close()
    pool.close()
    assert not any(alive(pid) for pid in pids)
    assert pool.map([{}])[0].value not in pids, "and it opens again"


def test_a_function_that_cannot_travel() -> None:
    lock = threading.Lock()
    with pytest.raises(FlowError, match="isolate=False"):
        IsolatedPool(lambda: lock, timeout=1.0)


def test_a_function_whose_module_the_process_cannot_import(pools, monkeypatch) -> None:
    import types

    module = types.ModuleType("only_here")
    exec("def function(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(FlowError, match="only_here"):
        pools(module.function).map([{}])


def test_a_process_that_never_gets_ready(pools, monkeypatch) -> None:
    class Stuck:
        def __call__(self) -> None: ...

        def __reduce__(self):
            return time.sleep, (1000,)

    monkeypatch.setattr(isolation, "START_TIMEOUT", 0.5)
    with pytest.raises(FlowError, match=r"not ready after 0\.5 s"):
        pools(Stuck()).map([{}])


SCRIPT = """
import os, sys, time
from flowrl.runtime.isolation import IsolatedPool

print("main runs")
factor = 3

def triple(x):
    return factor * x

def pid():
    return os.getpid()

def hang():
    print("hanging", os.getpid(), flush=True)
    import re
    re.fullmatch(r"(a+)+b", "a" * 60)

if sys.argv[1] == "values":
    print([o.value for o in IsolatedPool(triple, timeout=9).map([{"x": 1}, {"x": 2}])])
elif sys.argv[1] == "leave open":
    print(IsolatedPool(pid, timeout=9).map([{}])[0].value)
else:
    IsolatedPool(hang, timeout=99).map([{}])
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def test_functions_of_a_script(script: list[str]) -> None:
    """``__main__`` is not run again in the process, as ``multiprocessing`` would."""
    run = subprocess.run([*script, "values"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["main runs", "[3, 6]"]
    assert run.stderr == ""


def test_a_script_that_forgets_to_close(script: list[str]) -> None:
    run = subprocess.run([*script, "leave open"], capture_output=True, text=True, check=True, timeout=60)
    assert run.stderr == ""
    assert wait_until_gone(int(run.stdout.split()[-1]))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_its_parent(script: list[str], ending: int) -> None:
    with subprocess.Popen([*script, "hang"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        line = next(line for line in parent.stdout if line.startswith("hanging"))
        parent.send_signal(ending)
        parent.wait(timeout=30)
    assert wait_until_gone(int(line.split()[1]))


def test_without_isolation() -> None:
    assert run_here(lambda x: x + 1, {"x": 1}) == Returned(2)
    failed = run_here(lambda x: 1 / x, {"x": 0})
    assert isinstance(failed, Raised) and failed.message == "ZeroDivisionError: division by zero"


def test_the_process_starts_light(pools) -> None:
    (loaded,) = pools(lambda: sorted({"torch", "transformers", "ray"} & set(sys.modules))).map([{}])
    assert loaded == Returned([])
