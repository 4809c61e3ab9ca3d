"""Which attention a network computes with: what a strategy asks for, what this machine can do, and whether it is right.

Nothing is used on trust. A backend runs a forward pass of the model over a few short rows first, and in each layer its
outputs and gradients are compared with those of "sdpa" in float32 (:func:`tried`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from flowrl.compiler.strategy import Strategy
from flowrl.errors import ModelError
from flowrl.runtime.engines.transformers_attention import Backend, Pack, Rule, Settings, attend_in_buckets
from flowrl.runtime.engines.transformers_varlen import (
    INSTALL_FLASH,
    Flash,
    Flex,
    flash_kernel,
    flex_kernel,
    products,
)

#: Where the backends run; tests widen these to stand-ins on a CPU.
DEVICES = {"flash": ("cuda",), "flex": ("cuda",)}
DTYPES = {"flash": (torch.bfloat16, torch.float16), "flex": (torch.bfloat16, torch.float16, torch.float32)}
#: The least compute capability with flash attention.
AMPERE = (8, 0)

# -- which one ---------------------------------------------------------------------------------------------------------


def backend_of(strategy: Strategy, device: torch.device, dtype: torch.dtype, name: str) -> Backend | None:
    """The backend that a strategy asks for, before it is tried; None for "sdpa".

    Args:
        dtype: of matrix products.
        name: of the Model, for messages.

    Raises:
        ModelError: this machine, or the Model's precision, cannot have the backend that the strategy names.
    """
    wanted = strategy.attention
    if wanted == "sdpa":
        return None
    if wanted == "auto":
        return None if _flash_refusal(device, dtype) else _backend("flash")
    refusal = _flash_refusal(device, dtype) if wanted == "flash" else _place_refusal("flex", device, dtype)
    if refusal is not None:
        expected, received, do = refusal
        raise ModelError(f"{name}: attention={wanted!r} cannot be used", expected=expected, received=received, do=do)
    return _backend(wanted)


def _backend(name: str) -> Backend:
    if name == "flex":
        return Flex(flex_kernel())
    kernel = flash_kernel()
    assert kernel is not None
    return Flash(kernel)


def _place_refusal(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    """(expected, received, what to do); None where nothing speaks against it."""
    found = str(dtype).removeprefix("torch.")
    if device.type not in DEVICES[name]:
        return "a CUDA device", f"device {device}", "use attention='sdpa', or run on a GPU with CUDA"
    if dtype not in DTYPES[name]:
        known = " or ".join(str(d).removeprefix("torch.") for d in DTYPES[name])
        return f"products in {known}", f"products in {found}", "say Model(autocast='bfloat16'), or attention='sdpa'"
    return None


def _flash_refusal(device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    refusal = _place_refusal("flash", device, dtype)
    if refusal is not None:
        return refusal
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < AMPERE:
        card = f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_capability(device)}"
        return "a GPU of compute capability 8.0 (Ampere) or later", card, "use attention='sdpa' or 'flex'"
    if flash_kernel() is None:
        expected = "the package flash-attn, or a torch with torch.nn.attention.varlen"
        return expected, f"neither, torch {torch.__version__}", f"{INSTALL_FLASH}, or pip install -U torch"
    return None


# -- trying it ---------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A backend beside "sdpa" in float32, whose numbers go on.

    Args:
        layers: attention calls that the backend took.
        distance: the largest relative L2 distance of an output or a gradient in them, those aside that "sdpa" has itself in
            that precision: a gradient may be the small difference of large numbers.
        refusals: why it did not take the others.
    """

    backend: Backend
    layers: int = 0
    distance: float = 0.0
    refusals: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.backend.name

    def prepare(self, rule: Rule, pack: Pack) -> Any:
        if rule.window is None or rule.window < rule.length:
            return self.backend.prepare(rule, pack)
        return self.backend.prepare(_narrowed(rule), pack)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, prepared: Any, settings: Settings, pack: Pack
    ) -> Tensor:
        given = [x.detach() for x in products(query, key, value)]

        def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with torch.autocast(query.device.type, enabled=False):
                return attend_in_buckets(query, key, value, prepared.rule.mask, settings, pack)

        with torch.compiler.set_stance("default"):  # a kernel may be one that is compiled
            found = _out_and_gradients(lambda q, k, v: self.backend.attend(q, k, v, prepared, settings, pack), given)
        exact = _out_and_gradients(plain, [x.float() for x in given])
        assert not isinstance(exact, str)
        if isinstance(found, str):
            self.refusals.append(found)
        else:
            self.layers += 1
            rounded = _out_and_gradients(plain, given)
            for mine, expected, same in zip(found, exact, rounded, strict=True):
                assert isinstance(mine, Tensor) and isinstance(expected, Tensor) and isinstance(same, Tensor)
                distance = relative_distance(mine, expected)
                if not distance <= ROUNDING * relative_distance(same, expected):
                    self.distance = max(self.distance, distance)
        return exact[0].to(given[0].dtype)


#: How many times as far as "sdpa" in the same precision a number may be off.
ROUNDING = 3.0


def _out_and_gradients(attend: Callable[..., Tensor | str], given: Sequence[Tensor]) -> list[Tensor] | str:
    """What attention gives, and the gradients of queries, keys and values when its parts are pulled in different ways."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in given]
        out = attend(*inputs)
        if isinstance(out, str):
            return out
        pull = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        return [out.detach(), *torch.autograd.grad((out.float() * pull).sum(), inputs)]


#: The window of a trial: short rows would not feel that of a model.
NARROW = 3


def _narrowed(rule: Rule) -> Rule:
    """A plainly causal rule as it is; a sliding window that is longer than the rows of a trial, made to be felt."""
    if rule.function is causal_mask_function:
        return rule
    function = rule.function

    def narrow(row: Any, head: Any, query: Any, key: Any) -> Any:
        return function(row, head, query, key) & (key > query - NARROW)

    return Rule(narrow, rule.length, rule.device)


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance; infinite where either is not finite."""
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def tried(
    backend: Backend, run: Callable[[Backend], Any], *, tolerance: float, named: bool, model: str
) -> tuple[Backend | None, str]:
    """A backend after a forward pass of the model, and why it is not used where it is not.

    Args:
        run: does a forward pass over a pack with the backend that it is given.
        tolerance: relative L2 distance that counts as equal.
        named: whether the strategy named it, so that it must be used.
        model: its name, for messages.

    Raises:
        ModelError: the backend was named; it fails, no layer can use it, or its numbers are wrong.
    """
    trial = Trial(backend)
    error: Exception | None = None
    try:
        run(trial)
    except Exception as found:  # kernels and compilers refuse in any way they like
        error, why = found, f"{type(found).__name__}: {(str(found).strip().splitlines() or [''])[0]}"
    else:
        if not trial.layers:
            why = f"no layer can use it: {', '.join(dict.fromkeys(trial.refusals)) or 'none asks for a mask'}"
        elif not trial.distance <= tolerance:
            why = f"numbers that are off by {trial.distance:.1g}"
        else:
            return backend, ""
    if named:
        raise ModelError(
            f"{model}: attention={backend.name!r} cannot be used",
            expected=f"outputs and gradients within {tolerance:g} of attention='sdpa', in at least one layer",
            received=why,
            do="use attention='sdpa' or 'auto'",
        ) from error
    return None, why
