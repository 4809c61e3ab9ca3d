"""The tiny model of the package, and recorded rollouts: what tests train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl.tiny import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    PAD,
    PAD_ID,
    VOCAB_SIZE,
    tiny_actor,
    tiny_folder,
    tiny_model,
    tiny_tokenizer,
)

if TYPE_CHECKING:
    from flowrl.batches import Rollouts

__all__ = [
    "BOS",
    "BOS_ID",
    "CHAT_TEMPLATE",
    "EOS",
    "EOS_ID",
    "PAD",
    "PAD_ID",
    "VOCAB_SIZE",
    "recorded_rollouts",
    "tiny_actor",
    "tiny_folder",
    "tiny_model",
    "tiny_tokenizer",
]


def recorded_rollouts(
    num_prompts: int = 3,
    group_size: int = 2,
    *,
    seed: int = 0,
    prompt_lengths: Sequence[int] = (5, 3, 8, 1),
    response_lengths: Sequence[int] = (4, 1, 7, 0, 6, 3),
    vocab: int = 256,
    policy_version: int = 0,
    observations: bool = False,
    logprobs: bool = True,
) -> Rollouts:
    """Random ``Rollouts`` as if somebody had recorded them, rows of one prompt side by side.

    Args:
        prompt_lengths: taken in turn by the prompts.
        response_lengths: taken in turn by the rows; by default one is a single token and one is empty.
        observations: replace the second half of each response of 4 tokens or more by an observation and one policy
            token.
        logprobs: random rollout log-probs; zeros when False.
    """
    import torch

    from flowrl.batches import FinishReason, Rollouts, SpanKind, Spans
    from flowrl.ragged import Ragged

    generator = torch.Generator().manual_seed(seed)
    rows = num_prompts * group_size
    prompt_id = torch.arange(num_prompts).repeat_interleave(group_size)
    prompts = [
        torch.randint(0, vocab, (prompt_lengths[i % len(prompt_lengths)],), generator=generator)
        for i in range(num_prompts)
    ]
    responses = [
        torch.randint(0, vocab, (response_lengths[i % len(response_lengths)],), generator=generator)
        for i in range(rows)
    ]
    kinds, lengths = [], []
    for i in range(rows):
        p, r = len(prompts[i // group_size]), len(responses[i])
        if observations and r >= 4:
            kinds.append([SpanKind.PROMPT, SpanKind.POLICY, SpanKind.OBSERVATION, SpanKind.POLICY])
            lengths.append([p, r // 2, r - r // 2 - 1, 1])
        else:
            kinds.append([SpanKind.PROMPT, SpanKind.POLICY])
            lengths.append([p, r])
    response = Ragged.from_rows(responses, torch.int64)
    kind_column = Ragged.from_rows(kinds, torch.uint8)
    noise = (
        -3 * torch.rand(len(response.values), generator=generator) if logprobs else torch.zeros(len(response.values))
    )
    policy = (kind_column.values == SpanKind.POLICY).to(torch.int64)
    spans = Spans(
        kinds=kind_column,
        lengths=Ragged.from_rows(lengths, torch.int64),
        policy_versions=kind_column.with_values(policy * (policy_version + 1) - 1),
    )
    texts = tuple(f"prompt {i // group_size}" for i in range(rows))
    rollouts = Rollouts(
        prompt_id=prompt_id,
        sample_id=torch.arange(group_size).repeat(num_prompts),
        tokens=Ragged.join(Ragged.from_rows([prompts[i // group_size] for i in range(rows)], torch.int64), response),
        spans=spans,
        rollout_logprobs=response.with_values(noise),
        finish_reason=torch.full((rows,), FinishReason.LENGTH, dtype=torch.uint8),
        messages=texts,
        response_text=tuple("" for _ in range(rows)),
        extras={"answer": tuple(str(i // group_size) for i in range(rows))},
    )
    if observations:  # the sampler gives no log-prob of what it did not sample
        mask = rollouts.loss_mask.values.bool()
        object.__setattr__(
            rollouts, "rollout_logprobs", response.with_values(torch.where(mask, noise, torch.zeros(())))
        )
    return rollouts
