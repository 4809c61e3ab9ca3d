"""The picture of a flow: complete, well-formed, escaped, the same for equal graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from types import SimpleNamespace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.display import flow_html, graph_svg, graph_text, mimebundle
from flowrl.drawing.svg import escape, fit, text_width
from tests.graphs import ppo_graph

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Labels of the boxes, and (source, target, kind) of the edges, as they were drawn."""
    groups = list(ET.fromstring(svg).iter(f"{SVG}g"))
    nodes = [g.attrib["data-label"] for g in groups if g.get("class") == "flowrl-node"]
    edges = [
        (g.attrib["data-source"], g.attrib["data-target"], g.attrib["data-kind"])
        for g in groups
        if g.get("class") == "flowrl-edge"
    ]
    return nodes, edges


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text")]


def test_all_nodes_and_edges_are_drawn() -> None:
    graph = ppo_graph()
    nodes, edges = drawn(graph_svg(graph, "PPO"))
    assert nodes == list(graph)
    assert sorted(edges) == sorted((u, v, d["kind"]) for u, v, d in graph.edges(data=True))


def test_words_in_the_picture() -> None:
    svg = graph_svg(ppo_graph(), "my PPO")
    words = texts(svg)
    assert {"my PPO", "Rollout#0", "group_size=4", "Rollouts", "OldLogprobs", "actor, staleness 0"} <= set(words)
    assert words.count("Rollouts") == 1, "one label for a bundle of edges"
    assert {"rollout", "updater", "batch", "weights, for the next iteration"} <= set(words), "the legend"
    assert "recipe.py:11" in svg and "gamma = 1.0" in svg, "tooltips"


def test_weights_are_dashed_and_data_is_not() -> None:
    for group in ET.fromstring(graph_svg(ppo_graph())).iter(f"{SVG}g"):
        if group.get("class") == "flowrl-edge":
            path = group.find(f"{SVG}path")
            assert path is not None
            assert ("stroke-dasharray" in path.attrib) == (group.get("data-kind") == "weights")


def test_an_elided_call_is_struck_out_and_faint() -> None:
    root = ET.fromstring(graph_svg(ppo_graph(elided=True)))
    box = next(g for g in root.iter(f"{SVG}g") if g.get("data-label") == "PolicyLogprobs#0")
    assert box.get("opacity") == "0.5"
    assert any(t.get("text-decoration") == "line-through" for t in box.iter(f"{SVG}text"))
    assert "left out" in texts(graph_svg(ppo_graph(elided=True)))
    assert "left out" not in texts(graph_svg(ppo_graph()))
    assert graph_text(ppo_graph(elided=True)).count("(left out by the compiler)") == 1


def test_nothing_lies_outside_the_picture() -> None:
    root = ET.fromstring(graph_svg(ppo_graph(), "PPO"))
    width = float(root.attrib["width"])
    frame = next(iter(root.iter(f"{SVG}rect")))
    assert float(frame.attrib["width"]) == width - 1
    shift = float(root.findall(f"{SVG}g")[0].attrib["transform"].split("(")[1].split(",")[0])
    for rect in root.findall(f"{SVG}g")[0].iter(f"{SVG}rect"):
        left = shift + float(rect.attrib["x"])
        assert left >= 0 and left + float(rect.attrib["width"]) <= width


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    svg = graph_svg(ppo_graph())
    assert "<script" not in svg and "url(" not in svg and "href" not in svg
    assert svg.count("http") == 1, "the name space alone"


@pytest.mark.parametrize(
    "attack", ["</title><script>alert(1)</script>", '" onload="alert(1)', "a\x00b\ud800", "]]>&<!--"]
)
def test_names_are_escaped(attack: str) -> None:
    graph = nx.MultiDiGraph()
    graph.add_node(attack, title=attack, kind=attack, settings={attack: attack}, models=(attack,), where=attack)
    graph.add_node("b", title="B", kind="host", settings={}, models=(), where="", elided=False)
    graph.add_edge(attack, "b", kind="data", argument=attack, type=attack, path=attack)
    graph.add_edge("b", attack, kind="weights", model=attack, staleness=1)
    svg = graph_svg(graph, attack)
    root = ET.fromstring(svg)
    assert not list(root.iter(f"{SVG}script")) and not any("onload" in e.attrib for e in root.iter())
    page = flow_html(graph, attack)
    assert "<script" not in page and "<!--" not in page
    page.encode("utf-8")
    assert "\x00" not in graph_text(graph)


