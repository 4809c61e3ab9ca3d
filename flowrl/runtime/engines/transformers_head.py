"""Log-probs of given tokens from hidden states, a slice of positions at a time.

With a vocabulary of a hundred thousand the logits dwarf everything else, so they exist for one slice only: the gradient
is written by hand and either keeps a small batch's logits or computes them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Positions whose logits exist at once.
SLICE = 512
#: Logits of a batch that are kept for the backward pass rather than computed twice, in bytes.
KEEP_BYTES = 512 * 2**20


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the output of its head: ``softcap * tanh(scale * x / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """In place on float32 ``raw``."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw


@dataclass(frozen=True)
class HeadSettings:
    """What is the same for all positions: ``dtype`` of the matrix products, and the temperature of the softmax."""

    transform: LogitTransform
    dtype: torch.dtype
    temperature: float
    entropy: bool
    keep: bool


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: LogitTransform,
    dtype: torch.dtype,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` under ``softmax(logits / temperature)``, and the entropy of that distribution.

    Args:
        hidden: ``[num_positions, hidden]``.
        weight: ``[vocab, hidden]``.
        bias: ``[vocab]``.
        targets: int64 ``[num_positions]``.
        dtype: of the matrix products; everything after them is float32.

    Returns:
        float32 ``[num_positions]`` each.
    """
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = trains and 4 * len(targets) * len(weight) <= KEEP_BYTES
    settings = HeadSettings(transform, dtype, temperature, entropy, keep)
    logprobs, entropies = _HeadLogprobs.apply(hidden, weight, bias, targets, settings)  # type: ignore[misc]
    return logprobs, entropies if entropy else None


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The same from logits ``[num_positions, vocab]`` that a model computed itself."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropies = entropy_of(logprobs) if entropy else None
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings) -> Tensor:
    """float32 ``[positions, vocab]`` of one slice, divided by the temperature."""
    logits = settings.transform(F.linear(hidden.to(settings.dtype), weight, bias).float())
    return logits.div_(settings.temperature) if settings.temperature != 1.0 else logits


class _HeadLogprobs(torch.autograd.Function):
    """Both directions make few passes over ``[positions, vocab]``: on a CPU they are what is slow."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor]:
        softcapped = settings.transform.softcap is not None
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(settings.dtype)
            cast_bias = None if bias is None else bias.to(settings.dtype)
            logprobs = torch.empty(len(targets), device=hidden.device)
            entropies = torch.zeros(len(targets), device=hidden.device)
            kept: list[tuple[Tensor, Tensor | None]] = []
            for start in range(0, len(targets), SLICE):
                part = slice(start, start + SLICE)
                logits = _logits(hidden[part], cast_weight, cast_bias, settings)
                all_logprobs = torch.log_softmax(logits, dim=-1)
                logprobs[part] = all_logprobs.gather(1, targets[part, None])[:, 0]
                if settings.entropy:
                    entropies[part] = entropy_of(all_logprobs)
                if settings.keep:
                    kept.append((all_logprobs, logits if softcapped else None))
        ctx.save_for_backward(hidden, weight, targets, entropies)
        ctx.bias, ctx.settings, ctx.kept = bias, settings, kept
        if not settings.entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, entropies = ctx.saved_tensors
        bias: Tensor | None = ctx.bias
        settings: HeadSettings = ctx.settings
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        cast_weight = weight.to(settings.dtype)
        cast_bias = None if bias is None else bias.to(settings.dtype)
        grad_hidden = torch.zeros_like(hidden) if want_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = None if bias is None or not want_bias else torch.zeros_like(bias, dtype=torch.float32)
        for index, start in enumerate(range(0, len(targets), SLICE)):
            stop = min(start + SLICE, len(targets))
            # Positions without a gradient (masked, or of advantage 0) cost nothing. NaN counts as one: it is not 0.
            live = grad_logprobs[start:stop] != 0
            if settings.entropy:
                live = live | (grad_entropies[start:stop] != 0)
            live = live.nonzero()[:, 0]
            if not len(live):
                continue
            places = live + start
            part = hidden[places]
            if settings.keep:
                all_logprobs, logits = (x if x is None else x[live] for x in ctx.kept[index])
                assert all_logprobs is not None
            else:
                logits = _logits(part, cast_weight, cast_bias, settings)
                all_logprobs = torch.log_softmax(logits, dim=-1)
            grad = _grad_logits(
                all_logprobs,
                logits,
                targets[places],
                grad_logprobs[places],
                (grad_entropies[places], entropies[places]) if settings.entropy else None,
                settings,
            ).to(settings.dtype)
            if grad_hidden is not None:
                grad_hidden[places] = (grad @ cast_weight).to(grad_hidden.dtype)
            if want_weight:
                part = part.to(settings.dtype)
                if grad_weight is None:
                    grad_weight = (grad.t() @ part).float()
                elif settings.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), part)
                else:
                    grad_weight += grad.t() @ part
            if grad_bias is not None:
                grad_bias += grad.float().sum(0)
        if want_weight and grad_weight is None:  # ranks must agree on which parameters have a gradient
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _grad_logits(
    logprobs: Tensor,
    logits: Tensor | None,
    targets: Tensor,
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    settings: HeadSettings,
) -> Tensor:
    """Gradient with respect to the head's raw output, float32 ``[positions, vocab]``.

    With p the softmax of the scaled logits z: d logprob / dz = onehot - p, and d entropy / dz = -p (log p + entropy).
    """
    grad = logprobs.exp()
    if entropy is None:
        grad.mul_(-grad_logprobs[:, None])
    else:
        grad_entropies, entropies = entropy
        spread = (logprobs + entropies[:, None]).mul_(grad_entropies[:, None]).add_(grad_logprobs[:, None])
        grad = torch.where(grad > 0, -grad * spread, 0.0)  # where p is 0 its logarithm may be infinite
    grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    if settings.temperature != 1.0:
        grad.div_(settings.temperature)
    softcap = settings.transform.softcap
    if softcap is not None:
        assert logits is not None
        grad.mul_(1 - (logits * (settings.temperature / softcap)).square_())
    if settings.transform.scale != 1.0:
        grad.mul_(settings.transform.scale)
    return grad


def entropy_of(logprobs: Tensor) -> Tensor:
    """``[positions]`` from ``[positions, vocab]``; a token of probability 0 adds 0, also where its log-prob is -inf."""
    probabilities = logprobs.exp()
    return -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum(-1)
