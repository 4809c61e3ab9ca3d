"""Attention without padding: every backend gives what padded rows give, and what cannot is found out before it is used.

Flash attention needs a GPU, and so does the backward pass of flex attention. Their kernels are stood in for by plain torch
here, as their documentation says what they compute: that tests our side of the call. What flex computes forward is real.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from flowrl.batches import Rollouts
from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings
from flowrl.errors import ModelError
from flowrl.models import Model
from flowrl.nodes.loss import TermRows
from flowrl.runtime.engines import transformers_backends, transformers_varlen
from flowrl.runtime.engines.transformers_attention import Pack, Rule, attention, attention_mask, pack_rows, packed
from flowrl.runtime.engines.transformers_layout import packed_layout
from flowrl.runtime.engines.transformers_varlen import Flash, Flex, families, joined_rows
from flowrl.runtime.ranks import Ranks
from flowrl.runtime.worker import open_engine
from tests.ranks import launch
from tests.runtime.engines.engines import Reinforce, gradients, plain_logprobs, relative_distance, term_rows
from tests.runtime.engines.test_shards import whole_gradients
from tests.runtime.engines.test_transformers_packing import ARCHITECTURES, build
from tests.tiny import recorded_rollouts, tiny_folder, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
ROLLOUTS = recorded_rollouts(num_prompts=3, group_size=3, observations=True)
ALL = tuple(range(9))

# -- what stands in for kernels ----------------------------------------------------------------------------------------


def plain(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float | None, cap: float) -> Tensor:
    """``[queries, heads, dim]``, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)


class FlashAttn:
    """``flash_attn_varlen_func`` of flash-attn 2, in plain torch.

    Args:
        broken: what it does wrong: "window" ignores windows, "gradient" gives keys none.
    """

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        self.calls.append({"dtype": q.dtype, "window": window_size, "softcap": softcap, "rows": len(cu_seqlens_q) - 1})
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert q.dtype == k.dtype == v.dtype and all(x.stride(-1) == 1 for x in (q, k, v))
        lengths = cu_seqlens_q.diff()
        assert int(lengths.max()) == max_seqlen_q == max_seqlen_k and int(cu_seqlens_q[-1]) == len(q)
        k = k.detach() if self.broken == "gradient" else k
        left, right = (-1, -1) if self.broken == "window" else window_size
        outputs = []
        for q_row, k_row, v_row in zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True):
            place = torch.arange(len(q_row))
            after = place - place[:, None]
            sees = after <= 0 if causal else torch.ones_like(after, dtype=torch.bool)
            sees = sees & (after >= -left if left >= 0 else True) & (after <= right if right >= 0 else True)
            outputs.append(plain(q_row, k_row, v_row, sees, softmax_scale, softcap))
        return torch.cat(outputs)


class TorchVarlen(FlashAttn):
    """``torch.nn.attention.varlen.varlen_attn``; its arguments are held against the real one's."""

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return self.flash_attn_varlen_func(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale, window_size=window_size
        )


