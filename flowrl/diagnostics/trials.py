"""What ``flowrl doctor`` tries, each in a process of its own: see :mod:`flowrl.diagnostics.trial`.

A trial is ``function(say, **arguments) -> mapping``: ``say`` tells how far it is; what it returns goes into the report.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from flowrl.errors import FlowError

Say = Callable[..., None]
#: Sampled a response.
NUM_TOKENS = 8
#: How far a log-prob of the sampler may lie from that of the trainer, in float32: two ways through one model.
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
#: How far a step of two ranks may lie from that of one, relatively.
RANKS_TOLERANCE = 1e-4


def imports(say: Say, modules: Sequence[str]) -> dict[str, Any]:
    """Import modules one after the other. Each is told about before and after, so that a crash has a culprit."""
    for name in modules:
        say(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # importing runs anybody's code
            say(f"after {name}", module=name, error_text=" ".join(f"{type(error).__name__}: {error}".split())[:400])
        else:
            facts = torch_facts() if name == "torch" else None
            say(f"after {name}", module=name, **({"torch": facts} if facts else {}))
    return {}


def torch_facts() -> dict[str, Any]:
    """What torch was built for, and the devices that it finds."""
    import torch

    gpus = []
    error = ""
    try:
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            found = torch.cuda.get_device_properties(i)
            capability = f"{found.major}.{found.minor}"
            gpus.append({"name": found.name, "memory_bytes": found.total_memory, "capability": capability})
        if torch.version.cuda and not gpus:
            torch.zeros(1, device="cuda")  # says why there is none
    except Exception as failure:
        error = str(failure).splitlines()[0]
    distributed = torch.distributed.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "num_threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda_error": error,
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "nccl": distributed and torch.distributed.is_nccl_available(),
    }


def transformers(say: Say, device: str) -> dict[str, Any]:
    """Sample, score and train with the transformers engine, on a tiny model."""
    say("importing torch and transformers")
    import torch

    from flowrl.context import Bindings, step, use_bindings
    from flowrl.diagnostics.rows import demonstrations, random_prompts, sft_rows
    from flowrl.nodes.rollout import Sampling
    from flowrl.nodes.updater import AdamW
    from flowrl.runtime.worker import open_engine

    say(f"loading a tiny model on {device}")
    with use_bindings(Bindings(open_engine)), step(seed=0):
        engine: Any = _tiny(device).bound_engine()
        prompts = random_prompts(2, 4, 256)
        say(f"sampling {NUM_TOKENS} tokens on {device}")
        sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=(1 << 30,))
        sampled = engine.generate(prompts, [1, 2], sampling)
        _expect(
            sampled.tokens.lengths.tolist() == [NUM_TOKENS] * 2, "the number of sampled tokens", sampled.tokens.lengths
        )
        say(f"scoring them on {device}")
        rows = demonstrations(prompts, sampled.tokens)
        scores = engine.logprobs(rows).logprobs.values
        gap = float((scores - sampled.logprobs.values).abs().max())
        _expect(gap <= TOLERANCE[device.split(":")[0]], "the gap between log-probs of sampler and trainer", gap)
        say(f"training one step on {device}")
        before = {name: tensor.detach().cpu().clone() for name, tensor in engine.weights()}
        done = engine.train_step([sft_rows(engine, rows)], AdamW(learning_rate=1e-3), max_grad_norm=1.0)
        _expect(
            not done.skipped and math.isfinite(done.grad_norm) and done.grad_norm > 0, "the gradient", done.grad_norm
        )
        changed = any(not torch.equal(before[name], tensor.detach().cpu()) for name, tensor in engine.weights())
        _expect(changed, "weights that a step changes", "the same weights")
    return {"device": device, "logprob_gap": gap, "grad_norm": float(done.grad_norm)}


def adapters(say: Say, device: str) -> dict[str, Any]:
    """Train an adapter on a base in 4 bits, on a tiny model in a folder: bitsandbytes imports also where its kernels fail."""
    say("importing torch, transformers, peft and bitsandbytes")
    import torch

    from flowrl.adapters import LoRA
    from flowrl.context import Bindings, step, use_bindings
    from flowrl.diagnostics.rows import demonstrations, random_prompts, sft_rows
    from flowrl.models import Model
    from flowrl.nodes.updater import AdamW
    from flowrl.runtime.worker import open_engine
    from flowrl.tiny import tiny_folder

    with tempfile.TemporaryDirectory() as name, use_bindings(Bindings(open_engine)), step(seed=0):
        say(f"loading a tiny model in 4 bits on {device}")
        model = Model(tiny_folder(Path(name)), name="tiny", lora=LoRA(rank=4), quantization="nf4", device=device)
        engine, reference = (cast(Any, m.bound_engine()) for m in (model, model.frozen()))
        rows = demonstrations(random_prompts(2, 4, 256), random_prompts(2, 8, 256, seed=1))
        say(f"training two steps of an adapter on {device}")
        before = reference.logprobs(rows).logprobs.values
        norms = []
        for _ in range(2):
            done = engine.train_step([sft_rows(engine, rows)], AdamW(learning_rate=1e-2), max_grad_norm=1.0)
            norms.append(float(done.grad_norm))
            _expect(math.isfinite(norms[-1]) and norms[-1] > 0, "the gradient", norms[-1])
        after = engine.logprobs(rows).logprobs.values
        _expect(bool(torch.isfinite(after).all()) and not torch.equal(after, before), "an adapter that learns", after)
        _expect(torch.equal(reference.logprobs(rows).logprobs.values, before), "a base that stays", "another one")
    return {"device": device, "grad_norm": norms[-1]}


def ranks(say: Say, device: str) -> dict[str, Any]:
    """Add up over ranks, and take one optimiser step that is sharded over them; it must be that of one rank."""
    say("importing torch")
    import torch
    import torch.distributed as dist

    from flowrl.context import Bindings
    from flowrl.runtime.ranks import Ranks
    from flowrl.runtime.worker import open_engine

    say("joining the other ranks")
    here = Ranks.join(120.0)
    kind = device.split(":")[0]
    where = f"cuda:{here.rank}" if kind == "cuda" else "cpu"
    try:
        say("adding up over ranks")
        column = torch.full((8,), here.rank + 1.0, device=where)
        dist.all_reduce(column)
        expected = here.size * (here.size + 1) / 2
        _expect(bool((column == expected).all()), f"sums of {expected}", column.tolist())
        say("training one step, sharded")
        sharded = _one_step(Bindings(open_engine, ranks=here), where)
        say("training one step, alone")
        alone = _one_step(Bindings(open_engine), where)
        for name, value in sharded.items():
            near = math.isclose(value, alone[name], rel_tol=RANKS_TOLERANCE)
            _expect(near, f"the {name} of one rank, {alone[name]:.7g}", f"{value:.7g}")
        here.everyone("done")
    finally:
        here.leave()
    backend = "nccl" if kind == "cuda" else "gloo"
    return {"backend": backend, "num_ranks": here.size, **sharded}


def _one_step(bindings: Any, device: str) -> dict[str, float]:
    """Loss and gradient norm of an SFT step on fixed rows; rows of different lengths, and more than ranks."""
    from flowrl.context import step, use_bindings
    from flowrl.diagnostics.rows import demonstrations, random_prompts, sft_rows
    from flowrl.nodes.updater import AdamW
    from flowrl.ragged import Ragged

    bindings.micro_batch_tokens = 16  # so that every rank gets some
    prompts = random_prompts(4, 4, 256)
    responses = Ragged.concat([random_prompts(2, 8, 256, seed=1), random_prompts(2, 5, 256, seed=2)])
    with use_bindings(bindings), step(seed=0):
        engine: Any = _tiny(device).bound_engine()
        rows = [sft_rows(engine, demonstrations(prompts, responses))]
        done = engine.train_step(rows, AdamW(learning_rate=1e-3), max_grad_norm=1.0)
        total, count = done.sums["loss"]
    return {"loss": total / count, "grad_norm": float(done.grad_norm)}


def vllm(say: Say) -> dict[str, Any]:
    """Sample and score with vLLM itself, on a tiny model in a folder."""
    say("importing vllm")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    from flowrl.tiny import tiny_folder

    with tempfile.TemporaryDirectory() as name:
        # Heads of 64 numbers: its attention kernels take no smaller ones.
        folder = tiny_folder(Path(name) / "tiny", hidden=128, heads=2, kv_heads=2)
        say("loading a tiny model")
        engine = LLM(model=str(folder), max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.1)
        say(f"sampling {NUM_TOKENS} tokens")
        settings = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        done = engine.generate(["flow"], settings)[0]
    tokens = len(done.outputs[0].token_ids)
    _expect(tokens == NUM_TOKENS, f"{NUM_TOKENS} tokens", tokens)
    _expect(math.isfinite(done.outputs[0].cumulative_logprob), "a finite log-prob", done.outputs[0].cumulative_logprob)
    return {}


def megatron(say: Say) -> dict[str, Any]:
    """Set up Megatron's model parallelism for one rank, and take it down."""
    say("importing megatron.core")
    import torch.distributed as dist
    from megatron.core import parallel_state  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as name:
        say("joining a process group of one")
        dist.init_process_group("gloo", init_method=f"file://{name}/join", rank=0, world_size=1)
        say("initialising model parallelism")
        parallel_state.initialize_model_parallel(1, 1)
        size = parallel_state.get_tensor_model_parallel_world_size()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    _expect(size == 1, "tensor parallelism of 1", size)
    return {}


def _tiny(device: str) -> Any:
    from flowrl.models import Model
    from flowrl.tiny import tiny_model, tiny_tokenizer

    return Model(tiny_model(), name="tiny", tokenizer=tiny_tokenizer(), device=device)


def _expect(good: bool, expected: str, received: object) -> None:
    if not good:
        raise FlowError("The trial gave a wrong result", expected=expected, received=received)
