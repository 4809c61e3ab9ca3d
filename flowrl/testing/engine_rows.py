"""Rows that engines are tried on, and what the plain HuggingFace module makes of them, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrl.batches import Advantages, FinishReason, Preferences, Rollouts, SpanKind, Spans
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: Token ids that rows are made of: all ordinary tokens of the tiny model.
ORDINARY = 256


def rows(
    num_prompts: int = 4,
    group_size: int = 3,
    *,
    seed: int = 0,
    prompt_lengths: Sequence[int] = (5, 3, 8, 1),
    response_lengths: Sequence[int] = (4, 1, 7, 0, 6, 3),
) -> Rollouts:
    """Random rollouts, rows of one prompt side by side; the lengths are taken in turn. Of responses of 4 tokens or more the
    second half is an observation and one policy token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    count = num_prompts * group_size
    prompts = [
        torch.randint(0, ORDINARY, (prompt_lengths[i % len(prompt_lengths)],), generator=generator)
        for i in range(num_prompts)
    ]
    responses = [
        torch.randint(0, ORDINARY, (response_lengths[i % len(response_lengths)],), generator=generator)
        for i in range(count)
    ]
    kinds: list[list[int]] = []
    lengths: list[list[int]] = []
    for i, response in enumerate(responses):
        p, r = len(prompts[i // group_size]), len(response)
        if r >= 4:
            kinds.append([SpanKind.PROMPT, SpanKind.POLICY, SpanKind.OBSERVATION, SpanKind.POLICY])
            lengths.append([p, r // 2, r - r // 2 - 1, 1])
        else:
            kinds.append([SpanKind.PROMPT, SpanKind.POLICY])
            lengths.append([p, r])
    response = Ragged.from_rows(responses, torch.int64)
    kind_column = Ragged.from_rows(kinds, torch.uint8)
    is_policy = (kind_column.values == SpanKind.POLICY).to(torch.int64)
    return Rollouts(
        prompt_id=torch.arange(num_prompts).repeat_interleave(group_size),
        sample_id=torch.arange(group_size).repeat(num_prompts),
        tokens=Ragged.join(Ragged.from_rows([prompts[i // group_size] for i in range(count)], torch.int64), response),
        spans=Spans(kind_column, Ragged.from_rows(lengths, torch.int64), kind_column.with_values(is_policy - 1)),
        rollout_logprobs=response.with_values(torch.zeros(len(response.values))),
        finish_reason=torch.full((count,), FinishReason.LENGTH, dtype=torch.uint8),
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
