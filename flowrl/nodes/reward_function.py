"""What a user's reward function is given and what it may give back: the half of ``FunctionReward`` that is
not a node.

:class:`RewardCall` travels to the process that runs the function, and reads what came back there: only plain
numbers and reasons return. Importing this module must stay quick (no torch), since every such process does.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.batches import FinishReason, Rollouts
from flowrl.errors import DataError, nearest

#: What a function may ask for by name, besides the columns of the data set.
KNOWN = ("response", "prompt", "messages", "finish_reason", "num_tokens")
_MAX_FLOAT32 = 3.4028234663852886e38

#: Components by name, or the reason why there are none.
RowResult = dict[str, float] | str


@dataclass(frozen=True)
class RewardCall:
    """A reward function together with how to read what it returns.

    Args:
        function: the user's.
        component: the name of a plain number.
        batched: it takes lists and returns one.
    """

    function: Callable[..., Any]
    component: str
    batched: bool

    def __call__(self, **arguments: Any) -> RowResult | list[RowResult]:
        by_place = [p.name for p in parameters(self.function) if p.kind is p.POSITIONAL_ONLY]
        by_name = {k: v for k, v in arguments.items() if k not in by_place}
        result = self.function(*(arguments[n] for n in by_place if n in arguments), **by_name)
        if inspect.iscoroutine(result):
            result = asyncio.run(_awaited(result))
        if not self.batched:
            return read_row(result, self.component)
        return read_rows(result, self.component, rows=len(next(iter(arguments.values()))))


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that can be filled; one without a name for a callable that does not say."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("response", inspect.Parameter.POSITIONAL_ONLY)]
    named = [p for p in found if p.kind is not p.VAR_POSITIONAL]
    if not named and found:  # def f(*args): it takes the response, as a function that does not say
        return [inspect.Parameter("response", inspect.Parameter.POSITIONAL_ONLY)]
    return named


def infer_batched(function: Callable[..., Any]) -> bool:
    """Whether the function's own parameter names say that it takes lists."""
    return any(p.name == "responses" for p in parameters(function))


def sources(function: Callable[..., Any], columns: Iterable[str], batched: bool) -> dict[str, str]:
    """By parameter, which of :data:`KNOWN` or which column fills it. A known name wins over a column of that
    name.

    Raises:
        DataError: a parameter without a default is neither.
    """
    columns = list(columns)
    available = [*KNOWN, *columns]
    out: dict[str, str] = {}
    unknown: list[str] = []
    for parameter in parameters(function):
        name = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            out.update({n: n for n in available if n not in out and n not in out.values()})
        elif name in available:
            out[name] = name
        elif batched and name.endswith("s") and name[:-1] in available:
            out[name] = name[:-1]
        elif parameter.default is parameter.empty:
            unknown.append(name)
    if len(unknown) == 1 and len(required(function)) == 1 and not _like_a_column(unknown[0], columns):
        return {unknown[0]: "response", **out}
    if unknown:
        raise DataError(
            f"The reward function {name_of(function)!r} asks for {unknown[0]!r}",
            expected=f"one of {', '.join(KNOWN)}, or a data column ({', '.join(columns) or 'none'})",
            received=f"the parameter {unknown[0]!r}",
            do=nearest(unknown[0], available),
        )
    return out


def required(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that must be filled."""
    return [p.name for p in parameters(function) if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def required_columns(function: Callable[..., Any], batched: bool) -> tuple[str, ...]:
    """Columns that the data set must have for this function, as far as its signature alone tells."""
    names = required(function)
    if len(names) == 1:  # then any other name stands for the response
        return ()
    return tuple(n for n in names if n not in KNOWN and not (batched and n.endswith("s")))


def _like_a_column(name: str, columns: Sequence[str]) -> bool:
    """Whether a name looks like a column misspelt, rather than like another word for the response."""
    return bool(difflib.get_close_matches(name, columns, n=1, cutoff=0.75))


def name_of(function: Callable[..., Any]) -> str:
    """How errors and components call a function."""
    function = getattr(function, "func", function)
    name = getattr(function, "__name__", None) or type(function).__name__
    return "reward" if name == "<lambda>" else name


def row_values(rollouts: Rollouts, wanted: Iterable[str]) -> dict[str, Sequence[Any]]:
    """Of each source of :func:`sources`, the value of every row."""
    out: dict[str, Sequence[Any]] = {}
    for name in set(wanted):
        if name == "response":
            out[name] = rollouts.response_text
        elif name == "prompt":
            out[name] = [prompt_text(m) for m in rollouts.messages]
        elif name == "messages":
            out[name] = rollouts.messages
        elif name == "finish_reason":
            out[name] = [FinishReason(code).name.lower() for code in rollouts.finish_reason.tolist()]
        elif name == "num_tokens":
            out[name] = rollouts.response_lengths.tolist()
        else:
            out[name] = rollouts.extras[name]
    return out


def prompt_text(messages: Any) -> str:
    """The text of a prompt: itself, or the content of its last user message."""
    if isinstance(messages, str):
        return messages
    written = [m for m in messages if m.get("role") == "user"] or list(messages)
    content = written[-1].get("content", "") if written else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, Mapping))


def read_rows(result: Any, component: str, rows: int) -> list[RowResult]:
    """What a batched function returned, a row each; every row is invalid where the count is wrong."""
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
        return [f"returned {_describe(result)} instead of a list"] * rows
    if len(result) != rows:
        return [f"returned {len(result)} rewards for {rows} rows"] * rows
    return [read_row(item, component) for item in result]


def read_row(result: Any, component: str) -> RowResult:
    """A number under the name ``component``, or a dict of named numbers; anything else is the reason why
    not.
    """
    if not isinstance(result, Mapping):
        number = read_number(result)
        return number if isinstance(number, str) else {component: number}
    if not result:
        return "returned no components"
    out: dict[str, float] = {}
    for name, value in result.items():
        number = read_number(value)
        if not isinstance(name, str):
            return f"returned a component whose name is {_describe(name)}"
        if isinstance(number, str):
            return f"component {name!r}: {number}"
        out[name] = number
    return out


def read_number(value: Any) -> float | str:
    """A finite number that float32 can hold, or the reason why it is none."""
    if value is None or isinstance(value, str | bytes | list | tuple) or not hasattr(type(value), "__float__"):
        return f"returned {_describe(value)}"
    try:
        number = float(value)
    except Exception as error:
        return f"returned {_describe(value)}: {type(error).__name__}: {error}"[:300]
    if not abs(number) <= _MAX_FLOAT32:  # NaN too
        return f"returned {number}"
    return number


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, str | bytes):
        return f"a {kind} ({value[:40]!r}{'…' if len(value) > 40 else ''})"
    if isinstance(value, list | tuple):
        return f"a {kind} of {len(value)}"
    return f"a {kind}"


def same_components(results: Sequence[RowResult]) -> list[RowResult]:
    """Rows must agree in which components they have: those unlike the most are invalid."""
    sets = Counter(frozenset(r) for r in results if not isinstance(r, str))
    if len(sets) < 2:
        return list(results)
    usual = sets.most_common(1)[0][0]
    return [
        r
        if isinstance(r, str) or frozenset(r) == usual
        else f"returned the components {sorted(r)}, most rows {sorted(usual)}"
        for r in results
    ]
