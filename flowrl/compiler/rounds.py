"""Transfers into rounds, so that what a device sends and receives in one round fits into a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flowrl.compiler.boxes import Box, merged


class Parcel(NamedTuple):
    """What one device sends to another of equal tensors; indices of devices among the source's and the target's.

    Args:
        sender: index of a device of the source.
        receiver: index of a device of the target.
        tensors: indices of the tensors.
        boxes: the slices, the same of each tensor.
        bytes: of all slices of one tensor.
    """

    sender: int
    receiver: int
    tensors: tuple[int, ...]
    boxes: tuple[Box, ...]
    bytes: int


class Timed(NamedTuple):
    """A parcel, and the round of each of its tensors."""

    parcel: Parcel
    rounds: tuple[int, ...]


class Rounds(NamedTuple):
    """All parcels with their rounds.

    Args:
        timed: the parcels; those that were cut are several.
        num_rounds: how many.
        peak: bytes that some device sends and receives in one round, at most.
    """

    timed: list[Timed]
    num_rounds: int
    peak: int


def into_rounds(
    parcels: Sequence[Parcel],
    num_tensors: int,
    devices: tuple[Sequence[int], Sequence[int]],
    bucket: int,
    dtype_bytes: int,
    *,
    whole_tensors: bool,
) -> Rounds:
    """Deal parcels to rounds.

    Tensors follow one another in their order, as many in a round as fit into the bucket of every device. A tensor that does not
    fit into one is cut into smaller slices, which are dealt to rounds one by one.

    Args:
        parcels: what is sent.
        num_tensors: one more than the greatest index.
        devices: of each device of the source and of the target, a number that is the same where the device is.
        bucket: bytes that a device may send and receive in a round, together.
        dtype_bytes: of one number.
        whole_tensors: whether what a device receives of a tensor must come in one round, whatever the bucket.
    """
    staged = _staged(parcels, num_tensors, devices)
    large = {} if whole_tensors else _large(parcels, set(np.flatnonzero(staged.max(axis=1) > bucket).tolist()))
    cuts: dict[tuple[int, ...], _Cut] = {}  # equal layers are cut alike
    when = np.full(num_tensors, -1, dtype=np.int64)
    now, peak, filled = 0, 0, np.zeros(staged.shape[1], dtype=np.int64)
    for tensor in range(num_tensors):
        if tensor in large:
            now += bool(filled.any())
            key = large[tensor]
            if key not in cuts:
                cuts[key] = _cut([parcels[i] for i in key], bucket, dtype_bytes, devices)
            cuts[key].first[tensor] = now
            now += cuts[key].num_rounds
            peak = max(peak, int(filled.max()), cuts[key].peak)
            filled = np.zeros_like(filled)
        elif staged[tensor].any():
            if filled.any() and (filled + staged[tensor]).max() > bucket:
                now, peak = now + 1, max(peak, int(filled.max()))
                filled = np.zeros_like(filled)
            filled = filled + staged[tensor]
            when[tensor] = now
    timed = [part for cut in cuts.values() for part in cut.timed()]
    known: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # parcels of one group have one tuple of tensors
    for parcel in parcels:
        if id(parcel.tensors) not in known:
            kept = tuple(t for t in parcel.tensors if t not in large)
            known[id(parcel.tensors)] = kept, tuple(when[list(kept)].tolist())
        kept, rounds = known[id(parcel.tensors)]
        if kept:
            timed.append(Timed(parcel._replace(tensors=kept), rounds))
    return Rounds(timed, now + bool(filled.any()), max(peak, int(filled.max())))


def _staged(parcels: Sequence[Parcel], num_tensors: int, devices: tuple[Sequence[int], Sequence[int]]) -> np.ndarray:
    """int64 [tensors, devices]: bytes that a device sends and receives of a tensor."""
    source, target = devices
    count = max((*source, *target)) + 1
    together: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # parcels of one group have one tuple of tensors
    for parcel in parcels:
        _, by_device = together.setdefault(id(parcel.tensors), (parcel.tensors, [0] * count))
        by_device[source[parcel.sender]] += parcel.bytes
        by_device[target[parcel.receiver]] += parcel.bytes
    staged = np.zeros((num_tensors, count), dtype=np.int64)
    for tensors, by_device in together.values():
        staged[list(tensors)] += np.array(by_device, dtype=np.int64)
    return staged


def _large(parcels: Sequence[Parcel], large: set[int]) -> dict[int, tuple[int, ...]]:
    """Of each of these tensors, the indices of the parcels that it is in."""
    found: dict[int, list[int]] = {tensor: [] for tensor in large}
    for i, parcel in enumerate(parcels) if large else ():
        for tensor in parcel.tensors:
            if tensor in large:
                found[tensor].append(i)
    return {tensor: tuple(members) for tensor, members in found.items()}


class _Cut(NamedTuple):
    """How tensors that do not fit are cut.

    Args:
        parts: (round, sender, receiver) from 0 on, and the slices.
        num_rounds: how many.
        peak: bytes of a device in one of them, at most.
        dtype_bytes: of one number.
        first: of each tensor, its first round.
    """

    parts: list[tuple[tuple[int, int, int], tuple[Box, ...]]]
    num_rounds: int
    peak: int
    dtype_bytes: int
    first: dict[int, int]

    def timed(self) -> Iterator[Timed]:
        tensors = tuple(self.first)
        for (at, sender, receiver), boxes in self.parts:
            size = sum(b.size for b in boxes) * self.dtype_bytes
            rounds = tuple(start + at for start in self.first.values())
            yield Timed(Parcel(sender, receiver, tensors, boxes, size), rounds)


def _cut(
    parcels: Sequence[Parcel], bucket: int, dtype_bytes: int, devices: tuple[Sequence[int], Sequence[int]]
) -> _Cut:
    """One tensor that does not fit, cut into slices of a quarter of the bucket at most. Each slice is in the first round
    that is not before the last one of either device, and has room for it on both."""
    source, target = devices
    largest = max(1, bucket // (4 * dtype_bytes))
    rounds: dict[int, int] = {}  # of each device, the last one that it takes part in, and the bytes in it
    filled: dict[int, int] = {}
    found: dict[tuple[int, int, int], list[Box]] = {}
    peak = 0
    for parcel, box in _in_turn(parcels, largest):
        both = (source[parcel.sender], target[parcel.receiver])
        size = box.size * dtype_bytes
        at = max(rounds.get(d, 0) for d in both)
        if any(rounds.get(d, 0) == at and filled.get(d, 0) + size > bucket for d in both):
            at += 1
        for d in both:
            filled[d] = size + (filled.get(d, 0) if rounds.get(d, 0) == at else 0)
            rounds[d] = at
            peak = max(peak, filled[d])
        found.setdefault((at, parcel.sender, parcel.receiver), []).append(box)
    parts = [(key, merged(boxes)) for key, boxes in sorted(found.items())]
    return _Cut(parts, max(rounds.values()) + 1, peak, dtype_bytes, {})


def _in_turn(parcels: Sequence[Parcel], largest: int) -> Iterator[tuple[Parcel, Box]]:
    """Slices of at most ``largest`` numbers: the first one of every parcel, then the second ones, so that all devices are
    busy in every round."""
    waiting = [(parcel, [piece for box in parcel.boxes for piece in box.pieces(largest)]) for parcel in parcels]
    for i in range(max((len(pieces) for _, pieces in waiting), default=0)):
        yield from ((parcel, pieces[i]) for parcel, pieces in waiting if i < len(pieces))
