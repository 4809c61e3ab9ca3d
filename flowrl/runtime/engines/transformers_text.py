"""From prompts to tokens, through the model's tokenizer and chat template; and the tokens that end a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flowrl.errors import DataError, ModelError
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from flowrl.nodes.rollout import Sampling
    from flowrl.runtime.engines.transformers import TransformersEngine


def encode(engine: TransformersEngine, messages: Sequence[Any]) -> Ragged:
    """See the protocol.

    Raises:
        DataError: a row that is neither a text nor chat messages.
        ModelError: chat messages for a tokenizer without a chat template.
    """
    encoded = Ragged.from_rows([_encode(engine, row, m) for row, m in enumerate(messages)], torch.int64)
    vocab = int(engine.network.module.config.get_text_config().vocab_size)
    if bool((beyond := encoded.values >= vocab).any()):
        raise ModelError(
            f"The tokenizer of {engine.model!r} does not fit it",
            expected=f"token ids below {vocab}, the model's vocabulary",
            received=f"{int(encoded.values[beyond][0])} in row {int(encoded.row_of_value[beyond][0])}",
            do="give the model's own tokenizer, or resize the model's embeddings",
        )
    return encoded


def _encode(engine: TransformersEngine, row: int, message: Any) -> list[int]:
    tokenizer = engine.tokenizer
    if isinstance(message, str):
        return list(tokenizer(message)["input_ids"])
    chat = isinstance(message, list | tuple) and all(isinstance(m, Mapping) and "role" in m for m in message)
    if not chat or not message:
        raise DataError(
            f"The prompt of row {row} cannot be read",
            expected="a text, or a list of {'role', 'content'} messages",
            received=repr(message)[:200],
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"{engine.model!r} has no chat template, and the prompt of row {row} is a list of chat messages",
            expected="a tokenizer with a chat template (usually an -Instruct model), or a text",
            received=type(tokenizer).__name__,
            do="take an instruction-tuned model, set tokenizer.chat_template, or write prompts as text",
        )
    try:
        encoded = tokenizer.apply_chat_template(
            list(message), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # a template is a program of its author's, and may refuse in any way
        raise DataError(
            f"The chat template of {engine.model!r} refuses the prompt of row {row}",
            expected="messages that the template takes",
            received=f"{type(error).__name__}: {error}",
            do="change the messages (some templates take no system message), or tokenizer.chat_template",
        ) from error
    return list(encoded["input_ids"])


def stop_token_ids(engine: TransformersEngine, sampling: Sampling) -> tuple[int, ...]:
    """Tokens that end a response."""
    if sampling.stop_token_ids:
        return sampling.stop_token_ids
    module: Any = engine.network.module
    found: set[int] = set()
    for holder in (getattr(module, "generation_config", None), module.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list | tuple) else {ids} if ids is not None else set()
    if engine.has_tokenizer and engine.tokenizer.eos_token_id is not None:
        found.add(engine.tokenizer.eos_token_id)
    return tuple(sorted(found))
