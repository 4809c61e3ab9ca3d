"""The head of a GGUF file: its settings and the names of its tensors, without its weights and without a library.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from flowrl.errors import FlowError

#: By number of a type, its code in :mod:`struct`; 8 is a text, 9 a list.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST = 8, 9
#: What a configuration calls a setting of an architecture.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
#: What a configuration calls an architecture, where the names differ.
_FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "deepseek2": "deepseek_v2"}


def gguf_config(path: Path) -> dict[str, Any]:
    """What a ``config.json`` of the model in a GGUF file would say of its architecture.

    Raises:
        FlowError: it cannot be read, or is no GGUF file.
    """
    try:
        with path.open("rb") as file:
            settings, shapes = _header(file)
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise FlowError(f"{path} cannot be read", expected="a GGUF file", received=error) from error
    family = str(settings.get("general.architecture"))
    found: dict[str, Any] = {"model_type": _FAMILIES.get(family, family)}
    for name, meaning in _SETTINGS.items():
        value = settings.get(f"{family}.{name}")
        if isinstance(value, int) and not isinstance(value, bool):
            found[meaning] = value
    if found.get("num_experts") and family == "llama":  # how the format writes a Mixtral
        found["model_type"] = "mixtral"
    if "token_embd.weight" in shapes:
        found.setdefault("vocab_size", shapes["token_embd.weight"][-1])
    found["tie_word_embeddings"] = "output.weight" not in shapes
    return found


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """(settings, shape of each tensor by name, innermost dim first)."""
    magic, version = file.read(4), _number(file, "I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    num_tensors, num_settings = _number(file, "Q"), _number(file, "Q")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        name = _text(file)
        settings[name] = _value(file, _number(file, "I"))
    shapes: dict[str, tuple[int, ...]] = {}
    for _ in range(num_tensors):
        name = _text(file)
        shapes[name] = tuple(_number(file, "Q") for _ in range(_number(file, "I")))
        file.seek(4 + 8, 1)  # its type, and where it begins
    return settings, shapes


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    """A setting; of a list None, which is passed over."""
    if kind == _TEXT:
        return _text(file)
    if kind != _LIST:
        if kind not in _NUMBERS:
            raise ValueError(f"a setting is of the type {kind}, which there is not")
        return _number(file, _NUMBERS[kind])
    inner, count = _number(file, "I"), _number(file, "Q")
    if inner in _NUMBERS:
        file.seek(count * struct.calcsize(f"<{_NUMBERS[inner]}"), 1)
    else:
        for _ in range(count):
            if inner == _TEXT:
                file.seek(_number(file, "Q"), 1)
            else:
                _value(file, inner)
    return None
