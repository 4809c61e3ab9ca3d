"""Models that follow another, and one that scores: Ema, Snapshot, RewardModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from flowrl import (
    Ema,
    GroupAdvantage,
    GRPOUpdater,
    PolicyLogprobs,
    Prompts,
    ReferenceLogprobs,
    RewardModel,
    RewardModelScore,
    RLFlow,
    Rollout,
    Snapshot,
    WeightEdge,
    source,
)
from flowrl.models import DerivedModel, Model
from tests.compositions.harness import Composition, Watch, live_weights, run_both
from tests.flows import FAST, SAMPLING, prompts, reward
from tests.tiny import tiny_actor, tiny_model, tiny_tokenizer

DECAY = 0.75


def followed(reference: type[DerivedModel], **settings: Any) -> Composition:
    """GRPO with KL in the loss towards a reference that follows the actor."""
    actor = tiny_actor()
    seen: dict[str, list[Any]] = {}
    follower = reference(actor, **settings)
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    update = GRPOUpdater(actor, kl_coef=0.1, optimizer=FAST)(
        rollouts,
        GroupAdvantage()(rollouts, reward()(rollouts)),
        PolicyLogprobs(actor)(rollouts),
        ReferenceLogprobs(follower)(rollouts),
    )
    watched = Watch(follower, seen)(Watch(actor, seen)(rollouts))
    return Composition(RLFlow.from_outputs(update, watched), {"prompts": prompts()}, [actor], seen)


def test_an_ema_is_its_formula(tmp_path: Path) -> None:
    eager, ran = run_both(lambda: followed(Ema, decay=DECAY), tmp_path / "run", steps=4)
    for seen in (eager.seen, ran.seen):
        actor, ema = seen["tiny"], seen["tiny.ema"]
        assert len(actor) == len(ema) == 4
        for name, start in actor[0].items():
            expected = start.clone()
            assert torch.equal(ema[0][name], expected)
            for i in range(1, 4):
                expected = DECAY * expected + (1 - DECAY) * actor[i][name]
                torch.testing.assert_close(ema[i][name], expected, atol=1e-6, rtol=1e-5)
        assert any(not torch.equal(ema[3][n], ema[0][n]) for n in ema[0])
    assert WeightEdge("tiny", "Updater#0", "Ema(tiny.ema)") in followed(Ema, decay=DECAY).flow.weight_edges


def test_a_snapshot_is_taken_every_second_version(tmp_path: Path) -> None:
    eager, ran = run_both(lambda: followed(Snapshot, every=2), tmp_path / "run", steps=5)
    for seen in (eager.seen, ran.seen):
        actor, snapshot = seen["tiny"], seen["tiny.snapshot"]
        for i, version in enumerate([0, 0, 2, 2, 4]):
            assert all(torch.equal(t, actor[version][n]) for n, t in snapshot[i].items()), f"step {i}"
    # The policy has left the reference at odd versions, and is it again at even ones.
    assert [row["kl"] == pytest.approx(0.0, abs=1e-6) for row in ran.metrics] == [True, False, True, False, True]


def classifier() -> LlamaForSequenceClassification:
    settings: dict[str, Any] = {**tiny_model(0).config.to_dict(), "num_labels": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return LlamaForSequenceClassification(LlamaConfig(**settings)).eval()


def scored_by(judge: Model) -> Composition:
    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=3, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    rewards = RewardModelScore(judge)(rollouts)
    update = GRPOUpdater(actor, optimizer=FAST)(
        rollouts, GroupAdvantage()(rollouts, rewards), PolicyLogprobs(actor)(rollouts)
    )
    return Composition(RLFlow.from_outputs(update, rollouts, rewards), {"prompts": prompts()}, [actor])


def test_a_reward_model_scores(tmp_path: Path) -> None:
    module = classifier()
    judge = RewardModel(module, name="judge", tokenizer=tiny_tokenizer(), device="cpu")
    before = live_weights([judge])["judge"]
    eager, ran = run_both(lambda: scored_by(judge), tmp_path / "run")
    for i, (_, rollouts, rewards) in enumerate(eager.outputs):
        assert list(rewards.components) == ["judge"]
        with torch.no_grad():
            expected = [float(module(input_ids=row[None]).logits) for row in rollouts.tokens.rows()]
        assert rewards.components["judge"].tolist() == pytest.approx(expected, abs=1e-4)
        assert max(expected) - min(expected) > 0.01
        assert ran.metrics[i]["reward/mean"] == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
