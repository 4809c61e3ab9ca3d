"""Rows that engines are tried on, and what the plain HuggingFace module makes of them, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrl.batches import Advantages, Preferences, Rollouts, Spans
from flowrl.ragged import Ragged
from flowrl.tiny import recorded_rollouts

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.runtime.engines.base import Generated

#: Token ids that rows are made of: all ordinary tokens of the tiny model.
ORDINARY = 256


def rows(
    num_prompts: int = 4, group_size: int = 3, *, seed: int = 0, response_lengths: Sequence[int] = (4, 1, 7, 0, 6, 3)
) -> Rollouts:
    """Random rollouts with observations, empty responses and prompts of one token; rollout log-probs are 0."""
    return recorded_rollouts(
        num_prompts, group_size, seed=seed, response_lengths=response_lengths, observations=True, logprobs=False
    )


def as_rollouts(prompts: Ragged, generated: Generated) -> Rollouts:
    """What a rollout node makes of prompts and their samples."""
    import torch

    count = prompts.num_rows
    return Rollouts(
        prompt_id=torch.arange(count),
        sample_id=torch.zeros(count, dtype=torch.int64),
        tokens=Ragged.join(prompts, generated.tokens),
        spans=Spans.prompt_then_response(prompts.lengths, generated.tokens.lengths, 0),
        rollout_logprobs=generated.logprobs,
        finish_reason=generated.finish_reason,
        messages=("",) * count,
        response_text=("",) * count,
    )


def with_token(rollouts: Rollouts, row: int, token: int) -> Rollouts:
    """The same with another last token in one row."""
    values = rollouts.tokens.values.clone()
    values[int(rollouts.tokens.offsets[row + 1]) - 1] = token
    return replace(rollouts, tokens=rollouts.tokens.with_values(values))


def advantages_of(rollouts: Rollouts, seed: int = 0) -> Advantages:
    """Random advantages and returns."""
    import torch

    generator = torch.Generator().manual_seed(1000 + seed)
    layout = rollouts.loss_mask
    columns = [layout.with_values(torch.randn(len(layout.values), generator=generator)) for _ in range(2)]
    return Advantages(rollouts.prompt_id, rollouts.sample_id, *columns)


def pairs_of(num_pairs: int = 4, seed: int = 0) -> Preferences:
    """Random pairs, the chosen first."""
    import torch

    some = rows(num_pairs, 2, seed=seed, response_lengths=(4, 2, 7, 1, 3))
    return Preferences(
        prompt_id=some.prompt_id,
        sample_id=some.sample_id,
        tokens=some.tokens,
        spans=some.spans,
        pair_id=some.prompt_id,
        chosen=torch.tensor([1, 0], dtype=torch.uint8).repeat(num_pairs),
    )


# -- the plain model ----------------------------------------------------------------------------------------------------


def plain_scores(module: Any, rollouts: Any, temperature: float = 1.0) -> dict[str, Tensor]:
    """Of each response token its log-prob, and entropy and Σπ² of its distribution; with gradient where grad mode is on.
    One call of the model a row."""
    import torch

    found: dict[str, list[Tensor]] = {"logprobs": [], "entropy": [], "sum_pi_squared": [], "table": []}
    for row, start in zip(rollouts.tokens.rows(), rollouts.prompt_lengths.tolist(), strict=True):
        table = torch.log_softmax(module(input_ids=row[None]).logits[0].float() / temperature, -1)[start - 1 : -1]
        found["logprobs"].append(table.gather(1, row[start:, None])[:, 0])
        found["entropy"].append(-(table.exp() * table).sum(-1))
        found["sum_pi_squared"].append((2 * table).exp().sum(-1))
        found["table"].append(table)
    return {name: torch.cat(parts) for name, parts in found.items()}


def plain_hidden(body: Any, rollouts: Any) -> Tensor:
    """``[num_tokens, hidden]``: the last hidden state before each response token."""
    import torch

    parts = []
    for row, start in zip(rollouts.tokens.rows(), rollouts.prompt_lengths.tolist(), strict=True):
        parts.append(body(input_ids=row[None])[0][0, start - 1 : -1])
    return torch.cat(parts)


def plain_rewards(module: Any, rollouts: Any) -> Tensor:
    """``[num_rows]``: the head at each row's last token."""
    import torch

    body = module.base_model
    return torch.stack([module.score(body(input_ids=row[None])[0][0, -1])[0] for row in rollouts.tokens.rows()])


def index_of(rows: Sequence[int]) -> Tensor:
    """int64 ``[num_rows]``."""
    import torch

    return torch.tensor(rows, dtype=torch.int64)
