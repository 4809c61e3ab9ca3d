"""Inputs of advantage nodes, and every estimator of the package with every setting that changes its formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flowrl.batches import Advantages, LogprobOrigin, OldLogprobs, RefLogprobs, Rewards, Rollouts, Values
from flowrl.context import StepContext, use_step
from flowrl.nodes import rewards_like
from flowrl.nodes.advantage import AdvantageEstimator
from flowrl.nodes.row_advantage import FunctionAdvantage, RowAdvantage
from flowrl.ragged import Ragged
from tests.tiny import recorded_rollouts

NAN = float("nan")
ORIGIN = LogprobOrigin("tiny", 0, "test", "float32")


def run(node: Any, *arguments: Any, **named: Any) -> tuple[Advantages, dict[str, float]]:
    """The node's result and what it reported."""
    reported: dict[str, float] = {}
    with use_step(StepContext(report=reported.__setitem__)):
        return node(*arguments, **named), reported


def first_values(column: Ragged) -> list[float]:
    """Of each row the value at its first token; None for an empty row."""
    return [row[0] if row else None for row in column.to_lists()]


def with_invalid(rewards: Rewards, *rows: int) -> Rewards:
    """The same with NaN and a reason in these rows."""
    valid = rewards.valid.clone()
    valid[list(rows)] = 0
    reasons = tuple("timed out" if i in rows else "" for i in range(rewards.num_rows))
    components = {n: torch.where(valid.bool(), c, NAN) for n, c in rewards.components.items()}
    return replace(rewards, valid=valid, reasons=reasons, components=components)


def values_of(rollouts: Rollouts, number: float = 0.0) -> Values:
    column = rollouts.loss_mask.with_values(torch.full((len(rollouts.loss_mask.values),), number))
    return Values(rollouts.prompt_id, rollouts.sample_id, column)


def column(rollouts: Rollouts, *, seed: int, poison: float) -> Ragged:
    """Numbers of −2 to −0.1 that depend on ids and place alone; ``poison`` at observations."""
    rows = []
    for prompt, sample, mask in zip(rollouts.prompt_id, rollouts.sample_id, rollouts.loss_mask.rows(), strict=True):
        generator = torch.Generator().manual_seed(1000 * seed + 100 * int(prompt) + int(sample))
        noise = -0.1 - 1.9 * torch.rand(len(mask), generator=generator)
        rows.append(torch.where(mask.bool(), noise, poison))
    return Ragged.from_rows(rows, torch.float32)


def inputs(node: AdvantageEstimator, rollouts: Rollouts, rewards: Rewards, poison: float = 0.0) -> dict[str, Any]:
    """What the node takes, by name. Columns that are no rewards hold ``poison`` at observations."""
    ids = rollouts.prompt_id, rollouts.sample_id
    old = column(rollouts, seed=1, poison=poison)
    squared = old.with_values(old.values.exp() * 0.9 + 0.1)
    everything: dict[str, Any] = {
        "rollouts": rollouts,
        "rewards": rewards,
        "values": Values(*ids, column(rollouts, seed=2, poison=poison)),
        "old_logprobs": OldLogprobs(*ids, old, ORIGIN, sum_pi_squared=squared),
        "ref_logprobs": RefLogprobs(*ids, column(rollouts, seed=3, poison=poison), ORIGIN),
        "greedy_rewards": greedy_rewards(rollouts),
    }
    return {port.name: everything[port.name] for port in node.ports}


def greedy_rewards(rollouts: Rollouts) -> Rewards:
    """One row a prompt: prompt i earns 0.3·i."""
    prompt = rollouts.prompt_id.unique()
    valid = torch.ones(len(prompt), dtype=torch.uint8)
    return Rewards(prompt, torch.zeros_like(prompt), {"greedy": 0.3 * prompt.float()}, valid, ("",) * len(prompt))


def conversations(scores: Sequence[float] = (), seed: int = 0) -> tuple[Rollouts, Rewards]:
    """Two prompts with four responses each, one of them of zero length and some with observations; rewards with a
    number a row and, where no scores are given, one a token, which is not zero at observations."""
    rollouts = recorded_rollouts(2, 4, response_lengths=(5, 1, 0, 7, 3, 6, 4, 2), observations=True)
    if len(scores):
        return rollouts, rewards_like(rollouts, score=list(scores))
    generator = torch.Generator().manual_seed(seed)
    tokens = rollouts.loss_mask
    noise = tokens.with_values(torch.randn(len(tokens.values), generator=generator))
    return rollouts, rewards_like(rollouts, score=torch.randn(8, generator=generator), noise=noise)


def beats_median(rewards: torch.Tensor, prompt_id: torch.Tensor) -> torch.Tensor:
    """Whether a reward is above its group's median, below it, or the same."""
    out = torch.zeros_like(rewards)
    for prompt in prompt_id.unique().tolist():
        rows = prompt_id == prompt
        out[rows] = torch.sign(rewards[rows] - rewards[rows].median())
    return out


def _concrete(cls: type[AdvantageEstimator]) -> list[type[AdvantageEstimator]]:
    own = [cls] if cls.ports and cls is not RowAdvantage and cls.__module__.startswith("flowrl.") else []
    return own + [c for sub in cls.__subclasses__() for c in _concrete(sub)]


#: Every estimator, with each of its examples.
ESTIMATORS: list[AdvantageEstimator] = [
    cls(**example) for cls in _concrete(AdvantageEstimator) for example in cls.examples
]
ESTIMATORS += [FunctionAdvantage(beats_median)]


def name_of(node: AdvantageEstimator) -> str:
    """The class, and its settings other than the defaults."""
    default = type(node)().settings() if not isinstance(node, FunctionAdvantage) else node.settings()
    changed = [f"{k}={v}" for k, v in node.settings().items() if v != default[k]]
    return f"{node.name}({', '.join(changed)})"
