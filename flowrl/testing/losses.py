"""The laws of losses, tried on random inputs: what flowrl promises of a gradient is true only of losses that keep them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.batches import OldLogprobs, Sequences
from flowrl.nodes.function import NodeFunction
from flowrl.nodes.loss import Current, Loss, LossTerm, TokenLoss
from flowrl.ragged import Ragged
from flowrl.testing.errors import LawError
from flowrl.testing.inputs import Draw, InputMakers, make_inputs, owner_of
from flowrl.testing.measure import (
    Leaves,
    Measured,
    counted_rows,
    counted_tokens,
    make_leaves,
    measure,
    no_engines,
    relative,
    under_test,
)
from flowrl.testing.settings import Choice, choices, described, instances, require_draws

if TYPE_CHECKING:
    from torch import Tensor

#: Relative L2, by whether the Model gives float64.
TOLERANCE = {False: 1e-5, True: 1e-10}

SomeLoss = Loss | type[Loss] | NodeFunction[..., LossTerm]


def check_loss(
    loss: SomeLoss,
    *,
    seed: int = 0,
    num_draws: int = 4,
    settings: Mapping[str, Any] | None = None,
    inputs: InputMakers | None = None,
) -> None:
    """Try the laws on a loss, with random inputs of the types that its ports say: responses that are empty, cut by
    observations or not written by the policy, groups of unequal sizes, optional inputs given and left out, float32 and
    float64.

    The laws:

    * **counts**: ``count`` does not depend on the Model, is not negative, adds up over rows, and is what ``sums`` says.
    * **row order**: value, metrics and gradients do not depend on the order of rows.
    * **micro-batches**: nor on the micro-batches that rows are split into, within 1 to 4 ranks (units that the loss
      ``couples`` stay together; ``prepare`` has seen the whole batch).
    * **masked tokens**: NaN, infinity and huge numbers where no token counts change nothing, bit for bit.
    * **empty batches**: no rows, and rows without a token that counts, give exactly 0 and no gradient.

    Args:
        loss: a loss; a class, of which each of its ``examples`` is tried; or a function made by ``@flowrl.loss``.
        seed: of the inputs.
        num_draws: how many inputs to try.
        settings: of a class or a function.
        inputs: by argument, a function from the sequences that it belongs to and a generator to the batch, for types
            that flowrl does not know how to make.

    Raises:
        LawError: names the loss, the law, and by how much it is broken.
        FlowError: the loss has impossible settings, or an input cannot be made.

    Example::

        def test_my_loss():
            check_loss(MyLoss)
    """
    require_draws(num_draws)
    for one in instances(loss, settings):
        for number in range(num_draws):
            draw = Draw.random(seed + number, double=number % 2 == 1)
            for choice in choices(one):
                check_drawn(one, draw, choice, inputs)


# -- one draw ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A loss on some inputs, and what it gives for them in one piece."""

    term: LossTerm
    leaves: Leaves
    whole: Measured
    draw: Draw
    tolerance: float

    @cached_property
    def parts(self) -> list[list[int]]:
        """Rows of micro-batches."""
        from flowrl.functional.grouping import coupled_units

        units = coupled_units(self.term.sequences, self.term.loss.couples)
        return _shares(units, random.Random(self.draw.seed))

    @cached_property
    def magnitudes(self) -> dict[str, float]:
        """By name, how large the numbers are that were added up: what rounding errors are compared with. A sum that nearly
        cancels is no measure of them; those of each unit, and each leaf times its gradient, are."""
        from flowrl.functional.grouping import coupled_units

        units = coupled_units(self.term.sequences, self.term.loss.couples)
        sizes = measure(self.term, self.leaves, units).sizes
        steep = sum(float((g * self.leaves[name].detach()).abs().sum()) for name, g in self.whole.gradients.items())
        found = {name: max(size, 0.01) for name, size in sizes.items()}
        return found | {"loss": max(sizes["loss"], steep * (self.whole.count or 1.0), 1e-30)}

    @cached_property
    def split(self) -> Measured:
        """What it gives part by part."""
        return measure(self.term, self.leaves, self.parts)

    @property
    def subject(self) -> str:
        return described(self.term.loss)

    def broken(self, law: str, what: str, expected: object, received: object, do: str) -> LawError:
        return LawError(self.subject, law, what, expected=expected, received=f"{received} ({self.draw})", do=do)


