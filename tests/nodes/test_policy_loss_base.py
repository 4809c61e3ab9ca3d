"""A policy loss of one's own: what it is given, and what it gets for nothing."""

import pytest
import torch

from flowrl.nodes.policy_loss_base import PolicyLoss, PolicyTokens
from flowrl.nodes.policy_losses import DROLoss
from flowrl.ragged import Ragged
from tests.policy_terms import SPLIT, WHOLE, current_of, gradients, leaves, means, term_of

NAN = float("nan")


def test_a_loss_of_ones_own() -> None:
    class Quadratic(PolicyLoss):
        pull: float = 0.1

        def surrogate(self, tokens: PolicyTokens) -> torch.Tensor:
            assert tokens.has_old and tokens.constants is None
            return -tokens.advantages * tokens.logprobs + self.pull * (tokens.logprobs - tokens.old_logprobs) ** 2

    torch.testing.assert_close(
        gradients(term_of(Quadratic(0.35)), leaves(), SPLIT), gradients(term_of(DROLoss(0.7)), leaves(), WHOLE)
    )
    with pytest.raises(NotImplementedError, match="Nothing defines no surrogate"):

        class Nothing(PolicyLoss):
            pass

        means(term_of(Nothing()))


def test_a_loss_of_ones_own_sees_no_garbage() -> None:
    """All columns are 0 where no token counts, and weights are 1: it may take sums over rows without a mask."""
    seen: dict[str, torch.Tensor] = {}

    class Looks(PolicyLoss):
        def surrogate(self, tokens: PolicyTokens) -> torch.Tensor:
            columns = {n: getattr(tokens, n) for n in ("logprobs", "advantages", "old_logprobs", "rollout_logprobs")}
            seen.update(columns, mask=tokens.mask.values)
            return tokens.logprobs

        def weigh(self, losses: torch.Tensor, weights: torch.Tensor, mask: Ragged) -> torch.Tensor:
            seen["weights"] = weights - 1
            return losses

    for without in ((), ("importance_weights",)):
        term = term_of(Looks(), NAN, without=without)
        term.loss.sums(current_of(leaves(NAN)), None, **term.inputs)
        counted = seen.pop("mask").bool()
        assert int(counted.sum()) == term.loss.count(**term.inputs)
        for column in seen.values():
            assert bool(column[counted].all()) and not bool(column[~counted].any())
        seen.clear()
