"""A mesh: devices side by side, and the named axes that a parallelism lays over them."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.compiler.parallelism import Parallelism

#: From the outermost to the innermost: neighbours share layers, stages lie farthest apart.
AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True, order=True)
class Mesh:
    """Devices ``start`` … ``start + size − 1`` of a pool, numbered node by node.

    Args:
        pool: index of the pool of the cluster.
        start: its first device, within the pool.
        size: how many.

    Example::

        Cluster("H100", nodes=2).mesh(8, 8)  # Mesh(pool=0, start=8, size=8): the second node
    """

    pool: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        """One past the last device."""
        return self.start + self.size

    def overlaps(self, other: Mesh) -> bool:
        """Whether they share a device."""
        return self.pool == other.pool and self.start < other.stop and other.start < self.stop

    def device(self, parallelism: Parallelism, pipeline: int, data: int, tensor: int) -> int:
        """The device, within the pool, at these coordinates."""
        return self.start + (pipeline * parallelism.data + data) * parallelism.tensor + tensor

    def coordinates(self, parallelism: Parallelism, device: int) -> tuple[int, int, int]:
        """(pipeline, data, tensor) of a device of this mesh."""
        rest, tensor = divmod(device - self.start, parallelism.tensor)
        pipeline, data = divmod(rest, parallelism.data)
        return pipeline, data, tensor
