"""The error tree.

Every error a user can cause is a :class:`FlowError`: it names the thing, what was expected, what came and what to do.
Members stay picklable, so that a worker can send one to the driver. ``assert`` is for our own mistakes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FlowError(Exception):
    """An error with an address: what, expected, received, what to do.

    Args:
        message: the thing at fault and what is wrong with it, in one sentence.
        expected: what flowrl expected there.
        received: what came instead.
        do: what the user can do about it.
        where: the user's ``file:line``, where one is known.
    """

    def __init__(
        self,
        message: str,
        *,
        expected: object = None,
        received: object = None,
        do: str | None = None,
        where: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = None if expected is None else str(expected)
        self.received = None if received is None else str(received)
        self.do = do
        self.where = where

    def __str__(self) -> str:
        parts = [self.message if self.message.endswith((".", "!", "?")) else self.message + "."]
        if self.expected is not None:
            parts.append(f"Expected {self.expected}.")
        if self.received is not None:
            parts.append(f"Received {self.received}.")
        if self.do is not None:
            parts.append(f"Do: {self.do}" + ("" if self.do.endswith((".", "?")) else "."))
        if self.where is not None:
            parts.append(f"(at {self.where})")
        return " ".join(parts)

    def __reduce__(self) -> Any:
        return _rebuild_error, (type(self), self.__dict__, self.args)


def _rebuild_error(cls: type[FlowError], state: dict[str, Any], args: tuple[Any, ...]) -> FlowError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class GraphError(FlowError):
    """A flow is written wrongly; raised at the line that does it."""


class EdgeTypeError(GraphError, TypeError):
    """A node is called with an edge or an argument of the wrong type."""


class UnknownFieldError(GraphError, AttributeError):
    """A field is read that the batch does not have."""


class RefUseError(GraphError, TypeError):
    """A Ref is used as if it were data: ``if ref``, ``for x in ref``, ``len(ref)``, ``ref + 1``."""


class CheckError(FlowError):
    """A flow breaks rules; ``violations`` holds all of them, collected in one report."""

    def __init__(self, message: str, violations: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations

    def __str__(self) -> str:
        return self.message


class BatchError(FlowError, ValueError):
    """A batch is malformed: columns of different lengths, a wrong dtype, a missing column."""


class AlignmentError(BatchError):
    """Row ids of a node's inputs differ, repeat or are missing."""


class GroupSizeError(BatchError):
    """A group-relative node met a group smaller than it is defined for."""


class DataError(FlowError, ValueError):
    """A data set cannot be read: missing file or column, empty, a row of the wrong type."""


class ModelError(FlowError, ValueError):
    """A model cannot be found, loaded or used as asked."""


class RewardError(FlowError, RuntimeError):
    """A reward function fails on so many rows that the run stops."""


class DeadlineError(FlowError, TimeoutError):
    """A wait passed its deadline."""


class NonFiniteError(FlowError, ArithmeticError):
    """Losses or gradients stayed non-finite for longer than allowed."""


class ExhaustedError(FlowError, RuntimeError):
    """A filter let too few groups through within its bound of pulls."""


class CheckpointError(FlowError, RuntimeError):
    """A checkpoint is damaged, incomplete or of another flow."""


class RunFolderError(FlowError, RuntimeError):
    """A run folder exists already, cannot be written, or is not a run folder."""


class RankError(FlowError, RuntimeError):
    """A rank of a run raised, died or hangs."""


class UnsupportedError(FlowError, NotImplementedError):
    """This machine, engine or version cannot do what was asked."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """A sentence that offers the candidates closest to a mistyped name, or lists what there is."""
    candidates = list(candidates)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "there is " + ", ".join(repr(c) for c in candidates) if candidates else "there is none"
