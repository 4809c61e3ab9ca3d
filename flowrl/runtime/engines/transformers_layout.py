"""From batches to forward passes: which rows share a micro-batch, and how its tokens are laid out.

The layout is a function of the rows, their order and the token budget alone, the same in scoring and in training: that
is what makes a log-prob scored before an update equal, bit for bit, the one that the update computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.batches import Sequences
from flowrl.errors import DataError
from flowrl.runtime.engines.base import micro_batches
from flowrl.runtime.engines.transformers_attention import Pack, pack_rows


@dataclass(frozen=True)
class Layout:
    """The tokens of a micro-batch on the model's device, and where its response tokens are predicted.

    Args:
        input_ids: int64 ``[1, T]`` packed, or ``[rows, length]`` padded on the right.
        position_ids: int64, the same shape.
        attention_mask: int64, the same shape: 0 at padding.
        pack: the attention layout; None where padded.
        predictors: int64 ``[num_tokens]``: for each response token, in response layout, the flat place of the token
            before it, whose hidden state predicts it.
        targets: int64 ``[num_tokens]``, the response tokens.
        last: int64 ``[rows]``, the flat place of each row's last token.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    pack: Pack | None
    predictors: Tensor
    targets: Tensor
    last: Tensor


def check_rows(sequences: Sequences, max_length: int | None, vocab_size: int) -> None:
    """Refuse rows that no forward pass can score.

    Raises:
        DataError: a row without a prompt, longer than the model takes, or with a token that it does not know.
    """
    unknown = (sequences.tokens.values < 0) | (sequences.tokens.values >= vocab_size)
    if bool(unknown.any()):
        place = int(unknown.nonzero()[0])
        row = int(sequences.tokens.row_of_value[place])
        raise DataError(
            f"{_name_row(sequences, row)} has a token that the model does not know",
            expected=f"token ids from 0 to {vocab_size - 1}",
            received=int(sequences.tokens.values[place]),
            do="use models that share one tokenizer",
        )
    lengths, prompts = sequences.tokens.lengths, sequences.prompt_lengths
    if max_length is not None and bool((lengths > max_length).any()):
        row = int((lengths > max_length).nonzero()[0])
        raise DataError(
            f"{_name_row(sequences, row)} is longer than the model takes",
            expected=f"at most {max_length} tokens",
            received=f"{int(lengths[row])}",
            do="shorten prompts or max_new_tokens, or take a model with a longer context",
        )
    if bool((prompts < 1).any()):
        row = int((prompts < 1).nonzero()[0])
        raise DataError(
            f"{_name_row(sequences, row)} has no prompt",
            expected="at least one prompt token, which predicts the first response token",
            received="none",
            do="start the prompt with the model's beginning-of-sequence token",
        )


def _name_row(sequences: Sequences, row: int) -> str:
    return f"Row {row} (prompt_id {int(sequences.prompt_id[row])}, sample_id {int(sequences.sample_id[row])})"


def micro_batch_rows(sequences: Sequences, budget: int, coupled: list[list[int]] | None = None) -> list[list[int]]:
    """Rows of each micro-batch.

    Rows of one prompt that follow each other stay together where they fit in the budget: they share its computation.

    Args:
        budget: tokens of a micro-batch; a longer unit goes alone.
        coupled: row sets that may not be torn apart, however long; None where every row is on its own.
    """
    lengths = sequences.tokens.lengths
    units: list[list[int]] = []
    previous = None
    for row, prompt in enumerate(sequences.prompt_id.tolist()):
        if units and prompt == previous:
            units[-1].append(row)
        else:
            units.append([row])
        previous = prompt
    if coupled is not None:
        units = _merge(units, coupled, sequences.num_rows)
    pieces: list[list[int]] = []
    for unit in units:
        fits = int(lengths[torch.tensor(unit)].sum()) <= budget
        pieces += [unit] if fits or coupled is not None else [[row] for row in unit]
    sizes = torch.tensor([int(lengths[torch.tensor(piece)].sum()) for piece in pieces], dtype=torch.int64)
    return [[row for i in batch for row in pieces[i]] for batch in micro_batches(sizes, budget)]


def _merge(units: list[list[int]], coupled: list[list[int]], num_rows: int) -> list[list[int]]:
    """The units, with those that a coupled set touches joined; in order of their first row."""
    unit_of = [0] * num_rows
    for index, unit in enumerate(units):
        for row in unit:
            unit_of[row] = index
    leader = list(range(len(units)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    for rows in coupled:
        for row in rows[1:]:
            a, b = find(unit_of[rows[0]]), find(unit_of[row])
            leader[max(a, b)] = min(a, b)
    joined: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        joined.setdefault(find(index), []).extend(unit)
    return list(joined.values())


def packed_layout(sequences: Sequences, device: torch.device, *, share_prompts: bool = True) -> Layout:
    """Rows joined in one sequence; rows with the same prompt share its tokens."""
    rows: list[Tensor] = []
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    predictors: list[Tensor] = []
    shared: dict[bytes, Tensor] = {}
    used = 0
    for row, prompt_length in zip(sequences.tokens.rows(), sequences.prompt_lengths.tolist(), strict=True):
        prompt, response = row[:prompt_length], row[prompt_length:]
        key = prompt.numpy().tobytes()
        places = shared.get(key) if share_prompts else None
        if places is None:
            places = torch.arange(used, used + prompt_length)
            used += prompt_length
            shared[key] = places
            tokens.append(prompt)
            positions.append(torch.arange(prompt_length))
        tokens.append(response)
        positions.append(torch.arange(prompt_length, len(row)))
        places = torch.cat([places, torch.arange(used, used + len(response))])
        used += len(response)
        rows.append(places)
        predictors.append(places[prompt_length - 1 : -1] if len(response) else places[:0])
    input_ids = torch.cat(tokens).to(device)
    position_ids = torch.cat(positions).to(device)
    return Layout(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        attention_mask=torch.ones_like(input_ids)[None],
        pack=pack_rows(rows, input_ids, position_ids),
        predictors=torch.cat(predictors).to(device),
        targets=sequences.response_tokens.values.to(device),
        last=torch.stack([row[-1] for row in rows]).to(device),
    )


def padded_layout(sequences: Sequences, device: torch.device) -> Layout:
    """A row a line, padded on the right: what every model takes."""
    lengths, prompts = sequences.tokens.lengths, sequences.prompt_lengths
    longest = int(lengths.max())
    place = sequences.tokens.position_of_value
    row = sequences.tokens.row_of_value
    input_ids = torch.zeros(sequences.num_rows, longest, dtype=torch.int64)
    input_ids[row, place] = sequences.tokens.values
    attention_mask = torch.zeros_like(input_ids)
    attention_mask[row, place] = 1
    position_ids = torch.arange(longest).expand_as(input_ids)
    flat = row * longest + place
    return Layout(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        attention_mask=attention_mask.to(device),
        pack=None,
        predictors=(flat[place >= prompts[row]] - 1).to(device),
        targets=sequences.response_tokens.values.to(device),
        last=(torch.arange(sequences.num_rows) * longest + lengths - 1).to(device),
    )
