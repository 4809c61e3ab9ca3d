"""Losses with one number a row or a pair: preference learning, reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.batches import Preferences, Sequences
from flowrl.errors import BatchError, GraphError
from flowrl.nodes.loss import Current, Loss, Sums

if TYPE_CHECKING:
    from torch import Tensor


class RowLoss(Loss):
    """A loss with one number a row, and the mean over rows."""

    def row_losses(self, current: Current, **inputs: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """float ``[num_rows]``, and metrics of that shape, averaged over rows. ``constants`` is among the inputs where
        :meth:`prepare` gave any."""
        raise NotImplementedError

    def counted_rows(self, **inputs: Any) -> Tensor:
        """bool ``[num_rows]``: the rows that count; all unless a loss leaves some out."""
        import torch

        return torch.ones(_sequences(inputs).num_rows, dtype=torch.bool)

    def count(self, **inputs: Any) -> float | None:
        return float(self.counted_rows(**inputs).sum())

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        counted = self.counted_rows(**inputs)
        result = self.row_losses(current, **inputs, **_given(constants))
        return unit_sums(self, result, counted, current, "rows")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Where the pairs of some preferences stand.

    Args:
        chosen: int64 ``[num_pairs]``, rows.
        rejected: int64 ``[num_pairs]``, rows, pair by pair.
    """

    chosen: Tensor
    rejected: Tensor

    @classmethod
    def of(cls, preferences: Preferences) -> Pairs:
        """The pairs, by increasing ``pair_id``.

        Raises:
            BatchError: a pair that is not one chosen and one rejected row.
        """
        import torch

        ids, index, sizes = torch.unique(preferences.pair_id, return_inverse=True, return_counts=True)
        chosen = preferences.chosen.bool()
        likes = torch.zeros(len(ids), dtype=torch.int64).index_add(0, index, chosen.to(torch.int64))
        wrong = ((sizes != 2) | (likes != 1)).nonzero().flatten()
        if len(wrong):
            pair = int(wrong[0])
            raise BatchError(
                f"Pair {int(ids[pair])} is not a pair",
                expected="one chosen and one rejected row",
                received=f"{int(sizes[pair])} rows, {int(likes[pair])} of them chosen",
                do="give both answers of a pair one pair_id, and keep them together",
            )
        order = torch.argsort(index, stable=True)
        return cls(order[chosen[order]], order[~chosen[order]])

    @property
    def num_pairs(self) -> int:
        return len(self.chosen)


class PairLoss(Loss):
    """A loss with one number a pair of ``Preferences``, and the mean over pairs."""

    couples: ClassVar[str] = "pair"

    def pair_losses(self, current: Current, pairs: Pairs, **inputs: Any) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """float ``[num_pairs]``, and metrics of that shape, averaged over pairs. ``constants`` is among the inputs where
        :meth:`prepare` gave any."""
        raise NotImplementedError

    def count(self, **inputs: Any) -> float | None:
        return float(Pairs.of(_preferences(inputs)).num_pairs)

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        import torch

        pairs = Pairs.of(_preferences(inputs))
        result = self.pair_losses(current, pairs, **inputs, **_given(constants))
        return unit_sums(self, result, torch.ones(pairs.num_pairs, dtype=torch.bool), current, "pairs")


def unit_sums(loss: Loss, result: Any, counted: Tensor, current: Current, unit: str) -> Sums:
    """The sums over the units that count, of a loss and metrics ``[num_units]``.

    Raises:
        GraphError: a wrong shape, or a loss that trains nothing.
    """
    import torch

    losses, metrics = result if isinstance(result, tuple) else (result, {})
    for what, value in {"its result": losses, **{f"metric {n!r}": v for n, v in metrics.items()}}.items():
        if not isinstance(value, torch.Tensor) or value.shape != counted.shape:
            raise GraphError(
                f"The loss {loss.name}: {what} has the wrong shape",
                expected=f"a float tensor of shape [num_{unit}] = {list(counted.shape)}",
                received=f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__,
                do=f"return a number for each of the {unit}: flowrl divides once over the whole batch",
            )
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in current.tensors().values())
    if trains and not losses.requires_grad and bool(counted.any()):
        raise GraphError(
            f"The loss {loss.name} has no gradient",
            expected="losses that depend on what `current` gives",
            received="a tensor that does not require a gradient",
            do="leave out .detach() and torch.no_grad()",
        )
    number = counted.sum().to(torch.float64)

    def total(values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(counted, values, torch.zeros((), dtype=values.dtype)).sum(), number

    return {"loss": total(losses), **{name: total(values.detach()) for name, values in metrics.items()}}


def _given(constants: Any) -> Mapping[str, Any]:
    return {} if constants is None else {"constants": constants}


def _sequences(inputs: Mapping[str, Any]) -> Sequences:
    return next(v for v in inputs.values() if isinstance(v, Sequences))


def _preferences(inputs: Mapping[str, Any]) -> Preferences:
    return next(v for v in inputs.values() if isinstance(v, Preferences))
