"""Wrong edges are red in the editor: pyright and mypy mark the lines that a comment says, and no others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def _expected(file: Path, *marks: str) -> set[int]:
    lines = file.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith(marks)}


def _pyright(*files: Path) -> dict[str, set[int]]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1]).stdout)
    found: dict[str, set[int]] = {}
    for item in report["generalDiagnostics"]:
        found.setdefault(Path(item["file"]).name, set()).add(item["range"]["start"]["line"] + 1)
    return found


@pytest.mark.slow
def test_mypy_marks_wrong_edges() -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--disable-error-code=empty-body",
        str(FOLDER / "wrong.py"),
        str(FOLDER / "right.py"),
    ]
    output = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1]).stdout
    found = {(Path(m[1]).name, int(m[2])) for m in re.finditer(r"^(\S+\.py):(\d+): error", output, re.M)}
    ours = {(name, line) for name, line in found if name in ("right.py", "wrong.py")}
    # mypy does not look at the truth value of an object: that line is left to pyright, and to run time.
    assert ours == {("wrong.py", line) for line in _expected(FOLDER / "wrong.py", "# red")}, output


def test_pyright_marks_wrong_edges_and_nothing_else() -> None:
    found = _pyright(FOLDER / "wrong.py", FOLDER / "right.py")
    assert found.get("right.py", set()) == set()
    assert found["wrong.py"] == _expected(FOLDER / "wrong.py", "# red", "# red, pyright only")