class FlexAttention:
    """``flex_attention`` with a backward pass, in plain torch."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_aux: Any = None,
    ) -> Any:
        from torch.nn.attention.flex_attention import AuxOutput, create_mask

        self.calls.append({"enable_gqa": enable_gqa, "size": query.shape[2]})
        assert enable_gqa == (query.shape[1] != key.shape[1])
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if score_mod is not None:
            scores = score_mod(scores, None, None, None, None)
        sees = create_mask(block_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], device="cpu")
        scores = scores.masked_fill(~sees, -torch.inf)
        out = scores.softmax(-1) @ value
        return out if return_aux is None else (out, AuxOutput(lse=scores.logsumexp(-1)))


def install(monkeypatch: pytest.MonkeyPatch, which: str, broken: str = "") -> Any:
    """Let a stand-in be the kernel of this machine, which takes CPUs and float32; the stand-in."""
    monkeypatch.setattr(transformers_backends, "DEVICES", {"flash": ("cpu",), "flex": ("cpu",)})
    float32 = {"flash": (torch.float32,), "flex": (torch.float32,)}
    monkeypatch.setattr(transformers_backends, "DTYPES", float32)
    if which == "flex":
        flex = FlexAttention()
        monkeypatch.setattr(transformers_backends, "flex_kernel", lambda: flex)
        return flex
    if which == "flash_attn":
        kernel: Any = FlashAttn(broken)
        module: Any = types.ModuleType("flash_attn")
        module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        module.flash_attn_varlen_func = kernel.flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        return kernel
    from torch.nn.attention import varlen

    kernel, real = TorchVarlen(broken), inspect.signature(varlen.varlen_attn)

    def varlen_attn(*args: Any, window_size: Any, scale: Any, enable_gqa: Any) -> Tensor:
        real.bind(*args, window_size=window_size, scale=scale, enable_gqa=enable_gqa)
        return kernel.varlen_attn(*args, window_size=window_size, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    return kernel


def opened(module: Any, attention: str = "sdpa", **more: Any) -> Any:
    autocast = more.pop("autocast", None)
    strategy = Strategy(attention=attention, **more)  # type: ignore[arg-type]
    model = Model(module, name="live", tokenizer=tiny_tokenizer(), device="cpu", autocast=autocast)
    return open_engine(model, Bindings(open_engine, strategies={"live": strategy}))


STRATEGY = {"flash_attn": "flash", "torch": "flash", "flex": "flex"}


@cache
def of_padded_rows(architecture: str, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradients of a step."""
    engine, rollouts = opened(build(architecture)), ROLLOUTS.select(list(rows))
    assert engine.network.abilities.backend is None
    return engine.logprobs(rollouts).logprobs.values, gradients(engine, step(rollouts))


