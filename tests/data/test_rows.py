"""Every mistake in a data file is one DataError that names file, line and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.batches import Prompts
from flowrl.data import DemonstrationDataset, PromptDataset
from flowrl.errors import DataError
from tests.tiny import tiny_tokenizer

GOOD = b'{"prompt": "a", "answer": "1"}\n'


def write(folder: Path, content: bytes | str) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        PromptDataset.from_jsonl(path, **options)
    return str(caught.value)


# -- the file --------------------------------------------------------------------------------------------------------


def test_missing_file_offers_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    (tmp_path / "valid.jsonl").write_bytes(GOOD)
    message = refused(tmp_path / "trian.jsonl")
    assert "trian.jsonl does not exist" in message
    assert "'train.jsonl', 'valid.jsonl'" in message
    assert "did you mean 'train.jsonl'?" in message


def test_missing_file_unlike_any_other(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}").touch()
    message = refused(tmp_path / "questions.jsonl")
    assert "'07' and 12 more files" in message
    assert f"relative paths start at {Path.cwd()}" in message


def test_missing_folder(tmp_path: Path) -> None:
    message = refused(tmp_path / "dat" / "train.jsonl")
    assert f"folder {tmp_path / 'dat'} does not exist" in message


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    assert "is a folder. Expected a JSON-lines file. Received a folder that holds 'train.jsonl'" in refused(tmp_path)


def test_path_with_a_null_byte() -> None:
    assert "does not exist" in refused(Path("a\0b"))


@pytest.mark.parametrize("content", [b"", b"\n \n\t\r\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    assert refused(path) == f"{path} is empty. Expected at least one row. Received none."


# -- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second, message",
    [
        (b'{"prompt": "a", "answer": }', "line 3: invalid JSON. Expected one JSON object. Received Expecting value at"),
        (b'{"prompt": "a"', "line 3: invalid JSON"),
        (b"{'prompt': 'a'}", "line 3: invalid JSON"),
        (GOOD.strip() + GOOD.strip(), "line 3: invalid JSON. Expected one JSON object. Received Extra data at"),
        (b'"text"', "line 3: not a JSON object. Expected an object. Received the text 'text'"),
        (b"3", "line 3: not a JSON object. Expected an object. Received the number 3"),
        (b"null", "Received null"),
        (b"[1, 2]", "Received a list of 2 that begins with the number 1"),
        (
            b'{"prompt": "caf\xe9", "answer": "1"}',
            "line 3: not UTF-8. Expected UTF-8 text. Received byte 0xe9 at byte 16",
        ),
        (b'{"n": ' + b"9" * 5000 + b"}", "line 3: a number that cannot be read"),
        (b'{"n": ' + b"[" * 100_000, "line 3: JSON nested too deep to read"),
        (b"{}", "line 3: no column 'answer', which"),
        (b'{"prompt": "a"}', "line 3: no column 'answer', which"),
        (b'{"prompt": "a", "answr": "1"}', "line 3: no column 'answer'"),
        (b'{"prompt": "a", "answr": "1"}', "did you mean 'answr'?"),
        (b'{"prompt": "a", "answer": "1", "level": 2}', "line 3: column 'level', which"),
        (b'{"answer": "1", "prompt": null}', "line 3: column 'prompt' has the wrong type"),
    ],
)
def test_bad_line(tmp_path: Path, second: bytes, message: str) -> None:
    """The blank line counts: the bad row is on line 3 of the file."""
    path = write(tmp_path, GOOD + b"\n" + second + b"\n" + GOOD)
    found = refused(path)
    assert found.startswith(str(path))
    assert message in found


def test_utf16_file(tmp_path: Path) -> None:
    assert "line 1: not UTF-8" in refused(write(tmp_path, GOOD.decode().encode("utf-16")))


def test_missing_prompt_column(tmp_path: Path) -> None:
    path = write(tmp_path, '{"promt": "a", "x": 1}\n')
    message = refused(path)
    assert f"{path}, line 1: no column 'prompt'" in message
    assert "Received the columns 'promt', 'x'" in message
    assert "did you mean 'promt'?" in message
    assert "an empty object" in refused(write(tmp_path, "{}\n"))
    assert "line 1: no column 'question'" in refused(path, prompt_key="question")


def test_lines_that_are_fine(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, repeated keys, keys in another order, separators in strings."""
    path = write(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "x", "prompt": "a", "answer": 1}\r\n\r\n'
        b'{"answer": [2, {"k": null}], "prompt": "b\xe2\x80\xa8c"}',
    )
    batch = PromptDataset.from_jsonl(path).unshuffled(0, 2)
    assert [m[0]["content"] for m in batch.messages] == ["a", "b\u2028c"]
    assert batch.extras == {"answer": (1, [2, {"k": None}])}


