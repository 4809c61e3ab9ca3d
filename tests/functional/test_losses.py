import math

import pytest
import torch

from flowrl.functional.losses import importance_ratio, ppo_loss, value_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "want", "clipped"),
    [
        (1.0, 2.0, {}, -2.0, 0.0),
        (1.5, 2.0, {}, -2.4, 1.0),  # no reward for going further than 1.2
        (1.5, 2.0, {"clip_high": 0.6}, -3.0, 0.0),
        (0.5, 2.0, {}, -1.0, 0.0),  # a good token that became unlikely is pulled back in full
        (0.5, -2.0, {}, 1.6, 1.0),
        (5.0, -2.0, {}, 10.0, 0.0),
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 1.0),  # the dual clip is for negative advantages alone
    ],
)
def test_ppo_loss_by_hand(ratio: float, advantage: float, settings, want: float, clipped: float) -> None:
    losses, held = ppo_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), **settings)
    assert losses.tolist() == pytest.approx([want])
    assert held.tolist() == [clipped]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    ppo_loss(logprobs, torch.zeros(2), torch.ones(2))[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_the_ratio_stays_finite() -> None:
    assert bool(importance_ratio(torch.tensor([500.0, -500.0]), torch.zeros(2)).isfinite().all())


def test_value_loss_by_hand() -> None:
    values, returns, old = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 4.0]), torch.tensor([0.5, 1.0])
    assert value_loss(values, returns)[0].tolist() == [0.5, 0.5]
    losses, held = value_loss(values, returns, old, clip=1.0)
    assert losses.tolist() == [0.5, 2.0]  # 3 counts as 1 + 1 = 2, two away from 4
    assert held.tolist() == [0.0, 1.0]
