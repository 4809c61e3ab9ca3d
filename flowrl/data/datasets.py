"""Data sets: rows of one batch type, drawn by a cursor.

The stream of draws is endless, goes through all rows once an epoch, and is a pure function of the cursor and
the seed: a checkpoint keeps one number and the fingerprint of the content, and a resumed run draws exactly
what it would have drawn.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from flowrl.batches import Batch, Demonstrations, Prompts, Spans
from flowrl.context import random_key
from flowrl.data.rows import Row, check_prompt, check_text, collect, describe, read_jsonl, read_objects
from flowrl.data.tokenizers import Tokenizer, check_tokenizer, encode_completion, encode_prompt, tokenizer_of
from flowrl.errors import DataError
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.models import AnyModel


class Dataset(Protocol):
    """Rows of one batch type, drawn by a cursor.

    Anything with these members can feed a source. ``rows`` must be a pure function of its arguments: a run
    that is resumed, or whose filter refills, asks again and must get the same rows.
    """

    @property
    def batch_type(self) -> type[Batch]:
        """What :meth:`rows` returns: ``Prompts``, ``Demonstrations``, …"""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the extras that each row has (``answer``, …), for checks before training."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of the content. A checkpoint keeps it, so that a resume on other data is refused."""
        ...

    def __len__(self) -> int:
        """Rows in one epoch."""
        ...

    def rows(self, start: int, count: int, seed: int) -> Batch:
        """Draws ``start`` to ``start + count - 1`` of an endless stream; ``prompt_id`` is the draw number."""
        ...


# `flowrl.run` also calls ``unshuffled(start, count)`` where a data set has it, to find prompts that are too
# long before training.


