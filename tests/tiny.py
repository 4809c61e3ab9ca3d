"""The tiny model of the package, and recorded rollouts, under the names that tests use."""

from __future__ import annotations

from flowrl.tiny import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    PAD,
    PAD_ID,
    VOCAB_SIZE,
    recorded_rollouts,
    tiny_actor,
    tiny_folder,
    tiny_model,
    tiny_tokenizer,
)

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
