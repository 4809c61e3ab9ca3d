"""Alignment: a node's inputs are matched by the ids of their rows, never by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from flowrl.errors import AlignmentError

if TYPE_CHECKING:
    from flowrl.columns import Batch

B = TypeVar("B", bound="Batch")

#: How the rows of an argument are matched with those of the node's first input; see :func:`align`.
Join = Literal["exact", "subset", "prompt"]

_Key = tuple[Any, ...]  # (prompt_id, sample_id) or (prompt_id,)


def align(anchor: Batch, other: B, *, join: Join = "exact", node: str, argument: str) -> B:
    """The rows of ``other`` in the order of ``anchor``, by id. Batches without ids come back as they are.

    Args:
        join: "exact": the same rows; "subset": ``other`` may hold more rows; "prompt": ``other`` has one row a prompt,
            repeated for each sample of the prompt.
        node: names the node in errors.
        argument: names the argument in errors.

    Raises:
        AlignmentError: an id is missing, superfluous or occurs twice.
    """
    anchor_ids, other_ids = anchor.row_ids, other.row_ids
    if anchor_ids is None or other_ids is None:
        return other
    if join != "prompt" and anchor_ids.shape[1] != other_ids.shape[1]:
        raise AlignmentError(
            f"{node}: argument {argument!r} has a row a {_unit(other_ids.shape[1])}, its first input a row a "
            f"{_unit(anchor_ids.shape[1])}",
            expected="rows of one unit, or a declared join",
            received=f"{other!r} next to {anchor!r}",
            do="declare on the node how it joins: joins = {'…': 'prompt'} repeats a row a prompt for each sample",
        )
    width = 1 if join == "prompt" else anchor_ids.shape[1]
    wanted: list[_Key] = list(map(tuple, anchor_ids[:, :width].tolist()))
    place = _places(list(map(tuple, other_ids[:, :width].tolist())), node, argument)
    wanted_set = set(wanted)
    if join != "prompt" and len(wanted_set) != len(wanted):
        _places(wanted, node, "")
    missing = [key for key in wanted_set if key not in place]
    extra = [key for key in place if key not in wanted_set] if join == "exact" else []
    if missing or extra:
        raise AlignmentError(
            f"{node}: argument {argument!r} has other rows",
            expected=f"the {len(wanted)} ids of the first input",
            received=f"{_some(missing, 'missing')}, {_some(extra, 'unknown')}",
            do="feed rows of the same rollouts, or declare on the node how it joins (joins = {…: 'subset' | 'prompt'})",
        )
    index = [place[key] for key in wanted]
    return other if index == list(range(other.num_rows)) else other.select(index)


def _places(keys: list[_Key], node: str, argument: str) -> dict[_Key, int]:
    """The row of each id."""
    place: dict[_Key, int] = {}
    for row, key in enumerate(keys):
        if key in place:
            raise AlignmentError(
                f"{node}: {f'argument {argument!r}' if argument else 'its first input'} holds an id twice",
                expected="unique " + ("(prompt_id, sample_id)" if len(key) == 2 else "prompt_id"),
                received=f"{key[0] if len(key) == 1 else key} in rows {place[key]} and {row}",
                do="give each row its own id; only sources and fan-outs mint ids",
            )
        place[key] = row
    return place


def _unit(width: int) -> str:
    return "prompt" if width == 1 else "sample"


def _some(keys: list[_Key], what: str) -> str:
    shown = [key[0] if len(key) == 1 else key for key in sorted(keys)[:3]]
    return f"{len(keys)} {what}" + (f" (first: {', '.join(map(str, shown))})" if keys else "")
