"""What is looked at before a run begins: everything that can be known, in the order of its price, named in one clear error.

Settings, names, data and columns need nothing. The lengths of prompts need the models' tokenizers, and come last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.batches import Sequences
from flowrl.compiler.plan import Program, ProgramCall
from flowrl.compiler.strategy import is_whole
from flowrl.errors import DataError, FlowError, nearest
from flowrl.models import BaseModel
from flowrl.nodes.loss import Loss
from flowrl.nodes.source import Source

if TYPE_CHECKING:
    from flowrl.run import Evaluation
    from flowrl.runtime.local import LocalRuntime

RUNTIMES = ("local", "spmd")
#: So many prompts are tokenised before training to find those that are too long; longer data are checked as they come.
PROMPTS_CHECKED = 20_000


def check_settings(
    *, num_steps: Any, runtime: Any, keep_best: Any, evaluations: Sequence[Evaluation], **settings: Any
) -> None:
    """The settings of a run, all problems at once.

    Raises:
        FlowError: with a sentence a problem.
    """
    problems = [] if is_whole(num_steps, 1) else [f"num_steps is {num_steps!r}; expected a whole number, at least 1"]
    if runtime not in RUNTIMES:
        problems.append(f"runtime is {runtime!r}; {nearest(str(runtime), RUNTIMES)}")
    problems += _bad_settings(num_steps=num_steps, **settings)
    problems += _bad_evaluations(keep_best, evaluations)
    if problems:
        raise FlowError("This run cannot start: " + "; ".join(problems))


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _bad_settings(
    *,
    num_steps: Any,
    seed: Any,
    checkpoint_every: Any,
    keep_last: Any,
    time_limit: Any,
    max_nonfinite_steps: Any,
    max_empty_steps: Any,
    dump_steps: Any,
    samples_every: Any,
    micro_batch_tokens: Any,
    deadline: Any,
    **switches: Any,
) -> Iterator[str]:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        yield f"seed is {seed!r}; expected a whole number of at most 64 bits"
    if checkpoint_every is not None and not is_whole(checkpoint_every, 1):
        yield f"checkpoint_every is {checkpoint_every!r}; expected a whole number, at least 1, or None"
    least = {
        "keep_last": 1,
        "max_nonfinite_steps": 0,
        "max_empty_steps": 0,
        "samples_every": 0,
        "micro_batch_tokens": 1,
    }
    values = dict(keep_last=keep_last, max_nonfinite_steps=max_nonfinite_steps, max_empty_steps=max_empty_steps)
    values |= dict(samples_every=samples_every, micro_batch_tokens=micro_batch_tokens)
    for name, value in values.items():
        if not is_whole(value, least[name]):
            yield f"{name} is {value!r}; expected a whole number, at least {least[name]}"
    if time_limit is not None and not _seconds(time_limit):
        yield f"time_limit is {time_limit!r}; expected seconds, more than 0"
    if deadline is not None and not _seconds(deadline):
        yield f"deadline is {deadline!r}; expected seconds, more than 0"
    for name, value in switches.items():
        if not isinstance(value, bool):
            yield f"{name} is {value!r}; expected True or False"
    if isinstance(dump_steps, str) or not isinstance(dump_steps, Collection):
        yield f"dump_steps is {dump_steps!r}; expected a list of steps"
        return
    for step in dump_steps:
        if not is_whole(step, 1) or (is_whole(num_steps, 1) and step > num_steps):
            yield f"dump_steps holds {step!r}; expected steps from 1 to num_steps={num_steps}"


def _bad_evaluations(keep_best: Any, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    names = [e.name for e in evaluations]
    for evaluation in evaluations:
        name = evaluation.name
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            yield f"an evaluation is called {name!r}; expected letters, digits, '_', '-' and '.'"
        if not is_whole(evaluation.every, 1):
            yield f"evaluation {name!r} runs every {evaluation.every!r} steps; expected a whole number, at least 1"
        writers = [evaluation.flow.label(c) for c in evaluation.flow.calls if c.node.writes()]
        if writers:
            yield f"evaluation {name!r} trains ({', '.join(writers)}); expected a flow without an updater"
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield f"{names.count(name)} evaluations are called {name!r}; expected names of their own"
    if keep_best is None:
        return
    parts = str(keep_best).split("/")
    if not names:
        yield f"keep_best is {keep_best!r}, but there is no evaluation; expected evaluations=[…]"
    elif len(parts) < 3 or parts[0] != "eval" or parts[1] not in names:
        hint = nearest(parts[1], names) if len(parts) > 1 else f"there is {', '.join(map(repr, names))}"
        yield f"keep_best is {keep_best!r}; expected 'eval/<name>/<metric>' of an evaluation: {hint}"


def check_names(programs: Sequence[Program]) -> None:
    """Training and evaluations mean the same Model and the same State by one name.

    Raises:
        FlowError: two distinct ones share a name.
    """
    by_name: dict[str, int] = {}
    for thing in (t for p in programs for t in (*p.models, *p.states)):
        if by_name.setdefault(thing.name, id(thing)) != id(thing):
            kind = type(thing).__name__
            raise FlowError(
                f"Two distinct {kind}s are called {thing.name!r}, in the training flow and in an evaluation",
                expected=f"one {kind} object in both, or names of their own",
                received="two objects of one name",
                do=f"use the same {kind} object in both flows, or give name=",
            )


# -- data --------------------------------------------------------------------------------------------------------------


def data_of(program: Program, data: Any) -> dict[str, Any]:
    """Data sets by source name; every source has one, of the right rows, with the columns that nodes read.

    Raises:
        DataError: the first thing that is missing or does not fit.
    """
    sources = {c.node.source_name: c for c in program.calls if isinstance(c.node, Source)}
    if not isinstance(data, Mapping):
        if len(sources) != 1:
            raise DataError(
                f"This flow has {len(sources)} sources, and data is a single data set",
                expected="data={" + ", ".join(f"{name!r}: …" for name in sorted(sources)) + "}",
                received=type(data).__name__,
            )
        data = {next(iter(sources)): data}
    for name in data:
        if name not in sources:
            raise DataError(
                f"data has {name!r}, but no source is called so",
                expected=", ".join(map(repr, sorted(sources))),
                received=repr(name),
                do=nearest(str(name), sources),
            )
    for name, call in sources.items():
        if name not in data:
            raise DataError(
                f"There is no data set for source {name!r}",
                expected=f"data={{{name!r}: …}}",
                received=", ".join(map(repr, sorted(data))) or "no data",
            )
        _check_rows(name, call, data[name])
    _check_columns(program, sources, data)
    return dict(data)


def _check_rows(name: str, call: ProgramCall, given: Any) -> None:
    node: Any = call.node
    missing = [m for m in ("batch_type", "columns", "fingerprint", "rows", "__len__") if not hasattr(given, m)]
    if missing:
        raise DataError(
            f"The data of source {name!r} are not a data set",
            expected="a flowrl.data data set (PromptDataset.from_jsonl, from_rows, a task), or an object with its members",
            received=f"a {type(given).__name__} without {', '.join(missing)}",
        )
    if not issubclass(given.batch_type, node.batch_type):
        raise DataError(
            f"The data set of source {name!r} gives the wrong rows",
            expected=node.batch_type.__name__,
            received=given.batch_type.__name__,
        )
    if len(given) == 0:
        raise DataError(f"The data set of source {name!r} is empty", expected="at least one row", received="none")


def _check_columns(program: Program, sources: Mapping[str, ProgramCall], data: Mapping[str, Any]) -> None:
    """Nodes that read columns by name find them; a reward function is asked as it will be when it is called."""
    for call in program.calls:
        above = [name for name, source in sources.items() if source.label in _above(program, call)]
        columns = list(dict.fromkeys(c for name in above for c in data[name].columns))
        for column in getattr(call.node, "required_columns", tuple)():
            if column not in columns:
                of = " and ".join(repr(name) for name in above)
                raise DataError(
                    f"{call.label} reads column {column!r}, which the data set of source {of} does not have",
                    expected=f"a column {column!r}",
                    received=", ".join(map(repr, columns)) or "no further columns",
                    do=nearest(column, columns),
                )
        if above and hasattr(call.node, "check_columns"):
            call.node.check_columns(columns)  # type: ignore[attr-defined]


def _above(program: Program, call: ProgramCall) -> set[str]:
    """Labels of everything that a call needs."""
    found = {b.label for b in call.bindings()}
    for other in reversed(program.calls):  # in execution order: users come after what they use
        if other.label in found:
            found |= {b.label for b in other.bindings()}
    return found


def check_prompts(local: LocalRuntime, program: Program, data: Mapping[str, Any]) -> None:
    """Tokenise the prompts of every rollout: a prompt that the model cannot take is an error before training.

    Raises:
        DataError: it names the row.
    """
    for call in program.calls:
        for binding in call.bindings() if getattr(call.node, "sampling", None) is not None else ():
            source = program.call(binding.label).node
            if not isinstance(source, Source) or not hasattr(data[source.source_name], "unshuffled"):
                continue
            dataset = data[source.source_name]
            engine = local.bindings.engine(call.node.models()[0])  # type: ignore[arg-type]
            for start in range(0, min(len(dataset), PROMPTS_CHECKED), 1000):
                rows = dataset.unshuffled(start, min(1000, len(dataset) - start))
                _check_lengths(call.label, getattr(dataset, "name", source.source_name), start, rows, engine)


def check_recorded(local: LocalRuntime, program: Program, data: Mapping[str, Any]) -> None:
    """Tokenise recorded rows (demonstrations, pairs, feedback): one that is longer than a Model that reads it takes is an
    error before training.

    Raises:
        DataError: it names the row.
    """
    for call in program.calls:
        node: Any = call.node
        dataset = data.get(node.source_name) if isinstance(node, Source) else None
        if not hasattr(dataset, "unshuffled") or not issubclass(node.batch_type, Sequences):
            continue
        engines = [local.bindings.engine(m) for m in _scorers_of(program, call.label)]  # type: ignore[arg-type]
        limit = min((e.max_length for e in engines if e.max_length is not None), default=None)
        for start in range(0, min(len(dataset), PROMPTS_CHECKED) if limit is not None else 0, 1000):  # type: ignore[arg-type]
            rows = dataset.unshuffled(start, min(1000, len(dataset) - start))  # type: ignore[union-attr,arg-type]
            for draw, length in zip(rows.prompt_id.tolist(), rows.tokens.lengths.tolist(), strict=True):
                if length > limit:
                    raise DataError(
                        f"{getattr(dataset, 'name', node.source_name)}, row {draw + 1} is longer than the model takes",
                        expected=f"at most {limit} tokens, prompt and completion together",
                        received=length,
                        do="shorten or drop that row, or take a model with a longer context",
                    )


def _scorers_of(program: Program, label: str) -> list[BaseModel]:
    """The Models that score or are trained on the rows of a call: of those who take them, and of a loss its updater."""
    takers = [c for c in program.calls if any(b.label == label for b in c.bindings())]
    losses = {c.label for c in takers if isinstance(c.node, Loss)}
    takers += [c for c in program.calls if any(b.label in losses for b in c.bindings())]
    return list(dict.fromkeys(m for c in takers for m in c.node.models()))


def _check_lengths(label: str, dataset: str, start: int, rows: Any, engine: Any) -> None:
    limit = engine.max_length
    for row, length in enumerate(engine.encode(rows.messages).lengths.tolist()):
        if length == 0 or (limit is not None and length >= limit):
            raise DataError(
                f"{dataset}, row {start + row + 1}: the prompt does not fit {label}",
                expected=f"1 to {limit - 1} tokens, so that one can follow"
                if limit is not None
                else "at least 1 token",
                received=f"{length} tokens: {str(rows.messages[row])[:80]!r}",
                do="shorten or drop that row, or take a model with a longer context",
            )
