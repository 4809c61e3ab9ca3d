"""Checks of engines: log-probs, values, scores."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrl.batches import Rollouts, Spans
from flowrl.errors import FlowError
from flowrl.testing.engine_bench import PLENTY, Bench, check
from flowrl.testing.engine_checks_sampling import sampling
from flowrl.testing.engine_rows import index_of, plain_hidden, plain_rewards, plain_scores, rows, with_token

if TYPE_CHECKING:
    from torch import Tensor


def at_policy(rollouts: Rollouts, values: Tensor) -> Tensor:
    return values[rollouts.loss_mask.values.bool()]


def _plain(bench: Bench, rollouts: Rollouts, temperature: float = 1.0) -> dict[str, Tensor]:
    import torch

    with torch.no_grad():
        found = plain_scores(bench.plain("policy"), rollouts, temperature)
    return {name: at_policy(rollouts, column) for name, column in found.items()}


@check("logprobs: those of the plain model, at any temperature", "logprobs")
def _(bench: Bench) -> None:
    import torch

    some = rows()
    for temperature in (1.0, 0.7, 2.5):
        found = bench.shared("policy").logprobs(some, temperature=temperature)
        bench.true("nobody asked for more", found.entropy is None and found.sum_pi_squared is None)
        column = found.logprobs
        bench.same("the response layout", column.offsets, some.loss_mask.offsets)
        plain = (column.values.dtype, column.values.device.type, column.values.requires_grad)
        bench.same("type, device and gradient", plain, (torch.float32, "cpu", False))
        bench.true("values at observations are finite", bool(torch.isfinite(column.values).all()))
        expected = _plain(bench, some, temperature)["logprobs"]
        bench.close(f"log-probs at temperature {temperature}", at_policy(some, column.values), expected)


@check("logprobs: entropy and the sum of squares", "logprobs")
def _(bench: Bench) -> None:
    some = rows()
    for temperature in (1.0, 0.7):
        found = bench.shared("policy").logprobs(some, temperature=temperature, entropy=True, sum_pi_squared=True)
        expected = _plain(bench, some, temperature)
        for name in ("logprobs", "entropy", "sum_pi_squared"):
            column: Any = getattr(found, name)
            bench.same(f"the layout of {name}", column.offsets, some.loss_mask.offsets)
            bench.close(f"{name} at temperature {temperature}", at_policy(some, column.values), expected[name])


@check("logprobs: the most likely tokens", "logprobs")
def _(bench: Bench) -> None:
    import torch

    some, k = rows(), 5
    for temperature in (1.0, 0.7):
        tokens, logprobs = bench.shared("policy").top_logprobs(some, k, temperature=temperature)
        bench.same("types", (tokens.dtype, logprobs.dtype), (torch.int64, torch.float32))
        bench.same("the shape", list(tokens.shape), [len(some.loss_mask.values), k])
        table = _plain(bench, some, temperature)["table"]
        best = table.topk(k, -1)
        bench.close("the largest log-probs", at_policy(some, logprobs), best.values)
        bench.close("log-probs of the tokens named", table.gather(1, at_policy(some, tokens)), best.values)


@check("logprobs: micro-batches, row order and neighbours change nothing", "logprobs")
def _(bench: Bench) -> None:
    """Budgets that cut groups, that a row exceeds, and that give some ranks more than others."""
    some = rows(num_prompts=5)
    order = list(range(some.num_rows))[::-2] + list(range(some.num_rows))[::2]
    expected = bench.shared("policy").logprobs(some, entropy=True)
    for budget, index in itertools.product((1, 12, 40), (list(range(some.num_rows)), order)):
        part = some.select(index_of(index))
        found = bench.shared("policy", micro_batch_tokens=budget).logprobs(part, entropy=True)
        for name in ("logprobs", "entropy"):
            column, whole = getattr(found, name), getattr(expected, name).select(index_of(index))
            bench.close(f"{name} in micro-batches of {budget} tokens", column.values, whole.values)


@check("logprobs: equal inputs give equal numbers, bit for bit", "logprobs")
def _(bench: Bench) -> None:
    for budget in (PLENTY, 12):
        engine = bench.shared("policy", micro_batch_tokens=budget)
        first = engine.logprobs(rows(), entropy=True)
        again = engine.logprobs(rows(), entropy=True)
        bench.same("log-probs", again.logprobs, first.logprobs)
        bench.same("entropies", again.entropy, first.entropy)


@check("logprobs: no rows, one row, rows without a response", "logprobs")
def _(bench: Bench) -> None:
    engine, some = bench.shared("policy"), rows()
    for index in ([], [2], [3], [3, 9]):
        part = some.select(index_of(index))
        found = engine.logprobs(part, entropy=True, sum_pi_squared=True)
        for column in (found.logprobs, found.entropy, found.sum_pi_squared):
            bench.same(f"the layout of rows {index}", column.offsets, part.loss_mask.offsets)
        tokens, logprobs = engine.top_logprobs(part, 3)
        size = [len(part.loss_mask.values), 3]
        bench.same(f"the shape of rows {index}", (list(tokens.shape), list(logprobs.shape)), (size, size))
        bench.same("the types", (str(tokens.dtype), str(logprobs.dtype)), ("torch.int64", "torch.float32"))
        if index == [2]:
            bench.close(
                "the log-probs of one row", at_policy(part, found.logprobs.values), _plain(bench, part)["logprobs"]
            )


def wrong_rows(bench: Bench, engine: Any) -> dict[str, tuple[Rollouts, int]]:
    """By what is wrong, rows and the place of the one that is."""
    import torch

    some = rows()
    last = max(i for i, n in enumerate(some.response_lengths.tolist()) if n)
    found = {
        "An unknown token": (with_token(some, last, 10**6), last),
        "A token below 0": (with_token(some, 1, -1), 1),
    }
    if engine.max_length is not None:
        long = rows(2, 1, response_lengths=(2, engine.max_length))
        found["A row that is too long"] = (long, 1)
    unprompted = replace(
        some.select(index_of([0])),
        spans=Spans.prompt_then_response(torch.tensor([0]), some.tokens.lengths[:1], 0),
        rollout_logprobs=some.tokens.select(index_of([0])).with_values(torch.zeros(int(some.tokens.lengths[0]))),
    )
    found["A row without a prompt"] = (unprompted, 0)
    return found


@check("logprobs: rows that no model can score are refused by name", "logprobs")
def _(bench: Bench) -> None:
    engine = bench.shared("policy")
    for what, (wrong, row) in wrong_rows(bench, engine).items():
        name = [f"prompt_id {int(wrong.prompt_id[row])}", f"sample_id {int(wrong.sample_id[row])}"]
        with bench.refused(what, naming=name):
            engine.logprobs(wrong)
        with bench.refused(what, naming=name):
            engine.top_logprobs(wrong, 2)
    bench.close(
        "log-probs afterwards",
        at_policy(rows(), engine.logprobs(rows()).logprobs.values),
        _plain(bench, rows())["logprobs"],
    )


@check("logprobs: they say where they come from", "logprobs")
def _(bench: Bench) -> None:
    engine = bench.open("policy")
    origin = engine.origin(temperature=0.7)
    bench.same("the model's name", origin.model, "policy")
    bench.same("the version", origin.policy_version, 0)
    bench.same("the temperature", origin.temperature, 0.7)
    bench.true("the engine and the precision", bool(origin.engine and origin.dtype), origin)
    cut = engine.origin(sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1))
    bench.same("the sampling", (cut.temperature, cut.top_p, cut.top_k, cut.min_p), (0.5, 0.9, 7, 0.1))
    engine.complete_version()
    bench.same("the version after one more", engine.origin().policy_version, 1)


# -- values and scores --------------------------------------------------------------------------------------------------


def random_heads(engine: Any, hidden: int, names: set[str], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Fill the one value head of an engine (the tensors that are none of ``names``); its weight and bias."""
    import torch

    weights = dict(engine.weights())
    generator = torch.Generator().manual_seed(seed)
    new = {n: torch.randn(t.shape, generator=generator) for n, t in weights.items() if n not in names}
    engine.load_weights(weights | new, policy_version=engine.policy_version)
    flat = sorted((t.flatten() for t in new.values()), key=len)
    if [len(t) for t in flat] != [1, hidden]:
        raise FlowError("A value head has other tensors", expected=[1, hidden], received=[len(t) for t in flat])
    return flat[1], flat[0]


