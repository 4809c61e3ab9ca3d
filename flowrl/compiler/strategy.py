"""How a Model is held over the ranks of a mesh: settings of a plan, never of a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Sharding = Literal["full", "optimizer", "none", "hybrid"]
Checkpointing = Literal["none", "layers", "offload"]
Attention = Literal["auto", "sdpa", "flex", "flash"]

#: Attention that needs CUDA, and why.
NEEDS_CUDA = {
    "flash": "its kernels are written for it",
    "flex": "elsewhere torch's flex_attention has no backward pass",
}
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Strategy:
    """How a Model is held over ranks.

    Args:
        tensor_parallel: ranks that share each layer; all others are data parallel.
        sharding: over the data-parallel ranks. "full": parameters, gradients and optimiser (ZeRO-3). "optimizer":
            parameters stay whole between forward and backward, all else is sharded (ZeRO-2). "none": everything on every
            rank, gradients are summed. "hybrid": "full" within ``shard_size`` ranks, replicated between.
        shard_size: ranks of a shard group of "hybrid".
        shard_layers: names of module classes that are sharded each for itself; empty takes the model's own layers.
        cpu_offload: parameters, gradients and optimiser live in host memory, and are copied to the device when needed.
        activation_checkpointing: "layers" keeps only what goes into a layer, and computes the rest again; "offload" also
            moves that to host memory.
        compile_layers: ``torch.compile`` of each layer.
        attention: over rows of different lengths, in scoring and training. "sdpa": rows are padded within groups of similar
            length. "flash": flash attention's variable-length kernels, without padding; needs CUDA and 16-bit products.
            "flex": torch's flex_attention, each shared prompt once; needs CUDA. "auto": flash where it can be used, else sdpa.
    """

    tensor_parallel: int = 1
    sharding: Sharding = "full"
    shard_size: int | None = None
    shard_layers: tuple[str, ...] = ()
    cpu_offload: bool = False
    activation_checkpointing: Checkpointing = "none"
    compile_layers: bool = False
    attention: Attention = "auto"

    def problems(
        self, num_ranks: int | None = None, *, device: str | None = None, dtype: str | None = None
    ) -> Iterable[str]:
        """Settings that cannot work, a sentence each.

        Args:
            num_ranks: where given, also what does not fit those.
            device: where given, also what does not run on it.
            dtype: of matrix products; where given, also what does not compute in it.
        """
        if self.tensor_parallel < 1:
            yield f"tensor_parallel is {self.tensor_parallel}; expected at least 1"
        if self.sharding not in get_args(Sharding):
            yield f"sharding is {self.sharding!r}; expected one of {', '.join(get_args(Sharding))}"
        if self.activation_checkpointing not in get_args(Checkpointing):
            known = ", ".join(get_args(Checkpointing))
            yield f"activation_checkpointing is {self.activation_checkpointing!r}; expected one of {known}"
        yield from self._attention_problems(device, dtype)
        if (self.sharding == "hybrid") != (self.shard_size is not None):
            yield f"shard_size is {self.shard_size} with sharding={self.sharding!r}; expected a number with 'hybrid' alone"
        if self.shard_size is not None and self.shard_size < 1:
            yield f"shard_size is {self.shard_size}; expected at least 1"
        if self.cpu_offload and self.sharding == "none":
            yield "cpu_offload is True with sharding='none'; expected a sharding, which moves parameters when needed"
        if num_ranks is not None and self.tensor_parallel >= 1:
            if num_ranks % self.tensor_parallel:
                yield f"tensor_parallel is {self.tensor_parallel}; expected a divisor of the {num_ranks} ranks"
            elif self.shard_size and (num_ranks // self.tensor_parallel) % self.shard_size:
                ranks = num_ranks // self.tensor_parallel
                yield f"shard_size is {self.shard_size}; expected a divisor of the {ranks} data-parallel ranks"

    def _attention_problems(self, device: str | None, dtype: str | None) -> Iterable[str]:
        if self.attention not in get_args(Attention):
            yield f"attention is {self.attention!r}; expected one of {', '.join(get_args(Attention))}"
        kind = (device or "cuda").partition(":")[0]
        if self.attention in NEEDS_CUDA and kind != "cuda":
            why = NEEDS_CUDA[self.attention]
            yield f"attention is {self.attention!r} on {kind}; expected a CUDA device ({why}), or attention='sdpa'"
        if self.attention == "flash" and dtype is not None and dtype not in HALF:
            yield f"attention is 'flash' with products in {dtype}; expected Model(autocast='bfloat16'), or attention='sdpa'"