def step(rollouts: Rollouts) -> list[TermRows]:
    return [term_rows(Reinforce(entropy_coef=0.1)(rollouts))]


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "architecture", "windows", "cap"),
    [
        ("flash_attn", "Qwen3", {(-1, -1)}, 0.0),
        ("flash_attn", "Mistral", {(3, 0)}, 0.0),
        ("flash_attn", "Gemma2", {(-1, -1), (3, 0)}, 2.0),
        ("torch", "Qwen3", {(-1, 0)}, 0.0),
        ("torch", "Mistral", {(3, 0)}, 0.0),
        ("flex", "Mistral", None, None),
        ("flex", "Gemma2", None, None),
        ("flex", "GptOss", None, None),
    ],
)
def test_law_5_logprobs_and_gradients_are_those_of_padded_rows(
    which: str, architecture: str, windows: set[Any] | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = install(monkeypatch, which)
    engine = opened(build(architecture), STRATEGY[which])
    assert engine.network.abilities.backend.name == STRATEGY[which]
    for rows in (ALL, (4,), (0, 2, 8)):  # groups that share prompts; one row; ragged ones, of which two share
        rollouts = ROLLOUTS.select(list(rows))
        kernel.calls.clear()
        found = engine.logprobs(rollouts).logprobs.values
        assert len(kernel.calls) == 2, "one call in each layer"
        if windows is not None and rollouts.num_rows == 9:
            assert {c["window"] for c in kernel.calls} == windows and {c["softcap"] for c in kernel.calls} == {cap}
        logprobs, expected = of_padded_rows(architecture, rows)
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
        assert relative_distance(gradients(engine, step(rollouts)), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("architecture", ["tiny", "Gemma2"])
def test_law_5_torchs_own_flex_attention(architecture: str) -> None:
    """Forward, uncompiled: that is what runs on a CPU. Shared prompts are computed once."""
    from torch.nn.attention.flex_attention import flex_attention

    module = tiny_model() if architecture == "tiny" else build(architecture)
    network = opened(module).network
    layout = packed_layout(ROLLOUTS, CPU)
    assert layout.pack is not None
    flex = replace(layout, pack=replace(layout.pack, backend=Flex(flex_attention)))
    with torch.no_grad(), network.compute():
        found, _ = network.logprobs(flex, network.hidden(flex), temperature=1.0, entropy=False)
    torch.testing.assert_close(found, plain_logprobs(module, ROLLOUTS)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("which", "kept"), [("flash_attn", "layers"), ("flash_attn", "offload"), ("flex", "layers")])
def test_activations_that_are_computed_again(which: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = install(monkeypatch, which)
    engine = opened(build("Mistral"), STRATEGY[which], activation_checkpointing=kept)
    kernel.calls.clear()
    found = gradients(engine, step(ROLLOUTS))
    assert len(kernel.calls) == 4, "two layers, each forward and once more"
    assert relative_distance(found, of_padded_rows("Mistral", ALL)[1]) < 1e-5


def test_flash_is_given_16_bits_where_rotary_embeddings_leave_32(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = install(monkeypatch, "flash_attn")
    monkeypatch.setattr(transformers_backends, "DTYPES", {"flash": (torch.bfloat16,)})
    engine = opened(tiny_model(), "flash", autocast="bfloat16")
    kernel.calls.clear()
    found = engine.logprobs(ROLLOUTS).logprobs.values
    assert {c["dtype"] for c in kernel.calls} == {torch.bfloat16} and {c["rows"] for c in kernel.calls} == {9}
    expected = opened(tiny_model(), autocast="bfloat16").logprobs(ROLLOUTS).logprobs.values
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert not torch.equal(found, opened(tiny_model()).logprobs(ROLLOUTS).logprobs.values)


# -- layers that a backend cannot do -----------------------------------------------------------------------------------


def pack_of(backend: Any, rollouts: Rollouts = ROLLOUTS) -> Pack:
    layout = packed_layout(rollouts, CPU)
    assert layout.pack is not None
    return replace(layout.pack, backend=backend)


def test_a_rule_that_flash_cannot_express_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = install(monkeypatch, "flash_attn")
    flash = transformers_backends.backend_of(Strategy(attention="flash"), CPU, torch.float32, "live")
    torch.manual_seed(0)
    size = len(pack_of(None).tokens)
    query, key, value = (torch.randn(1, heads, size, 8) for heads in (4, 2, 2))
    chunks = chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    outputs: dict[tuple[str, bool], Tensor] = {}
    attend: Any = attention
    for name, rule in {"chunks": chunks, "window": sliding_window_causal_mask_function(3)}.items():
        for pack in (pack_of(flash), pack_of(None)):
            kernel.calls.clear()
            with packed(pack):
                mask = attention_mask(1, size, size, mask_function=rule)
                outputs[name, pack.backend is None] = attend(torch.nn.Module(), query, key, value, mask)[0]
            assert len(kernel.calls) == (name == "window" and pack.backend is not None)
        torch.testing.assert_close(outputs[name, True], outputs[name, False])
    assert not torch.allclose(outputs["chunks", True], outputs["window", True])


@pytest.mark.parametrize(
    ("which", "architecture", "reason"),
    [
        ("flash_attn", "GptOss", "it has attention sinks"),
        ("torch", "Gemma2", "it has soft caps, which torch's varlen_attn does not know"),
    ],
)
def test_where_no_layer_can_use_it(
    which: str, architecture: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, which)
    with pytest.raises(ModelError, match=rf"live: attention='flash' cannot be used.*no layer can use it: {reason}"):
        opened(build(architecture), "flash")
    with caplog.at_level(logging.INFO, logger="flowrl"):
        assert opened(build(architecture), "auto").network.abilities.backend is None
    assert any(reason in r.message for r in caplog.records)


def test_a_model_that_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ARCHITECTURES["Bloom"][1]
    install(monkeypatch, "flash_attn")
    with pytest.raises(ModelError, match=r"attention='flash' cannot be used.*BloomForCausalLM, whose rows are padded"):
        opened(build("Bloom"), "flash")
    assert opened(build("Bloom"), "auto").network.abilities.backend is None


# -- what is wrong is found out before it is used ----------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["window", "gradient"])
def test_a_kernel_whose_numbers_are_wrong(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its window is much longer than the rows that are tried."""
    module = build("Mistral")
    module.config.sliding_window = 32
    install(monkeypatch, "flash_attn")
    assert opened(module, "auto").network.abilities.backend is not None
    install(monkeypatch, "flash_attn", broken)
    with pytest.raises(
        ModelError, match=r"attention='flash' cannot be used.*within 0.0001 of.*Received (numbers|Runtime)"
    ):
        opened(module, "flash")
    with caplog.at_level(logging.INFO, logger="flowrl"):
        assert opened(module, "auto").network.abilities.backend is None
    assert any("flash attention is not used" in r.message for r in caplog.records)


def test_a_kernel_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flex")

    def no_compiler(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no compiler here\nand a long story")

    monkeypatch.setattr(transformers_backends, "flex_kernel", lambda: no_compiler)
    with pytest.raises(ModelError, match=r"attention='flex' cannot be used.*RuntimeError: no compiler here\. Do"):
        opened(tiny_model(), "flex")


# -- what a machine cannot run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("flash", r"live: attention='flash' cannot be used.*a CUDA device.*Received device cpu.*attention='sdpa'"),
        ("flex", r"live: attention='flex' cannot be used.*a CUDA device.*Received device cpu"),
    ],
)
def test_a_cpu_has_neither(attention: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tiny_model(), attention)
    assert opened(tiny_model(), "auto").network.abilities.backend is None


def test_flash_needs_16_bits_and_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_backends, "DEVICES", {"flash": ("cpu",)})
    with pytest.raises(ModelError, match=r"products in bfloat16 or float16.*products in float32.*autocast='bfloat16'"):
        opened(tiny_model(), "flash")
    monkeypatch.setattr(transformers_backends, "flash_kernel", lambda: None)
    with pytest.raises(ModelError, match=r"the package flash-attn, or.*pip install flash-attn --no-build-isolation"):
        opened(tiny_model(), "flash", autocast="bfloat16")
    assert opened(tiny_model(), "auto", autocast="bfloat16").network.abilities.backend is None


def test_a_flash_attn_that_was_built_for_another_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "flash_attn")
    monkeypatch.delattr(sys.modules["flash_attn"], "flash_attn_varlen_func")
    kernel = transformers_varlen.flash_kernel()
    assert kernel is not None and kernel.name == "torch's varlen_attn"
    assert "flash-attn is installed and cannot be used" in caplog.text


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [2, 1024])
def test_the_window_of_a_rule(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rule, "LINES", lines)
    zero = torch.zeros(1, dtype=torch.int64)

    def window(function: Any, length: int = 7) -> int | None:
        return Rule(function, length, CPU).window

    assert window(causal_mask_function) == 7 and window(lambda b, h, q, k: k <= q) == 7
    assert [window(sliding_window_causal_mask_function(w)) for w in (1, 3, 7, 100)] == [1, 3, 7, 7]
    assert window(chunked_causal_mask_function(3, zero)) is None and window(chunked_causal_mask_function(9, zero)) == 7
    assert window(lambda b, h, q, k: (k <= q) & (k != 2)) is None
    assert window(lambda b, h, q, k: k < q - 100) is None, "a rule that lets nothing through is no window"


def test_rows_one_after_another() -> None:
    rows = [torch.tensor(r) for r in ([0, 1, 2, 3], [0, 1, 4], [5])]  # the first two share their prompt
    pack = pack_rows(rows, torch.arange(6), torch.tensor([0, 1, 2, 3, 2, 0]))
    joined = joined_rows(pack)
    assert joined.places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5] and joined.starts.tolist() == [0, 4, 7, 8]
    assert joined.starts.dtype == torch.int32 and joined.longest == 4
    assert joined.slots.tolist() == [0, 1, 2, 3, 6, 7]


def test_flex_lets_a_token_see_the_earlier_tokens_of_its_row_alone() -> None:
    from torch.nn.attention.flex_attention import create_mask

    rollouts = recorded_rollouts(num_prompts=3, group_size=3, response_lengths=(2, 0, 3, 1))
    order = [0, 8, 3, 4, 1, 7, 2]  # rows of one prompt need not be neighbours
    pack = pack_of(None, rollouts.select(order))
    size = len(pack.tokens)
    together = torch.zeros(size, size, dtype=torch.bool)
    for row in pack.rows:
        together[row[:, None], row] = True
    blocks = Flex(FlexAttention()).prepare(Rule(causal_mask_function, pack.longest, CPU), pack).blocks
    found = create_mask(blocks.mask_mod, 1, 1, size, size, device="cpu")[0, 0]
    assert torch.equal(found, together & (pack.positions <= pack.positions[:, None]))


def test_rows_that_share_different_tokens_are_no_families() -> None:
    rows = [torch.tensor(r) for r in ([0, 1, 2], [0, 1, 3], [0, 4])]
    with pytest.raises(AssertionError):
        families(pack_rows(rows, torch.arange(5), torch.tensor([0, 1, 2, 2, 1])))


def test_flash_attn_before_soft_caps() -> None:
    def old(q: Tensor, *, window_size: Any = (-1, -1), **more: Any) -> Tensor:
        return q

    kernel = transformers_varlen._of_flash_attn(old)
    assert not kernel.softcaps and Flash(kernel).name == "flash"


# -- longer ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_that_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but attention is traced; generating code for it would take minutes here, and is torch's business."""
    kernel = install(monkeypatch, "flash_attn")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    engine = opened(build("Mistral"), "flash", compile_layers=True)
    for rows in (ALL, (4,), (8,)):
        kernel.calls.clear()
        found = gradients(engine, step(ROLLOUTS.select(list(rows))))
        assert relative_distance(found, of_padded_rows("Mistral", rows)[1]) < 1e-5
        assert len(kernel.calls) == 2
    assert counters["frames"]["ok"] > 0
    torch._dynamo.reset()


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "layers"},
    "tp2": {"tensor_parallel": 2, "activation_checkpointing": "offload"},
}


def main(folder: str) -> None:
    """On one of two ranks: in each layout every backend gives what padded rows give."""
    ranks = Ranks.join(deadline=200)
    for name, layout in LAYOUTS.items():
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for which in ("sdpa", *STRATEGY):
            with pytest.MonkeyPatch.context() as monkeypatch:
                kernel = None if which == "sdpa" else install(monkeypatch, which)
                strategy = Strategy(attention=STRATEGY.get(which, "sdpa"), **layout)  # type: ignore[arg-type]
                bindings = Bindings(open_engine, micro_batch_tokens=30, strategies={"live": strategy}, ranks=ranks)
                engine: Any = open_engine(Model(folder, name="live", device="cpu"), bindings)
                if kernel is not None:
                    kernel.calls.clear()
                logprobs = engine.logprobs(ROLLOUTS).logprobs.values
                found[which] = logprobs, torch.cat([g.flatten() for g in whole_gradients(engine, ROLLOUTS).values()])
                assert kernel is None or kernel.calls
                engine.close()
        for which in STRATEGY:
            torch.testing.assert_close(found[which][0], found["sdpa"][0], rtol=0, atol=1e-5)
            distance = relative_distance(found[which][1], found["sdpa"][1])
            assert distance < 1e-5, (name, which, distance)


@pytest.mark.slow  # a launch
def test_over_ranks(tmp_path: Path) -> None:
    launch(main, str(tiny_folder(tmp_path)), num_ranks=2).succeeded()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("attention", ["flash", "flex"])
def test_the_real_kernels_on_a_gpu(attention: str) -> None:
    found: list[tuple[Tensor, Tensor]] = []
    for wanted in (attention, "sdpa"):
        module = tiny_model(hidden=128, heads=2, kv_heads=1)
        model = Model(module, name="live", tokenizer=tiny_tokenizer(), device="cuda", autocast="bfloat16")
        strategy = Strategy(attention=wanted)  # type: ignore[arg-type]
        engine: Any = open_engine(model, Bindings(open_engine, strategies={"live": strategy}))
        assert (engine.network.abilities.backend is None) == (wanted == "sdpa")
        steps = gradients(engine, [term_rows(Reinforce()(ROLLOUTS))])
        found.append((engine.logprobs(ROLLOUTS).logprobs.values, steps))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0.05)
    assert relative_distance(found[0][1], found[1][1]) < 0.05
