"""Loss terms: what an updater minimises. A term names its inputs and gives (sum, count) pairs; the runtime normalises
once over the whole optimiser batch, so that micro-batches and data parallelism cannot change a gradient.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, Self, get_args, overload

from flowrl.annotations import edge_types, is_edge_annotation, resolve_hints
from flowrl.batches import Advantages, Batch, ImportanceWeights, OldLogprobs, RefLogprobs, Sequences, Values
from flowrl.columns import check_lengths, select_rows
from flowrl.errors import GraphError
from flowrl.graph import user_location
from flowrl.models import AnyModel, BaseModel, State
from flowrl.nodes.base import Join, Node
from flowrl.nodes.function import NodeFunction, call_function, node_from_function
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
#: Of a batch with a number a token, the column in response layout.
_TOKEN_COLUMN: dict[type, str] = {
    OldLogprobs: "old_logprobs",
    RefLogprobs: "ref_logprobs",
    Values: "values",
    Advantages: "advantages",
    ImportanceWeights: "weights",
}


def owner_of(column: str, sequences: tuple[str, ...]) -> str:
    """The argument that a column stands beside: the sequences whose name it begins with (``mismatched_ref`` belongs to
    ``mismatched``), else the first."""
    named = [name for name in sequences if column.startswith(f"{name}_")]
    return max(named, key=len) if named else sequences[0]


#: By name, (sum, count). The objective is called "loss"; the rest are metrics and carry no gradient. A count of None
#: says that the sum over the optimiser batch is the number itself ("token-sum"): it is not divided.
Sums = dict[str, tuple["Tensor", "Tensor | None"]]


class Scorer(Protocol):
    """The Model being trained, as :meth:`Loss.prepare` may ask it: without gradient, before the optimiser step."""

    def logprobs(self, sequences: Sequences) -> Tensor:
        """float32 ``[num_tokens]``, flat in response layout: log-probs of the responses, at their temperature."""
        ...


@dataclass(frozen=True)
class Divergence:
    """How far the Model being trained is from another one, over the whole vocabulary; see
    :mod:`flowrl.functional.divergence`.

    Args:
        model: the other one (a reference, a teacher). It has the same vocabulary.
        kind: one of ``flowrl.functional.divergence.DIVERGENCES``.
        beta: the weight of the teacher in the mixture of "jsd".
    """

    model: AnyModel
    kind: str = "reverse_kl"
    beta: float = 0.5


@dataclass(frozen=True, eq=False)
class Current:
    """What the Model being trained gives for the rows of one micro-batch.

    Args:
        logprobs: float32 ``[num_tokens]``, flat in response layout, with gradient; at the rollouts' temperature.
        entropy: float32 ``[num_tokens]`` with gradient, where a loss requires it.
        values: float32 ``[num_tokens]`` with gradient, where a loss requires it.
        loss_mask: uint8 ragged in response layout: the tokens that count.
        scores: float32 ``[num_rows]`` with gradient: what a reward model gives each whole sequence, where a loss
            requires it.
        divergence: float32 ``[num_tokens]`` with gradient, where a loss has a :meth:`Loss.divergence`.
        candidates: float32 ``[num_tokens, k]`` with gradient: log-probs of the tokens of :meth:`Loss.candidates`.
    """

    loss_mask: Ragged
    # None where no loss requires it, which a loss that requires it need not ask about: so they are typed as tensors.
    logprobs: Tensor = None  # type: ignore[assignment]
    entropy: Tensor = None  # type: ignore[assignment]
    values: Tensor = None  # type: ignore[assignment]
    scores: Tensor = None  # type: ignore[assignment]
    divergence: Tensor = None  # type: ignore[assignment]
    candidates: Tensor = None  # type: ignore[assignment]

    #: The columns with a value (or a row of them) a token.
    OF_TOKENS: ClassVar[tuple[str, ...]] = ("logprobs", "entropy", "values", "divergence", "candidates")

    def tensors(self) -> dict[str, Tensor]:
        """By field, what there is."""
        names = (*self.OF_TOKENS, "scores")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def at_policy_tokens(self) -> Current:
        """The same with 0 selected where no token counts. A loss may then be NaN there: neither its value
        (selected away by the aggregation) nor its gradient (NaN × 0 is NaN, but this select passes back a plain 0)
        can get out."""
        import torch

        mask = self.loss_mask.values.bool()

        def selected(values: Tensor) -> Tensor:
            where = mask.reshape(-1, *[1] * (values.ndim - 1))
            return torch.where(where, values, torch.zeros((), dtype=values.dtype))

        of_tokens = {name: selected(v) for name, v in self.tensors().items() if name in self.OF_TOKENS}
        return replace(self, **of_tokens)

    def sequence_logprobs(self) -> Tensor:
        """float ``[num_rows]`` with gradient: the sum of the log-probs of each row's tokens that count; 0 for none."""
        selected = self.at_policy_tokens().logprobs
        return self.loss_mask.with_values(selected).sum_rows()

    def select(self, rows: Sequence[int]) -> Current:
        """The same for some rows, detached."""
        import torch

        index = torch.as_tensor(rows, dtype=torch.int64)
        tokens = self.loss_mask.with_values(torch.arange(len(self.loss_mask.values))).select(index).values
        cut = {name: v.detach()[tokens if name in self.OF_TOKENS else index] for name, v in self.tensors().items()}
        return replace(self, loss_mask=self.loss_mask.select(index), **cut)

    def old(self, old_logprobs: OldLogprobs) -> Tensor:
        """float32 ``[num_tokens]``: the log-probs before the update; the current ones, detached, where the plan left
        their computation out, because they are equal."""
        return self.filled(old_logprobs).old_logprobs.values

    def filled(self, value: Any) -> Any:
        """An input of a loss; old log-probs that the plan left out are filled in with the current ones, detached."""
        if not (isinstance(value, OldLogprobs) and value.is_current):
            return value
        assert self.logprobs is not None
        return replace(
            value, old_logprobs=value.old_logprobs.with_values(self.logprobs.detach().float()), is_current=False
        )


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

    def select(self, index: Tensor | Sequence[int]) -> LossTerm:
        """The same loss on the rows of int64 ``index`` ``[k]``, in its order."""
        return LossTerm(self.loss, {k: select_rows(v, index) for k, v in self.inputs.items()})


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
    #: Settings with which ``flowrl.testing`` tries the class: one entry for each setting that changes the formula.
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    @classmethod
    def check_class(cls) -> None:
        inputs = [t for port in cls.ports for t in edge_types(port.annotation)[0]]
        if cls.ports and not any(issubclass(t, Sequences) for t in inputs):
            raise GraphError(
                f"Loss {cls.__name__} has no sequences to train on",
                expected="an input that is Rollouts, Demonstrations, Preferences or another kind of Sequences",
                received=", ".join(map(str, cls.ports)),
                where=user_location(),
            )

    def term(self, **inputs: Any) -> LossTerm:
        """Bind the inputs: what ``__call__`` of a loss returns. A setting that is a ``State`` is bound too, to its value
        now, so that all micro-batches see one number.

        Raises:
            BatchError: a column of tokens does not fit the responses that it stands beside.
        """
        given = {k: v for k, v in inputs.items() if v is not None}
        self._check_layout(given)
        if not abs(self.weight) < float("inf"):
            raise GraphError(f"The loss {self.name} has no weight", expected="a finite number", received=self.weight)
        return LossTerm(self.bound(), given)

    def _check_layout(self, inputs: Mapping[str, Any]) -> None:
        """Equal ids do not make equal rows: two rollouts of one source mint the same."""
        sequences = {name: v for name, v in inputs.items() if isinstance(v, Sequences)}
        for name, batch in inputs.items():
            column = getattr(batch, _TOKEN_COLUMN.get(type(batch), ""), None)
            if column is not None and sequences:
                beside = owner_of(name, tuple(sequences))
                what = f"a value for each response token of {beside}, whose rows these ids name"
                check_lengths(f"{self.name}: {name}", "values", column, sequences[beside].response_lengths, what)

    def bound(self) -> Self:
        """This loss with the value of each State among its settings."""
        states = {f.name: v.value for f in fields(self) if isinstance(v := getattr(self, f.name), State)}
        return replace(self, **states) if states else self

    def head(self) -> BaseModel | None:
        """The ValueHead whose values it reads, where it reads values of a shared trunk."""
        return None

    def divergence(self) -> Divergence | None:
        """The other Model that ``current.divergence`` compares with, where the loss reads it."""
        return None

    def candidates(self, **inputs: Any) -> Tensor | None:
        """int64 ``[num_tokens, k]``: the tokens whose log-probs ``current.candidates`` holds, where the loss reads it."""
        return None

    def prepare(self, policy: Scorer, **inputs: Any) -> Any:
        """Constants from the detached columns of the whole optimiser batch; run once per optimiser step.

        Args:
            policy: the Model being trained; each question is a forward pass over the batch.
        """
        return None

    def count(self, **inputs: Any) -> float | None:
        """The denominator of the objective over these rows. It may not depend on the Model being trained; counts of
        disjoint row sets add up. None: the objective is a plain sum, divided by nothing."""
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
        """float32 ``[num_tokens]`` in response layout, and metrics of that shape, averaged over policy tokens.
        Values outside of the loss mask do not matter, not even NaN."""
        raise NotImplementedError

    def mask(self, **inputs: Any) -> Ragged:
        """uint8 ragged in response layout: the tokens that count. What the policy wrote, unless a loss leaves out more."""
        return next(v for v in inputs.values() if isinstance(v, Sequences)).loss_mask

    def count(self, **inputs: Any) -> float | None:
        from flowrl.functional.aggregation import aggregation_count

        return aggregation_count(self.mask(**inputs), self.aggregation, scale=self.scale)

    def sums(self, current: Current, constants: Any, **inputs: Any) -> Sums:
        from flowrl.functional.aggregation import aggregate

        current = replace(current, loss_mask=self.mask(**inputs))
        inputs = {name: current.filled(value) for name, value in inputs.items()}
        if constants is not None:
            inputs["constants"] = constants
        result = self.token_losses(current.at_policy_tokens(), **inputs)
        losses, metrics = result if isinstance(result, tuple) else (result, {})
        self._check_losses(losses, metrics, current)
        out: Sums = {"loss": aggregate(losses, current.loss_mask, self.aggregation, scale=self.scale)}
        for name, values in metrics.items():
            out[name] = aggregate(values.detach(), current.loss_mask, "token-mean")
        return out

    def _check_losses(self, losses: Any, metrics: Mapping[str, Any], current: Current) -> None:
        """Refuse what would broadcast, or train nothing, without a word."""
        import torch

        mask = current.loss_mask
        expected = f"a float tensor of shape [num_tokens] = [{len(mask.values)}]: a loss for each response token"
        for what, value in {"its result": losses, **{f"metric {n!r}": v for n, v in metrics.items()}}.items():
            if not isinstance(value, torch.Tensor) or value.shape != mask.values.shape:
                shape = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise GraphError(
                    f"The loss {self.name}: {what} has the wrong shape",
                    expected=expected,
                    received=f"{type(value).__name__} {shape}".rstrip(),
                    do="return the losses token by token: flowrl sums them and divides once over the whole batch",
                )
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in current.tensors().values())
        if trains and not losses.requires_grad and bool(mask.values.any()):
            raise GraphError(
                f"The loss {self.name} has no gradient",
                expected="losses that depend on what `current` gives (logprobs, entropy, values)",
                received="a tensor that does not require a gradient",
                do="leave out .detach() and torch.no_grad(), or read current.logprobs",
            )

    def problems(self) -> list[str]:
        known = get_args(Aggregation)
        found = [] if self.aggregation in known else [f"aggregation is {self.aggregation!r}; expected one of {known}"]
        return found + ([] if self.scale > 0 else [f"scale is {self.scale}; expected more than 0"])


