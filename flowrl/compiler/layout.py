"""Where the weights of one Model lie: which device of a mesh holds which slices of which tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flowrl.compiler.architecture import Parameter
from flowrl.compiler.boxes import Box, chunk, merged
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.parameter_map import (
    VOCABULARY_MULTIPLE,
    Local,
    Naming,
    locals_of,
    naming_problems,
)
from flowrl.compiler.strategy import is_whole
from flowrl.compiler.weights import Weights, is_before_layers
from flowrl.errors import FlowError


class DeviceId(NamedTuple):
    """A device of a cluster: the index of its pool, and its own within it."""

    pool: int
    device: int


class Coordinates(NamedTuple):
    """A device along the axes of a mesh."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """How one Model's weights lie on the devices of a mesh between two passes.

    Tensor-parallel ranks split each layer, pipeline stages the layers: the embedding is on the first stage, final norm and
    head on the last; a head that is the embedding's is on both. With ZeRO-3 each tensor of a rank is split along dim 0 over
    the data-parallel ranks, as torch's FSDP2 does: parts of ⌈n / ranks⌉ rows, the last ones shorter or empty. ZeRO-1 and
    ZeRO-2 shard nothing of the parameters between passes.

    Args:
        mesh: the devices.
        parallelism: of which ``data``, ``tensor``, ``pipeline`` and ``zero`` count.
        naming: whose tensors a device holds.
        stages: layers of each pipeline stage; empty: as even as can be, the first ones longer.
        ranks: where the ranks are: entry (pipeline · data + data index) · tensor + tensor index is the device, counted from
            the first of the mesh. Empty: in order.
        shard_size: ZeRO-3 within this many neighbouring data-parallel ranks, replicated between ("hybrid"); None: all.
        split_vocabulary: whether the rows of embedding and head are split over tensor ranks. None: as the engines do: under
            HuggingFace's names what lies outside of the layers is whole, Megatron and vLLM split it.
        vocabulary_multiple: to a multiple of what the vocabulary is padded (in Megatron, for each tensor rank); None: as
            they do by default.

    Example::

        Layout(Mesh(0, 0, 8), Parallelism(data=2, tensor=4), "megatron")
    """

    mesh: Mesh
    parallelism: Parallelism
    naming: Naming = "huggingface"
    stages: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    shard_size: int | None = None
    split_vocabulary: bool | None = None
    vocabulary_multiple: int | None = None

    def problems(self, weights: Weights | None = None) -> Iterator[str]:
        """What cannot be, a sentence each.

        Args:
            weights: where given, also what does not fit them.
        """
        p, size = self.parallelism, self.mesh.size
        if p.size != size:
            degrees = f"data {p.data} × tensor {p.tensor} × pipeline {p.pipeline}"
            yield f"{degrees} is {p.size}; expected the {size} devices of the mesh"
        if self.ranks and sorted(self.ranks) != list(range(size)):
            yield f"ranks is {self.ranks!r}; expected each of 0 … {size - 1} once"
        if self.shard_size is not None and (not is_whole(self.shard_size, 1) or p.data % self.shard_size):
            yield f"shard_size is {self.shard_size!r}; expected a divisor of the {p.data} data-parallel ranks"
        if p.zero == 3 and self.naming != "huggingface":
            yield f"zero is 3 under the names of {self.naming}; expected at most 2: only FSDP2's shards are known"
        if self.split_vocabulary is False and self.naming != "huggingface":
            yield f"split_vocabulary is False under the names of {self.naming}, which splits it; expected None"
        if self.vocabulary_multiple is not None and not is_whole(self.vocabulary_multiple, 1):
            yield f"vocabulary_multiple is {self.vocabulary_multiple!r}; expected a whole number, at least 1, or None"
        if self.stages and (len(self.stages) != p.pipeline or not all(is_whole(n, 0) for n in self.stages)):
            yield f"stages is {self.stages!r}; expected the number of layers of each of {p.pipeline} stages"
        if weights is None:
            return
        if self.stages and sum(self.stages) != weights.num_layers:
            yield f"stages holds {sum(self.stages)} layers; expected the {weights.num_layers} of the model"
        if p.pipeline > weights.num_layers:
            yield f"pipeline is {p.pipeline}; expected at most the {weights.num_layers} layers of the model"
        yield from naming_problems(weights, self.naming)

    def check(self, weights: Weights) -> None:
        """Refuse what cannot be.

        Raises:
            FlowError: all of :meth:`problems` at once, or a tensor that cannot be split so.
        """
        if found := list(self.problems(weights)):
            raise FlowError("Weights cannot lie so: " + "; ".join(found))
        for parameter in weights.by_name.values():
            self._part(weights, parameter, 0)

    # -- devices --------------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def devices(self) -> list[DeviceId]:
        """Of the mesh, ascending."""
        return [DeviceId(self.mesh.pool, d) for d in range(self.mesh.start, self.mesh.stop)]

    def device(self, coordinates: Coordinates) -> DeviceId:
        """The device at these coordinates."""
        at = self.mesh.device(self.parallelism, *coordinates)
        if self.ranks:
            at = self.mesh.start + self.ranks[at - self.mesh.start]
        return DeviceId(self.mesh.pool, at)

    def coordinates(self, device: DeviceId) -> Coordinates:
        """Where a device of the mesh is."""
        at = self._places[device.device - self.mesh.start] if self.ranks else device.device - self.mesh.start
        return Coordinates(*self.mesh.coordinates(self.parallelism, self.mesh.start + at))

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        return {device: rank for rank, device in enumerate(self.ranks)}

    # -- layers ---------------------------------------------------------------------------------------------------------------

    def layers_of(self, num_layers: int) -> list[range]:
        """The layers of each pipeline stage."""
        stages = self.parallelism.pipeline
        least, more = divmod(num_layers, stages)
        counts = self.stages or tuple(least + (i < more) for i in range(stages))
        starts = [sum(counts[:i]) for i in range(stages)]
        return [range(a, a + n) for a, n in zip(starts, counts, strict=True)]

    def stages_of(self, weights: Weights, parameter: Parameter) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor."""
        last = self.parallelism.pipeline - 1
        if parameter.layer is not None:
            layers = self.layers_of(weights.num_layers)
            return tuple(i for i, stage in enumerate(layers) if parameter.layer in stage)
        if parameter.name in weights.tied:
            return tuple(sorted({0, last}))
        return (0,) if is_before_layers(parameter) else (last,)

    # -- slices ---------------------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        """Data-parallel ranks that each tensor is split over."""
        return (self.shard_size or self.parallelism.data) if self.parallelism.zero == 3 else 1

    def locals_of(self, weights: Weights, parameter: Parameter, at: Coordinates) -> list[Local]:
        """What the rank at ``at`` holds of one HuggingFace tensor; several tensors where each expert has its own, none where
        another stage holds it."""
        if at.pipeline not in self.stages_of(weights, parameter):
            return []
        locals_here = self._part(weights, parameter, at.tensor)
        if self.naming == "megatron" and parameter.name in weights.tied and at.pipeline > 0:
            locals_here = [x._replace(name="output_layer.weight") for x in locals_here]  # the copy that is the head
        return self._sharded(locals_here, at.data)

    def boxes_of(self, weights: Weights, parameter: Parameter) -> list[tuple[Box, ...]]:
        """Of each device of the mesh, in their order, the slices of one HuggingFace tensor; they may reach into padding."""
        stages, made = self.stages_of(weights, parameter), {}
        tensors = {t: self._part(weights, parameter, t) for t in range(self.parallelism.tensor)}
        found = []
        for device in self.devices:
            at = self.coordinates(device)
            shard = (at.tensor, at.data % self.shards)
            if at.pipeline in stages and shard not in made:
                locals_here = self._sharded(tensors[at.tensor], at.data)
                made[shard] = tuple(p.box for x in locals_here for p in x.pieces)
            found.append(made[shard] if at.pipeline in stages else ())
        return found

    def locals_on(self, weights: Weights, device: DeviceId) -> dict[str, Local]:
        """Every tensor of a device by the name that it has there, with all that it is put together from."""
        at, found = self.coordinates(device), {}
        for parameter in weights.by_name.values():
            for local in self.locals_of(weights, parameter, at):
                before = found.get(local.name)
                found[local.name] = local._replace(pieces=before.pieces + local.pieces) if before else local
        return found

    def holdings(self, weights: Weights) -> dict[DeviceId, dict[str, tuple[Box, ...]]]:
        """Of each device, the slices of each HuggingFace tensor; padding left out.

        Raises:
            FlowError: the weights cannot lie so.
        """
        self.check(weights)
        found: dict[DeviceId, dict[str, tuple[Box, ...]]] = {device: {} for device in self.devices}
        for name, parameter in weights.by_name.items():
            real = Box.whole(parameter.shape)
            for device, boxes in zip(self.devices, self.boxes_of(weights, parameter), strict=True):
                if kept := merged(box for b in boxes if (box := b & real) is not None):
                    found[device][name] = kept
        return found

    def num_bytes(self, weights: Weights) -> dict[DeviceId, int]:
        """Bytes that each device holds, padding included."""
        found = dict.fromkeys(self.devices, 0)
        for parameter in weights.by_name.values():
            for device, boxes in zip(self.devices, self.boxes_of(weights, parameter), strict=True):
                found[device] += sum(b.size for b in boxes) * weights.dtype_bytes
        return found

    def _part(self, weights: Weights, parameter: Parameter, tensor: int) -> list[Local]:
        """Of one tensor rank, before ZeRO."""
        vocabulary = self.naming != "huggingface" if self.split_vocabulary is None else self.split_vocabulary
        multiple = self.vocabulary_multiple or VOCABULARY_MULTIPLE[self.naming]
        degree = self.parallelism.tensor
        if self.naming == "megatron":
            multiple *= degree
        return locals_of(weights, parameter, self.naming, degree, tensor, vocabulary=vocabulary, multiple=multiple)

    def _sharded(self, tensors: list[Local], data: int) -> list[Local]:
        """Of these, what one data-parallel rank holds."""
        return tensors if self.shards == 1 else [_rows(x, self.shards, data % self.shards) for x in tensors]


def _rows(local: Local, parts: int, index: int) -> Local:
    """The rows of a tensor that one of ``parts`` data-parallel ranks holds."""
    if not local.shape:  # nothing to split: FSDP keeps a number whole
        return local
    first, last = chunk(local.shape[0], parts, index)
    pieces = []
    for piece in local.pieces:
        start, stop = max(piece.offset[0], first), min(piece.offset[0] + piece.box.shape[0], last)
        if start < stop:
            by = piece.box.start[0] - piece.offset[0]
            pieces.append(
                piece._replace(box=piece.box.along(0, start + by, stop + by), offset=(start - first, *piece.offset[1:]))
            )
    return Local(local.name, (last - first, *local.shape[1:]), tuple(pieces))
