from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.batches import Advantages, Values
from flowrl.functional.aggregation import AGGREGATIONS
from flowrl.models import Model, ValueHead
from flowrl.nodes.loss import Current
from flowrl.nodes.sft import SFTLoss
from flowrl.nodes.value_loss import ValueLoss
from flowrl.ragged import Ragged
from tests.policy_terms import MASK, SPLIT, WHOLE, gradients, leaves, means, term_of
from tests.tiny import recorded_rollouts

LOSSES: dict[str, Any] = {"value": ValueLoss(), "clipped": ValueLoss(clip=0.1), "sft": SFTLoss()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_law_1_micro_batches_do_not_matter(name: str, aggregation: Any) -> None:
    term = term_of(replace(LOSSES[name], aggregation=aggregation))
    whole, want = gradients(term, leaves(), WHOLE)
    split, got = gradients(term, leaves(), SPLIT)
    assert want.keys() == got.keys() != set()
    torch.testing.assert_close((split, got), (whole, want))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_what_stands_at_observations_reaches_neither_loss_nor_gradient(name: str, garbage: float) -> None:
    clean, want = gradients(term_of(LOSSES[name]), leaves(), WHOLE)
    dirty, got = gradients(term_of(LOSSES[name], garbage), leaves(garbage), WHOLE)
    assert torch.equal(clean, dirty) and bool(clean.isfinite())
    for n in want:
        assert torch.equal(got[n], want[n])


def test_value_loss_and_its_metrics() -> None:
    rollouts = recorded_rollouts(1, 1, response_lengths=(2,))
    mask, ids = rollouts.loss_mask, (rollouts.prompt_id, rollouts.sample_id)

    def column(*numbers: float) -> Ragged:
        return mask.with_values(torch.tensor(numbers))

    term = ValueLoss(clip=1.0)(
        rollouts, Values(*ids, column(0.5, 1.0)), Advantages(*ids, column(0.0, 0.0), column(0.0, 4.0))
    )
    sums = term.loss.sums(Current(mask, values=torch.tensor([1.0, 3.0])), None, **term.inputs)
    found = {n: float(total) / float(count) for n, (total, count) in sums.items() if count is not None}
    assert found == {"loss": 1.25, "value_mean": 2.0, "value_error": 1.0, "value_clip_fraction": 0.5}


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    found = means(term_of(SFTLoss()))
    want = -float(leaves()["logprobs"].detach()[MASK.values.bool()].mean())
    assert found == {"loss": pytest.approx(want), "nll": pytest.approx(want)}


def test_what_it_reads_and_its_problems() -> None:
    assert ValueLoss().requires == {"values"} and ValueLoss().head() is None
    head = ValueHead(Model("m"))
    assert ValueLoss(head).head() is head
    assert ValueLoss().problems() == [] and len(ValueLoss(clip=0.0).problems()) == 1
