"""The layout: boxes apart, edges around boxes, time independent of luck."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.drawing.layout import Layout, Line, lay_out
from flowrl.drawing.routes import Routes, WeightLine, route


def boxes_of(layout: Layout, routes: Routes) -> dict[str, tuple[float, float, float, float]]:
    """(left, top, right, bottom) by label."""
    out = {}
    for label, item in layout.boxes.items():
        y = routes.middle(item)
        out[label] = (
            item.x - item.width / 2,
            y - item.height / 2,
            item.x + item.width / 2,
            y + item.height / 2,
        )
    return out


@st.composite
def flows(draw: st.DrawFn) -> tuple[dict[str, tuple[float, float]], list[Line], list[WeightLine]]:
    """Acyclic data edges, weight edges anywhere."""
    count = draw(st.integers(1, 12))
    sizes = {f"n{i}": (draw(st.integers(60, 220)) * 1.0, draw(st.integers(30, 90)) * 1.0) for i in range(count)}
    node = st.integers(0, count - 1)
    data = draw(st.lists(st.tuples(node, node, st.sampled_from("ab")), max_size=24))
    lines = [Line(f"n{u}", f"n{v}", bundle) for u, v, bundle in data if u < v]
    weights = draw(st.lists(st.tuples(node, node, st.sampled_from("xy")), max_size=6))
    return sizes, lines, [WeightLine(f"n{u}", f"n{v}", m, "m, staleness 0") for u, v, m in weights if u != v]


@given(flows())
@settings(max_examples=100, deadline=None)
def test_boxes_are_apart_and_lines_go_around_them(
    flow: tuple[dict[str, tuple[float, float]], list[Line], list[WeightLine]],
) -> None:
    sizes, lines, weights = flow
    layout = lay_out(sizes, lines, [(w.writer, w.reader) for w in weights])
    routes = route(layout, weights)
    boxes = boxes_of(layout, routes)
    placed = list(boxes.values())
    for i, a in enumerate(placed):
        assert a[0] + 1e-6 >= 0 and a[2] <= layout.width + 1e-6 and a[1] >= 0 and a[3] <= routes.height + 1e-6
        for b in placed[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for line, way in zip(lines, layout.ways, strict=True):
        assert (way[0].label, way[-1].label) == (line.source, line.target)
        assert [item.layer for item in way] == list(range(way[0].layer, way[-1].layer + 1)), "down, layer by layer"
        for bend in way[1:-1]:
            for box in layout.layers[bend.layer]:
                assert box.label is None or abs(box.x - bend.x) >= box.width / 2, "a bend inside a box"
    for line, points in zip(weights, routes.weights, strict=True):
        pieces = list(pairwise(points)) if len(points) > 2 else []
        for (x0, y0), (x1, y1) in pieces:
            assert x0 == x1 or y0 == y1
            for label, (left, top, right, bottom) in boxes.items():
                inside_x = max(min(x0, x1), left + 0.1) < min(max(x0, x1), right - 0.1) or left < x0 == x1 < right
                inside_y = max(min(y0, y1), top + 0.1) < min(max(y0, y1), bottom - 0.1) or top < y0 == y1 < bottom
                assert not (inside_x and inside_y), f"{line} runs through {label}"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
@settings(max_examples=80, deadline=None)
def test_cycles_and_loops_do_not_hang(pairs: list[tuple[int, int]]) -> None:
    layout = lay_out({f"n{i}": (100.0, 40.0) for i in range(6)}, [Line(f"n{u}", f"n{v}") for u, v in pairs])
    assert len(layout.ways) == len(pairs)


def test_the_simplest_flows_have_no_crossings_and_straight_lines() -> None:
    chain = lay_out(dict.fromkeys("abc", (100.0, 40.0)), [Line("a", "b"), Line("b", "c")])
    assert len({item.x for item in chain.boxes.values()}) == 1
    crossed = lay_out(dict.fromkeys("abcd", (100.0, 40.0)), [Line("a", "d"), Line("b", "c")])
    a, b, c, d = (crossed.boxes[n].x for n in "abcd")
    assert (a < b) == (d < c)


def test_a_source_comes_right_above_its_first_reader() -> None:
    lines = [Line("a", "b"), Line("b", "c"), Line("c", "d"), Line("demos", "loss"), Line("loss", "d")]
    layout = lay_out(dict.fromkeys(["a", "b", "c", "d", "demos", "loss"], (100.0, 40.0)), lines)
    assert layout.boxes["loss"].layer == 2 and layout.boxes["demos"].layer == 1


def test_a_long_chain() -> None:
    names = [f"n{i}" for i in range(1500)]
    lines = [Line(a, b) for a, b in pairwise(names)]
    assert len(lay_out(dict.fromkeys(names, (100.0, 40.0)), lines).layers) == 1500