names = st.text(max_size=40)


@given(
    labels=st.lists(names, unique=True, min_size=1, max_size=7),
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans(), names), max_size=16),
    title=names,
)
@settings(max_examples=40, deadline=None)
def test_any_graph_gives_well_formed_xml(
    labels: list[str], pairs: list[tuple[int, int, bool, str]], title: str
) -> None:
    graph = nx.MultiDiGraph()
    for label in labels:
        graph.add_node(label, title=label, kind="rollout", settings={label: label}, models=(label,), where=label)
    for u, v, is_data, name in pairs:
        source, target = labels[u % len(labels)], labels[v % len(labels)]
        if is_data:
            graph.add_edge(source, target, kind="data", argument=name, type=name, path=name)
        else:
            graph.add_edge(source, target, kind="weights", model=name, staleness=0)
    nodes, edges = drawn(graph_svg(graph, title))
    assert len(nodes) == len(labels) and len(edges) == graph.number_of_edges()
    assert len(graph_text(graph).splitlines()) == len(labels)


def test_an_empty_graph_and_bare_nodes() -> None:
    ET.fromstring(graph_svg(nx.MultiDiGraph()))
    assert graph_text(nx.MultiDiGraph()) == ""
    graph = nx.MultiDiGraph()
    graph.add_edge("a", "b")
    assert drawn(graph_svg(graph)) == (["a", "b"], [("a", "b", "data")])


def test_one_picture_whatever_the_hash_seed() -> None:
    program = "from tests.graphs import *; from flowrl.display import *; print(graph_svg(ppo_graph(), 't'))"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    pictures = {run.communicate(timeout=60)[0] for run in runs}
    assert len(pictures) == 1 and b"<svg" in pictures.pop()


def test_text_has_one_line_a_call() -> None:
    lines = graph_text(ppo_graph()).splitlines()
    assert len(lines) == len(ppo_graph())
    rollout = next(line for line in lines if line.startswith("Rollout#0"))
    assert "Rollout(actor, group_size=4)" in rollout
    assert "prompts=prompts: Prompts" in rollout and "weights of actor=Updater#0 (staleness 0)" in rollout


def test_mimebundle_and_html() -> None:
    bundle = mimebundle(ppo_graph())
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert bundle["image/svg+xml"].startswith("<svg")
    page = flow_html(ppo_graph(), "PPO")
    assert page.count("<tr>") == len(ppo_graph()) + 1


def test_settings_at_their_default_are_left_out_of_the_box() -> None:
    @dataclass
    class Settings:
        clip: float = 0.2
        epochs: int = 1
        names: list[str] = field(default_factory=list)

    graph = nx.MultiDiGraph()
    call = SimpleNamespace(node=Settings(epochs=3))
    values = {"clip": "0.2", "epochs": "3", "names": "[]"}
    graph.add_node("a", title="A", kind="host", settings=values, models=(), where="", call=call)
    assert "epochs=3" in texts(graph_svg(graph))
    assert "clip = 0.2" in graph_svg(graph), "the tooltip has them all"


def test_fit_and_escape() -> None:
    assert fit("short", 11, 100) == "short"
    cut = fit("a" * 500, 11, 100)
    assert cut.endswith("…") and text_width(cut, 11) <= 100
    assert fit("", 11, 0) == ""
    assert escape("x" * 5000).endswith("(3,000 more characters)")
    assert escape("<a href='\ufffe\x1b'>") == "&lt;a href=&#x27;\ufffd\ufffd&#x27;&gt;"
