"""Reward nodes: a user's function, a reward model, a KL penalty, and their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl import context
from flowrl.batches import OldLogprobs, RefLogprobs, Rewards, Rollouts, Sequences
from flowrl.errors import BatchError, GraphError, RewardError, nearest
from flowrl.models import AnyModel, State
from flowrl.nodes import reward_function
from flowrl.nodes.advantage import kl_penalty
from flowrl.nodes.base import Join, Node
from flowrl.nodes.kl_control import coefficient, coefficient_problems
from flowrl.nodes.policy_losses import kl_problems
from flowrl.nodes.reward_function import RewardCall, RowResult
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.runtime.isolation import IsolatedPool, Outcome


def rewards_like(rollouts: Sequences, **components: Any) -> Rewards:
    """Rewards for the rows of ``rollouts``: each component is a number a row, or ragged with a number a
    response token.

    A number that is not finite makes its row invalid, with the reason. Rewards are float32.

    Raises:
        BatchError: there is no component, or one has the wrong number of rows.

    Example::

        return rewards_like(rollouts, length=-0.01 * rollouts.response_lengths)
    """
    import torch

    if not components:
        raise BatchError("rewards_like needs a component", expected="name=numbers, one a row", received="none")
    rows: dict[str, Tensor] = {}
    tokens: dict[str, Ragged] = {}
    reasons = [""] * rollouts.num_rows
    for name, column in components.items():
        if isinstance(column, Ragged):
            tokens[name] = column.with_values(column.values.detach().to(torch.float32))
            not_finite = (~tokens[name].values.isfinite()).to(torch.int64)
            bad = column.with_values(not_finite).sum_rows() > 0
        else:
            rows[name] = torch.as_tensor(column, dtype=torch.float32).detach().reshape(-1)
            bad = ~rows[name].isfinite()
        if len(bad) != rollouts.num_rows:
            raise BatchError(
                f"Reward component {name!r} has the wrong number of rows",
                expected=rollouts.num_rows,
                received=len(bad),
            )
        for row in bad.nonzero().flatten().tolist():
            reasons[row] = reasons[row] or f"component {name!r} is not finite"
    valid = torch.tensor([not r for r in reasons], dtype=torch.uint8)
    return Rewards(rollouts.prompt_id, rollouts.sample_id, rows, valid, tuple(reasons), tokens)


class FunctionReward(Node):
    """A reward that a Python function gives, in a process of its own, with a deadline a row.

    The function's parameters are filled **by name**: ``response`` (text), ``prompt`` (the text of the prompt,
    or of its last user message), ``messages``, ``finish_reason`` ("stop", "length" or "aborted"),
    ``num_tokens`` (of the response), and any column of the data set. A function that needs one argument of
    another name gets the response. It returns a number (or a bool), or a dict of named components. Anything
    else (None, a string, NaN, infinity, an exception, no answer in time, the death of the process) makes the
    row **invalid**, with the reason: never 0.

    Args:
        fn: the function; closures, lambdas and functions of a notebook or script are fine.
        component: the name of a plain number among the reward's components; by default the function's name.
        timeout: seconds that a call may take: one row, or the whole batch where ``batched``.
        batched: call once with lists (a value a row) and take a list back; parameter names may then be plural
            (``responses``, ``answers``). None: it is, where a parameter is called ``responses``.
        isolate: run in a process of its own. Without it there is no deadline, and a crash is the run's.
        num_workers: processes over which the rows are spread.
        max_invalid_fraction: more invalid rows than this in one call stop the run.

    Reports ``invalid_rows``, and the mean of each component over the valid rows.

    Raises:
        RewardError: more than ``max_invalid_fraction`` of the rows are invalid.
        DataError: a parameter is neither known nor a column of the data set.

    Example::

        def correct(response: str, answer: str) -> float:
            return float(response.strip() == answer)

        rewards = FunctionReward(correct, timeout=5.0)(rollouts)
    """

    fn: Callable[..., Any]
    component: str | None = None
    timeout: float = field(default=30.0, kw_only=True)
    batched: bool | None = field(default=None, kw_only=True)
    isolate: bool = field(default=True, kw_only=True)
    num_workers: int = field(default=1, kw_only=True)
    max_invalid_fraction: float = field(default=0.5, kw_only=True)

    kind: ClassVar[str] = "reward"

    def problems(self) -> Iterable[str]:
        if not callable(self.fn):
            yield f"fn is {self.fn!r}; expected a function"
        if not self.timeout > 0:
            yield f"timeout is {self.timeout}; expected more than 0 seconds"
        if self.num_workers < 1:
            yield f"num_workers is {self.num_workers}; expected at least 1"
        if not 0 <= self.max_invalid_fraction <= 1:
            yield f"max_invalid_fraction is {self.max_invalid_fraction}; expected 0 to 1"

    def required_columns(self) -> tuple[str, ...]:
        """Columns that the data set must have, as far as the function's signature alone tells."""
        return reward_function.required_columns(self.fn, self._call().batched)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise the ``DataError`` that the first call would raise for a data set with these extra columns."""
        reward_function.sources(self.fn, columns, self._call().batched)

    def setup(self, ctx: context.Bindings) -> IsolatedPool | None:
        from flowrl.runtime.isolation import IsolatedPool

        if not self.isolate:
            return None
        name = reward_function.name_of(self.fn)
        return IsolatedPool(self._call(), timeout=self.timeout, num_workers=self.num_workers, name=name)

    def __call__(self, rollouts: Rollouts) -> Rewards:
        call = self._call()
        filled = reward_function.sources(self.fn, rollouts.extras, call.batched)
        columns = reward_function.row_values(rollouts, filled.values())
        if rollouts.num_rows == 0:
            return rewards_like(rollouts, **{call.component: []})
        if call.batched:
            calls: list[dict[str, Any]] = [{p: list(columns[s]) for p, s in filled.items()}]
        else:
            calls = [{p: columns[s][i] for p, s in filled.items()} for i in range(rollouts.num_rows)]
        outcomes = self._run(call, calls)
        if call.batched:
            results = _rows_of_batch(outcomes[0], rollouts.num_rows)
        else:
            results = reward_function.same_components([_row_of(o) for o in outcomes])
        self._break_if_failing(rollouts, results, outcomes)
        return _assemble(rollouts, results, call.component)

    def _call(self) -> RewardCall:
        batched = reward_function.infer_batched(self.fn) if self.batched is None else self.batched
        return RewardCall(self.fn, self.component or reward_function.name_of(self.fn), batched)

    def _run(self, call: RewardCall, calls: Sequence[Mapping[str, Any]]) -> Sequence[Outcome]:
        from flowrl.runtime.isolation import run_here

        if self.isolate:
            return self.resource().map(calls)
        return [run_here(call, arguments) for arguments in calls]

    def _break_if_failing(self, rollouts: Rollouts, results: Sequence[RowResult], outcomes: Sequence[Outcome]) -> None:
        failed = [i for i, r in enumerate(results) if isinstance(r, str)]
        context.report("invalid_rows", len(failed))
        if len(failed) <= self.max_invalid_fraction * len(results):
            return
        # What stands before the colon is the kind of failure; what follows often differs from row to row.
        kinds = Counter(str(results[i]).split(":")[0] for i in failed)
        kind, count = kinds.most_common(1)[0]
        first = next(i for i in failed if str(results[i]).split(":")[0] == kind)
        where = getattr(outcomes[first if len(outcomes) == len(results) else 0], "where", "")
        raise RewardError(
            f"The reward function {reward_function.name_of(self.fn)!r} failed on {len(failed)} of {len(results)} rows",
            expected=f"at most {self.max_invalid_fraction:.0%} invalid rows",
            received=f"{count} rows that {_past(kind)}; first (prompt_id {int(rollouts.prompt_id[first])},"
            f" response {_shorten(rollouts.response_text[first])!r}): {results[first]}"
            + (f" at {where}" if where else ""),
            do="repair the function, or raise max_invalid_fraction if so many failures are expected",
        )


def _past(kind: str) -> str:
    return kind if kind.split(" ")[0] in ("raised", "returned", "timed") else f"failed ({kind})"


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[:length] + "…"


def _row_of(outcome: Outcome) -> RowResult:
    from flowrl.runtime.isolation import Returned

    return outcome.value if isinstance(outcome, Returned) else str(outcome)


def _rows_of_batch(outcome: Outcome, rows: int) -> list[RowResult]:
    from flowrl.runtime.isolation import Returned

    if not isinstance(outcome, Returned):
        return [str(outcome)] * rows
    return reward_function.same_components(outcome.value)


def _assemble(rollouts: Rollouts, results: Sequence[RowResult], component: str) -> Rewards:
    """Rewards from a result a row. Numbers of invalid rows are NaN, so that no use of them goes unseen."""
    import torch

    names = next((list(r) for r in results if not isinstance(r, str)), [component])
    components = {
        name: torch.tensor([float("nan") if isinstance(r, str) else r[name] for r in results], dtype=torch.float32)
        for name in names
    }
    valid = torch.tensor([not isinstance(r, str) for r in results], dtype=torch.uint8)
    if bool(valid.any()):
        for name, column in components.items():
            context.report(f"{name}_mean", float(column[valid.bool()].mean()))
    reasons = tuple(r if isinstance(r, str) else "" for r in results)
    return Rewards(rollouts.prompt_id, rollouts.sample_id, components, valid, reasons)


class RewardModelScore(Node):
    """The score that a reward model gives to each whole sequence.

    Args:
        reward_model: a ``RewardModel``.
        component: the name of the score among the reward's components; by default the model's.

    Shapes: a number a row. Clip and normalise it with ``ClipReward`` and ``RunningNormalization``, sum several with
    ``WeightedSum``. A score that is not finite makes its row invalid. Reports ``<component>_mean`` over valid rows.
    """

    reward_model: AnyModel
    component: str | None = None

    kind: ClassVar[str] = "reward"

    def problems(self) -> Iterable[str]:
        if getattr(self.reward_model, "base", self.reward_model).kind != "reward":
            yield f"reward_model is {self.reward_model!r}; expected a RewardModel"

    def __call__(self, sequences: Sequences) -> Rewards:
        name = self.component or self.reward_model.name
        rewards = rewards_like(sequences, **{name: self.reward_model.bound_engine().score(sequences)})
        valid = rewards.valid.bool()
        if bool(valid.any()):
            context.report(f"{name}_mean", float(rewards.components[name][valid].double().mean()))
        return rewards


class WeightedSum(Node):
    """The weighted sum of rewards; the components are kept, each times its weight.

    Args:
        weights: a number for each reward, in their order, or by component name (components that it does not
            name keep weight 1). Empty: all 1.

    A row is valid only where all its rewards are. Components of one name get distinct names: ``score``,
    ``score_2``.

    Raises:
        GraphError: there are not as many weights as rewards, or a weight names no component.
    """

    weights: Mapping[str, float] | tuple[float, ...] = ()

    kind: ClassVar[str] = "reward"

    def problems(self) -> Iterable[str]:
        values = self.weights.values() if isinstance(self.weights, Mapping) else self.weights
        for weight in values:
            if not abs(weight) < float("inf"):
                yield f"weights holds {weight}; expected finite numbers"

    def __call__(self, *rewards: Rewards) -> Rewards:
        import torch

        if not rewards:
            raise GraphError("WeightedSum sums nothing", expected="at least one reward", received="none")
        by_place = [] if isinstance(self.weights, Mapping) else list(self.weights)
        by_name = dict(self.weights) if isinstance(self.weights, Mapping) else {}
        if by_place and len(by_place) != len(rewards):
            raise GraphError(
                "WeightedSum has another number of weights than of rewards",
                expected=f"{len(rewards)} weights",
                received=f"{len(by_place)}",
            )
        names = {n for r in rewards for n in (*r.components, *r.token_components)}
        for name in by_name:
            if name not in names:
                raise GraphError(
                    f"WeightedSum has a weight for {name!r}, which no reward has",
                    expected=f"one of {', '.join(sorted(names))}",
                    received=repr(name),
                    do=nearest(name, sorted(names)),
                )
        rows: dict[str, Tensor] = {}
        tokens: dict[str, Ragged] = {}
        valid = torch.ones_like(rewards[0].valid)
        reasons: list[str] = [""] * rewards[0].num_rows
        for place, reward in enumerate(rewards):
            factor = by_place[place] if by_place else 1.0
            for name, column in reward.components.items():
                rows[distinct_name(name, rows, tokens)] = factor * by_name.get(name, 1.0) * column
            for name, column in reward.token_components.items():
                scaled = column.with_values(factor * by_name.get(name, 1.0) * column.values)
                tokens[distinct_name(name, rows, tokens)] = scaled
            valid = valid & reward.valid
            reasons = [a or b for a, b in zip(reasons, reward.reasons, strict=True)]
        first = rewards[0]
        return Rewards(first.prompt_id, first.sample_id, rows, valid, tuple(reasons), tokens)


class KLPenalty(Node):
    """Rewards with a penalty on each policy token: the token component "kl", −``coef`` times the KL estimate.

    Args:
        coef: its weight: a number, or a State that is read when the node runs (``AdaptiveKL`` writes one).
        estimator: see :func:`flowrl.functional.kl.kl_estimate`.

    Reports ``kl_coef`` where it is a State. Observations, and rows without a policy token, are not penalised.
    """

    coef: float | State
    estimator: str = "k1"

    kind: ClassVar[str] = "reward"
    joins: ClassVar[Mapping[str, Join]] = {
        "rewards": "subset",
        "old_logprobs": "subset",
        "ref_logprobs": "subset",
    }

    def problems(self) -> Iterable[str]:
        yield from coefficient_problems(self.coef)
        yield from kl_problems(0.0, self.estimator)

    def __call__(
        self, rollouts: Rollouts, rewards: Rewards, old_logprobs: OldLogprobs, ref_logprobs: RefLogprobs
    ) -> Rewards:
        coef = coefficient(self.coef)
        if isinstance(self.coef, State):
            context.report("kl_coef", coef)
        penalty = kl_penalty(rollouts, coef, self.estimator, old_logprobs, ref_logprobs, node=self.name)
        name = distinct_name("kl", rewards.components, rewards.token_components)
        return replace(rewards, token_components={**rewards.token_components, name: penalty})


def distinct_name(name: str, *taken: Mapping[str, Any]) -> str:
    """``name``, or the first of ``name_2``, ``name_3``, … that no mapping holds."""
    candidate, number = name, 1
    while any(candidate in t for t in taken):
        number += 1
        candidate = f"{name}_{number}"
    return candidate
