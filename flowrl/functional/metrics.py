"""Metrics as pure functions: pass@k, effective sample size, statistics of lengths, entropy of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError

if TYPE_CHECKING:
    from torch import Tensor


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """The unbiased estimate of the chance that one of k samples is right: 1 − C(n−c, k) / C(n, k) (Chen et
    al., arXiv 2107.03374).

    Args:
        num_samples: int64 ``[num_prompts]``, n, at least k each.
        num_correct: int64 ``[num_prompts]``, c.
        k: at least 1.

    Returns:
        float64 ``[num_prompts]``; its mean is pass@k.

    Raises:
        FlowError: k below 1, a prompt with fewer than k samples, or c outside of 0 … n.
    """
    import torch

    if k < 1 or bool((num_samples < k).any()):
        raise FlowError(
            "pass@k needs k samples of every prompt",
            expected=f"k of at least 1, and at least k={k} samples",
            received=f"{int(num_samples.min()) if len(num_samples) else 0} samples of some prompt",
            do="lower k, or raise group_size",
        )
    if bool(((num_correct < 0) | (num_correct > num_samples)).any()):
        raise FlowError("pass@k got impossible counts", expected="0 <= num_correct <= num_samples")
    # C(n−c, k) / C(n, k) is the product over i < k of (n − c − i) / (n − i); it is 0 where n − c < k.
    steps = torch.arange(k, dtype=torch.float64)
    n, c = num_samples.to(torch.float64)[:, None], num_correct.to(torch.float64)[:, None]
    return 1 - ((n - c - steps).clamp(min=0) / (n - steps)).prod(dim=1)


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)² / Σw², as a fraction of the number of weights: 1 where all are equal, 1/n where one counts alone
    (Kish).

    Args:
        weights: non-negative float ``[n]``.

    Returns:
        In [0, 1]; 0 for no weights, and where all are 0.
    """
    import torch

    weights = weights.to(torch.float64)
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / (squares * len(weights)) if squares > 0 else 0.0


def length_stats(lengths: Tensor) -> dict[str, float]:
    """Mean, min, median, 95th percentile and max of int ``lengths`` ``[num_rows]``; empty for no rows."""
    import torch

    if not len(lengths):
        return {}
    values = lengths.to(torch.float64)
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        "median": float(values.quantile(0.5)),
        "p95": float(values.quantile(0.95)),
        "max": float(values.max()),
    }


def sampled_entropy(logprobs: Tensor, mask: Tensor) -> float:
    """An estimate in nats of the policy's mean entropy a token, from the log-probs of the tokens that it
    sampled: −mean log π. Unbiased for tokens drawn from π itself; 0 where nothing is selected.

    Args:
        logprobs: float ``[num_tokens]``.
        mask: bool ``[num_tokens]``.
    """
    from flowrl.functional.masking import masked_mean

    return -float(masked_mean(logprobs, mask))
