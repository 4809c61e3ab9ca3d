"""One optimiser step: forward and backward in micro-batches, normalised once over the whole batch.

Each term's summed loss is divided by its count over the whole step before it is differentiated, so gradients do not
depend on how rows are split. Terms over the same rows share one forward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.batches import Sequences
from flowrl.errors import FlowError, ModelError
from flowrl.functional.grouping import coupled_units
from flowrl.nodes.logprobs import scoring_temperature
from flowrl.nodes.loss import Current, LossTerm, TermRows
from flowrl.runtime.engines.base import StepResult
from flowrl.runtime.engines.transformers_forward import Wanted, forward
from flowrl.runtime.engines.transformers_layout import check_rows, micro_batch_rows

if TYPE_CHECKING:
    from flowrl.nodes.updater import AdamW
    from flowrl.runtime.engines.transformers import TransformersEngine

#: What a loss may require that only a policy gives, and that depends on the temperature.
OF_POLICY = frozenset({"logprobs", "entropy", "divergence", "candidates"})
#: By what it is (of several heads, divergences or candidates: and which), a column of a forward pass.
_Columns = dict[Any, Any]
#: What couples more wins over what couples less.
COUPLING = ("row", "pair", "group")


@dataclass
class _Tally:
    """(sum, count) of each metric, in float64. A count of None is a sum that is not divided."""

    sums: dict[str, list[float]] = field(default_factory=dict)
    undivided: set[str] = field(default_factory=set)

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None) -> None:
        pair = self.sums.setdefault(name, [0.0, 0.0])
        pair[0] += float(total)
        if count is None:
            self.undivided.add(name)
        else:
            pair[1] += float(count)

    @classmethod
    def joined(cls, parts: Sequence[_Tally]) -> _Tally:
        """The sums over all ranks."""
        total = cls()
        for part in parts:
            for name, (number, count) in part.sums.items():
                total.add(name, number, None if name in part.undivided else count)
        return total

    def pairs(self) -> dict[str, tuple[float, float]]:
        return {n: (s, 1.0 if n in self.undivided else c) for n, (s, c) in self.sums.items()}


@dataclass
class _Work:
    """Terms over the same rows, which share their forward passes."""

    terms: list[tuple[TermRows, _Tally]]
    sequences: Sequences
    temperature: float | None  # None where no term asks for log-probs
    batches: list[list[int]] = field(default_factory=list)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset().union(*(rows.term.loss.requires for rows, _ in self.terms))

    @property
    def couples(self) -> str:
        return max((rows.term.loss.couples for rows, _ in self.terms), key=COUPLING.index)


def train_step(
    engine: TransformersEngine, terms: Sequence[TermRows], optimizer: AdamW, *, max_grad_norm: float | None
) -> StepResult:
    """See :meth:`flowrl.runtime.engines.base.Engine.train_step`.

    Raises:
        FlowError: a loss whose counts over micro-batches do not add up to its count over the step.
        ModelError: a value head that is not on this Model, or a divergence to one that lies over ranks in a way that
            does not fit.
    """
    _open_heads(engine, terms)
    others_in_step = _open_others(engine, terms)
    tallies = [_Tally() for _ in terms]
    works = _group(engine, list(zip(terms, tallies, strict=True)))
    learning_rate = optimizer.learning_rate_at(engine.optimizer_steps)
    parameters = [p for _, p in engine.trained_parameters()]
    _clear_gradients(parameters)
    objective, guilty = 0.0, []
    for work in works:
        for rows, counts in engine.shards.deal(work.batches, in_step=others_in_step):
            backward = engine.shards.in_step or (counts and not guilty)
            value, bad = _run_batch(engine, work, rows, backward=backward, tally=counts)
            objective += value
            guilty += bad
    for parameter in parameters:  # where nothing pulls, momentum and decay go on, as they do over ranks
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    engine.shards.reduce_gradients(parameters)
    shares = engine.shards.everyone((objective, guilty, tallies))
    objective, guilty = sum(share[0] for share in shares), [row for share in shares for row in share[1]]
    tallies = [_Tally.joined(parts) for parts in zip(*(share[2] for share in shares), strict=True)]
    norm = engine.shards.grad_norm(parameters)
    if not guilty and not math.isfinite(norm):
        guilty = _rows_of_nonfinite_gradients(engine, works, parameters)
    if guilty or not math.isfinite(norm):
        _clear_gradients(parameters)
        return StepResult({}, norm, learning_rate, skipped=True, nonfinite_rows=tuple(dict.fromkeys(guilty)))
    try:
        _check_counts(terms, tallies)
        if max_grad_norm is not None and norm > max_grad_norm:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(max_grad_norm / (norm + 1e-6))
        torch_optimizer = engine.torch_optimizer(optimizer)
        for group in torch_optimizer.param_groups:
            group["lr"] = learning_rate
        torch_optimizer.step()
    finally:
        _clear_gradients(parameters)
    engine.optimizer_steps += 1
    return StepResult(_metrics(terms, tallies, objective), norm, learning_rate)


def _open_heads(engine: TransformersEngine, terms: Sequence[TermRows]) -> None:
    for rows in terms:
        head: Any = rows.term.loss.head()
        if head is None:
            continue
        if getattr(head, "base", None) is not engine.model:
            raise ModelError(
                f"{type(rows.term.loss).__name__} reads {head!r}, which is not a head of {engine.model!r}",
                expected=f"a ValueHead({engine.model!r})",
                received=f"{head!r} on {getattr(head, 'base', None)!r}",
                do="put the loss into the updater of the Model that carries the head",
            )
        engine.add_value_head(head.name)


def _open_others(engine: TransformersEngine, terms: Sequence[TermRows]) -> bool:
    """Open the Models that divergences compare with: whether the passes of one are conversations of all ranks.

    Raises:
        ModelError: one whose layers are split over ranks that work on different rows of this Model.
    """
    in_step = False
    for rows in terms:
        spec = rows.term.loss.divergence()
        if spec is None:
            continue
        other: Any = spec.model.bound_engine()
        if engine.shards.tp_size % other.shards.tp_size:
            raise ModelError(
                f"A divergence of {engine.model!r} to {spec.model!r} cannot be taken: tensor_parallel of {spec.model.name} "
                "would split its layers over ranks that work on different rows",
                expected=f"a divisor of {engine.shards.tp_size}, that of {engine.model.name}",
                received=other.shards.tp_size,
                do=f"strategies={{{spec.model.name!r}: Strategy()}}, or the same tensor_parallel for both",
            )
        in_step |= other.shards.in_step
    return in_step


def _group(engine: TransformersEngine, terms: list[tuple[TermRows, _Tally]]) -> list[_Work]:
    """Terms by the rows that they are about, with the micro-batches of each."""
    works: list[_Work] = []
    for rows, tally in terms:
        term = rows.term
        sequences = term.sequences
        reads = bool(term.loss.requires & OF_POLICY)
        temperature = scoring_temperature(sequences) if reads else None
        for work in works:
            agree = temperature is None or work.temperature is None or temperature == work.temperature
            if agree and _same_rows(work.sequences, sequences):
                work.terms.append((rows, tally))
                work.temperature = temperature if work.temperature is None else work.temperature
                break
        else:
            works.append(_Work([(rows, tally)], sequences, temperature))
    for work in works:
        check_rows(work.sequences, engine.max_length, engine.network.vocab_size)
        coupled = None if work.couples == "row" else coupled_units(work.sequences, work.couples)
        work.batches = micro_batch_rows(work.sequences, engine.micro_batch_tokens, coupled)
    return works


def _same_rows(a: Sequences, b: Sequences) -> bool:
    if a is b:
        return True
    return (
        torch.equal(a.prompt_id, b.prompt_id)
        and torch.equal(a.sample_id, b.sample_id)
        and torch.equal(a.tokens.offsets, b.tokens.offsets)
        and torch.equal(a.tokens.values, b.tokens.values)
        and torch.equal(a.span_kind_of_token.values, b.span_kind_of_token.values)
    )


def _run_batch(
    engine: TransformersEngine, work: _Work, rows: list[int], *, backward: bool, tally: bool = True
) -> tuple[float, list[tuple[int, int]]]:
    """One micro-batch: its part of the objective, and the (prompt_id, sample_id) of rows whose loss is not finite. Without a
    ``tally`` nobody counts it; where all ranks run in step it still has its backward pass, with gradients of 0."""
    in_step = engine.shards.in_step
    index = torch.tensor(rows, dtype=torch.int64)
    sequences = work.sequences.select(index)
    terms = [term_rows.term.select(index) for term_rows, _ in work.terms]
    with torch.set_grad_enabled(backward):
        scores = _forward(engine, work, sequences, terms)
        # The loss sees leaves, so that its own gradient is known before the model's is computed.
        leaves = {name: tensor.detach().requires_grad_(backward) for name, tensor in scores.items()}
        objective: Tensor = torch.zeros(())
        guilty: list[tuple[int, int]] = []
        for place, (term, (term_rows, term_tally)) in enumerate(zip(terms, work.terms, strict=True)):
            current = _current(term, place, leaves, sequences)
            sums = term.loss.sums(current, term_rows.constants, **term.inputs)
            total = _loss_of(term, sums)
            if not bool(torch.isfinite(total)):
                guilty += _rows_of_nonfinite_loss(term, term_rows.constants, current)
                continue
            if tally:
                for name, (metric, count) in sums.items():
                    term_tally.add(name, metric.detach(), count)
            if term_rows.count is None:
                objective = objective + term.loss.weight * total
            elif term_rows.count > 0:
                objective = objective + term.loss.weight / term_rows.count * total
    if backward and not guilty and objective.requires_grad and (tally or not in_step):
        objective.backward()
    if backward:
        _backward(scores, leaves, in_step=in_step)
    return (float(objective.detach()), guilty) if tally else (0.0, [])


def _forward(engine: TransformersEngine, work: _Work, sequences: Sequences, terms: Sequence[LossTerm]) -> _Columns:
    """What the terms read of the Model for the rows of one micro-batch."""
    reads = work.requires
    divergences = [spec for term in terms if (spec := term.loss.divergence()) is not None]
    candidates = {i: ids for i, term in enumerate(terms) if (ids := term.loss.candidates(**term.inputs)) is not None}
    heads = [_head_name(term) for term in terms if "values" in term.loss.requires]
    scores = forward(
        engine,
        sequences,
        Wanted(
            temperature=work.temperature or 1.0,
            logprobs=bool(reads & {"logprobs", "entropy"}),
            entropy="entropy" in reads,
            heads=tuple(dict.fromkeys(heads)),
            scores="scores" in reads,
            divergences=tuple(dict.fromkeys(divergences)),
            candidates=tuple(candidates.values()),
        ),
    )
    columns: _Columns = {"logprobs": scores.logprobs, "entropy": scores.entropy, "scores": scores.scores}
    columns |= {("values", head): values for head, values in scores.values.items()}
    columns |= {("divergence", spec): values for spec, values in scores.divergences.items()}
    columns |= {("candidates", i): values for i, values in zip(candidates, scores.candidates, strict=True)}
    return {name: tensor for name, tensor in columns.items() if tensor is not None}


def _current(term: LossTerm, place: int, leaves: _Columns, sequences: Sequences) -> Current:
    """What the term at this place among those of a micro-batch is given."""
    names = {
        "logprobs": "logprobs",
        "entropy": "entropy",
        "scores": "scores",
        "values": ("values", _head_name(term)),
        "divergence": ("divergence", term.loss.divergence()),
        "candidates": ("candidates", place),
    }
    found = {field: leaves[name] for field, name in names.items() if name in leaves}
    return Current(sequences.loss_mask, **found)


def _backward(scores: _Columns, leaves: _Columns, *, in_step: bool) -> None:
    """From the gradients of the loss into the model. Where they are 0 (groups whose advantages are) so are the model's,
    and nothing is computed, unless other ranks wait for it."""
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    if in_step:
        live = [name for name, score in scores.items() if score.requires_grad]
        grads = {name: grads.get(name, torch.zeros_like(scores[name])) for name in live}
    else:
        live = [name for name, grad in grads.items() if bool((grad != 0).any())]  # NaN is not 0
    if live:
        torch.autograd.backward([scores[n] for n in live], [grads[n] for n in live])


def _head_name(term: LossTerm) -> str:
    head = term.loss.head()
    return head.name if head is not None else ""


def _loss_of(term: LossTerm, sums: Any) -> Tensor:
    if "loss" not in sums:
        raise FlowError(
            f"{type(term.loss).__name__}.sums gives no 'loss'",
            expected="a pair (sum, count) named 'loss'",
            received=sorted(sums),
        )
    return sums["loss"][0]


# -- what is not finite ------------------------------------------------------------------------------------------------


def _rows_of_nonfinite_loss(term: LossTerm, constants: Any, current: Current) -> list[tuple[int, int]]:
    """Ids of the rows (or coupled units) whose own loss is not finite; all of them where none is so alone."""
    sequences = term.sequences
    guilty: list[int] = []
    with torch.no_grad():
        for unit in coupled_units(sequences, term.loss.couples):
            part = term.select(torch.tensor(unit))
            sums = part.loss.sums(current.select(unit), constants, **part.inputs)
            if not bool(torch.isfinite(sums["loss"][0])):
                guilty += unit
    return _ids(sequences, guilty or range(sequences.num_rows))


def _rows_of_nonfinite_gradients(
    engine: TransformersEngine, works: Sequence[_Work], parameters: Sequence[Tensor]
) -> list[tuple[int, int]]:
    """Ids of the rows (or coupled units) whose own gradient is not finite. Where none is so alone, of the whole
    micro-batch; where no micro-batch is, of all."""

    def finite(work: _Work, rows: list[int]) -> bool:
        _clear_gradients(parameters)
        _run_batch(engine, work, rows, backward=True, tally=True)  # the same rows on every rank
        return math.isfinite(engine.shards.grad_norm(parameters))

    guilty: list[tuple[int, int]] = []
    for work, rows in _all_batches(works):
        if not finite(work, rows):
            units = [u for u in coupled_units(work.sequences, work.couples) if u[0] in rows]
            bad = [row for unit in units if not finite(work, unit) for row in unit]
            guilty += _ids(work.sequences, bad or rows)
    return guilty or [ids for work, rows in _all_batches(works) for ids in _ids(work.sequences, rows)]


def _all_batches(works: Sequence[_Work]) -> Iterator[tuple[_Work, list[int]]]:
    for work in works:
        for rows in work.batches:
            yield work, rows


def _ids(sequences: Sequences, rows: Sequence[int] | range) -> list[tuple[int, int]]:
    return [(int(sequences.prompt_id[i]), int(sequences.sample_id[i])) for i in rows]


# -- gradients and metrics ---------------------------------------------------------------------------------------------


def _clear_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _check_counts(terms: Sequence[TermRows], tallies: Sequence[_Tally]) -> None:
    for rows, tally in zip(terms, tallies, strict=True):
        pair = tally.sums.get("loss")
        if pair is None or rows.count is None or "loss" in tally.undivided:
            continue
        if not math.isclose(pair[1], rows.count, rel_tol=1e-6, abs_tol=1e-9):
            raise FlowError(
                f"The counts of {type(rows.term.loss).__name__} over micro-batches do not add up",
                expected=f"{rows.count}, as its count() says of the whole optimiser batch",
                received=f"{pair[1]} from its sums()",
                do="let count() and sums() count the same things; counts of disjoint rows must add up",
            )


def _metrics(terms: Sequence[TermRows], tallies: Sequence[_Tally], objective: float) -> dict[str, tuple[float, float]]:
    """By name (sum, count): a single term's under their own names, several terms' under their loss's."""
    if len(terms) == 1:
        return tallies[0].pairs()
    out: dict[str, tuple[float, float]] = {"loss": (objective, 1.0)}
    used: dict[str, int] = {}
    for rows, tally in zip(terms, tallies, strict=True):
        name = snake_case(type(rows.term.loss).__name__)
        used[name] = used.get(name, 0) + 1
        prefix = name if used[name] == 1 else f"{name}_{used[name]}"
        out |= {f"{prefix}/{metric}": pair for metric, pair in tally.pairs().items()}
    return out


def snake_case(name: str) -> str:
    """``PPOLoss`` to ``ppo_loss``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
