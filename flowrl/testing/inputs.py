"""Random inputs for a node, from the annotations of its ports: what a law is tried on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.annotations import edge_types
from flowrl.batches import (
    Batch,
    Preferences,
    Rollouts,
    Sequences,
    SpanKind,
    Spans,
)
from flowrl.errors import FlowError
from flowrl.nodes.base import Node
from flowrl.nodes.calling import Port
from flowrl.ragged import Ragged
from flowrl.testing.columns import VOCAB_SIZE, completed, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: By port, a function from the sequences that the port belongs to, and a generator, to its batch.
InputMakers = Mapping[str, Callable[[Sequences, "torch.Generator"], Any]]


@dataclass(frozen=True)
class Draw:
    """What random inputs look like. The same draw always gives the same inputs.

    Args:
        seed: of all numbers.
        group_sizes: how many rows each prompt has; pairs always have two.
        response_lengths: in tokens, taken in turn by the rows; 0 is an empty response.
        double: what the model gives is float64 instead of float32. (Columns of batches always are float32.)
        written: False for responses in which the policy wrote nothing: all their tokens are observations.
    """

    seed: int = 0
    group_sizes: tuple[int, ...] = (2, 3, 1, 4)
    response_lengths: tuple[int, ...] = (4, 1, 7, 0, 6, 3, 5)
    double: bool = False
    written: bool = True

    @classmethod
    def random(cls, seed: int, *, smallest_group: int = 1, double: bool = False) -> Draw:
        """Some draw: 1 to 5 groups of unequal sizes, responses of 0 to 8 tokens."""
        numbers = random.Random(seed)
        sizes = [smallest_group + numbers.randrange(4) for _ in range(numbers.randint(1, 5))]
        lengths = [numbers.choice((0, 1, 2, 3, 5, 8)) for _ in range(7)]
        return cls(seed, tuple(sizes), tuple(lengths), double)

    def generator(self, name: str) -> torch.Generator:
        """Random numbers of their own for everything that has a name."""
        import torch

        return torch.Generator().manual_seed(context.random_key(self.seed, name) % (1 << 63))


def make_inputs(node: Node, draw: Draw, given: Iterable[str], makers: InputMakers | None = None) -> dict[str, Any]:
    """Inputs by argument, as users give them: rows in different orders, and more of them where an argument joins by
    "subset".

    A column in response layout (log-probs, values, …) belongs to the first input that is a kind of ``Sequences``, or to
    the one whose name its own name starts with (``mismatched_ref`` to ``mismatched``).

    Args:
        given: the optional arguments to give.
        makers: for arguments of types that nobody knows here.

    Raises:
        FlowError: an input of a type that cannot be made.
    """
    given, makers = set(given), makers or {}
    ports = [p for p in node.ports if p.required or p.variadic or p.name in given]
    rows = _Rows.of(node, ports, draw)
    owners: dict[str, Sequences] = {}
    for port in ports:
        if _sequence_type(port) is not None:  # responses of other lengths than those of the inputs before
            owners[port.name] = _sequences_of(node, port, rows.turned(len(owners)), draw, makers)
    if not owners:  # nothing says how long responses are: invent it
        owners[""] = _random_sequences(Rollouts, rows, draw, "rows")
    inputs: dict[str, Any] = {}
    for port in ports:
        batch = owners.get(port.name)
        if batch is None:
            owner = owners[owner_of(port.name, list(owners))]
            if node.joins.get(port.name) == "prompt":
                owner = _one_a_prompt(owner)
            batch = _made(port, owner, draw, makers)
        batch = _rows_to_give(node, port, batch, rows, draw)
        inputs[port.name] = (batch,) if port.variadic else batch
    return inputs


def owner_of(name: str, sequences: Sequence[str]) -> str:
    """Which of the arguments that are sequences (at least one) another argument belongs to."""
    return next((n for n in sequences if n and name.startswith(n)), sequences[0])


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """The rows of all inputs, in an order that is nobody's.

    Args:
        ids: (prompt_id, sample_id).
        lengths: tokens of each response.
        kept: the rows that inputs which join "exact" have.
    """

    ids: list[tuple[int, int]]
    lengths: list[int]
    kept: list[int]

    @classmethod
    def of(cls, node: Node, ports: Sequence[Port], draw: Draw) -> _Rows:
        numbers = random.Random(draw.seed)
        pairs = any(_sequence_type(p) is Preferences for p in ports)
        prompts = numbers.sample(range(3, 4 * len(draw.group_sizes) + 9), len(draw.group_sizes))
        sizes = [2 if pairs else size for size in draw.group_sizes]
        ids = [(prompt, sample) for prompt, size in zip(prompts, sizes, strict=True) for sample in range(size)]
        lengths = [draw.response_lengths[i % len(draw.response_lengths)] for i in range(len(ids))]
        order = numbers.sample(range(len(ids)), len(ids))
        ids, lengths = [ids[i] for i in order], [lengths[i] for i in order]
        kept = list(range(len(ids)))
        if "subset" in node.joins.values() and len(ids) > 1:
            by_prompt = pairs or node.needs_groups > 1
            units = sorted({ids[i][0] if by_prompt else ids[i] for i in kept})
            dropped = set(units) - set(numbers.sample(units, max(1, round(0.8 * len(units)))))
            kept = [i for i in kept if (ids[i][0] if by_prompt else ids[i]) not in dropped]
        return cls(ids, lengths, numbers.sample(kept, len(kept)))

    def turned(self, number: int) -> _Rows:
        """The same rows with each other's lengths."""
        return replace(self, lengths=[*self.lengths[number:], *self.lengths[:number]])


