"""A loss measured: its sums, and its gradients with respect to everything that a Model gives it, for rows in any order
and in any parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.batches import Sequences
from flowrl.context import Bindings
from flowrl.errors import FlowError
from flowrl.nodes.loss import Current, LossTerm, TokenLoss
from flowrl.ragged import Ragged
from flowrl.testing.columns import base_logprobs
from flowrl.testing.inputs import Draw

if TYPE_CHECKING:
    from torch import Tensor

#: By field of ``Current``, what the Model gives for the rows of a term.
Leaves = dict[str, "Tensor"]


@dataclass(frozen=True)
class Measured:
    """What came out.

    Args:
        sums: by name (sum, count) over all parts; a count of None is a sum that is not divided.
        sizes: by name, the sum of the absolute values of the parts' sums: what rounding errors are compared with.
        gradients: by leaf, of the objective, in the order of the rows of the term that was asked about first.
        count: as ``loss.count`` says of all rows.
        counts: as it says of each part.
    """

    sums: dict[str, tuple[float, float | None]]
    sizes: dict[str, float]
    gradients: Leaves
    count: float | None
    counts: list[float | None]

    @property
    def value(self) -> float:
        """The objective."""
        return self.sums["loss"][0] / (self.count or 1.0)


@dataclass(frozen=True)
class LeafScorer:
    """Answers :meth:`flowrl.nodes.loss.Loss.prepare` with the leaf's own log-probs; of sequences that are not the term's,
    with numbers that depend on the row alone.

    Args:
        term: the term that the leaf belongs to.
        logprobs_: the leaf; None where the loss does not read log-probs.
    """

    term: LossTerm
    logprobs_: Tensor | None

    def logprobs(self, sequences: Sequences) -> Tensor:
        """float32 ``[num_tokens]``, detached."""
        import torch

        own = self.term.sequences
        if self.logprobs_ is None or not _same_tokens(sequences, own):
            near = base_logprobs(sequences)
            return torch.where(sequences.loss_mask.values.bool(), near, torch.nan)
        place = {ids: row for row, ids in enumerate(_ids(own))}
        rows = [place[ids] for ids in _ids(sequences)]
        leaf = own.loss_mask.with_values(self.logprobs_.detach().float())
        return leaf.select(torch.tensor(rows, dtype=torch.int64)).values


def _same_tokens(some: Sequences, all_: Sequences) -> bool:
    """Whether these are rows of those."""

    def rows(sequences: Sequences) -> set[tuple[int, ...]]:
        return {(*ids, *row) for ids, row in zip(_ids(sequences), sequences.tokens.to_lists(), strict=True)}

    return rows(some) <= rows(all_)


def _ids(sequences: Sequences) -> list[tuple[int, int]]:
    return list(zip(sequences.prompt_id.tolist(), sequences.sample_id.tolist(), strict=True))


def make_leaves(term: LossTerm, draw: Draw) -> Leaves:
    """What a Model may give for the rows of a term: what its loss requires, near what the inputs say."""
    import torch

    loss, generator = term.loss, draw.generator("leaves")
    tokens, rows = len(term.sequences.loss_mask.values), term.num_rows
    dtype = torch.float64 if draw.double else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found: Leaves = {}
    if loss.requires & {"logprobs", "entropy"}:
        found["logprobs"] = (base_logprobs(term.sequences) + 0.3 * normal(tokens)).clamp(max=-1e-3)
    if "entropy" in loss.requires:
        found["entropy"] = normal(tokens).abs()
    if "values" in loss.requires:
        found["values"] = normal(tokens)
    if loss.divergence() is not None:
        found["divergence"] = normal(tokens).abs()
    candidates = loss.candidates(**term.inputs)
    if candidates is not None:
        found["candidates"] = normal(tokens, candidates.shape[1] + 1).log_softmax(1)[:, :-1]
    if "scores" in loss.requires:
        found["scores"] = normal(rows)
    return {name: values.to(dtype).requires_grad_() for name, values in found.items()}


def measure(
    term: LossTerm, leaves: Leaves, parts: Sequence[Sequence[int]] | None = None, order: Sequence[int] | None = None
) -> Measured:
    """Run a loss over all rows of a term: constants once, then part by part.

    Args:
        parts: the rows of each micro-batch; None for one.
        order: the rows in another order, before anything is computed.

    Raises:
        FlowError: the loss gives no objective.
    """
    import torch

    asked = leaves
    if order is not None:
        leaves = reordered(leaves, order, term.sequences.loss_mask)
        term = term.select(list(order))
    loss = term.loss
    constants = loss.prepare(LeafScorer(term, leaves.get("logprobs")), **term.inputs)
    count = loss.count(**term.inputs)
    sums: dict[str, tuple[float, float | None]] = {}
    sizes: dict[str, float] = {}
    objective: Tensor = torch.zeros((), dtype=torch.float64)
    layout = term.sequences.loss_mask
    counts: list[float | None] = []
    for rows in [None] if parts is None else parts:
        part = term if rows is None else term.select(list(rows))
        counts.append(loss.count(**part.inputs))
        result = sums_of(part, leaves if rows is None else reordered(leaves, rows, layout), constants)
        for name, (total, number) in result.items():
            before, so_far = sums.get(name, (0.0, 0.0))
            added = None if number is None or so_far is None else so_far + float(number)
            total = float(total.detach() if hasattr(total, "detach") else total)
            sums[name] = (before + total, added)
            sizes[name] = sizes.get(name, 0.0) + abs(total)
        objective = objective + result["loss"][0].double() / (count or 1.0)
    found: Sequence[Tensor | None] = [None] * len(asked)
    if objective.requires_grad and asked:
        found = torch.autograd.grad(objective, list(asked.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(asked.items(), found, strict=True)
    }
    return Measured(sums, sizes, gradients, count, counts)


def sums_of(term: LossTerm, leaves: Leaves, constants: Any) -> Mapping[str, Any]:
    """What the loss gives for a term in one piece, differentiable.

    Raises:
        FlowError: there is no "loss" in it.
    """
    result = term.loss.sums(Current(term.sequences.loss_mask, **leaves), constants, **term.inputs)
    if "loss" not in result:
        raise FlowError(
            f"{term.loss.name}.sums gives no objective",
            expected="a pair (sum, count) named 'loss'",
            received=sorted(result),
        )
    return result


def reordered(leaves: Leaves, rows: Sequence[int], layout: Ragged) -> Leaves:
    """The leaves of some rows, in their order, with gradient.

    Args:
        layout: ragged in response layout, of all rows.
    """
    import torch

    index = torch.tensor(list(rows), dtype=torch.int64)
    tokens = layout.with_values(torch.arange(len(layout.values))).select(index).values
    return {name: leaf[tokens if name in Current.OF_TOKENS else index] for name, leaf in leaves.items()}


def counted_tokens(term: LossTerm) -> Tensor:
    """bool ``[num_tokens]``: the tokens of a term's sequences that count."""
    import torch

    mask = term.sequences.loss_mask
    if isinstance(term.loss, TokenLoss):
        mask = term.loss.mask(**term.inputs)
    selected = mask.values.bool()
    rows = counted_rows(term)
    return selected if rows is None else torch.where(rows[mask.row_of_value], selected, False)


def counted_rows(term: LossTerm) -> Tensor | None:
    """bool ``[num_rows]``: the rows that count, where the loss says."""
    counted = getattr(term.loss, "counted_rows", None)
    return None if counted is None else counted(**term.inputs)


def relative(a: Tensor, b: Tensor) -> float:
    """|a − b| / |b|, L2; NaN and inf stay what they are."""
    difference, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


def no_engines() -> Bindings:
    """Bindings of their own for what holds a State; nothing here may ask for an engine."""

    def refuse(model: Any, bindings: Bindings) -> Any:
        raise FlowError(
            f"flowrl.testing holds no engine of {model!r}",
            expected="a loss or an advantage that computes from its inputs alone",
            received="a node that asks its Model while the laws are tried",
            do="let another node score, and take its batch as an input; or give inputs=",
        )

    return Bindings(refuse)


def under_test() -> context.StepContext:
    """The step in which laws are tried: always the same, so that what is drawn is the same."""
    return context.StepContext(seed=7, iteration=3, label="law")
