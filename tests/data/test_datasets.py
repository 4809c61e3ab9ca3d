"""Data sets are pure functions of cursor and seed, splits share no prompt, demonstrations are what a rollout sees."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl
from flowrl.batches import Demonstrations, Prompts, SpanKind
from flowrl.data import Dataset, DemonstrationDataset, PromptDataset
from flowrl.data.datasets import permutation
from flowrl.errors import DataError
from flowrl.models import Model
from tests.tiny import BOS_ID, CHAT_TEMPLATE, EOS_ID, tiny_actor, tiny_tokenizer

PINNED = [3, 5, 2, 7, 0, 6, 1, 4]
PINNED_ROWS = [7, 2, 6, 5, 4, 1, 0, 3]


def numbers(n: int, **options: Any) -> PromptDataset:
    rows = [{"prompt": f"prompt {i}", "answer": i} for i in range(n)]
    return PromptDataset.from_rows(rows, **options)


def answers(data: PromptDataset, start: int, count: int, seed: int = 0) -> list[int]:
    return list(data.rows(start, count, seed).extras["answer"])


def test_it_is_a_dataset() -> None:
    data: Dataset = numbers(3)
    assert data.batch_type is Prompts and data.columns == ("answer",) and len(data) == 3


def test_each_epoch_visits_each_row_once_in_another_order() -> None:
    data = numbers(50)
    epochs = [answers(data, 50 * e, 50) for e in range(3)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert answers(data, 0, 50, seed=1) != epochs[0]


def test_second_epoch_has_other_ids_and_the_same_rows() -> None:
    batch = numbers(4).rows(0, 8, seed=0)
    assert batch.prompt_id.tolist() == list(range(8))
    assert sorted(batch.extras["answer"]) == sorted(2 * list(range(4)))


def test_batches_straddle_epochs_and_keep_their_columns_together() -> None:
    batch = numbers(5).rows(3, 14, seed=2)
    assert batch.num_rows == 14
    assert [m[0]["content"] for m in batch.messages] == [f"prompt {a}" for a in batch.extras["answer"]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 12), st.integers(0, 12), st.integers(0, 3), st.booleans())
def test_rows_are_a_pure_function_of_the_cursor(n: int, start: int, a: int, b: int, seed: int, shuffle: bool) -> None:
    data, other = numbers(n, shuffle=shuffle), numbers(n, shuffle=shuffle)
    other.rows(1000, 3, seed + 1)  # what was drawn before does not matter
    parts = [data.rows(start, a, seed), data.rows(start + a, b, seed)]
    assert Prompts.concat(parts) == other.rows(start, a + b, seed)


def test_order_of_the_file_without_shuffling() -> None:
    data = numbers(3, shuffle=False)
    assert answers(data, 1, 5, seed=9) == [1, 2, 0, 1, 2]
    assert data.unshuffled(1, 5) == data.rows(1, 5, seed=0)


def test_the_order_is_pinned() -> None:
    """It must be the same on every machine and with every version of numpy, or a resumed run trains on other rows."""
    assert permutation(1, 8).tolist() == PINNED
    assert permutation(2, 8).tolist() != PINNED
    assert answers(numbers(8), 0, 8, seed=0) == PINNED_ROWS


def test_cursor_below_zero() -> None:
    with pytest.raises(DataError, match="start and count from 0 on"):
        numbers(3).rows(-1, 2, 0)


def test_no_rows_is_an_empty_batch() -> None:
    batch = numbers(3).rows(5, 0, 0)
    assert batch.num_rows == 0 and batch.extras == {"answer": ()}


def test_changing_a_drawn_row_does_not_change_the_data() -> None:
    data = PromptDataset.from_rows([{"prompt": "a", "answer": [1]}])
    batch = data.rows(0, 1, 0)
    batch.messages[0][0]["content"] = "changed"
    batch.extras["answer"][0].append(2)
    again = data.rows(1, 1, 0)
    assert again.messages[0][0]["content"] == "a" and again.extras["answer"] == ([1],)


def test_plain_text_stays_text_when_asked() -> None:
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}]
    assert PromptDataset.from_rows(rows, as_chat=False).unshuffled(0, 2).messages == (
        "a",
        [{"role": "user", "content": "b"}],
    )


def test_fingerprint_is_of_the_content() -> None:
    data = numbers(5)
    assert data.fingerprint == numbers(5, name="other").fingerprint == pickle.loads(pickle.dumps(data)).fingerprint
    changed = PromptDataset.from_rows([{"prompt": f"prompt {i}", "answer": i if i else -1} for i in range(5)])
    others = [numbers(4), numbers(5, shuffle=False), numbers(5, as_chat=False), numbers(5, system="s"), changed]
    others += [data.head(4), data.split(1)[0]]
    assert len({d.fingerprint for d in [data, *others]}) == len(others)  # numbers(4) is head(4)
    assert numbers(4).fingerprint == data.head(4).fingerprint


def test_head() -> None:
    data = numbers(5)
    data.rows(0, 5, 0)
    assert answers(data.head(2), 0, 2) in ([0, 1], [1, 0])
    assert len(data.head(5)) == 5
    for n in (0, 6, -1, True, 1.0):
        with pytest.raises(DataError, match=r"rows: head\(n\) is out of range. Expected 1 to 5"):
            data.head(n)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=30), st.integers(1, 8), st.integers(0, 5))
def test_split_shares_no_prompt(prompts: list[int], num_held_out: int, seed: int) -> None:
    data = PromptDataset.from_rows([{"prompt": f"{p}", "row": i} for i, p in enumerate(prompts)])
    if num_held_out >= len(set(prompts)):
        with pytest.raises(DataError, match="less than its different prompts"):
            data.split(num_held_out, seed)
        return
    train, held_out = data.split(num_held_out, seed)

    def seen(part: PromptDataset) -> list[str]:
        return [m[0]["content"] for m in part.unshuffled(0, len(part)).messages]

    assert len(held_out) == len(set(seen(held_out))) == num_held_out
    assert not set(seen(train)) & set(seen(held_out))
    assert set(seen(train)) | set(seen(held_out)) == {f"{p}" for p in prompts}
    assert [p for p in map(str, prompts) if p not in seen(held_out)] == seen(train)
    assert data.split(num_held_out, seed)[1].fingerprint == held_out.fingerprint


def test_split_of_different_prompts_keeps_every_row() -> None:
    train, held_out = numbers(10).split(3, seed=1)
    assert sorted(answers(train, 0, 7) + answers(held_out, 0, 3)) == list(range(10))
    assert numbers(10).split(3, seed=2)[1].fingerprint != held_out.fingerprint


# -- demonstrations --------------------------------------------------------------------------------------------------


def demonstrations(rows: list[dict[str, Any]], tokenizer: Any = None, **options: Any) -> DemonstrationDataset:
    return DemonstrationDataset.from_rows(rows, tokenizer=tokenizer or tiny_tokenizer(), **options)


ROWS: list[dict[str, Any]] = [{"prompt": "2+2", "completion": "4"}, {"prompt": "é", "completion": "two words", "id": 1}]


def test_demonstrations_are_prompt_completion_eos() -> None:
    tokenizer = tiny_tokenizer()
    data = demonstrations([ROWS[0]], tokenizer)
    assert data.batch_type is Demonstrations and data.columns == ()
    batch = data.rows(7, 1, seed=0)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2"}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    four = tokenizer.encode("4", add_special_tokens=False)
    assert batch.tokens.row(0).tolist() == [*asked, *four, EOS_ID]
    assert batch.prompt_lengths.tolist() == [len(asked)]
    assert batch.loss_mask.to_lists() == [[1, 1]]
    assert batch.spans.kinds.to_lists() == [[SpanKind.PROMPT, SpanKind.POLICY]]
    assert batch.spans.policy_versions.to_lists() == [[-1, -1]]
    assert (batch.prompt_id.tolist(), batch.sample_id.tolist()) == ([7], [0])
    assert batch.tokens.values.dtype == torch.int64


@pytest.mark.parametrize("as_chat", [True, False])
def test_prompts_of_demonstrations_are_those_of_a_rollout(as_chat: bool) -> None:
    actor = tiny_actor()
    rows = [{"prompt": f"prompt {i}", "completion": "x"} for i in range(3)]
    shown = demonstrations(rows, actor, as_chat=as_chat).rows(0, 3, seed=0)
    asked = PromptDataset.from_rows(rows, as_chat=as_chat).rows(0, 3, seed=0)
    encoded = actor.bound_engine().encode(asked.messages)
    assert shown.tokens.slice_rows(torch.zeros(3, dtype=torch.int64), shown.prompt_lengths) == encoded


def test_plain_prompts_are_encoded_as_they_are() -> None:
    tokenizer = tiny_tokenizer()
    batch = demonstrations([ROWS[0]], tokenizer, as_chat=False).rows(0, 1, seed=0)
    assert batch.tokens.row(0).tolist() == [*tokenizer("2+2")["input_ids"], *tokenizer("4")["input_ids"], EOS_ID]


def test_other_columns_are_checked_for_nothing_but_presence() -> None:
    with pytest.raises(DataError, match="row 2: column 'id', which row 1 lacks"):
        demonstrations(ROWS)


def test_demonstrations_are_pure_and_travel() -> None:
    data = demonstrations([{"prompt": f"{i}", "completion": "x" * (i + 1)} for i in range(5)])
    whole = data.rows(0, 10, seed=3)
    assert Demonstrations.concat([data.rows(0, 3, 3), data.rows(3, 7, 3)]) == whole
    assert Demonstrations.from_arrow(whole.to_arrow()) == whole
    train, held_out = data.split(2)
    assert (len(train), len(held_out), held_out.rows(0, 2, 0).num_rows) == (3, 2, 2)


def test_the_tokenizer_of_a_model_is_loaded_when_rows_are_drawn(tmp_path: Any) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    live = demonstrations([ROWS[0]]).rows(0, 1, 0)
    assert demonstrations([ROWS[0]], tiny_actor()).rows(0, 1, 0) == live
    assert demonstrations([ROWS[0]], tiny_actor().frozen()).rows(0, 1, 0) == live
    assert demonstrations([ROWS[0]], Model("nowhere", tokenizer=str(tmp_path))).rows(0, 1, 0) == live
    demonstrations([ROWS[0]], Model("nowhere/at-all"))  # nothing is loaded yet


def test_a_completion_gets_no_bos() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
    )
    ids = demonstrations([ROWS[0]], tokenizer, as_chat=False).rows(0, 1, 0).tokens.row(0).tolist()
    assert ids[0] == BOS_ID and ids.count(BOS_ID) == 1


def test_tokenizer_errors() -> None:
    with pytest.raises(DataError, match="no chat template"):
        demonstrations([ROWS[0]], tiny_tokenizer(chat_template=False)).rows(0, 1, 0)
    without_eos = tiny_tokenizer()
    without_eos.eos_token = None
    without_eos.chat_template = CHAT_TEMPLATE
    with pytest.raises(DataError, match="no eos token"):
        demonstrations([ROWS[0]], without_eos).rows(0, 1, 0)
    with pytest.raises(DataError, match=r"neither a tokenizer nor a Model.*Received the text 'gpt2'"):
        DemonstrationDataset.from_rows([ROWS[0]], tokenizer="gpt2")  # type: ignore[arg-type]


def test_missing_completion_column() -> None:
    with pytest.raises(DataError, match=r"row 1: no column 'completion'.*did you mean 'completions'"):
        demonstrations([{"prompt": "a", "completions": "b"}])


def test_permutation_is_one() -> None:
    for n in (1, 2, 1000):
        assert np.array_equal(np.sort(permutation(5, n)), np.arange(n))


def test_a_demonstration_that_is_too_long_is_found_before_training(tmp_path: Path) -> None:
    actor = tiny_actor()
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "c" * 300}]
    data = DemonstrationDataset.from_rows(rows, tokenizer=actor)
    demonstrations = flowrl.source(flowrl.Demonstrations, name="demos", batch_size=1)
    flow = flowrl.RLFlow.from_outputs(flowrl.SFTUpdater(actor)(demonstrations))
    with pytest.raises(DataError, match=r"rows, row 2 is longer than the model takes. Expected at most 256 tokens"):
        flowrl.run(flow, data, 1, out=tmp_path / "run", progress=False)
