"""What Clip-Cov and KL-Cov hold is settled once an optimiser step, and found again in any micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl import context
from flowrl.functional.covariance import clip_cov_tokens, kl_cov_tokens
from flowrl.nodes.covariance_losses import ClipCovLoss, CovarianceLoss, KLCovLoss, MarkedTokens
from flowrl.nodes.policy_losses import PPOLoss
from tests.policy_terms import MASK, ROLLOUTS, WHOLE, Policy, gradients, inputs, leaves, means, noise, term_of

COVARIANCE: list[Any] = [ClipCovLoss(share=0.3, low=-9.0, high=9.0), KLCovLoss(0.3, share=0.3)]
X, A, OLD = noise(6).values, noise(1).values, noise(3).values


def marked(loss: Any, rows: list[int] | None = None) -> torch.Tensor:
    """The tokens of all rows that are held, in their order."""
    term = term_of(loss, without=("importance_weights",))
    policy = Policy(leaves()["logprobs"])
    constants = loss.prepare(policy, **(term if rows is None else term.select(rows)).inputs)
    assert isinstance(constants, MarkedTokens) and policy.asked == 1
    return constants.find(ROLLOUTS)


def test_kl_cov_holds_the_largest_covariances() -> None:
    want = kl_cov_tokens(X, A, MASK, share=0.3)
    assert torch.equal(marked(COVARIANCE[1]), want)
    assert int(want.sum()) == int(int(MASK.values.sum()) * 0.3)


def test_clip_cov_draws_by_seed_label_iteration_and_pull() -> None:
    loss = COVARIANCE[0]

    def drawn(seed: int = 0, iteration: int = 0, pull: int = 0, label: str = "") -> torch.Tensor:
        with context.step(seed, iteration, pull=pull), context.use_label(label):
            return marked(loss)

    key = context.random_key(5, "train", 3, 1)
    want = clip_cov_tokens(X, OLD, A, MASK, key=key, share=0.3, low=-9.0, high=9.0, ids=ROLLOUTS.row_ids)
    assert torch.equal(drawn(5, 3, 1, "train"), want)
    torch.manual_seed(0)
    assert torch.equal(drawn(), drawn())
    for changed in (drawn(seed=1), drawn(iteration=1), drawn(pull=1), drawn(label="other")):
        assert not torch.equal(changed, drawn()) and int(changed.sum()) == int(drawn().sum())


@pytest.mark.parametrize("loss", COVARIANCE, ids=lambda v: type(v).__name__)
def test_they_are_found_by_the_ids_of_their_rows(loss: Any) -> None:
    assert torch.equal(marked(loss, [5, 2, 0, 4, 1, 3]), marked(loss))
    term = term_of(loss, without=("importance_weights",))
    constants = loss.prepare(Policy(leaves()["logprobs"]), **term.inputs)
    for rows in ([4, 1], [2], []):
        want = MASK.with_values(marked(loss)).select(torch.tensor(rows, dtype=torch.int64)).values
        assert torch.equal(constants.find(ROLLOUTS.select(rows)), want)


@pytest.mark.parametrize("loss", COVARIANCE, ids=lambda v: type(v).__name__)
def test_rejected_tokens_are_neither_counted_nor_held(loss: Any) -> None:
    term = term_of(loss)
    keep = inputs()["importance_weights"].keep.values.bool() & MASK.values.bool()
    found = loss.prepare(Policy(leaves()["logprobs"]), **term.inputs).find(ROLLOUTS)
    assert not bool((found & ~keep).any()) and int(found.sum()) == int(int(keep.sum()) * 0.3)


def test_detached_tokens_lose_value_and_gradient() -> None:
    loss, without = COVARIANCE[0], ("importance_weights", "ref_logprobs")
    held = marked(loss)
    _, got = gradients(term_of(loss, without=without), leaves(), WHOLE)
    _, plain = gradients(term_of(PPOLoss(), without=without), leaves(), WHOLE)
    torch.testing.assert_close(got["logprobs"], torch.where(held, 0.0, plain["logprobs"]))
    metrics = means(term_of(loss, without=without))
    assert metrics["detached_fraction"] == pytest.approx(float(held.sum()) / float(MASK.values.sum()))


def test_penalised_tokens_are_pulled_back() -> None:
    loss, without = COVARIANCE[1], ("importance_weights", "ref_logprobs")
    held, number = marked(loss), int(MASK.values.sum())
    _, got = gradients(term_of(loss, without=without), leaves(), WHOLE)
    _, less = gradients(term_of(replace(loss, coef=0.1), without=without), leaves(), WHOLE)
    pull = torch.where(held, 0.2 * torch.sign(X - OLD) / number, 0.0)
    torch.testing.assert_close(got["logprobs"] - less["logprobs"], pull, rtol=1e-4, atol=1e-6)
    metrics = means(term_of(loss, without=without))
    assert metrics["penalised_fraction"] == pytest.approx(int(held.sum()) / number)


def test_problems() -> None:
    def problems(loss: Any) -> list[str]:
        return [p.split(" is ")[0] for p in loss.problems()]

    assert problems(ClipCovLoss(1.0, 0.0, share=0.0, low=2.0, high=1.0)) == ["share", "clip", "clip_high", "low"]
    assert problems(KLCovLoss(0.0, share=1.5)) == ["share", "coef"]
    assert (ClipCovLoss().share, KLCovLoss().share) == (2e-4, 2e-3)
    with pytest.raises(NotImplementedError, match="which tokens it marks"):
        CovarianceLoss().marked(*[None] * 2)  # type: ignore[arg-type]
