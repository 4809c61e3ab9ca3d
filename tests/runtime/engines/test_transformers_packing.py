"""Law 5: packed, padded and prefix-shared forward passes give the same log-probs, whatever the architecture."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from flowrl.batches import Rollouts
from flowrl.errors import DataError
from flowrl.runtime.engines import transformers_head
from flowrl.runtime.engines.transformers_layout import micro_batch_rows, packed_layout, padded_layout
from tests.runtime.engines.engines import engine_of, plain_logprobs
from tests.tiny import VOCAB_SIZE, recorded_rollouts, tiny_model

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
)
GPT2 = dict(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
#: By name: config, whether its rows can be packed, whether its head can be sliced.
ARCHITECTURES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "GPT2": (GPT2, True, True),
    "Qwen2": (SHAPE, True, True),
    "Qwen3": (SHAPE, True, True),
    "Mistral": (SHAPE | {"sliding_window": 4}, True, True),
    "Gemma2": (
        SHAPE | {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        True,
        True,
    ),
    "Granite": (SHAPE | {"logits_scaling": 4.0}, True, True),
    "Cohere": (SHAPE, True, True),
    "GptOss": (SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}, True, True),
    "Bloom": (dict(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3), False, True),
    "Mamba": (dict(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4), False, True),
}
ROLLOUTS = recorded_rollouts(num_prompts=4, group_size=3, observations=True)


def build(architecture: str) -> Any:
    import transformers

    config, _, _ = ARCHITECTURES[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        name = "GPT2LMHeadModel" if architecture == "GPT2" else f"{architecture}ForCausalLM"
        return getattr(transformers, name)(getattr(transformers, f"{architecture}Config")(**config)).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_law_5_logprobs_equal_those_of_a_plain_forward_pass(architecture: str, temperature: float) -> None:
    module = build(architecture)
    engine = engine_of(module)
    _, packs, slices = ARCHITECTURES[architecture]
    assert engine.network.abilities.packs == packs
    assert (engine.network.abilities.transform is not None) == slices
    scores = engine.logprobs(ROLLOUTS, temperature=temperature, entropy=True)
    logprobs, entropies = plain_logprobs(module, ROLLOUTS, temperature)
    torch.testing.assert_close(scores.logprobs.values, logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores.entropy.values, entropies, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", ["shared", "unshared", "padded"])
def test_law_5_every_layout_gives_the_same_logprobs(rows: str) -> None:
    module = tiny_model()
    network = engine_of(module).network
    device = torch.device("cpu")
    layout = {
        "shared": lambda: packed_layout(ROLLOUTS, device),
        "unshared": lambda: packed_layout(ROLLOUTS, device, share_prompts=False),
        "padded": lambda: padded_layout(ROLLOUTS, device),
    }[rows]()
    with torch.no_grad(), network.compute():
        logprobs, _ = network.logprobs(layout, network.hidden(layout), temperature=1.0, entropy=False)
    torch.testing.assert_close(logprobs, plain_logprobs(module, ROLLOUTS)[0], rtol=0, atol=1e-5)


def test_a_shared_prompt_is_computed_once() -> None:
    rollouts = recorded_rollouts(num_prompts=2, group_size=3, prompt_lengths=(5, 3), response_lengths=(2,))
    layout = packed_layout(rollouts, torch.device("cpu"))
    assert layout.input_ids.shape == (1, 5 + 3 + 6 * 2)
    assert layout.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 0, 1, 2, 3, 4, 3, 4, 3, 4]


def test_one_long_row_does_not_stretch_many_short_ones() -> None:
    rollouts = recorded_rollouts(num_prompts=9, group_size=1, response_lengths=(1,) * 8 + (100,))
    pack = packed_layout(rollouts, torch.device("cpu")).pack
    assert pack is not None
    slots, tokens = sum(len(b.places) for b in pack.buckets), int(rollouts.tokens.lengths.sum())
    assert slots < 2 * tokens
    module = tiny_model()
    logprobs = engine_of(module).logprobs(rollouts).logprobs.values
    torch.testing.assert_close(logprobs, plain_logprobs(module, rollouts)[0], rtol=0, atol=1e-5)


def test_rows_do_not_see_each_other() -> None:
    """Other rows in the pack, even ones that are not finite, change nothing."""
    module = tiny_model(vocab=300)
    engine = engine_of(module)
    alone = engine.logprobs(ROLLOUTS.select([0, 1])).logprobs
    with torch.no_grad():
        module.model.embed_tokens.weight[299] = torch.nan  # the head is tied, so look at hidden states
    poisoned = ROLLOUTS.select([0, 1, 5])
    poisoned.tokens.values[-1] = 299
    with torch.no_grad(), engine.network.compute():
        layout = packed_layout(poisoned, torch.device("cpu"))
        hidden = engine.network.hidden(layout)[layout.predictors]
    finite = torch.isfinite(hidden).all(-1)
    assert bool(finite[: len(alone.values)].all())


def test_a_model_that_cannot_be_packed_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(build("Bloom"))
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        engine.logprobs(ROLLOUTS)
        engine.logprobs(ROLLOUTS)
    assert [r.message for r in caplog.records if "packed" in r.message] == [
        "live: its attention cannot be packed; rows are padded instead (slower)"
    ]


def test_a_head_that_is_not_plain_is_left_to_the_model() -> None:
    module = tiny_model(tied=False)

    class Odd(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).sin() * 5

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module.lm_head = Odd(32, VOCAB_SIZE, bias=False)  # type: ignore[assignment]
    engine = engine_of(module)
    assert engine.network.abilities.packs and engine.network.abilities.transform is None
    scores = engine.logprobs(ROLLOUTS, temperature=0.7, entropy=True)
    logprobs, entropies = plain_logprobs(module, ROLLOUTS, 0.7)
    torch.testing.assert_close(scores.logprobs.values, logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy.values, entropies, rtol=0, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("transform", [(1.0, None), (0.25, None), (0.5, 3.0)])
@pytest.mark.parametrize("entropy", [True, False])
def test_the_gradient_of_the_head_is_that_of_autograd(
    keep: bool, transform: tuple[float, float | None], entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_head, "SLICE", 3)
    monkeypatch.setattr(transformers_head, "KEEP_BYTES", 2**30 if keep else 0)
    torch.manual_seed(0)
    hidden = torch.randn(8, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)
    bias = torch.randn(11, requires_grad=True)
    targets = torch.randint(0, 11, (8,))
    factors = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, 3.0, 1.0])  # positions without a gradient are left out

    def objective(logprobs: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
        total = (logprobs * factors).sum()
        return total if entropies is None else total + (entropies * factors.flip(0)).sum()

    scale, softcap = transform
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = transformers_head.token_logprobs(logits, targets, temperature=0.7, entropy=entropy)
    found = transformers_head.head_logprobs(
        hidden,
        weight,
        bias,
        targets,
        transform=transformers_head.LogitTransform(scale, softcap),
        dtype=torch.float32,
        temperature=0.7,
        entropy=entropy,
    )
    torch.testing.assert_close(found[0], expected[0])
    for a, b in zip(
        torch.autograd.grad(objective(*found), (hidden, weight, bias)),
        torch.autograd.grad(objective(*expected), (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_micro_batches_keep_prompts_and_coupled_rows_together() -> None:
    rollouts = recorded_rollouts(num_prompts=3, group_size=2, prompt_lengths=(4,), response_lengths=(1,))  # 5 a row
    assert micro_batch_rows(rollouts, 100) == [[0, 1, 2, 3, 4, 5]]
    assert micro_batch_rows(rollouts, 12) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batch_rows(rollouts, 15) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batch_rows(rollouts, 5) == [[0], [1], [2], [3], [4], [5]]
    assert micro_batch_rows(rollouts, 5, [[0, 1], [2, 3], [4, 5]]) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batch_rows(rollouts, 5, [[0, 4], [1], [2], [3], [5]]) == [[0, 1, 4, 5], [2, 3]]


def test_no_rows_are_no_work() -> None:
    engine = engine_of(tiny_model())
    scores = engine.logprobs(ROLLOUTS.select([]), entropy=True)
    assert scores.logprobs.num_rows == 0 and scores.entropy.num_rows == 0


def test_rows_that_no_model_takes_are_named() -> None:
    engine = engine_of(tiny_model(max_positions=8))
    with pytest.raises(DataError, match=r"Row 1 \(prompt_id 0, sample_id 1\) is longer.*at most 8 tokens.*12"):
        engine.logprobs(recorded_rollouts(1, 2, response_lengths=(3, 7)))
    with pytest.raises(DataError, match=r"Row 2 .* does not know.*from 0 to 263.*Received 264"):
        foreign = recorded_rollouts(2, 2)
        foreign.tokens.values[foreign.tokens.offsets[2]] = 264
        engine_of(tiny_model()).logprobs(foreign)
    rollouts: Rollouts = recorded_rollouts(1, 1, prompt_lengths=(0,), response_lengths=(3,))
    with pytest.raises(DataError, match=r"Row 0 .* has no prompt"):
        engine.logprobs(rollouts)
