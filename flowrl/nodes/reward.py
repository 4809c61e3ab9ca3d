"""Reward nodes: a user's function, a reward model, a KL penalty, and their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl import context
from flowrl.batches import OldLogprobs, RefLogprobs, Rewards, Rollouts, Sequences
from flowrl.errors import BatchError, GraphError, RewardError, nearest
from flowrl.models import AnyModel
from flowrl.nodes.advantage import kl_penalty
from flowrl.nodes.base import Join, Node
from flowrl.nodes.policy_losses import kl_problems
from flowrl.nodes.reward_function import Parameters, RewardCall, RowResult, read_rows
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.runtime.isolation import IsolatedPool, Outcome


def rewards_like(rollouts: Sequences, **components: Any) -> Rewards:
    """Rewards for the rows of ``rollouts``, each component a number a row, or ragged with a number a response token.

    A number that is not finite makes its row invalid, with the reason.

    Example::

        return rewards_like(rollouts, length=-0.01 * rollouts.response_lengths)
    """
    import torch

    rows: dict[str, Tensor] = {}
    tokens: dict[str, Ragged] = {}
    reasons = [""] * rollouts.num_rows
    for name, column in components.items():
        if isinstance(column, Ragged):
            bad = column.with_values((~column.values.isfinite()).to(torch.int64)).sum_rows() > 0
            tokens[name] = column.with_values(column.values.to(torch.float32))
        else:
            rows[name] = torch.as_tensor(column, dtype=torch.float32).detach().reshape(-1)
            bad = ~rows[name].isfinite()
        if len(bad) != rollouts.num_rows:
            raise BatchError(
                f"Reward component {name!r} has the wrong number of rows",
                expected=rollouts.num_rows,
                received=len(bad),
            )
        for row in bad.nonzero().flatten().tolist():
            reasons[row] = reasons[row] or f"component {name!r} is not finite"
    valid = torch.tensor([not r for r in reasons], dtype=torch.uint8)
    return Rewards(rollouts.prompt_id, rollouts.sample_id, rows, valid, tuple(reasons), tokens)


class FunctionReward(Node):
    """A reward that a Python function gives, in a process of its own, with a deadline a row.

    The function's parameters are filled **by name**: ``response`` (text), ``prompt`` (the text of the prompt, or of its last
    user message), ``messages``, ``finish_reason`` ("stop", "length" or "aborted"), ``num_tokens`` (of the response), and any
    column of the data set. A function of one parameter with another name gets the response. It returns a number (or a bool),
    or a dict of named components. Anything else (None, a string, NaN, infinity, an exception, no answer in time, the death
    of the process) makes the row **invalid**, with the reason: never 0.

    Args:
        fn: the function; closures, lambdas and functions of a notebook or script are fine.
        name: of the component where the function returns a plain number; by default the function's own name.
        timeout: seconds for a call: of one row, or of the batch when ``batched``.
        batched: call once with lists (a value a row) and take a list; parameter names may then be plural (``responses``).
        isolate: run in a process of its own. Without it there is no deadline, and a crash is the run's.
        num_workers: processes over which rows are spread.
        max_invalid_fraction: more invalid rows than this in one call stop the run.

    Reports ``invalid_rows`` and the mean of each component over valid rows.

    Raises:
        RewardError: more than ``max_invalid_fraction`` of the rows are invalid.
        DataError: a parameter is neither known nor a column of the data set.

    Example::

        def correct(response: str, answer: str) -> float:
            return float(response.strip() == answer)

        rewards = FunctionReward(correct, timeout=5.0)(rollouts)
    """

    fn: Callable[..., Any]
    name_of_component: str | None = field(default=None, kw_only=True)
"""
