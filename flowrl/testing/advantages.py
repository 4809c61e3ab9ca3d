"""The laws of advantages, tried on random inputs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.batches import Advantages, Rewards, Sequences
from flowrl.columns import Batch
from flowrl.errors import GroupSizeError, RewardError
from flowrl.nodes.base import Node
from flowrl.nodes.function import NodeFunction
from flowrl.ragged import Ragged
from flowrl.testing.errors import LawError
from flowrl.testing.inputs import Draw, InputMakers, make_inputs, owner_of
from flowrl.testing.losses import Poison, poison_of, poisoned_columns
from flowrl.testing.measure import no_engines, relative, under_test
from flowrl.testing.settings import Choice, choices, described, instances, require_draws

if TYPE_CHECKING:
    from torch import Tensor

SomeAdvantage = Node | type[Node] | NodeFunction[..., Any]
#: Relative L2 that a node may be off where it takes statistics of the whole batch; others are exact, bit for bit.
TOLERANCE = 1e-6


def check_advantage(
    node: SomeAdvantage,
    *,
    seed: int = 0,
    num_draws: int = 4,
    settings: Mapping[str, Any] | None = None,
    inputs: InputMakers | None = None,
) -> None:
    """Try the laws on a node that returns ``Advantages``, with random inputs of the types that its ports say: groups of
    unequal sizes, invalid rewards, equal ones, empty responses, observations, optional inputs given and left out.

    The laws:

    * **row order**: a row's numbers, and whether it is dropped, do not depend on where the rows stand. Bit for bit, but for
      1e-6 where the node looks at the whole batch (``split = "whole"``).
    * **split**: parts of the batch, as the node's own ``split`` allows them, give the same numbers, bit for bit.
    * **masked tokens**: NaN, infinity and huge numbers at observations (of values and log-probs) and in invalid rewards
      change nothing, bit for bit. (A reward at an observation is a reward like any other.)
    * **degenerate groups**: groups of one (or a :class:`GroupSizeError`, if ``needs_groups`` says so), of equal rewards, with
      empty responses, and batches without rows or without a valid reward (or a :class:`RewardError`) give finite numbers.

    Args:
        node: a node; a class, of which each of its ``examples`` is tried; or a function made by ``@flowrl.node``.
        seed: of the inputs.
        num_draws: how many inputs to try.
        settings: of a class or a function.
        inputs: by argument, a function from the sequences that it belongs to and a generator to the batch.

    Raises:
        LawError: names the node, the law, and by how much it is broken.
        FlowError: the node has impossible settings, or an input cannot be made.

    Example::

        def test_my_advantage():
            check_advantage(MyAdvantage)
    """
    require_draws(num_draws)
    for one in instances(node, settings):
        for number in range(num_draws):
            draw = Draw.random(seed + number, smallest_group=one.needs_groups)
            for choice in choices(one):
                check_drawn_advantage(one, draw, choice, inputs)


def check_drawn_advantage(node: Node, draw: Draw, choice: Choice, makers: InputMakers | None = None) -> None:
    """Try all laws on one draw of inputs.

    Raises:
        LawError: the first law that is broken.
    """
    with context.use_step(under_test()):
        trial = _trial(node, draw, choice, makers)
        for law in (_finite, _row_order, _split, _masked_tokens, _no_rows):
            law(trial)
        _equal_rewards(trial)
        _invalid_rewards(trial)
        _lonely_rows(node, draw, choice, makers)


@dataclass(frozen=True)
class _Trial:
    node: Node
    inputs: dict[str, Any]
    draw: Draw
    out: Advantages
    layout: Ragged  # the loss mask of the rows that came out

    @property
    def rows(self) -> int:
        """How many rows the inputs have (those that set the order)."""
        return next(b.num_rows for b in self.inputs.values() if isinstance(b, Sequences))

    def broken(self, law: str, what: str, expected: object, received: object, do: str) -> LawError:
        return LawError(described(self.node), law, what, expected=expected, received=f"{received} ({self.draw})", do=do)


def _trial(node: Node, draw: Draw, choice: Choice, makers: InputMakers | None) -> _Trial:
    """The node on some inputs; with valid rewards alone, where it refuses others."""
    inputs = make_inputs(node, draw, choice.given, makers)
    try:
        out = _run(node, inputs)
    except RewardError:
        inputs = {name: _all_valid(batch) for name, batch in inputs.items()}
        out = _run(node, inputs)
    return _Trial(node, inputs, draw, out, _layout(inputs, out))


def _run(node: Node, inputs: Mapping[str, Any]) -> Advantages:
    with context.use_bindings(no_engines()):
        return node(**inputs)


def _layout(inputs: Mapping[str, Any], out: Advantages) -> Ragged:
    """The loss mask of the rows that came out."""
    sequences = next((b for b in inputs.values() if isinstance(b, Sequences)), None)
    if sequences is None:
        import torch

        return out.advantages.with_values(torch.ones(len(out.advantages.values), dtype=torch.uint8))
    return sequences.loss_mask.select(_index(_places(out, sequences)))


def _finite(trial: _Trial, law: str = "finite numbers", when: str = "ordinary inputs") -> None:
    lengths = trial.layout.lengths
    for name in ("advantages", "returns"):
        column: Ragged = getattr(trial.out, name)
        if not column.lengths.equal(lengths):
            received = f"{column.lengths.tolist()} instead of {lengths.tolist()}"
            raise trial.broken(
                law, f"its {name} are not in response layout", "a number a token", received, "see Ragged"
            )
        bad = trial.layout.values.bool() & ~column.values.isfinite()
        if bool(bad.any()):
            raise trial.broken(
                law,
                f"its {name} are not finite for {when}",
                "finite numbers at policy tokens",
                f"{int(bad.sum())} that are not",
                "say what a group of one, of equal rewards or without a token gets, and leave out invalid rows",
            )


def _same(trial: _Trial, out: Advantages, law: str, how: str, do: str, tolerance: float = 0.0) -> None:
    """Refuse other rows, or other numbers at the policy tokens of some row."""
    before, after = _by_row(trial.out), _by_row(out)
    if before.keys() != after.keys():
        received = f"{len(after)} rows instead of {len(before)}, {how}"
        raise trial.broken(law, "which rows it drops depends on it", "the same rows", received, do)
    written = trial.layout.values.bool()
    for place, name in enumerate(("advantages", "returns")):
        columns = [_joined([rows[key][place] for key in before])[written] for rows in (before, after)]
        exact = columns[0].equal(columns[1])
        by = 0.0 if exact else relative(columns[1], columns[0])
        if not (exact or (tolerance and by <= tolerance)):
            expected = f"at most {tolerance:g}, relative L2" if tolerance else "the same numbers, bit for bit"
            raise trial.broken(law, f"its {name} depend on it", expected, f"a difference of {by:.3g}, {how}", do)


def _by_row(out: Advantages) -> dict[tuple[int, ...], tuple[Tensor, Tensor]]:
    return dict(zip(_keys(out), zip(out.advantages.rows(), out.returns.rows(), strict=True), strict=True))


def _joined(rows: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(list(rows)) if rows else torch.zeros(0)


def _row_order(trial: _Trial) -> None:
    numbers = random.Random(f"{trial.draw.seed} order")

    def shuffled(batch: Any) -> Any:
        return (
            batch.select(numbers.sample(range(batch.num_rows), batch.num_rows)) if isinstance(batch, Batch) else batch
        )

    out = _run(trial.node, {name: shuffled(batch) for name, batch in trial.inputs.items()})
    do = "take group and batch statistics in an order that is not that of the rows (flowrl.functional.grouping.Groups)"
    _same(trial, out, "row order", "with the rows in another order", do, TOLERANCE if _is_whole(trial.node) else 0.0)


def _is_whole(node: Node) -> bool:
    return node.split == "whole"


def _split(trial: _Trial) -> None:
    """Parts of the batch, one after the other."""
    if _is_whole(trial.node) or not trial.rows:
        return
    numbers = random.Random(f"{trial.draw.seed} split")
    anchor = next(b for b in trial.inputs.values() if isinstance(b, Sequences))
    keys = anchor.prompt_id.tolist() if trial.node.split == "groups" else list(range(trial.rows))
    number = numbers.randint(2, 3)
    share = {key: numbers.randrange(number) for key in sorted(set(keys))}
    parts = [[row for row, key in enumerate(keys) if share[key] == part] for part in range(number)]
    outs = [_run(trial.node, _rows_of(trial, anchor, part)) for part in parts]
    do = "say split = 'whole' (or 'groups') where the numbers of a row depend on other rows"
    _same(trial, Advantages.concat(outs), "split", f"split by {trial.node.split} into {parts}", do)


def _rows_of(trial: _Trial, anchor: Sequences, rows: Sequence[int]) -> dict[str, Any]:
    """The inputs of a share: what has the rows of the anchor is cut, by id, and so is what may hold more."""
    ids = set(_keys(anchor.select(rows)))
    prompts = {prompt for prompt, *_ in ids}
    cut: dict[str, Any] = {}
    for name, batch in trial.inputs.items():
        if isinstance(batch, Ragged):  # in the order of the anchor
            cut[name] = batch.select(_index(rows))
        elif trial.node.joins.get(name) == "prompt":
            cut[name] = batch.select([i for i, prompt in enumerate(batch.prompt_id.tolist()) if prompt in prompts])
        else:
            cut[name] = batch.select([i for i, key in enumerate(_keys(batch)) if key in ids])
    return cut


def _index(rows: Sequence[int]) -> Tensor:
    import torch

    return torch.tensor(list(rows), dtype=torch.int64)


def _masked_tokens(trial: _Trial) -> None:
    masks = {name: b.loss_mask for name, b in trial.inputs.items() if isinstance(b, Sequences)}
    poison = poison_of(trial.draw)

    def poisoned(name: str, batch: Any) -> Any:
        if isinstance(batch, Rewards):
            return _poisoned_rewards(batch, poison)
        if not masks or trial.node.joins.get(name) == "prompt":
            return batch
        owner = owner_of(name, list(masks))
        if isinstance(batch, Ragged):
            return poisoned_columns(batch, masks[owner], poison)
        there = set(_keys(trial.inputs[owner]))
        batch = batch.select([row for row, key in enumerate(_keys(batch)) if key in there])
        mask = masks[owner].select(_index(_places(batch, trial.inputs[owner])))
        return poisoned_columns(batch, mask, poison)

    out = _run(trial.node, {name: poisoned(name, batch) for name, batch in trial.inputs.items()})
    do = "select with torch.where(mask, …, 0) or by index before you compute; a product with the mask lets NaN through"
    how = "with NaN, infinite or huge numbers where the policy wrote nothing, and in invalid rewards"
    _same(trial, out, "masked tokens", how, do)


def _places(rows: Batch, batch: Batch) -> list[int]:
    """Where in a batch these rows stand."""
    place = {key: row for row, key in enumerate(_keys(batch))}
    return [place[key] for key in _keys(rows)]


def _keys(batch: Batch) -> list[tuple[int, ...]]:
    """(prompt_id, sample_id) of each row."""
    ids = batch.row_ids
    return [] if ids is None else [tuple(key) for key in ids.tolist()]


def _poisoned_rewards(rewards: Rewards, poison: Poison) -> Rewards:
    valid = rewards.valid.bool()
    tokens = {n: c.with_values(poison(c.values, valid[c.row_of_value])) for n, c in rewards.token_components.items()}
    return replace(
        rewards, components={n: poison(c, valid) for n, c in rewards.components.items()}, token_components=tokens
    )


# -- degenerate inputs -------------------------------------------------------------------------------------------------


def _no_rows(trial: _Trial) -> None:
    out = _run(trial.node, {name: _cut(batch) for name, batch in trial.inputs.items()})
    if out.num_rows:
        raise trial.broken("degenerate groups", "no rows give rows", 0, out.num_rows, "return a row for each row")


def _cut(batch: Any) -> Any:
    return batch.select(_index([])) if isinstance(batch, Batch | Ragged) else batch


def _equal_rewards(trial: _Trial) -> None:
    """All rewards equal, all valid; the numbers are such that a mean of them need not be exact."""
    import torch

    def equal(batch: Any) -> Any:
        if not isinstance(batch, Rewards):
            return batch
        nothing = {n: c.with_values(torch.zeros_like(c.values)) for n, c in batch.token_components.items()}
        return replace(
            _all_valid(batch),
            components={n: torch.full_like(c, 0.1) for n, c in batch.components.items()},
            token_components=nothing,
        )

    _stays_finite(trial, {name: equal(batch) for name, batch in trial.inputs.items()}, "equal rewards")


def _invalid_rewards(trial: _Trial) -> None:
    import torch

    def invalid(batch: Any) -> Any:
        if not isinstance(batch, Rewards):
            return batch
        return _poisoned_rewards(
            replace(batch, valid=torch.zeros_like(batch.valid), reasons=("timed out",) * batch.num_rows),
            lambda column, valid: torch.where(valid, column, torch.nan),
        )

    inputs = {name: invalid(batch) for name, batch in trial.inputs.items()}
    try:
        _stays_finite(trial, inputs, "rewards that are all invalid")
    except RewardError:
        if getattr(trial.node, "invalid", "fail") != "fail":
            raise


def _stays_finite(trial: _Trial, inputs: dict[str, Any], when: str) -> None:
    out = _run(trial.node, inputs)
    _finite(_Trial(trial.node, inputs, trial.draw, out, _layout(inputs, out)), "degenerate groups", when)


def _lonely_rows(node: Node, draw: Draw, choice: Choice, makers: InputMakers | None) -> None:
    """Groups smaller than the node needs are refused; of one row, if it needs no more, they give finite numbers."""
    sizes = (*draw.group_sizes[:2], max(1, node.needs_groups - 1))
    lonely = replace(draw, group_sizes=sizes)
    try:
        trial = _trial(node, lonely, choice, makers)
    except GroupSizeError:
        if node.needs_groups > 1:
            return
        raise
    if node.needs_groups > 1 and node.needs_groups > min(_group_sizes(trial)):
        raise trial.broken(
            "degenerate groups",
            f"it needs groups of {node.needs_groups}, and does not refuse smaller ones",
            "a GroupSizeError",
            f"groups of {sorted(_group_sizes(trial))}",
            "call flowrl.nodes.advantage.require_groups(rollouts, needs_groups, node=self.name)",
        )
    _finite(trial, "degenerate groups", "a group of one")


def _group_sizes(trial: _Trial) -> list[int]:
    anchor = next(b for b in trial.inputs.values() if isinstance(b, Sequences))
    return anchor.prompt_id.unique(return_counts=True)[1].tolist() or [0]


def _all_valid(batch: Any) -> Any:
    """Rewards of which none is invalid; anything else as it is."""
    import torch

    if not isinstance(batch, Rewards):
        return batch
    return replace(
        batch,
        valid=torch.ones_like(batch.valid),
        reasons=("",) * batch.num_rows,
        components={n: c.nan_to_num() for n, c in batch.components.items()},
        token_components={n: c.with_values(c.values.nan_to_num()) for n, c in batch.token_components.items()},
    )
