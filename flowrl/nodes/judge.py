"""Judges: a user's function says which of two responses is better."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from flowrl import context
from flowrl.batches import FinishReason, Preferences, Rollouts
from flowrl.errors import DataError, RewardError, nearest
from flowrl.nodes import reward_function
from flowrl.nodes.base import Node, Split
from flowrl.nodes.pairs import groups_of_rows, preferences_of

if TYPE_CHECKING:
    from flowrl.runtime.isolation import IsolatedPool, Outcome

logger = logging.getLogger("flowrl")

JudgedPairs = Literal["first_two", "adjacent", "all"]
#: What a judge may ask for by name, besides the columns of the data set.
OF_PROMPT = ("prompt", "messages")
OF_RESPONSE = ("response", "finish_reason", "num_tokens")
KNOWN = (*OF_PROMPT, *(f"{name}_{side}" for name in OF_RESPONSE for side in "ab"))

#: The probability that the first response is the better one, or the reason why there is none.
Verdict = float | str


@dataclass(frozen=True)
class JudgeCall:
    """A judge's function together with how to read what it returns: what travels to the process that runs it.

    Args:
        function: the user's.
    """

    function: Callable[..., Any]

    def __call__(self, **arguments: Any) -> Verdict:
        by_place = [p.name for p in reward_function.parameters(self.function) if p.kind is p.POSITIONAL_ONLY]
        by_name = {k: v for k, v in arguments.items() if k not in by_place}
        result = self.function(*(arguments[n] for n in by_place if n in arguments), **by_name)
        if asyncio.iscoroutine(result):
            result = asyncio.run(_awaited(result))
        return read_verdict(result)


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


def read_verdict(result: Any) -> Verdict:
    """The probability that the first response is better: of "a" 1, of "b" 0, of "tie" ½, of a number (or bool) itself.
    Anything else is the reason why there is none."""
    if isinstance(result, str):
        known = {"a": 1.0, "b": 0.0, "tie": 0.5}
        return known.get(result.strip().lower(), f"returned the text {result[:40]!r} instead of 'a', 'b' or 'tie'")
    number = reward_function.read_number(result)
    if isinstance(number, float) and not 0 <= number <= 1:
        return f"returned {number} instead of a probability"
    return number


def sources(function: Callable[..., Any], columns: Iterable[str]) -> dict[str, str]:
    """By parameter, which of :data:`KNOWN` or which column fills it. A known name wins over a column of that name. Two
    parameters of other names are the two responses, in order.

    Raises:
        DataError: a parameter without a default is neither.
    """
    columns = list(columns)
    available = [*KNOWN, *columns]
    given = reward_function.parameters(function)
    named = [p for p in given if p.kind is not p.VAR_KEYWORD]
    out = {p.name: p.name for p in named if p.name in available}
    unknown = [p.name for p in named if p.name not in out and p.default is p.empty]
    if _are_responses(unknown, out) and not any(_misspelt(name, [*OF_PROMPT, *columns]) for name in unknown):
        out |= {unknown[0]: "response_a", unknown[1]: "response_b"}
    elif unknown:
        raise DataError(
            f"The judge {_name_of(function)!r} asks for {unknown[0]!r}",
            expected=f"one of {', '.join(KNOWN)}, or a data column ({', '.join(columns) or 'none'})",
            received=f"the parameter {unknown[0]!r}",
            do=nearest(unknown[0], available),
        )
    if len(named) < len(given):  # **rest
        out |= {name: name for name in available if name not in out and name not in out.values()}
    return out


def _are_responses(unknown: Sequence[str], known: Iterable[str]) -> bool:
    """Whether parameters of unknown names can stand for the two responses."""
    return len(unknown) == 2 and not {"response_a", "response_b"} & set(known)


def _misspelt(name: str, others: Sequence[str]) -> bool:
    """Whether a name looks like one of the others misspelt, rather than like another word for a response."""
    return bool(difflib.get_close_matches(name, others, n=1, cutoff=0.75))


def _name_of(function: Callable[..., Any]) -> str:
    name = reward_function.name_of(function)
    return "judge" if name == "reward" else name


class Judge(Node):
    """Preferences that a Python function gives, pair by pair, in a process of its own, with a deadline a call.

    The function is asked which of two responses to one prompt is better: ``judge(prompt, response_a, response_b)``. Its
    parameters are filled **by name**: ``response_a``, ``response_b`` (texts), ``prompt`` (the text of the prompt, or of its
    last user message), ``messages``, ``finish_reason_a``, ``finish_reason_b``, ``num_tokens_a``, ``num_tokens_b``, and any
    column of the data set. Two arguments of other names are the two responses. It may be ``async``.

    It returns "a", "b" or "tie", or a number from 0 to 1: the probability that **response_a** is the better one (so True
    says a, and 0.5 a tie). Anything else (None, another text, NaN, an exception, no answer in time, the death of the
    process) is an **invalid** verdict: the pair is dropped, with the reason in the log. A tie is dropped too, and two
    responses of the same tokens are one without being asked about.

    Args:
        fn: the function; closures, lambdas and functions of a notebook or script are fine.
        pairs: which pairs of a prompt's responses are judged: "first_two" (one pair a prompt), "adjacent" (1st and 2nd,
            3rd and 4th, …: each response once), or "all" (g (g−1) / 2 of a group of g).
        swap: ask in both orders, and keep a pair only where both verdicts name one response: a judge who prefers what
            comes first then says nothing. Without it the response with the lower ``sample_id`` comes first, which for
            samples of one policy is as good as either order.
        timeout: seconds that a call may take.
        isolate: run in a process of its own. Without it there is no deadline, and a crash is the run's.
        num_workers: processes over which the calls are spread.
        max_invalid_fraction: more invalid verdicts than this share in one call of the node stop the run.

    Rows of the result are the pairs in order, the chosen one first, with ids minted by
    :func:`flowrl.nodes.pairs.preferences_of`: ``sample_id`` counts within the pairs of a prompt, not among its rollouts.
    Prompts without a pair have no row; there may be no row at all, and an updater then trains nothing.

    Reports ``judged_pairs`` = ``pairs`` (kept) + ``ties`` + ``inconsistent_verdicts`` (with ``swap``) +
    ``invalid_verdicts``, and ``prefers_first``: of the verdicts that name a response, the share that name the first; far
    from ½ it shows a bias.

    Raises:
        RewardError: more than ``max_invalid_fraction`` of the verdicts are invalid.
        DataError: a parameter is neither known nor a column of the data set.

    Example::

        def shorter(response_a: str, response_b: str) -> str:
            return "a" if len(response_a) < len(response_b) else "b"

        preferences = Judge(shorter)(rollouts)
    """

    fn: Callable[..., Any]
    pairs: JudgedPairs = field(default="first_two", kw_only=True)
    swap: bool = field(default=False, kw_only=True)
    timeout: float = field(default=60.0, kw_only=True)
    isolate: bool = field(default=True, kw_only=True)
    num_workers: int = field(default=1, kw_only=True)
    max_invalid_fraction: float = field(default=0.5, kw_only=True)

    kind: ClassVar[str] = "reward"
    split: ClassVar[Split] = "groups"
    needs_groups: ClassVar[int] = 2

    def problems(self) -> Iterable[str]:
        if not callable(self.fn):
            yield f"fn is {self.fn!r}; expected a function"
        if self.pairs not in get_args(JudgedPairs):
            yield f"pairs is {self.pairs!r}; expected one of {', '.join(get_args(JudgedPairs))}"
        if not self.timeout > 0:
            yield f"timeout is {self.timeout}; expected more than 0 seconds"
        if self.num_workers < 1:
            yield f"num_workers is {self.num_workers}; expected at least 1"
        if not 0 <= self.max_invalid_fraction <= 1:
            yield f"max_invalid_fraction is {self.max_invalid_fraction}; expected 0 to 1"

    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data set must have, as far as the function's signature alone tells."""
        needed = reward_function.required(self.fn)
        unknown = [name for name in needed if name not in KNOWN]
        return () if _are_responses(unknown, needed) else tuple(unknown)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise the ``DataError`` that the first call would raise for a data set with these extra columns."""
        sources(self.fn, columns)

    def setup(self, ctx: context.Bindings) -> IsolatedPool | None:
        from flowrl.runtime.isolation import IsolatedPool

        if not self.isolate:
            return None
        name = _name_of(self.fn)
        return IsolatedPool(JudgeCall(self.fn), timeout=self.timeout, num_workers=self.num_workers, name=name)

    def __call__(self, rollouts: Rollouts) -> Preferences:
        filled = sources(self.fn, rollouts.extras)
        candidates = [(k, a, b) for rows in groups_of_rows(rollouts) for k, (a, b) in enumerate(self._pairs_of(rows))]
        responses = rollouts.response_tokens.to_lists()
        asked = [(k, a, b) for k, a, b in candidates if responses[a] != responses[b]]
        orders = [(a, b) for _, a, b in asked] + ([(b, a) for _, a, b in asked] if self.swap else [])
        verdicts = self._verdicts(rollouts, filled, orders)
        counts = Counter(ties=len(candidates) - len(asked))
        kept: list[tuple[int, int, int]] = []
        for place, (k, a, b) in enumerate(asked):
            first = _winner(verdicts[place], a, b)
            # In the other order the other response is the first one.
            outcome = first if not self.swap else _agreed(first, _winner(verdicts[len(asked) + place], b, a))
            if isinstance(outcome, int):
                kept.append((k, outcome, b if outcome == a else a))
            else:
                counts[outcome] += 1
        context.report("judged_pairs", len(candidates))
        context.report("pairs", len(kept))
        for name in ("ties", "invalid_verdicts", *(("inconsistent_verdicts",) if self.swap else ())):
            context.report(name, counts[name])
        return preferences_of(rollouts, kept)

    def _pairs_of(self, rows: list[int]) -> list[tuple[int, int]]:
        """The pairs of one prompt's rows."""
        if self.pairs == "all":
            return list(combinations(rows, 2))
        disjoint = list(zip(rows[::2], rows[1::2], strict=False))
        return disjoint[:1] if self.pairs == "first_two" else disjoint

    def _verdicts(
        self, rollouts: Rollouts, filled: Mapping[str, str], orders: Sequence[tuple[int, int]]
    ) -> list[Verdict]:
        """The verdict on each (row shown first, row shown second)."""
        if not orders:
            return []
        calls = [{p: _value(rollouts, source, a, b) for p, source in filled.items()} for a, b in orders]
        outcomes = self._run(calls)
        verdicts = [_verdict_of(outcome) for outcome in outcomes]
        self._break_if_failing(rollouts, orders, verdicts, outcomes)
        decided = [v for v in verdicts if isinstance(v, float) and v != 0.5]
        if decided:
            context.report("prefers_first", sum(v > 0.5 for v in decided) / len(decided))
        return verdicts

    def _run(self, calls: Sequence[Mapping[str, Any]]) -> Sequence[Outcome]:
        from flowrl.runtime.isolation import run_here

        if self.isolate:
            return self.resource().map(calls)
        call = JudgeCall(self.fn)
        return [run_here(call, arguments) for arguments in calls]

    def _break_if_failing(
        self,
        rollouts: Rollouts,
        orders: Sequence[tuple[int, int]],
        verdicts: Sequence[Verdict],
        outcomes: Sequence[Outcome],
    ) -> None:
        failed = [i for i, v in enumerate(verdicts) if isinstance(v, str)]
        if not failed:
            return
        # What stands before the colon is the kind of failure; what follows often differs from call to call.
        kinds = Counter(str(verdicts[i]).split(":")[0] for i in failed)
        kind, count = kinds.most_common(1)[0]
        first = next(i for i in failed if str(verdicts[i]).split(":")[0] == kind)
        where = getattr(outcomes[first], "where", "")
        example = f"prompt_id {int(rollouts.prompt_id[orders[first][0]])}: {verdicts[first]}" + (
            f" at {where}" if where else ""
        )
        name = _name_of(self.fn)
        if len(failed) <= self.max_invalid_fraction * len(verdicts):
            logger.warning(
                "Judge %r: %d of %d verdicts are invalid, their pairs are dropped; %d like the first, %s",
                name,
                len(failed),
                len(verdicts),
                count,
                example,
            )
            return
        raise RewardError(
            f"The judge {name!r} failed on {len(failed)} of {len(verdicts)} calls",
            expected=f"at most {self.max_invalid_fraction:.0%} invalid verdicts",
            received=f"{count} like the first ({example})",
            do="repair the function, or raise max_invalid_fraction if so many failures are expected",
        )


