"""How one call runs on the devices of its mesh, as the search knows it; :meth:`Parallelism.strategy` is what engines are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.compiler.strategy import Strategy


@dataclass(frozen=True, order=True)
class Parallelism:
    """Of one call on one mesh.

    Args:
        data: ranks with the same weights, on other rows.
        tensor: ranks that share each layer (arXiv 1909.08053).
        pipeline: stages of consecutive layers.
        zero: stage of ZeRO (arXiv 1910.02054) over the data-parallel ranks: 0 nothing, 1 the optimiser, 2 also gradients,
            3 also parameters are sharded.
        checkpointing: only the inputs of layers are kept for the backward pass, all else is computed again.
        micro_batches: training: forward and backward passes of a data-parallel rank in one optimiser step. Scoring: passes
            over its rows. Generation: waves in which its rows are sampled.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    checkpointing: bool = False
    micro_batches: int = 1

    @property
    def size(self) -> int:
        """Devices."""
        return self.data * self.tensor * self.pipeline

    @property
    def layout(self) -> tuple[int, int, int, bool]:
        """What decides which bytes of the weights a rank holds between passes."""
        return (self.data, self.tensor, self.pipeline, self.zero == 3)

    def strategy(self, *, cpu_offload: bool = False) -> Strategy:
        """The same as settings of an engine.

        ZeRO-1 is "optimizer": what engines do about gradients is theirs.
        """
        from flowrl.compiler.strategy import Strategy

        return Strategy(
            tensor_parallel=self.tensor,
            pipeline_parallel=self.pipeline,
            sharding="full" if self.zero == 3 else "optimizer" if self.zero else "none",
            cpu_offload=cpu_offload and self.zero > 0,
            activation_checkpointing="layers" if self.checkpointing else "none",
        )
