"""Weights and optimiser state of an engine: read, replaced, saved, restored, exported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.errors import CheckpointError, ModelError
from flowrl.runtime.engines.transformers_loading import VALUE_HEADS, quiet

if TYPE_CHECKING:
    from flowrl.runtime.engines.transformers import TransformersEngine

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.pt", "engine.json"
HEAD_PREFIX = "value_heads."


def live_tensors(engine: TransformersEngine) -> dict[str, Tensor]:
    """All parameters and persistent buffers by name, each once: of tied weights the first name."""
    module: Any = engine.network.module
    persistent = module.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in persistent and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    for head, layer in engine.heads.items():
        for name, tensor in layer.named_parameters():
            found[f"{HEAD_PREFIX}{head}.{name}"] = tensor
    return found


def aliases(engine: TransformersEngine) -> dict[str, str]:
    """Other names of tied weights, to the name that :func:`live_tensors` uses."""
    first = {id(t): name for name, t in live_tensors(engine).items()}
    module: Any = engine.network.module
    return {
        name: first[id(t)]
        for name, t in module.state_dict(keep_vars=True).items()
        if id(t) in first and first[id(t)] != name
    }


def weights(engine: TransformersEngine) -> Iterator[tuple[str, Tensor]]:
    """Names and copies on the CPU, one at a time: later training does not change what was given out."""
    for name, tensor in live_tensors(engine).items():
        yield name, tensor.detach().to("cpu", copy=True)


def load_weights(engine: TransformersEngine, new: Mapping[str, Tensor]) -> None:
    """Replace all weights.

    Raises:
        ModelError: names that are missing, unknown or of another shape; nothing was changed then.
    """
    current = live_tensors(engine)
    tied = aliases(engine)
    problems = [f"{name} is missing" for name in current if name not in new]
    for name, tensor in new.items():
        place = current.get(tied.get(name, name))
        if place is None:
            problems.append(f"{name} is unknown")
        elif place.shape != tensor.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(place.shape)}")
        elif name in tied and tied[name] in new and not torch.equal(tensor, new[tied[name]]):
            problems.append(f"{name} is tied to {tied[name]} and differs from it")
    if problems:
        raise ModelError(
            f"These weights do not fit {engine.model!r}: {'; '.join(problems[:20])}"
            + (f"; and {len(problems) - 20} more" if len(problems) > 20 else ""),
            expected=f"the {len(current)} tensors that weights() gives",
            received=f"{len(new)} tensors",
        )
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(new[name])


def save(engine: TransformersEngine, folder: Path) -> None:
    """Write weights, optimiser and counters."""
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().contiguous() for name, t in live_tensors(engine).items()}
    save_file(tensors, folder / WEIGHTS)
    torch.save(optimizer_state(engine), folder / OPTIMIZER)
    state = {
        "policy_version": engine.policy_version,
        "optimizer_steps": engine.optimizer_steps,
        "heads": list(engine.heads),
    }
    (folder / STATE).write_text(json.dumps(state))


def load(engine: TransformersEngine, folder: Path) -> None:
    """Restore what :func:`save` wrote, bit for bit.

    Raises:
        CheckpointError: files are missing, or are of another model.
    """
    from safetensors.torch import load_file

    absent = [name for name in (WEIGHTS, OPTIMIZER, STATE) if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} is no checkpoint of {engine.model!r}",
            expected=f"the files {WEIGHTS}, {OPTIMIZER} and {STATE}",
            received=f"no {', '.join(absent)}",
        )
    state = json.loads((folder / STATE).read_text())
    for head in state["heads"]:
        engine.add_value_head(head)
    try:
        load_weights(engine, load_file(folder / WEIGHTS))
    except ModelError as error:
        raise CheckpointError(f"{folder} is a checkpoint of another model", received=error.message) from error
    engine.policy_version = state["policy_version"]
    engine.optimizer_steps = state["optimizer_steps"]
    restore_optimizer(engine, torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True))


def optimizer_state(engine: TransformersEngine) -> dict[str, dict[str, Tensor]]:
    """By parameter name the optimiser's tensors; empty before the first step."""
    if engine.optimizer is None:
        return {}
    states = engine.optimizer.state
    return {
        name: {key: value.detach().cpu() for key, value in states[parameter].items()}
        for name, parameter in engine.trained_parameters()
        if parameter in states
    }


def restore_optimizer(engine: TransformersEngine, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Set the optimiser's tensors; its settings come with the next step."""
    from flowrl.nodes.updater import AdamW

    engine.optimizer = None
    if not states:
        return
    optimizer = engine.torch_optimizer(AdamW())
    parameters = dict(engine.trained_parameters())
    for name, tensors in states.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {k: t.to(parameter.device, copy=True) for k, t in tensors.items()}


def export(engine: TransformersEngine, folder: Path) -> None:
    """Write a HuggingFace directory: config, weights, tokenizer; value heads beside them."""
    from safetensors.torch import save_file

    with quiet():
        engine.network.module.save_pretrained(folder)
        if engine.has_tokenizer:
            engine.tokenizer.save_pretrained(folder)
    heads = {k.removeprefix(HEAD_PREFIX): t for k, t in live_tensors(engine).items() if k.startswith(HEAD_PREFIX)}
    if heads:
        save_file({k: t.detach().cpu().contiguous() for k, t in heads.items()}, folder / VALUE_HEADS)
