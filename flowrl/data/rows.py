"""Reading rows: from JSON-lines files and from Python objects, each mistake named by file, line and column.

A row that comes out of here is a dict of JSON values with the columns of the first row; nothing was repaired
on the way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import DataError, nearest

#: Who may speak in a chat prompt.
ROLES = ("system", "developer", "user", "assistant", "tool")

JSONL_HINT = "write UTF-8 text with one JSON object a line"


class Row(NamedTuple):
    """One row, and how an error calls it: ``"train.jsonl, line 3"``."""

    where: str
    values: dict[str, Any]


def read_jsonl(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Row]:
    """The rows of a JSON-lines file, blank lines skipped; after ``limit`` rows the rest is not read.

    Raises:
        DataError: no such file, a folder, unreadable, not UTF-8, invalid JSON, a line that is no object.
    """
    check_limit(limit)
    path = Path(path)
    check_file(path)
    try:
        with path.open("rb") as file:  # bytes: only b"\n" ends a line, and a bad byte has a line number
            rows = (parse_line(f"{path}, line {n}", n, line) for n, line in enumerate(file, 1) if line.strip())
            yield from islice(rows, limit)
    except OSError as error:
        raise DataError(f"Data file {path} cannot be read", received=error, do="check its permissions") from None


def check_file(path: Path) -> None:
    """Raise unless ``path`` is an existing file, with the nearest name in its folder."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(
            f"Data file {path} is a folder",
            expected="a JSON-lines file",
            received=f"a folder that holds {some_names(path)}",
            do="name one file",
        )
    if path.exists():
        raise DataError(f"Data file {path} is not a regular file", expected="a JSON-lines file")
    folder = path.parent
    if not folder.is_dir():
        raise DataError(
            f"Data file {path} does not exist",
            expected="a JSON-lines file",
            received=f"a path whose folder {folder} does not exist",
            do=f"check the path; relative paths start at {Path.cwd()}",
        )
    hint = nearest(path.name, file_names(folder))
    if not hint.startswith("did you mean"):
        hint = f"check the path; relative paths start at {Path.cwd()}"
    raise DataError(
        f"Data file {path} does not exist",
        expected=f"a file in {folder.resolve()}",
        received=f"a folder that holds {some_names(folder)}",
        do=hint,
    )


def file_names(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if p.is_file())
    except OSError:
        return []


def some_names(folder: Path, most: int = 8) -> str:
    """The files of a folder in words, at most so many."""
    names = file_names(folder)
    shown = ", ".join(map(repr, names[:most]))
    return (shown or "no file") + (f" and {len(names) - most} more files" if len(names) > most else "")


