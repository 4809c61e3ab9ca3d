"""Checks of engines: weights in and out, checkpoints, exports, versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrl.errors import CheckpointError, FlowError
from flowrl.testing.engine_bench import Bench, check
from flowrl.testing.engine_checks_sampling import KEYS, PROMPTS, ids, sampling
from flowrl.testing.engine_checks_scoring import at_policy
from flowrl.testing.engine_checks_training import adamw, policy_term, value_term
from flowrl.testing.engine_rows import advantages_of, plain_scores, rows

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def train(engine: Any, steps: int, *, first_seed: int = 0) -> None:
    """Steps of a policy or a critic, and one version."""
    some = rows()
    make = value_term if engine_kind(engine) == "value" else policy_term
    for step in range(steps):
        terms = [make(engine, some, advantages_of(some, seed=first_seed + step))]
        engine.train_step(terms, adamw(), max_grad_norm=1.0)
    engine.complete_version()


def engine_kind(engine: Any) -> str:
    return engine.origin().model  # the suite names its Models by their kind


def plain_logprobs(module: Any) -> Tensor:
    import torch

    with torch.no_grad():
        return at_policy(rows(), plain_scores(module, rows())["logprobs"])


def logprobs(engine: Any) -> Tensor:
    return at_policy(rows(), engine.logprobs(rows()).logprobs.values)


# -- weights ------------------------------------------------------------------------------------------------------------


@check("weights: they have the names and numbers of the HuggingFace model", "weights")
def _(bench: Bench) -> None:
    import torch

    for kind in ("policy", "value", "reward"):
        if kind == "value" and not _can(bench, kind):
            continue
        state = bench.plain(kind).state_dict()
        found = dict(bench.shared(kind).weights())
        ours = {n for n in found if n in state}
        pointers = {state[n].data_ptr() for n in ours}
        missing = [n for n, t in state.items() if n not in ours and t.data_ptr() not in pointers]
        bench.same(f"weights of the {kind} that are missing", missing, [])
        bench.same(f"the number of other weights of the {kind}", len(found) - len(ours), 2 if kind == "value" else 0)
        for name in sorted(ours):
            tensor = found[name]
            plain = (type(tensor), tensor.dtype, tensor.device.type, tensor.requires_grad)
            bench.same(f"{name}: type, dtype, device, gradient", plain, (torch.Tensor, torch.float32, "cpu", False))
            bench.same(name, tensor, state[name])


def _can(bench: Bench, kind: str) -> bool:
    try:
        bench.shared(kind)
    except FlowError:
        return False
    return True


@check("weights: out and in again is the identity, bit for bit", "weights", "train")
def _(bench: Bench) -> None:
    engine = bench.open("policy", micro_batch_tokens=25)
    engine.add_value_head("extra")
    train(engine, 1)
    first, kept = dict(engine.weights()), {n: t.clone() for n, t in engine.weights()}
    train(engine, 1, first_seed=1)
    bench.true("training changes weights", any((first[n] != t).any() for n, t in engine.weights()))
    for name, tensor in first.items():
        bench.same(f"{name}, which was given out before", tensor, kept[name])
    engine.load_weights(first, policy_version=7)
    bench.unchanged(engine, first)
    bench.same("the version", engine.policy_version, 7)
    other = bench.open("policy", bench.source("policy", seed=1))
    other.add_value_head("extra")
    other.load_weights(dict(engine.weights()), policy_version=7)
    bench.unchanged(other, first)


@check("weights: they are what it works with", "weights", "logprobs")
def _(bench: Bench) -> None:
    """Those of another model, in an engine that has scored already."""
    engine, source = bench.open("policy"), bench.source("policy", seed=1)
    before = logprobs(engine)
    module = bench.plain("policy", source)
    engine.load_weights(dict(module.named_parameters()), policy_version=3)
    expected = plain_logprobs(module)
    bench.true("the other model is another one", (before - expected).abs().max() > 0.1)
    bench.close("log-probs with other weights", logprobs(engine), expected)
    bench.same("the version that log-probs carry", engine.origin().policy_version, 3)


@check("weights: sampling uses them", "weights", "generate")
def _(bench: Bench) -> None:
    engine, other = bench.open("policy"), bench.open("policy", bench.source("policy", seed=1))
    how = sampling(4)
    first = engine.generate(ids(PROMPTS), KEYS, how)
    engine.load_weights(dict(other.weights()), policy_version=1)
    bench.same(
        "samples", engine.generate(ids(PROMPTS), KEYS, how).tokens, other.generate(ids(PROMPTS), KEYS, how).tokens
    )
    bench.true("another model samples others", first.tokens != engine.generate(ids(PROMPTS), KEYS, how).tokens)


@check("weights: what does not fit is refused, all of it at once, and changes nothing", "weights")
def _(bench: Bench) -> None:
    import torch

    engine = bench.open("policy")
    before = dict(engine.weights())
    names = sorted(before, key=lambda n: -before[n].ndim)
    misshapen, missing = names[0], names[-1]
    changed = {n: t + 1 for n, t in before.items()}
    cases: list[tuple[str, dict[str, Tensor], list[str]]] = [
        ("A missing name", {n: t for n, t in changed.items() if n != missing}, [missing]),
        ("An unknown name", {**changed, "no.such.weight": torch.zeros(1)}, ["no.such.weight"]),
        ("A misshapen weight", {**changed, misshapen: torch.zeros(2, 3)}, [misshapen, "[2, 3]"]),
        ("A transposed weight", {**changed, misshapen: changed[misshapen].T}, [misshapen]),
        ("No weights", {}, [misshapen, missing]),
    ]
    every = {n: t for n, t in changed.items() if n != missing} | {
        "no.such.weight": torch.zeros(1),
        misshapen: torch.zeros(2, 3),
    }
    cases.append(("Everything wrong", every, [missing, "no.such.weight", misshapen]))
    for what, wrong, naming in cases:
        naming = naming if len(before) <= 20 or what != "No weights" else naming[:0]
        with bench.refused(what, naming=naming):
            engine.load_weights(wrong, policy_version=5)
        bench.unchanged(engine, before)
        bench.same("the version", engine.policy_version, 0)


@check("version: it grows by one per completed call of a writer, not by steps", "train")
def _(bench: Bench) -> None:
    engine, some = bench.open("policy"), rows(2, 1)
    bench.same("the version of a new engine", engine.policy_version, 0)
    for version in (1, 2):
        for _step in range(2):
            engine.train_step([policy_term(engine, some, advantages_of(some))], adamw(), max_grad_norm=1.0)
            bench.same("the version after a step", engine.policy_version, version - 1)
        engine.complete_version()
        bench.same("the version after a call", engine.policy_version, version)


# -- checkpoints --------------------------------------------------------------------------------------------------------


@check("save: a loaded engine continues bit for bit", "save", "train", "weights")
def _(bench: Bench) -> None:
    """Before the first step, and after two; the engine that loads is of another model, and has lived already."""
    for kind, steps in (("policy", 0), ("policy", 2), ("value", 2)):
        if kind == "value" and not _can(bench, kind):
            continue
        one = bench.open(kind, micro_batch_tokens=25)
        if kind == "policy":
            one.add_value_head("extra")
        for _call in range(steps):
            train(one, 1)
        folder = bench.new_folder()
        one.save(folder)
        bench.sync()
        bench.true("something was written", any(folder.iterdir()))
        other = bench.open(kind, bench.source(kind, seed=1), micro_batch_tokens=25)
        train(other, 1, first_seed=9)
        other.load(folder)
        bench.unchanged(other, dict(one.weights()))
        bench.same("the version", other.policy_version, one.policy_version)
        for engine in (one, other):
            train(engine, 2, first_seed=4)
        bench.unchanged(other, dict(one.weights()))
        bench.same("the version later", other.policy_version, steps + 1)
        rates = [e.train_step([], adamw(warmup_steps=100), max_grad_norm=None).learning_rate for e in (one, other)]
        bench.same("the learning rate, which counts steps,", rates[1], rates[0])


@check("save: saving changes nothing", "save", "train", "weights")
def _(bench: Bench) -> None:
    one, other = (bench.open("policy", micro_batch_tokens=25) for _ in range(2))
    for engine in (one, other):
        train(engine, 1)
        if engine is one:
            engine.save(bench.new_folder())
        train(engine, 1, first_seed=1)
    bench.unchanged(one, dict(other.weights()))


@check("save: a folder that holds no checkpoint, or one of another model, is refused", "save", "weights")
def _(bench: Bench) -> None:
    engine = bench.open("policy")
    before = dict(engine.weights())
    with bench.refused("An empty folder", CheckpointError):
        engine.load(bench.new_folder())
    if _can(bench, "reward"):
        folder = bench.new_folder()
        bench.open("reward").save(folder)
        bench.sync()
        with bench.refused("A checkpoint of another model", CheckpointError):
            engine.load(folder)
    bench.unchanged(engine, before)
    bench.same("the version", engine.policy_version, 0)


# -- exports ------------------------------------------------------------------------------------------------------------


def exported(bench: Bench, engine: Any) -> Path:
    folder = bench.new_folder()
    engine.export(folder)
    bench.sync()
    return folder


@check("export: HuggingFace loads it, with the same weights and log-probs", "export", "train", "weights", "logprobs")
def _(bench: Bench) -> None:
    from transformers import AutoTokenizer

    from flowrl.tiny import tiny_tokenizer

    engine = bench.open("policy", micro_batch_tokens=25)
    train(engine, 2)
    folder = exported(bench, engine)
    module = bench.plain("policy", folder)
    state = module.state_dict()
    for name, tensor in engine.weights():
        bench.same(f"exported {name}", state[name], tensor)
    bench.same("the dtype", str(next(module.parameters()).dtype), "torch.float32")
    bench.close("log-probs of the exported model", logprobs(engine), plain_logprobs(module))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "say ab"
    bench.same("the tokenizer", tokenizer(text)["input_ids"], tiny_tokenizer()(text)["input_ids"])
    again = bench.open("policy", folder, micro_batch_tokens=25)
    bench.unchanged(again, dict(engine.weights()))
    train(engine, 1, first_seed=3)  # exporting leaves it whole
    bench.true("it trains on", any((state[n] != t).any() for n, t in engine.weights()))


@check("export: critics keep their heads", "export", "train", "values", "weights")
def _(bench: Bench) -> None:
    engine = bench.open("value", micro_batch_tokens=25)
    train(engine, 2)
    again = bench.open("value", exported(bench, engine))
    bench.unchanged(again, dict(engine.weights()))
    bench.close("values", again.values(rows()).values, engine.values(rows()).values)
    bench.true("which are not 0", bool(again.values(rows()).values.any()))


@check("export: reward models", "export", "score", "weights")
def _(bench: Bench) -> None:
    engine = bench.open("reward")
    again = bench.open("reward", exported(bench, engine))
    bench.unchanged(again, dict(engine.weights()))
    bench.close("scores", again.score(rows()), engine.score(rows()))