def check_drawn(loss: Loss, draw: Draw, choice: Choice, makers: InputMakers | None = None) -> None:
    """Try all laws on one draw of inputs.

    Raises:
        LawError: the first law that is broken.
    """
    with context.use_step(under_test()), context.use_bindings(no_engines()):
        trial = _trial(loss, draw, choice, makers)
        for law in (_finite, _counts, _no_rows, _row_order, _micro_batches, _masked_tokens):
            law(trial)
        nothing = replace(draw, response_lengths=(0,)) if draw.seed % 3 == 0 else replace(draw, written=False)
        _no_token_counts(_trial(loss, replace(nothing, group_sizes=draw.group_sizes[:2]), choice, makers))


def _trial(loss: Loss, draw: Draw, choice: Choice, makers: InputMakers | None) -> Trial:
    inputs = make_inputs(loss, draw, choice.given, makers)
    term: LossTerm = loss(**inputs)
    if choice.left_out:
        term = replace(term, inputs={name: _left_out(batch) for name, batch in term.inputs.items()})
    leaves = make_leaves(term, draw)
    return Trial(term, leaves, measure(term, leaves), draw, TOLERANCE[draw.double])


def _left_out(batch: Any) -> Any:
    import torch

    if not isinstance(batch, OldLogprobs):
        return batch
    absent = batch.old_logprobs.with_values(torch.full_like(batch.old_logprobs.values, torch.nan))
    return replace(batch, old_logprobs=absent, is_current=True)


# -- the laws ----------------------------------------------------------------------------------------------------------


def _finite(trial: Trial) -> None:
    for name, (total, _) in trial.whole.sums.items():
        if not math.isfinite(total):
            raise trial.broken(
                "finite numbers",
                f"{_called(name)} is not finite for ordinary inputs",
                "a finite number, with empty responses and rows that the policy did not write too",
                total,
                "look for a division by a number of tokens or rows, and for log or exp of what is not bounded",
            )
    for name, gradient in trial.whole.gradients.items():
        if not bool(gradient.isfinite().all()):
            raise trial.broken(
                "finite numbers",
                f"its gradient with respect to {name} is not finite for ordinary inputs",
                "finite numbers, with empty responses and rows that the policy did not write too",
                f"{int((~gradient.isfinite()).sum())} of {gradient.numel()} that are not",
                "look for sqrt, log and division at 0: torch.where also differentiates the branch that it does not take",
            )


def _counts(trial: Trial) -> None:
    count, said = trial.whole.count, trial.whole.sums["loss"][1]
    do = "let count() and sums() count the same things, from the inputs alone"
    if count is not None and not (math.isfinite(count) and count >= 0):
        raise trial.broken("counts", "its count is impossible", "a number, at least 0, or None", count, do)
    parts = trial.split.counts
    added = None if count is None else sum(p or 0.0 for p in parts)
    if (None in parts) != (count is None) or not _close(added, count):
        raise trial.broken("counts", "the counts of its rows do not add up", f"{count}, as of all rows", added, do)
    if (said is None) != (count is None) or not _close(said, count):
        raise trial.broken("counts", "sums() counts otherwise than count()", count, said, do)


def _close(a: float | None, b: float | None) -> bool:
    return a is None or b is None or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def _row_order(trial: Trial) -> None:
    numbers = random.Random(f"{trial.draw.seed} order")
    rows = trial.term.num_rows
    order = numbers.sample(range(rows), rows)
    do = "find a row by prompt_id and sample_id, not by its place in the batch"
    _compare(trial, measure(trial.term, trial.leaves, order=order), "row order", f"rows in the order {order}", do)


