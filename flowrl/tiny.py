"""A tiny random model, a byte-level tokenizer, and made-up rollouts: for trying a flow in seconds, without weights or a network.

Everything is made from a seed, offline, in milliseconds. The tokenizer knows every byte, so any text round-trips.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.models import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from flowrl.batches import Rollouts

EOS = "<|eos|>"
PAD = "<|pad|>"
BOS = "<|bos|>"
#: 256 bytes and three special tokens, rounded up: ids from 259 on decode to nothing, as in many real models.
VOCAB_SIZE = 264
EOS_ID, PAD_ID, BOS_ID = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(*, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A live byte-level tokenizer: token id = place of the byte in the byte alphabet; eos 256, pad 257, bos 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(t, special=True) for t in (EOS, PAD, BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, bos_token=BOS, clean_up_tokenization_spaces=False
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    seed: int = 0,
    *,
    vocab: int = VOCAB_SIZE,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 256,
    tied: bool = True,
    scale: float = 0.3,
    **config: Any,
) -> PreTrainedModel:
    """A live Llama-shaped model with random float32 weights.

    Args:
        scale: standard deviation of the weights; 0.3 makes distributions that are neither flat nor one-hot.
        config: other settings of ``LlamaConfig``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=scale,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**settings, **config})).eval()


def tiny_folder(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Save a tiny model and its tokenizer as a HuggingFace directory; returns the folder."""
    tiny_model(seed, **config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def _shared_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def tiny_actor(seed: int = 0, name: str = "tiny", **settings: Any) -> Model:
    """A flowrl ``Model`` on a new tiny model. ``settings`` are those of ``Model``."""
    return Model(tiny_model(seed), name=name, tokenizer=_shared_tokenizer(), device="cpu", **settings)


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