def _rows_to_give(node: Node, port: Port, batch: Any, rows: _Rows, draw: Draw) -> Any:
    """The rows that the argument holds, in an order of its own."""
    if isinstance(batch, Ragged):  # without ids: it must be in the order of the other inputs
        return batch.select(_tensor(rows.kept))
    join = node.joins.get(port.name, "exact")
    numbers = random.Random(f"{draw.seed} {port.name}")
    if join == "exact":
        return batch.select(_tensor(rows.kept))
    return batch.select(_tensor(numbers.sample(range(batch.num_rows), batch.num_rows)))


def _one_a_prompt(sequences: Sequences) -> Sequences:
    """The first row of each prompt, as ``sample_id`` 0."""
    import torch

    first: dict[int, int] = {}
    for row, prompt in enumerate(sequences.prompt_id.tolist()):
        first.setdefault(prompt, row)
    return replace(sequences.select(list(first.values())), sample_id=torch.zeros(len(first), dtype=torch.int64))


def _tensor(rows: Sequence[int]) -> Tensor:
    import torch

    return torch.tensor(rows, dtype=torch.int64)


# -- sequences ---------------------------------------------------------------------------------------------------------


def _sequence_type(port: Port) -> type[Sequences] | None:
    found = [t for t in edge_types(port.annotation)[0] if issubclass(t, Sequences)]
    return None if not found else Rollouts if found[0] is Sequences else found[0]


def _sequences_of(node: Node, port: Port, rows: _Rows, draw: Draw, makers: InputMakers) -> Sequences:
    kind = _sequence_type(port)
    assert kind is not None
    if port.name in makers:
        return makers[port.name](_random_sequences(Rollouts, rows, draw, port.name), draw.generator(port.name))
    made = _random_sequences(kind, rows, draw, port.name)
    return _one_a_prompt(made) if node.joins.get(port.name) == "prompt" else made


def _random_sequences(kind: type[Sequences], rows: _Rows, draw: Draw, name: str) -> Sequences:
    import torch

    numbers = random.Random(f"{draw.seed} {name}")
    tokens, kinds, lengths = [], [], []
    for length in rows.lengths:
        spans = [(SpanKind.PROMPT, numbers.randint(1, 4)), *_random_spans(length, numbers, draw.written)]
        tokens.append([numbers.randrange(VOCAB_SIZE) for _ in range(sum(n for _, n in spans))])
        kinds.append([k for k, _ in spans])
        lengths.append([n for _, n in spans])
    column = Ragged.from_rows(kinds, torch.uint8)
    versions = torch.where(column.values == SpanKind.POLICY, 0, -1)
    values: dict[str, Any] = {
        "prompt_id": _tensor([prompt for prompt, _ in rows.ids]),
        "sample_id": _tensor([sample for _, sample in rows.ids]),
        "tokens": Ragged.from_rows(tokens, torch.int64),
        "spans": Spans(column, Ragged.from_rows(lengths, torch.int64), column.with_values(versions)),
    }
    base = Sequences(**values)
    return completed(kind, base, values, draw.generator(name))


def _random_spans(length: int, numbers: random.Random, written: bool) -> list[tuple[SpanKind, int]]:
    """A response: one turn; several with observations between them or at the end; or nothing that the policy wrote."""
    policy, observation = SpanKind.POLICY, SpanKind.OBSERVATION
    form = numbers.random()
    if length >= 4 and form < 0.4 and written:
        first = numbers.randint(1, length - 2)
        return [(policy, first), (observation, length - first - 1), (policy, 1)]
    if length >= 2 and form < 0.6 and written:
        return [(policy, length - 1), (observation, 1)]
    if length and (form > 0.95 or not written):
        return [(observation, length)]
    return [(policy, length)]


# -- batches of each type ----------------------------------------------------------------------------------------------


def _made(port: Port, owner: Sequences, draw: Draw, makers: InputMakers) -> Any:
    """A batch of the port's type with the rows and in the response layout of ``owner``."""
    generator = draw.generator(port.name)
    if port.name in makers:
        return makers[port.name](owner, generator)
    for kind in edge_types(port.annotation)[0]:
        if issubclass(kind, Ragged):
            return owner.loss_mask.with_values(normal(len(owner.loss_mask.values), generator))
        if issubclass(kind, Batch):
            return completed(kind, owner, {"prompt_id": owner.prompt_id, "sample_id": owner.sample_id}, generator)
    raise FlowError(
        f"flowrl.testing cannot make the input {port.name!r}",
        expected="a kind of batch, or Ragged",
        received=str(port.annotation),
        do=f"say how it is made: inputs={{{port.name!r}: lambda sequences, generator: …}}",
    )
