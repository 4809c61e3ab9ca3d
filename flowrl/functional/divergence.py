"""Divergences of two distributions over the vocabulary, token by token: exact, where :mod:`flowrl.functional.kl`
estimates from the sampled token alone.

π is the policy (the student), q the other one (a reference, a teacher). All functions are differentiable in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest

if TYPE_CHECKING:
    from torch import Tensor

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def divergence(logprobs: Tensor, other: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """How far π is from q at each position.

    * ``reverse_kl``: KL(π ‖ q) = Σ π (log π − log q): the penalty of RLHF; of a student it seeks one mode of its
      teacher (MiniLLM, arXiv 2306.08543).
    * ``forward_kl``: KL(q ‖ π) = Σ q (log q − log π): covers all modes of the teacher.
    * ``jsd``: β·KL(q ‖ m) + (1−β)·KL(π ‖ m) with m = β·q + (1−β)·π: the generalised Jensen–Shannon divergence of
      on-policy distillation (Agarwal et al., arXiv 2306.13649, eq. 1).

    Args:
        logprobs: float ``[positions, vocab]``: log π, normalised.
        other: float ``[positions, vocab]``: log q, normalised.
        kind: one of the three.
        beta: 0 < β < 1, of ``jsd``.

    Returns:
        float ``[positions]``, at least 0 up to rounding. A token of probability 0 under the first distribution of a KL
        adds 0. One that q gives no mass and π does makes ``reverse_kl`` infinite, which is what it is.

    Raises:
        FlowError: an unknown kind.
    """
    import torch

    if kind == "reverse_kl":
        return _kl(logprobs, other)
    if kind == "forward_kl":
        return _kl(other, logprobs)
    if kind == "jsd":
        weights = torch.tensor([beta, 1 - beta], dtype=logprobs.dtype, device=logprobs.device).log()
        mixture = torch.logaddexp(other + weights[0], logprobs + weights[1])
        return beta * _kl(other, mixture) + (1 - beta) * _kl(logprobs, mixture)
    raise FlowError(
        f"There is no divergence {kind!r}",
        expected=f"one of {', '.join(DIVERGENCES)}",
        received=repr(kind),
        do=nearest(kind, DIVERGENCES),
    )


def top_k_divergence(candidates: Tensor, other: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """The same over k tokens of each position and the rest of the vocabulary taken together as one more.

    Merging tokens never makes a divergence larger (data processing), so this is a lower bound of
    :func:`divergence`, and equal to it where k is the vocabulary.

    Args:
        candidates: float ``[positions, k]``: log π of some tokens.
        other: float ``[positions, k]``: log q of the same tokens.

    Returns:
        float ``[positions]``.
    """
    return divergence(_with_rest(candidates), _with_rest(other), kind, beta)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    import torch

    probabilities = p.exp()
    positive = probabilities > 0
    # Both arms must be finite where p is 0, or their gradients would be NaN there.
    difference = torch.where(positive, p, 0.0) - torch.where(positive, q, 0.0)
    return torch.where(positive, probabilities * difference, 0.0).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """``[positions, k + 1]``: the log-prob of all other tokens beside those of k."""
    import torch

    # 1 − Σ rounds to 0 or below where the k tokens hold all the mass; the floor keeps its logarithm finite.
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, rest.log()], dim=-1)
