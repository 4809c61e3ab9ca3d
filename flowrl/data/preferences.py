"""Data sets of what people like: pairs of a chosen and a rejected answer, and single answers with a thumb up or down.

Answers are texts, or the end of a conversation in chat messages. Rows are tokenised when they are drawn, as demonstrations
are: the prompt as a rollout would have it, the answer, eos. Nothing is cut to a length.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, get_args

from flowrl.batches import Batch, Feedback, Preferences
from flowrl.data.datasets import _Rows, draw_numbers, encode_rows
from flowrl.data.rows import Row, check_prompt, check_text, collect, describe, read_jsonl, read_objects, shorten
from flowrl.data.tokenizers import Tokenizer, check_tokenizer
from flowrl.errors import DataError, nearest

if TYPE_CHECKING:
    from flowrl.models import AnyModel

B = TypeVar("B", bound=Batch)

Ties = Literal["refuse", "drop"]


class _Answers(_Rows, Generic[B]):
    """Prompts with recorded answers, and the tokenizer that makes tokens of them."""

    _tokenizer: Tokenizer | AnyModel

    @property
    def columns(self) -> tuple[str, ...]:
        """Empty: recorded answers carry no extras."""
        return ()

    def _draw(self, start: int, index: Sequence[int]) -> B:
        """The rows behind some draws."""
        raise NotImplementedError

    def rows(self, start: int, count: int, seed: int) -> B:
        """Draws ``start`` to ``start + count - 1``; they may straddle epochs.

        Raises:
            ModelError: the tokenizer cannot be loaded.
            DataError: the tokenizer has no eos token, or no chat template for chat prompts.
        """
        return self._draw(start, self._draws(start, count, seed))

    def unshuffled(self, start: int, count: int) -> B:
        """Draws ``start`` to ``start + count - 1`` as ``shuffle=False`` gives them: to check the data."""
        return self._draw(start, [(start + i) % len(self) for i in range(count)])


class PreferenceDataset(_Answers[Preferences]):
    """Pairs of answers to one prompt, of which one was chosen. A draw is a pair: ``rows(start, count)`` has two rows a draw,
    the chosen one (``sample_id`` 0), then the rejected one (1); ``prompt_id`` and ``pair_id`` are the number of the draw.

    Three layouts are read, by what the columns hold:

    * ``prompt`` as in :class:`~flowrl.data.PromptDataset`; ``chosen`` and ``rejected`` are texts.
    * ``prompt`` likewise; ``chosen`` and ``rejected`` are lists of messages: the answer alone (one assistant message), or the
      messages of the prompt and then the answer.
    * no ``prompt``; ``chosen`` and ``rejected`` are whole conversations. The prompt is what they begin with in common, and
      each goes on with one assistant message.

    Other columns are not kept.

    Example::

        data = PreferenceDataset.from_rows(
            [{"prompt": "2 + 3 =", "chosen": "5", "rejected": "6"}], tokenizer=actor
        )
    """

    batch_type: type[Batch] = Preferences
    #: Pairs that were left out because both answers are the same.
    num_ties: int = 0

    @classmethod
    def from_jsonl(
        cls,
        path: str | os.PathLike[str],
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        *,
        tokenizer: Tokenizer | AnyModel,
        ties: Ties = "refuse",
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
    ) -> PreferenceDataset:
        """Read a UTF-8 file with one JSON object a line.

        Args:
            path: the file.
            prompt_key: the column of prompts. Without a column "prompt" they are taken from the conversations.
            chosen_key: the column of answers that were chosen.
            rejected_key: the column of those that were not.
            tokenizer: a live tokenizer, or a Model, whose tokenizer is loaded when the first rows are drawn.
            ties: a pair of two equal answers says nothing: "refuse" takes it for a mistake, "drop" leaves such pairs out and
                counts them in ``num_ties``.
            shuffle, limit, system, as_chat: as in :meth:`PromptDataset.from_jsonl`; ``limit`` counts ties.

        Raises:
            DataError: anything that cannot be read as said here, with file, line and column.
        """
        keys = (prompt_key, chosen_key, rejected_key)
        options: dict[str, Any] = dict(shuffle=shuffle, system=system, as_chat=as_chat, name=str(path))
        return cls._build(read_jsonl(path, limit), keys=keys, tokenizer=tokenizer, ties=ties, **options)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        *,
        tokenizer: Tokenizer | AnyModel,
        ties: Ties = "refuse",
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
        name: str = "rows",
    ) -> PreferenceDataset:
        """Take dicts of JSON values; arguments as in :meth:`from_jsonl`.

        Raises:
            DataError: anything that cannot be taken as said there, with row and column.
        """
        keys = (prompt_key, chosen_key, rejected_key)
        options: dict[str, Any] = dict(shuffle=shuffle, system=system, as_chat=as_chat, name=name)
        return cls._build(read_objects(rows, limit), keys=keys, tokenizer=tokenizer, ties=ties, **options)

    @classmethod
    def _build(
        cls,
        rows: Iterable[Row],
        *,
        keys: tuple[str, str, str],
        tokenizer: Tokenizer | AnyModel,
        ties: str,
        shuffle: bool,
        system: str | None,
        as_chat: bool,
        name: str,
    ) -> Self:
        check_tokenizer(tokenizer)
        if ties not in get_args(Ties):
            raise DataError("ties is wrong", expected="'refuse' or 'drop'", received=describe(ties))
        if system is not None:
            check_text(system, name, "system")
        prompt_key, chosen_key, rejected_key = keys
        places, columns = collect(rows, [chosen_key, rejected_key], name)
        implicit = prompt_key not in columns
        if implicit:
            _check_implicit(prompt_key, columns, columns[chosen_key][0], places[0])
        kept: list[tuple[Any, str, str]] = []
        num_ties = 0
        for i, where in enumerate(places):
            answers = {key: columns[key][i] for key in (chosen_key, rejected_key)}
            given = _common_prompt(answers, where) if implicit else columns[prompt_key][i]
            column = f"{chosen_key} (its prompt)" if implicit else prompt_key
            prompt = check_prompt(given, where, column, as_chat=as_chat, system=system)
            chosen, rejected = (_answer(value, given, where, key) for key, value in answers.items())
            if chosen != rejected:
                kept.append((prompt, chosen, rejected))
                continue
            num_ties += 1
            if ties == "refuse":
                raise DataError(
                    f"{where}: {chosen_key!r} and {rejected_key!r} are the same answer",
                    expected="two answers of which one is better",
                    received=shorten(chosen),
                    do="remove the row, or leave such pairs out with ties='drop'",
                )
        if not kept:
            raise DataError(f"{name} is empty", expected="at least one pair", received=f"{num_ties} ties, none else")
        prompts, chosen_texts, rejected_texts = zip(*kept, strict=True)
        others = {"chosen": chosen_texts, "rejected": rejected_texts}
        data = cls(prompts, others, shuffle=shuffle, name=name)
        data._tokenizer, data.num_ties = tokenizer, num_ties
        return data

    def _draw(self, start: int, index: Sequence[int]) -> Preferences:
        import torch

        prompts = [self._prompts[i] for i in index for _ in range(2)]
        texts = [self._others[key][i] for i in index for key in ("chosen", "rejected")]
        tokens, spans = encode_rows(self._tokenizer, prompts, texts)
        pair = draw_numbers(start, len(index)).repeat_interleave(2)
        second = torch.arange(2 * len(index)) % 2
        return Preferences(
            prompt_id=pair,
            sample_id=second,
            tokens=tokens,
            spans=spans,
            pair_id=pair.clone(),
            chosen=(1 - second).to(torch.uint8),
        )


class FeedbackDataset(_Answers[Feedback]):
    """Answers that were liked or not, each for itself: what KTO trains on. A draw is a row.

    A prompt is given as in :class:`~flowrl.data.PromptDataset`; the completion is a text, or a list of messages: the answer
    alone (one assistant message), or the messages of the prompt and then the answer. The label is a bool, or 0 or 1. Other
    columns are not kept.

    Example::

        data = FeedbackDataset.from_rows(
            [{"prompt": "2 + 3 =", "completion": "5", "label": True}], tokenizer=actor
        )
    """

    batch_type: type[Batch] = Feedback

    @classmethod
    def from_jsonl(
        cls,
        path: str | os.PathLike[str],
        prompt_key: str = "prompt",
        completion_key: str = "completion",
        label_key: str = "label",
        *,
        tokenizer: Tokenizer | AnyModel,
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
    ) -> FeedbackDataset:
        """Read a UTF-8 file with one JSON object a line.

        Args:
            path: the file.
            prompt_key: the column of prompts.
            completion_key: the column of answers.
            label_key: the column that says whether the answer is desirable.
            tokenizer: a live tokenizer, or a Model, whose tokenizer is loaded when the first rows are drawn.
            shuffle, limit, system, as_chat: as in :meth:`PromptDataset.from_jsonl`.

        Raises:
            DataError: anything that cannot be read as said here, with file, line and column.
        """
        keys = (prompt_key, completion_key, label_key)
        options: dict[str, Any] = dict(shuffle=shuffle, system=system, as_chat=as_chat, name=str(path))
        return cls._build(read_jsonl(path, limit), keys=keys, tokenizer=tokenizer, **options)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        prompt_key: str = "prompt",
        completion_key: str = "completion",
        label_key: str = "label",
        *,
        tokenizer: Tokenizer | AnyModel,
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
        name: str = "rows",
    ) -> FeedbackDataset:
        """Take dicts of JSON values; arguments as in :meth:`from_jsonl`.

        Raises:
            DataError: anything that cannot be taken as said there, with row and column.
        """
        keys = (prompt_key, completion_key, label_key)
        options: dict[str, Any] = dict(shuffle=shuffle, system=system, as_chat=as_chat, name=name)
        return cls._build(read_objects(rows, limit), keys=keys, tokenizer=tokenizer, **options)

    @classmethod
    def _build(
        cls,
        rows: Iterable[Row],
        *,
        keys: tuple[str, str, str],
        tokenizer: Tokenizer | AnyModel,
        shuffle: bool,
        system: str | None,
        as_chat: bool,
        name: str,
    ) -> Self:
        check_tokenizer(tokenizer)
        if system is not None:
            check_text(system, name, "system")
        prompt_key, completion_key, label_key = keys
        places, columns = collect(rows, keys, name)
        given = columns[prompt_key]
        prompts = [
            check_prompt(p, where, prompt_key, as_chat=as_chat, system=system)
            for p, where in zip(given, places, strict=True)
        ]
        completions = [
            _answer(c, p, where, completion_key)
            for c, p, where in zip(columns[completion_key], given, places, strict=True)
        ]
        labels = [_label(v, where, label_key) for v, where in zip(columns[label_key], places, strict=True)]
        others = {"completion": completions, "label": labels}
        data = cls(prompts, others, shuffle=shuffle, name=name)
        data._tokenizer = tokenizer
        return data

    def _draw(self, start: int, index: Sequence[int]) -> Feedback:
        import torch

        prompts, texts = [self._prompts[i] for i in index], [self._others["completion"][i] for i in index]
        tokens, spans = encode_rows(self._tokenizer, prompts, texts)
        labels = [self._others["label"][i] for i in index]
        return Feedback(
            prompt_id=draw_numbers(start, len(index)),
            sample_id=torch.zeros(len(index), dtype=torch.int64),
            tokens=tokens,
            spans=spans,
            desirable=torch.tensor(labels, dtype=torch.uint8),
        )


# -- reading what the columns hold ---------------------------------------------------------------------------------------


def _check_implicit(prompt_key: str, columns: Mapping[str, Any], first_chosen: Any, where: str) -> None:
    """Raise where prompts are missing that nothing else holds."""
    if prompt_key == "prompt" and isinstance(first_chosen, list):
        return
    raise DataError(
        f"{where}: no column {prompt_key!r}",
        expected=f"a column {prompt_key!r}, or answers that are whole conversations in chat messages",
        received=f"the columns {', '.join(map(repr, columns))}, and an answer that is {describe(first_chosen)}",
        do=f"{nearest(prompt_key, columns)} Name another column with prompt_key",
    )


def _common_prompt(answers: Mapping[str, Any], where: str) -> list[Any]:
    """The messages that both conversations begin with, but for the last one of each."""
    for key, value in answers.items():
        if not isinstance(value, list) or len(value) < 2:
            raise DataError(
                f"{where}: column {key!r} is not a conversation",
                expected="a list of messages, the prompt and then the answer, since there is no column of prompts",
                received=describe(value),
            )
    conversations = [value[:-1] for value in answers.values()]
    common = [pair[0] for pair in takewhile(lambda pair: pair[0] == pair[1], zip(*conversations, strict=False))]
    if not common:
        chosen, rejected = (describe(value[0]) for value in answers.values())
        raise DataError(
            f"{where}: the two conversations do not begin with the same message",
            expected="one prompt, then two answers",
            received=f"{chosen}, and {rejected}",
        )
    return common


def _answer(value: Any, prompt: Any, where: str, column: str) -> str:
    """The text of an answer: itself, or the content of the assistant message that is alone or follows the prompt."""
    if isinstance(value, str):
        return check_text(value, where, column)
    if not isinstance(value, list):
        raise DataError(
            f"{where}: column {column!r} has the wrong type",
            expected='a text, or a list of {"role", "content"} messages',
            received=describe(value),
        )
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rest = value[len(asked) :] if value[: len(asked)] == asked else value
    message = rest[0] if len(rest) == 1 else None
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise DataError(
            f"{where}: column {column!r} is not an answer to its prompt",
            expected="one assistant message, alone or after the messages of the prompt",
            received=_roles(value) + f", and a prompt of {_roles(asked)}",
        )
    further = [key for key, item in message.items() if key not in ("role", "content") and item is not None]
    if further:
        raise DataError(
            f"{where}: the answer in column {column!r} has {further[0]!r}, which would be lost",
            expected="a message with role and content",
            received=f"the keys {', '.join(map(repr, message))}",
            do="write the answer as one text, as the model should say it",
        )
    return check_text(message.get("content"), where, f"{column}.content")


def _roles(messages: Sequence[Any]) -> str:
    """Who speaks in a conversation, in words."""
    roles = [str(m.get("role")) if isinstance(m, dict) else describe(m) for m in messages]
    shown = ", ".join(roles[:6]) + (", …" if len(roles) > 6 else "")
    return f"{len(roles)} messages ({shown})" if roles else "no message"


def _label(value: Any, where: str, column: str) -> bool:
    """Whether an answer is desirable."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"{where}: column {column!r} has the wrong value",
        expected="true or false, or 1 or 0",
        received=describe(value),
    )