def _micro_batches(trial: Trial) -> None:
    do = (
        "return a number a token, row or pair, and let flowrl sum and divide; what needs the whole batch belongs in"
        " prepare()"
    )
    _compare(trial, trial.split, "micro-batches", f"rows split into {trial.parts}", do)


def _shares(units: Sequence[list[int]], numbers: random.Random) -> list[list[int]]:
    """Units dealt out to 1 to 4 ranks, the share of each rank cut into micro-batches; one is empty, some hold one unit."""
    parts: list[list[int]] = [[]]
    num_ranks = numbers.randint(1, 4)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for unit in numbers.sample(list(units), len(units)):
        ranks[numbers.randrange(num_ranks)].append(unit)
    for share in ranks:
        while share:
            size = numbers.choice((1, 2, len(share)))
            parts.append([row for unit in share[:size] for row in unit])
            share = share[size:]
    return parts


def _compare(trial: Trial, found: Measured, law: str, how: str, do: str) -> None:
    """Refuse what is not the same as of all rows in one piece."""
    for name, (total, _) in trial.whole.sums.items():
        allowed = trial.tolerance if name == "loss" else TOLERANCE[False]  # metrics may be sums of float32 columns
        other, number = found.sums.get(name, (math.nan, None))
        by = abs(other - total) / (abs(total) or 1.0)
        if not by <= allowed:
            by = abs(other - total) / trial.magnitudes[name]
        if not by <= allowed or not _close(number, trial.whole.sums[name][1]):
            received = f"{other:.8g} (of {number}) instead of {total:.8g} (of {trial.whole.sums[name][1]})"
            what = f"{_called(name)} depends on it"
            raise trial.broken(law, what, f"at most {allowed:g}", f"{by:.3g}: {received}, {how}", do)
    for name, gradient in trial.whole.gradients.items():
        by = relative(found.gradients[name], gradient)
        if not by <= trial.tolerance:
            what = f"its gradient with respect to {name} depends on it"
            raise trial.broken(law, what, f"at most {trial.tolerance:g}, relative L2", f"{by:.3g}, {how}", do)


def _called(name: str) -> str:
    return "its value" if name == "loss" else f"its metric {name!r}"


def _masked_tokens(trial: Trial) -> None:
    import torch

    term, law = trial.term, "masked tokens"
    do = "select with torch.where(mask, …, 0) before you compute; a product with the mask lets NaN through"
    selected = counted_tokens(term)
    for name, gradient in trial.whole.gradients.items():
        if name in Current.OF_TOKENS and bool((gradient[~selected] != 0).any()):
            what = f"it has a gradient with respect to {name} where no token counts"
            raise trial.broken(law, what, 0.0, float(gradient[~selected].abs().max()), do)
    poison = poison_of(trial.draw)
    poisoned = replace(term, inputs=poisoned_inputs(term, selected, poison))
    found = measure(poisoned, _poisoned_leaves(trial, selected, poison))
    what = "NaN, infinite or huge numbers where no token counts change"
    for name, (total, _) in trial.whole.sums.items():
        if found.sums[name][0] != total:
            received = repr(found.sums[name][0])
            raise trial.broken(law, f"{what} {_called(name)}", f"{total!r}, bit for bit", received, do)
    for name, gradient in trial.whole.gradients.items():
        if not torch.equal(found.gradients[name], gradient):
            by = relative(found.gradients[name], gradient)
            message = f"{what} its gradient with respect to {name}"
            raise trial.broken(law, message, "the same, bit for bit", f"{by:.3g}, relative L2", do)


#: From a column and the bool mask of what to leave alone, a column with something else elsewhere.
Poison = Callable[["Tensor", "Tensor"], "Tensor"]


