"""A transformers model as the engine sees it: a trunk that gives hidden states, and a head that gives log-probs.

What can be used of a model is found out by trying, never from its name. A *probe* runs a handful of tokens through the
model as it is, and through the quick paths. Those that agree are used:

* packed rows, where rows do not leak into each other (a state-space or convolution layer would leak);
* attention without padding, where the strategy allows or asks for it;
* the head on selected positions in slices, where logits are a linear head followed by a known scale or soft cap.

Else rows are padded, or the model computes its logits itself; both are slower, neither is wrong.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.batches import Sequences, Spans
from flowrl.compiler.strategy import Strategy
from flowrl.errors import ModelError
from flowrl.ragged import Ragged
from flowrl.runtime.engines.transformers_attention import (
    NAME,
    Backend,
    attention_implementation,
    configs_of,
    packed,
)
from flowrl.runtime.engines.transformers_backends import backend_of, relative_distance, tried
from flowrl.runtime.engines.transformers_head import LogitTransform, head_logprobs, token_logprobs
from flowrl.runtime.engines.transformers_layout import Layout, packed_layout, padded_layout

logger = logging.getLogger("flowrl")

#: Relative L2 distance that the probe takes for equal, by dtype of the weights.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}


@dataclass(frozen=True)
class Abilities:
    """What the probe found.

    Args:
        packs: rows may be packed, and our attention does what the model's does.
        backend: what computes attention over packed rows, after it was tried; None for "sdpa".
        transform: how the head's output becomes logits; None where the model must compute its logits itself.
    """

    packs: bool
    backend: Backend | None
    transform: LogitTransform | None


class Network:
    """A causal language model, or a trunk alone (of a critic).

    Args:
        module: the model; all its parameters are the Model's.
        autocast: dtype of matrix products in training and scoring; None for that of the weights.
        name: of the Model, for messages.
        strategy: how attention is computed.

    Raises:
        ModelError: attention is asked for that this machine or this precision cannot have.
    """

    def __init__(
        self, module: Any, *, autocast: torch.dtype | None, name: str, strategy: Strategy | None = None
    ) -> None:
        self.module = module
        self.autocast_dtype = autocast
        self.name = name
        #: Where passes are computed; parameters that are offloaded lie elsewhere between them.
        self.device = next(module.parameters()).device
        # No dropout, in training neither: two passes over the same rows must agree, or ratios are noise.
        module.eval()
        inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # inside of adapters
        self.trunk: Any = getattr(inner, "base_model", inner)
        self.head: Any = module.get_output_embeddings() if self.trunk is not module else None
        self.configs = configs_of(module)
        self.parameters_of_trunk = set(inspect.signature(self.trunk.forward).parameters)
        self.parameters_of_module = set(inspect.signature(module.forward).parameters)
        self.strategy = strategy or Strategy()
        self._backend = backend_of(self.strategy, self.device, self.compute_dtype, name)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of matrix products in training and scoring."""
        return self.autocast_dtype or self.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.module.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        """Token ids that have an embedding."""
        return int(self.module.get_input_embeddings().num_embeddings)

    @property
    def max_length(self) -> int | None:
        """Tokens that the model takes; None where it has no limit."""
        length = getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
        return int(length) if isinstance(length, int) and length > 0 else None

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """The precision and the attention of a forward pass."""
        packs = self.abilities.packs
        with contextlib.ExitStack() as stack:
            if packs:
                stack.enter_context(attention_implementation(self.configs, NAME))
            stack.enter_context(self._autocast())
            yield

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    # -- forward passes ---------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences) -> Layout:
        """The layout of a micro-batch that this model takes."""
        if not self.abilities.packs:
            return padded_layout(sequences, self.device)
        return _with_backend(packed_layout(sequences, self.device), self.abilities.backend)

    def hidden(self, layout: Layout) -> Tensor:
        """``[places, hidden]``: the last hidden state of every place of the layout. Call it under :meth:`compute`."""
        return self._run(self.trunk, self.parameters_of_trunk, layout)[0].flatten(0, 1)

    def logprobs(
        self, layout: Layout, hidden: Tensor | None, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """float32 ``[num_tokens]`` each: log-probs of the response tokens, and entropies where asked.

        Args:
            hidden: of :meth:`hidden`, where :attr:`computes_logits_here`.
        """
        transform = self.abilities.transform
        if transform is None:
            logits = self.full_logits(layout)
            return token_logprobs(logits, layout.targets, temperature=temperature, entropy=entropy)
        assert hidden is not None
        return head_logprobs(
            hidden[layout.predictors],
            self.head.weight,
            self.head.bias,
            layout.targets,
            transform=transform,
            dtype=self.compute_dtype,
            temperature=temperature,
            entropy=entropy,
        )

    @property
    def computes_logits_here(self) -> bool:
        """Whether log-probs come from hidden states; else the model computes its logits itself."""
        return self.abilities.transform is not None

    def _run(self, module: Any, parameters: set[str], layout: Layout, **more: Any) -> Any:
        inputs: dict[str, Any] = {"input_ids": layout.input_ids, "attention_mask": layout.attention_mask, **more}
        if "position_ids" in parameters:
            inputs["position_ids"] = layout.position_ids
        if "use_cache" in parameters:
            inputs["use_cache"] = False
        with packed(layout.pack) if layout.pack is not None else contextlib.nullcontext():
            return module(**inputs)

    def full_logits(self, layout: Layout) -> Tensor:
        """``[num_tokens, vocab]``, computed by the model as a whole."""
        if "logits_to_keep" in self.parameters_of_module and layout.pack is not None:
            output = self._run(self.module, self.parameters_of_module, layout, logits_to_keep=layout.predictors)
            return output.logits[0]
        output = self._run(self.module, self.parameters_of_module, layout)
        return output.logits.flatten(0, 1)[layout.predictors]

    # -- the probe --------------------------------------------------------------------------------------------------

    @cached_property
    def abilities(self) -> Abilities:
        """What of this model can be done the quick way."""
        # Layers that are compiled are not: what is tried here comes once, and there are few compilations of a function.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            packs = self._probe_packing()
            abilities = Abilities(packs, self._probe_backend(packs), self._probe_head())
        if not abilities.packs:
            logger.warning("%s: its attention cannot be packed; rows are padded instead (slower)", self.name)
        if abilities.transform is None and self.head is not None:
            logger.warning("%s: its logits are not a plain linear head; they are computed whole", self.name)
        return abilities

    @property
    def _tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, 5e-2)

    def _probe_packing(self) -> bool:
        if not getattr(self.trunk, "_supports_attention_backend", False):
            return False
        if "position_ids" not in self.parameters_of_trunk:
            return False
        sequences = _probe_sequences(self.vocab_size)
        layout = packed_layout(sequences, self.device)
        try:
            # Eager attention is written out in every model, and leaves out nothing.
            with attention_implementation(self.configs, "eager"):
                reference = torch.cat([self._plain_hidden(row) for row in sequences.tokens.rows()])
            with attention_implementation(self.configs, NAME):
                found = self.hidden(layout)
        except Exception as error:  # a model may refuse what others take, in any way it likes
            logger.debug("%s: packing fails with %r", self.name, error)
            return False
        assert layout.pack is not None
        places = torch.cat([bucket.places for bucket in layout.pack.buckets])
        real = _real_slots(sequences, layout)
        return relative_distance(found[places[real]], reference) <= self._tolerance

    def _probe_backend(self, packs: bool) -> Backend | None:
        backend, wanted = self._backend, self.strategy.attention
        if backend is None:
            return None
        if not packs:
            if wanted == "auto":
                return None
            raise ModelError(
                f"{self.name}: attention={wanted!r} cannot be used",
                expected="a model whose rows can be packed",
                received=f"{type(self.module).__name__}, whose rows are padded",
                do="use attention='sdpa' or 'auto'",
            )
        layout = packed_layout(_probe_sequences(self.vocab_size), self.device)

        def run(trial: Backend) -> None:
            with attention_implementation(self.configs, NAME), self._autocast():
                self.hidden(_with_backend(layout, trial))

        tolerance = TOLERANCE.get(self.compute_dtype, 5e-2)
        found, why = tried(backend, run, tolerance=tolerance, named=wanted != "auto", model=self.name)
        if found is None:
            logger.info("%s: %s attention is not used: %s", self.name, backend.name, why)
        return found

    def _probe_head(self) -> LogitTransform | None:
        if type(self.head) is not nn.Linear:
            return None
        row = _probe_sequences(self.vocab_size).tokens.row(0)
        logits = self.module(input_ids=row[None].to(self.device)).logits[0].float()
        hidden = self._plain_hidden(row)
        if hidden.shape[-1] != self.head.in_features:
            return None
        config = self.module.config.get_text_config()
        scales = [1.0]
        if divisor := getattr(config, "logits_scaling", None):
            scales.append(1.0 / divisor)
        scales += [s for n in ("logit_scale", "lm_head_multiplier") if (s := getattr(config, n, None))]
        caps = [None, *([c] if (c := getattr(config, "final_logit_softcapping", None)) else [])]
        for transform in (LogitTransform(float(s), c) for s in scales for c in caps):
            if relative_distance(transform(self.head(hidden).float()), logits) <= self._tolerance:
                return transform
        return None

    def _plain_hidden(self, row: Tensor) -> Tensor:
        """``[length, hidden]`` of one row, the model being called as anybody would."""
        return self.trunk(input_ids=row[None].to(self.device))[0][0]


