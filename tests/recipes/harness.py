"""Runs recipes on the tiny model, as they are and with rewards or labels that are shuffled over rows."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Batch, Experiment, Feedback, Model, Node, Preferences, Ragged, Rewards, RunResult, Sequences
from flowrl.recipes import build, load_recipe
from flowrl.runtime.engines import transformers_forward

RECIPES = Path(__file__).parents[2] / "recipes"
QUIET: dict[str, Any] = dict(progress=False, export=False, report=False, samples_every=0, checkpoint_every=None)
#: Greedy or sampled responses to prompts that were not trained on.
HELD_OUT = "eval/heldout/reward"


def experiment(name: str, **arguments: Any) -> Experiment:
    """What ``flowrl run recipes/<name>.py`` runs, without the summary that it prints."""
    return replace(build(load_recipe(RECIPES / f"{name}.py"), arguments), on_end=None)


def run(name: str, seed: int, out: Path, **options: Any) -> tuple[Experiment, RunResult]:
    """A recipe on the tiny model, with its own defaults."""
    made = experiment(name, seed=seed)
    return made, made.run(out=out, seed=seed, **QUIET | options)


def change(result: RunResult, metric: str = HELD_OUT) -> tuple[float, float]:
    """(at first, at last) of a metric that evaluations give."""
    values = [v for v in result.metrics[metric].to_pylist() if v is not None]
    return values[0], values[-1]


def common() -> Any:
    """The module beside the recipes, which they import by this name."""
    if "common" not in sys.modules:
        load_recipe(RECIPES / "sft.py")
    return sys.modules["common"]


def trained_model(made: Experiment) -> Model:
    """The live Model that the first updater of a recipe has trained."""
    return next(m for call in made.flow.calls for m in call.node.writes() if isinstance(m, Model))


# -- shuffling -----------------------------------------------------------------------------------------------------------


def shuffle_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the numbers of all Rewards stand in rows that they do not belong to, and of each pair that a judge made
    either response may be the chosen one. Means over a batch, and so the metrics, stay as they are."""
    honest, calls = Node.run, random.Random(0)

    def run(self: Node, arguments: Any, label: str) -> Any:
        result = honest(self, arguments, label)
        if isinstance(result, Rewards):
            order = torch.tensor(calls.sample(range(result.num_rows), result.num_rows), dtype=torch.int64)
            return replace(result, components={name: column[order] for name, column in result.components.items()})
        return flip_pairs(result, calls) if isinstance(result, Preferences) else result

    monkeypatch.setattr(Node, "run", run)


def ask_about_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a teacher inside of an updater reads each response after the prompt of another row: what it would say is
    shuffled over rows."""
    honest, calls = transformers_forward._of_other, random.Random(0)

    def of_other(spec: Any, sequences: Any, temperature: float) -> Any:
        order = torch.tensor(calls.sample(range(sequences.num_rows), sequences.num_rows))
        lengths = sequences.prompt_lengths
        assert len(set(lengths.tolist())) == 1
        prompts = sequences.tokens.slice_rows(torch.zeros_like(lengths), lengths).select(order)
        tokens = Ragged.join(prompts, sequences.response_tokens)
        return honest(spec, replace(sequences, tokens=tokens), temperature)

    monkeypatch.setattr(transformers_forward, "_of_other", of_other)


class ShuffledLabels:
    """A data set whose labels are shuffled over the rows of each draw: which answer of a pair is chosen, which answer is
    liked, which completion belongs to which prompt."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "unshuffled") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.data, name)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, start: int, count: int, seed: int) -> Batch:
        batch, draw = self.data.rows(start, count, seed), random.Random(start)
        if isinstance(batch, Preferences):
            return flip_pairs(batch, draw)
        order = torch.tensor(draw.sample(range(batch.num_rows), batch.num_rows))
        if isinstance(batch, Feedback):
            return replace(batch, desirable=batch.desirable[order])
        return other_responses(batch, order)


def flip_pairs(preferences: Preferences, draw: random.Random) -> Preferences:
    """Of each pair either row is the chosen one, by a coin."""
    coins = {pair: draw.randrange(2) for pair in sorted(set(preferences.pair_id.tolist()))}
    flips = torch.tensor([coins[pair] for pair in preferences.pair_id.tolist()], dtype=torch.uint8)
    return replace(preferences, chosen=preferences.chosen ^ flips)


def other_responses(batch: Any, order: torch.Tensor) -> Any:
    """The prompt of each row with the response of another, all of one length."""
    prompts = batch.tokens.slice_rows(torch.zeros_like(batch.prompt_lengths), batch.prompt_lengths)
    assert len(set(batch.response_lengths.tolist())) == 1
    return replace(batch, tokens=Ragged.join(prompts, batch.response_tokens.select(order)))


# -- what preference learning is after -----------------------------------------------------------------------------------


def held_out_pairs(seed: int) -> Preferences:
    """Right and wrong answers to the held-out prompts of the tiny task."""
    from flowrl.data import PreferenceDataset

    setup = common().choose("tiny", seed)
    rows = [{"prompt": p, "chosen": right, "rejected": wrong} for p, right, wrong in common().examples(setup.held_out)]
    data = PreferenceDataset.from_rows(rows, tokenizer=setup.actor, as_chat=False)
    return data.unshuffled(0, len(data))


def pair_accuracy(pairs: Preferences, scores: torch.Tensor) -> float:
    """The share of pairs whose right answer has the higher score; ½ for equal ones."""
    ahead = scores[pairs.chosen == 1] - scores[pairs.chosen == 0]
    return float(((ahead.sign() + 1) / 2).mean())


def sequence_logprobs(model: Model, sequences: Sequences) -> torch.Tensor:
    """``[num_rows]``: the log-prob of each response under a live model."""
    from flowrl import ReferenceLogprobs

    return ReferenceLogprobs(model)(sequences).ref_logprobs.sum_rows()
