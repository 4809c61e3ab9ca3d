"""Terms of policy losses on random columns, and their gradients over micro-batches as an engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.batches import (
    Advantages,
    Demonstrations,
    ImportanceWeights,
    LogprobOrigin,
    OldLogprobs,
    RefLogprobs,
    Rollouts,
    Values,
)
from flowrl.batches import Sequences as TokenSequences
from flowrl.nodes.loss import Current, LossTerm
from flowrl.ragged import Ragged
from tests.tiny import recorded_rollouts

ORIGIN = LogprobOrigin("tiny", 0, "test", "float32")
#: Two groups of three; one row is a single token, one is empty, some have observations.
ROLLOUTS = replace(recorded_rollouts(2, 3, response_lengths=(5, 1, 0, 4, 7, 3), observations=True), origin=ORIGIN)
MASK = ROLLOUTS.loss_mask
NUM_TOKENS = len(MASK.values)
IDS = ROLLOUTS.prompt_id, ROLLOUTS.sample_id
WHOLE = [list(range(ROLLOUTS.num_rows))]
SPLIT = [[2], [3, 0], [5, 1], [], [4]]


def noise(seed: int, fill: float = 0.0) -> Ragged:
    """Random numbers at policy tokens, ``fill`` at observations."""
    values = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    return MASK.with_values(torch.where(MASK.values.bool(), values, fill))


def inputs(fill: float = 0.0) -> dict[str, Any]:
    """Every input that a loss may take, by argument name."""
    rollout_logprobs = torch.where(MASK.values.bool(), ROLLOUTS.rollout_logprobs.values, fill)
    drops = MASK.with_values((noise(10).values.abs() > 0.3).to(torch.uint8))
    return {
        "rollouts": replace(ROLLOUTS, rollout_logprobs=MASK.with_values(rollout_logprobs)),
        "advantages": Advantages(*IDS, noise(1, fill), noise(2, fill)),
        "old_logprobs": OldLogprobs(*IDS, noise(3, fill), ORIGIN),
        "ref_logprobs": RefLogprobs(*IDS, noise(4, fill), ORIGIN),
        "importance_weights": ImportanceWeights(*IDS, MASK.with_values(noise(9, fill).values.abs()), drops),
        "values": Values(*IDS, noise(5, fill)),
        "demonstrations": Demonstrations(*IDS, ROLLOUTS.tokens, ROLLOUTS.spans),
    }


def term_of(loss: Any, fill: float = 0.0, *, without: Sequence[str] = (), **changes: Any) -> LossTerm:
    """The term of a loss on all inputs that it takes."""
    given = inputs(fill) | changes
    return loss(**{port.name: given[port.name] for port in loss.ports if port.name not in without})


def leaves(fill: float = 0.0) -> dict[str, Tensor]:
    """What the Model gives, as leaves of the graph."""
    names = ("logprobs", "entropy", "values")
    return {n: noise(6 + i, fill).values.requires_grad_() for i, n in enumerate(names)}


class Policy:
    """Answers ``prepare`` with the log-probs of :func:`leaves`, whatever the order of rows."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs_of_all = MASK.with_values(logprobs.detach())
        self.asked = 0

    def logprobs(self, sequences: TokenSequences) -> Tensor:
        self.asked += 1
        wanted = zip(sequences.prompt_id.tolist(), sequences.sample_id.tolist(), strict=True)
        return self.logprobs_of_all.select(torch.tensor([3 * p + s for p, s in wanted], dtype=torch.int64)).values


def current_of(model: dict[str, Tensor], rollouts: Rollouts = ROLLOUTS) -> Current:
    return Current(rollouts.loss_mask, **model)


def gradients(term: LossTerm, model: dict[str, Tensor], parts: list[list[int]]):
    """The loss over micro-batches, and its gradients, normalised as an engine does."""
    count = term.loss.count(**term.inputs)
    constants = term.loss.prepare(Policy(model["logprobs"]), **term.inputs)
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        index = torch.tensor(rows, dtype=torch.int64)
        columns = {n: MASK.with_values(v).select(index).values for n, v in model.items()}
        sums = term.loss.sums(Current(MASK.select(index), **columns), constants, **term.select(index).inputs)
        total = total + sums["loss"][0]
    total = total if count is None else total / max(count, 1)
    if total.requires_grad:
        total.backward()
    return total.detach(), {n: v.grad for n, v in model.items() if v.grad is not None}


def means(term: LossTerm, model: dict[str, Tensor] | None = None) -> dict[str, float]:
    """The loss and the metrics of a term over all rows."""
    model = leaves() if model is None else model
    constants = term.loss.prepare(Policy(model["logprobs"]), **term.inputs)
    sums = term.loss.sums(current_of(model), constants, **term.inputs)
    return {n: float(s.detach()) / max(1.0, 1.0 if c is None else float(c)) for n, (s, c) in sums.items()}
