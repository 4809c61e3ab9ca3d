"""Checks of engines: text and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrl.batches import FinishReason
from flowrl.ragged import Ragged
from flowrl.testing.engine_bench import Bench, check
from flowrl.testing.engine_rows import ORDINARY, as_rollouts, index_of

if TYPE_CHECKING:
    from flowrl.nodes.rollout import Sampling

#: Law 10: between the sampler's and the trainer's log-probs, in float32.
SAMPLER_GAP = 1e-4
PROMPTS = ([1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11], [1, 2, 3])
KEYS = (11, 22, 33, 44, 2**100 + 5)


def sampling(max_new_tokens: int = 6, **settings: Any) -> Sampling:
    from flowrl.nodes.rollout import Sampling

    settings.setdefault("stop_token_ids", tuple(range(0, ORDINARY, 9)))  # so that some rows stop, and some do not
    return Sampling(max_new_tokens, **settings)


def ids(prompts: Sequence[Sequence[int]]) -> Ragged:
    import torch

    return Ragged.from_rows([torch.tensor(p, dtype=torch.int64) for p in prompts], torch.int64)


# -- text ---------------------------------------------------------------------------------------------------------------


@check("text: encoding and decoding are the tokenizer's", "text")
def _(bench: Bench) -> None:
    engine = bench.shared("policy")
    from flowrl.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "hé?"}]
    encoded = engine.encode(["say ab", chat])
    expected: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    bench.same("token ids", encoded.to_lists(), [tokenizer("say ab")["input_ids"], list(expected["input_ids"])])
    bench.same("the text of tokens", engine.decode(encoded.select(index_of([0]))), ("say ab",))
    bench.same("the text of an end", engine.decode(ids([[256]])), ("",))
    bench.same("no texts", (engine.encode([]).num_rows, engine.decode(ids([]))), (0, ()))
    with bench.refused("A prompt that is a number"):
        engine.encode([5])


# -- sampling -----------------------------------------------------------------------------------------------------------


@check("generate: responses end as their finish reasons say", "generate")
def _(bench: Bench) -> None:
    import torch

    how = sampling(8)
    prompts, keys = ids([[i % 250 + 1, 2] for i in range(24)]), list(range(24))
    found = bench.shared("policy").generate(prompts, keys, how)
    types = (found.tokens.values.dtype, found.logprobs.values.dtype, found.finish_reason.dtype)
    bench.same("the types of tokens, log-probs and reasons", types, (torch.int64, torch.float32, torch.uint8))
    bench.same("the rows of log-probs", found.logprobs.offsets, found.tokens.offsets)
    bench.true("log-probs are finite and at most 0", bool((found.logprobs.values <= 0).all()), found.logprobs.values)
    bench.true("log-probs are finite", bool(torch.isfinite(found.logprobs.values).all()))
    reasons = found.finish_reason.tolist()
    bench.true("some rows stop, some are cut", {FinishReason.STOP, FinishReason.LENGTH} == set(reasons), reasons)
    for row, (tokens, reason) in enumerate(zip(found.tokens.to_lists(), reasons, strict=True)):
        stops = [t in how.stop_token_ids for t in tokens]
        if reason == FinishReason.STOP:
            bench.true(
                f"row {row} ends at its first stop token, which it keeps", stops[-1] and not any(stops[:-1]), tokens
            )
        else:
            bench.true(
                f"row {row} is cut at 8 tokens, without a stop token", len(tokens) == 8 and not any(stops), tokens
            )


@check("generate: without stop tokens it stops at those of the model", "generate")
def _(bench: Bench) -> None:
    from flowrl.tiny import EOS_ID

    prompts, keys = ids([[i % 250 + 1] for i in range(48)]), list(range(48))
    found = bench.shared("policy").generate(prompts, keys, sampling(24, stop_token_ids=(), temperature=3.0))
    for row, (tokens, reason) in enumerate(zip(found.tokens.to_lists(), found.finish_reason.tolist(), strict=True)):
        stopped = EOS_ID in tokens
        fine = tokens.index(EOS_ID) == len(tokens) - 1 if stopped else len(tokens) == 24
        bench.true(f"row {row} ends at the model's end", fine and stopped == (reason == FinishReason.STOP), tokens)
    bench.true("some row stops", bool((found.finish_reason == FinishReason.STOP).any()))


@check("generate: the same keys give the same samples, others give others", "generate")
def _(bench: Bench) -> None:
    engine, prompts = bench.shared("policy"), ids(PROMPTS)
    once, again = (engine.generate(prompts, KEYS, sampling()) for _ in range(2))
    bench.same("tokens of the same keys", again.tokens, once.tokens)
    bench.same("log-probs of the same keys", again.logprobs, once.logprobs)
    bench.same("finish reasons of the same keys", again.finish_reason, once.finish_reason)
    other = engine.generate(prompts, [k + 1 for k in KEYS], sampling())
    bench.true("other keys give other samples", other.tokens != once.tokens)
    bench.true("equal prompts differ by their keys", once.tokens.row(0).tolist() != once.tokens.row(4).tolist())
    high = engine.generate(prompts, [k + 2**64 for k in KEYS], sampling())
    bench.true("all 128 bits of a key count", high.tokens != once.tokens)


@check("generate: a row does not depend on the rows beside it", "generate")
def _(bench: Bench) -> None:
    engine, prompts = bench.shared("policy"), ids(PROMPTS)
    whole = engine.generate(prompts, KEYS, sampling())
    order = [3, 0, 4, 2, 1]
    turned = engine.generate(prompts.select(index_of(order)), [KEYS[i] for i in order], sampling())
    bench.same("tokens in another order", turned.tokens, whole.tokens.select(index_of(order)))
    expected = whole.logprobs.select(index_of(order)).values
    bench.close("log-probs in another order", turned.logprobs.values, expected)
    for row in range(len(PROMPTS)):
        alone = engine.generate(prompts.select(index_of([row])), [KEYS[row]], sampling())
        bench.same(f"tokens of row {row} alone", alone.tokens.row(0), whole.tokens.row(row))
        bench.close(f"log-probs of row {row} alone", alone.logprobs.row(0), whole.logprobs.row(row))
        bench.same(f"the finish reason of row {row} alone", int(alone.finish_reason[0]), int(whole.finish_reason[row]))


@check("generate: at temperature 0 it takes the most likely token", "generate")
def _(bench: Bench) -> None:
    import torch

    module = bench.plain("policy")
    found = bench.shared("policy").generate(ids(PROMPTS), KEYS, sampling(4, temperature=0.0, stop_token_ids=(9999,)))
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            text, logprobs = list(prompt), []
            for _ in range(4):
                table = torch.log_softmax(module(input_ids=torch.tensor([text])).logits[0, -1].float(), -1)
                text.append(int(table.argmax()))
                logprobs.append(table.max())
            bench.same(f"tokens of row {row}", found.tokens.row(row).tolist(), text[len(prompt) :])
            bench.close(f"log-probs of row {row} (at temperature 1)", found.logprobs.row(row), torch.stack(logprobs))


@check("generate: samples follow the distribution", "generate")
def _(bench: Bench) -> None:
    """600 first tokens of one prompt; of the 8 most likely ones the counts within 5 standard deviations."""
    import torch

    count = 600
    found = bench.shared("policy").generate(ids([[5, 6, 7]] * count), list(range(count)), sampling(1))
    with torch.no_grad():
        likely = bench.plain("policy")(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].float().softmax(-1)
    for token in likely.topk(8).indices.tolist():
        p, hits = float(likely[token]), int((found.tokens.values == token).sum())
        bound = 5 * (count * p * (1 - p)) ** 0.5
        bench.true(
            f"token {token} comes {count * p:.0f} ± {bound:.0f} times of {count}", abs(hits - count * p) <= bound, hits
        )


@check("generate: log-probs are those that scoring gives", "generate", "logprobs")
def _(bench: Bench) -> None:
    engine, prompts = bench.shared("policy"), ids(PROMPTS)
    for temperature in (1.0, 0.7):
        found = engine.generate(prompts, KEYS, sampling(temperature=temperature))
        scored = engine.logprobs(as_rollouts(prompts, found), temperature=temperature)
        bench.close(
            f"sampled log-probs at temperature {temperature}",
            found.logprobs.values,
            scored.logprobs.values,
            tolerance=max(SAMPLER_GAP, bench.tolerance),
        )


@check("generate: top-k, top-p and min-p cut the distribution", "generate")
def _(bench: Bench) -> None:
    """Each row's first token is inside of the cut, and its log-prob is that of the distribution which is left."""
    import torch

    prompt, count = [5, 6, 7], 40
    with torch.no_grad():
        table = torch.log_softmax(bench.plain("policy")(input_ids=torch.tensor([prompt])).logits[0, -1].float(), -1)
    order = table.argsort(descending=True)
    before = table[order].exp().cumsum(0) - table[order].exp()
    cuts = {
        "top_k": (3, order[:3]),
        "top_p": (0.5, order[before < 0.5]),
        "min_p": (0.2, order[table[order] >= table.max() + torch.tensor(0.2).log()]),
    }
    for name, (value, kept) in cuts.items():
        how = sampling(1, **{name: value})
        found = bench.shared("policy").generate(ids([prompt] * count), list(range(count)), how)
        inside = torch.isin(found.tokens.values, kept)
        bench.true(f"all tokens are inside of {name}={value}", bool(inside.all()), found.tokens.values[~inside])
        expected = table[found.tokens.values] - table[kept].logsumexp(0)
        bench.close(f"log-probs under {name}={value}", found.logprobs.values, expected, tolerance=10 * bench.tolerance)


