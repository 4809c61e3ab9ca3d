"""Tasks: prompts together with the function that verifies an answer.

:func:`reasoning_gym_task` serves the procedural data sets of `reasoning_gym
<https://github.com/open-thought/reasoning-gym>`_. Importing this module does not import it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.data.datasets import PromptDataset
from flowrl.data.rows import check_text, describe
from flowrl.errors import DataError, nearest

if TYPE_CHECKING:
    from flowrl.data.reasoning_gym_verifier import ReasoningGymVerifier

#: Data sets of reasoning_gym 0.1.25 that iterate over Python sets while they make a question, so that it
#: differs between processes. They are made in a process whose PYTHONHASHSEED is 0; so are mixtures, which may
#: contain them.
HASH_DEPENDENT = frozenset(
    [
        "composite",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    ]
)


@dataclass(frozen=True)
class Task:
    """Prompts and what verifies an answer to them.

    Args:
        name: of the task.
        dataset: prompts with the extras ``answer`` and ``entry``.
        verifier: picklable, ``verifier(response, entry) -> float``, for ``FunctionReward(task.verifier)``.

    Example::

        task = reasoning_gym_task("chain_sum", size=500, seed=0, instruction="Reply with only the number.")
        train, held_out = task.dataset.split(100)
        rewards = FunctionReward(task.verifier)(rollouts)
    """

    name: str
    dataset: PromptDataset
    verifier: Callable[[str, Any], float]


def reasoning_gym_task(
    name: str,
    *,
    size: int,
    seed: int,
    instruction: str | None = None,
    system: str | None = None,
    as_chat: bool = True,
    answer_tag: str | None = None,
    error_score: float | None = None,
    **config: Any,
) -> Task:
    """A task from reasoning_gym: ``size`` questions, made at once.

    Columns of the data set: ``answer``, the library's own answer (None where it has none, because many are
    right), and ``entry``, its whole entry as JSON (tuples and the like are marked, see :func:`decode_entry`).
    Make one task and hold out a part of it with ``task.dataset.split``: question i is made from ``seed + i``,
    so tasks with neighbouring seeds share questions.

    Args:
        name: of the data set, ``"chain_sum"``, …
        size: number of questions.
        seed: of the questions; equal settings give equal questions, in every process.
        instruction: appended to each question on a line of its own.
        system, as_chat: as in :meth:`PromptDataset.from_jsonl`.
        answer_tag: score what stands in the response's last ``<tag>…</tag>``, and 0.0 where there is none.
            None scores the whole response.
        error_score: the score of a response on which the library itself fails. None lets the exception out,
            and ``FunctionReward`` counts the row as invalid.
        config: settings of the data set, as in ``reasoning_gym.create_dataset``.

    Raises:
        DataError: reasoning_gym is not installed, has no such data set or setting, refuses a value, or makes
            an entry that JSON cannot hold.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise DataError("size is wrong", expected="a number of questions from 1 on", received=describe(size))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError("seed is wrong", expected="an integer", received=describe(seed))
    if instruction is not None:
        check_text(instruction, "reasoning_gym_task", "instruction")
    check_config(name, config)
    from flowrl.data.reasoning_gym_verifier import ReasoningGymVerifier, build

    config = {**config, "size": size, "seed": seed}
    verifier = ReasoningGymVerifier(name, config, answer_tag, error_score)
    if name in HASH_DEPENDENT:
        build(name, config)  # for the errors of settings to come from here
        entries = _entries_in_child(verifier)
    else:
        entries = verifier.entries()
    data = PromptDataset.from_rows(
        (_row(entry, instruction) for entry in entries),
        system=system,
        as_chat=as_chat,
        name=f"reasoning_gym {name}",
    )
    return Task(name, data, verifier)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise for an unknown data set or setting, with the nearest name."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            "reasoning_gym is not installed", received=error, do="pip install 'flowrl-dataflow[tasks]'"
        ) from None
    if name not in DATASETS:
        hint = nearest(name, DATASETS) if isinstance(name, str) else "give its name"
        raise DataError(f"reasoning_gym has no data set {name!r}", expected="one of its names", do=hint)
    known = [f.name for f in fields(DATASETS[name][1]) if f.name not in ("size", "seed")]
    for key in config:
        if key not in known:
            raise DataError(
                f"{name!r} of reasoning_gym has no setting {key!r}",
                expected=", ".join(known),
                received=key,
                do=nearest(key, known),
            )


def _row(entry: Mapping[str, Any], instruction: str | None) -> dict[str, Any]:
    question = entry["question"]
    prompt = question if instruction is None else f"{question}\n{instruction}"
    return {"prompt": prompt, "answer": entry["answer"], "entry": entry}


def _entries_in_child(verifier: ReasoningGymVerifier) -> list[dict[str, Any]]:
    """The entries, made by a Python process whose hashes are the same each time."""
    with tempfile.TemporaryDirectory(prefix="flowrl-") as folder:
        asked, made = Path(folder, "asked.pickle"), Path(folder, "made.pickle")
        asked.write_bytes(pickle.dumps(verifier))
        paths = os.pathsep.join(p for p in sys.path if p)
        child = subprocess.run(
            [sys.executable, "-m", "flowrl.data.reasoning_gym_verifier", str(asked), str(made)],
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        if child.returncode != 0:
            raise DataError(
                f"reasoning_gym cannot make {verifier.name!r}",
                received="".join(child.stderr.strip().splitlines()[-1:]) or f"exit code {child.returncode}",
            )
        return pickle.loads(made.read_bytes())