@overload
def loss(function: Callable[Concatenate[Current, P], Any]) -> NodeFunction[P, LossTerm]: ...
@overload
def loss(
    *, requires: Iterable[str] = ..., couples: str = ..., joins: Mapping[str, Join] = ...
) -> Callable[[Callable[Concatenate[Current, P], Any]], NodeFunction[P, LossTerm]]: ...
def loss(function: Any = None, **options: Any) -> Any:
    """Make a token loss of a function of the current policy, its inputs and settings. It returns float32
    ``[num_tokens]`` in response layout, or that and a dict of metrics of the same shape.

    Args:
        requires: what it reads from the Model being trained: "logprobs" (default), "entropy", "values".
        couples: what must stay together in one optimiser batch: "row" (default), "pair" or "group".
        joins: as of every node. By default the rows of an ``Advantages`` input are those that are trained on, and the
            other inputs may hold more.

    Example::

        @flowrl.loss
        def reinforce(current: Current, rollouts: Rollouts, advantages: Advantages, bonus: float = 0.0) -> Tensor:
            return -(advantages.advantages.values + bonus) * current.logprobs

        Updater(actor)(reinforce(rollouts, advantages))
    """
    localns = sys._getframe(1).f_locals
    if "requires" in options:
        options["requires"] = frozenset(options["requires"])
    if function is None:
        return functools.partial(_loss_from_function, localns=localns, options=options)
    return _loss_from_function(function, localns=localns, options=options)


def _loss_from_function(
    function: Callable[..., Any], *, localns: Mapping[str, Any], options: dict[str, Any]
) -> NodeFunction[..., LossTerm]:
    hints = resolve_hints(function, localns)
    inputs = {name: edge_types(hint)[0] for name, hint in hints.items() if is_edge_annotation(hint)}
    anchored = any(Advantages in types for types in inputs.values())
    joins = {name: "subset" for name, types in inputs.items() if anchored and Advantages not in types}
    return node_from_function(
        function,
        localns=localns,
        options={"joins": joins, **options, "token_losses": _function_losses},
        base=TokenLoss,
        run=lambda self, **inputs: self.term(**inputs),
        skip=1,
        returns=LossTerm,
    )


def _function_losses(self: Any, current: Current, **inputs: Any) -> Any:
    return call_function(self, inputs, current)
