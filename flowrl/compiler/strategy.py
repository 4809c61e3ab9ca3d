"""How a Model is held over the ranks of a mesh: settings of a plan, never of a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

Sharding = Literal["full", "optimizer", "none", "hybrid"]
Checkpointing = Literal["none", "layers", "offload"]
Attention = Literal["auto", "sdpa", "flex", "flash"]

#: Attention that needs CUDA, and why.
NEEDS_CUDA = {
    "flash": "its kernels are written for it",
    "flex": "elsewhere torch's flex_attention has no backward pass",
}
HALF = ("bfloat16", "float16")


def is_whole(value: Any, least: int) -> bool:
    """Whether a setting is a whole number, at least ``least``; True and 2.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Strategy:
    """How a Model is held over ranks. What cannot work is said by :meth:`problems`; ``compile`` raises it.

    Args:
        tensor_parallel: ranks that share each layer (Megatron-LM, arXiv 1909.08053); all others are data parallel.
        pipeline_parallel: stages of consecutive layers (GPipe, arXiv 1811.06965); no engine of today runs more than one.
        sharding: over the data-parallel ranks (ZeRO, arXiv 1910.02054, by torch's FSDP2). "full": parameters, gradients and
            optimiser (ZeRO-3). "optimizer": parameters stay whole between forward and backward, all else is sharded
            (ZeRO-2). "none": everything on every rank, gradients are summed. "hybrid": "full" within ``shard_size`` ranks,
            replicated between.
        shard_size: ranks of a shard group of "hybrid".
        shard_layers: names of module classes that are sharded each for itself, none within another; empty takes the model's
            own layers.
        cpu_offload: parameters, gradients and optimiser live in host memory, and are copied to the device when needed.
        activation_checkpointing: "layers" keeps only what goes into a layer, and computes the rest again; "offload" also
            moves that to host memory.
        compile_layers: ``torch.compile`` of each layer.
        attention: over rows of different lengths, in scoring and training. "sdpa": rows are padded within groups of similar
            length. "flash": flash attention's variable-length kernels, without padding; needs CUDA and 16-bit products.
            "flex": torch's flex_attention, each shared prompt once; needs CUDA. "auto": flash where it can be used, else sdpa.

    Example::

        flowrl.run(flow, data, 100, runtime="spmd", strategies={actor: Strategy(tensor_parallel=2)}, strategy=Strategy())
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sharding: Sharding = "full"
    shard_size: int | None = None
    shard_layers: tuple[str, ...] = ()
    cpu_offload: bool = False
    activation_checkpointing: Checkpointing = "none"
    compile_layers: bool = False
    attention: Attention = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.shard_layers, list):  # as JSON has it; a Strategy can be hashed and compared
            object.__setattr__(self, "shard_layers", tuple(self.shard_layers))

    def problems(
        self, num_ranks: int | None = None, *, device: str | None = None, dtype: str | None = None
    ) -> Iterable[str]:
        """Settings that cannot work, a sentence each.

        Args:
            num_ranks: where given, also what does not fit those.
            device: where given, also what does not run on it.
            dtype: of matrix products; where given, also what does not compute in it.
        """
        wrong = {name: text for name, text in self._setting_problems()}
        yield from wrong.values()
        if "attention" not in wrong:
            yield from self._attention_problems(device, dtype)
        if "sharding" in wrong:
            return
        if "shard_size" not in wrong and (self.sharding == "hybrid") != (self.shard_size is not None):
            yield f"shard_size is {self.shard_size} with sharding={self.sharding!r}; expected a number with 'hybrid' alone"
        if self.cpu_offload is True and self.sharding == "none":
            yield "cpu_offload is True with sharding='none'; expected a sharding, which moves parameters when needed"
        if num_ranks is not None and "tensor_parallel" not in wrong:
            data_parallel, rest = divmod(num_ranks, self.tensor_parallel)
            if rest:
                yield f"tensor_parallel is {self.tensor_parallel}; expected a divisor of the {num_ranks} ranks"
            elif "shard_size" not in wrong and self.shard_size and data_parallel % self.shard_size:
                yield f"shard_size is {self.shard_size}; expected a divisor of the {data_parallel} data-parallel ranks"

    def _setting_problems(self) -> Iterator[tuple[str, str]]:
        """(name, sentence) of each setting that is by itself none that can be meant."""
        for name in ("tensor_parallel", "pipeline_parallel"):
            if not is_whole(getattr(self, name), 1):
                yield name, f"{name} is {getattr(self, name)!r}; expected a whole number, at least 1"
        if self.shard_size is not None and not is_whole(self.shard_size, 1):
            yield "shard_size", f"shard_size is {self.shard_size!r}; expected a whole number, at least 1, or None"
        choices = {"sharding": Sharding, "activation_checkpointing": Checkpointing, "attention": Attention}
        for name, kind in choices.items():
            value, known = getattr(self, name), get_args(kind)
            if not isinstance(value, str) or value not in known:
                yield name, f"{name} is {value!r}; expected one of {', '.join(known)}"
        for name in ("cpu_offload", "compile_layers"):
            if not isinstance(getattr(self, name), bool):
                yield name, f"{name} is {getattr(self, name)!r}; expected True or False"
        names: Any = self.shard_layers
        if isinstance(names, str):
            yield "shard_layers", f"shard_layers is {names!r}; expected a tuple of names: ({names!r},)"
        elif not isinstance(names, tuple) or not all(isinstance(n, str) and n for n in names):
            yield "shard_layers", f"shard_layers is {names!r}; expected a tuple of names of module classes"

    def _attention_problems(self, device: str | None, dtype: str | None) -> Iterable[str]:
        kind = (device or "cuda").partition(":")[0]
        if self.attention in NEEDS_CUDA and kind != "cuda":
            why = NEEDS_CUDA[self.attention]
            yield f"attention is {self.attention!r} on {kind}; expected a CUDA device ({why}), or attention='sdpa'"
        if self.attention == "flash" and dtype is not None and dtype not in HALF:
            yield f"attention is 'flash' with products in {dtype}; expected Model(autocast='bfloat16'), or attention='sdpa'"
