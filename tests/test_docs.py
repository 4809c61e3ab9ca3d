"""Every ```python block of the README and of docs/*.md runs as printed.

A ```text block behind ``<!-- printed: EXPRESSION -->`` is an excerpt of that text, as the blocks before it leave it: each of its
lines is a line of it, or what comes before an ``…`` is how one begins.

Blocks of one file share a namespace, as a reader who pastes one after the other has it. A block behind a line
``<!-- not run -->`` is left out (it needs an accelerator, say). Nothing is in the namespace beforehand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<mark><!-- not run -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

PRINTED = re.compile(r"^<!-- printed: (?P<of>.+?) -->\n```text\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the first statement, code) of every block that is run."""
    text = page.read_text()
    return [
        (text.count("\n", 0, found.start("code")) + 1, found["code"])
        for found in BLOCK.finditer(text)
        if not found["mark"]
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page):
        padded = "\n" * (line - 1) + code  # errors then point into the page
        exec(compile(padded, str(page), "exec", dont_inherit=True), names)
    for found in PRINTED.finditer(page.read_text()):
        printed = str(eval(found["of"], names)).splitlines()
        for line in found["lines"].splitlines():
            begin, ellipsis, _ = line.partition("…")
            there = any(text.startswith(begin) if ellipsis else text == line for text in printed)
            assert there, f"{page.name}: {found['of']} does not print {line!r}"


def test_blocks_are_found() -> None:
    assert sum(len(blocks(page)) for page in PAGES) > 10
