import torch

from flowrl.functional.value_loss import value_loss


def test_by_hand() -> None:
    values, returns, old = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 4.0]), torch.tensor([0.5, 1.0])
    assert value_loss(values, returns)[0].tolist() == [0.5, 0.5]
    losses, held = value_loss(values, returns, old, clip=1.0)
    assert losses.tolist() == [0.5, 2.0]  # 3 counts as 1 + 1 = 2, two away from 4
    assert held.tolist() == [0.0, 1.0]


def test_a_clipped_value_has_no_gradient() -> None:
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    value_loss(values, torch.tensor([0.0, 4.0]), torch.tensor([0.5, 1.0]), clip=1.0)[0].sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, 0.0]


def test_no_tokens() -> None:
    losses, held = value_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), clip=1.0)
    assert losses.tolist() == held.tolist() == []
