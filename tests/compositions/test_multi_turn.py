"""Recorded multi-turn rollouts: observations inside of a response are context, and never trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from flowrl import (
    GAE,
    Batch,
    Critic,
    GroupAdvantage,
    Node,
    PolicyLogprobs,
    PPOLoss,
    Ragged,
    RLFlow,
    Rollouts,
    Spans,
    Updater,
    ValueHead,
    ValueLoss,
    rewards_like,
    source,
)
from flowrl.batches import Rewards, SpanKind
from tests.compositions.harness import Composition, Eager, run_both, run_eagerly
from tests.flows import FAST
from tests.tiny import recorded_rollouts, tiny_actor

#: Of each row the response is: policy, observation, policy; or policy alone where it is short.
RECORDED = recorded_rollouts(num_prompts=3, group_size=2, response_lengths=(6, 4, 9, 2, 7, 5), observations=True)


@dataclass(frozen=True)
class Recording:
    """A data set of one batch."""

    batch: Rollouts

    batch_type: ClassVar[type[Batch]] = Rollouts
    columns: ClassVar[tuple[str, ...]] = ("answer",)
    fingerprint: ClassVar[str] = "recording"

    def __len__(self) -> int:
        return self.batch.num_rows

    def rows(self, start: int, count: int, seed: int) -> Rollouts:
        """The same rows each time, as other draws."""
        assert count == self.batch.num_rows
        return replace(self.batch, prompt_id=self.batch.prompt_id + start)


class Noise(Node):
    """A reward for each row, and one for each token, observations included."""

    def __call__(self, rollouts: Rollouts) -> Rewards:
        tokens = rollouts.response_tokens
        rows = torch.linspace(-1, 1, rollouts.num_rows)
        return rewards_like(rollouts, row=rows, tokens=tokens.with_values(tokens.values / 256))


def from_recording(batch: Rollouts = RECORDED, *, use_gae: bool) -> Composition:
    actor = tiny_actor()
    head = ValueHead(actor)
    rollouts = source(Rollouts, name="recorded", batch_size=batch.num_rows)
    rewards, old_logprobs = Noise()(rollouts), PolicyLogprobs(actor)(rollouts)
    if use_gae:
        values = Critic(head)(rollouts)
        advantages = GAE(gamma=0.9)(rollouts, rewards, values)
        terms = [PPOLoss()(rollouts, advantages, old_logprobs), ValueLoss(head)(rollouts, values, advantages)]
    else:
        advantages = GroupAdvantage()(rollouts, rewards)
        terms = [PPOLoss()(rollouts, advantages, old_logprobs)]
    update = Updater(actor, epochs=2, optimizer=FAST)(*terms)
    return Composition(RLFlow.from_outputs(update, advantages, rewards), {"recorded": Recording(batch)}, [actor])


BOTH = pytest.mark.parametrize("use_gae", [True, False], ids=["GAE", "GroupAdvantage"])


@BOTH
def test_recorded_multi_turn(use_gae: bool, tmp_path: Path) -> None:
    eager, _ = run_both(lambda: from_recording(use_gae=use_gae), tmp_path / "run")
    mask = RECORDED.loss_mask.values.bool()
    assert 0 < int((~mask).sum()) < len(mask)
    for _, advantages, rewards in eager.outputs:
        assert not advantages.advantages.values[~mask].any()
        of_policy = advantages.advantages.values[mask]
        assert of_policy.any()
        if not use_gae:  # by hand: (R − mean) / std over the two of a prompt is ±1/√2
            torch.testing.assert_close(of_policy.abs(), torch.full_like(of_policy, 0.5**0.5), atol=1e-4, rtol=0)
        assert rewards.totals.isfinite().all()


@BOTH
def test_nan_under_the_mask_changes_nothing(use_gae: bool) -> None:
    mask = RECORDED.loss_mask.values.bool()
    column = RECORDED.rollout_logprobs
    spoilt = column.with_values(torch.where(mask, column.values, torch.nan))
    assert spoilt.values.isnan().any()
    same_weights(
        run_eagerly(from_recording(use_gae=use_gae), 2),
        run_eagerly(from_recording(replace(RECORDED, rollout_logprobs=spoilt), use_gae=use_gae), 2),
    )


def ending_with_an_observation() -> Rollouts:
    """Policy tokens, then an observation that nothing follows."""
    spans = [SpanKind.PROMPT, SpanKind.POLICY, SpanKind.OBSERVATION]
    kinds = Ragged.from_rows([spans] * RECORDED.num_rows, torch.uint8)
    prompt, response = RECORDED.prompt_lengths, RECORDED.response_lengths
    lengths = torch.stack([prompt, response - 1, torch.ones_like(response)], dim=1).flatten()
    versions = torch.tensor([-1, 0, -1]).repeat(RECORDED.num_rows)
    return replace(RECORDED, spans=Spans(kinds, kinds.with_values(lengths), kinds.with_values(versions)))


def with_other_observations(batch: Rollouts) -> Rollouts:
    """The same rows with other tokens in all observations."""
    observed = batch.span_kind_of_token.values == SpanKind.OBSERVATION
    tokens = torch.where(observed, (batch.tokens.values + 100) % 256, batch.tokens.values)
    return replace(batch, tokens=batch.tokens.with_values(tokens))


class RowReward(Node):
    """A reward that does not look at tokens."""

    def __call__(self, rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, row=torch.linspace(-1, 1, rollouts.num_rows))


def test_observed_tokens_are_no_targets() -> None:
    """Where nothing follows an observation its tokens change nothing, bit for bit; elsewhere they are context."""

    def train(batch: Rollouts) -> Eager:
        actor = tiny_actor()
        rollouts = source(Rollouts, name="recorded", batch_size=batch.num_rows)
        advantages = GroupAdvantage()(rollouts, RowReward()(rollouts))
        loss = PPOLoss()(rollouts, advantages, PolicyLogprobs(actor)(rollouts))
        update = Updater(actor, epochs=2, optimizer=FAST)(loss)
        return run_eagerly(Composition(RLFlow.from_outputs(update), {"recorded": Recording(batch)}, [actor]), 2)

    last = ending_with_an_observation()
    assert with_other_observations(last) != last
    same_weights(train(last), train(with_other_observations(last)))
    middle, other = train(RECORDED), train(with_other_observations(RECORDED))
    assert any(not torch.equal(t, other.after["tiny"][n]) for n, t in middle.after["tiny"].items())


def same_weights(a: Eager, b: Eager) -> None:
    for name, weights in a.after.items():
        assert any(not torch.equal(t, a.before[name][n]) for n, t in weights.items()), "nothing was trained"
        assert all(torch.equal(t, b.after[name][n]) for n, t in weights.items())
