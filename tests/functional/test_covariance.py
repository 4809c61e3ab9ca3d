"""Which tokens Clip-Cov and KL-Cov hold: by hand, in any order of rows, in equal shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.functional.covariance import (
    clip_cov_loss,
    clip_cov_tokens,
    kl_cov_loss,
    kl_cov_tokens,
    token_covariances,
    token_hashes,
)
from flowrl.ragged import Ragged

NAN = math.nan
MASK = Ragged.from_rows([[1, 1, 0], [1], [], [1, 0]], torch.uint8)
LOGPROBS = torch.tensor([-1.0, -2.0, NAN, -3.0, -2.0, 9.0])
ADVANTAGES = torch.tensor([1.0, -1.0, 5.0, -2.0, 2.0, NAN])
IDS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])


def test_covariances_by_hand() -> None:
    """Means over the four tokens that count: −2 and 0."""
    got = token_covariances(LOGPROBS, ADVANTAGES, MASK.values.bool())
    assert got.tolist() == [1.0, -0.0, 0.0, 2.0, 0.0, 0.0] and got.dtype == torch.float64
    assert token_covariances(LOGPROBS[:1], ADVANTAGES[:1], torch.tensor([True])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("share", "want"), [(0.01, [0, 0, 0, 1, 0, 0]), (0.5, [1, 0, 0, 1, 0, 0]), (0.74, [1, 0, 0, 1, 0, 0])]
)
def test_kl_cov_takes_the_largest(share: float, want: list[int]) -> None:
    assert kl_cov_tokens(LOGPROBS, ADVANTAGES, MASK, share=share, ids=IDS).int().tolist() == want


def test_ties_go_by_ids_and_not_by_the_order_of_rows() -> None:
    mask = Ragged.from_rows([[1, 1], [1, 1]], torch.uint8)
    equal = torch.zeros(4)
    assert kl_cov_tokens(equal, equal, mask, share=0.75).int().tolist() == [1, 1, 1, 0]
    ids = torch.tensor([[5, 0], [2, 9]])
    assert kl_cov_tokens(equal, equal, mask, share=0.75, ids=ids).int().tolist() == [1, 0, 1, 1]


def test_clip_cov_takes_only_what_qualifies() -> None:
    """A covariance strictly within the bounds, and a ratio that is not clipped."""

    def taken(old: Tensor = LOGPROBS, low: float = 0.5, high: float = 3.0, share: float = 1.0) -> list[int]:
        marked = clip_cov_tokens(LOGPROBS, old, ADVANTAGES, MASK, key=1, share=share, low=low, high=high, ids=IDS)
        return marked.int().tolist()

    assert taken() == [1, 0, 0, 1, 0, 0]
    assert taken(low=1.0) == [0, 0, 0, 1, 0, 0] and taken(high=2.0) == [1, 0, 0, 0, 0, 0]
    assert taken(low=5.0, high=6.0) == [0] * 6
    clipped = LOGPROBS - torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])  # both went up: of them A > 0 is clipped
    assert taken(old=clipped) == [0, 0, 0, 1, 0, 0]
    assert sum(taken(share=0.01)) == 1  # at least one


def test_losses_by_hand() -> None:
    logprobs = torch.tensor([math.log(1.1), math.log(1.1)], requires_grad=True)
    marked = torch.tensor([True, False])
    losses, clipped = clip_cov_loss(logprobs, torch.zeros(2), torch.ones(2), marked)
    assert losses.tolist() == pytest.approx([0.0, -1.1]) and clipped.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(losses.sum(), logprobs)[0].tolist() == pytest.approx([0.0, -1.1])
    losses = kl_cov_loss(logprobs, torch.zeros(2), torch.ones(2), marked, coef=0.5)
    assert losses.tolist() == pytest.approx([-1.1 + 0.5 * math.log(1.1), -1.1])
    assert torch.autograd.grad(losses.sum(), logprobs)[0].tolist() == pytest.approx([-0.6, -1.1])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_law_9_the_order_of_rows_changes_nothing(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    number = sum(lengths)
    # few distinct values: many ties
    column = st.lists(st.sampled_from([-1.5, -1.0, -0.1]), min_size=number, max_size=number)
    layout = Ragged.from_lengths(torch.tensor(data.draw(column)), torch.tensor(lengths))
    advantages = layout.with_values(torch.tensor(data.draw(column)))
    mask = layout.with_values(torch.tensor(data.draw(st.lists(st.booleans(), min_size=number, max_size=number))).byte())
    ids = torch.tensor([[i // 2, i % 2] for i in range(len(lengths))])
    share = data.draw(st.sampled_from([0.1, 0.4, 0.9]))

    def marked(rows: Tensor) -> tuple[Tensor, Tensor]:
        x, a, m = (c.select(rows) for c in (layout, advantages, mask))
        clip = clip_cov_tokens(x.values, x.values, a.values, m, key=7, share=share, low=-9, high=9, ids=ids[rows])
        kl = kl_cov_tokens(x.values, a.values, m, share=share, ids=ids[rows])
        for found in (clip, kl):
            assert int(found.sum()) == min(int(m.values.sum()), max(1, int(int(m.values.sum()) * share)))
            assert not bool((found & ~m.values.bool()).any())
        return clip, kl

    whole = marked(torch.arange(len(lengths)))
    for got, want in zip(marked(order), whole, strict=True):
        assert torch.equal(got, layout.with_values(want).select(order).values)


def test_hashes_are_the_same_on_every_machine() -> None:
    """SplitMix64 in plain integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of the published generator from seed 0
    layout = Ragged.from_rows([[0, 0], [0]], torch.uint8)
    ids = torch.tensor([[3, -1], [2**40, 5]])
    key = 2**127 + 12345
    want = []
    for row, position in ((0, 0), (0, 1), (1, 0)):
        state = key % 2**64
        for number in (*ids[row].tolist(), position):
            state = mix(state ^ mix(number % 2**64))
        want.append(state)
    assert token_hashes(key, layout, ids).tolist() == want


def test_every_token_is_as_likely_as_another() -> None:
    """Over 1000 keys each of 50 tokens is drawn 200 times ± 13 (one standard deviation), and two neighbours together 37
    times ± 6."""
    mask = Ragged.from_rows([[1] * 25, [1] * 25], torch.uint8)
    counts = np.zeros(50)
    both = 0
    for key in range(1000):
        order = np.argsort(token_hashes(key, mask))[:10]
        counts[order] += 1
        both += 3 in order and 4 in order
    assert abs(counts - 200).max() < 5 * 13
    assert abs(both - 1000 * 10 * 9 / (50 * 49)) < 5 * 6


def test_many_tokens_take_no_loop() -> None:
    """Half a million tokens, which a loop in Python would feel; the share is exact."""
    number = 500_000
    mask = Ragged.from_lengths(torch.ones(number, dtype=torch.uint8), torch.full((100,), number // 100))
    x = torch.randn(number, generator=torch.Generator().manual_seed(0))
    assert int(clip_cov_tokens(x, x, x, mask, key=1, share=0.001, low=0.0, high=9.0).sum()) == 500


def test_nothing() -> None:
    empty, mask = torch.zeros(0), Ragged.from_rows([], torch.uint8)
    assert (
        kl_cov_tokens(empty, empty, mask).tolist() == clip_cov_tokens(empty, empty, empty, mask, key=1).tolist() == []
    )
    none = Ragged.from_rows([[0, 0]], torch.uint8)
    two = torch.zeros(2)
    assert kl_cov_tokens(two, two, none).tolist() == [False, False]
