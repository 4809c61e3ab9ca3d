"""Quantised weights: what a Model's ``quantization`` asks of ``from_pretrained``, whether this machine can do it, and what
the weights stand for."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ModelError
from flowrl.models import Model

#: By quantisation the packages that it needs, and the extra of ours that brings them.
NEEDS = {
    "nf4": (("bitsandbytes", "accelerate"), "quantization"),
    "int8": (("bitsandbytes", "accelerate"), "quantization"),
    "gptq": (("gptqmodel", "optimum"), "gptq"),
}


def quantised_options(model: Model, source: str, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Options for ``from_pretrained``.

    Raises:
        ModelError: a package is missing, this machine's device is not supported, or the source is quantised otherwise.
    """
    kind = model.quantization
    assert kind is not None
    packages, extra = NEEDS[kind]
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ModelError(
            f"{model!r} has quantization={kind!r}, and {' and '.join(missing)} is not installed",
            expected=f"the packages {' and '.join(packages)}",
            received=f"no {' and no '.join(missing)}",
            do=f"pip install 'flowrl-dataflow[{extra}]' (pip install {' '.join(missing)})",
        )
    found = _method_of_source(source)
    if kind == "gptq":
        if found != "gptq":
            raise ModelError(
                f"{model!r} has quantization='gptq', and its source holds no GPTQ weights",
                expected="a source that was quantised by GPTQ, which takes calibration data and is done beforehand",
                received=f"weights quantised by {found}" if found else "weights that are not quantised",
                do="take a GPTQ source, or quantization='nf4', which quantises as it loads",
            )
        return {"device_map": {"": device}}
    if found is not None and found != "bitsandbytes":
        raise ModelError(
            f"{model!r} has quantization={kind!r}, and its source is quantised already",
            expected="a source that is not quantised, or by bitsandbytes",
            received=f"weights quantised by {found}",
            do="say quantization='gptq'" if found == "gptq" else "take another source",
        )
    _check_device(model, device)
    if found is not None or "quantization_config" in options:
        return {"device_map": {"": device}}
    return {"device_map": {"": device}, "quantization_config": _bitsandbytes_settings(model)}


def _bitsandbytes_settings(model: Model) -> Any:
    from transformers import BitsAndBytesConfig

    compute = getattr(torch, model.autocast or model.dtype)
    if model.quantization == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    # Outliers are looked for among all rows of a batch: with a threshold a row's numbers would depend on its neighbours.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def _check_device(model: Model, device: torch.device) -> None:
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    supported = set(getattr(bitsandbytes, "supported_torch_devices", {"cuda"}))
    if device.type not in supported:
        raise ModelError(
            f"{model!r}: quantization={model.quantization!r} does not run on {device.type}",
            expected=f"one of {', '.join(sorted(supported))} with bitsandbytes {bitsandbytes.__version__}",
            received=f"device {device}",
            do="pip install -U bitsandbytes, run on a GPU with CUDA, or leave quantization out",
        )


def _method_of_source(source: str) -> str | None:
    """How the weights of a folder say that they are quantised; of a name, what its configuration says."""
    file = Path(source) / "config.json"
    if file.is_file():
        settings = json.loads(file.read_text()).get("quantization_config")
    else:
        from transformers import AutoConfig

        try:
            settings = getattr(AutoConfig.from_pretrained(source), "quantization_config", None)
        except (OSError, ValueError):  # the loader says what is wrong with the source
            settings = None
    if settings is None:
        return None
    return str(settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown")


def is_quantised(layer: Any) -> bool:
    """Whether the weight of a linear layer is held in fewer bits."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.Linear):
        return weight is not None and not weight.is_floating_point()
    return hasattr(layer, "qweight")


def dequantised(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight ``[out, in]`` that a quantised linear layer stands for."""
    if isinstance(layer, nn.Linear):
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
        weight: Any = layer.weight
        if getattr(weight, "quant_state", None) is not None:
            return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).to(dtype)
        state: Any = getattr(layer, "state", None)
        scale = weight.SCB if getattr(weight, "SCB", None) is not None else state.SCB
        return (weight.data.float() * (scale.float()[:, None] / 127.0)).to(dtype)
    device = layer.qweight.device  # whatever the format: what the layer does to each unit vector
    with torch.no_grad():
        columns = layer(torch.eye(layer.in_features, device=device, dtype=torch.float16)).float()
    bias = getattr(layer, "bias", None)
    return (columns if bias is None else columns - bias.float()).T.to(dtype)
