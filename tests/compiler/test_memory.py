"""Bytes by cause against tensors that a real step of a tiny model makes, and against the splits that each rank would hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flowrl.compiler.architecture import Architecture, known_architecture
from flowrl.compiler.candidates import share_of
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.estimate import Estimate, Estimator
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.precision import Precision
from flowrl.compiler.work import Work
from tests.compiler.families import FAMILIES, tiny_config, tiny_lm

ROWS, LENGTH = 2, 256
#: How weights and products are held: float32; bfloat16 products over float32 weights; bfloat16 alone.
PRECISIONS = {
    "float32": Precision(),
    "autocast": Precision(compute="bfloat16", cast=2.0),
    "bfloat16": Precision(2.0, "bfloat16", 2.0, 4.0, 2.0, cache=2.0),
}


def work(kind: str = "train", **changes: Any) -> Work:
    """All tokens are response tokens: every position has logits."""
    settings: dict[str, Any] = dict(
        sequences=ROWS, prompt_tokens=0.0, response_tokens=float(LENGTH), max_response_tokens=float(LENGTH)
    )
    return Work(kind, **{**settings, **changes})  # type: ignore[arg-type]


def estimated(config: Any, work: Work, precision: Precision, parallelism: Parallelism | None = None) -> Estimate:
    parallelism = parallelism or Parallelism()
    estimator = Estimator(Cluster("cpu", parallelism.size))
    architecture = config if isinstance(config, Architecture) else Architecture.from_config(config)
    return estimator.estimate(architecture, work, Mesh(0, 0, parallelism.size), parallelism, precision=precision)


def saved_bytes(model: Any, run: Callable[[], Any]) -> float:
    """Bytes of all storages that autograd saves while ``run`` runs, each once, parameters apart."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Any] = []  # so that no storage is freed and its address used again
    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out is not None
    return float(sum(found.values()))


