"""Weights of an engine: read, replaced, exported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.errors import ModelError
from flowrl.runtime.engines import transformers_merging as merging
from flowrl.runtime.engines.transformers_loading import VALUE_HEADS, quiet

if TYPE_CHECKING:
    from flowrl.models import Model
    from flowrl.runtime.engines.transformers import TransformersEngine
    from flowrl.runtime.ranks import Ranks

HEAD_PREFIX = "value_heads."


def live_tensors(engine: TransformersEngine) -> dict[str, Tensor]:
    """All that may change, by name, each tensor once: parameters and persistent buffers (of tied weights the first name);
    where there is an adapter, it alone. Value heads, too."""
    engine.shards.settle()
    found = _tensors_of_module(engine) if engine.adapter is None else engine.adapter.tensors()
    for head, layer in engine.heads.items():
        for name, tensor in layer.named_parameters():
            found[f"{HEAD_PREFIX}{head}.{name}"] = tensor
    return found


def _tensors_of_module(engine: TransformersEngine) -> dict[str, Tensor]:
    module: Any = engine.network.module
    persistent = module.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in persistent and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def require_same(model: Model, ranks: Ranks) -> None:
    """Refuse a live model whose numbers are others on other ranks: each made its own, from its own random numbers.

    Raises:
        FlowError: it names the Model.
    """
    digest = hashlib.sha256()
    live: Any = model.source
    for name, tensor in live.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    ranks.require_same(
        {f"the live model of {model.name!r}": f"SHA-256 {digest.hexdigest()[:12]}"},
        do="seed what makes it (torch.manual_seed) in the same way on every rank, or load it from a folder",
    )


def aliases(engine: TransformersEngine) -> dict[str, str]:
    """Other names of tied weights, to the name that :func:`live_tensors` uses."""
    if engine.adapter is not None:
        return {}
    first = {id(t): name for name, t in live_tensors(engine).items()}
    module: Any = engine.network.module
    return {
        name: first[id(t)]
        for name, t in module.state_dict(keep_vars=True).items()
        if id(t) in first and first[id(t)] != name
    }


def weights(engine: TransformersEngine) -> Iterator[tuple[str, Tensor]]:
    """Names and copies on the CPU, one at a time: later training does not change what was given out. An adapter is added to
    its base, and what is quantised is not any more: the names are those of the base as it is."""
    if engine.adapter is None:
        yield from own_weights(engine)
        return
    yield from merging.plain_weights(engine)
    for name, tensor in own_weights(engine):
        if name.startswith(HEAD_PREFIX):
            yield name, tensor


def own_weights(engine: TransformersEngine) -> Iterator[tuple[str, Tensor]]:
    """Of :func:`live_tensors`, copies on the CPU, one at a time."""
    for name, tensor in live_tensors(engine).items():
        yield name, engine.shards.whole(tensor).to("cpu", copy=True)


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
            expected=f"the {len(current)} tensors that "
            + ("weights()" if engine.adapter is None else "adapter_weights()")
            + " gives",
            received=f"{len(new)} tensors",
            do=None if engine.adapter is None else "give it the adapter alone: its base never changes",
        )
    with torch.no_grad():
        for name, tensor in current.items():
            engine.shards.place(tensor, new[name])


def export(engine: TransformersEngine, folder: Path) -> None:
    """Write a HuggingFace directory: config, weights, tokenizer; value heads beside them, and an adapter."""
    from safetensors.torch import save_file

    if engine.adapter is not None:
        merging.export(engine, folder)
    whole = _whole_state(engine)
    if not engine.shards.is_first:
        return
    with quiet():
        if engine.adapter is None:
            engine.network.module.save_pretrained(folder, **({} if whole is None else {"state_dict": whole}))
        if engine.has_tokenizer:
            engine.tokenizer.save_pretrained(folder)
    heads = {k.removeprefix(HEAD_PREFIX): t for k, t in live_tensors(engine).items() if k.startswith(HEAD_PREFIX)}
    if heads:
        save_file({k: t.detach().cpu().contiguous() for k, t in heads.items()}, folder / VALUE_HEADS)


def _whole_state(engine: TransformersEngine) -> dict[str, Tensor] | None:
    """The state dict of a module that lies over ranks, in whole tensors, tied ones once; None where it is whole already or
    only its adapter is exported. Every rank asks for it, the first keeps it."""
    from torch.distributed.tensor import DTensor

    module: Any = engine.network.module
    live = module.state_dict(keep_vars=True)
    if engine.adapter is not None or not any(isinstance(t, DTensor) for t in live.values()):
        return None
    seen: dict[int, Tensor] = {}
    for tensor in live.values():
        if id(tensor) not in seen:
            whole = engine.shards.whole(tensor)
            seen[id(tensor)] = whole.cpu() if engine.shards.is_first else whole[:0]
    return {name: seen[id(tensor)] for name, tensor in live.items()}
