"""What needs reasoning_gym at hand: making entries, and scoring answers in the process of a reward function.

Importing this module imports reasoning_gym (about 2 s). Unpickling a verifier does, so that a reward's worker
process has it before the clock of its first call starts.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.utils import extract_answer

from flowrl.context import random_key
from flowrl.data.entries import decode_entry, encode_entry
from flowrl.errors import DataError


@dataclass(frozen=True)
class ReasoningGymVerifier:
    """``verifier(response, entry) -> float``: the library's own score of a response.

    It pickles to a name and a config; the library's data set is built again at the first call in a process.

    Args:
        name: of the data set.
        config: all its settings, size and seed among them.
        answer_tag: score the text in the last ``<tag>…</tag>``; 0.0 where there is none. None scores the
            whole response.
        error_score: the score where the library raises. None raises.
    """

    name: str
    config: Mapping[str, Any] = field(hash=False)
    answer_tag: str | None = None
    error_score: float | None = None

    def __call__(self, response: str, entry: Any) -> float:
        answer: str | None = response
        if self.answer_tag is not None:
            answer = extract_answer(response, self.answer_tag)
            if answer is None:
                return 0.0
        dataset = _built(pickle.dumps((self.name, dict(self.config))))
        decoded = decode_entry(entry)
        try:
            return float(dataset.score_answer(answer, decoded))
        except Exception:
            if self.error_score is None:
                raise
            return self.error_score

    def __getattr__(self, attribute: str) -> Any:
        # A function has a name; reward components are called by it.
        if attribute == "__name__":
            return self.name
        raise AttributeError(attribute)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, each as :func:`flowrl.data.entries.encode_entry` gives it.

        Raises:
            DataError: an entry that JSON cannot hold, or that the library fails to make.
        """
        made = []
        with own_random_state():
            dataset = build(self.name, self.config)
            for i in range(len(dataset)):
                key = random_key(0, "flowrl.data.reasoning_gym", int(self.config["seed"]) % 2**63, i)
                random.seed(key)  # some data sets draw from the global generators
                np.random.seed(key % 2**32)
                try:
                    entry = dataset[i]
                except Exception as error:
                    raise DataError(
                        f"reasoning_gym cannot make question {i} of {self.name!r}",
                        received=f"{type(error).__name__}: {error}",
                        do="choose other settings",
                    ) from error
                made.append(encode_entry(entry, self.name))
        return made


def build(name: str, config: Mapping[str, Any]) -> Any:
    """The library's data set.

    Raises:
        DataError: it refuses a setting.
    """
    try:
        return reasoning_gym.create_dataset(name, **config)
    except Exception as error:  # the library checks with assert, and a wrong type surfaces as anything
        settings = ", ".join(f"{k}={v!r}" for k, v in config.items())
        raise DataError(
            f"reasoning_gym refuses the settings of {name!r}",
            expected="what the data set's config allows",
            received=f"{settings}: {error or type(error).__name__}",
        ) from error


@lru_cache(maxsize=16)
def _built(pickled: bytes) -> Any:
    name, config = pickle.loads(pickled)
    with own_random_state():
        return build(name, config)


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    """Put the global random generators back as they were: the library seeds and draws from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _main(asked: str, made: str) -> None:
    verifier: ReasoningGymVerifier = pickle.loads(Path(asked).read_bytes())
    Path(made).write_bytes(pickle.dumps(verifier.entries()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
