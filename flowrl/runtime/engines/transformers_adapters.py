"""LoRA adapters on a base that never changes, and bases that are held quantised.

Several engines share one module: the Model's own, whose adapter is trained, and those of Models that are derived from it.
Each says which adapter is on while it computes: the trained one, a copy of its own (a Snapshot, an Ema: two small matrices
a layer), or none (a Frozen: the base). So no weight of the base exists twice, and a reference costs no memory.

What changes is the adapter, so that is what checkpoints hold. To everybody outside, the weights of such a Model are those
of an ordinary one: :mod:`~flowrl.runtime.engines.transformers_merging` gives the base's names, with the adapter added.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.adapters import LoRA, strategy_problems
from flowrl.errors import ModelError, nearest
from flowrl.models import DerivedModel, Frozen, Model
from flowrl.runtime.engines.transformers_network import Abilities, Network

if TYPE_CHECKING:
    from flowrl.runtime.engines.base import EngineOptions
    from flowrl.runtime.engines.transformers_shards import Shards

#: The adapter that is trained, as peft's layers call it.
TRAINED = "default"
PARTS = ("lora_A", "lora_B")
#: What is kept of peft's settings for each adapter of a layer, by attribute of the layer.
TABLES = ("r", "lora_alpha", "scaling", "use_rslora", "use_dora", "lora_bias")
CONFIG = "adapter_config.json"


class Adapters:
    """The adapters in one module. At any time one of them is on, or none.

    Args:
        module: with peft's layers in it, where there is ``config``.
        config: peft's settings of the adapter; None for a quantised base without one.
        trained_whole: names of parameters that are trained as they are: a new head.
    """

    def __init__(self, model: Model, module: nn.Module, config: Any, trained_whole: tuple[str, ...] = ()) -> None:
        self.model, self.module, self.config, self.trained_whole = model, module, config, trained_whole
        self.layers: dict[str, Any] = {}
        if config is not None:
            from peft.tuners.tuners_utils import BaseTunerLayer

            self.layers = {name: m for name, m in module.named_modules() if isinstance(m, BaseTunerLayer)}
        self._on: str | None = TRAINED
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Within it this adapter is on; None for none."""
        before = self._on
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str | None) -> None:
        if name == self._on:
            return
        for layer in self.layers.values():
            # peft's own switches also change which parameters require a gradient, in the middle of somebody's forward pass.
            layer._disable_adapters = name is None
            layer._active_adapter = [name or TRAINED]
        self._on = name

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of an adapter, by ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``."""
        return {
            f"{path}.{part}.weight": getattr(layer, part)[name].weight
            for path, layer in self.layers.items()
            for part in PARTS
        }

    def add_copy(self, shards: Shards) -> str:
        """Another adapter, not trained, with the numbers that the trained one has now. Every rank holds it whole."""
        name = f"copy_{next(self._numbers)}"
        for layer in self.layers.values():
            for table in TABLES:
                if hasattr(layer, table):
                    getattr(layer, table)[name] = getattr(layer, table)[TRAINED]
            layer.lora_dropout[name] = nn.Identity()
            for part in PARTS:
                old = getattr(layer, part)[TRAINED]
                new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
                new.weight = nn.Parameter(shards.whole(old.weight).clone(), requires_grad=False)
                getattr(layer, part)[name] = new
        return name

    def remove(self, name: str) -> None:
        """Free an adapter."""
        for layer in self.layers.values():
            for table in (*TABLES, "lora_dropout", *PARTS):
                getattr(layer, table, {}).pop(name)

    def describe(self) -> dict[str, Any]:
        """What must be the same for saved numbers to mean the same."""
        if self.config is None:
            return {"quantization": self.model.quantization}
        scaling = sorted({float(layer.scaling[TRAINED]) for layer in self.layers.values()})
        return {"quantization": self.model.quantization, "scaling": scaling}


@dataclass
class Adapter:
    """One adapter of a module: an engine's.

    Args:
        name: None for none: the base.
    """

    adapters: Adapters
    name: str | None = TRAINED

    def on(self) -> contextlib.AbstractContextManager[None]:
        """Within it, this adapter is on."""
        return self.adapters.using(self.name)

    def tensors(self) -> dict[str, Tensor]:
        """What of this engine's module is its own: all that may change, by name."""
        if self.name is None:
            return {}
        found: dict[str, Tensor] = dict(self.adapters.tensors(self.name))
        if self.name == TRAINED:
            found |= {name: self.adapters.module.get_parameter(name) for name in self.adapters.trained_whole}
        return found

    def derived(self, model: DerivedModel, shards: Shards, *, untrained: bool) -> Adapter:
        """Of a Model made from this one: what it was at step 0, or a copy of what it is now."""
        settings = self.adapters.model.lora
        if settings is None or (isinstance(model, Frozen) and settings.adapter_source is None):
            return Adapter(self.adapters, None)
        shards.settle()
        other = Adapter(self.adapters, self.adapters.add_copy(shards))
        if isinstance(model, Frozen) and not untrained:
            _fill(self.adapters, other.name or TRAINED, _saved_tensors(self.adapters.model))
        return other

    def close(self) -> None:
        """Free what is this adapter's alone."""
        if self.name not in (None, TRAINED):
            self.adapters.remove(self.name)


