"""The numbers that users moving here will compare against: another library's, on seeded inputs. And the runner itself
(``python -m tests.reference``), which must not pass what it should not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reference import functions
from tests.reference.__main__ import main
from tests.reference.functions import TABLE, UnknownCase, compare
from tests.reference_cases import SAMPLE, WHOLE, Case, cases, read_case

CASES = [(folder, case) for folder in (SAMPLE, WHOLE) if folder.is_dir() for case in cases(folder)]


@pytest.mark.parametrize(
    "case", [case for _, case in CASES], ids=[f"{f.parent.name}-{c.name}-{c.place}" for f, c in CASES]
)
def test_case(case: Case) -> None:
    deviation = compare(case)
    assert deviation.is_match, f"{case}: {deviation}"


def test_the_sample_has_cases_of_every_name() -> None:
    names = {(kind, name) for kind, entries in TABLE.items() for name in entries}
    assert {(case.kind, case.name) for folder, case in CASES if folder == SAMPLE} == names


# -- the runner --------------------------------------------------------------------------------------------------------


def raw(name: str = "k1", kind: str = "kl") -> dict[str, Any]:
    """The first case of a name, as it is written."""
    lines = (SAMPLE / f"{kind}.jsonl").read_text().splitlines()
    return next(case for case in map(json.loads, lines) if case["name"] == name)


def run(folder: Path, capsys: pytest.CaptureFixture[str], *lines: str | dict[str, Any]) -> tuple[int, str]:
    """Exit code and output of the runner on these lines."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "cases.jsonl").write_text("\n".join(texts) + "\n")
    code = main([str(folder)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def change(case: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """The case with another value at a path."""
    inner = case
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return case


def test_passed_and_failed_by_kind_and_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(tmp_path, capsys, raw(), raw(), raw("grpo", "advantage"))
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["kind", "name", "passed", "failed"],
        ["advantage", "grpo", "1", "0"],
        ["kl", "k1", "2", "0"],
        ["total", "3", "0"],
    ]


def test_a_mismatch_is_shown_where_it_is_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = raw()
    right = wrong["expected"]["kl"][1][0]
    change(wrong, "expected", "kl", 1, 0, to=right + 0.5)
    change(wrong, "expected", "kl", 0, 0, to=wrong["expected"]["kl"][0][0] + 1e-3)
    code, out = run(tmp_path, capsys, raw(), wrong)
    assert code == 1 and ["kl", "k1", "1", "1"] in [line.split() for line in out.splitlines()]
    failed = next(line for line in out.splitlines() if line.startswith("FAILED"))
    assert failed.startswith("FAILED cases.jsonl:2 kl k1 seed=0: kl[1][0] is") and "off by 0.5" in failed


@pytest.mark.parametrize(
    ("name", "kind", "result"),
    [("vanilla", "policy_loss", "loss"), ("vanilla", "policy_loss", "grad_logprobs"), ("gae", "advantage", "returns")],
)
def test_every_result_is_compared(
    name: str, kind: str, result: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = raw(name, kind)
    if isinstance(wrong["expected"][result], list):
        wrong["expected"][result][0][0] += 1e-3
    else:
        wrong["expected"][result] += 1e-3
    code, out = run(tmp_path, capsys, wrong)
    assert code == 1 and f": {result}" in out


@pytest.mark.parametrize(("off", "code"), [(0.9e-5, 0), (1.1e-5, 1)])
def test_the_tolerance(off: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token's loss of 0 and an expected value just inside, or outside, of atol = 1e-5."""
    case = raw("token-sum", "aggregate")
    case |= {"lengths": [1], "groups": [0], "mask": [[1]], "inputs": {"loss": [[0.0]]}, "expected": {"value": off}}
    assert run(tmp_path, capsys, case)[0] == code


@pytest.mark.parametrize("expected", ["NaN", "0.0"])
def test_nan_is_a_mismatch(expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = change(raw("token-sum", "aggregate"), "inputs", "loss", 0, 0, to=float("nan"))
    line = json.dumps(change(case, "expected", "value", to="?")).replace('"?"', expected)
    code, out = run(tmp_path, capsys, line)
    assert code == 1 and "is nan" in out


def without(*path: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(case: dict[str, Any]) -> dict[str, Any]:
        inner = case
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return case

    return change


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda c: change(c, "kind", to="reward"), "no kind 'reward'"),
        (lambda c: change(c, "name", to="ppo3"), "no policy_loss 'ppo3'"),
        (lambda c: change(c, "params", "epsilon", to=0.1), "no parameter 'epsilon'"),
        (without("params", "dual_clip"), "parameter 'dual_clip' is missing"),
        (lambda c: change(c, "inputs", "ref", to=c["inputs"]["logprobs"]), "no input 'ref'"),
        (without("inputs", "old_logprobs"), "input 'old_logprobs' is missing"),
        (lambda c: change(c, "expected", "entropy", to=0.0), "no result 'entropy'"),
        (lambda c: change(c, "params", "aggregate", to="median"), "no aggregation 'median'"),
        (lambda c: change(c, "params", "clip_ratio_low", to="much"), "TypeError"),
        (without("mask"), "lacks mask"),
        (without("expected", "loss"), "passed"),  # a result that is not asked for is not compared
        (lambda c: change(c, "lengths", 0, to=99), "mask is not"),
        (lambda c: change(c, "groups", to=[0]), "groups are not"),
        (lambda c: change(c, "inputs", "logprobs", 0, to=[0.0]), "inputs.logprobs is neither"),
        (lambda c: change(c, "expected", to={}), "expected is empty"),
    ],
)
def test_what_it_does_not_know_fails(
    alter: Callable[[dict[str, Any]], dict[str, Any]],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out = run(tmp_path, capsys, alter(raw("vanilla", "policy_loss")))
    assert said in out
    assert code == (0 if said == "passed" else 1)


@pytest.mark.parametrize("line", ["{", "[1]", "nonsense", '{"kind": "kl"}', "\x00"])
def test_malformed_lines_are_named_and_the_others_are_run(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(tmp_path, capsys, raw(), line)
    assert code == 1 and "FAILED cases.jsonl:2: " in out
    assert ["kl", "k1", "1", "0"] in [line.split() for line in out.splitlines()]


def test_a_folder_without_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no case" in capsys.readouterr().err
    assert run(tmp_path, capsys, "", "  ")[0] == 1
    assert main([str(tmp_path / "absent")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_settings_reach_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another value of any setting that a formula reads, the case is a mismatch."""
    unread = {
        "gspo": {"dual_clip"},
        "sapo": {"dual_clip", "clip_ratio_low", "clip_ratio_high"},
        "gpg": {"dual_clip", "clip_ratio_low", "clip_ratio_high"},
        "cispo": {"dual_clip"},
        "dro": {"dual_clip", "clip_ratio_low", "clip_ratio_high"},
        "kl_cov": {"dual_clip", "clip_ratio_low", "clip_ratio_high"},
        "geo_mean": {"dual_clip", "aggregate"},
    }
    others = {
        "token-mean": "token-sum",
        "seq-mean-token-mean": "seq-mean-token-sum",
        True: False,
        False: True,
    }
    matched: dict[tuple[str, str, str], bool] = {}
    for case in cases(SAMPLE):
        for param, value in case.params.items():
            other = others[value] if isinstance(value, bool | str) else 0.5 if param == "eps" else value / 20
            changed = {**case.__dict__, "params": {**case.params, param: other}}
            fields = {name: changed[name] for name in Case.__dataclass_fields__}
            key = (case.kind, case.name, param)
            matched[key] = matched.get(key, True) and compare(Case(**fields)).is_match
    silent = {(kind, name, param) for (kind, name, param), same in matched.items() if same}
    assert silent == {("policy_loss", name, param) for name, params in unread.items() for param in params}


def test_a_case_without_numbers_proves_nothing() -> None:
    empty = raw() | {"lengths": [], "groups": [], "mask": [], "expected": {"kl": []}}
    empty["inputs"] = {"logprobs": [], "ref_logprobs": []}
    with pytest.raises(UnknownCase, match="no number to compare"):
        compare(read_case(json.dumps(empty), "here"))


def test_as_a_command(tmp_path: Path) -> None:
    root = Path(functions.__file__).parents[2]
    wrong = change(raw(), "expected", "kl", 0, 0, to=7.0)
    (tmp_path / "cases.jsonl").write_text(json.dumps(wrong))
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference", str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 1 and "FAILED cases.jsonl:1 kl k1" in done.stdout, done.stderr
