"""From one layout of a Model's weights to another: who sends which slices to whom.

Both layouts are slices of the same HuggingFace tensors (:mod:`flowrl.compiler.parameter_map`), whatever they are called on
a device. What a device lacks is what it shall hold without what it holds: that is sent, and nothing else. Tensors whose
slices lie alike, as those of all layers of a stage do, are planned once.

Of devices that hold what is missing one on the nearest link tier sends it; of equally near ones the one that has sent least
so far. So a device that shares all its sending with others sends at most their mean and one tensor's slices more (Graham,
"Bounds on multiprocessing timing anomalies", 1969).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowrl.compiler.architecture import Parameter
from flowrl.compiler.boxes import Box, merged
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.layout import Layout
from flowrl.compiler.links import Links, mesh_problems, shared
from flowrl.compiler.rounds import Parcel, Rounds, into_rounds
from flowrl.compiler.strategy import is_whole
from flowrl.compiler.transfers import Block, Copy, ReshardPlan
from flowrl.compiler.weights import Weights
from flowrl.errors import FlowError


def plan_transfers(
    weights: Weights,
    source: Layout,
    target: Layout,
    cluster: Cluster,
    bucket_bytes: int,
    *,
    whole_tensors: bool = False,
) -> ReshardPlan:
    """Plan how weights that lie in one layout come to lie in another.

    Nobody is sent a byte that it holds; no byte is sent twice to one device. Padding of the vocabulary is sent between layouts
    of one naming as far as the source has it, and is zero elsewhere: it holds no token.

    Args:
        weights: whose tensors.
        source: how they lie.
        target: how they shall lie; it may share devices with ``source``.
        cluster: whose links join the devices.
        bucket_bytes: a device needs no more memory than this beside its tensors of both layouts.
        whole_tensors: whether receivers must put whole tensors together before they can use them. What a device receives of one
            is then sent in one round, and the bucket is at least what the largest needs.

    Raises:
        FlowError: a layout that cannot be, a mesh outside of the cluster, or a bucket that holds no number.
    """
    _check(weights, source, target, cluster, bucket_bytes)
    names = list(weights.by_name)
    links = Links(cluster, source.devices, target.devices)
    sent = [0] * len(source.devices)
    parcels: list[Parcel] = []
    copies: list[Copy] = []
    for group in _groups(weights, source, target):
        pattern = _pattern(weights, group.first, source, target)
        for unit in _missing(pattern):
            size = unit.size * weights.dtype_bytes
            near = links.nearest(unit.holders, unit.receiver)
            for sender, tensors in shared(near, group.tensors, size, sent):
                parcels.append(Parcel(sender, unit.receiver, tensors, unit.boxes, size))
        group_names = tuple(names[i] for i in group.tensors)
        for device, boxes in _kept(pattern):
            size = sum(b.size for b in boxes) * weights.dtype_bytes
            copies.append(Copy(target.devices[device], group_names, boxes, size))
    rounds = into_rounds(
        parcels,
        len(names),
        links.numbers,
        bucket_bytes,
        weights.dtype_bytes,
        whole_tensors=whole_tensors,
    )
    return _plan(weights, source, target, links, rounds, copies, bucket_bytes)


def _check(weights: Weights, source: Layout, target: Layout, cluster: Cluster, bucket_bytes: int) -> None:
    problems = []
    if not is_whole(bucket_bytes, weights.dtype_bytes):
        problems.append(f"bucket_bytes is {bucket_bytes!r}; expected at least {weights.dtype_bytes}, one number")
    for what, layout in (("source", source), ("target", target)):
        problems += mesh_problems(layout.mesh, cluster, what)
        problems += [f"{what}: {problem}" for problem in layout.problems(weights)]
    if problems:
        raise FlowError("Weights cannot be moved so: " + "; ".join(problems))


# -- equal tensors --------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Tensors whose slices lie alike in both layouts: a representative, and the indices of all."""

    first: Parameter
    tensors: tuple[int, ...]


def _groups(weights: Weights, source: Layout, target: Layout) -> list[_Group]:
    found: dict[object, list[int]] = {}
    parameters = list(weights.by_name.values())
    for i, p in enumerate(parameters):
        stages = (source.stages_of(weights, p), target.stages_of(weights, p))
        found.setdefault((re.sub(r"\d+", "#", p.name), p.shape, p.split, stages), []).append(i)
    return [_Group(parameters[members[0]], tuple(members)) for members in found.values()]


@dataclass(frozen=True)
class _Pattern:
    """One tensor, cut into cells along all ends of slices: a cell is held by a device as a whole or not at all.

    Args:
        cuts: of each dim, where cells end.
        sizes: int64 [cells]: numbers in each.
        held: bool [source devices, cells].
        lacked: bool [target devices, cells]: to be sent.
        kept: bool [target devices, cells]: there already.
    """

    cuts: tuple[np.ndarray, ...]
    sizes: np.ndarray
    held: np.ndarray
    lacked: np.ndarray
    kept: np.ndarray

    def boxes(self, cells: np.ndarray) -> tuple[Box, ...]:
        """Cells as few slices."""
        shape = tuple(len(c) - 1 for c in self.cuts)
        index = np.unravel_index(cells, shape) if shape else ()
        starts = [c[i].tolist() for c, i in zip(self.cuts, index, strict=True)]
        stops = [c[i + 1].tolist() for c, i in zip(self.cuts, index, strict=True)]
        if not shape:
            return (Box((), ()),)
        return merged(Box(a, b) for a, b in zip(zip(*starts, strict=True), zip(*stops, strict=True), strict=True))