class AdaptedNetwork(Network):
    """A network that computes with an adapter of its own, or with none."""

    def __init__(self, module: Any, adapter: Adapter, **settings: Any) -> None:
        self.adapter = adapter
        super().__init__(module, **settings)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        with self.adapter.on(), super().compute():
            yield

    @cached_property
    def abilities(self) -> Abilities:
        with self.adapter.on():
            return Network.abilities.func(self)  # type: ignore[attr-defined]


# -- making ------------------------------------------------------------------------------------------------------------


def adapted(model: Model, module: Any, options: EngineOptions) -> Adapter | None:
    """Put the adapter of a Model into its freshly loaded module; None for a Model that is trained as it is.

    Raises:
        ModelError: peft is missing, no layer has one of the names, a saved adapter does not fit, or a strategy that
            adapters or quantised weights cannot take.
    """
    if model.lora is None and model.quantization is None:
        return None
    for problem in strategy_problems(model.lora, model.quantization, options.strategy, options.ranks.size):
        received, _, expected = problem.partition("; expected ")
        raise ModelError(f"{model!r} cannot be held like this", expected=expected, received=received)
    if model.lora is None:
        return Adapter(Adapters(model, module, None), None)
    head = getattr(module, "score", None) if model.kind == "reward" and getattr(model, "new_head", False) else None
    whole = tuple(f"score.{name}" for name, _ in head.named_parameters()) if head is not None else ()
    adapters = Adapters(model, module, _inject(model, module), whole)
    if model.lora.adapter_source is None:
        _fill_anew(adapters, model.lora.seed)
    else:
        _fill(adapters, TRAINED, _saved_tensors(model))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(model.trainable and (name in whole or id(parameter) in _ids(adapters)))
    if options.strategy.activation_checkpointing == "offload":
        module.get_input_embeddings().register_forward_hook(_start_gradient)
    return Adapter(adapters)


def _ids(adapters: Adapters) -> set[int]:
    return {id(p) for p in adapters.tensors(TRAINED).values()}


def _start_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A reentrant checkpoint has a backward pass only where its input asks for a gradient; a frozen embedding's does not."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def require_peft(model: Model) -> None:
    """Refuse to go on without peft.

    Raises:
        ModelError: it is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            f"{model!r} has lora=, and peft is not installed",
            expected="the package peft",
            received="no such package",
            do="pip install 'flowrl-dataflow[peft]'",
        )


def _inject(model: Model, module: Any) -> Any:
    """Wrap the layers that get an adapter; peft's settings of it."""
    require_peft(model)
    from peft import LoraConfig, inject_adapter_in_model

    settings = model.lora
    assert settings is not None
    linear = linear_layers(module)
    if settings.adapter_source is None:
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            use_rslora=settings.rank_stabilized,
            target_modules=_targets(model, settings, linear),
        )
    else:
        config = _saved_config(model)
    try:
        inject_adapter_in_model(config, module, adapter_name=TRAINED)
    except (ValueError, ImportError, TypeError) as error:
        raise ModelError(
            f"{model!r} cannot be given an adapter",
            expected="layers that peft can put an adapter on",
            received=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            do="look at lora=LoRA(target_modules=…); quantised layers need the packages that read them",
        ) from error
    adapters = Adapters(model, module, config)
    if strange := sorted(set(adapters.layers) - set(linear)):
        raise ModelError(
            f"{model!r}: an adapter on {strange[0]!r} is not supported",
            expected="adapters on linear layers of the trunk alone, so that they can be added to its weights",
            received=f"{len(strange)} others: {', '.join(strange[:3])}",
        )
    dtype = getattr(torch, settings.dtype)
    for parameter in adapters.tensors(TRAINED).values():
        parameter.data = parameter.data.to(dtype)
    return config


def linear_layers(module: Any) -> list[str]:
    """Names of the linear layers of a module's trunk, quantised ones too."""
    from transformers.pytorch_utils import Conv1D

    trunk = getattr(module, "base_model", module)
    inside = {id(m) for m in trunk.modules()}

    def linear(layer: Any) -> bool:
        sizes = isinstance(getattr(layer, "in_features", None), int) and hasattr(layer, "out_features")
        return isinstance(layer, nn.Linear | Conv1D) or sizes

    return [name for name, layer in module.named_modules() if id(layer) in inside and linear(layer)]


