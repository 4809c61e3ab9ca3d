"""The report: one file, complete, safe against what completions say."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.display import graph_svg
from flowrl.runtime.report import write_report
from tests.graphs import ppo_graph

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page: its tags, its attributes, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


EMPTY = pa.table({"step": pa.array([], pa.int64())})


def metrics(steps: int = 12) -> pa.Table:
    count = range(steps)
    return pa.table(
        {
            "step": list(count),
            "reward/mean": [i / steps if i else None for i in count],
            "reward/math": [i / steps for i in count],
            "reward/format": [0.5 for _ in count],
            "grad_norm": [math.inf if i == 3 else 1.0 for i in count],
            "loss": [math.nan for _ in count],
            "eval/heldout/pass@1": [0.25 if i == 0 else 0.75 if i == steps - 1 else None for i in count],
            "note": [None if i else "first" for i in count],
        }
    )


def sample(step: int, prompt: Any, response: str, **more: Any) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "response": response, "reward": 1.0, "finish_reason": "stop", **more}


def written(path: Path, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "title": "ppo",
        "graph_svg": graph_svg(ppo_graph()),
        "metrics": metrics(),
        "samples": [sample(1, "2+2=?", "5"), sample(9, "2+2=?", "4")],
        "summary": {"status": "finished", "steps": "11 of 11", "torch": "2.13"},
        "plan_text": "one device",
    }
    write_report(path / "report.html", **{**arguments, **changes})
    return (path / "report.html").read_text(encoding="utf-8")


def test_all_sections_are_there(tmp_path: Path) -> None:
    text = written(tmp_path)
    page = Page(text)
    for word in ("Result", "Curves", "Before and after", "Flow", "one device", "torch", "eval/heldout/pass@1"):
        assert word in page.text, word
    assert page.tags.count("figure") == 5
    assert "0.25 → 0.75" in page.text, "the headline"
    assert "ReferenceLogprobs#0" in page.text, "the flow is drawn inside"


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = written(tmp_path)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value is not None and value.startswith("#"), (name, value)
    assert "default-src 'none'" in text


def test_what_is_not_finite_is_shown_as_such(tmp_path: Path) -> None:
    text = Page(written(tmp_path)).text
    assert "1 not finite" in text and "12 not finite" in text and "NaN" in text


ATTACKS = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "]]> <!-- --> <![CDATA[",
    "\x00\x08\x1b[31m\ud800\udfff\ufffe",
    "\u202egnp.exe\u202c",
    "$x^{$ \\frac{",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_untrusted_text_stays_text(tmp_path: Path, attack: str) -> None:
    name = "reward/" + attack.encode("utf-8", "replace").decode()
    table = pa.table({"step": [1, 2], name: [0.1, 0.2], "reward/b": [0.1, 0.2], name + "text": [None, name]})
    text = written(
        tmp_path,
        title=attack,
        metrics=table,
        samples=[
            sample(1, attack, attack, rewards={attack: 1.0, "b": 0.0}, invalid=attack, finish_reason=attack),
            sample(9, attack, attack, evaluation=attack),
            sample(2, [{"role": attack, "content": attack}], attack, rewards={attack: "NaN"}),
            sample(5, [{"role": attack, "content": attack}], attack),
        ],
        summary={attack: attack, "status": attack},
        plan_text=attack,
    )
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", text)


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_any_text_gives_a_well_formed_page(tmp_path_factory: pytest.TempPathFactory, a: str, b: str) -> None:
    folder = tmp_path_factory.mktemp("report")
    Page(written(folder, metrics=EMPTY, samples=[sample(1, a, b), sample(2, a, b)], plan_text=b, title=a))


def test_huge_texts_are_cut(tmp_path: Path) -> None:
    text = written(
        tmp_path, metrics=EMPTY, samples=[sample(1, "p" * 10**6, "r" * 10**6), sample(2, "p" * 10**6, "r" * 10**6)]
    )
    assert len(text) < 500_000 and "998,500 more characters" in text


def test_prompts_are_paired_and_held_out_ones_come_first(tmp_path: Path) -> None:
    samples = [
        sample(1, "train", "early train"),
        sample(0, "held", "early held", evaluation="heldout"),
        sample(9, "train", "late train"),
        sample(9, "held", "late held", evaluation="heldout"),
        sample(5, "once", "only once"),
    ]
    text = Page(written(tmp_path, metrics=EMPTY, samples=samples)).text
    table = text[text.index("Before and after") : text.index("sampled at step")]
    order = [table.index(w) for w in ("early held", "late held", "early train", "late train")]
    assert order == sorted(order) and "only once" not in table


def test_without_matplotlib_there_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(written(tmp_path))
    assert page.text.count("pip install matplotlib") == 1 and "figure" not in page.tags
    assert "Before and after" in page.text


def test_a_run_without_steps_samples_or_plan(tmp_path: Path) -> None:
    page = Page(written(tmp_path, metrics=EMPTY, samples=[], plan_text="", graph_svg="", summary={}))
    assert "No step was completed" in page.text and "Completions" not in page.text


def test_equal_runs_give_equal_reports(tmp_path: Path) -> None:
    assert written(tmp_path) == written(tmp_path)