@check("generate: no rows and one row", "generate")
def _(bench: Bench) -> None:
    import torch

    engine = bench.shared("policy")
    none = engine.generate(ids([]), [], sampling())
    types = (none.tokens.values.dtype, none.logprobs.values.dtype, none.finish_reason.dtype)
    bench.same("the types of nothing", types, (torch.int64, torch.float32, torch.uint8))
    bench.same(
        "the rows of nothing", (none.tokens.num_rows, none.logprobs.num_rows, len(none.finish_reason)), (0, 0, 0)
    )
    one = engine.generate(ids([[7]]), [1], sampling(1))
    bench.same("the rows of one", (one.tokens.num_rows, len(one.tokens.values)), (1, 1))


@check("generate: it goes as far as the model's length, and no further", "generate")
def _(bench: Bench) -> None:
    engine = bench.shared("policy")
    limit = engine.max_length
    if limit is None:
        return
    prompts = ids([[1] * (limit - 2), [2, 3], [1] * (limit - 1)])
    found = engine.generate(prompts, [1, 2, 3], sampling(5, stop_token_ids=(9999,)))
    bench.same("lengths", found.tokens.lengths.tolist(), [2, 5, 1])
    bench.same("reasons", found.finish_reason.tolist(), [FinishReason.LENGTH] * 3)


@check("generate: prompts that it cannot take are refused, wherever they stand", "generate")
def _(bench: Bench) -> None:
    """The last row: over ranks that is another one's. Afterwards all goes on as before."""
    engine = bench.shared("policy")
    wrong = {"An empty prompt": [], "An unknown token": [10**6], "A token below 0": [-1]}
    if engine.max_length is not None:
        wrong["A prompt that is too long"] = [1] * engine.max_length
    for what, prompt in wrong.items():
        for place in (0, len(PROMPTS)):
            prompts = [*PROMPTS[:place], prompt, *PROMPTS[place:]]
            with bench.refused(f"{what} in row {place}", naming=[f"row {place}"]):
                engine.generate(ids(prompts), list(range(len(prompts))), sampling())
    bench.same("rows afterwards", engine.generate(ids(PROMPTS), KEYS, sampling()).tokens.num_rows, len(PROMPTS))


@check("generate: a model that generates nothing says so", "generate", "values")
def _(bench: Bench) -> None:
    with bench.refused("Sampling from a ValueModel"):
        bench.shared("value").generate(ids(PROMPTS), KEYS, sampling())
