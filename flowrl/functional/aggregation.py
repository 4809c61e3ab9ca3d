"""From one loss a token to one number: sums and counts, which the runtime divides once an optimiser batch.

| mode | value | count over a set of rows |
|---|---|---|
| token-mean | Σ / number of selected tokens | its selected tokens |
| token-sum | Σ | none: the sum is not divided |
| seq-mean-token-sum | mean over rows of the row's sum | its rows |
| seq-mean-token-mean | mean over rows of the row's mean | its rows |
| seq-mean-token-sum-norm | mean over rows of the row's sum, divided by ``scale`` | its rows × scale |

Rows without a selected token (the policy wrote none, or all were rejected) count for nothing. Counts of disjoint
sets of rows add up, so neither micro-batches nor ranks change a gradient; that is also why token-sum has no
count: no number that adds up over parts is always 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import FlowError, nearest
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def aggregate(losses: Tensor, mask: Ragged, mode: str, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """The sum and the count of token losses over these rows; their quotient over all rows is the loss.

    Args:
        losses: float ``[num_tokens]``, flat in response layout; what is not selected may be anything, NaN
            too.
        mask: uint8 or bool ragged in response layout.
        mode: one of the five above.
        scale: the divisor of "seq-mean-token-sum-norm".

    Returns:
        The sum: a scalar of the dtype of ``losses`` (at least float32), with gradient; 0 for no rows. The
        count: a float64 scalar, or None for "token-sum".

    Raises:
        FlowError: an unknown mode.
    """
    import torch

    if losses.dtype in (torch.bfloat16, torch.float16):
        losses = losses.float()
    device = losses.device
    selected = torch.where(mask.values.bool().to(device), losses, torch.zeros((), dtype=losses.dtype, device=device))
    if mode == "seq-mean-token-mean":
        tokens = tokens_per_row(mask).clamp(min=1)
        selected = selected / tokens[mask.row_of_value].to(selected)
    count = aggregation_count(mask, mode, scale)
    return selected.sum(), None if count is None else torch.tensor(count, dtype=torch.float64, device=device)


def aggregation_count(mask: Ragged, mode: str, scale: float = 1.0) -> float | None:
    """The count that :func:`aggregate` gives for these rows; None: the sum is not divided."""
    if mode == "token-mean":
        return float(mask.values.bool().sum())
    if mode == "token-sum":
        return None
    if mode in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        rows = float((tokens_per_row(mask) > 0).sum())
        return rows * scale if mode == "seq-mean-token-sum-norm" else rows
    raise FlowError(
        f"There is no aggregation {mode!r}",
        expected=f"one of {', '.join(AGGREGATIONS)}",
        received=repr(mode),
        do=nearest(mode, AGGREGATIONS),
    )


def tokens_per_row(mask: Ragged) -> Tensor:
    """int64 ``[num_rows]``: selected tokens of each row of a uint8 or bool ragged mask."""
    import torch

    return mask.with_values(mask.values.bool().to(torch.int64)).sum_rows()


def row_means(values: Tensor, mask: Ragged) -> Tensor:
    """The mean of each row over its selected tokens; 0 for a row without one. Summed in float64, in the order of the
    tokens, so that neither the row's place nor its neighbours change a bit of it.

    Args:
        values: float ``[num_tokens]`` in response layout, with gradient where it is wanted; what is not selected may
            be anything, NaN too.
        mask: uint8 or bool ragged in response layout.

    Returns:
        ``[num_rows]`` of the dtype of ``values``.
    """
    import torch

    zero = torch.zeros((), dtype=values.dtype)
    selected = torch.where(mask.values.bool(), values, zero).to(torch.float64)
    sums = mask.with_values(selected).sum_rows()
    return (sums / tokens_per_row(mask).clamp(min=1)).to(values.dtype)