def parse_line(where: str, number: int, line: bytes) -> Row:
    """One line of a JSON-lines file."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8",
            expected="UTF-8 text",
            received=f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line",
            do=JSONL_HINT + " (no other encoding, not compressed)",
        ) from None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: invalid JSON",
            expected="one JSON object",
            received=f"{error.msg} at character {error.pos + 1}: {shorten(text.strip())}",
            do=JSONL_HINT,
        ) from None
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deep to read", do=JSONL_HINT) from None
    except ValueError as error:  # a number with thousands of digits
        raise DataError(f"{where}: a number that cannot be read", received=error, do="write it as text") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: not a JSON object", expected="an object", received=describe(values), do=JSONL_HINT)
    return Row(where, values)


def read_objects(rows: Iterable[Mapping[str, Any]], limit: int | None = None) -> Iterator[Row]:
    """Rows from Python mappings of JSON values, numbered from 1.

    Raises:
        DataError: a row that is not a mapping, or a value that JSON cannot hold unchanged (rows travel as
            JSON).
    """
    check_limit(limit)
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise DataError("from_rows takes rows", expected="an iterable of dicts", received=describe(rows))
    for number, row in enumerate(islice(rows, limit), 1):
        where = f"row {number}"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where}: not a dict",
                expected="a dict of column names and values",
                received=describe(row),
                do="give dicts; of a pandas frame: frame.to_dict('records')",
            )
        for name, value in row.items():
            if not isinstance(name, str):
                raise DataError(f"{where}: a column name is not a text", expected="text", received=describe(name))
            problem = json_problem(value)
            if problem:
                raise DataError(
                    f"{where}: column {name!r} holds {problem}",
                    expected="what JSON holds unchanged: texts, numbers, booleans, None, lists, dicts",
                    do="convert it before: rows travel between processes as JSON",
                )
        yield Row(where, dict(row))


def json_problem(value: Any) -> str | None:
    """What in ``value`` JSON cannot hold unchanged, in words; None when nothing."""
    try:
        found = _unlike_json(value)
        if found is None:
            json.dumps(value)
        return found
    except RecursionError:
        return "values nested too deep, or in themselves"
    except (TypeError, ValueError) as error:  # an integer with thousands of digits, a list in itself
        return f"a value that JSON cannot hold ({error})"


def _unlike_json(value: Any) -> str | None:
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, list):
        return next((p for p in map(_unlike_json, value) if p), None)
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                return f"a dict with the key {key!r}, which is not a text"
            problem = _unlike_json(inner)
            if problem:
                return problem
        return None
    return f"a {type(value).__name__}"


def check_limit(limit: int | None) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError("limit is wrong", expected="a number of rows from 1 on, or None", received=describe(limit))


def collect(rows: Iterable[Row], required: Sequence[str], origin: str) -> tuple[list[str], dict[str, list[Any]]]:
    """The rows as columns, and what errors call each row.

    Args:
        required: columns that must be there.
        origin: what an empty data set is called.

    Raises:
        DataError: no row, a required column that is missing, a column that some rows have and others lack.
    """
    places: list[str] = []
    columns: dict[str, list[Any]] = {}
    for where, values in rows:
        if not places:
            for name in required:
                if name not in values:
                    raise _missing_column(where, name, list(values))
            columns = {name: [] for name in values}
            _check_names(where, columns)
        elif values.keys() != columns.keys():
            raise _other_columns(where, values, columns, places[0])
        for name, value in values.items():
            columns[name].append(value)
        places.append(where)
    if not places:
        raise DataError(f"{origin} is empty", expected="at least one row", received="none")
    return places, columns


def _missing_column(where: str, name: str, present: list[str]) -> DataError:
    return DataError(
        f"{where}: no column {name!r}",
        expected=f"a column {name!r}",
        received=f"the columns {', '.join(map(repr, present))}" if present else "an empty object",
        do=f"{nearest(name, present)} Name another column with the *_key argument",
    )


def _check_names(where: str, names: Iterable[str]) -> None:
    for name in names:
        if has_surrogate(name):
            raise DataError(f"{where}: the column name {name!r} has half a surrogate pair", expected="valid Unicode")


def _other_columns(where: str, values: dict[str, Any], columns: dict[str, Any], first: str) -> DataError:
    missing, extra = sorted(columns.keys() - values.keys()), sorted(values.keys() - columns.keys())
    if missing:
        found = nearest(missing[0], extra) if extra else ""
        hint = found + " " if found.startswith("did you mean") else ""
        message = f"{where}: no column {missing[0]!r}, which {first} has"
    else:
        hint, message = "", f"{where}: column {extra[0]!r}, which {first} lacks"
    return DataError(
        message,
        expected=f"the columns {', '.join(map(repr, columns))} in every row",
        received=", ".join(map(repr, values)) or "an empty object",
        do=hint + "give every row the same columns (null where there is no value)",
    )


def check_text(value: Any, where: str, column: str) -> str:
    """A text that is not empty and that a tokenizer can take."""
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} has the wrong type", expected="a text", received=describe(value))
    return _check_characters(value, where, column)


def _check_characters(text: str, where: str, what: str) -> str:
    if not text:
        raise DataError(f"{where}: {what!r} is empty", expected="a text of at least one character", received="''")
    if has_surrogate(text):
        raise DataError(
            f"{where}: {what!r} has half a surrogate pair, which no tokenizer takes",
            expected="valid Unicode",
            received=shorten(text),
        )
    return text


def check_prompt(value: Any, where: str, column: str, *, as_chat: bool, system: str | None) -> Any:
    """A prompt as :class:`flowrl.batches.Prompts` holds it: a text, or a list of chat messages.

    Args:
        as_chat: wrap a text as one user message.
        system: put this system message before the others.
    """
    if isinstance(value, str):
        _check_characters(value, where, column)
        if not as_chat:
            if system is not None:
                raise DataError(
                    f"{where}: a plain text cannot have a system message",
                    expected="as_chat=True, or prompts that are lists of messages, with system=",
                    received="as_chat=False and a text",
                )
            return value
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list):
        messages = _check_messages(value, where, column)
    else:
        raise DataError(
            f"{where}: column {column!r} has the wrong type",
            expected='a text, or a list of {"role", "content"} messages',
            received=describe(value),
        )
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            f"{where}: {column!r} begins with a system message and system= gives another",
            expected="one of them",
            received=f"{shorten(messages[0]['content'])} and {shorten(system)}",
        )
    return [{"role": "system", "content": system}, *messages]


def _check_messages(messages: list[Any], where: str, column: str) -> list[dict[str, Any]]:
    if not messages:
        raise DataError(f"{where}: {column!r} is an empty list", expected="at least one message", received="[]")
    for i, message in enumerate(messages):
        at = f"{column}[{i}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"{where}: {at} is not a chat message",
                expected='an object {"role": …, "content": …}',
                received=describe(message),
            )
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(
                f"{where}: {at} has an unknown role",
                expected="one of " + ", ".join(ROLES),
                received=describe(role),
                do=nearest(role, ROLES) if isinstance(role, str) else None,
            )
        if not isinstance(content, str):
            raise DataError(
                f"{where}: the content of {at} has the wrong type",
                expected="a text",
                received=describe(content),
            )
        _check_characters(content, where, f"{at}.content")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: {column!r} ends with an assistant message",
            expected="a prompt that waits for an answer",
            received=f"the answer {shorten(messages[-1]['content'])}",
            do="put the answer into a column of its own",
        )
    return messages


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text) if not text.isascii() else False


def shorten(text: str, most: int = 60) -> str:
    """``repr`` of at most so many characters of a text."""
    return repr(text) if len(text) <= most else repr(text[:most]) + "…"


def describe(value: Any) -> str:
    """A value in words, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}" if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    if isinstance(value, str):
        return f"the text {shorten(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}" + (f" that begins with {describe(value[0])}" if value else "")
    if isinstance(value, dict):
        return "an object with " + (", ".join(shorten(str(k)) for k in islice(value, 8)) or "no keys")
    return f"a {type(value).__name__}"
