"""Laws 1, 5 and 9 for every loss of the package, found by the registry: a new loss is tested without writing a test.

What each law is, and that a planted fault breaks it, is in ``tests/test_testing.py``; here hypothesis looks for inputs that
break one. Then gradients against finite differences in float64, with the detached parts of each loss frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl import Loss, TokenLoss, context
from flowrl.functional.aggregation import AGGREGATIONS
from flowrl.testing import Draw, registered_losses
from flowrl.testing.inputs import make_inputs
from flowrl.testing.losses import check_drawn
from flowrl.testing.measure import LeafScorer, make_leaves, no_engines, sums_of, under_test
from flowrl.testing.settings import choices, described, instances

#: Every example of every loss of the package.
LOSSES = [loss for cls in registered_losses() if cls.__module__.startswith("flowrl.") for loss in instances(cls)]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=described)

quick = settings(
    max_examples=4,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
draws = st.builds(
    Draw,
    seed=st.integers(0, 9999),
    group_sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    response_lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple),
    double=st.booleans(),
)


def test_the_losses_of_the_package_are_here() -> None:
    names = {type(loss).__name__ for loss in LOSSES}
    assert names >= {"PPOLoss", "GSPOLoss", "KLCovLoss", "DPOLoss", "KTOLoss", "SFTLoss", "ValueLoss", "DistillLoss"}


@every_loss
@quick
@given(data=st.data())
def test_laws(loss: Loss, data: st.DataObject) -> None:
    choice = data.draw(st.sampled_from(choices(loss)), "inputs")
    if isinstance(loss, TokenLoss):
        aggregation = data.draw(st.sampled_from([loss.aggregation, *AGGREGATIONS]), "aggregation")
        loss = replace(loss, aggregation=aggregation, scale=loss.scale if loss.scale != 1 else 3.0)
        assume(not list(loss.problems()))
    check_drawn(loss, data.draw(draws, "draw"), choice)


# -- finite differences ------------------------------------------------------------------------------------------------

#: Losses (with the settings of an example) whose gradient is not that of their value, on purpose: a part of them is
#: detached. For all others value and gradient must agree as they are. The list must not grow silently.
DETACHED = {
    "CISPOLoss": "the clipped ratio weights the gradient and passes none",
    "DPPOLoss": "the capped ratio weights the gradient and passes none",
    "GSPOLoss": "the ratio of a response passes its gradient on to each token's own log-prob alone",
    "PPOLoss(kl_estimator='k3_st')": "the value of k3 with the gradient of k2, straight through",
}


def detached(loss: Any) -> str:
    """The entry of ``DETACHED`` that a loss falls under, if any."""
    straight_through = str(getattr(loss, "kl_estimator", "")).endswith("_st")
    return f"{loss.name}(kl_estimator={loss.kl_estimator!r})" if straight_through else loss.name


class Detached:
    """What ``Tensor.detach`` gave in one evaluation, given again in the next ones, call by call."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    @contextmanager
    def patched(self, detach: Callable[[Tensor], Tensor]) -> Iterator[None]:
        original = torch.Tensor.detach
        torch.Tensor.detach = detach  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.Tensor.detach = original  # type: ignore[method-assign]

    def recorded(self, function: Callable[[], Tensor]) -> Tensor:
        original = torch.Tensor.detach

        def detach(tensor: Tensor) -> Tensor:
            self.values.append(original(tensor).clone())
            return original(tensor)

        with self.patched(detach):
            return function()

    def replayed(self, function: Callable[[], Tensor]) -> Tensor:
        values = iter(self.values)
        with self.patched(lambda tensor: next(values)):
            return function()


def slopes(loss: Loss, draw: Draw, given: Any) -> Iterator[tuple[str, float, float, float]]:
    """Of each leaf its name, and how steep the summed loss is in some direction: by its gradient, by central differences
    with the detached parts frozen, and by central differences of the loss as it is."""
    with context.use_step(under_test()), context.use_bindings(no_engines()):
        term = loss(**make_inputs(loss, draw, given))  # type: ignore[operator]
        leaves = make_leaves(term, draw)
        constants = term.loss.prepare(LeafScorer(term, leaves.get("logprobs")), **term.inputs)
        frozen = Detached()

        def value(**changed: Tensor) -> Tensor:
            return sums_of(term, {**leaves, **changed}, constants)["loss"][0]

        objective = frozen.recorded(value)
        assert objective.dtype == torch.float64
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            for direction in directions(leaf, draw):
                slope = float((gradient * direction).sum())
                step = lambda x, name=name: value(**{name: x})  # noqa: E731
                yield (
                    name,
                    slope,
                    difference(leaf, direction, lambda x, step=step: frozen.replayed(lambda: step(x))),
                    difference(leaf, direction, step),
                )


def directions(leaf: Tensor, draw: Draw, number: int = 2) -> list[Tensor]:
    """Random ones: along them a wrong gradient of any number shows."""
    generator = draw.generator("directions")
    return [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for _ in range(number)]


def difference(leaf: Tensor, direction: Tensor, function: Callable[[Tensor], Tensor], step: float = 1e-6) -> float:
    """The central difference of a function along a direction."""
    with torch.no_grad():
        up, down = (float(function(leaf.detach() + sign * step * direction)) for sign in (1, -1))
    return (up - down) / (2 * step)


@every_loss
def test_gradients_are_those_of_finite_differences(loss: Loss) -> None:
    """At random points, which are away from kinks. Differences are rounded by 1e-9 or so: 1e-6, relative to the steepest."""
    as_it_is = []
    for seed, choice in enumerate([c for c in choices(loss) if not c.left_out][:2]):
        found = list(slopes(loss, Draw(seed, (2, 1, 2), (4, 3, 0, 5), double=True), choice.given))
        for leaf in dict.fromkeys(name for name, *_ in found):
            rows = [numbers for name, *numbers in found if name == leaf]
            steepest = max(abs(slope) for slope, _, _ in rows)
            assert steepest > 1e-3, f"nothing depends on {leaf}"
            assert max(abs(slope - frozen) for slope, frozen, _ in rows) <= 1e-6 * steepest, (leaf, choice, rows)
            as_it_is.append(max(abs(slope - plain) for slope, _, plain in rows) / steepest)
    assert (max(as_it_is) > 1e-3) == (detached(loss) in DETACHED)


def test_every_entry_of_the_list_is_needed() -> None:
    assert DETACHED.keys() <= {detached(loss) for loss in LOSSES}


def test_a_wrong_gradient_is_noticed() -> None:
    """A negative control: the value of one thing with nine tenths of its gradient; and one with a part detached."""
    x = torch.linspace(0.1, 0.9, 5, dtype=torch.float64, requires_grad=True)
    direction = torch.ones_like(x)
    value = lambda x: x.sin().sum()  # noqa: E731
    right = difference(x, direction, value)
    assert abs(right - float(x.detach().cos().sum())) < 1e-8 < abs(right - 0.9 * float(x.detach().cos().sum()))

    frozen = Detached()
    product = lambda x: (x.detach() * x).sum()  # noqa: E731
    gradient = torch.autograd.grad(frozen.recorded(lambda: product(x)), x)[0]
    assert torch.equal(gradient, x.detach())
    assert abs(difference(x, direction, lambda x: frozen.replayed(lambda: product(x))) - float(gradient.sum())) < 1e-8
    assert abs(difference(x, direction, product) - 2 * float(gradient.sum())) < 1e-8