@check("values: a new critic says 0, then what its head makes of hidden states", "values", "weights")
def _(bench: Bench) -> None:
    import torch

    some = rows()
    for budget in (PLENTY, 12):
        engine, body = bench.open("value", micro_batch_tokens=budget), bench.plain("value")
        new = engine.values(some)
        bench.same("the response layout", new.offsets, some.loss_mask.offsets)
        bench.true("a new head gives 0", not bool(new.values.any()), new.values)
        weight, bias = random_heads(engine, body.config.hidden_size, set(body.state_dict()))
        with torch.no_grad():
            expected = plain_hidden(body, some) @ weight + bias
        found = engine.values(some)
        bench.same("type and gradient", (found.values.dtype, found.values.requires_grad), (torch.float32, False))
        bench.close("values", at_policy(some, found.values), at_policy(some, expected))
        for index in ([], [3], [2]):
            part = some.select(index_of(index))
            bench.same(f"the layout of rows {index}", engine.values(part).offsets, part.loss_mask.offsets)


@check("values: a value does not see its own token", "values", "weights")
def _(bench: Bench) -> None:
    engine, body = bench.open("value"), bench.plain("value")
    random_heads(engine, body.config.hidden_size, set(body.state_dict()))
    some = rows(1, 1, response_lengths=(3,))
    before, after = (engine.values(with_token(some, 0, token)).values for token in (5, 77))
    bench.close("values before a token that changed", after, before)


