"""What travels on the edges: one frozen dataclass per role, with ragged columns inside.

Rows carry ids: ``prompt_id`` is minted by the source, one per draw, and ``sample_id`` is the index of a sample among
those of its prompt. A node's inputs are aligned by these ids, never by position. Units are in the types: a
:class:`Prompts` has a row per prompt, a :class:`Sequences` a row per sample, and a :class:`Ragged` inside has a value per
token.

**Response layout**: per-token columns (``rollout_logprobs``, ``values``, ``advantages``, …) have one value for every
token after the prompt, observations included. ``loss_mask`` says which of them the policy produced. Masks come from
spans and lengths, never from scanning token values.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from flowrl.errors import AlignmentError, BatchError, RefUseError, UnknownFieldError, nearest
from flowrl.ragged import (
    Ragged,
    column_from_arrow,
    column_rows,
    column_to_arrow,
    columns_equal,
    concat_rows,
    is_column,
    select_rows,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


class SpanKind(enum.IntEnum):
    """Who wrote a span of tokens."""

    PROMPT = 0
    POLICY = 1
    OBSERVATION = 2


class FinishReason(enum.IntEnum):
    """Why a response ended: a stop token was sampled, the length limit cut it, or it was given up."""

    STOP = 0
    LENGTH = 1
    ABORTED = 2


class _Columns:
    """Row operations shared by batches and by nested groups of columns."""

    column_fields: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            rows = column_rows(value) if is_column(value) else None
            if rows is not None:
                return rows
        return 0

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """The rows of int64 ``index`` ``[k]``, in its order."""
        import torch

        index = torch.as_tensor(index, dtype=torch.int64)
        return type(self)(
            **{f.name: select_rows(getattr(self, f.name), index) for f in fields(self)}  # type: ignore[arg-type]
        )

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order.

        Raises:
            BatchError: no parts, or parts that differ in what belongs to a batch as a whole.
        """
        if not parts:
            raise BatchError(f"{cls.__name__}.concat needs parts", expected="at least one", received="none")
        return cls(
            **{
                f.name: concat_rows([getattr(p, f.name) for p in parts], f"{cls.__name__}.{f.name}")
                for f in fields(cls)  # type: ignore[arg-type]
            }
        )

    def _check_rows(self) -> None:
        expected: tuple[str, int] | None = None
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            columns = value.items() if isinstance(value, dict) else [("", value)]
            for key, column in columns:
                if not is_column(column):
                    continue
                name = f"{f.name}[{key!r}]" if key else f.name
                rows = column_rows(column)
                if expected is None and rows is not None:
                    expected = (name, rows)
                elif expected is not None and rows is not None and rows != expected[1]:
                    raise BatchError(
                        f"{type(self).__name__}.{name} has the wrong number of rows",
                        expected=f"{expected[1]}, as {expected[0]} has",
                        received=rows,
                    )


@dataclass(frozen=True, eq=False)
class Batch(_Columns):
    """The base of everything an edge carries. While a flow is built, a ``Ref`` stands in for it.

    A batch is a value: it has no truth value, is not iterable, and knows its rows through ``num_rows``.
    """

    #: What a row is: "prompts", "samples", "pairs", or "step" for a result without rows.
    unit: ClassVar[str] = "samples"

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def row_ids(self) -> Tensor | None:
        """int64 ``[num_rows, 1 or 2]``: what aligns rows; None for a batch without rows."""
        import torch

        columns = [getattr(self, name) for name in ("prompt_id", "sample_id") if hasattr(self, name)]
        return torch.stack(columns, dim=1) if columns else None

    # Typed so that an editor marks `if batch:` and `for row in batch:` red, for a Ref and for data alike.
    __iter__: ClassVar[None] = None

    def __bool__(self) -> NoReturn:
        raise TypeError(f"A {type(self).__name__} has no truth value; ask for num_rows.")

    def __eq__(self, other: object) -> bool:
        """Bit for bit equality of all columns."""
        return columns_equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_rows} {self.unit})"

    # -- Arrow ----------------------------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """A table over the same memory; nested columns get dotted names, the rest travels as schema metadata."""
        import pyarrow as pa

        columns: dict[str, pa.Array] = {}
        whole: dict[str, Any] = {}
        for name, value in _flatten(self, ""):
            if is_column(value):
                columns[name] = column_to_arrow(value)
            else:
                whole[name] = asdict(value) if isinstance(value, LogprobOrigin) else value
        metadata = {"flowrl": json.dumps({"type": type(self).__name__, "whole": whole})}
        table = pa.table(columns) if columns else pa.table({"_": pa.array([], pa.int8())})
        return table.replace_schema_metadata(metadata)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Self:
        """The batch back from :meth:`to_arrow`; tensors are read-only views of the table's memory.

        Raises:
            BatchError: the table holds another type, or lacks a column.
        """
        metadata = json.loads((table.schema.metadata or {}).get(b"flowrl", b"{}"))
        if metadata.get("type") != cls.__name__:
            raise BatchError(
                f"This Arrow table does not hold {cls.__name__}",
                expected=cls.__name__,
                received=metadata.get("type", "no flowrl metadata"),
            )
        columns = {name: column_from_arrow(table.column(name)) for name in table.column_names}
        return _unflatten(cls, "", columns, metadata["whole"])


