"""The timeline's picture: every bar where its time is, what idles, the cycle that binds, and text that harms nobody."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from flowrl.compiler.mapping import Mapping
from flowrl.drawing.timeline import timeline_svg
from tests.compiler.mappings import mappings, ppo

SVG = "{http://www.w3.org/2000/svg}"


def parsed(mapping: Mapping) -> ElementTree.Element:
    return ElementTree.fromstring(timeline_svg(mapping))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if e.get("class") == name]


def bars(root: ElementTree.Element) -> dict[tuple[str, int], tuple[float, float, float, float]]:
    """(x, y, width, height) by unit and iteration."""
    out = {}
    for group in of_class(root, "flowrl-slot"):
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        key = (group.get("data-unit", ""), int(float(group.get("data-iteration", ""))))
        out[key] = tuple(float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
    return out  # type: ignore[return-value]  # four each


def test_bars_are_where_their_times_are() -> None:
    """Three periods of 40 s from the second on: in it the first iteration is still trained on, as in every later one."""
    found = bars(parsed(ppo()))
    expected = {(unit, i) for unit in ("rollout", "values", "ref") for i in range(3)}
    assert set(found) == expected | {("update", i) for i in (-1, 0, 1)}
    x, _, width, _ = found["rollout", 0]
    second = width / 30
    for key, start, seconds in [
        (("update", -1), 0, 30), (("values", 0), 30, 4), (("ref", 0), 34, 6), (("update", 0), 40, 30), (("rollout", 1), 40, 30),
    ]:  # fmt: skip
        assert found[key][0] == pytest.approx(x + start * second, abs=0.2)
        assert found[key][2] == pytest.approx(seconds * second, abs=0.2)


def test_a_unit_lies_over_all_its_devices() -> None:
    found = bars(parsed(ppo()))
    assert found["update", 0][3] > 2 * found["values", 0][3], "two rows and what is between"
    assert found["update", 0][1] == found["values", 0][1] > found["rollout", 0][1]


def test_bars_on_one_row_do_not_overlap() -> None:
    found = list(bars(parsed(ppo())).values())
    for i, (ax, ay, aw, ah) in enumerate(found):
        for bx, by, bw, bh in found[i + 1 :]:
            apart_x = ax + aw <= bx + 0.2 or bx + bw <= ax + 0.2
            assert apart_x or ay + ah <= by or by + bh <= ay


def test_what_idles_is_drawn() -> None:
    """Of each period of 40 s, 10 on the first row; 4 beside the critic, on the last; none on the row in the middle."""
    idle = of_class(parsed(ppo()), "flowrl-idle")
    titles = [rect.findtext(f"{SVG}title") for rect in idle]
    assert sorted(titles) == ["idle 10.0 s"] * 3 + ["idle 4.00 s"] * 3


def test_the_cycle_that_binds_is_outlined() -> None:
    root = parsed(ppo())
    found, outlined = bars(root), of_class(root, "flowrl-critical")
    assert [rect.get("x") for rect in outlined] == [
        f"{found[key][0]:g}" for key in (("values", 0), ("ref", 0), ("update", 0))
    ]
    assert "the cycle that sets the pace" in timeline_svg(ppo())
    assert not of_class(parsed(ppo(critical=())), "flowrl-critical")


def test_what_it_says() -> None:
    text = timeline_svg(ppo())
    for part in (
        "Timeline, estimated: 40.0 s an iteration",
        "H100 8–11 (node 1)",
        "75 % busy, 10.0 s idle",
        "period 2",
        "80 s",
    ):
        assert part in text
    tip = of_class(parsed(ppo()), "flowrl-slot")[0].findtext(f"{SVG}title")
    assert tip is not None and "500 ms to bring its weights" in timeline_svg(ppo())


def test_models_have_colours_of_their_own() -> None:
    root = parsed(ppo())
    colours = {}
    for group in of_class(root, "flowrl-slot"):
        rects = group.findall(f"{SVG}rect")
        colours[group.get("data-unit")] = rects[1].get("fill")
    assert colours["rollout"] == colours["update"] and len(set(colours.values())) == 3


def test_shades_tell_iterations_apart() -> None:
    root = parsed(ppo())
    shades = {}
    for group in of_class(root, "flowrl-slot"):
        if group.get("data-unit") == "rollout":
            shades[group.get("data-iteration")] = group.findall(f"{SVG}rect")[1].get("fill-opacity")
    assert len(set(shades.values())) == len(shades) == 3


@pytest.mark.parametrize("empty", [{"slots": ()}, {"stretches": ()}, {"period": 0.0}])
def test_nothing_to_draw(empty: dict[str, object]) -> None:
    assert "Nothing takes time here" in timeline_svg(ppo(**empty))


@given(mappings())
@settings(max_examples=40, deadline=None)
def test_any_mapping_is_drawn(mapping: Mapping) -> None:
    picture = timeline_svg(mapping)
    ElementTree.fromstring(picture)
    assert picture == timeline_svg(replace(mapping))
