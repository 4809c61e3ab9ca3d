"""What ranks say to each other, and what becomes of their errors."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from flowrl.errors import FlowError, RankError
from flowrl.runtime.background import Background
from flowrl.runtime.pickling import dumps
from flowrl.runtime.ranks import ONE_RANK, Ranks, is_lost, tells
from flowrl.runtime.torchrun import world_rank
from tests.ranks import launch, shared


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("stays here")


class OfTwo(Exception):
    """Can be pickled and not be made again: its constructor takes other arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def conversation(folder: str) -> None:
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
        error = ValueError("again and again")
    for _ in range(2):  # one object, in one run after the other
        assert error_of(fail(1, error), once=False) is error or world_rank() == 0

    class Speechless(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    error = error_of(fail(1, Speechless()), once=False)
    assert world_rank() == 1 or "Speechless, whose message cannot be made (KeyError)" in str(error)

    view = torch.arange(1_000_000)[10:20]
    with joined(60) as ranks:
        assert len(dumps(view)) < 1000 and torch.equal(ranks.once(lambda: view), view)
        for tensor in (
            torch.ones(2, 3).bfloat16().t(),
            torch.tensor(3),
            torch.zeros(0, 4),
            torch.tensor([True, False]),
        ):
            got = ranks.once(lambda t=tensor: (t, t))  # type: ignore[misc]
            assert torch.equal(got[0], tensor) and got[0].dtype == tensor.dtype and got[0] is got[1]
        differing = {"seed": ranks.rank, "steps": 3}
        with pytest.raises(FlowError, match="Rank 1 would run something else than rank 0: seed differs"):
            ranks.require_same(differing)
        ranks.require_same({"steps": 3})

    with joined(60) as ranks:  # an error beside the training is nobody's before it is waited for
        background = Background(ranks)
        full = fail(1, OSError(28, "full"))
        background.begin(lambda others: (time.sleep(0.2 * others.rank), others.together(full)))
        for number in range(20):
            assert ranks.together(lambda: number) == number  # noqa: B023
            assert ranks.everyone((number, ranks.rank)) == [(number, 0), (number, 1)]
        with pytest.raises(OSError if ranks.rank == 1 else RankError, match="full"):
            background.begin(lambda others: None)
        background.begin(lambda others: others.together(fail(0, ValueError("odd"))))
        background.abandon(60)
        assert not background.has_failed and ranks.everyone(ranks.rank) == [0, 1]
    (Path(folder) / f"done.{world_rank()}").write_text("all of it")


@pytest.mark.timeout(900)
def test_two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = shared("conversation", request, tmp_path_factory)
    assert [(folder / f"done.{rank}").read_text() for rank in range(2)] == ["all of it"] * 2


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


# -- trouble, without an engine: a launch each, and that of seconds -------------------------------------------------------------


def with_trouble(kind: str, rank: int, seconds: float) -> None:
    """On two ranks: trouble on one of them, while the other waits for it, or is busy with something of its own."""
    from flowrl.runtime.spmd import joined

    def work() -> None:
        if world_rank() != rank:
            time.sleep(10_000 if kind.startswith("busy") else 0)
        elif kind == "hang":
            time.sleep(10_000)
        elif kind == "exit":
            sys.exit(0)
        else:
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(kind, signal.SIGKILL))
            time.sleep(10)

    with joined(seconds) as ranks:
        ranks.enter("call 'a', step 1")
        ranks.together(work)


def error_with(kind: str, rank: int, seconds: float = 60.0) -> str:
    launched = launch(with_trouble, kind, rank, seconds, num_ranks=2).ended()
    assert launched.status != 0 and len(launched.errors) <= 1, launched.output
    return launched.errors[0] if launched.errors else launched.output


def test_a_rank_that_hangs_is_named_with_its_line() -> None:
    message = error_with("hang", 1, 3.0)
    assert message.startswith(
        "error: Rank 1 has not come back within 3 s: it was in call 'a', step 1.\n  rank 0 is at "
    )
    assert "test_ranks.py:" in message.splitlines()[-1] and message.endswith(" in work")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["kill", "busy kill"])
def test_a_rank_that_is_killed_is_named(kind: str, rank: int) -> None:
    """Also while the other is busy with code that does not wait for it."""
    assert error_with(kind, rank).startswith(f"error: Rank {rank} is gone: it was in call 'a', step 1.")


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named() -> None:
    """No line of Python runs in it any more; torchrun ends it at last."""
    message = error_with("stop", 1, 5.0)
    assert message.startswith(
        "error: Rank 1 has not come back within 5 s: it was in call 'a', step 1.\n  rank 0 is at "
    )
    assert message.endswith("\n  rank 1 gives no sign of life: its process is stopped or gone")


@pytest.mark.slow
def test_a_rank_that_leaves_in_the_middle_ends_the_others() -> None:
    assert error_with("exit", 1).startswith("error: Rank 1 was ended in call 'a', step 1.")
    assert error_with("term", 1).count("signals.EndedAtOnce") == 1, (
        "which this script does not catch, on the one that was asked"
    )