def _winner(verdict: Verdict, first: int, second: int) -> int | str:
    """The row that a verdict names, or what became of it."""
    if isinstance(verdict, str):
        return "invalid_verdicts"
    return "ties" if verdict == 0.5 else first if verdict > 0.5 else second


def _agreed(one: int | str, other: int | str) -> int | str:
    """What two verdicts on one pair say together."""
    if "invalid_verdicts" in (one, other):
        return "invalid_verdicts"
    return one if one == other else "inconsistent_verdicts"


def _verdict_of(outcome: Outcome) -> Verdict:
    from flowrl.runtime.isolation import Returned

    return outcome.value if isinstance(outcome, Returned) else str(outcome)


def _value(rollouts: Rollouts, source: str, a: int, b: int) -> Any:
    """What fills a parameter for row ``a`` shown first and row ``b`` second."""
    if source == "prompt":
        return reward_function.prompt_text(rollouts.messages[a])
    if source == "messages":
        return rollouts.messages[a]
    if source not in KNOWN:
        return rollouts.extras[source][a]
    name, _, side = source.rpartition("_")
    row = a if side == "a" else b
    if name == "response":
        return rollouts.response_text[row]
    if name == "finish_reason":
        return FinishReason(int(rollouts.finish_reason[row])).name.lower()
    return int(rollouts.response_lengths[row])
