"""Controllers of the KL coefficient as pure functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from flowrl.errors import FlowError
from flowrl.functional.kl import kl_estimate
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

#: How far one update goes at most: the relative error is cut to ±0.2.
MAX_ERROR = 0.2


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: float, num_rows: int) -> float:
    """The coefficient after a batch (Ziegler et al., arXiv 1909.08593, section 2.2).

    error = clip(``kl``/``target`` − 1, −0.2, 0.2), coefficient ← coefficient · (1 + error ·
    ``num_rows``/``horizon``). The paper's K_β is ``num_rows``/``horizon``.

    Args:
        coef: the coefficient that the batch was penalised with.
        kl: KL of the policy from the reference, measured over the batch, in the unit of ``target``.
        target: the KL that is wanted.
        horizon: in responses: after so many, at the largest error, the coefficient has changed by about a fifth.
        num_rows: responses in the batch.

    Returns:
        The new coefficient. The same for a batch without rows, and where the KL is NaN: nothing was measured.

    Raises:
        FlowError: ``num_rows`` is 5 times ``horizon`` or more, where one update could make the coefficient 0 or
            negative.
    """
    if num_rows == 0 or math.isnan(kl):
        return coef
    if MAX_ERROR * num_rows >= horizon:
        raise FlowError(
            "The KL coefficient would change by more than its own size in one update",
            expected=f"a horizon of more than {MAX_ERROR * num_rows:g} responses for batches of {num_rows}",
            received=f"horizon={horizon:g}",
            do="raise horizon; it counts responses, not updates",
        )
    error = min(MAX_ERROR, max(-MAX_ERROR, kl / target - 1))
    return coef * (1 + error * num_rows / horizon)


def measured_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Ragged,
    *,
    estimator: str = "k1",
    per: Literal["token", "sequence"] = "token",
) -> float | None:
    """The KL of the policy from the reference over a batch.

    Args:
        logprobs: float ``[num_tokens]``, response layout.
        ref_logprobs: float ``[num_tokens]``.
        loss_mask: uint8 ragged; what it leaves out counts nowhere, not even NaN.
        estimator: see :func:`flowrl.functional.kl.kl_estimate`.
        per: "token": the mean over policy tokens; "sequence": the mean over responses of the sum over their policy
            tokens (a response without any counts as 0).

    Returns:
        In nats. None where there is no policy token. It does not depend on the order of rows, bit for bit.
    """
    import torch

    mask = loss_mask.values.bool()
    tokens = int(mask.sum())
    if not tokens:
        return None
    kl = kl_estimate(logprobs.detach().to(torch.float64), ref_logprobs.detach().to(torch.float64), estimator)
    rows = loss_mask.with_values(kl).sum_rows(where=loss_mask)
    number = tokens if per == "token" else loss_mask.num_rows
    if not bool(rows.isfinite().all()):
        return float(rows.sum() / number)  # fsum refuses what has no exact sum
    return math.fsum(rows.tolist()) / number