def forward_of(model: Any, precision: str) -> Callable[[], Any]:
    import torch

    tokens = torch.randint(3, 96, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return model.base_model(tokens, use_cache=False)[0]

    return run


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_autograd_saves(family: str, precision: str) -> None:
    """Rows longer than the hidden state is wide, grouped heads, three layers. What saves the last hidden state is the head,
    which is not run here; copies of weights that autocast makes are estimated as buckets."""
    import torch

    config = tiny_config(family)
    model = tiny_lm(config)
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    found = estimated(config, work(), PRECISIONS[precision])
    saved = saved_bytes(model, forward_of(model, precision))
    of_head = ROWS * LENGTH * config.hidden_size * PRECISIONS[precision].residual
    assert found.activations + found.buckets == pytest.approx(saved + of_head, rel=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_with_checkpointing_the_inputs_of_layers_and_what_one_layer_saves(family: str) -> None:
    """Reentrant checkpoints save their inputs where a hook sees them. What one layer saves is measured as the difference that
    a layer makes without them."""
    config = tiny_config(family)
    model = tiny_lm(config)
    plain = saved_bytes(model, forward_of(model, "float32"))
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    # One less of the layers that save most: of this mixture they are the second, with experts, alone.
    fewer = tiny_lm(tiny_config(family, **{depth: 1 if family == "qwen3_moe" else 2}))
    layers = 2 if family == "qwen3_moe" else 1
    one_layer = (plain - saved_bytes(fewer, forward_of(fewer, "float32"))) / layers
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    kept = saved_bytes(model, forward_of(model, "float32"))
    of_head = ROWS * LENGTH * config.hidden_size * 4
    found = estimated(config, work(), PRECISIONS["float32"], Parallelism(checkpointing=True))
    if family == "qwen3_moe":  # the mean of a dense layer and one with experts is less than the one that saves most
        assert found.activations > kept + one_layer
        assert found.activations < kept + of_head + 2 * one_layer
    else:
        assert found.activations == pytest.approx(kept + one_layer + of_head, rel=0.1)
    assert found.activations < estimated(config, work(), PRECISIONS["float32"]).activations


@pytest.mark.parametrize("family", ["llama_tied_with_biases", "qwen2", "mixtral", "deepseek_v2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_and_optimiser_are_those_of_a_real_step(family: str, dtype: str) -> None:
    import torch

    config = tiny_config(family)
    model = tiny_lm(config).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    # Half of GPT-2's positions would be without a gradient in a shorter row, but their gradient is there.
    tokens = torch.randint(3, 96, (1, 128), generator=torch.Generator().manual_seed(0))
    model(tokens, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    optimizer.step()
    found = estimated(config, work(), PRECISIONS[dtype])
    parameters = list(model.parameters())
    assert found.weights == sum(p.nbytes for p in parameters)
    assert found.gradients == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    state = [t for s in optimizer.state.values() for n, t in s.items() if n != "step"]
    assert found.optimizer == sum(t.nbytes for t in state)
    assert found.held == found.weights + found.optimizer


def test_the_engine_itself_holds_what_is_estimated() -> None:
    """A step of flowrl's own engine, autocast on: weights and moments by their real bytes."""
    from flowrl.compiler.model_architecture import architecture_of
    from flowrl.context import Bindings, step, use_bindings
    from flowrl.diagnostics.rows import demonstrations, random_prompts, sft_rows
    from flowrl.models import Model
    from flowrl.nodes.updater import AdamW
    from flowrl.runtime.worker import open_engine
    from flowrl.tiny import tiny_model

    model = Model(tiny_model(), name="m", autocast="bfloat16", device="cpu")
    with use_bindings(Bindings(open_engine)), step(seed=0):
        engine: Any = model.bound_engine()
        rows = demonstrations(random_prompts(2, 8, 264), random_prompts(2, 24, 264, seed=1))
        engine.train_step([sft_rows(engine, rows)], AdamW(), max_grad_norm=None)
        weights = sum(p.nbytes for _, p in engine.trained_parameters())
        moments = sum(t.nbytes for s in engine.optimizer.state.values() for n, t in s.items() if n != "step")
        engine.close()
    architecture = architecture_of(model)
    found = estimated(architecture, work(), Precision.of_model(model, architecture))
    assert (found.weights, found.optimizer) == (weights, moments)


@pytest.mark.parametrize("kept", [True, False])
def test_logits_are_what_the_head_of_the_engine_makes(kept: bool, monkeypatch: Any) -> None:
    """Kept for the backward pass they are counted by themselves; a slice and its log-probs come on top while it is computed."""
    import torch

    from flowrl.runtime.engines import transformers_head as engine

    positions, vocab, hidden = ROWS * LENGTH, 4096, 8
    if not kept:
        monkeypatch.setattr(engine, "KEEP_BYTES", 0)
        monkeypatch.setattr("flowrl.compiler.memory.KEPT_LOGITS", 0)
    states = torch.randn(positions, hidden, requires_grad=True)
    weight, targets = torch.randn(vocab, hidden), torch.zeros(positions, dtype=torch.int64)
    out, _ = engine.head_logprobs(states, weight, None, targets, transform=engine.LogitTransform(), dtype=torch.float32)
    stays = sum(t.nbytes for pair in out.grad_fn.kept for t in pair if t is not None)  # type: ignore[union-attr]
    at_once = 2 * min(positions, engine.SLICE) * vocab * 4
    config = tiny_config("llama", vocab_size=vocab)
    assert estimated(config, work(), Precision()).logits == stays + at_once
    assert (stays > 0) == kept
    assert estimated(config, work(head="value"), Precision()).logits == 0


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gemma2", "gemma3")])
def test_the_cache_is_that_of_the_library(family: str) -> None:
    import torch

    config = tiny_config(family)
    model = tiny_lm(config)
    with torch.no_grad():
        cache = model(torch.ones(ROWS, LENGTH, dtype=torch.int64), use_cache=True).past_key_values
    real = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    asked = work("generate", prompt_tokens=100.0, response_tokens=20.0, max_response_tokens=LENGTH - 100.0)
    assert estimated(config, asked, Precision()).kv_cache == real


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_layers_with_a_window_keep_no_more_than_it(family: str) -> None:
    import torch

    config = tiny_config(family, sliding_window=64)
    with torch.no_grad():
        cache = tiny_lm(config)(torch.ones(ROWS, LENGTH, dtype=torch.int64), use_cache=True).past_key_values
    real = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    found = estimated(config, work("generate"), Precision()).kv_cache
    assert found == pytest.approx(real, rel=0.1)
    assert found < estimated(tiny_config(family), work("generate"), Precision()).kv_cache


# -- what a rank holds ----------------------------------------------------------------------------------------------------


def split_by_hand(architecture: Architecture, tensor: int, pipeline: int) -> list[float]:
    """Numbers on a rank of each stage, tensor by tensor."""
    base, more = divmod(architecture.num_layers, pipeline)
    stage_of = [s for s in range(pipeline) for _ in range(base + (s < more))]
    stages = [0.0] * pipeline
    for p in architecture.parameters():
        first = p.name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))
        stage = stage_of[p.layer] if p.layer is not None else 0 if first else pipeline - 1
        ways = 1 if p.split is None else tensor
        if "k_proj" in p.name or "v_proj" in p.name:
            ways = min(ways, architecture.num_kv_heads)
        size = math.prod(p.shape) if p.tied_to and pipeline > 1 else p.size
        stages[stage] += size / ways
    return stages


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fullest_rank_has_the_largest_stage(family: str, tensor: int, pipeline: int) -> None:
    architecture = Architecture.from_config(tiny_config(family))
    share = share_of(architecture, "lm", tensor, pipeline)
    by_hand = max(split_by_hand(architecture, tensor, pipeline))
    slack = 0.02 if tensor > architecture.num_kv_heads else 1e-9  # biases of replicated keys
    assert share.parameters == pytest.approx(by_hand, rel=slack)


def test_zero_divides_what_it_says_over_the_data_parallel_ranks() -> None:
    config, data = tiny_config("llama"), 4
    whole = estimated(config, work(sequences=8), Precision.mixed(), Parallelism(data=data))
    for zero in (1, 2, 3):
        found = estimated(config, work(sequences=8), Precision.mixed(), Parallelism(data=data, zero=zero))
        assert found.optimizer == whole.optimizer / data
        assert found.gradients == whole.gradients / (data if zero >= 2 else 1)
        assert found.weights == whole.weights / (data if zero == 3 else 1)
        assert found.activations == whole.activations


def test_mixed_precision_is_18_bytes_a_parameter() -> None:
    """Two of weights, four of gradients, twelve of the optimiser (arXiv 1910.02054, §3.1, with float32 gradients)."""
    architecture = known_architecture("llama-2-7b")
    found = estimated(architecture, work(), Precision.mixed())
    assert found.weights + found.gradients + found.optimizer == 18 * architecture.num_parameters()


def test_fused_activations_are_those_of_korthikanti_without_dropout() -> None:
    """``34 s·b·h`` a layer (arXiv 2205.05198, equation 2) minus dropout's masks (1 + 1) and the input of GeLU kept once: of a
    GPT with ``4 h`` wide MLPs and attention that keeps no scores, 30 to 34 bytes a token and hidden unit."""
    from flowrl.compiler.memory import saved_per_token

    architecture = Architecture.from_config(tiny_config("gpt2", n_embd=512, n_head=8))
    whole, split = saved_per_token(architecture, Precision.mixed(), moe=False)
    assert whole == 0
    assert 30 <= split / 512 <= 34


def test_a_stage_keeps_a_micro_batch_for_each_stage_after_it() -> None:
    config = tiny_config("llama")

    def activations(micro_batches: int) -> float:
        parallelism = Parallelism(pipeline=3, micro_batches=micro_batches)
        return estimated(config, work(sequences=8), Precision(), parallelism).activations * micro_batches

    # Of a micro-batch: so many of it as are kept, times a stage; and the last norm, once.
    stage = activations(2) - activations(1)
    assert stage > 0
    assert activations(4) == pytest.approx(activations(1) + 2 * stage)
    assert activations(8) == pytest.approx(activations(4))


def test_an_adapter_has_the_only_gradients_and_moments() -> None:
    from flowrl.adapters import LoRA
    from flowrl.models import Model

    architecture = known_architecture("qwen3-8b")
    model = Model("Qwen/Qwen3-8B", dtype="bfloat16", lora=LoRA(rank=16))
    precision = Precision.of_model(model, architecture)
    adapters = architecture.adapter_parameters(16)
    found = estimated(architecture, work(), precision)
    assert found.gradients == 4 * adapters
    assert found.optimizer == 8 * adapters
    assert found.weights == 2 * architecture.num_parameters() + 4 * adapters
    quantized = Precision.of_model(
        Model("Qwen/Qwen3-8B", dtype="bfloat16", quantization="nf4", lora=LoRA(rank=16)), architecture
    )
    assert 0.25 < quantized.weights / precision.weights < 0.5


def test_causes_grow_with_what_they_are_made_of() -> None:
    architecture = known_architecture("llama-2-7b")
    table = Estimator(Cluster("A100-80G", nodes=1)).table(
        architecture,
        Work("generate", 64, 512.0, 256.0, 512.0),
        0,
        [8],
        precision=Precision.served(),
        memory_limit=np.inf,
        fixed={"pipeline": 1},
    )
    for wave in set(table.micro_batches.tolist()):
        same = table.select(table.micro_batches == wave)
        order = np.argsort(same.tensor)
        assert (np.diff(same.weights[order]) < 0).all()
        # The rows of a wave times their share of the heads: the same on all ranks, however they are split.
        assert np.ptp(same.kv_cache) <= same.kv_cache.max() * 0.5
