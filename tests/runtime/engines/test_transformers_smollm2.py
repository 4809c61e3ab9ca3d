"""The engine on a real model: tiny ones hide the effects of threads, of a large vocabulary and of thirty layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl.context import Bindings
from flowrl.nodes.rollout import Sampling
from flowrl.nodes.updater import AdamW
from flowrl.runtime.worker import open_engine
from tests.runtime.engines.engines import Reinforce, plain_logprobs, term_rows
from tests.runtime.engines.test_transformers_sampling import as_rollouts
from tests.smollm2 import smollm2_actor
from tests.tiny import recorded_rollouts

pytestmark = pytest.mark.smollm2

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine() -> Any:
    return open_engine(smollm2_actor(), Bindings(open_engine, micro_batch_tokens=200))


def test_it_answers(engine: Any) -> None:
    prompts = engine.encode([QUESTION])
    generated = engine.generate(prompts, [0], Sampling(max_new_tokens=16, temperature=0.0))
    assert "Paris" in engine.decode(generated.tokens)[0]


def test_laws_5_and_10(engine: Any) -> None:
    """Sampled with a cache, scored packed, and one row at a time by the plain model: the same log-probs."""
    prompts = engine.encode([QUESTION] * 3 + ["2 + 2 ="] * 2)
    generated = engine.generate(prompts, range(5), Sampling(max_new_tokens=8, temperature=0.7))
    rollouts = as_rollouts(prompts, generated)
    scores = engine.logprobs(rollouts, temperature=0.7)
    torch.testing.assert_close(scores.logprobs.values, generated.logprobs.values, rtol=0, atol=1e-4)
    plain, _ = plain_logprobs(engine.network.module, rollouts, 0.7)
    torch.testing.assert_close(scores.logprobs.values, plain, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_pass_before_the_step_equals_the_pass_in_the_step_bit_for_bit() -> None:
    seen: list[torch.Tensor] = []

    class Spy(Reinforce):
        def token_losses(self, current: Any, **inputs: Any) -> Any:
            seen.append(current.logprobs.detach().clone())
            return super().token_losses(current, **inputs)

    engine: Any = open_engine(smollm2_actor("trained"), Bindings(open_engine, micro_batch_tokens=60))
    rollouts = recorded_rollouts(num_prompts=3, group_size=3, vocab=40_000)
    before = engine.logprobs(rollouts).logprobs.values
    result = engine.train_step([term_rows(Spy()(rollouts))], AdamW(learning_rate=1e-6), max_grad_norm=1.0)
    assert torch.equal(torch.cat(seen), before) and result.grad_norm > 0
