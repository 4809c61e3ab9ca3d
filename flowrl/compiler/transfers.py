"""What a resharding plan consists of, and how it is carried out on tensors that are all in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowrl.compiler.boxes import Box
from flowrl.compiler.layout import DeviceId, Layout
from flowrl.compiler.parameter_map import Piece
from flowrl.compiler.weights import Weights


class Transfer(NamedTuple):
    """One slice from one device to another.

    Args:
        round: when; all transfers of a round fit into the bucket of each device.
        sender: who has it.
        receiver: who lacks it.
        tensor: HuggingFace's name.
        box: the slice of that tensor.
        bytes: of it.
    """

    round: int
    sender: DeviceId
    receiver: DeviceId
    tensor: str
    box: Box
    bytes: int


class Block(NamedTuple):
    """The same slices of several equal tensors, from one device to another.

    Args:
        sender: who has them.
        receiver: who lacks them.
        tensors: HuggingFace's names: the same matrix of several layers, as a rule.
        rounds: of each tensor, when.
        boxes: the slices, the same of each tensor.
        bytes: of all slices of one tensor.
    """

    sender: DeviceId
    receiver: DeviceId
    tensors: tuple[str, ...]
    rounds: tuple[int, ...]
    boxes: tuple[Box, ...]
    bytes: int


class Copy(NamedTuple):
    """Slices that a device of the target holds already; they are moved within it at most."""

    device: DeviceId
    tensors: tuple[str, ...]
    boxes: tuple[Box, ...]
    bytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """Who sends which slice to whom, so that weights that lie in one layout lie in another.

    Args:
        weights: whose.
        source: how they lie.
        target: how they are to lie.
        blocks: the transfers, equal ones of several layers together.
        copies: what is there already.
        bytes_received: of each device of the target.
        bytes_sent: of each device of the source.
        bytes_kept: of each device of the target, what it holds already.
        num_rounds: buckets, one after the other.
        num_messages: pairs of devices that have something to send, over all rounds.
        peak_extra_bytes: that a device needs beside its tensors of both layouts: what it sends and receives in one round.
        bucket_bytes: what was allowed for that.
        bytes_by_tier: sent over links of each tier; of "between pools" where those differ.
        seconds: estimated, of the device that takes longest: its bytes at the rates of the links, both directions at once, and
            a latency a message. Copies within a device, and waiting for others between rounds, are not in it.
    """

    weights: Weights = field(repr=False)
    source: Layout
    target: Layout
    blocks: tuple[Block, ...] = field(repr=False)
    copies: tuple[Copy, ...] = field(repr=False)
    bytes_received: Mapping[DeviceId, int] = field(repr=False)
    bytes_sent: Mapping[DeviceId, int] = field(repr=False)
    bytes_kept: Mapping[DeviceId, int] = field(repr=False)
    num_rounds: int
    num_messages: int
    peak_extra_bytes: int
    bucket_bytes: int
    bytes_by_tier: Mapping[str, int]
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Sent by all devices together."""
        return sum(self.bytes_sent.values())

    @property
    def transfers(self) -> list[Transfer]:
        """Every single one, in the order of the rounds."""
        size = self.weights.dtype_bytes
        return sorted(
            Transfer(when, block.sender, block.receiver, tensor, box, box.size * size)
            for block in self.blocks
            for tensor, when in zip(block.tensors, block.rounds, strict=True)
            for box in block.boxes
        )

    def __str__(self) -> str:
        if not self.total_bytes:
            return "Every device of the target holds its slices already: nothing is sent."
        tiers = ", ".join(f"{_amount(n)} over {name}" for name, n in self.bytes_by_tier.items())
        most = max(self.bytes_received.values())
        return (
            f"{_amount(self.total_bytes)} are sent ({tiers}), at most {_amount(most)} to one device, in {self.num_messages} "
            f"messages of {self.num_rounds} rounds that take {_amount(self.peak_extra_bytes)} of extra memory at most; "
            f"estimated {self.seconds:.3g} s."
        )


def _amount(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


# -- carried out ----------------------------------------------------------------------------------------------------------

#: Of each device, its tensors by the names that they have there; numpy's or torch's.
Held = Mapping[DeviceId, Mapping[str, Any]]


def apply(plan: ReshardPlan, tensors: Held) -> dict[DeviceId, dict[str, Any]]:
    """Carry a plan out on tensors that are all in this process.

    Args:
        plan: what to move.
        tensors: of each device of the source, every tensor with the name and shape that :meth:`Layout.locals_on` says.

    Returns:
        The tensors of each device of the target, new ones; padding that no device of the source holds is zero.
    """
    like = next((t for held in tensors.values() for t in held.values()), None)
    here = {d: _Device(plan.source, plan.weights, d, tensors[d]) for d in plan.source.devices}
    there = {}
    for device in plan.target.devices:
        shapes = {name: local.shape for name, local in plan.target.locals_on(plan.weights, device).items()}
        there[device] = _Device(plan.target, plan.weights, device, {n: _zeros(like, s) for n, s in shapes.items()})
    for device, names, boxes, _ in plan.copies:
        for name in names:
            for box in boxes:
                there[device].write(name, box, here[device].read(name, box, like))
    for transfer in plan.transfers:
        sent = here[transfer.sender].read(transfer.tensor, transfer.box, like)
        there[transfer.receiver].write(transfer.tensor, transfer.box, sent)
    return {device: dict(held.tensors) for device, held in there.items()}


class _Device:
    """The tensors of one device, read and written by slices of HuggingFace tensors."""

    def __init__(self, layout: Layout, weights: Weights, device: DeviceId, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self.pieces: dict[str, list[tuple[str, Piece]]] = {}
        for name, local in layout.locals_on(weights, device).items():
            for piece in local.pieces:
                self.pieces.setdefault(piece.tensor, []).append((name, piece))

    def read(self, name: str, box: Box, like: Any) -> Any:
        found, seen = _zeros(like, box.shape), 0
        for part, there in self._within(name, box):
            found[part.shifted(box.start).slices] = there.reshape(part.shape)
            seen += part.size
        assert seen == box.size, f"{name}{box} is not all there"
        return found

    def write(self, name: str, box: Box, value: Any) -> None:
        seen = 0
        for part, there in self._within(name, box):
            there[...] = value[part.shifted(box.start).slices].reshape(there.shape)
            seen += part.size
        assert seen == box.size, f"{name}{box} has no place"

    def _within(self, name: str, box: Box) -> Iterator[tuple[Box, Any]]:
        """(part of the box, the view of a tensor that is it)."""
        for local, piece in self.pieces.get(name, ()):
            part = piece.box & box
            if part is None:
                continue
            tensor, shape = self.tensors[local], part.shape
            offset, start = list(piece.offset), part.shifted(piece.box.start).start
            # Dims are told from the last one on; one that only one of the two has is one long.
            common = min(len(offset), len(start))
            at = offset[: len(offset) - common] + [
                o + s for o, s in zip(offset[len(offset) - common :], start[len(start) - common :], strict=True)
            ]
            lengths = [1] * (len(offset) - common) + list(shape[len(shape) - common :])
            yield part, tensor[tuple(slice(a, a + n) for a, n in zip(at, lengths, strict=True))]


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if hasattr(like, "new_zeros"):  # torch's
        return like.new_zeros(shape)
    import numpy as np

    return np.zeros(shape, like.dtype)
