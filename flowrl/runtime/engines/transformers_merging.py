"""What others see of a Model with an adapter or a quantised base: the weights of an ordinary one, and exports of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.runtime.engines.transformers_adapters import PARTS, linear_layers
from flowrl.runtime.engines.transformers_quantization import dequantised, is_quantised

if TYPE_CHECKING:
    from flowrl.runtime.engines.transformers import TransformersEngine
    from flowrl.runtime.engines.transformers_shards import Shards


def plain_weights(engine: TransformersEngine) -> Iterator[tuple[str, Tensor]]:
    """Names as the base has them, and CPU copies with the adapter added and nothing quantised, one at a time."""
    adapter = engine.adapter
    assert adapter is not None
    module: Any = engine.network.module
    persistent = module.state_dict(keep_vars=True)
    done: set[str] = set()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        if name not in persistent or any(f".{part}." in name for part in PARTS):
            continue
        owner = module.get_submodule(path)
        if leaf != "bias" and is_quantised(owner):
            if path in done:
                continue
            done.add(path)
            leaf, tensor = "weight", dequantised(owner, getattr(torch, engine.settings.dtype))
        whole = engine.shards.whole(tensor)
        layer_path = path.removesuffix(".base_layer")
        layer = adapter.adapters.layers.get(layer_path)
        if layer is not None and leaf == "weight" and adapter.name is not None:
            whole = _merged(layer, adapter.name, whole, engine.shards)
        yield f"{layer_path}.{leaf}" if layer_path else leaf, whole.to("cpu", copy=True)


def _merged(layer: Any, name: str, weight: Tensor, shards: Shards) -> Tensor:
    """``W + scale B A``, added in float32."""
    a, b = (shards.whole(getattr(layer, part)[name].weight).float() for part in PARTS)
    delta = layer.scaling[name] * (b @ a)
    delta = delta.T if getattr(layer, "fan_in_fan_out", False) else delta
    return (weight.float() + delta.to(weight.device)).to(weight.dtype)


def export(engine: TransformersEngine, folder: Path) -> None:
    """Write the adapter, and unless the settings say otherwise the whole model with it added; all ranks take part."""
    from flowrl.runtime.engines.transformers_loading import quiet

    adapter = engine.adapter
    assert adapter is not None
    settings = engine.settings.lora
    tensors = {n: engine.shards.whole(t).cpu().contiguous() for n, t in adapter.tensors().items()}
    merged = settings is None or settings.merge_on_export or adapter.name is None
    weights = dict(plain_weights(engine)) if merged else {}
    if not engine.shards.is_first:
        return
    if merged:
        with quiet():
            _shell_of(engine.network.module).save_pretrained(folder, state_dict=weights)
    if adapter.name is not None:
        _save_adapter(engine, folder / "adapter" if merged else folder, tensors)


def _shell_of(module: Any) -> Any:
    """A module of this class without numbers, adapters or quantisation: what knows how to write a HuggingFace directory."""
    config = copy.deepcopy(module.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        shell = type(module)(config)
    for name in ("generation_config", "_weight_conversions"):
        if hasattr(module, name):
            setattr(shell, name, getattr(module, name))
    return shell.to(module.dtype)


def _save_adapter(engine: TransformersEngine, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """An adapter in peft's format."""
    from safetensors.torch import save_file

    adapter = engine.adapter
    assert adapter is not None
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(adapter.adapters.config)
    layers = set(adapter.adapters.layers)
    ends = {name.rpartition(".")[2] for name in layers}
    by_end = {n for n in linear_layers(engine.network.module) if n.rpartition(".")[2] in ends}
    config.target_modules = ends if by_end == layers else layers
    config.task_type = {"policy": "CAUSAL_LM", "reward": "SEQ_CLS"}.get(engine.settings.kind)
    config.inference_mode = True
    source = engine.settings.source
    config.base_model_name_or_path = str(source) if isinstance(source, str | Path) else None
    config.save_pretrained(str(folder))
    of_adapter = {f"base_model.model.{n}": t for n, t in tensors.items() if any(f".{part}." in n for part in PARTS)}
    save_file(of_adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
