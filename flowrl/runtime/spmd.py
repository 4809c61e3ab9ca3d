"""The spmd runtime: under torchrun every rank runs the flow.

All ranks interpret the Program side by side with equal batches. A call that holds a Model is a conversation of all ranks:
the engine deals its rows out and gathers the results. Any other call (a source, a reward function, a judge, a filter, an
advantage) runs once, on rank 0, and its result is given to the others: what it does to the world happens once, and all ranks
go on with the same bits. Rank 0 alone shows progress and writes the run folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

from flowrl.errors import FlowError, RankError
from flowrl.models import BaseModel, State
from flowrl.runtime.local import LocalRuntime
from flowrl.runtime.progress import Progress as Display
from flowrl.runtime.ranks import DEADLINE, ONE_RANK, Ranks, is_told, tells
from flowrl.runtime.signals import EndedAtOnce, Stop, stop_on_signals
from flowrl.runtime.torchrun import next_run, world_size
from flowrl.runtime.watch import Watch

#: Seconds to say why it ends that a process has after SIGTERM.
LAST_WORDS = 5.0


class SpmdRuntime(LocalRuntime):
    """Runs a Program on all ranks that torchrun started; arguments as for LocalRuntime.

    SIGTERM or Ctrl-C on any rank ends the run on all of them after the same step, with a checkpoint.

    Raises:
        FlowError: the ranks were asked for different things.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        programs = {"": self.program} | {f"evaluation {e.name}: ": e.program for e in self.evaluations}
        asked: dict[str, Any] = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)}
        asked |= {f"evaluation {e.name}: every": e.every for e in self.evaluations}
        for which, program in programs.items():
            asked |= {f"{which}flow": program.plan.structure, f"{which}strategies": program.strategies()}
            asked[f"{which}micro_batch_tokens"] = program.plan.micro_batch_tokens
            for call in program.calls:
                texts = call.label not in program.once()  # what runs on rank 0 alone may name places of that machine
                settings = call.node.settings().items()
                asked |= {f"{which}{call.label}.{name}": plain(value, texts) for name, value in settings}
            for model in program.models:
                asked |= {f"{which}{model.name}.{name}": value for name, value in of_model(model).items()}
        shown = ("progress", "title")  # what rank 0 shows
        self.ranks.require_same({name: value for name, value in asked.items() if name not in shown})

    @contextlib.contextmanager
    def stop_on_signals(self, display: Display) -> Iterator[Stop]:
        watch = self.ranks.watch
        if watch is None:
            with super().stop_on_signals(display) as stop:
                yield stop
            return

        def at_once() -> bool:
            """Whether torchrun ends this process because another one has failed."""
            watch.asked_to_stop = True
            return not watch.ending and bool(watch.failure())

        # Nothing is said before all ranks have agreed: torchrun sends SIGTERM when a rank has died, too.
        with stop_on_signals(lambda text: None, at_once) as stop:
            yield stop

    def say_signal(self, display: Display, number: int) -> None:
        if self.ranks.size > 1:
            display.message(
                f"{signal.Signals(number).name}: all ranks end after step {self.state.step}, with a checkpoint."
            )


def of_model(model: BaseModel) -> dict[str, Any]:
    """What a Model is loaded as; where it is loaded from may be called otherwise on another machine."""
    names = ("kind", "trainable", "dtype", "autocast", "lora", "quantization", "engine")
    return {name: plain(getattr(model, name, None), texts=True) for name in names}


def plain(value: Any, texts: bool = False) -> Any:
    """The numbers of a setting, with what holds them, and its texts where they count; the rest may well differ between
    processes that do the same."""
    if isinstance(value, str):
        return value if texts else None
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, BaseModel | State):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): plain(v, texts) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, texts) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), texts) for f in fields(value)}
    return None


@contextlib.contextmanager
def joined(deadline: float | None = None) -> Iterator[Ranks]:
    """The ranks that torchrun started, watched over for the time of one run; a single rank where it did not.

    Args:
        deadline: seconds that one call may take; by default ``FLOWRL_DEADLINE``, else half an hour.

    Raises:
        RankError: the others do not come, or are gone.
        FlowError: ``FLOWRL_DEADLINE`` is not a number.
    """
    if world_size() == 1:
        yield ONE_RANK
        return
    next_run()
    deadline = deadline or deadline_of_environment()
    ranks = Ranks.join(deadline)
    watch = Watch(ranks.rank, ranks.size, deadline)
    tell_once()
    with _quiet() if not ranks.is_first else contextlib.nullcontext(), _ended_by_signals(watch):
        try:
            yield replace(ranks, watch=watch)
        except BaseException as error:
            if not is_told(error):
                watch.trouble(error)  # the others may wait for this rank, which comes no more
            raise
        finally:
            watch.leave()


@contextlib.contextmanager
def _ended_by_signals(watch: Watch) -> Iterator[None]:
    """Before the first step and after the last one, a signal ends this process at once, as it does a run of one. But where
    torchrun sends it because another rank is gone, that is said; and so is an error that is on its way already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if watch.ending:
            last_words(number, frame)
            return
        watch.asked_to_stop = True
        watch.end_if_lost()
        raise EndedAtOnce(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException:
        previous[signal.SIGTERM] = last_words  # it is said outside of here
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def last_words(number: int, frame: Any) -> None:
    """Handles a signal in a process that is about to say why it ends: it gets a few seconds for that. A second signal ends it."""
    signal.signal(number, signal.SIG_DFL)
    timer = threading.Timer(LAST_WORDS, end_now)
    timer.daemon = True
    timer.start()


def deadline_of_environment() -> float:
    """Seconds from ``FLOWRL_DEADLINE``; half an hour where it is not set.

    Raises:
        FlowError: it is not a number of seconds.
    """
    text = os.environ.get("FLOWRL_DEADLINE", str(DEADLINE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise FlowError("FLOWRL_DEADLINE cannot be used", expected="seconds, more than 0", received=repr(text))
    return seconds


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Rank 0 says what all ranks would say."""
    loggers = [logging.getLogger(name) for name in ("flowrl", "torch", "transformers")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def end_now(status: int = 1) -> NoReturn:
    """End this process without waiting for anybody: libraries say goodbye to ranks that are gone, and wait for an answer."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


_hooked: list[Any] = []


def tell_once() -> None:
    """From now on an error that ends a script on all ranks is printed by one."""
    if _hooked:
        return
    previous = sys.excepthook
    _hooked.append(previous)

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        gone = isinstance(error, RankError)
        if tells(error):
            if gone:  # where it was noticed says nothing
                notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
                print(f"error: {error}{notes}", file=sys.stderr)
            else:
                previous(kind, error, traceback)
        if gone or isinstance(error, EndedAtOnce):
            end_now()

    sys.excepthook = hook