class _Rows:
    """Columns of Python objects and the order in which they are drawn; what the concrete data sets share.

    Draw d is in epoch ``d // len(self)``. An epoch visits each row once, in the order of (seed, epoch).
    """

    def __init__(
        self, prompts: Sequence[Any], others: Mapping[str, Sequence[Any]], *, shuffle: bool, name: str
    ) -> None:
        self._prompts = tuple(prompts)
        self._others = {key: tuple(values) for key, values in others.items()}
        self._shuffle = shuffle
        self.name = name
        self._order: tuple[int, int, np.ndarray] | None = None
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} rows)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    @property
    def fingerprint(self) -> str:
        """A hash (32 hex digits) of type, order setting, and every row; computed at first use."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            head = [type(self).__name__, self._shuffle, sorted(self._others)]
            digest.update(json.dumps(head).encode())
            for i, prompt in enumerate(self._prompts):
                row = [prompt, {key: values[i] for key, values in self._others.items()}]
                digest.update(b"\n" + json.dumps(row, sort_keys=True).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def head(self, n: int) -> Self:
        """The first ``n`` rows, in the order of the file.

        Raises:
            DataError: n is not between 1 and the number of rows.
        """
        self._check_count("head(n)", n, len(self))
        return self._take(range(n))

    def split(self, num_held_out: int, seed: int = 0) -> tuple[Self, Self]:
        """Two data sets, (for training, held out), that have no prompt in common.

        The held-out one has exactly ``num_held_out`` rows with different prompts, chosen by ``seed``. A
        prompt that is held out is in no training row: further rows with it are in neither part.

        Raises:
            DataError: there are not more than ``num_held_out`` different prompts.
        """
        first_row: dict[str, int] = {}
        keys = [json.dumps(prompt, sort_keys=True) for prompt in self._prompts]
        for i, key in enumerate(keys):
            first_row.setdefault(key, i)
        self._check_count(
            "split(num_held_out)", num_held_out, len(first_row) - 1, "one less than its different prompts"
        )
        distinct = list(first_row)
        chosen = permutation(random_key(seed, "flowrl.data.split"), len(distinct))[:num_held_out]
        held_out = {distinct[i] for i in chosen.tolist()}
        train = [i for i, key in enumerate(keys) if key not in held_out]
        return self._take(train), self._take(sorted(first_row[key] for key in held_out))

    def _check_count(self, what: str, n: int, most: int, why: str = "its rows") -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
            raise DataError(
                f"{self.name}: {what} is out of range", expected=f"1 to {most} ({why})", received=describe(n)
            )

    def _take(self, index: Iterable[int]) -> Self:
        index = list(index)
        part = copy.copy(self)
        part._prompts = tuple(self._prompts[i] for i in index)
        part._others = {key: tuple(values[i] for i in index) for key, values in self._others.items()}
        part._order = part._fingerprint = None
        return part

    def _draws(self, start: int, count: int, seed: int) -> list[int]:
        """The row behind each draw."""
        if start < 0 or count < 0:
            raise DataError(f"{self.name}: rows({start}, {count}, …)", expected="start and count from 0 on")
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, place = divmod(start + len(drawn), len(self))
            drawn += self._order_of(seed, epoch)[place : place + count - len(drawn)].tolist()
        return drawn

    def _order_of(self, seed: int, epoch: int) -> np.ndarray:
        """int64 ``[len(self)]``: the rows in the order of one epoch. The latest one is kept."""
        if not self._shuffle:
            seed, epoch = 0, 0
        order = self._order
        if order is None or order[:2] != (seed, epoch):
            if self._shuffle:
                rows = permutation(random_key(seed, "flowrl.data.epoch", epoch), len(self))
            else:
                rows = np.arange(len(self))
            self._order = order = (seed, epoch, rows)
        return order[2]

    def _drawn(self, column: Sequence[Any], draws: Sequence[int]) -> tuple[Any, ...]:
        """Copies, so that a node which changes what it was given does not change the next epoch."""
        return tuple(copy.deepcopy(column[i]) for i in draws)


class PromptDataset(_Rows):
    """Prompts, with all other columns of the data as extras.

    Make one with :meth:`from_jsonl` or :meth:`from_rows`. A prompt is a text or a list of chat messages
    ``{"role", "content"}``. A text becomes one user message unless ``as_chat=False``, which sends it to the
    model as it is (for base models without a chat template).

    Example::

        >>> data = PromptDataset.from_rows([{"prompt": "2 + 3 =", "answer": "5"}])
        >>> batch = data.rows(0, 1, seed=0)
        >>> batch.messages[0], batch.extras["answer"]
        ([{'role': 'user', 'content': '2 + 3 ='}], ('5',))
    """

    batch_type: type[Batch] = Prompts

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the extras."""
        return tuple(self._others)

    @classmethod
    def from_jsonl(
        cls,
        path: str | os.PathLike[str],
        prompt_key: str = "prompt",
        *,
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
    ) -> PromptDataset:
        """Read a UTF-8 file with one JSON object a line.

        Args:
            path: the file.
            prompt_key: the column of prompts; all others become extras.
            shuffle: another order each epoch; False keeps the order of the file.
            limit: take so many rows from the top and read no further.
            system: a system message before every prompt.
            as_chat: make a text one user message; False leaves it as it is.

        Raises:
            DataError: anything that cannot be read as said here, with file, line and column.
        """
        rows = read_jsonl(path, limit)
        return cls._build(rows, prompt_key, shuffle=shuffle, system=system, as_chat=as_chat, name=str(path))

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        prompt_key: str = "prompt",
        *,
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
        name: str = "rows",
    ) -> PromptDataset:
        """Take dicts of JSON values; arguments as in :meth:`from_jsonl`, and ``name`` is how errors call the
        data set.

        Raises:
            DataError: anything that cannot be taken as said there, with row and column.
        """
        taken = read_objects(rows, limit)
        return cls._build(taken, prompt_key, shuffle=shuffle, system=system, as_chat=as_chat, name=name)

    @classmethod
    def _build(
        cls,
        rows: Iterable[Row],
        prompt_key: str,
        *,
        shuffle: bool,
        system: str | None,
        as_chat: bool,
        name: str,
    ) -> PromptDataset:
        if system is not None:
            check_text(system, name, "system")
        places, columns = collect(rows, [prompt_key], name)
        given = zip(columns.pop(prompt_key), places, strict=True)
        prompts = [check_prompt(p, where, prompt_key, as_chat=as_chat, system=system) for p, where in given]
        return cls(prompts, columns, shuffle=shuffle, name=name)

    def rows(self, start: int, count: int, seed: int) -> Prompts:
        """Draws ``start`` to ``start + count - 1``, ``count`` rows; they may straddle epochs."""
        return self._batch(start, self._draws(start, count, seed))

    def unshuffled(self, start: int, count: int) -> Prompts:
        """Draws ``start`` to ``start + count - 1`` as ``shuffle=False`` gives them: to check the data."""
        return self._batch(start, [(start + i) % len(self) for i in range(count)])

    def _batch(self, start: int, index: Sequence[int]) -> Prompts:
        return Prompts(
            prompt_id=draw_numbers(start, len(index)),
            messages=self._drawn(self._prompts, index),
            extras={key: self._drawn(values, index) for key, values in self._others.items()},
        )


