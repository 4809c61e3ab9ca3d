"""Random batches of every type, over given sequences. Their numbers go together: log-probs of one token are close to each
other, Σπ² is possible, rewards tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.annotations import edge_types, resolve_hints
from flowrl.batches import (
    FinishReason,
    ImportanceWeights,
    LogprobOrigin,
    OldLogprobs,
    Preferences,
    RefLogprobs,
    Rewards,
    Rollouts,
    Sequences,
)
from flowrl.errors import FlowError
from flowrl.nodes.distillation import TopLogprobs
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Token ids are below this: what the tiny model of :mod:`flowrl.tiny` knows.
VOCAB_SIZE = 256
_ORIGIN = LogprobOrigin("model", 0, "testing", "float32")


def base_logprobs(sequences: Sequences) -> Tensor:
    """float32 ``[num_tokens]``: what everybody's log-probs of these tokens are close to; equal for equal rows."""
    import torch

    values = []
    lengths = sequences.response_lengths.tolist()
    rows = zip(
        sequences.prompt_id.tolist(), sequences.sample_id.tolist(), sequences.tokens.to_lists(), lengths, strict=True
    )
    for prompt, sample, tokens, length in rows:
        seed = context.random_key(len(tokens), "base", prompt, sample, *tokens) % (1 << 63)
        values.append(torch.rand(length, generator=torch.Generator().manual_seed(seed)))
    return -3 * torch.cat(values or [torch.zeros(0)]) - 0.05


def _near(sequences: Sequences, generator: torch.Generator, scale: float) -> Ragged:
    """float32 ragged: log-probs that differ from the base by ``scale``, so that some ratios are clipped."""
    base = base_logprobs(sequences)
    near = (base + scale * normal(len(base), generator)).clamp(max=-1e-3)
    return sequences.loss_mask.with_values(near)


def normal(number: int, generator: torch.Generator) -> Tensor:
    import torch

    return torch.randn(number, generator=generator)


def completed(kind: type[Any], owner: Sequences, values: dict[str, Any], generator: torch.Generator) -> Any:
    """A batch of some kind: ``values``, and random numbers in the columns that are missing."""
    own = _COLUMNS.get(kind)
    values = {**values, **(own(owner, generator) if own else {})}
    hints = resolve_hints(kind)
    for f in fields(kind):
        if f.name in values or not f.init:
            continue
        if f.name in getattr(kind, "column_types", {}):
            values[f.name] = _random_column(kind.column_types[f.name], owner, generator)
        elif edge_types(hints.get(f.name))[0] == (LogprobOrigin,):
            values[f.name] = _ORIGIN
        elif f.default is MISSING and f.default_factory is MISSING:
            raise FlowError(
                f"flowrl.testing cannot make {kind.__name__}.{f.name}",
                expected="a column that column_types describes, or a default",
                received=str(hints.get(f.name)),
                do="say how the batch is made: inputs={'argument': lambda sequences, generator: …}",
            )
    return kind(**values)


def _random_column(described: str, owner: Sequences, generator: torch.Generator) -> Any:
    """A column of the type that ``column_types`` says in words."""
    import torch

    if described.startswith("dict of "):
        return {"a": _random_column(described.removeprefix("dict of "), owner, generator)}
    if described == "objects":
        return tuple(f"row {i}" for i in range(owner.num_rows))
    dtype = getattr(torch, described.split()[0])
    number = len(owner.loss_mask.values) if described.endswith("ragged") else owner.num_rows
    column = normal(number, generator).to(dtype) if dtype.is_floating_point else _bits(number, generator).to(dtype)
    return owner.loss_mask.with_values(column) if described.endswith("ragged") else column


def _bits(number: int, generator: torch.Generator) -> Tensor:
    import torch

    return torch.randint(0, 2, (number,), generator=generator)


def _of_rollouts(owner: Sequences, generator: torch.Generator) -> dict[str, Any]:
    import torch

    reasons = torch.tensor([FinishReason.STOP, FinishReason.LENGTH], dtype=torch.uint8)
    return {
        "rollout_logprobs": _near(owner, generator, 0.15),
        "finish_reason": reasons[_bits(owner.num_rows, generator)],
        "origin": _ORIGIN,
    }


def _of_preferences(owner: Sequences, generator: torch.Generator) -> dict[str, Any]:
    import torch

    return {"pair_id": owner.prompt_id, "chosen": (owner.sample_id == 0).to(torch.uint8)}


def _of_old_logprobs(owner: Sequences, generator: torch.Generator) -> dict[str, Any]:
    import torch

    old = _near(owner, generator, 0.3)
    probability = old.values.exp()  # Σ_v π(v)² lies between π² and π² + (1 − π)²
    rest = (1 - probability) ** 2 * torch.rand(len(probability), generator=generator)
    return {"old_logprobs": old, "sum_pi_squared": old.with_values(probability**2 + rest)}


def _of_rewards(owner: Sequences, generator: torch.Generator) -> dict[str, Any]:
    """Few different numbers, so that ties are frequent; one row in six is invalid, and its numbers are NaN."""
    import torch

    rows, mask = owner.num_rows, owner.loss_mask
    valid = torch.rand(rows, generator=generator) > 1 / 6
    score = torch.randint(0, 4, (rows,), generator=generator) / 2
    shaping = 0.1 * normal(len(mask.values), generator) * (torch.rand(1, generator=generator) > 0.5)
    token_valid = valid[mask.row_of_value]
    return {
        "components": {
            "score": torch.where(valid, score, torch.nan),
            "format": torch.where(valid, 0.5 * _bits(rows, generator), torch.nan),
        },
        "token_components": {"shaping": mask.with_values(torch.where(token_valid, shaping, torch.nan))},
        "valid": valid.to(torch.uint8),
        "reasons": tuple("" if v else "timed out" for v in valid.tolist()),
    }


def _of_importance_weights(owner: Sequences, generator: torch.Generator) -> dict[str, Any]:
    import torch

    number = len(owner.loss_mask.values)
    weights = (0.3 * normal(number, generator)).exp() * (torch.rand(number, generator=generator) > 0.1)
    keep = (torch.rand(number, generator=generator) > 0.15).to(torch.uint8)
    return {"weights": owner.loss_mask.with_values(weights), "keep": owner.loss_mask.with_values(keep)}


def _of_top_logprobs(owner: Sequences, generator: torch.Generator, k: int = 3) -> dict[str, Any]:
    import torch

    number = len(owner.loss_mask.values)
    ids = torch.rand(number, VOCAB_SIZE, generator=generator).argsort(1)[:, :k]
    logprobs = normal(number * (k + 1), generator).reshape(number, k + 1).log_softmax(1)[:, :k]
    offsets = owner.loss_mask.offsets * k
    return {"token_ids": Ragged(ids.flatten(), offsets), "logprobs": Ragged(logprobs.flatten(), offsets), "k": k}


#: What is not just random in its columns.
_COLUMNS: dict[type, Callable[[Sequences, Any], dict[str, Any]]] = {
    Rollouts: _of_rollouts,
    Preferences: _of_preferences,
    OldLogprobs: _of_old_logprobs,
    RefLogprobs: lambda owner, generator: {"ref_logprobs": _near(owner, generator, 0.5)},
    Rewards: _of_rewards,
    ImportanceWeights: _of_importance_weights,
    TopLogprobs: _of_top_logprobs,
}
