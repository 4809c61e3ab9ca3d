"""The placement's picture, at all sizes of clusters; and the page with everything."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.mapping import Mapping, PlannedMesh
from flowrl.drawing.mapping_page import mapping_html
from flowrl.drawing.placement import cards, placement_svg
from tests.compiler.mappings import mappings, pools_of, ppo

SVG = "{http://www.w3.org/2000/svg}"


def parsed(mapping: Mapping) -> ElementTree.Element:
    return ElementTree.fromstring(placement_svg(mapping))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if e.get("class") == name]


@pytest.mark.parametrize(("nodes", "expected"), [(2, [1, 1]), (8, [4, 2, 2]), (64, [32, 16, 16]), (128, [64, 32, 32])])
def test_equal_nodes_are_drawn_once(nodes: int, expected: list[int]) -> None:
    """So that 16 and 1,024 devices are as easy to read."""
    root = parsed(ppo(nodes=nodes))
    drawn = of_class(root, "flowrl-node-card")
    assert [int(float(card.get("data-nodes", ""))) for card in drawn] == expected
    assert len(of_class(root, "flowrl-device")) == 8 * len(expected)
    assert float(root.get("height", "")) < 500


def test_a_picture_within_one_node() -> None:
    root = parsed(ppo(nodes=1))
    assert len(of_class(root, "flowrl-device")) == 8


def test_cards_are_all_nodes_once() -> None:
    for nodes in (1, 2, 3, 16):
        found = list(cards(ppo(nodes=nodes), 0))
        assert [n for card in found for n in range(card.first, card.last + 1)] == list(range(nodes))
        for card in found:
            assert [d for start, stop, _ in card.runs for d in range(start, stop)] == list(range(8))


def test_a_device_has_a_stripe_for_each_mesh() -> None:
    devices = of_class(parsed(ppo()), "flowrl-device")
    stripes = [len(device.findall(f"{SVG}rect")) - 1 for device in devices]
    assert stripes == [1] * 8 + [2] * 4 + [1] * 4
    titles = [device.findtext(f"{SVG}title") or "" for device in devices]
    assert titles[0] == "H100 0 (node 0)\nmesh A\nrollout"
    assert titles[8] == "H100 8 (node 1)\nmesh B, C\nvalues, ref, update"


def test_devices_without_a_mesh_are_there() -> None:
    (mesh, *_) = ppo().meshes
    titles = [d.findtext(f"{SVG}title") for d in of_class(parsed(ppo(meshes=(mesh,))), "flowrl-device")]
    assert len(titles) == 16 and titles[15] == "H100 15 (node 1)\nno mesh\nruns nothing"


def test_many_devices_of_a_node_are_boxes_of_equal_ones() -> None:
    pools = pools_of(Cluster("cpu", 64))
    root = parsed(ppo(pools=pools, meshes=(PlannedMesh("A", 0, 0, 48), PlannedMesh("B", 0, 32, 32))))
    devices = of_class(root, "flowrl-device")
    assert [device.findtext(f"{SVG}text") for device in devices] == ["0–31", "32–47", "48–63"]


def test_pools_are_told_apart() -> None:
    pools = pools_of(Cluster("H100", nodes=2) + Cluster("L40S", gpus_per_node=4))
    text = placement_svg(ppo(pools=pools))
    assert "pool 0: 2 nodes of 8 H100" in text and "pool 1: 1 node of 4 L40S" in text


def test_memory_is_drawn_to_scale() -> None:
    bars = of_class(parsed(ppo()), "flowrl-memory")
    assert len(bars) == 3
    for bar, (held, transient) in zip(bars, [(7, 50), (40, 31), (33, 31)], strict=True):
        free, *used = (float(rect.get("width", "")) for rect in bar.findall(f"{SVG}rect"))
        assert used == [pytest.approx(free * part / 73.6, abs=0.1) for part in (held, transient)]
    assert "71.0 GB of 73.6 GB" in placement_svg(ppo())


def test_too_much_memory_stays_in_the_picture() -> None:
    (first, *rest) = ppo().stretches
    root = parsed(ppo(stretches=(replace(first, transient=200e9), *rest)))
    rects = of_class(root, "flowrl-memory")[0].findall(f"{SVG}rect")
    assert float(rects[2].get("x", "")) + float(rects[2].get("width", "")) < float(root.get("width", ""))


# -- the page -------------------------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    """Which elements there are, and whether each is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "rect", "path"):
            assert self.open.pop() == tag


def test_the_page_has_everything_and_needs_nothing() -> None:
    page = mapping_html(ppo(), title="PPO on 16")
    tags = _Tags(page)
    assert tags.open == [] and tags.seen.count("svg") == 2 and tags.seen.count("table") == 5
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert not re.search(r"(src|href)=", page)
    for part in (
        "<title>PPO on 16</title>",
        "Timeline",
        "all colocated",
        "one node more",
        "An iteration takes 40.0 s",
        "−18 %",
    ):
        assert part in page


def test_text_of_users_is_text() -> None:
    evil = "<script>alert(1)</script>"
    mapping = ppo()
    units = tuple(replace(u, label=evil, model=evil, mesh=evil) for u in mapping.units)
    meshes = tuple(replace(m, name=evil) for m in mapping.meshes)
    stretches = tuple(replace(s, units=(evil,)) for s in mapping.stretches)
    slots = tuple(replace(s, unit=evil) for s in mapping.slots)
    changed = replace(mapping, units=units, meshes=meshes, stretches=stretches, slots=slots, calibrated=evil)
    page = mapping_html(changed, title=evil)
    assert "script" not in _Tags(page).seen and "&lt;script&gt;" in page


@given(mappings())
@settings(max_examples=30, deadline=None)
def test_any_mapping_is_drawn(mapping: Mapping) -> None:
    picture = placement_svg(mapping)
    ElementTree.fromstring(picture)
    assert picture == placement_svg(replace(mapping))
    page = mapping_html(mapping)
    assert page == mapping_html(replace(mapping)) and _Tags(page).open == []