def _probe_sequences(vocab: int) -> Sequences:
    """Three short rows of two prompts, the same for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocab, (n,), generator=generator) for n in (5, 3)]
    responses = [torch.randint(0, vocab, (n,), generator=generator) for n in (4, 2, 6)]
    rows = [torch.cat([prompts[p], r]) for p, r in zip((0, 0, 1), responses, strict=True)]
    return Sequences(
        prompt_id=torch.tensor([0, 0, 1]),
        sample_id=torch.tensor([0, 1, 0]),
        tokens=Ragged.from_rows(rows),
        spans=Spans.prompt_then_response(torch.tensor([5, 5, 3]), torch.tensor([4, 2, 6]), 0),
    )


def _real_slots(sequences: Sequences, layout: Layout) -> Tensor:
    """Bool ``[slots]`` of a pack of one bucket: True at tokens, False at padding."""
    assert layout.pack is not None and len(layout.pack.buckets) == 1
    length = layout.pack.buckets[0].length
    return (torch.arange(length) < sequences.tokens.lengths[:, None]).flatten().to(layout.input_ids.device)


def _with_backend(layout: Layout, backend: Backend | None) -> Layout:
    assert layout.pack is not None
    return layout if backend is None else replace(layout, pack=replace(layout.pack, backend=backend))
