"""The ranks of a run: processes that torchrun started, and what they say to each other.

Objects travel over a gloo group of their own, whatever the devices are. What must happen once (reading data, calling a
reward function, writing a file) is done by rank 0, whose result, or error, is everybody's: :meth:`Ranks.once`. What all
ranks do together ends for all of them where it fails on one: :meth:`Ranks.together`. A rank that dies, hangs or raises in
the middle of a conversation is the business of :class:`flowrl.runtime.watch.Watch`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from flowrl.errors import FlowError, RankError
from flowrl.runtime.pickling import dumps
from flowrl.runtime.torchrun import claim, current_run, meet, world_rank, world_size

if TYPE_CHECKING:
    from flowrl.runtime.watch import Watch

T = TypeVar("T")

#: Seconds that one call may take before its run is given up: the slowest one must fit.
DEADLINE = 1800.0
#: Seconds by which torch's own deadlines are later: the watch says more than they do.
_LATER = 60.0


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the run.

    Args:
        rank: 0 … size−1; rank 0 shows, writes, and runs what runs once.
        size: how many.
        deadline: seconds that a wait may take.
        group: the gloo group of all ranks; None for a single process.
        agreement: another one, over which they say nothing but whether all is well: a rank that has failed must not be taken
            for one that takes part in what the others are at.
        watch: ends this process when another rank is gone; None where nobody watches.
    """

    rank: int = 0
    size: int = 1
    deadline: float = DEADLINE
    group: Any = None
    agreement: Any = None
    watch: Watch | None = field(default=None, compare=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    def join(cls, deadline: float = DEADLINE) -> Ranks:
        """Join the ranks that torchrun started; a single process where it did not.

        Raises:
            RankError: the others did not come within the deadline.
        """
        if world_size() == 1:
            return cls()
        size, rank = world_size(), world_rank()
        timeout = datetime.timedelta(seconds=deadline + _LATER)
        try:
            meet(rank, size, deadline)
            if not dist.is_initialized():
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                if torch.cuda.is_available():
                    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
                dist.init_process_group(backend, timeout=timeout)
            set_timeout(None, deadline)
            group, agreement = (group_of([range(size)], deadline, use) for use in ("all", "agreement"))
        except RuntimeError as error:
            raise RankError(
                f"Rank {rank} of {size} cannot join the others",
                expected=f"all {size} ranks within {deadline:g} s",
                received=_first_line(error),
                do="look at the output of the other ranks",
            ) from error
        return cls(rank, size, deadline, group, agreement)

    def leave(self) -> None:
        """Leave the group. Nobody waits for anybody any more."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def enter(self, what: str) -> None:
        """Say what this rank does from now on, and so what it was at should it die or hang."""
        if self.watch is not None:
            self.watch.enter(what)

    # -- work -------------------------------------------------------------------------------------------------------------

    def once(self, work: Callable[[], T]) -> T:
        """Let rank 0 work, and give everybody its result, or the error that it raised. Every rank calls it.

        Raises:
            Exception: whatever ``work`` raised on rank 0, on every rank.
            FlowError: the result cannot be pickled.
        """
        if self.size == 1:
            return work()
        if not self.is_first:
            return self._received(self._broadcast(None))
        try:
            result = work()
        except Exception as error:  # everybody must hear of it, whatever it is
            self._ending()
            self._broadcast(_pickled_error(error))
            raise _told_by(error, 0, self.size) from None
        try:
            data = dumps((True, result))
        except Exception as reason:  # pickling runs other people's code
            error = FlowError(
                "What rank 0 made cannot travel to the other ranks",
                expected="a result that can be pickled: its class at the top level of a module",
                received=f"{type(result).__name__}: {reason}",
            )
            self._ending()
            self._broadcast(_pickled_error(error))
            raise _told_by(error, 0, self.size) from reason
        self._broadcast(data)
        return result

    def alone(self, work: Callable[[], T]) -> T:
        """Let rank 0 work, and keep the result there: the others get None. An error is everybody's."""
        made: list[Any] = []
        self.once(lambda: made.append(work()))
        return made[0] if made else None  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> T:
        """Let every rank work; an error of one is everybody's. Every rank calls it.

        Raises:
            Exception: what ``work`` raised here.
            RankError: what it raised on another rank.
        """
        if self.size == 1:
            return work()
        try:
            result = work()
        except Exception as error:
            if is_told(error) or isinstance(error, RankError):
                raise  # all ranks have it already, or another one is gone
            if self.watch is not None and not is_lost(error):  # ranks that wait for this one inside the work must hear
                self.watch.trouble(error)
            self.agree(error)
            raise  # not reached: agree raises it
        self.agree(None)
        return result

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank where one has an error; each rank calls this at the same place.

        Raises:
            Exception: this rank's own error.
            RankError: another's, or another rank is gone.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        try:
            failed = int(self.total(torch.tensor([error is not None], dtype=torch.int64), self.agreement))
            if not failed:
                return
            self._ending()
            texts = self.everyone(None if error is None else text_of(error), self.agreement)
        except RankError as gone:
            if error is None or is_lost(error):
                raise
            raise error from gone
        if self.watch is not None:
            self.watch.close()  # all are here, and all of them raise
        first = next(rank for rank, text in enumerate(texts) if text is not None)
        if error is None:
            error = RankError(f"Rank {first} raised {texts[first]}", expected="every rank to get as far as this one")
        raise _told_by(error, first, self.size)

    # -- objects and numbers ----------------------------------------------------------------------------------------------

    def everyone(self, value: T, group: Any = None) -> list[T]:
        """What every rank has, by rank."""
        if self.size == 1:
            return [value]
        group = group or self.group
        found: list[Any] = [None] * dist.get_world_size(group)
        self._wait(lambda: dist.all_gather_object(found, value, group=group))
        return found

    def from_first(self, value: T) -> T:
        """What rank 0 has."""
        return self.once(lambda: value)

    def require_same(
        self,
        what: Mapping[str, Any],
        do: str = "take it from an argument or a file, not from the time, the process or a random number",
    ) -> None:
        """Refuse to go on with ranks that are at different things. Every rank calls it.

        Args:
            what: by name, what must be equal.
            do: what a user does about it.

        Raises:
            FlowError: names what is not.
        """
        first, *others = self.everyone(dict(what))
        for rank, found in enumerate(others, 1):
            for name in {**first, **found}:
                if first.get(name) != found.get(name):
                    error = FlowError(
                        f"Rank {rank} would run something else than rank 0: {name} differs",
                        expected=f"{first.get(name)!r}, as on rank 0",
                        received=repr(found.get(name)),
                        do=do,
                    )
                    raise _told_by(error, 0, self.size)

    def total(self, column: torch.Tensor, group: Any = None) -> torch.Tensor:
        """The sum of a CPU tensor over the ranks of a group, in place."""
        if self.size > 1:
            group = group or self.group
            self._wait(lambda: dist.all_reduce(column, group=group))
        return column

    def _broadcast(self, data: bytes | None) -> bytes:
        """The bytes of rank 0, on every rank."""
        length = torch.tensor([len(data) if data is not None else 0])
        self._wait(lambda: dist.broadcast(length, src=0, group=self.group))
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(int(length), dtype=torch.uint8)
        )
        self._wait(lambda: dist.broadcast(buffer, src=0, group=self.group))
        return data if data is not None else buffer.numpy().tobytes()

    def _received(self, data: bytes) -> Any:
        try:
            fine, value = pickle.loads(data)
        except Exception as error:  # unpickling runs other people's code
            raise FlowError(
                f"Rank {self.rank} cannot read what rank 0 made",
                expected="classes at the top level of modules that every rank can import",
                received=f"{type(error).__name__}: {error}",
            ) from error
        if fine:
            return value
        self._ending()
        if self.watch is not None:
            self.watch.close()  # everybody raises this
        raise _told_by(value, 0, self.size)

    def _ending(self) -> None:
        """An error is on its way, and is to be said, also where torchrun sends SIGTERM since another rank was faster to end."""
        if self.watch is not None:
            self.watch.ending = True

    def _wait(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> RankError:
        """What a failed conversation means: why another rank has left it, or which one is gone, and what it was at."""
        self._ending()
        who = (self.watch.failure() or self.watch.missing()) if self.watch is not None else ""
        return RankError(
            who or f"Rank {self.rank} waits for another rank, which is gone or hangs",
            expected=f"all {self.size} ranks to the end of the run",
            received=_first_line(error),
            do="look at the first error above, and at what ended that rank in torchrun's summary (-9: killed, or out of memory)",
        )


#: A run of a single process.
ONE_RANK = Ranks()


# -- errors -------------------------------------------------------------------------------------------------------------------


def is_lost(error: BaseException) -> bool:
    """Whether an error comes from a conversation with a rank that is gone."""
    if isinstance(error, RankError | dist.DistError):
        return True
    signs = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _first_line(error: BaseException) -> str:
    """What an error says, without the place in a library that says it."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\]\s*", "", line).split(". This is")[0][:200] or type(error).__name__


def text_of(error: BaseException) -> str:
    """An error's class and message, also where its own code cannot say it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as reason:  # it is somebody's code
        return f"{type(error).__name__}, whose message cannot be made ({type(reason).__name__})"


def _told_by(error: Exception, rank: int, size: int) -> Exception:
    """Remember which rank tells the user of an error that all of them have."""
    with contextlib.suppress(AttributeError, TypeError):  # an exception may refuse
        if not is_told(error):
            error.told_by = (current_run(), rank)  # type: ignore[attr-defined]
            error.add_note(f"on rank {rank} of {size}")
    return error


def is_told(error: BaseException) -> bool:
    """Whether all ranks have this error, in this run: somebody's code may raise one object again and again."""
    return getattr(error, "told_by", (None, 0))[0] == current_run()


def _pickled_error(error: Exception) -> bytes:
    """The error, or another in its place where it cannot travel."""
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)  # many exceptions can be pickled and not be made again
        return data
    except Exception:
        return pickle.dumps((False, RankError(f"Rank 0 raised {text_of(error)}")))


