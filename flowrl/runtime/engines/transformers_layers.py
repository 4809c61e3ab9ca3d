"""The layers of a module: which ones are sharded each for itself, split over ranks, compiled, or computed again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.compiler.strategy import Strategy
from flowrl.errors import ModelError
from flowrl.runtime.engines.transformers_attention import current_pack, packed
from flowrl.runtime.engines.transformers_network import Network


def layers_of(module: Any, class_names: Sequence[str], name: str) -> list[nn.Module]:
    """The layers that are sharded each for itself: the modules of the named classes, else the model's own layers.

    Raises:
        ModelError: there are none of these classes, they cannot be sharded by themselves, or there are no layers at all.
    """
    if class_names:
        return _named_layers(module, class_names, name)
    stack = _stack(module)
    if stack is None:
        raise ModelError(
            f"The layers of {name} cannot be found",
            expected="a list of equal layers in the module",
            received=type(module).__name__,
            do="name their classes: Strategy(shard_layers=(…,))",
        )
    return list(stack)


def _stack(module: nn.Module) -> nn.ModuleList | None:
    """The longest list of equal layers, by its parameters."""
    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
    return max(stacks, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)


def _named_layers(module: Any, class_names: Sequence[str], name: str) -> list[nn.Module]:
    classes: dict[str, list[nn.Module]] = {}
    for part in module.modules():
        classes.setdefault(type(part).__name__, []).append(part)
    missing = sorted(set(class_names) - set(classes))
    if missing:
        raise ModelError(
            f"{name} has no module of class {', '.join(missing)}",
            expected=f"classes of its modules in shard_layers, such as {', '.join(_suitable(module, classes))}",
            received=", ".join(class_names),
        )
    named = {c: classes[c] for c in dict.fromkeys(class_names)}
    problems = [f"{c}: {why}" for c, parts in named.items() if (why := _unsuitable(module, parts))]
    problems = problems or list(_nested(named))
    if problems:
        raise ModelError(
            f"Modules of {name} cannot be sharded each for itself",
            expected=f"classes in shard_layers such as {', '.join(_suitable(module, classes))}; none within another",
            received="; ".join(problems),
            do="name others, or none: Strategy() takes the model's own layers",
        )
    return [part for parts in named.values() for part in parts]


def _suitable(module: Any, classes: dict[str, list[nn.Module]]) -> list[str]:
    """Of all classes of modules those that can be named, the ones with most parameters first."""

    def size(parts: list[nn.Module]) -> int:
        return sum(p.numel() for part in parts for p in part.parameters())

    found = [c for c, parts in classes.items() if not _unsuitable(module, parts)]
    return sorted(found, key=lambda c: -size(classes[c]))[:8] or ["none of this model"]


def _unsuitable(module: Any, parts: Sequence[nn.Module]) -> str:
    """Why the modules of one class cannot be sharded each for itself; empty where they can."""
    names = {id(m): n for n, m in module.named_modules()}
    ends, stack = list(_ends(module)), _stack(module)
    for part in parts:
        within = {id(m) for m in part.modules()}
        where = f"{names[id(part)]!r}" if names[id(part)] else "the whole model"
        for what, other in ends:
            if id(other) in within:
                same = "is" if other is part else "contains"
                return f"{where} {same} the {what}, whose weights are read at both ends of a pass"
        if stack is not None and id(stack) in within:
            return f"{where} contains all layers, which would then be whole at once"
        if type(part).forward is nn.Module.forward or isinstance(part, nn.ModuleList | nn.ModuleDict):
            return f"{where} has no forward pass of its own, before which its weights could be gathered"
        mine = {id(p) for p in part.parameters()}
        if not mine:
            return f"{where} has no weights"
        if shared := _shared(module, within, mine):
            return f"{where} shares weights with {shared!r}, which is outside of it"
    inner = {id(m) for part in parts for m in part.modules() if m is not part}
    return next((f"{names[id(part)]!r} lies within another one of them" for part in parts if id(part) in inner), "")


def _ends(module: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose weights are used at the ends of a pass, also without calling them."""
    for what, getter in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        found = getattr(module, getter, lambda: None)()
        if isinstance(found, nn.Module):
            yield what, found