def test_values_survive(tmp_path: Path) -> None:
    nested: Any = 7
    for _ in range(100):
        nested = {"k": [nested]}
    row = {"prompt": "a", "big": 10**300, "nested": nested, "none": None, "": "", "a.b": "é\u0000😀", "f": 1e-300}
    data = PromptDataset.from_jsonl(write(tmp_path, json.dumps(row)))
    batch = data.rows(0, 1, seed=0)
    arrived = Prompts.from_arrow(batch.to_arrow())
    assert arrived == batch
    assert {k: v[0] for k, v in arrived.extras.items()} == {k: v for k, v in row.items() if k != "prompt"}


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + b"\n" + GOOD + b"not JSON")
    assert len(PromptDataset.from_jsonl(path, limit=2)) == 2
    assert "line 4: invalid JSON" in refused(path, limit=3)
    for limit in (0, -1, 1.5, True, "2"):
        assert "limit is wrong" in refused(path, limit=limit)


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, message",
    [
        (None, "column 'prompt' has the wrong type. Expected a text, or a list of"),
        (5, "Received the number 5"),
        (True, "Received true"),
        ({"role": "user", "content": "x"}, "Received an object with 'role', 'content'"),
        ("", "'prompt' is empty"),
        ([], "'prompt' is an empty list"),
        (["a", "b"], "prompt[0] is not a chat message"),
        ([{"role": "user"}], "prompt[0] is not a chat message"),
        ([{"content": "x"}], "Received an object with 'content'"),
        ([{"role": "user", "content": "x"}, 3], "prompt[1] is not a chat message"),
        ([{"role": "usr", "content": "x"}], "prompt[0] has an unknown role"),
        ([{"role": "usr", "content": "x"}], "did you mean 'user'?"),
        ([{"role": None, "content": "x"}], "prompt[0] has an unknown role"),
        ([{"role": "user", "content": None}], "the content of prompt[0] has the wrong type. Expected a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the content of prompt[0] has the wrong type"),
        ([{"role": "user", "content": ""}], "'prompt[0].content' is empty"),
        ("half \ud800 pair", "'prompt' has half a surrogate pair"),
        ([{"role": "user", "content": "a\udc00"}], "'prompt[0].content' has half a surrogate pair"),
        (
            [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
            "'prompt' ends with an assistant message",
        ),
    ],
)
def test_bad_prompt(tmp_path: Path, prompt: Any, message: str) -> None:
    path = write(tmp_path, GOOD + json.dumps({"prompt": prompt, "answer": "1"}).encode())
    found = refused(path)
    assert found.startswith(f"{path}, line 2: ")
    assert message in found


def test_column_name_with_half_a_surrogate_pair(tmp_path: Path) -> None:
    assert "line 1: the column name '\\ud800'" in refused(write(tmp_path, '{"prompt": "a", "\\ud800": 1}'))


