"""Preference losses against the ``trl`` package, where it is installed: its own trainers compute the loss of a batch from
made-up log-probs of tokens, and ours is computed from the same.

An optional check: ``pip install trl``, then ``pytest -m slow tests/functional/test_preferences_trl.py``.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.functional.preferences import (
    bradley_terry_loss,
    dpo_loss,
    kto_loss,
    kto_reference_point,
    orpo_loss,
    simpo_loss,
)

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl", minversion="1.0")

PAIRS, WIDTH = 5, 9
GENERATOR = torch.Generator().manual_seed(0)
#: Tokens of each answer, chosen ones first, after a prompt of 2.
LENGTHS = torch.randint(1, WIDTH - 1, (2 * PAIRS,), generator=GENERATOR)
POSITIONS = torch.arange(WIDTH)[None]
COMPLETION = ((POSITIONS >= 2) & (LENGTHS[:, None] > POSITIONS - 2)).long()


def made_up(scale: float = 1.0) -> Tensor:
    """float64 ``[2 · PAIRS, WIDTH − 1]``: log-probs of tokens, 0 where there is no answer, as its fused head gives them."""
    values = -scale * torch.rand(2 * PAIRS, WIDTH - 1, generator=GENERATOR, dtype=torch.float64)
    return torch.where(COMPLETION[:, 1:].bool(), values, 0.0)


POLICY, REFERENCE = made_up(), made_up(1.1)
MISMATCHED, MISMATCHED_REFERENCE = made_up(), made_up(2.0)
MEANS = POLICY.sum(1) / LENGTHS


def model_of(*answers: Tensor) -> Any:
    """A model whose forward passes give these log-probs of tokens, one after the other."""
    waiting = list(answers)

    def forward(**inputs: Any) -> Any:
        log_probs = waiting.pop(0)
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing > 1)

    return forward


def trainer_of(kind: Any, **attributes: Any) -> Any:
    """A trainer with no more than the loss needs."""
    trainer = object.__new__(kind)
    same = SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x, device=torch.device("cpu"))
    defaults: dict[str, Any] = dict(
        accelerator=same, model=torch.nn.Identity().eval(), aux_loss_enabled=False, precompute_ref_logps=False
    )
    defaults |= dict(_metrics={"eval": defaultdict(list)}, _total_train_tokens=0, ref_model=None, _tp_size=1)
    defaults["args"] = SimpleNamespace(gradient_checkpointing_kwargs=None)
    for name, value in {**defaults, **attributes}.items():
        object.__setattr__(trainer, name, value)
    return trainer


@pytest.fixture(autouse=True)
def no_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses switch gradient checkpointing off on a model that is not there."""
    from contextlib import nullcontext

    for module in ("dpo_trainer", "kto_trainer"):
        imported = pytest.importorskip(f"trl.trainer.{module}")
        monkeypatch.setattr(imported, "disable_gradient_checkpointing", lambda *_: nullcontext(), raising=False)


@pytest.mark.parametrize(
    ("loss", "epsilon", "ours"),
    [
        ("sigmoid", 0.0, {}),
        ("hinge", 0.0, {"loss": "hinge"}),
        ("robust", 0.2, {"loss": "robust", "label_smoothing": 0.2}),
        ("ipo", 0.0, {"loss": "ipo", "means": True}),
        ("sigmoid_norm", 0.0, {"means": True}),
    ],
)
def test_dpo(loss: str, epsilon: float, ours: dict[str, Any]) -> None:
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]

    trainer = trainer_of(
        DPOTrainer,
        beta=0.3,
        loss_types=[loss],
        loss_weights=[1.0],
        label_smoothing=epsilon,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        ref_model=model_of(REFERENCE),
    )
    ids = torch.zeros(2 * PAIRS, WIDTH, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": COMPLETION}
    theirs = trainer._compute_loss(model_of(POLICY), inputs, False)

    options = dict(ours)
    by = LENGTHS if options.pop("means", False) else torch.ones(2 * PAIRS)
    columns = [*(POLICY.sum(1) / by).chunk(2), *(REFERENCE.sum(1) / by).chunk(2)]
    assert dpo_loss(*columns, beta=0.3, **options).mean().item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("mismatched", [MISMATCHED, 3 * MISMATCHED_REFERENCE], ids=["above 0", "held at 0"])
def test_kto(mismatched: Tensor) -> None:
    from trl import KTOTrainer  # pyright: ignore[reportMissingImports]

    trainer = trainer_of(
        KTOTrainer,
        beta=0.3,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        ref_model=model_of(MISMATCHED_REFERENCE, REFERENCE),
    )
    ids = torch.zeros(2 * PAIRS, WIDTH, dtype=torch.int64)
    liked = torch.rand(2 * PAIRS, generator=GENERATOR) < 0.5
    inputs = {name: ids for name in ("input_ids", "KL_input_ids", "attention_mask", "KL_attention_mask")}
    inputs |= {"completion_mask": COMPLETION, "KL_completion_mask": COMPLETION, "label": liked}
    theirs = trainer._compute_loss(model_of(mismatched, POLICY), inputs, False)

    point = kto_reference_point(mismatched.sum(1), MISMATCHED_REFERENCE.sum(1))
    assert (point > 0) == (mismatched is MISMATCHED)
    ours = kto_loss(
        POLICY.sum(1), REFERENCE.sum(1), liked, point, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7
    )
    assert ours.mean().item() == pytest.approx(theirs.item(), rel=1e-6)


def test_orpo() -> None:
    """Its loss is nll − mean(beta log σ(…)): the part of the odds ratio. It computes in float32."""
    ORPOTrainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    chosen, rejected = MEANS.chunk(2)
    theirs = trainer_of(ORPOTrainer, beta=0.3).odds_ratio_loss(chosen, rejected)[0]
    ours, _ = orpo_loss(chosen, rejected, lam=0.3)
    torch.testing.assert_close(ours + chosen, -theirs, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_simpo(epsilon: float) -> None:
    CPOTrainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    trainer = trainer_of(CPOTrainer, beta=2.5, simpo_gamma=1.2, label_smoothing=epsilon, loss_type="simpo", alpha=0.0)
    theirs = trainer.cpo_loss(*MEANS.chunk(2))[0]
    ours = simpo_loss(*MEANS.chunk(2), beta=2.5, gamma=1.2, label_smoothing=epsilon)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("margin", "center"), [(None, None), (0.5, 0.01)])
def test_reward_model(margin: float | None, center: float | None) -> None:
    from trl import RewardTrainer  # pyright: ignore[reportMissingImports]

    trainer = trainer_of(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=center))
    scores = torch.randn(2 * PAIRS, 1, generator=GENERATOR, dtype=torch.float64)
    inputs: dict[str, Any] = {"attention_mask": torch.ones(2 * PAIRS, WIDTH)}
    if margin is not None:
        inputs["margin"] = torch.full((PAIRS,), margin, dtype=torch.float64)
    theirs = trainer.compute_loss(lambda **_: SimpleNamespace(logits=scores), inputs)
    chosen, rejected = scores[:, 0].chunk(2)
    ours = bradley_terry_loss(chosen, rejected, margin or 0.0, center_coef=center or 0.0)
    assert ours.mean().item() == pytest.approx(theirs.item(), rel=1e-9)