def _pattern(weights: Weights, parameter: Parameter, source: Layout, target: Layout) -> _Pattern:
    real = Box.whole(parameter.shape)

    def slices(layout: Layout) -> list[list[Box]]:
        boxes = layout.boxes_of(weights, parameter)
        if source.naming != target.naming:  # padding of one has no meaning in the other
            return [[kept for b in held if (kept := b & real)] for held in boxes]
        return [[b for b in held if b.size] for held in boxes]

    here, there = slices(source), slices(target)
    every = {box for held in (*here, *there) for box in held}
    cuts = tuple(np.unique([x for b in every for x in (b.start[i], b.stop[i])]) for i in range(len(parameter.shape)))
    sizes = np.ones((), dtype=np.int64)
    for c in cuts:
        sizes = np.multiply.outer(sizes, np.diff(c))
    held, wanted = _cover(here, cuts), _cover(there, cuts)
    mine = np.zeros_like(wanted)
    places = {device: i for i, device in enumerate(source.devices)}
    for j, device in enumerate(target.devices):
        if device in places:
            mine[j] = held[places[device]]
    lacked = wanted & ~mine & held.any(axis=0)
    within = _cover([[real]], cuts)[0] if parameter.shape else np.ones(1, dtype=bool)
    assert not (wanted & within & ~held.any(axis=0)).any(), f"the source does not hold all of {parameter.name}"
    return _Pattern(cuts, sizes.reshape(-1), held, lacked, wanted & mine)


def _cover(held: Sequence[Sequence[Box]], cuts: tuple[np.ndarray, ...]) -> np.ndarray:
    """bool [devices, cells]: which cells the slices of each device cover."""
    covered = np.zeros((len(held), *(len(c) - 1 for c in cuts)), dtype=bool)
    for i, boxes in enumerate(held):
        for box in boxes:
            span = [
                slice(int(np.searchsorted(c, a)), int(np.searchsorted(c, b)))
                for c, a, b in zip(cuts, box.start, box.stop, strict=True)
            ]
            covered[(i, *span)] = True
    return covered.reshape(len(held), -1)


class _Unit(NamedTuple):
    """What one device lacks and the same devices hold: slices of one tensor."""

    receiver: int
    holders: tuple[int, ...]
    boxes: tuple[Box, ...]
    size: int


def _missing(pattern: _Pattern) -> Iterator[_Unit]:
    packed = np.packbits(pattern.held, axis=0).T
    _, first, kind = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    kind = kind.reshape(-1)  # of each cell, which set of devices holds it
    holders = [tuple(np.flatnonzero(pattern.held[:, c]).tolist()) for c in first]
    made: dict[bytes, tuple[tuple[Box, ...], int]] = {}  # replicas lack the same
    for receiver, lacked in enumerate(pattern.lacked):
        cells = np.flatnonzero(lacked)
        kinds = kind[cells]
        for k in sorted(set(kinds.tolist())):
            these = cells[kinds == k]
            key = these.tobytes()
            if key not in made:
                made[key] = pattern.boxes(these), int(pattern.sizes[these].sum())
            yield _Unit(receiver, holders[k], *made[key])


def _kept(pattern: _Pattern) -> Iterator[tuple[int, tuple[Box, ...]]]:
    for device, kept in enumerate(pattern.kept):
        if kept.any():
            yield device, pattern.boxes(np.flatnonzero(kept))


# -- the plan -------------------------------------------------------------------------------------------------------------


def _plan(
    weights: Weights,
    source: Layout,
    target: Layout,
    links: Links,
    rounds: Rounds,
    copies: list[Copy],
    bucket_bytes: int,
) -> ReshardPlan:
    names, here, there = list(weights.by_name), source.devices, target.devices
    moved = np.zeros((len(here), len(there)), dtype=np.int64)
    pairs, blocks = [], []
    distinct: dict[int, np.ndarray] = {}  # parcels of one group have one tuple of rounds, and one of tensors
    called: dict[int, tuple[str, ...]] = {}
    for (sender, receiver, tensors, boxes, size), when in rounds.timed:
        moved[sender, receiver] += size * len(tensors)
        if id(when) not in distinct:
            distinct[id(when)] = np.array(sorted(set(when)), dtype=np.int64)
        if id(tensors) not in called:
            called[id(tensors)] = tuple(names[t] for t in tensors)
        pairs.append(distinct[id(when)] * moved.size + sender * len(there) + receiver)
        blocks.append(Block(here[sender], there[receiver], called[id(tensors)], when, boxes, size))
    sendings = np.sort(np.concatenate(pairs)) if pairs else np.zeros(0, dtype=np.int64)
    sendings = sendings[np.diff(sendings, prepend=-1) > 0]  # faster than numpy's unique, by far
    messages = np.bincount(sendings % moved.size, minlength=moved.size).reshape(moved.shape)
    kept = dict.fromkeys(there, 0)
    for copy in copies:
        kept[copy.device] += copy.bytes * len(copy.tensors)
    return ReshardPlan(
        weights=weights,
        source=source,
        target=target,
        blocks=tuple(sorted(blocks)),
        copies=tuple(sorted(copies)),
        bytes_received=dict(zip(there, moved.sum(axis=0).tolist(), strict=True)),
        bytes_sent=dict(zip(here, moved.sum(axis=1).tolist(), strict=True)),
        bytes_kept=kept,
        num_rounds=rounds.num_rounds,
        num_messages=len(sendings),
        peak_extra_bytes=rounds.peak,
        bucket_bytes=bucket_bytes,
        bytes_by_tier=links.by_tier(moved),
        seconds=links.seconds(moved, messages),
    )
