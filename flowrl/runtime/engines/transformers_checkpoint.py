"""What a checkpoint holds of an engine: what may change of its weights, the optimiser's tensors, and counters.

Every rank writes its own parts, and any layout reads them: see :mod:`flowrl.runtime.tensor_files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.errors import CheckpointError
from flowrl.runtime.engines.base import Saving
from flowrl.runtime.engines.transformers_state import HEAD_PREFIX, live_tensors
from flowrl.runtime.ranks import Ranks

if TYPE_CHECKING:
    from flowrl.runtime.engines.transformers import TransformersEngine

STATE = "engine.json"
#: What the names of tensors begin with.
WEIGHT, OPTIMIZER = "weights/", "optimizer/"


def saving(engine: TransformersEngine, *, copy: bool) -> Saving:
    """What writes the engine as it is now; see :meth:`flowrl.runtime.engines.base.Engine.saving`."""
    tensors = {WEIGHT + name: tensor for name, tensor in live_tensors(engine).items()} | _optimizer_tensors(engine)
    from flowrl.runtime import tensor_files  # takes seconds to import

    if copy:
        tensors = tensor_files.copied(tensors)
    counters: dict[str, Any] = {
        "policy_version": engine.policy_version,
        "optimizer_steps": engine.optimizer_steps,
        "heads": list(engine.heads),
    }
    if engine.adapter is not None:
        counters["adapter"] = engine.adapter.adapters.describe()

    def write(folder: Path, ranks: Ranks) -> None:
        tensor_files.write(tensors, folder, ranks)
        if ranks.is_first:
            (folder / STATE).write_text(json.dumps(counters))

    return write


def load(engine: TransformersEngine, folder: Path) -> None:
    """Restore what :func:`saving` wrote, bit for bit.

    Raises:
        CheckpointError: files are missing, or are of another model; nothing was changed then.
    """
    state, there = _read_counters(engine, folder)
    _check(engine, folder, there, new_heads=[head for head in state["heads"] if head not in engine.heads])
    for head in state["heads"]:
        engine.add_value_head(head)
    weights = {WEIGHT + name: tensor for name, tensor in live_tensors(engine).items()}
    moments = _new_optimizer(engine, {name: shape for name, (shape, _) in there.items() if name.startswith(OPTIMIZER)})
    from flowrl.runtime import tensor_files

    with torch.no_grad():
        tensor_files.read(weights | moments, folder, engine.options.ranks)
    engine.policy_version = state["policy_version"]
    engine.optimizer_steps = state["optimizer_steps"]


def _read_counters(engine: TransformersEngine, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The counters, and what tensors there are."""
    from flowrl.runtime import tensor_files

    try:
        state, there = json.loads((folder / STATE).read_text()), tensor_files.described(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of {engine.model!r}",
            expected=f"{STATE} and the tensors that were saved with it",
            received=str(error),
        ) from None
    adapter = None if engine.adapter is None else engine.adapter.adapters.describe()
    if state.get("adapter") != adapter:
        raise CheckpointError(
            f"{folder} is a checkpoint of another adapter",
            expected=f"{adapter or 'none'}, as {engine.model!r} has",
            received=state.get("adapter") or "none",
            do="resume with the lora= and quantization= that the run was started with",
        )
    return state, there


def _check(engine: TransformersEngine, folder: Path, there: Mapping[str, Any], new_heads: Sequence[str]) -> None:
    """Compare what a checkpoint holds with what the engine does, but for heads that it does not have yet."""
    weights, trained = live_tensors(engine), {name for name, _ in engine.trained_parameters()}
    to_come = tuple(f"{HEAD_PREFIX}{head}." for head in new_heads)
    problems = [f"{name} is missing" for name in weights if WEIGHT + name not in there]
    for full_name, (shape, dtype) in there.items():
        kind, _, name = full_name.partition("/")
        name = name.partition("/")[2] if kind == "optimizer" else name
        if name.startswith(to_come):
            continue
        if kind == "weights" and name not in weights:
            problems.append(f"{name} is unknown")
        elif kind == "weights" and shape != weights[name].shape:
            problems.append(f"{name} has shape {list(shape)}, not {list(weights[name].shape)}")
        elif kind == "weights" and dtype != weights[name].dtype:
            problems.append(f"{name} is {_short(dtype)}, not {_short(weights[name].dtype)}")
        elif kind == "optimizer" and name not in trained:
            problems.append(f"{name} has an optimiser, and is not trained here")
    if problems:
        problems = list(dict.fromkeys(problems))
        raise CheckpointError(
            f"{folder} is a checkpoint of another model than {engine.model!r}",
            expected=f"its {len(weights)} tensors",
            received="; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else ""),
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the optimiser -------------------------------------------------------------------------------------------------------


def optimizer_state(engine: TransformersEngine) -> dict[str, dict[str, Tensor]]:
    """By parameter name the optimiser's tensors, as they lie; empty before the first step."""
    states = {} if engine.optimizer is None else engine.optimizer.state
    return {name: dict(states[p]) for name, p in engine.trained_parameters() if p in states}


def _optimizer_tensors(engine: TransformersEngine) -> dict[str, Tensor]:
    """All in one: "optimizer/<which>/<parameter>"."""
    found = optimizer_state(engine)
    return {f"{OPTIMIZER}{key}/{name}": t for name, tensors in found.items() for key, t in tensors.items()}


def _new_optimizer(engine: TransformersEngine, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Give the engine an optimiser with empty tensors of these names, to be filled; its settings come with the next step."""
    from flowrl.nodes.updater import AdamW

    engine.optimizer = None
    if not shapes:
        return {}
    optimizer = engine.torch_optimizer(AdamW())
    parameters = dict(engine.trained_parameters())
    found: dict[str, Tensor] = {}
    for full_name, shape in shapes.items():
        key, _, name = full_name.removeprefix(OPTIMIZER).partition("/")
        parameter = parameters[name]
        # A moment lies as its parameter does; a counter is a number on the CPU, or where the fused optimiser wants it.
        alike = shape == parameter.shape and key != "step"
        found[full_name] = (
            torch.zeros_like(parameter, requires_grad=False)
            if alike
            else torch.zeros(shape, dtype=torch.float32, device=_counter_device(optimizer, parameter))
        )
        optimizer.state[parameter][key] = found[full_name]
    return found


def _counter_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    fused = optimizer.param_groups[0].get("fused") or optimizer.param_groups[0].get("capturable")
    return parameter.device if fused else torch.device("cpu")
