"""``python -m tests.reference DIR``: run every case of every ``*.jsonl`` in DIR, from the root of the repository.

Prints how many passed and failed of each kind and name, and what is wrong with those that failed. Exits with 0 if all
match, with 1 on a mismatch, a kind, name, parameter or input that is unknown or missing, a malformed line, or where there
is no case, and with 2 where there is no such folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.reference.functions import UnknownCase, compare
from tests.reference_cases import MalformedCase, read_case, read_lines

#: What a line that cannot be read counts under.
UNREADABLE = ("?", "unreadable line")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with *.jsonl, a case a line")
    folder: Path = parser.parse_args(arguments).folder
    if not folder.is_dir():
        print(f"There is no folder {folder}", file=sys.stderr)
        return 2
    counts: dict[tuple[str, str], list[int]] = {}
    complaints: list[str] = []
    for place, line in read_lines(folder):
        name, complaint = run_line(line, place)
        counts.setdefault(name, [0, 0])[complaint is not None] += 1
        complaints += [] if complaint is None else [complaint]
    if not counts:
        print(f"{folder} holds no case: expected *.jsonl with one JSON object a line", file=sys.stderr)
        return 1
    print_table(counts)
    for complaint in complaints:
        print(f"FAILED {complaint}")
    return 1 if complaints else 0


def run_line(line: str, place: str) -> tuple[tuple[str, str], str | None]:
    """The kind and name that a line counts under, and what is wrong with it."""
    try:
        case = read_case(line, place)
    except MalformedCase as error:
        return UNREADABLE, str(error)
    name = (case.kind, case.name)
    try:
        deviation = compare(case)
    except UnknownCase as error:
        return name, str(error)
    except Exception as error:  # whatever a case does, the others are still run
        return name, f"{case}: {type(error).__name__}: {error}"
    return name, None if deviation.is_match else f"{case}: {deviation}"


def print_table(counts: dict[tuple[str, str], list[int]]) -> None:
    lines = [(*name, *map(str, pair)) for name, pair in sorted(counts.items())]
    totals = [str(sum(pair[i] for pair in counts.values())) for i in (0, 1)]
    table = [("kind", "name", "passed", "failed"), *lines, ("total", "", *totals)]
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    for kind, name, passed, failed in table:
        print(f"{kind:<{widths[0]}}  {name:<{widths[1]}}  {passed:>{widths[2]}}  {failed:>{widths[3]}}")


if __name__ == "__main__":
    sys.exit(main())
