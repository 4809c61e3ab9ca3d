"""What ranks say to each other, and what becomes of their errors."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

from flowrl.errors import FlowError, RankError
from flowrl.runtime.ranks import ONE_RANK, Ranks, is_lost, tells, world_rank
from tests.ranks import launch


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("stays here")


class OfTwo(Exception):
    """Can be pickled and not be made again: its constructor takes other arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def conversation() -> None:
    """Of two ranks: what each sends, and what all get."""
    from flowrl.runtime.spmd import joined

    with joined(60) as ranks:
        other = 1 - ranks.rank
        assert (ranks.size, ranks.rank, ranks.is_first) == (2, world_rank(), ranks.rank == 0)
        assert ranks.everyone({"rank": ranks.rank}) == [{"rank": 0}, {"rank": 1}]
        assert ranks.from_first(f"of {ranks.rank}") == "of 0"
        assert torch.equal(ranks.total(torch.tensor([1, ranks.rank])), torch.tensor([2, 1]))

        ran: list[int] = []
        made = ranks.once(lambda: (ran.append(ranks.rank), torch.arange(5) * 2)[1])
        assert ran == ([0] if ranks.is_first else []) and torch.equal(made, torch.arange(5) * 2)
        assert ranks.once(lambda: None) is None and ranks.once(lambda: b"") == b""
        assert ranks.once(lambda: "x" * 100_000) == "x" * 100_000
        assert ranks.alone(lambda: threading.Lock()) is None or ranks.is_first, "it need not travel"
        assert ranks.together(lambda: ranks.rank) == ranks.rank

    def error_of(work: object, *, once: bool) -> Exception:
        with joined(60) as ranks:
            try:
                ranks.once(work) if once else ranks.together(work)  # type: ignore[arg-type]
            except Exception as error:
                return error
        raise AssertionError("nothing was raised")

    def divide() -> float:
        return 1 / 0

    def fail(rank: int | None, error: Exception) -> object:
        def work() -> None:
            if rank is None or world_rank() == rank:
                raise error

        return work

    error = error_of(divide, once=True)
    assert isinstance(error, ZeroDivisionError) and error.__notes__ == ["on rank 0 of 2"]
    assert tells(error) == (world_rank() == 0)
    error = error_of(fail(0, FlowError("bad", expected="good", do="repair it")), once=True)
    assert str(error) == "bad. Expected good. Do: repair it."
    error = error_of(fail(0, OfTwo(1, 2)), once=True)
    assert isinstance(error, OfTwo) if world_rank() == 0 else str(error) == "Rank 0 raised OfTwo: 1 and 2."
    error = error_of(lambda: Unpicklable(), once=True)
    assert "What rank 0 made cannot travel" in str(error) and "Unpicklable: stays here" in str(error)

    error = error_of(fail(1, ValueError("odd")), once=False)
    mine = world_rank() == 1
    assert isinstance(error, ValueError if mine else RankError) and tells(error) == mine
    assert mine or str(error) == "Rank 1 raised ValueError: odd. Expected every rank to get as far as this one."
    error = error_of(fail(None, ValueError("both")), once=False)
    assert str(error) == "both" and tells(error) == (world_rank() == 0), "the first rank tells what all of them raise"
    with joined(60) as ranks:
        assert ranks.everyone(other) == [1, 0], "errors that all ranks have end nothing but their run"


def test_two_ranks() -> None:
    launched = launch(conversation, num_ranks=2).succeeded()
    assert launched.errors == []


def test_one_rank_talks_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.join()
    assert ranks == ONE_RANK and ranks.is_first and ranks.size == 1
    assert ranks.everyone(3) == [3] and ranks.from_first(4) == 4 and ranks.once(lambda: 5) == 5
    lock = threading.Lock()
    assert ranks.alone(lambda: lock) is lock and ranks.together(lambda: lock) is lock
    assert torch.equal(ranks.total(torch.tensor([1])), torch.tensor([1]))
    with pytest.raises(KeyError):
        ranks.agree(KeyError("x"))
    ranks.agree(None)
    ranks.enter("anything")
    assert tells(ValueError())


def test_errors_of_lost_ranks_are_known_by_what_gloo_says() -> None:
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    assert is_lost(RuntimeError(said)) and is_lost(RankError("gone"))
    assert not is_lost(RuntimeError("shapes differ")) and not is_lost(ValueError(said))


def test_a_rank_error_travels() -> None:
    error = RankError("Rank 1 is gone", received="nothing")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