def _targets(model: Model, settings: LoRA, linear: list[str]) -> list[str]:
    """The full names of the layers that the settings mean."""
    wanted = settings.target_modules
    if not linear:
        raise ModelError(
            f"{model!r} has no linear layer in its trunk", expected="at least one to put an adapter on", received="none"
        )
    if wanted == "all-linear":
        return linear
    ends = sorted({name.rpartition(".")[2] for name in linear})
    found: list[str] = []
    for target in wanted:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matching:
            raise ModelError(
                f"{model!r}: lora.target_modules has {target!r}, and no linear layer of the trunk is called so",
                expected=", ".join(ends),
                received=repr(target),
                do=nearest(target, ends),
            )
        found += matching
    return list(dict.fromkeys(found))


def _fill_anew(adapters: Adapters, seed: int) -> None:
    """``A`` uniform as of a new linear layer, ``B`` zero; the same numbers on every rank, device and resume."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapters.tensors(TRAINED).items():
            new = torch.zeros(parameter.shape)
            if name.endswith("lora_A.weight"):
                nn.init.kaiming_uniform_(new, a=math.sqrt(5), generator=generator)
            parameter.copy_(new)


# -- saved adapters ----------------------------------------------------------------------------------------------------


def _saved_config(model: Model) -> Any:
    """peft's settings of a saved adapter.

    Raises:
        ModelError: there is none, or it is of a kind that cannot be added to weights.
    """
    from peft import LoraConfig, PeftConfig

    assert model.lora is not None
    source = _expanded(model.lora)
    try:
        config: Any = PeftConfig.from_pretrained(source)
    except Exception as error:  # whatever a loader raises
        raise _no_adapter(model, source, error) from error
    odd = [
        n for n in ("modules_to_save", "use_dora", "target_parameters", "layer_replication") if getattr(config, n, None)
    ]
    odd += ["bias"] if getattr(config, "bias", "none") != "none" else []
    if type(config) is not LoraConfig or odd:
        raise ModelError(
            f"{model!r}: the adapter in {source!r} is of a kind that cannot be used",
            expected="a LoRA adapter of linear layers alone",
            received=type(config).__name__ + (f" with {', '.join(odd)}" if odd else ""),
            do="merge that adapter into its base, and start from the result",
        )
    config.lora_dropout, config.init_lora_weights, config.inference_mode = 0.0, True, False
    return config


def _saved_tensors(model: Model) -> dict[str, Tensor]:
    """By ``<layer>.lora_A.weight`` the numbers of a saved adapter."""
    from peft.utils import load_peft_weights

    assert model.lora is not None
    source = _expanded(model.lora)
    try:
        saved = load_peft_weights(source, device="cpu")
    except Exception as error:
        raise _no_adapter(model, source, error) from error
    return {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}


def _expanded(settings: LoRA) -> str:
    import os

    assert settings.adapter_source is not None
    return os.path.expanduser(os.fspath(settings.adapter_source))


def _no_adapter(model: Model, source: str, error: Exception) -> ModelError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    inside = Path(source) / "adapter"
    found = (inside / CONFIG).is_file() and not (Path(source) / CONFIG).is_file()
    return ModelError(
        f"{model!r}: there is no adapter in {source!r}",
        expected=f"a folder with {CONFIG} and adapter_model.safetensors, or the name of such a one on the Hub",
        received=f"{type(error).__name__}: {lines[0]}",
        do=f"lora=LoRA(adapter_source={str(inside)!r}), and the base that it was trained on as source: {source!r} is a model "
        "with that adapter added already"
        if found
        else "check lora=LoRA(adapter_source=…)",
    )


def _fill(adapters: Adapters, name: str, saved: Mapping[str, Tensor]) -> None:
    """Copy saved numbers into an adapter.

    Raises:
        ModelError: names or shapes do not fit.
    """
    model, places = adapters.model, adapters.tensors(name)
    if model.kind == "value":  # a critic is the trunk alone, and starts from the adapter of a policy
        prefix = f"{getattr(adapters.module, 'base_model_prefix', '')}."
        saved = {n.removeprefix(prefix): t for n, t in saved.items()}
    problems = [f"{n} is missing" for n in places if n not in saved] + [
        f"{n} is unknown" for n in saved if n not in places
    ]
    problems += [
        f"{n} has shape {list(t.shape)}, not {list(places[n].shape)}"
        for n, t in saved.items()
        if n in places and places[n].shape != t.shape
    ]
    if problems:
        raise ModelError(
            f"{model!r}: the saved adapter does not fit: {'; '.join(problems[:5])}",
            expected=f"an adapter of {type(adapters.module).__name__} with the {len(places)} tensors that its settings say",
            received=f"{len(saved)} tensors",
            do="take the base that the adapter was trained on",
        )
    with torch.no_grad():
        for n, place in places.items():
            place.copy_(saved[n])