def _flatten(batch: Any, prefix: str) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for f in fields(batch):
        value, name = getattr(batch, f.name), prefix + f.name
        if isinstance(value, dict):
            out += [(f"{name}.{key}", v) for key, v in value.items()]
        elif isinstance(value, _Columns):
            out += _flatten(value, name + ".")
        else:
            out.append((name, value))
    return out


def _unflatten(cls: type, prefix: str, columns: dict[str, Any], whole: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for f in fields(cls):
        name = prefix + f.name
        annotation = str(f.type)
        if annotation.startswith("dict"):
            everything = {**columns, **whole}
            values[f.name] = {k[len(name) + 1 :]: v for k, v in everything.items() if k.startswith(name + ".")}
        elif annotation == "Spans":
            values[f.name] = _unflatten(Spans, name + ".", columns, whole)
        elif name in columns:
            values[f.name] = columns[name]
        elif name in whole:
            value = whole[name]
            values[f.name] = LogprobOrigin(**value) if "LogprobOrigin" in annotation and value else value
        else:
            raise BatchError(f"The Arrow table lacks column {name!r}", expected=name, received=sorted(columns))
    return cls(**values)


@dataclass(frozen=True)
class LogprobOrigin:
    """Which model, at which version, under which sampling settings and in which engine gave a log-prob."""

    model: str
    policy_version: int
    engine: str
    dtype: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether sampling cut the support (top-p, top-k or min-p)."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, eq=False)
class Spans(_Columns):
    """Who wrote which tokens, in order: three ragged columns with one value a span.

    Args:
        kinds: uint8, a :class:`SpanKind`.
        lengths: int64, tokens in the span.
        policy_versions: int64, the version of the policy that wrote the span; -1 where no policy did.
    """

    kinds: Ragged
    lengths: Ragged
    policy_versions: Ragged

    def __post_init__(self) -> None:
        self._check_rows()

    @classmethod
    def prompt_then_response(cls, prompt_lengths: Tensor, response_lengths: Tensor, policy_version: int) -> Spans:
        """The spans of single-turn rows: one prompt span, one policy span (also where it is empty)."""
        import torch

        rows = len(prompt_lengths)
        offsets = torch.arange(0, 2 * rows + 1, 2)
        kinds = torch.tensor([SpanKind.PROMPT, SpanKind.POLICY], dtype=torch.uint8).repeat(rows)
        versions = torch.tensor([-1, policy_version], dtype=torch.int64).repeat(rows)
        lengths = torch.stack([prompt_lengths, response_lengths], dim=1).flatten().to(torch.int64)
        return cls(Ragged(kinds, offsets), Ragged(lengths, offsets), Ragged(versions, offsets))


@dataclass(frozen=True, eq=False, repr=False)
class Prompts(Batch):
    """What the policy is asked, one row a prompt.

    Args:
        prompt_id: int64 ``[num_rows]``, unique per draw: two identical prompts, or one prompt in two epochs, differ.
        messages: per row a text, or a list of ``{"role", "content"}``.
        extras: other columns of the data set by name (``answer``, …), one Python object a row.
    """

    prompt_id: Tensor
    messages: tuple[Any, ...]
    extras: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    unit: ClassVar[str] = "prompts"


@dataclass(frozen=True, eq=False, repr=False)
class Sequences(Batch):
    """Token sequences with provenance, one row a sample. Scorers annotate any of its kinds.

    Args:
        prompt_id: int64 ``[num_rows]``.
        sample_id: int64 ``[num_rows]``, the index among the samples of the prompt.
        tokens: int64 ragged, the whole sequence: prompt, then everything after it.
        spans: who wrote which tokens; the lengths of a row's spans add up to its tokens.
    """

    prompt_id: Tensor
    sample_id: Tensor
    tokens: Ragged
    spans: Spans

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = (self.spans.lengths.sum_rows() != self.tokens.lengths).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            raise BatchError(
                f"{type(self).__name__}: the spans of row {row} do not cover its tokens",
                expected=f"{int(self.tokens.lengths[row])} tokens",
                received=f"spans over {int(self.spans.lengths.sum_rows()[row])}",
            )

    @property
    def span_kind_of_token(self) -> Ragged:
        """uint8 ragged over all tokens: a :class:`SpanKind` each."""
        import torch

        kinds = torch.repeat_interleave(self.spans.kinds.values, self.spans.lengths.values)
        return self.tokens.with_values(kinds)

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 ``[num_rows]``: tokens before the first one that is not of the prompt."""
        import torch

        kinds = self.span_kind_of_token
        after = kinds.values != SpanKind.PROMPT
        place = torch.where(after, kinds.position_of_value, torch.iinfo(torch.int64).max)
        return self.tokens.lengths.scatter_reduce(0, kinds.row_of_value, place, "amin")

    @property
    def response_lengths(self) -> Tensor:
        """int64 ``[num_rows]``: tokens after the prompt, observations included."""
        return self.tokens.lengths - self.prompt_lengths

    def over_response(self, column: Ragged) -> Ragged:
        """Of a per-token column over whole sequences, the part in response layout."""
        return column.slice_rows(self.prompt_lengths, self.response_lengths)

    @property
    def response_tokens(self) -> Ragged:
        """int64 ragged, response layout."""
        return self.over_response(self.tokens)

    @property
    def loss_mask(self) -> Ragged:
        """uint8 ragged, response layout: 1 where the policy wrote the token."""
        import torch

        kinds = self.over_response(self.span_kind_of_token)
        return kinds.with_values((kinds.values == SpanKind.POLICY).to(torch.uint8))


@dataclass(frozen=True, eq=False, repr=False)
class Rollouts(Sequences):
    """What the policy answered.

    Args:
        rollout_logprobs: float32 ragged, response layout: the sampler's own log-prob of each token, under the
            distribution that it sampled from; 0 at observations.
        finish_reason: uint8 ``[num_rows]``, a :class:`FinishReason`.
        messages: the prompt of each row, as in :class:`Prompts`.
        response_text: the decoded response of each row; derived, never tokenised again.
        extras: the prompts' other columns.
        origin: of ``rollout_logprobs``; None for recorded data of unknown origin.
    """

    rollout_logprobs: Ragged
    finish_reason: Tensor
    messages: tuple[Any, ...]
    response_text: tuple[str, ...]
    extras: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    origin: LogprobOrigin | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Demonstrations(Sequences):
    """Sequences to imitate: every token after the prompt is a target."""


@dataclass(frozen=True, eq=False, repr=False)
class Preferences(Sequences):
    """Sequences in pairs: of the rows of one ``pair_id`` one is chosen, one rejected.

    Args:
        pair_id: int64 ``[num_rows]``.
        chosen: uint8 ``[num_rows]``.
    """

    pair_id: Tensor
    chosen: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Rewards(Batch):
    """What the answers are worth.

    Args:
        components: by name, float32 ``[num_rows]``, a number a row.
        token_components: by name, float32 ragged in response layout, a number a token.
        valid: uint8 ``[num_rows]``: 0 where the reward could not be had; its numbers then mean nothing.
        reasons: per row why it is invalid, "" where it is valid.
    """

    prompt_id: Tensor
    sample_id: Tensor
    components: dict[str, Tensor]
    valid: Tensor
    reasons: tuple[str, ...]
    token_components: dict[str, Ragged] = field(default_factory=dict)

    @property
    def totals(self) -> Tensor:
        """float32 ``[num_rows]``: the sum of all components; NaN where the row is invalid."""
        import torch

        total = torch.zeros(self.num_rows)
        for component in self.components.values():
            total = total + component
        for component in self.token_components.values():
            total = total + component.sum_rows()
        return torch.where(self.valid.bool(), total, torch.nan)

    def over_tokens(self, loss_mask: Ragged) -> Ragged:
        """float32 ragged in response layout: token components where they are, row components at the last policy token.

        A row without a policy token keeps its token components alone. Invalid rows are NaN throughout.
        """
        import torch

        out = torch.zeros(len(loss_mask.values))
        for component in self.token_components.values():
            out = out + component.values
        place = torch.where(loss_mask.values.bool(), torch.arange(len(out)), -1)
        last = torch.full((loss_mask.num_rows,), -1).scatter_reduce(0, loss_mask.row_of_value, place, "amax")
        row_total = torch.zeros(self.num_rows)
        for component in self.components.values():
            row_total = row_total + component
        has_token = last >= 0
        out = out.index_add(0, last[has_token], row_total[has_token])
        valid_token = self.valid.bool()[loss_mask.row_of_value]
        return loss_mask.with_values(torch.where(valid_token, out, torch.nan))


@dataclass(frozen=True, eq=False, repr=False)
class Values(Batch):
    """float32 ragged ``values`` in response layout: the return expected before each token is taken."""

    prompt_id: Tensor
    sample_id: Tensor
    values: Ragged


@dataclass(frozen=True, eq=False, repr=False)
class OldLogprobs(Batch):
    """float32 ragged ``old_logprobs`` in response layout: the trainer's log-probs before the update.

    ``is_current``: the plan left their computation out, because they must equal the current policy's own; the values are
    then NaN, and a loss reads :meth:`flowrl.nodes.loss.Current.old`.
    """

    prompt_id: Tensor
    sample_id: Tensor
    old_logprobs: Ragged
    origin: LogprobOrigin
    is_current: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class RefLogprobs(Batch):
    """float32 ragged ``ref_logprobs`` in response layout: log-probs under the reference policy."""

    prompt_id: Tensor
    sample_id: Tensor
    ref_logprobs: Ragged
    origin: LogprobOrigin


@dataclass(frozen=True, eq=False, repr=False)
class Advantages(Batch):
    """float32 ragged ``advantages`` and ``returns`` in response layout. It may hold fewer rows than the rollouts: what
    an advantage node dropped (invalid rewards) is not trained on.
    """

    prompt_id: Tensor
    sample_id: Tensor
    advantages: Ragged
    returns: Ragged


@dataclass(frozen=True, eq=False, repr=False)
class TrainStats(Batch):
    """What a writer did in one iteration: metrics by name, and the version that its Model has now."""

    metrics: dict[str, float]
    policy_version: int
    num_optimizer_steps: int
    num_skipped_steps: int = 0

    unit: ClassVar[str] = "step"

    def __post_init__(self) -> None:  # numbers by name, no rows
        return

    @property
    def num_rows(self) -> int:
        return 0


def align(anchor: Batch, other: Batch, *, join: str = "exact", node: str, argument: str) -> Batch:
    """The rows of ``other`` in the order of ``anchor``, by id.

    Args:
        join: "exact": the same rows; "subset": ``other`` may hold more rows; "prompt": ``other`` has one row a prompt,
            repeated for each sample of the prompt.

    Raises:
        AlignmentError: an id is missing, superfluous or occurs twice.
    """
    import torch

    anchor_ids, other_ids = anchor.row_ids, other.row_ids
    if anchor_ids is None or other_ids is None:
        return other
    width = 1 if join == "prompt" else min(anchor_ids.shape[1], other_ids.shape[1])
    wanted, given = anchor_ids[:, :width], other_ids[:, :width]
    if join == "exact" and torch.equal(wanted, given) and not _has_duplicates(given):
        return other
    place: dict[tuple[int, ...], int] = {}
    for i, key in enumerate(map(tuple, given.tolist())):
        if key in place:
            raise AlignmentError(
                f"{node}: argument {argument!r} holds an id twice",
                expected="unique (prompt_id, sample_id)",
                received=f"{key} in rows {place[key]} and {i}",
                do="give each row its own sample_id; only sources and fan-outs mint ids",
            )
        place[key] = i
    wanted_keys = list(map(tuple, wanted.tolist()))
    if join != "prompt" and len(set(wanted_keys)) != len(wanted_keys):
        raise AlignmentError(f"{node}: its first input holds an id twice", expected="unique ids", received=wanted_keys[:8])
    missing = [k for k in wanted_keys if k not in place]
    extra = [k for k in place if k not in set(wanted_keys)] if join == "exact" else []
    if missing or extra:
        raise AlignmentError(
            f"{node}: argument {argument!r} has other rows",
            expected=f"the {len(wanted_keys)} ids of the first input",
            received=f"{len(missing)} missing (first: {missing[:3]}), {len(extra)} unknown (first: {extra[:3]})",
            do="feed rows of the same rollouts, or declare on the node how it joins (joins = {…: 'subset' | 'prompt'})",
        )
    return other.select([place[k] for k in wanted_keys])


def _has_duplicates(ids: Tensor) -> bool:
    import torch

    return len(torch.unique(ids, dim=0)) != len(ids)


def unknown_field(batch_type: type, name: str) -> NoReturn:
    """Raise for a field that a batch type does not have, with the nearest one that it has."""
    known = [f.name for f in fields(batch_type)] + [
        n for n, v in vars(batch_type).items() if isinstance(v, property)
    ]
    raise UnknownFieldError(f"{batch_type.__name__} has no field {name!r}", do=nearest(name, known))


def refuse_data_use(what: str, batch_type: type) -> NoReturn:
    """Raise for a Ref that is used as if its data were here."""
    raise RefUseError(
        f"A Ref of {batch_type.__name__} was used in `{what}`",
        expected="a Ref passed to a node, or a field of it",
        received=f"`{what}` while the flow is being built, when there is no data yet",
        do="move that logic into a node (@flowrl.node on a function)",
    )
