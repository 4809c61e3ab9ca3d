"""Token ids of recorded text: prompts exactly as an engine encodes them, completions closed by eos."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from flowrl.data.rows import describe
from flowrl.errors import DataError
from flowrl.models import DerivedModel, Model

if TYPE_CHECKING:
    from flowrl.models import AnyModel


class Tokenizer(Protocol):
    """What type checkers see of a HuggingFace tokenizer. Its ``eos_token_id`` and ``chat_template``, which are used
    too, they do not."""

    def __call__(self, text: str, /, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...


def check_tokenizer(tokenizer: object) -> None:
    """Raise unless it is a live tokenizer or a Model."""
    if isinstance(tokenizer, Model | DerivedModel):
        return
    if not callable(tokenizer) or not hasattr(tokenizer, "apply_chat_template"):
        raise DataError(
            "tokenizer= is neither a tokenizer nor a Model",
            expected="a live HuggingFace tokenizer, or a flowrl Model",
            received=describe(tokenizer),
            do="pass the Model that is trained, or AutoTokenizer.from_pretrained(…)",
        )


def tokenizer_of(given: Tokenizer | AnyModel) -> Any:
    """A live tokenizer as it is; that of a Model is loaded once a process.

    Raises:
        ModelError: it cannot be loaded.
        DataError: it has no eos token.
    """
    if isinstance(given, DerivedModel):
        given = given.base
    tokenizer: Any = load_tokenizer(given) if isinstance(given, Model) else given
    if tokenizer.eos_token_id is None:
        raise DataError(
            "The tokenizer has no eos token",
            expected="an eos token, which ends every completion",
            do="set tokenizer.eos_token",
        )
    return tokenizer


@lru_cache(maxsize=8)
def load_tokenizer(model: Model) -> Tokenizer:
    """The tokenizer of a Model, as its engine would load it."""
    from flowrl.runtime.engines import transformers_loading  # heavy: loaded when the first rows are drawn

    return cast("Tokenizer", transformers_loading.load_tokenizer(model))


def encode_prompt(tokenizer: Any, prompt: Any) -> list[int]:
    """The ids of a text as it is, or of chat messages with the generation prompt."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise DataError(
            "The tokenizer has no chat template",
            expected="a chat template, since the prompts are chat messages",
            do="use an instruction-tuned model, or as_chat=False with plain texts",
        )
    encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def encode_completion(tokenizer: Any, text: str) -> list[int]:
    """The ids of a completion without special tokens at its start, and eos."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
