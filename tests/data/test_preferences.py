"""Pairs and feedback: the layouts that are read, the ids and tokens that are made, mistakes by line, and runs on them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl.batches import Feedback, Preferences, Prompts, SpanKind
from flowrl.data import Dataset, DemonstrationDataset, FeedbackDataset, PreferenceDataset, PromptDataset
from flowrl.errors import DataError
from flowrl.models import Model
from flowrl.nodes import ReferenceLogprobs, Updater, source
from flowrl.nodes.pairs import MismatchedCompletions
from flowrl.nodes.preference_losses import DPOLoss, KTOLoss, SimPOLoss
from tests.runs import quick_run, training
from tests.tiny import EOS, tiny_actor, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pairs(*rows: dict[str, Any], **options: Any) -> PreferenceDataset:
    return PreferenceDataset.from_rows(rows, **{"tokenizer": TOKENIZER, "shuffle": False, **options})


def feedback(*rows: dict[str, Any], **options: Any) -> FeedbackDataset:
    return FeedbackDataset.from_rows(rows, **{"tokenizer": TOKENIZER, "shuffle": False, **options})


def texts(batch: Preferences | Feedback) -> list[tuple[Any, Any]]:
    """The decoded prompt and answer of each row."""
    lengths = batch.prompt_lengths.tolist()
    return [
        (TOKENIZER.decode(row[:n]), TOKENIZER.decode(row[n:]))
        for row, n in zip(batch.tokens.to_lists(), lengths, strict=True)
    ]


MANY = [{"prompt": f"prompt {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(7)]
#: One pair, in every layout.
CHAT = [user("2 + 3 =")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2 + 3 =", "chosen": "5", "rejected": "6"},
    "messages and texts": {"prompt": CHAT, "chosen": "5", "rejected": "6"},
    "messages and answers": {"prompt": CHAT, "chosen": [assistant("5")], "rejected": [assistant("6")]},
    "a text and answers": {"prompt": "2 + 3 =", "chosen": [assistant("5")], "rejected": [assistant("6")]},
    "a text and conversations": {
        "prompt": "2 + 3 =",
        "chosen": [*CHAT, assistant("5")],
        "rejected": [*CHAT, assistant("6")],
    },
    "conversations": {"chosen": [*CHAT, assistant("5")], "rejected": [*CHAT, assistant("6")]},
    "nulls": {
        "chosen": [*CHAT, {**assistant("5"), "tool_calls": None}],
        "rejected": [*CHAT, {**assistant("6"), "tool_calls": None}],
    },
}


class TestPairs:
    def test_it_is_a_dataset(self) -> None:
        data: Dataset = pairs(*MANY)
        assert data.batch_type is Preferences and data.columns == () and len(data) == 7

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout: str) -> None:
        batch = pairs({**LAYOUTS[layout], "score": 3}).rows(0, 1, seed=0)
        prompt = f"user: 2 + 3 ={EOS}assistant: "
        assert texts(batch) == [(prompt, "5" + EOS), (prompt, "6" + EOS)]
        assert batch == pairs(LAYOUTS["texts"]).rows(0, 1, seed=0)

    def test_a_longer_conversation_and_a_system_message(self) -> None:
        asked = [user("hi"), assistant("hello"), user("2 + 3 =")]
        row = {"chosen": [*asked, assistant("5")], "rejected": [*asked, assistant("6")]}
        ((prompt, _), _) = texts(pairs(row, system="be brief").rows(0, 1, seed=0))
        assert prompt == f"system: be brief{EOS}user: hi{EOS}assistant: hello{EOS}user: 2 + 3 ={EOS}assistant: "

    def test_plain_text(self) -> None:
        assert texts(pairs(LAYOUTS["texts"], as_chat=False).rows(0, 1, seed=0))[1] == ("2 + 3 =", "6" + EOS)

    def test_other_names(self) -> None:
        row = {"question": "2 + 3 =", "win": "5", "lose": "6"}
        batch = pairs(row, prompt_key="question", chosen_key="win", rejected_key="lose").rows(0, 1, seed=0)
        assert batch == pairs(LAYOUTS["texts"]).rows(0, 1, seed=0)

    def test_two_rows_a_draw_with_ids_of_the_draw(self) -> None:
        batch = pairs(*MANY).rows(5, 3, seed=0)
        assert batch.prompt_id.tolist() == batch.pair_id.tolist() == [5, 5, 6, 6, 7, 7]
        assert batch.sample_id.tolist() == [0, 1] * 3 and batch.chosen.tolist() == [1, 0] * 3
        assert [answer for _, answer in texts(batch)][:2] == ["good 5" + EOS, "bad 5" + EOS]
        assert [answer for _, answer in texts(batch)][4:] == ["good 0" + EOS, "bad 0" + EOS]  # the next epoch
        assert batch.spans.kinds.to_lists() == [[SpanKind.PROMPT, SpanKind.POLICY]] * 6
        assert batch.spans.policy_versions.to_lists() == [[-1, -1]] * 6

    def test_every_answer_token_and_eos_is_a_target(self) -> None:
        batch = pairs(*MANY).rows(0, 2, seed=0)
        assert bool(batch.loss_mask.values.all())
        assert batch.response_lengths.tolist() == [7, 6, 7, 6]  # bytes, and eos

    def test_shuffled_epochs_are_pure(self) -> None:
        data = pairs(*MANY, shuffle=True)
        whole = data.rows(0, 21, seed=3)
        assert [data.rows(i, 1, seed=3) for i in range(21)] == [whole.select([2 * i, 2 * i + 1]) for i in range(21)]
        epochs = [[a for _, a in texts(data.rows(7 * e, 7, seed=3))] for e in range(3)]
        assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
        assert pickle.loads(pickle.dumps(data)).rows(0, 21, seed=3) == whole

    def test_no_draw(self) -> None:
        assert pairs(*MANY).rows(0, 0, seed=0).num_rows == 0

    def test_unshuffled(self) -> None:
        data = pairs(*MANY, shuffle=True)
        assert data.unshuffled(5, 4) == pairs(*MANY).rows(5, 4, seed=0)

    def test_head_split_and_fingerprint(self) -> None:
        data = pairs(*MANY)
        assert data.head(2).rows(0, 2, seed=0) == data.rows(0, 2, seed=0) and len(data.head(2)) == 2
        train, held_out = data.split(2)
        assert (len(train), len(held_out)) == (5, 2)
        answers = [{a for _, a in texts(part.rows(0, len(part), seed=0))} for part in (train, held_out)]
        assert not answers[0] & answers[1]
        swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in MANY]
        prints = {pairs(*rows).fingerprint for rows in (MANY, MANY[:6], swapped)}
        assert len(prints) == 3 and pairs(*MANY).fingerprint in prints

    def test_ties(self) -> None:
        tie = {"prompt": "p", "chosen": "same", "rejected": "same"}
        with pytest.raises(DataError, match=r"row 2: 'chosen' and 'rejected' are the same answer.*ties='drop'"):
            pairs(MANY[0], tie)
        data = pairs(MANY[0], tie, MANY[1], ties="drop")
        assert len(data) == 2 and data.num_ties == 1
        assert [a for _, a in texts(data.rows(0, 2, seed=0))][2:] == ["good 1" + EOS, "bad 1" + EOS]
        with pytest.raises(DataError, match="1 ties, none else"):
            pairs(tie, ties="drop")
        conversation = {key: [*CHAT, assistant("5")] for key in ("chosen", "rejected")}
        with pytest.raises(DataError, match="the same answer"):
            pairs(conversation)


def missing(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


TEXTS, TALKS = LAYOUTS["texts"], LAYOUTS["conversations"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (missing(TEXTS, "prompt"), r"no column 'prompt'.*whole conversations"),
        (missing(TEXTS, "chosen"), "no column 'chosen'"),
        ({**missing(TEXTS, "prompt"), "promt": "x"}, "did you mean 'promt'"),
        ({**TEXTS, "chosen": ""}, "'chosen' is empty"),
        ({**TEXTS, "rejected": None}, r"column 'rejected' has the wrong type.*messages.*Received null"),
        ({**TEXTS, "prompt": None}, "column 'prompt' has the wrong type"),
        ({**TEXTS, "chosen": []}, r"'chosen' is not an answer to its prompt.*no message"),
        ({**TEXTS, "chosen": [user("5")]}, r"one assistant message.*1 messages \(user\)"),
        ({**TEXTS, "chosen": [user("another"), assistant("5")]}, r"2 messages \(user, assistant\), and a prompt of 1"),
        ({**TEXTS, "chosen": [*CHAT, assistant("5"), user("why?"), assistant("so")]}, r"4 messages"),
        ({**TEXTS, "chosen": [{**assistant("5"), "tool_calls": [{}]}]}, "has 'tool_calls', which would be lost"),
        ({**TEXTS, "chosen": [assistant("")]}, "'chosen.content' is empty"),
        ({**TEXTS, "chosen": [{"role": "assistant"}]}, "column 'chosen.content' has the wrong type"),
        ({**TALKS, "rejected": "6"}, "column 'rejected' is not a conversation"),
        ({**TALKS, "rejected": [assistant("6")]}, "column 'rejected' is not a conversation"),
        ({**TALKS, "rejected": [user("?"), assistant("6")]}, "do not begin with the same message"),
        (
            {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("e")]},
            r"'chosen' is not an answer.*4 messages.*prompt of 1",
        ),
        ({key: [assistant("hi"), assistant(key)] for key in ("chosen", "rejected")}, "ends with an assistant message"),
        ({key: [{"role": "bot", "content": "hi"}, assistant(key)] for key in ("chosen", "rejected")}, "unknown role"),
    ],
)
def test_mistakes_in_pairs(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Each is named by file and line."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message) as info:
        PreferenceDataset.from_jsonl(path, tokenizer=TOKENIZER)
    assert f"{path}, line 2" in str(info.value)


class TestFeedback:
    def test_rows(self) -> None:
        rows = [
            {"prompt": "2 + 3 =", "completion": "5", "label": True, "source": "x"},
            {"prompt": CHAT, "completion": [assistant("6")], "label": 0, "source": "x"},
            {"prompt": CHAT, "completion": [*CHAT, assistant("five")], "label": 1.0, "source": "x"},
        ]
        data = feedback(*rows)
        batch = data.rows(1, 3, seed=0)
        assert batch.desirable.tolist() == [0, 1, 1] and batch.prompt_id.tolist() == [1, 2, 3]
        assert batch.sample_id.tolist() == [0, 0, 0] and data.batch_type is Feedback and data.columns == ()
        prompt = f"user: 2 + 3 ={EOS}assistant: "
        assert texts(batch) == [(prompt, answer + EOS) for answer in ("6", "five", "5")]
        as_dataset: Dataset = data
        assert as_dataset.rows(0, 0, seed=0).num_rows == 0
        assert data.unshuffled(1, 3) == batch

    @pytest.mark.parametrize("label", ["good", None, 2, 0.5, [True]])
    def test_labels(self, label: Any) -> None:
        with pytest.raises(DataError, match=r"row 1: column 'label' has the wrong value.*true or false"):
            feedback({"prompt": "p", "completion": "c", "label": label})

    def test_mistakes(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no column 'label'"):
            feedback({"prompt": "p", "completion": "c"})
        path = tmp_path / "feedback.jsonl"
        path.write_text(
            '{"prompt": "p", "completion": "c", "label": true}\n{"prompt": "p", "completion": 3, "label": true}\n'
        )
        with pytest.raises(DataError, match=r"feedback.jsonl, line 2: column 'completion' has the wrong type"):
            FeedbackDataset.from_jsonl(path, tokenizer=TOKENIZER)

    def test_fingerprint_has_the_label(self) -> None:
        row = {"prompt": "p", "completion": "c", "label": True}
        assert feedback(row).fingerprint == feedback({**row, "label": 1}).fingerprint
        assert feedback(row).fingerprint != feedback({**row, "label": False}).fingerprint


def test_settings() -> None:
    with pytest.raises(DataError, match="'refuse' or 'drop'"):
        pairs(*MANY, ties="keep")
    with pytest.raises(DataError, match="neither a tokenizer nor a Model"):
        pairs(*MANY, tokenizer="gpt2")
    with pytest.raises(DataError, match="empty"):
        pairs()
    assert len(pairs(*MANY, limit=3)) == 3


def test_the_tokens_are_those_of_demonstrations() -> None:
    row = {"prompt": "2 + 3 =", "completion": "5"}
    demonstration = DemonstrationDataset.from_rows([row], tokenizer=TOKENIZER).rows(0, 1, seed=0)
    batch = pairs(LAYOUTS["texts"]).rows(0, 1, seed=0)
    assert batch.tokens.select(torch.tensor([0])) == demonstration.tokens
    assert batch.spans.select(torch.tensor([0])).lengths == demonstration.spans.lengths


# -- runs on them --------------------------------------------------------------------------------------------------------


def dpo_flow(actor: Model, batch_size: int = 2, loss: Any = None) -> flowrl.RLFlow:
    preferences = source(Preferences, name="pairs", batch_size=batch_size)
    reference = ReferenceLogprobs(actor.frozen())(preferences)
    return flowrl.RLFlow.from_outputs(Updater(actor)(DPOLoss()(preferences, reference)))


class TestRuns:
    def test_a_run_draws_pairs(self, tmp_path: Path) -> None:
        actor = tiny_actor()
        result = quick_run(dpo_flow(actor), 4, tmp_path / "run", data={"pairs": pairs(*MANY, tokenizer=actor)})
        steps = training(result)
        assert len(steps) == 4 and all(row.get("empty_updates", 0) == 0 for row in steps)

    def test_a_run_on_feedback(self, tmp_path: Path) -> None:
        actor = tiny_actor()
        rows = source(Feedback, name="feedback", batch_size=3)
        mismatched, reference = MismatchedCompletions()(rows), ReferenceLogprobs(actor.frozen())
        loss = KTOLoss()(rows, reference(rows), mismatched=mismatched, mismatched_ref=reference(mismatched))
        flow = flowrl.RLFlow.from_outputs(Updater(actor)(loss))
        data = feedback(*({"prompt": f"p {i}", "completion": "c", "label": i % 2} for i in range(6)), tokenizer=actor)
        assert len(training(quick_run(flow, 2, tmp_path / "run", data=data))) == 2

    def test_data_of_the_wrong_kind(self, tmp_path: Path) -> None:
        wrong = PromptDataset.from_rows([{"prompt": "p"}])
        with pytest.raises(DataError, match=r"source 'pairs' gives the wrong rows.*Preferences.*Prompts"):
            quick_run(dpo_flow(tiny_actor()), 1, tmp_path / "run", data={"pairs": wrong})
        prompts = source(Prompts, name="prompts", batch_size=2)
        actor = tiny_actor()
        flow = flowrl.RLFlow.from_outputs(flowrl.Rollout(actor)(prompts))
        with pytest.raises(DataError, match=r"Prompts.*Preferences"):
            quick_run(flow, 1, tmp_path / "other", data={"prompts": pairs(*MANY)})

    def test_a_pair_that_is_too_long_is_named(self, tmp_path: Path) -> None:
        actor = tiny_actor()
        long = {"prompt": "p", "chosen": "x" * 300, "rejected": "y"}  # the tiny model takes 256 tokens
        with pytest.raises(DataError, match=r"row 2 is longer than the model takes. Expected at most 256 tokens"):
            quick_run(dpo_flow(actor), 1, tmp_path / "run", data={"pairs": pairs(MANY[0], long)})
        assert not (tmp_path / "run").exists()

    def test_no_reference_is_needed_for_some(self, tmp_path: Path) -> None:
        actor = tiny_actor()
        preferences = source(Preferences, name="pairs", batch_size=2)
        flow = flowrl.RLFlow.from_outputs(Updater(actor)(SimPOLoss()(preferences)))
        assert len(training(quick_run(flow, 1, tmp_path / "run", data=pairs(*MANY)))) == 1
