"""A tiny random model and a byte-level tokenizer: for trying a flow in seconds, without weights and without a network.

Everything is made from a seed, offline, in milliseconds. The tokenizer knows every byte, so any text round-trips.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.models import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