def test_system_message() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    with pytest.raises(DataError, match="row 2: 'prompt' begins with a system message and system= gives another"):
        PromptDataset.from_rows([{"prompt": "a"}, {"prompt": chat}], system="t")
    with pytest.raises(DataError, match="row 1: a plain text cannot have a system message"):
        PromptDataset.from_rows([{"prompt": "a"}], system="t", as_chat=False)
    with pytest.raises(DataError, match="'system' is empty"):
        PromptDataset.from_rows([{"prompt": "a"}], system="")
    data = PromptDataset.from_rows([{"prompt": "a"}, {"prompt": chat[1:]}], system="t")
    for messages in data.unshuffled(0, 2).messages:
        assert messages[0] == {"role": "system", "content": "t"} and messages[1]["role"] == "user"


# -- Python rows -----------------------------------------------------------------------------------------------------


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value, message",
    [
        ((1, 2), "a tuple"),
        ({1, 2}, "a set"),
        (np.int64(3), "a int64"),
        (np.array([1]), "a ndarray"),
        (b"x", "a bytes"),
        ({1: "x"}, "a dict with the key 1, which is not a text"),
        ([{"k": [object()]}], "a object"),
        ([10**5000], "a value that JSON cannot hold"),
        (cyclic(), "values nested too deep, or in themselves"),
    ],
)
def test_value_that_json_would_change(value: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        PromptDataset.from_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": value}])
    assert f"row 2: column 'answer' holds {message}" in str(caught.value)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "rows is empty"),
        (iter(()), "rows is empty"),
        ([{"prompt": "a"}, "b"], "row 2: not a dict"),
        ([None], "row 1: not a dict"),
        ({"prompt": ["a"]}, "from_rows takes rows"),
        ("train.jsonl", "from_rows takes rows"),
        (5, "from_rows takes rows"),
        ([{3: "a"}], "row 1: a column name is not a text"),
        ([{"prompt": "a"}, {"prompt": "b", "x": 1}], "row 2: column 'x', which row 1 lacks"),
        ([{"prompt": 10**50}], "Received a huge number"),
    ],
)
def test_bad_rows(rows: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        PromptDataset.from_rows(rows)
    assert message in str(caught.value)


def test_rows_may_come_from_a_generator() -> None:
    data = PromptDataset.from_rows(({"q": f"{i}", "n": i} for i in range(10**9)), prompt_key="q", limit=3)
    assert data.unshuffled(0, 3).extras == {"n": (0, 1, 2)}


@pytest.mark.parametrize(
    "completion, message",
    [(None, "Received null"), ("", "is empty"), (["a"], "a list of 1"), ("\ud800", "half a surrogate pair")],
)
def test_bad_completion(completion: Any, message: str) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": completion}]
    with pytest.raises(DataError) as caught:
        DemonstrationDataset.from_rows(rows, tokenizer=tiny_tokenizer())
    assert "row 2: " in str(caught.value) and "'completion'" in str(caught.value) and message in str(caught.value)


# -- anything --------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc") | st.text(), inner, max_size=3),
    max_leaves=6,
)
prompt_like = (
    st.text(max_size=5)
    | json_values
    | st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": st.text()}), max_size=2)
)
object_line = st.fixed_dictionaries({"prompt": prompt_like}, optional={"answer": json_values, "x": json_values}).map(
    lambda row: json.dumps(row).encode()
)
any_line = st.binary(max_size=30) | json_values.map(lambda v: json.dumps(v).encode()) | object_line
contents = st.lists(any_line | st.just(GOOD.strip()), max_size=4).map(b"\n".join) | st.binary(max_size=60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents)
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    try:
        data = PromptDataset.from_jsonl(path)
    except DataError as error:
        assert str(error).startswith(str(path))
        str(error).encode()  # it can be printed
        return
    batch = data.rows(0, len(data), seed=1)
    assert batch.num_rows == len(data) > 0
    assert len(data.fingerprint) == 32
    Prompts.from_arrow(batch.to_arrow())
