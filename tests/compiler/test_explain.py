"""The explanation: what is in it, that it fits a terminal, and that every time in it is called an estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.compiler import figures
from flowrl.compiler.explain import WIDTH, explain, parallelism_text, shape_of
from flowrl.compiler.mapping import Mapping, PlannedMesh
from flowrl.compiler.parallelism import Parallelism
from tests.compiler.mappings import mappings, ppo


def section(text: str, title: str) -> str:
    """In one line."""
    found = next(part for part in text.split("\n\n") if part.startswith(title))
    return " ".join(found.split())


def test_what_it_says() -> None:
    text = explain(ppo())
    head = section(text, "An iteration")
    assert "takes 40.0 s, by estimate, in the steady state, on 2 nodes of 8 H100." in head
    assert "No placement can be under 38.0 s; this one is within 5.3 %. 12,345 assignments rated." in head
    assert "The runner-up, all colocated, would take 44.0 s (+10 %)." in head
    assert (
        "Rates: data sheets. Lengths assumed: prompts of 1,024 tokens, responses of 1,024, the longest of 2,048" in head
    )
    # (8 × 30 + 4 × 40 + 4 × 36) / (16 × 40)
    assert "Devices are busy 85 % of the time." in head
    where = section(text, "Where")
    assert "A 8 devices H100 0–7 (node 0) rollout" in where
    assert "H100 12–15 (node 1): busy 36.0 s, idle 4.00 s of each iteration." in where
    how = section(text, "How")
    assert "rollout 30.0 s generate actor on A: 4 data-parallel × 2 tensor-parallel" in how
    assert (
        "memory bandwidth binds (70 %), then compute 20 % and links between devices 10 %; 500 ms of it to bring" in how
    )
    assert "300 TFLOP/s a device, 30 % of its peak" in how
    assert "2 pipeline stages, ZeRO-1, activations computed again, 8 micro-batches" in how
    assert "4 passes, in host memory while it does not run" in how
    moves = section(text, "Weights")
    assert "actor: update → rollout: 112 GB over network in 500 ms, 96 transfers; at most 14.0 GB to a device" in moves
    assert "actor: update → old: nothing moves" in moves
    memory = section(text, "Memory")
    assert "H100 8–11 (node 1) 71.0 GB of the 73.6 GB that a plan may use (96 %): 40.0 GB held, 31.0 GB more" in memory
    assert (
        "By cause on H100 8–11 (node 1)" in memory and "update 46.1 GB: optimiser 21.0 GB, activations 9.00" in memory
    )
    assert "buckets" not in memory, "what is next to nothing is not named"
    pace = section(text, "What sets the pace")
    assert "values 4.00 s → ref 6.00 s → update 30.0 s → values of the next iteration" in pace
    assert "Once around is 40.0 s for 1 iteration, by estimate. Not on it" in pace and pace.endswith(
        "nothing: rollout."
    )
    others = section(text, "Other placements")
    assert "all colocated 44.0 s (+10 %)" in others
    assert "split cannot be: the actor needs 91.2 GB a device" in others
    assert "one node more 33.0 s (−18 %)" in section(text, "What if")


def test_how_good_it_is_known_to_be() -> None:
    assert "This is the best placement there is under these estimates" in explain(ppo(exact=True))
    assert "No placement can be under 40.0 s; this one is as good as the best one." in explain(ppo(lower_bound=40.0))
    assert "How far it is from the best one is not known" in explain(ppo(lower_bound=0.0))


def test_one_unit_that_never_pauses() -> None:
    text = explain(ppo(critical=("rollout",), period=30.0))
    assert "rollout runs without a pause, 30.0 s an iteration by estimate" in section(text, "What sets the pace")


def test_a_cycle_over_several_iterations() -> None:
    pace = section(explain(ppo(critical=("rollout", "update"), critical_span=2, period=30.0)), "What sets the pace")
    assert "rollout of 2 iterations later" in pace
    assert "Once around is 60.0 s for 2 iterations, by estimate: 30.0 s each." in pace


def test_devices_that_run_nothing_are_counted() -> None:
    mapping = ppo()
    text = section(explain(replace(mapping, stretches=mapping.stretches[:2])), "Where")
    assert "4 devices run nothing." in text


def test_where_weights_come_from_says_the_calibration() -> None:
    assert "Rates: calibration of xeon, 2026-01-02." in explain(ppo(calibrated="calibration of xeon, 2026-01-02"))


@pytest.mark.parametrize(
    ("meshes", "shape"),
    [
        ([(0, 0, 8)], "colocated"),
        ([(0, 0, 8), (0, 0, 4), (0, 2, 2)], "mixed"),
        ([(0, 0, 4), (0, 4, 4), (1, 0, 4), (1, 4, 4)], "split"),
        ([(0, 0, 4), (0, 4, 4)], "split"),  # four units on two meshes
        ([(0, 0, 8), (0, 0, 4), (0, 4, 4)], "mixed"),
    ],
)
def test_shapes(meshes: list[tuple[int, int, int]], shape: str) -> None:
    made = tuple(PlannedMesh(str(i), *mesh) for i, mesh in enumerate(meshes))
    assert shape_of(ppo(meshes=made)) == shape


@pytest.mark.parametrize(
    ("parallelism", "kind", "text"),
    [
        (Parallelism(), "score", "one device"),
        (Parallelism(micro_batches=3), "generate", "one device, 3 waves"),
        (Parallelism(tensor=4, zero=3), "train", "4 tensor-parallel, ZeRO-3"),
    ],
)
def test_parallelism_in_words(parallelism: Parallelism, kind: str, text: str) -> None:
    assert parallelism_text(parallelism, kind) == text


@given(mappings())
@settings(max_examples=50, deadline=None)
def test_any_mapping_fits_a_terminal_and_steers_none(mapping: Mapping) -> None:
    for line in explain(mapping).split("\n"):
        assert len(line) <= WIDTH and line == line.rstrip()
        assert line.isprintable()


@pytest.mark.parametrize("unit", ["s", "ms", "GB", "%", "TFLOP/s"])
def test_no_number_is_parted_from_its_unit(unit: str) -> None:
    for length in range(80, 120):
        name = "x" * (length // 2 - 1)
        text = explain(ppo(calibrated=f"{name} {name} 44.0 {unit} more"))
        assert f"44.0 {unit}" in text and "x 44.0" in " ".join(text.split())


# -- figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (123.4, "123 s"), (12.34, "12.3 s"), (1.0, "1.00 s"), (0.9996, "1.00 s"), (0.99, "990 ms"),
     (0.0456, "45.6 ms"), (1.2e-5, "0.0120 ms"), (123456.0, "123,000 s"), (float("inf"), "∞ s")],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert figures.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (999.9, "1.00 kB"), (63.14e9, "63.1 GB"), (1.5e12, "1.50 TB")]
)
def test_sizes(value: float, text: str) -> None:
    assert figures.size(value) == text


@given(st.floats(1e-12, 1e18))
def test_three_digits_are_near(value: float) -> None:
    number, unit = figures.size(value).split()
    scale = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=0.0051)


def test_changes_and_counts() -> None:
    assert [figures.change(v, 40.0) for v in (44.0, 40.0, 39.0, 80.0)] == ["+10 %", "the same", "−2.5 %", "+100 %"]
    assert [figures.count(n, "node") for n in (1, 2, 4096)] == ["1 node", "2 nodes", "4,096 nodes"]
    assert figures.count(2, "mesh") == "2 meshes"
    assert [figures.listed("abc"[:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert [figures.share(v) for v in (0.0, 0.004, 0.05, 0.62)] == ["0 %", "0.4 %", "5 %", "62 %"]