@check("values: a head on the policy's trunk", "values", "weights", "logprobs")
def _(bench: Bench) -> None:
    import torch

    some = rows()
    engine, module = bench.open("policy"), bench.plain("policy")
    with bench.refused("A head that is not there"):
        engine.values(some, head="extra")
    engine.add_value_head("extra")
    engine.add_value_head("extra")
    bench.true("a new head gives 0", not bool(engine.values(some, head="extra").values.any()))
    weight, bias = random_heads(engine, module.config.hidden_size, set(module.state_dict()))
    with torch.no_grad():
        expected = plain_hidden(module.base_model, some) @ weight + bias
    bench.close("values", at_policy(some, engine.values(some, head="extra").values), at_policy(some, expected))
    found = at_policy(some, engine.logprobs(some).logprobs.values)
    bench.close("log-probs beside the head", found, _plain(bench, some)["logprobs"])


@check("score: what the classifier makes of each whole row", "score")
def _(bench: Bench) -> None:
    import torch

    some = rows()
    with torch.no_grad():
        expected = plain_rewards(bench.plain("reward"), some)
    for budget in (PLENTY, 12, 1):
        found = bench.shared("reward", micro_batch_tokens=budget).score(some)
        bench.same("type and gradient", (found.dtype, found.requires_grad), (torch.float32, False))
        bench.close(f"scores in micro-batches of {budget} tokens", found, expected)
    engine = bench.shared("reward")
    for index in ([], [3], [7, 2]):
        bench.close(f"scores of rows {index}", engine.score(some.select(index_of(index))), expected[index_of(index)])
    padded = with_token(some, 0, 257)  # the tokenizer's padding token is a token like others
    with torch.no_grad():
        expected = plain_rewards(bench.plain("reward"), padded)
    bench.close("scores of a row that ends in the padding token", engine.score(padded), expected)


@check("score: rows that no model can score are refused, and so is a policy", "score")
def _(bench: Bench) -> None:
    engine = bench.shared("reward")
    for what, (wrong, row) in wrong_rows(bench, engine).items():
        with bench.refused(what, naming=[f"prompt_id {int(wrong.prompt_id[row])}"]):
            engine.score(wrong)
    with bench.refused("A policy as a reward model"):
        bench.shared("policy").score(rows())
