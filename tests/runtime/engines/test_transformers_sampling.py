"""Sampling: streams of rows, stop tokens, truncation, and law 10 (the sampler's log-probs are the trainer's)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl.batches import FinishReason
from flowrl.context import Bindings
from flowrl.errors import DataError, UnsupportedError
from flowrl.models import ValueModel
from flowrl.nodes.rollout import Sampling
from flowrl.ragged import Ragged
from flowrl.runtime.engines import transformers_sampling
from flowrl.runtime.engines.transformers_sampling import draw, truncate
from flowrl.runtime.worker import open_engine
from flowrl.testing.engine_rows import as_rollouts
from tests.runtime.engines.engines import engine_of
from tests.runtime.engines.test_transformers_packing import build
from tests.tiny import EOS_ID, tiny_model

PROMPTS = Ragged.from_rows([[65, 66, 67, 68, 69]] * 3 + [[70]] * 3 + [[71, 72, 73]] * 2, torch.int64)
KEYS = list(range(100, 108))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("architecture", ["tiny", "GPT2", "Qwen2", "Mistral", "Gemma2", "GptOss", "Bloom"])
def test_law_10_sampler_and_trainer_agree(architecture: str, temperature: float) -> None:
    """Cached, left-padded, prompt by prompt, against packed: the same numbers, in float32."""
    module = tiny_model() if architecture == "tiny" else build(architecture)
    engine = engine_of(module)
    sampling = Sampling(max_new_tokens=24, temperature=temperature, stop_token_ids=tuple(range(10)))
    generated = engine.generate(PROMPTS, KEYS, sampling)
    if architecture == "tiny":  # some rows leave the batch early, some are cut at the limit
        assert len(set(generated.tokens.lengths.tolist())) > 3 and len(set(generated.finish_reason.tolist())) == 2
    trained = engine.logprobs(as_rollouts(PROMPTS, generated), temperature=temperature)
    torch.testing.assert_close(generated.logprobs.values, trained.logprobs.values, rtol=0, atol=1e-4)


def test_a_row_depends_on_its_prompt_and_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_model())
    sampling = Sampling(max_new_tokens=16)
    together = engine.generate(PROMPTS, KEYS, sampling)
    order = torch.tensor([7, 3, 0, 5, 1, 6, 2, 4])
    shuffled = engine.generate(PROMPTS.select(order), [KEYS[i] for i in order.tolist()], sampling)
    assert shuffled.tokens == together.tokens.select(order)
    monkeypatch.setattr(transformers_sampling, "MAX_ROWS", 3)
    chunked = engine.generate(PROMPTS, KEYS, sampling)
    assert chunked.tokens == together.tokens
    torch.testing.assert_close(chunked.logprobs.values, together.logprobs.values, rtol=0, atol=1e-4)
    monkeypatch.setattr(transformers_sampling, "LEAVE_SHARE", 0.0)
    assert engine.generate(PROMPTS, KEYS, sampling).tokens == together.tokens
    assert engine.generate(PROMPTS, [k + 1 for k in KEYS], sampling).tokens != together.tokens


def test_a_longer_limit_continues_the_same_response() -> None:
    engine = engine_of(tiny_model())
    short = engine.generate(PROMPTS, KEYS, Sampling(max_new_tokens=4, stop_token_ids=(9999,)))
    long = engine.generate(PROMPTS, KEYS, Sampling(max_new_tokens=12, stop_token_ids=(9999,)))
    for a, b in zip(short.tokens.rows(), long.tokens.rows(), strict=True):
        assert a.tolist() == b[:4].tolist()


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"live cannot be sampled from.*MambaForCausalLM"):
        engine_of(build("Mamba")).generate(PROMPTS, KEYS, Sampling())
    critic: Any = open_engine(ValueModel(tiny_model(), name="critic", device="cpu"), Bindings(open_engine))
    with pytest.raises(UnsupportedError, match="critic cannot be sampled from"):
        critic.generate(PROMPTS, KEYS, Sampling())


def test_stop_tokens_belong_to_the_response() -> None:
    engine = engine_of(tiny_model())
    free = engine.generate(PROMPTS, KEYS, Sampling(max_new_tokens=12, stop_token_ids=(9999,)))
    assert set(free.finish_reason.tolist()) == {FinishReason.LENGTH}
    assert free.tokens.lengths.tolist() == [12] * 8
    stop = int(free.tokens.row(0)[3])
    stopped = engine.generate(PROMPTS, KEYS, Sampling(max_new_tokens=12, stop_token_ids=(stop,)))
    first = free.tokens.row(0).tolist().index(stop)
    assert stopped.tokens.row(0).tolist() == free.tokens.row(0)[: first + 1].tolist()
    assert stopped.finish_reason[0] == FinishReason.STOP
    for row, reason in zip(stopped.tokens.to_lists(), stopped.finish_reason.tolist(), strict=True):
        assert (row[-1] == stop) == (reason == FinishReason.STOP)
        assert stop not in row[:-1]


def test_stop_tokens_come_from_generation_config_and_tokenizer() -> None:
    module: Any = tiny_model()
    engine = engine_of(module)
    assert engine.stop_token_ids(Sampling()) == (EOS_ID,)
    module.generation_config.eos_token_id = [7, 9]
    assert engine.stop_token_ids(Sampling()) == (7, 9, EOS_ID)
    assert engine.stop_token_ids(Sampling(stop_token_ids=(3,))) == (3,)


def test_generation_is_cut_where_the_model_ends() -> None:
    engine = engine_of(build("GPT2"))  # learned positions: one more would be an index error
    assert engine.max_length == 64
    prompts = Ragged.from_rows([[1] * 60, [2] * 63, [3] * 5], torch.int64)
    generated = engine.generate(prompts, [1, 2, 3], Sampling(max_new_tokens=30, stop_token_ids=(9999,)))
    assert generated.tokens.lengths.tolist() == [4, 1, 30]
    assert generated.finish_reason.tolist() == [FinishReason.LENGTH] * 3


def test_prompts_that_cannot_be_continued_are_named() -> None:
    engine = engine_of(build("GPT2"))
    with pytest.raises(DataError, match=r"prompt of row 1 is longer.*at most 63 tokens.*Received 64"):
        engine.generate(Ragged.from_rows([[1], [2] * 64], torch.int64), [1, 2], Sampling(max_new_tokens=2))
    with pytest.raises(DataError, match="prompt of row 0 is empty"):
        engine.generate(Ragged.from_rows([[], [2]], torch.int64), [1, 2], Sampling(max_new_tokens=2))


def test_greedy_takes_the_likeliest_token_and_its_logprob_at_temperature_1() -> None:
    module = tiny_model()
    engine = engine_of(module)
    prompts = PROMPTS.select(torch.tensor([0, 3, 6]))
    generated = engine.generate(prompts, [1, 2, 3], Sampling(max_new_tokens=8, temperature=0.0))
    assert engine.origin(Sampling(temperature=0.0)).temperature == 0.0
    for prompt, tokens, logprobs in zip(
        prompts.rows(), generated.tokens.rows(), generated.logprobs.rows(), strict=True
    ):
        row = torch.cat([prompt, tokens])
        with torch.no_grad():
            table = torch.log_softmax(module(input_ids=row[None]).logits[0, len(prompt) - 1 : -1], -1)
        assert table.argmax(-1).tolist() == tokens.tolist()
        torch.testing.assert_close(logprobs, table.max(-1).values, rtol=0, atol=1e-4)


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    logits = probabilities.log().expand(1000, 5).clone()
    tokens, logprobs = draw(logits, uniforms, Sampling())
    assert torch.bincount(tokens, minlength=5).tolist() == [500, 0, 200, 300, 0]
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_are_safe(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf, -torch.inf]])
    tokens, logprobs = draw(logits, torch.tensor([uniform], dtype=torch.float64), Sampling())
    assert tokens.tolist() == ([1] if uniform == 0 else [2]) and torch.isfinite(logprobs).all()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.51), [0, 1]),
        (Sampling(top_p=0.79), [0, 1]),
        (Sampling(top_p=0.81), [0, 1, 2]),
        (Sampling(min_p=0.3), [0, 1]),
        (Sampling(min_p=0.25), [0, 1]),
        (Sampling(top_k=3, top_p=0.6), [0, 1]),
    ],
)
def test_truncation_by_hand(sampling: Sampling, kept: list[int]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.12, 0.08]]).log()
    cut = truncate(logits, sampling)
    assert torch.isfinite(cut[0]).nonzero()[:, 0].tolist() == kept
    tokens, logprobs = draw(logits.clone(), torch.tensor([0.0], dtype=torch.float64), sampling)
    total = logits.exp()[0, kept].sum()
    assert tokens.tolist() == [0]
    torch.testing.assert_close(logprobs, (logits[:, 0].exp() / total).log())


def test_a_flat_distribution_needs_more_than_the_largest_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_sampling, "NUCLEUS", 2)
    logits = torch.log_softmax(torch.linspace(0, 1, 10)[None], -1)
    cut = truncate(logits, Sampling(top_p=0.9))
    order = logits.exp()[0].sort(descending=True).values.cumsum(0)
    assert int(torch.isfinite(cut).sum()) == int((order < 0.9).sum()) + 1


def test_truncated_sampling_reports_the_distribution_it_drew_from() -> None:
    engine = engine_of(tiny_model())
    sampling = Sampling(max_new_tokens=8, temperature=0.8, top_k=1)
    generated = engine.generate(PROMPTS, KEYS, sampling)
    assert generated.logprobs.values.abs().max() < 1e-6  # one candidate is certain
    origin = engine.origin(sampling)
    assert origin.truncated and origin.top_k == 1 and origin.temperature == 0.8
