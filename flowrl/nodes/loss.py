"""Loss terms: what an updater minimises. A term names its inputs and gives (sum, count) pairs; the runtime normalises once
over the whole optimiser batch, so that micro-batches and data parallelism cannot change a gradient.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Literal, ParamSpec

from flowrl.batches import Batch, OldLogprobs, Sequences
from flowrl.models import BaseModel
from flowrl.nodes.base import Node, node_from_function
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    import torch
    from torch import Tensor

P = ParamSpec("P")

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
#: By name, (sum, count). The objective is called "loss"; the rest are metrics and carry no gradient. A count of None says
#: that the sum over the optimiser batch is the number itself ("token-sum"): it is not divided.
Sums = dict[str, tuple["Tensor", "Tensor | None"]]


@dataclass(frozen=True, eq=False)
class Current:
    """What the Model being trained gives for the rows of one micro-batch.

    Args:
        logprobs: float32 ``[num_tokens]``, flat in response layout, with gradient; at the rollouts' temperature.
        entropy: float32 ``[num_tokens]`` with gradient, where a loss requires it.
        values: float32 ``[num_tokens]`` with gradient, where a loss requires it.
        loss_mask: uint8 ragged in response layout.
    """

    loss_mask: Ragged
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None

    def at_policy_tokens(self) -> Current:
        """The same with 0 selected where the policy wrote no token. A loss may then be NaN there: neither its value (selected
        away by the aggregation) nor its gradient (NaN × 0 is NaN, but this select passes back a plain 0) can get out."""
        import torch

        mask = self.loss_mask.values.bool()

        def selected(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.where(mask, values, torch.zeros((), dtype=values.dtype))

        return replace(
            self, logprobs=selected(self.logprobs), entropy=selected(self.entropy), values=selected(self.values)
        )

    def old(self, old_logprobs: OldLogprobs) -> Tensor:
        """float32 ``[num_tokens]``: the log-probs before the update; the current ones, detached, where the plan found them
        equal and left their computation out."""
        assert self.logprobs is not None
        return self.logprobs.detach() if old_logprobs.is_current else old_logprobs.old_logprobs.values


@dataclass(frozen=True, eq=False, repr=False)
class LossTerm(Batch):
    """A loss with its inputs: what the edge from a loss to its updater carries.

    Args:
        loss: the loss node.
        inputs: by argument name, batches with the same rows in the same order.
    """

    loss: Loss
    inputs: dict[str, Any]

    unit: ClassVar[str] = "samples"

    def __post_init__(self) -> None:  # rows were aligned when the loss was called
        return

    @property
    def sequences(self) -> Sequences:
        """The sequences that the loss is about."""
        return next(v for v in self.inputs.values() if isinstance(v, Sequences))

    @property
    def num_rows(self) -> int:
        return self.sequences.num_rows

    def select(self, index: torch.Tensor) -> LossTerm:
        return LossTerm(self.loss, {k: v.select(index) if isinstance(v, Batch) else v for k, v in self.inputs.items()})


@dataclass(frozen=True, eq=False)
class TermRows:
    """A loss term restricted to the rows of one optimiser step.

    Args:
        term: the loss and its inputs.
        constants: what ``loss.prepare`` made of the whole optimiser batch.
        count: the term's denominator over the whole optimiser batch (over all ranks); None: the sum is not divided.
    """

    term: LossTerm
    constants: Any
    count: float | None


class Loss(Node):
    """The base of every loss term. Most are token losses: see :class:`TokenLoss` and :func:`loss`.

    Args:
        weight: the factor of this term in the updater's objective.
    """

    weight: float = field(default=1.0, kw_only=True)

    kind: ClassVar[str] = "loss"
    split: ClassVar[Any] = "rows"
    #: What it reads from the Model being trained.
    requires: ClassVar[frozenset[str]] = frozenset({"logprobs"})
    #: What must stay together in one optimiser batch and one micro-batch: "row", "pair" or "group".
    couples: ClassVar[str] = "row"

    def term(self, **inputs: Any) -> LossTerm:
        """Bind the inputs: what ``__call__`` of a loss returns."""
        return LossTerm(self, {k: v for k, v in inputs.items() if v is not None})

    def head(self) -> BaseModel | None:
        """The ValueHead whose values it reads, where it reads values of a shared trunk."""
        return None

    def prepare(self, **inputs: Any) -> Any:
        """Constants from the detached columns of the whole optimiser batch; run once per optimiser step."""
        return None

    def count(self, **inputs: Any) -> float | None:
        """The denominator of the objective over these rows. It may not depend on the Model being trained; counts of disjoint
        row sets add up. None: the objective is a plain sum, divided by nothing."""
        raise NotImplementedError

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        """The objective "loss" and metrics over these rows, as (sum, count)."""
        raise NotImplementedError


class TokenLoss(Loss):
    """A loss with one number a response token.

    Args:
        aggregation: how token losses become one number; see :func:`flowrl.functional.aggregation.aggregate`.
        scale: the divisor of "seq-mean-token-sum-norm".
    """

    aggregation: Aggregation = field(default="token-mean", kw_only=True)
    scale: float = field(default=1.0, kw_only=True)

    def token_losses(self, current: Current, **inputs: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """float32 ``[num_tokens]`` in response layout, and metrics of the same shape that are averaged over policy tokens.
        Values outside of the loss mask do not matter, not even NaN."""
        raise NotImplementedError

    def count(self, **inputs: Any) -> float | None:
        from flowrl.functional.aggregation import aggregation_count

        sequences = next(v for v in inputs.values() if isinstance(v, Sequences))
        return aggregation_count(sequences.loss_mask, self.aggregation, scale=self.scale)

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        from flowrl.functional.aggregation import aggregate

        if constants is not None:
            inputs["constants"] = constants
        result = self.token_losses(current.at_policy_tokens(), **inputs)
        losses, metrics = result if isinstance(result, tuple) else (result, {})
        out: Sums = {"loss": aggregate(losses, current.loss_mask, self.aggregation, scale=self.scale)}
        for name, values in metrics.items():
            out[name] = aggregate(values.detach(), current.loss_mask, "token-mean")
        return out

    def problems(self) -> list[str]:
        known = Aggregation.__args__  # type: ignore[attr-defined]
        found = [] if self.aggregation in known else [f"aggregation is {self.aggregation!r}; expected one of {known}"]
        return found + ([] if self.scale > 0 else [f"scale is {self.scale}; expected more than 0"])


def loss(function: Callable[Concatenate[Current, P], Tensor]) -> Callable[P, LossTerm]:
    """Make a token loss of a function of the current policy, its inputs and settings.

    Example::

        @flowrl.loss
        def reinforce(current: Current, rollouts: Rollouts, advantages: Advantages, scale: float = 1.0) -> Tensor:
            return -scale * advantages.advantages.values * current.logprobs

        Updater(actor)(reinforce(rollouts, advantages))
    """
    return node_from_function(
        function,
        localns=sys._getframe(1).f_locals,
        options={"token_losses": _function_losses, "_function": staticmethod(function)},
        base=TokenLoss,
        run=lambda self, function, inputs, settings: self.term(**inputs),
        skip=1,
        returns=LossTerm,
    )


def _function_losses(self: Any, current: Current, **inputs: Any) -> Any:
    names = [n for n in inspect.signature(self._function).parameters if hasattr(self, n)]
    return self._function(current, **inputs, **{name: getattr(self, name) for name in names})
