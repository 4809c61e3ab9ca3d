"""How many bytes a number of a Model takes, by what it is: what memory and traffic are counted with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flowrl.models import DerivedModel, Model

if TYPE_CHECKING:
    from flowrl.compiler.architecture import Architecture
    from flowrl.compiler.work import Work
    from flowrl.models import BaseModel

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Of a quantised weight: 4 or 8 bits, and a float32 scale for each block of 64 (nf4, bitsandbytes), each row (int8: nothing to
#: speak of) or a 16-bit scale and a zero for each 128 (GPTQ).
QUANTIZED_BYTES = {"nf4": 0.5 + 4 / 64, "int8": 1.0, "gptq": 0.5 + 2.5 / 128}


@dataclass(frozen=True)
class Precision:
    """Bytes of a number.

    Args:
        weights: of a parameter, as it stays between calls and passes multiply with it.
        compute: dtype of matrix products.
        gradients: of a trained parameter's gradient.
        optimizer: of all that the optimiser keeps of a trained parameter: two moments, and a master copy where the weights
            are none.
        residual: of a number in the residual stream.
        cast: of the copy of each weight that a pass makes to multiply with; 0 where it multiplies with the weights.
        cache: of a number in the key-value cache.
        adapter_parameters: of a Model with low-rank adapters, the numbers in these: they alone are trained, and are kept in
            float32. 0: everything is trained.
        fused: whether kernels are fused as Megatron-LM's are, and the parts of a layer between its matrix products are split
            over the tensor-parallel ranks (sequence parallelism, arXiv 2205.05198); else modules are those of transformers.
        logit_positions: tokens whose logits exist at once; 0 for all of a micro-batch.
        shares_prompts: whether rows of one prompt share its computation in scoring and training too.
    """

    weights: float = 4.0
    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    gradients: float = 4.0
    optimizer: float = 8.0
    residual: float = 4.0
    cast: float = 0.0
    cache: float = 4.0
    adapter_parameters: int = 0
    fused: bool = False
    logit_positions: int = 512
    shares_prompts: bool = False

    def computed_share(self, work: Work) -> float:
        """Of the tokens of all rows, those that a scoring or training pass computes: a prompt that is shared once."""
        group = work.group_size if self.shares_prompts else 1
        return (work.prompt_tokens / group + work.response_tokens) / (work.prompt_tokens + work.response_tokens)

    @property
    def activation(self) -> int:
        """Bytes of a number that a matrix product gives."""
        return BYTES[self.compute]

    @classmethod
    def of_model(cls, model: BaseModel, architecture: Architecture | None = None) -> Precision:
        """As the transformers engine holds a Model: weights, gradients and AdamW's two moments in ``dtype``, products in
        ``autocast``; of a Model with ``lora`` the base has neither gradients nor moments.

        Args:
            architecture: needed to count adapters and what is quantised.
        """
        base = model.base if isinstance(model, DerivedModel) else model
        assert isinstance(base, Model)
        held, product = BYTES[base.dtype], base.autocast or base.dtype
        adapters = 0
        if base.lora is not None and architecture is not None:
            targets = () if base.lora.target_modules == "all-linear" else tuple(base.lora.target_modules)
            adapters = architecture.adapter_parameters(base.lora.rank, targets)
        weights = float(held)
        if base.quantization is not None:
            packed = QUANTIZED_BYTES[base.quantization]
            weights = packed if architecture is None else _mean_bytes(architecture, packed, held)
        trained = BYTES[base.lora.dtype] if base.lora is not None else held
        return cls(
            weights=weights,
            compute=product,
            gradients=trained,
            optimizer=2 * trained,
            residual=held,
            cast=BYTES[product] if product != base.dtype and base.quantization is None else 0.0,
            cache=BYTES[product],
            adapter_parameters=adapters,
            shares_prompts=True,
        )

    @classmethod
    def mixed(cls, *, gradients: float = 4.0) -> Precision:
        """As Megatron-LM trains (arXiv 1710.03740; arXiv 1910.02054, §3.1): bfloat16 weights, gradients summed in float32, and
        float32 master weights and moments: 18 bytes a parameter."""
        return cls(2.0, "bfloat16", gradients, 12.0, 2.0, cache=2.0, fused=True, logit_positions=0)

    @classmethod
    def served(cls, dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16") -> Precision:
        """As an inference engine holds a Model: weights and cache in ``dtype``, nothing to train with."""
        size = float(BYTES[dtype])
        return cls(size, dtype, size, 0.0, size, cache=size, fused=True, logit_positions=0)


def _mean_bytes(architecture: Architecture, packed: float, held: float) -> float:
    """Of all parameters: linear layers of the trunk are quantised, embeddings, head and norms are not."""
    quantized = sum(p.size for p in architecture.parameters() if p.layer is not None and len(p.shape) == 2)
    total = architecture.num_parameters()
    return (quantized * packed + (total - quantized) * held) / total
