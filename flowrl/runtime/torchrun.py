"""What torchrun tells a process of the others, and the store that it keeps for them: texts by name."""

from __future__ import annotations

import datetime
import os
from typing import Any


def world_size() -> int:
    """How many processes torchrun started; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def world_rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


_stores: list[Any] = []
#: Runs that this process has joined: what is said of one is not taken for another.
_runs = [0]


def store() -> Any:
    """What torchrun keeps for all ranks: texts by name."""
    if not _stores:
        import torch.distributed as dist

        found, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _stores.append(dist.PrefixStore(f"flowrl/{restart}", found))  # type: ignore[attr-defined]
    return _stores[0]


def run_store() -> Any:
    """The same for the run that was joined last, or the time before the first."""
    import torch.distributed as dist

    return dist.PrefixStore(f"run-{_runs[0]}", store())  # type: ignore[attr-defined]


def current_run() -> int:
    """Its number in this process; 0 before the first."""
    return _runs[0]


def next_run() -> None:
    """Begin anew: every rank does."""
    _runs[0] += 1


def claim() -> bool:
    """Whether this rank is the first to say why the run ends."""
    try:
        return run_store().add("said", 1) == 1
    except Exception:  # torchrun is gone
        return world_rank() == 0


def meet(rank: int, size: int, deadline: float) -> None:
    """Wait for all ranks to come to this run.

    Raises:
        RuntimeError: names those that did not come.
    """
    place = run_store()
    place.set(f"joined/{rank}", "")
    try:
        place.wait([f"joined/{other}" for other in range(size)], datetime.timedelta(seconds=deadline))
    except RuntimeError:
        absent = [other for other in range(size) if not place.check([f"joined/{other}"])]
        raise RuntimeError(f"no sign of rank {', '.join(map(str, absent)) or 'any'}") from None
