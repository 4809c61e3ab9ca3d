"""Law 1 for every loss of the package, down to the parameters: the gradient does not depend on micro-batches, padding or
row shares (relative L2 ≤ 1e-5 in float32). A new loss with settings of the usual types is tested without a word.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

import flowrl
from flowrl import AdamW, Current, Loss, Model, RewardModel, Rollouts, ValueHead, ValueModel, context
from flowrl.annotations import edge_types, resolve_hints
from flowrl.batches import OldLogprobs, RefLogprobs, Sequences
from flowrl.context import Bindings, use_bindings
from flowrl.functional.grouping import coupled_units
from flowrl.nodes.loss import LossTerm, TermRows
from flowrl.nodes.updater import term_rows
from flowrl.ragged import Ragged
from flowrl.runtime.engines import transformers_training
from flowrl.runtime.engines.transformers_network import Network
from flowrl.runtime.worker import open_engine
from flowrl.testing import Draw, registered_losses
from flowrl.testing.inputs import make_inputs, owner_of
from flowrl.testing.settings import choices, described, instances
from tests.tiny import tiny_folder

Gradient = torch.Tensor
OPTIMIZER = AdamW(learning_rate=1e-2)
DRAW = Draw(seed=5, group_sizes=(2, 3, 1), response_lengths=(4, 1, 7, 0, 6, 3))


@dataclass(frozen=True)
class Models:
    """What losses train, and what their settings may name."""

    policy: Model
    value: ValueModel
    reward: RewardModel
    other: Model  # a reference, a teacher
    head: ValueHead

    def trained_by(self, loss: Loss) -> Model:
        """By what the loss reads."""
        if "scores" in loss.requires:
            return self.reward
        return self.value if "values" in loss.requires and loss.head() is None else self.policy

    def in_settings(self, loss: Loss) -> Loss:
        """The loss with a real Model in the place of each that ``flowrl.testing`` made up."""
        made_up = {name: self.other for name, value in loss.settings().items() if isinstance(value, Model)}
        heads = {name: self.head for name, value in loss.settings().items() if isinstance(value, ValueHead)}
        return replace(loss, **made_up, **heads)


def with_heads(loss: Loss) -> Iterator[Loss]:
    """The loss, and with a value head where it may have one."""
    yield loss
    hints = resolve_hints(type(loss))
    names = [f.name for f in fields(loss) if ValueHead in edge_types(hints[f.name])[0]]
    if names:
        yield replace(loss, **dict.fromkeys(names, ValueHead(Model("some-policy"))))


LOSSES = [
    variant
    for cls in registered_losses()
    if cls.__module__.startswith("flowrl.")
    for loss in instances(cls)
    for variant in with_heads(loss)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder, other = (str(tiny_folder(tmp_path_factory.mktemp("model"), seed)) for seed in (0, 1))
    policy = Model(folder, name="policy", device="cpu")
    return Models(
        policy,
        ValueModel(folder, name="value", device="cpu"),
        RewardModel(folder, name="reward", device="cpu", trainable=True, new_head=True),
        Model(other, name="other", device="cpu"),
        ValueHead(policy),
    )


@dataclass(frozen=True)
class Labs:
    """Engines of the same weights that pack sequences, and that pad them."""

    models: Models
    packed: Bindings
    padded: Bindings


@pytest.fixture(scope="module")
def labs(models: Models) -> Labs:
    found = []
    for packs in (True, False):
        bindings = Bindings(open_engine)
        with pytest.MonkeyPatch.context() as patch, use_bindings(bindings):
            if not packs:
                patch.setattr(Network, "_probe_packing", lambda self: False)
            for model in (models.policy, models.value, models.reward, models.other):
                engine: Any = bindings.engine(model)
                assert engine.network.abilities.packs == packs
            bindings.engine(models.head)  # type: ignore[arg-type]
            for model in (models.policy, models.value, models.reward):
                _random_heads(bindings.engine(model))
        found.append(bindings)
    return Labs(models, *found)


def _random_heads(engine: Any) -> None:
    """A head of zeros would hide the trunk's gradient."""
    generator = torch.Generator().manual_seed(3)
    heads = [p for name, p in engine.trained_parameters() if bool((p == 0).all()) and p.ndim == 2]
    with torch.no_grad():
        for parameter in heads:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Gradient]:
    """All gradients of each optimiser step as one vector; nothing is changed by it."""
    found: list[Gradient] = []

    def captured(self: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        found.append(torch.cat(flat).double())

    monkeypatch.setattr(torch.optim.AdamW, "step", captured)
    # The engine checks that the counts of its rows add up to those of the step; on one rank of several they do not.
    monkeypatch.setattr(transformers_training, "_check_counts", lambda terms, tallies: None)
    return found


def near_the_policy(term: LossTerm, engine: Any) -> LossTerm:
    """With old and reference log-probs that are near the model's own, so that not every ratio is clipped."""
    sequences = {name: batch for name, batch in term.inputs.items() if isinstance(batch, Sequences)}
    noise = torch.Generator().manual_seed(11)

    def near(name: str, batch: Any) -> Any:
        columns = {OldLogprobs: "old_logprobs", RefLogprobs: "ref_logprobs"}
        if type(batch) not in columns:
            return batch
        own: Ragged = engine.logprobs(sequences[owner_of(name, list(sequences))]).logprobs
        moved = own.values + 0.3 * torch.randn(len(own.values), generator=noise)
        return replace(batch, **{columns[type(batch)]: own.with_values(moved)})

    return replace(term, inputs={name: near(name, batch) for name, batch in term.inputs.items()})


def distances(loss: Loss, labs: Labs, gradients: list[Gradient]) -> dict[str, float]:
    """By how the rows are split and laid out, how far the gradient is from that of all rows in one packed micro-batch."""
    loss = labs.models.in_settings(loss)
    model = labs.models.trained_by(loss)

    def gradient(bindings: Bindings, parts: Sequence[Sequence[int]], micro_batch_tokens: int = 4096) -> Gradient:
        """The sum over the ranks that hold these rows each, of a step whose constants all rows gave."""
        gradients.clear()
        engine: Any = bindings.engine(model)
        engine.micro_batch_tokens = micro_batch_tokens
        with use_bindings(bindings):
            whole = term_rows(term, engine)
            for part in parts:
                rows = TermRows(term.select(torch.tensor(part, dtype=torch.int64)), whole.constants, whole.count)
                engine.train_step([rows], OPTIMIZER, max_grad_norm=None)
        return torch.stack(gradients).sum(0)

    with flowrl.step(seed=1), context.use_label("updater"):
        term: LossTerm = loss(**make_inputs(loss, DRAW, choices(loss)[0].given))  # type: ignore[operator]
        if model is labs.models.policy:
            term = near_the_policy(term, labs.packed.engine(model))
        units = coupled_units(term.sequences, loss.couples)
        everything = [list(range(term.num_rows))]
        whole = gradient(labs.packed, everything)
        others = {
            "a unit each": gradient(labs.packed, everything, micro_batch_tokens=1),
            "padded, some rows each": gradient(labs.padded, everything, micro_batch_tokens=20),
            "two ranks": gradient(labs.packed, shares(units, 2)),
            "three ranks, padded": gradient(labs.padded, shares(units, 3)),
        }
    assert bool(whole.norm() > 1e-6), "there is no gradient to compare"
    assert any(not torch.equal(other, whole) for other in others.values()), "all of them did the same"
    return {name: float((other - whole).norm() / whole.norm()) for name, other in others.items()}


@pytest.mark.parametrize("loss", LOSSES, ids=described)
def test_gradients_of_the_parameters(loss: Loss, labs: Labs, gradients: list[Gradient]) -> None:
    found = distances(loss, labs, gradients)
    assert {how: by for how, by in found.items() if not by <= 1e-5} == {}


def test_a_mean_of_each_micro_batch_is_noticed(labs: Labs, gradients: list[Gradient]) -> None:
    """A negative control."""

    @flowrl.loss
    def planted(current: Current, rollouts: Rollouts) -> torch.Tensor:
        return -current.logprobs / max(1, int(current.loss_mask.values.sum()))

    assert all(by > 1e-2 for by in distances(planted.node_class(), labs, gradients).values())  # type: ignore[arg-type]


def shares(units: list[list[int]], num_ranks: int) -> list[list[int]]:
    """Rows of each rank."""
    numbers = random.Random(num_ranks)
    order = numbers.sample(units, len(units))
    return [[row for unit in order[rank::num_ranks] for row in unit] for rank in range(num_ranks)]
