"""Slices of tensors: one range of indices along every dim."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Box(NamedTuple):
    """Indices ``start[i]`` … ``stop[i] − 1`` along each dim i."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its sides."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes a tensor with it."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def shifted(self, by: tuple[int, ...]) -> Box:
        """The same box as seen from a tensor whose first index is ``by``."""
        return Box(
            tuple(a - o for a, o in zip(self.start, by, strict=True)),
            tuple(b - o for b, o in zip(self.stop, by, strict=True)),
        )

    def along(self, dim: int, start: int, stop: int) -> Box:
        """The same box with another range along one dim."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def __and__(self, other: Box) -> Box | None:
        """What both cover; None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def pieces(self, size: int) -> list[Box]:
        """Boxes of at most ``size`` numbers (at least 1) that make up this one, in row-major order."""
        if self.size <= size:
            return [self]
        dim = next(i for i, n in enumerate(self.shape) if n > 1)
        step = max(1, size // (self.size // self.shape[dim]))
        rows = [self.along(dim, a, min(a + step, self.stop[dim])) for a in range(self.start[dim], self.stop[dim], step)]
        return [part for row in rows for part in row.pieces(size)]


def merged(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes with those that make up a greater box joined, one dim after the other from the last to the first."""
    found = sorted(boxes)
    for dim in reversed(range(len(found[0].start) if found else 0)):
        joined: list[Box] = []
        # Neighbours along this dim, which agree along all others, stand one after the other.
        for box in sorted(found, key=lambda b: (b.along(dim, 0, 0), b.start[dim])):
            last = joined[-1] if joined else None
            if last and last.stop[dim] == box.start[dim] and last.along(dim, 0, 0) == box.along(dim, 0, 0):
                joined[-1] = last.along(dim, last.start[dim], box.stop[dim])
            else:
                joined.append(box)
        found = joined
    return tuple(sorted(found))


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """The range of part ``index`` of a dim that torch splits (``torch.chunk``, DTensor's ``Shard``): all parts are
    ⌈length / parts⌉ long but the last ones, which may be shorter or empty."""
    size = math.ceil(length / parts)
    return min(index * size, length), min((index + 1) * size, length)
