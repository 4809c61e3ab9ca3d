"""The numbers that users moving here will compare against: another library's, on seeded inputs."""

import pytest
import torch

from flowrl.functional.advantages import gae, group_advantages, spread_over_tokens
from flowrl.functional.aggregation import aggregate
from flowrl.functional.kl import kl_estimate
from flowrl.functional.losses import ppo_loss, value_loss
from flowrl.functional.masking import masked_whiten
from tests.reference_cases import Case, cases


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=1e-4, atol=1e-5)


def loss_of(losses: torch.Tensor, case: Case, mode: str, scale: float = 1.0) -> torch.Tensor:
    total, count = aggregate(losses, case.mask, mode, scale)
    return total if count is None else total / count


def by_id(kind: str, *names: str):
    return pytest.mark.parametrize("case", cases(kind, *names), ids=lambda c: c.id)


@by_id("aggregate")
def test_aggregate(case: Case) -> None:
    got = loss_of(case.column("loss").values, case, case.name, case.params.get("scale", 1.0))
    close(got, torch.tensor(case.expected["value"]))


@by_id("kl")
def test_kl(case: Case) -> None:
    got = kl_estimate(case.column("logprobs").values, case.column("ref_logprobs").values, case.name)
    close(got, case.expected_column("kl"))


@by_id("value_loss")
def test_value_loss(case: Case) -> None:
    losses, _ = value_loss(
        *(case.column(n).values for n in ("values", "returns", "old_values")), clip=case.params["clip"]
    )
    close(loss_of(losses, case, case.params["aggregate"]), torch.tensor(case.expected["loss"]))


@by_id("policy_loss", "vanilla")
def test_ppo_loss_and_its_gradient(case: Case) -> None:
    logprobs = case.column("logprobs").values.requires_grad_()
    losses, _ = ppo_loss(
        logprobs,
        case.column("old_logprobs").values,
        case.column("advantages").values,
        clip_low=case.params["clip_ratio_low"],
        clip_high=case.params["clip_ratio_high"],
        dual_clip=case.params["dual_clip"],
    )
    if "importance_weights" in case.inputs:
        losses = losses * case.column("importance_weights").values
    loss = loss_of(losses, case, case.params["aggregate"])
    close(loss.detach(), torch.tensor(case.expected["loss"]))
    loss.backward()
    assert logprobs.grad is not None
    close(logprobs.grad, case.expected_column("grad_logprobs"))


@by_id("advantage", "gae")
def test_gae(case: Case) -> None:
    gamma, lam = case.params["gamma"], case.params["lam"]
    advantages, returns = gae(case.column("rewards"), case.column("values"), case.mask, gamma=gamma, lam=lam)
    mask = case.mask.values.bool()
    whitened = torch.where(mask, masked_whiten(advantages.values, mask), 0.0)
    close(whitened, case.expected_column("advantages"))
    close(returns.values, case.expected_column("returns"))


@by_id("advantage", "grpo", "rloo")
def test_group_advantages(case: Case) -> None:
    row = group_advantages(
        case.column("rewards").sum_rows(),
        case.prompt_id,
        normalize_by_std=case.params.get("normalize_by_std", False),
        leave_one_out=case.name == "rloo",
        eps=case.params.get("eps", 1e-6),
    )
    close(spread_over_tokens(row, case.mask).values, case.expected_column("advantages"))