def tells(error: BaseException) -> bool:
    """Whether this process is the one that tells the user of an error that ends the run."""
    if world_size() == 1:
        return True
    _, rank = getattr(error, "told_by", (None, None))
    return claim() if rank is None else rank == world_rank() and claim()


# -- groups ------------------------------------------------------------------------------------------------------------------


def set_timeout(group: Any, deadline: float) -> None:
    """Let torch's own waits in a group (None: the group of all) be longer than the deadline of a run."""
    # What torch.distributed makes by itself has timeouts of its own, 10 minutes with NCCL.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=deadline + _LATER), group)


def group_of(members: Sequence[Sequence[int]], deadline: float, use: str = "") -> Any:
    """A gloo group a list of ranks; the one that this rank is in. Every rank calls it with the same lists.

    A group holds threads for as long as the process lives, so one is made for each set of lists and use, whoever asks.
    """
    key = (id(dist.group.WORLD), tuple(map(tuple, members)), use)
    if key not in _groups:
        _groups[key] = _new_groups(members, deadline)
    set_timeout(_groups[key], deadline)
    return _groups[key]


#: The groups of :func:`group_of`, by the process group that they are parts of.
_groups: dict[Any, Any] = {}


def _new_groups(members: Sequence[Sequence[int]], deadline: float) -> Any:
    timeout = datetime.timedelta(seconds=deadline + _LATER)
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        if dist.get_rank() in ranks:
            mine = group
    return mine