def poison_of(draw: Draw) -> Poison:
    """Puts NaN, infinities and huge numbers where a mask is not set."""
    import torch

    generator = draw.generator("poison")
    numbers = torch.tensor([torch.nan, torch.nan, torch.inf, -torch.inf, 3e38, -3e38])

    def poison(column: Tensor, mask: Tensor) -> Tensor:
        bad = numbers[torch.randint(len(numbers), column.shape, generator=generator)].to(column.dtype)
        return torch.where(mask.reshape(-1, *[1] * (column.ndim - 1)), column, bad)

    return poison


def poisoned_inputs(term: LossTerm, selected: Tensor, poison: Poison) -> dict[str, Any]:
    """The inputs of a term with other numbers in every float column where no token counts.

    Args:
        selected: bool ``[num_tokens]`` of the term's sequences; of other sequences their own loss mask counts.
    """
    masks = {name: b.loss_mask for name, b in term.inputs.items() if isinstance(b, Sequences)}
    first = next(iter(masks))
    masks[first] = masks[first].with_values(selected)
    return {
        name: poisoned_columns(batch, masks[owner_of(name, list(masks))], poison) for name, batch in term.inputs.items()
    }


def poisoned_columns(batch: Any, mask: Ragged, poison: Poison) -> Any:
    """A batch (or a Ragged) with other numbers in its float columns in response layout, where the mask is 0."""

    def poisoned(value: Any) -> Any:
        if not isinstance(value, Ragged) or not value.values.is_floating_point():
            return value
        each = len(value.values) // max(1, len(mask.values))  # k values a token
        if not len(mask.values) or not value.offsets.equal(mask.offsets * each):
            return value
        return value.with_values(poison(value.values, mask.values.bool().repeat_interleave(each)))

    if isinstance(batch, Ragged):
        return poisoned(batch)
    return replace(batch, **{f.name: poisoned(getattr(batch, f.name)) for f in fields(batch) if f.init})


def _poisoned_leaves(trial: Trial, selected: Tensor, poison: Poison) -> Leaves:
    rows = counted_rows(trial.term)
    out: Leaves = {}
    for name, leaf in trial.leaves.items():
        where = selected if name in Current.OF_TOKENS else rows
        out[name] = (leaf.detach() if where is None else poison(leaf.detach(), where)).requires_grad_()
    return out


def _no_rows(trial: Trial) -> None:
    """As the whole batch; that an empty micro-batch adds nothing is seen among the others."""
    term = trial.term.select([])
    leaves = {name: leaf[:0].detach().requires_grad_() for name, leaf in trial.leaves.items()}
    _expect_nothing(trial, measure(term, leaves), "no rows")


def _no_token_counts(trial: Trial) -> None:
    what = "rows without a token that counts"
    if isinstance(trial.term.loss, TokenLoss):
        _expect_nothing(trial, trial.whole, what)
        return
    _finite(trial)  # of a pair without tokens a loss is a constant
    for name, gradient in trial.whole.gradients.items():
        if name in Current.OF_TOKENS and bool((gradient != 0).any()):
            message = f"{what} give a gradient with respect to {name}"
            raise trial.broken("empty batches", message, 0.0, float(gradient.abs().max()), "select by the loss mask")


def _expect_nothing(trial: Trial, found: Measured, what: str) -> None:
    """Refuse anything but exact zeros."""
    do = "sum what is there; do not take a mean, and do not divide by a number of rows or tokens"
    for name, (total, _) in found.sums.items():
        if total != 0:
            raise trial.broken("empty batches", f"{_called(name)} is not 0 for {what}", 0.0, total, do)
    if found.count:
        raise trial.broken("empty batches", f"its count is not 0 for {what}", 0.0, found.count, do)
    for name, gradient in found.gradients.items():
        if not bool((gradient == 0).all()):
            raise trial.broken("empty batches", f"{what} give a gradient with respect to {name}", 0.0, "another", do)