class DemonstrationDataset(_Rows):
    """Prompts and completions to imitate, as token ids: the prompt as a rollout would have it, the
    completion, eos.

    A prompt is given as in :class:`PromptDataset`; as chat messages its ids are exactly those of the chat
    template with the generation prompt. The completion is a text; its tokens and the tokenizer's eos token
    are targets. Other columns are not kept. Rows are tokenised when they are drawn; nothing is cut to a
    length.
    """

    batch_type: type[Batch] = Demonstrations
    _tokenizer: Tokenizer | AnyModel

    @property
    def columns(self) -> tuple[str, ...]:
        """Empty: demonstrations carry no extras."""
        return ()

    @classmethod
    def from_jsonl(
        cls,
        path: str | os.PathLike[str],
        prompt_key: str = "prompt",
        completion_key: str = "completion",
        *,
        tokenizer: Tokenizer | AnyModel,
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
    ) -> DemonstrationDataset:
        """Read a UTF-8 file with one JSON object a line.

        Args:
            path: the file.
            prompt_key: the column of prompts.
            completion_key: the column of completions, texts.
            tokenizer: a live tokenizer, or a Model, whose tokenizer is loaded when the first rows are drawn.
            shuffle, limit, system, as_chat: as in :meth:`PromptDataset.from_jsonl`.

        Raises:
            DataError: anything that cannot be read as said here, with file, line and column.
        """
        options: dict[str, Any] = dict(shuffle=shuffle, system=system, as_chat=as_chat, name=str(path))
        return cls._build(read_jsonl(path, limit), prompt_key, completion_key, tokenizer, **options)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        prompt_key: str = "prompt",
        completion_key: str = "completion",
        *,
        tokenizer: Tokenizer | AnyModel,
        shuffle: bool = True,
        limit: int | None = None,
        system: str | None = None,
        as_chat: bool = True,
        name: str = "rows",
    ) -> DemonstrationDataset:
        """Take dicts of JSON values; arguments as in :meth:`from_jsonl`.

        Raises:
            DataError: anything that cannot be taken as said there, with row and column.
        """
        options: dict[str, Any] = dict(shuffle=shuffle, system=system, as_chat=as_chat, name=name)
        return cls._build(read_objects(rows, limit), prompt_key, completion_key, tokenizer, **options)

    @classmethod
    def _build(
        cls,
        rows: Iterable[Row],
        prompt_key: str,
        completion_key: str,
        tokenizer: Tokenizer | AnyModel,
        *,
        shuffle: bool,
        system: str | None,
        as_chat: bool,
        name: str,
    ) -> DemonstrationDataset:
        check_tokenizer(tokenizer)
        if system is not None:
            check_text(system, name, "system")
        places, columns = collect(rows, [prompt_key, completion_key], name)
        prompts = [
            check_prompt(p, where, prompt_key, as_chat=as_chat, system=system)
            for p, where in zip(columns[prompt_key], places, strict=True)
        ]
        completions = [
            check_text(c, where, completion_key) for c, where in zip(columns[completion_key], places, strict=True)
        ]
        data = cls(prompts, {"completion": completions}, shuffle=shuffle, name=name)
        data._tokenizer = tokenizer
        return data

    def rows(self, start: int, count: int, seed: int) -> Demonstrations:
        """Draws ``start`` to ``start + count - 1``, ``count`` rows; they may straddle epochs.

        Raises:
            ModelError: the tokenizer cannot be loaded.
            DataError: the tokenizer has no eos token, or no chat template for chat prompts.
        """
        return self._batch(start, self._draws(start, count, seed))

    def unshuffled(self, start: int, count: int) -> Demonstrations:
        """Draws ``start`` to ``start + count - 1`` as ``shuffle=False`` gives them: to check the data."""
        return self._batch(start, [(start + i) % len(self) for i in range(count)])

    def _batch(self, start: int, index: Sequence[int]) -> Demonstrations:
        import torch

        texts = self._others["completion"]
        tokens, spans = encode_rows(self._tokenizer, [self._prompts[i] for i in index], [texts[i] for i in index])
        return Demonstrations(
            prompt_id=draw_numbers(start, len(index)),
            sample_id=torch.zeros(len(index), dtype=torch.int64),
            tokens=tokens,
            spans=spans,
        )


def encode_rows(
    tokenizer: Tokenizer | AnyModel, prompts: Sequence[Any], completions: Sequence[str]
) -> tuple[Ragged, Spans]:
    """The tokens of recorded rows and who wrote them: the prompt as a rollout would have it, the completion, eos.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        DataError: the tokenizer has no eos token, or no chat template for chat prompts.
    """
    import torch

    live = tokenizer_of(tokenizer)
    asked = Ragged.from_rows([encode_prompt(live, p) for p in prompts], torch.int64)
    answered = Ragged.from_rows([encode_completion(live, c) for c in completions], torch.int64)
    spans = Spans.prompt_then_response(asked.lengths, answered.lengths, policy_version=-1)
    return Ragged.join(asked, answered), spans


def permutation(key: int, n: int) -> np.ndarray:
    """int64 ``[n]``: 0 … n-1 in an order that the 128-bit ``key`` alone decides, on every machine and numpy.

    The rows are sorted by raw Philox words (Salmon et al. 2011), whose stream is fixed by its specification.
    """
    return np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")


def draw_numbers(start: int, count: int) -> Tensor:
    """int64 ``[count]``: the ids of draws."""
    import torch

    return torch.arange(start, start + count, dtype=torch.int64)