def _shared(module: nn.Module, within: set[int], parameters: set[int]) -> str:
    """The name of a parameter outside that is one of these; empty where there is none."""
    for prefix, other in module.named_modules():
        for name, parameter in other.named_parameters(recurse=False):
            if id(other) not in within and id(parameter) in parameters:
                return f"{prefix}.{name}" if prefix else name
    return ""


def _nested(named: dict[str, list[nn.Module]]) -> Iterator[str]:
    """Classes whose modules lie within those of another one, a sentence a pair."""
    for outer, parts in named.items():
        inner = {type(m).__name__ for part in parts for m in part.modules() if m is not part}
        yield from (f"{c} lies within {outer}; expected one of them" for c in named if c in inner)


def split_layers(module: Any, layers: Sequence[nn.Module], mesh: Any, name: str) -> None:
    """Tensor parallelism by the model's own plan; what lies outside of layers stays whole on every rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = getattr(module.config.get_text_config(), "base_model_tp_plan", None) or {}
    by_layer = {key.partition("layers.*.")[2]: style for key, style in plan.items() if key.startswith("layers.*.")}
    unknown = sorted({style for style in by_layer.values() if style not in styles})
    if not by_layer or unknown:
        raise ModelError(
            f"{name} cannot be split by tensor parallelism",
            expected="a model whose configuration has a plan of colwise and rowwise layers",
            received=f"styles {', '.join(unknown)}" if unknown else f"no plan for {type(module).__name__}",
            do="use data parallelism: Strategy(tensor_parallel=1)",
        )
    config = module.config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, what, None)
        if isinstance(number, int) and number % mesh.size():
            raise ModelError(
                f"{name} cannot be split over {mesh.size()} ranks",
                expected=f"a divisor of its {what}, {number}",
                received=f"tensor_parallel={mesh.size()}",
                do="choose another tensor_parallel",
            )
    for layer in layers:
        present = {n for n, _ in layer.named_modules()}
        parallelize_module(layer, mesh, {n: styles[s]() for n, s in by_layer.items() if n in present})


def prepare_layers(network: Network, layers: Sequence[nn.Module], strategy: Strategy) -> None:
    """Activation checkpointing and compilation of layers."""
    for layer in layers:
        if strategy.compile_layers:
            layer.compile()
        if strategy.activation_checkpointing != "none":
            offloads = strategy.activation_checkpointing == "offload"
            layer.forward = functools.partial(_checkpointed, network, layer.forward, offloads)  # type: ignore[method-assign]


def _checkpointed(network: Network, forward: Callable[..., Any], offloads: bool, *args: Any, **kwargs: Any) -> Any:
    """A layer of which only the input is kept, in host memory where it ``offloads``; the rest is computed again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Parts of a layer are given their input by name: it is the first one, here as there.
    called = None if args else next(iter(kwargs))
    first, others = (args[0], args[1:]) if called is None else (kwargs.pop(called), ())
    pack = current_pack()

    def again(hidden: Tensor) -> Any:
        with network.compute(), packed(pack) if pack is not None else contextlib.nullcontext():
            return forward(hidden, *others, **kwargs) if called is None else forward(**{called: hidden}, **kwargs)

    if not offloads:
        return checkpoint(again, first, use_reentrant=False, preserve_rng_state=False)
    # Non-reentrant checkpoints keep their inputs in a closure; reentrant ones save them, where a hook can move them.
    with torch.autograd.graph.save_on_cpu(pin_memory=first.device.type == "cuda"):
        return checkpoint(again, first, use_reentrant=True, preserve_rng_state=False)
