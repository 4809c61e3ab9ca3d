"""Sampled completions of a run: ``samples/step-000010.jsonl``, a JSON object a completion."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import RunFolderError
from flowrl.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from flowrl.batches import Rewards, Rollouts

SAMPLES_FOLDER = "samples"

_SAMPLES_NAME = re.compile(r"step-(\d+)\.jsonl")


class SampleLog:
    """Sampled completions of a run, one ``samples/step-000010.jsonl`` a logged step.

    Args:
        folder: the run folder.
        resume_from_step: None for a new run; else the files from that step on are removed.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_from_step: int | None = None) -> None:
        self.folder = Path(folder) / SAMPLES_FOLDER
        if resume_from_step is not None:
            for step, path in _sample_files(self.folder):
                if step >= resume_from_step:
                    path.unlink()

    def log(self, step: int, samples: Iterable[Mapping[str, Any]]) -> Path:
        """Write the samples of a step: dicts such as :func:`sample_rows` makes. ``step`` is added to each."""
        lines = [json.dumps(_plain({"step": int(step), **s}), allow_nan=False) for s in samples]
        path = self.folder / f"step-{step:06d}.jsonl"
        # ASCII with \u escapes: any text a model can emit survives, lone surrogates and U+2028 included.
        write_atomically(path, "".join(line + "\n" for line in lines).encode("ascii"))
        return path


def read_samples(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All sampled completions of a run, by step.

    Raises:
        RunFolderError: a file is damaged.
    """
    samples = []
    for _, path in _sample_files(Path(folder) / SAMPLES_FOLDER):
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            samples += [json.loads(line) for line in lines if line]
        except (ValueError, OSError) as error:
            raise RunFolderError(
                f"{path} is damaged",
                expected="a JSON object a line",
                received=str(error),
                do=f"move {path} away",
            ) from error
    return samples


def sample_rows(rollouts: Rollouts, rewards: Rewards | None = None, limit: int = 8) -> list[dict[str, Any]]:
    """The first rows of a batch as plain dicts: prompt, response, rewards by component, finish reason, ids.

    Args:
        rollouts: what was sampled.
        rewards: aligned by id; a row that it lacks has no reward, an invalid one has None and the reason.
        limit: how many rows; they are spread over the prompts, the first sample of each prompt first.
    """
    from flowrl.batches import FinishReason

    ids = list(zip(rollouts.prompt_id.tolist(), rollouts.sample_id.tolist(), strict=True))
    # A stable sort by sample puts one sample of each prompt before the second of any.
    rows = sorted(range(len(ids)), key=lambda i: ids[i][1])[:limit]
    reward_row: dict[tuple[int, int], int] = {}
    totals: list[float] = []
    numbers_of: dict[str, list[float]] = {}
    if rewards is not None:
        reward_ids = zip(rewards.prompt_id.tolist(), rewards.sample_id.tolist(), strict=True)
        reward_row = {key: i for i, key in enumerate(reward_ids)}
        totals = rewards.totals.tolist()
        numbers_of = {n: c.tolist() for n, c in rewards.components.items()}
        numbers_of |= {n: c.sum_rows().tolist() for n, c in rewards.token_components.items()}
    samples = []
    for i in rows:
        sample: dict[str, Any] = {
            "prompt_id": ids[i][0],
            "sample_id": ids[i][1],
            "prompt": rollouts.messages[i],
            "response": rollouts.response_text[i],
            "finish_reason": FinishReason(int(rollouts.finish_reason[i])).name.lower(),
        }
        at = reward_row.get(ids[i])
        if rewards is not None and at is not None:
            valid = bool(rewards.valid[at])
            sample["reward"] = totals[at] if valid else None
            sample["rewards"] = {n: values[at] if valid else None for n, values in numbers_of.items()}
            if not valid:
                sample["invalid"] = rewards.reasons[at]
        samples.append(sample)
    return samples


def _sample_files(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = ((_SAMPLES_NAME.fullmatch(p.name), p) for p in folder.iterdir())
    return sorted((int(m.group(1)), p) for m, p in named if m)


def _plain(value: Any) -> Any:
    """What JSON holds: non-finite numbers become "NaN" or "Infinity", arrays become lists, the rest text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [_plain(v) for v in value]
    return str(value)
