"""Every notebook runs from top to bottom, draws its flow, shows what it promises, and is committed without outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: By notebook, what its drawn flow must name, and how many steps it trains.
EXPECTED: dict[str, dict[str, Any]] = {
    "quickstart": {
        "nodes": ["prompts", "Rollout", "FunctionReward", "GroupAdvantage", "ReferenceLogprobs", "GRPOLoss", "Updater"],
        "steps": 30,
    },
    "placement": {
        "nodes": [
            "prompts",
            "Rollout",
            "RewardModelScore",
            "Critic",
            "PolicyLogprobs",
            "ReferenceLogprobs",
            "GAE",
            "Updater",
        ],
    },
}
TRAINING = pytest.mark.parametrize("executed", ["quickstart"], indirect=True)
PLANNING = pytest.mark.parametrize("executed", ["placement"], indirect=True)
CELL_TIMEOUT = 240

ids = [p.stem for p in NOTEBOOKS]


@pytest.fixture(scope="module", params=ids)
def executed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, Path]]:
    """(name, the notebook with its outputs, where it ran)."""
    path = FOLDER / f"{request.param}.ipynb"
    folder = tmp_path_factory.mktemp(path.stem)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("PYTHONPATH", str(FOLDER.parent))
        environment.delenv("MPLBACKEND", raising=False)
        notebook = nbformat.read(path, as_version=4)
        client = nbclient.NotebookClient(
            notebook, timeout=CELL_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    yield path.stem, notebook, folder


def outputs(notebook: Any, kind: str) -> list[str]:
    """What its cells showed of one MIME type, in order."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if kind in output.get("data", {}):
                found.append(output["data"][kind])
    return found


def printed(notebook: Any) -> str:
    """What its cells printed."""
    texts = [o["text"] for c in notebook.cells for o in c.get("outputs", []) if o["output_type"] == "stream"]
    return "".join(texts)


def test_there_are_notebooks() -> None:
    assert set(EXPECTED) == set(ids)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, f"cell {cell.id} has outputs"
            assert cell.metadata == {}, f"cell {cell.id} has metadata {cell.metadata}"


def test_the_flow_draws_itself(executed: tuple[str, Any, Path]) -> None:
    name, notebook, _ = executed
    drawings = outputs(notebook, "image/svg+xml")
    assert drawings, "no flow was drawn"
    picture = ElementTree.fromstring(drawings[0])
    texts = " ".join(t for element in picture.iter() for t in (element.text,) if t)
    for node in EXPECTED[name]["nodes"]:
        assert node in texts, f"{node} is not in the picture"
    dashed = [e for e in picture.iter() if e.get("stroke-dasharray") and e.tag.endswith("path")]
    assert len(dashed) >= 1
    assert "staleness 0" in texts
    # A solid line is a batch.
    assert any(e.tag.endswith("path") and not e.get("stroke-dasharray") for e in picture.iter())
    assert "Rollouts" in texts


@TRAINING
def test_progress_is_shown_live(executed: tuple[str, Any, Path]) -> None:
    name, notebook, folder = executed
    steps = EXPECTED[name]["steps"]
    shown = [html for html in outputs(notebook, "text/html") if f"step {steps}/{steps}" in html]
    assert len(shown) == 1, "the table of the run is not there, or was not replaced in place"
    assert "reward" in shown[0] and "KL" in shown[0] and "eval heldout" in shown[0]
    assert list(folder.glob("runs/*/report.html")), "the run left no report in its working directory"


@TRAINING
def test_it_learns_and_shows_it(executed: tuple[str, Any, Path]) -> None:
    _, notebook, _ = executed
    text = printed(notebook)
    found = re.search(r"mean reward (\d\.\d+) → (\d\.\d+)", text)
    assert found is not None, text
    before, after = map(float, found.groups())
    assert before < 0.2 and after > 0.6
    assert "reward/mean" in text
    assert outputs(notebook, "image/png"), "the curves are not there"


@PLANNING
def test_plans_are_drawn(executed: tuple[str, Any, Path]) -> None:
    _, notebook, _ = executed
    pages = outputs(notebook, "text/html")
    assert len(pages) == 2
    for page in pages:
        assert "<svg" in page and "train_actor" in page and "http://" not in page.replace("http://www.w3.org", "")


@PLANNING
def test_plans_are_told_in_words(executed: tuple[str, Any, Path]) -> None:
    _, notebook, _ = executed
    text = printed(notebook)
    rows = re.findall(r"^ *(\d+) +([\d.]+) s +([\d.]+) s +([\d.]+)% +\d+ s$", text, re.MULTILINE)
    assert [int(devices) for devices, *_ in rows] == [8, 64, 512]
    periods = [float(period) for _, period, *_ in rows]
    assert periods == sorted(periods, reverse=True)
    assert all(float(bound) <= float(period) for _, period, bound, _ in rows)
    assert text.count("by estimate") > 5
    assert "~ num_devices 64 → 512" in text  # what is different
    stale = re.search(r"staleness 0: ([\d.]+) s, staleness 1: ([\d.]+) s", text)
    assert stale is not None and float(stale[2]) <= float(stale[1])
    assert re.search(r"32 devices +H100 0–31 \(nodes 0–3\) +(\w+, )*sample", text), "the pin was not kept"
    assert "H100 and 8 nodes of 8 L40S" in text
    assert "This flow does not fit: " in text and "it fits on" in text
