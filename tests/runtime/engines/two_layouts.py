"""Two Models of one flow that lie over ranks in different ways: a teacher read in the student's pass, an Ema that follows.

Run on two ranks, in the launch of ``test_adapters``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import AdamW, Ema, FullKLLoss, Model, Snapshot
from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings, use_bindings
from flowrl.errors import ModelError
from flowrl.runtime.ranks import Ranks
from flowrl.runtime.worker import follow, open_engine
from tests.runtime.engines.engines import Reinforce, relative_distance, term_rows
from tests.tiny import recorded_rollouts, tiny_model, tiny_tokenizer

#: 15 rows in micro-batches of 60 tokens: an odd number of these, so that one of two ranks has one less.
ROLLOUTS = recorded_rollouts(num_prompts=5, group_size=3, observations=True)
BUDGET = 60
FULL, OPTIMIZER, NONE, TP2 = (
    Strategy(),
    Strategy(sharding="optimizer"),
    Strategy(sharding="none"),
    Strategy(tensor_parallel=2),
)
Pairs = list[tuple[Strategy, Strategy]]
#: (student, teacher), and those of the slow launch.
TEACHERS: Pairs = [(FULL, FULL), (NONE, FULL)]
MORE_TEACHERS: Pairs = [(FULL, NONE), (NONE, OPTIMIZER), (TP2, FULL), (TP2, TP2), (TP2, NONE)]
#: (base, what follows it), and those of the slow launch.
FOLLOWERS: Pairs = [(FULL, NONE), (NONE, FULL)]
MORE_FOLLOWERS: Pairs = [(FULL, FULL), (FULL, TP2), (TP2, FULL)]


def model(name: str, seed: int = 0, **settings: Any) -> Model:
    return Model(tiny_model(seed=seed), name=name, tokenizer=tiny_tokenizer(), device="cpu", **settings)


def bindings_of(ranks: Ranks | None, **strategies: Strategy) -> Bindings:
    return Bindings(open_engine, micro_batch_tokens=BUDGET, ranks=ranks, strategies=strategies)


def weights(engine: Any) -> Tensor:
    return torch.cat([t.flatten() for _, t in engine.weights()])


def distilled(bindings: Bindings) -> tuple[list[float], Tensor]:
    """Loss and gradient norm of two steps towards a teacher that nobody has run before, and the student's weights."""
    with use_bindings(bindings):
        student, teacher = model("student"), model("teacher", 1, trainable=False)
        engine: Any = bindings.engine(student)
        found = []
        for _ in range(2):
            done = engine.train_step(
                [term_rows(FullKLLoss(teacher)(ROLLOUTS)), term_rows(Reinforce()(ROLLOUTS))],
                AdamW(learning_rate=1e-2, eps=1e-4),
                max_grad_norm=1.0,
            )
            found += [done.sums["loss"][0], done.grad_norm]
        return found, weights(engine)


def check_teachers(ranks: Ranks, pairs: Pairs) -> None:
    numbers, expected = distilled(bindings_of(None))
    for student, teacher in pairs:
        found, held = distilled(bindings_of(ranks, student=student, teacher=teacher))
        assert found == pytest.approx(numbers, rel=1e-5), (student, teacher)
        assert relative_distance(held, expected) <= 1e-5, (student, teacher)


def check_refused(ranks: Ranks) -> None:
    with pytest.raises(ModelError, match=r"tensor_parallel of teacher .*Expected a divisor of 1, .*Received 2"):
        distilled(bindings_of(ranks, student=FULL, teacher=TP2))


def followed(bindings: Bindings) -> list[Tensor]:
    """The weights of an Ema and a Snapshot after two steps."""
    base = model("base")
    followers = [Ema(base, decay=0.75), Snapshot(base)]
    engine: Any = bindings.engine(base)
    others: list[Any] = [bindings.engine(f) for f in followers]  # type: ignore[arg-type]
    for _ in range(2):
        engine.train_step([term_rows(Reinforce()(ROLLOUTS))], AdamW(learning_rate=1e-2, eps=1e-4), max_grad_norm=1.0)
        engine.complete_version()
        for follower in followers:
            follow(follower, bindings)
    return [weights(other) for other in others]


def check_followers(ranks: Ranks, pairs: Pairs) -> None:
    expected = followed(bindings_of(None))
    for base, other in pairs:
        found = followed(bindings_of(ranks, base=base, **{"base.ema": other, "base.snapshot": other}))
        for mine, theirs in zip(found, expected, strict=True):
            assert relative_distance(mine, theirs) <= 1e-5, (base, other)


def check_copies(ranks: Ranks) -> None:
    """A copy is held in the precision of what it was made from."""
    half = model("half", dtype="bfloat16")
    bindings = bindings_of(ranks)
    engine, frozen = (bindings.engine(m) for m in (half, half.frozen()))  # type: ignore[arg-type]
    kept = dict(frozen.weights())
    assert all(t.dtype == kept[n].dtype and torch.equal(t, kept[n]) for n, t in engine.weights())
    here, there = (e.logprobs(ROLLOUTS).logprobs.values for e in (engine, frozen))
    assert torch.equal(here, there)


def check(ranks: Ranks) -> None:
    check_copies(ranks)
    check_followers(ranks, FOLLOWERS)
    check_teachers(ranks, TEACHERS)
    check_refused(ranks)


def check_more(ranks: Ranks) -> None:
    check_followers(ranks, MORE_FOLLOWERS)
    check_teachers(ranks, MORE_TEACHERS)
