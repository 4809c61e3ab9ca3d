"""The transformers engine: any HuggingFace causal language model, on CPU and CUDA, as it is.

It samples with its own loop over a key-value cache, and scores and trains on packed rows without padding. What is
particular to one of these lives in a file of its own:

========================= =============================================================================
transformers_loading      names, folders, live objects, GGUF files
transformers_text         prompts to tokens
transformers_network      what of a model can be done the quick way, and doing it
transformers_attention    attention over packed rows
transformers_varlen       the same without padding: flash and flex attention
transformers_backends     which of these is used, after it was tried
transformers_forward      one pass over a micro-batch, and what is read from it
transformers_head         log-probs from hidden states, a slice at a time
transformers_distribution what needs the whole distribution at each token
transformers_layout       micro-batches and packing
transformers_sampling     generation
transformers_cache        the key-value cache of a generation
transformers_training     one optimiser step
transformers_state        weights, export
transformers_checkpoint   what a checkpoint holds
transformers_adapters     LoRA on a base that never changes
transformers_quantization bases that are held in fewer bits
transformers_merging      what others see of those two: ordinary weights
========================= =============================================================================

The module is always in eval mode, in training too: dropout would make the ratio of two passes over the same rows noise.
"""

from __future__ import annotations

import copy
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.batches import LogprobOrigin, Sequences
from flowrl.compiler.strategy import NEEDS_CUDA
from flowrl.errors import ModelError
from flowrl.models import AnyModel, DerivedModel, Frozen, Model
from flowrl.ragged import Ragged
from flowrl.runtime.engines import transformers_checkpoint as checkpoint
from flowrl.runtime.engines import transformers_state as state
from flowrl.runtime.engines import transformers_text as text
from flowrl.runtime.engines.base import EngineOptions, Generated, Saving, StepResult, TokenScores
from flowrl.runtime.engines.transformers_adapters import AdaptedNetwork, Adapter, adapted
from flowrl.runtime.engines.transformers_forward import Forward, Wanted, forward, joined
from flowrl.runtime.engines.transformers_layout import check_rows, micro_batch_rows
from flowrl.runtime.engines.transformers_loading import is_live, load_module, load_tokenizer, load_value_head, quiet
from flowrl.runtime.engines.transformers_network import Network
from flowrl.runtime.engines.transformers_sampling import check_prompts, generate
from flowrl.runtime.engines.transformers_shards import ParallelShards, Shards, lie_alike, shards_of
from flowrl.runtime.engines.transformers_training import train_step

if TYPE_CHECKING:
    from flowrl.nodes.loss import TermRows
    from flowrl.nodes.rollout import Sampling
    from flowrl.nodes.updater import AdamW

logger = logging.getLogger("flowrl")

#: The value head of a ValueModel, which has only this one.
OWN_HEAD = "value"


class TransformersEngine:
    """See :class:`flowrl.runtime.engines.base.Engine`.

    Args:
        model: the Model that it holds: itself, or one derived from ``settings``.
        settings: the Model whose dtype, autocast, tokenizer and source count.
        module: the network; trained in place.
        adapter: of the module, where the Model has one or is quantised: then the rest of the module never changes.
        shards: of the module, where another engine laid it over ranks.
    """

    def __init__(
        self,
        model: AnyModel,
        settings: Model,
        module: nn.Module,
        options: EngineOptions,
        *,
        adapter: Adapter | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.options = options
        self.micro_batch_tokens = options.micro_batch_tokens
        self.policy_version = 0
        self.optimizer_steps = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.heads: dict[str, nn.Linear] = {}
        self.restored = False
        autocast = None if settings.autocast is None else getattr(torch, settings.autocast)
        self.adapter = adapter
        held: dict[str, Any] = {"autocast": autocast, "name": model.name, "strategy": options.strategy}
        self.network = Network(module, **held) if adapter is None else AdaptedNetwork(module, adapter, **held)
        self.shards = shards or shards_of(self.network, options, model.name)
        if options.strategy.attention in NEEDS_CUDA:  # what the strategy names is tried at once, on all ranks
            with torch.no_grad():
                self.shards.run(lambda: self.network.abilities)
        self._tokenizer: Any = None
        if autocast is not None and self.network.device.type == "cpu" and not _cpu_multiplies(autocast):
            logger.warning(
                "%s: this CPU has no instructions for %s: autocast is several times slower than float32",
                model.name,
                settings.autocast,
            )

    # -- opening ----------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, model: Model, options: EngineOptions) -> TransformersEngine:
        """Load a Model.

        Raises:
            ModelError: see :func:`flowrl.runtime.engines.transformers_loading.load_module`, and where attention is asked for that
                cannot be had here.
            FlowError: a live model that is another one on another rank.
        """
        device = _device(model, options)
        module: Any = load_module(model, device)
        if options.ranks.size > 1 and is_live(model.source) and model.lora is None:
            module = copy.deepcopy(module)  # it is taken apart; what was given stays whole, and is not trained
        if model.quantization is None:  # what is quantised was loaded to its place
            module.to(device)
        adapter = adapted(model, module, options)
        if options.ranks.size > 1 and is_live(model.source):
            state.require_same(model, options.ranks)
        if not model.trainable:
            module.requires_grad_(False)
        engine = cls(model, model, module, options, adapter=adapter)
        if model.kind == "value":
            engine.add_value_head(OWN_HEAD)
        return engine

    def copy(self, model: DerivedModel, options: EngineOptions | None = None) -> TransformersEngine:
        """An engine of its own for a derived Model, with these weights, not trained. Where only an adapter changes, the base
        is shared, and a Frozen is that of step 0 whenever it is made."""
        options = options or self.options
        at_step_0 = isinstance(model, Frozen) and self.adapter is not None
        if self.adapter is not None:
            adapter = self.adapter.derived(model, self.shards, untrained=self.is_untrained)
            module = self.network.module
            other = TransformersEngine(model, self.settings, module, options, adapter=adapter, shards=self.shards)
        else:
            module = self._module_copy()
            module.requires_grad_(False)
            module.zero_grad(set_to_none=True)
            other = TransformersEngine(model, self.settings, module, options)
        other.policy_version = 0 if at_step_0 else self.policy_version
        other._tokenizer = self._tokenizer
        if self.settings.kind == "value":
            other.add_value_head(OWN_HEAD)
            if not at_step_0:
                other.heads[OWN_HEAD].load_state_dict(self.heads[OWN_HEAD].state_dict())
            other.heads[OWN_HEAD].requires_grad_(False)
        return other

    def _module_copy(self) -> Any:
        """The network's module with these weights, whole, on this rank."""
        module: Any = self.network.module
        if not isinstance(self.shards, ParallelShards):
            with torch.no_grad():
                return copy.deepcopy(module)
        with quiet(), torch.random.fork_rng(devices=[]):  # a new module draws random weights, which nobody reads
            new = type(module)(copy.deepcopy(module.config)).to(self.network.device)
        whole = {name: self.shards.whole(t) for name, t in module.state_dict().items()}
        for name, parameter in new.named_parameters():  # buffers keep the precision that the class gives them
            parameter.data = parameter.data.to(whole[name].dtype)
        new.load_state_dict(whole)
        if hasattr(module, "generation_config"):
            new.generation_config = copy.deepcopy(module.generation_config)
        return new

    @property
    def is_untrained(self) -> bool:
        """Whether the weights are still those of step 0."""
        return self.policy_version == 0 and self.optimizer_steps == 0 and not self.restored

    # -- text -------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The live tokenizer, loaded at first use.

        Raises:
            ModelError: there is none.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.settings)
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except ModelError:
            return False

    def encode(self, messages: Sequence[Any]) -> Ragged:
        return text.encode(self, messages)

    def decode(self, tokens: Ragged) -> tuple[str, ...]:
        return tuple(self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens.to_lists())

    def stop_token_ids(self, sampling: Sampling) -> tuple[int, ...]:
        """Tokens that end a response."""
        return text.stop_token_ids(self, sampling)

    # -- sampling and scoring ---------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int | None:
        return self.network.max_length

    def origin(self, sampling: Sampling | None = None, temperature: float = 1.0) -> LogprobOrigin:
        cut: dict[str, Any] = {} if sampling is None else {n: getattr(sampling, n) for n in ("top_p", "top_k", "min_p")}
        return LogprobOrigin(
            model=self.model.name,
            policy_version=self.policy_version,
            engine="transformers",
            dtype=self.settings.autocast or self.settings.dtype,
            temperature=temperature if sampling is None else sampling.temperature,
            **cut,
        )

    def generate(self, prompts: Ragged, keys: Sequence[int], sampling: Sampling) -> Generated:
        """See the protocol.

        Raises:
            DataError: a prompt that is empty, too long, or has a token that the model does not know.
            UnsupportedError: a model without a key-value cache.
        """
        check_prompts(self.network, prompts)
        stop = self.stop_token_ids(sampling)

        def of(rows: list[int]) -> Generated:
            part = prompts.select(torch.tensor(rows, dtype=torch.int64))
            return generate(self.network, part, [keys[i] for i in rows], sampling, stop)

        # Each rank samples its rows to their end: how many passes that takes differs.
        shares = [list(part) for part in np.array_split(np.arange(prompts.num_rows), self.shards.dp_size)]
        with self.shards.whole_weights():
            parts = self.shards.gather([s for s in shares if len(s)], lambda rows: self.shards.run(lambda: of(rows)))
        if not parts:
            return of([])
        return Generated(
            Ragged.concat([p.tokens for p in parts]),
            Ragged.concat([p.logprobs for p in parts]),
            torch.cat([p.finish_reason for p in parts]),
        )

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequences,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> TokenScores:
        wanted = Wanted(temperature or 1.0, logprobs=True, entropy=entropy, sum_pi_squared=sum_pi_squared)
        parts = self._forwards(sequences, wanted)
        column = sequences.response_tokens.with_values
        return TokenScores(
            column(joined([p.logprobs for p in parts])),
            column(joined([p.entropy for p in parts])) if entropy else None,
            column(joined([p.sum_pi_squared for p in parts])) if sum_pi_squared else None,
        )

    @torch.no_grad()
    def top_logprobs(self, sequences: Sequences, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        if k > self.network.vocab_size:
            raise ModelError(
                f"{self.model!r} has no {k} tokens to choose from",
                expected=f"k of at most {self.network.vocab_size}, its vocabulary",
                received=k,
                do="choose a smaller k",
            )
        parts = [p.top for p in self._forwards(sequences, Wanted(temperature or 1.0, top_k=k)) if p.top is not None]
        if not parts:
            return torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k)
        return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])

    @torch.no_grad()
    def values(self, sequences: Sequences, head: str | None = None) -> Ragged:
        name = self.head_name(head)
        parts = self._forwards(sequences, Wanted(heads=(name,)))
        return sequences.response_tokens.with_values(joined([p.values[name] for p in parts]))

    @torch.no_grad()
    def score(self, sequences: Sequences) -> Tensor:
        return joined([p.scores for p in self._forwards(sequences, Wanted(scores=True))])

    def _forwards(self, sequences: Sequences, wanted: Wanted) -> list[Forward]:
        """Of each micro-batch, on every rank."""
        return self.shards.gather(
            self._micro_batches(sequences), lambda rows: forward(self, sequences.select(rows), wanted)
        )

    def _micro_batches(self, sequences: Sequences) -> list[Tensor]:
        check_rows(sequences, self.max_length, self.network.vocab_size)
        return [torch.tensor(rows) for rows in micro_batch_rows(sequences, self.micro_batch_tokens)]

    # -- training ---------------------------------------------------------------------------------------------------

    def train_step(self, terms: Sequence[TermRows], optimizer: AdamW, *, max_grad_norm: float | None) -> StepResult:
        if not self.trained_parameters():
            raise ModelError(
                f"{self.model!r} is not trainable",
                expected="a Model with trainable=True",
                received="an optimiser step",
                do="train the Model that it was made from",
            )
        return train_step(self, terms, optimizer, max_grad_norm=max_grad_norm)

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that an optimiser step changes, by name, value heads included."""
        return [(n, p) for n, p in state.live_tensors(self).items() if isinstance(p, nn.Parameter) and p.requires_grad]

    def torch_optimizer(self, settings: AdamW) -> torch.optim.Optimizer:
        """The optimiser, made at the first step, with these settings and all parameters that are trained now."""
        parameters = [p for _, p in self.trained_parameters()]
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]} if self.optimizer else set()
        for new in self.shards.together([p for p in parameters if id(p) not in known]):  # a head may come later
            if self.optimizer is None:
                fused = self.network.device.type in ("cpu", "cuda") and not isinstance(self.shards, ParallelShards)
                self.optimizer = torch.optim.AdamW(new, fused=fused)
            else:
                self.optimizer.add_param_group({"params": new})
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group.update(betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        return self.optimizer

    def complete_version(self) -> None:
        self.policy_version += 1

    def add_value_head(self, name: str) -> None:
        """Put a value head of zeros on the trunk, trained with it; nothing happens where it is there already."""
        if name in self.heads:
            return
        head = nn.Linear(self.network.hidden_size, 1, device=self.network.device, dtype=torch.float32)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        head.requires_grad_(self.settings is self.model and self.settings.trainable)
        load_value_head(self.settings, name, head)
        self.heads[name] = head

    def head_name(self, head: str | None) -> str:
        name = head or (OWN_HEAD if self.settings.kind == "value" else "")
        if name not in self.heads:
            raise ModelError(
                f"{self.model!r} has no value head {name!r}",
                expected="a ValueModel, or a ValueHead on this Model",
                received=f"heads {sorted(self.heads)}",
                do="use ValueHead(model) in the flow, or a ValueModel",
            )
        return name

    # -- weights ----------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return state.weights(self)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Of a Model with an adapter, names and CPU copies of what is trained: the adapter, heads. It is what
        :meth:`load_weights` of such a Model takes, since :meth:`weights` has the adapter added to the base."""
        return state.own_weights(self)

    def load_weights(self, weights: Mapping[str, Tensor], *, policy_version: int) -> None:
        state.load_weights(self, weights)
        self.policy_version = policy_version
        self.restored = True

    @torch.no_grad()
    def average(self, base: TransformersEngine, decay: float) -> None:
        """``self = decay * self + (1 - decay) * base``; buffers that are no floats are copied."""
        theirs = state.live_tensors(base)
        for name, mine in state.live_tensors(self).items():
            other = theirs[name]
            if not lie_alike(mine, other):  # held in another way, as a copy of an adapter is: whole
                whole, other = base.shards.whole(other), torch.zeros_like(mine)
                self.shards.place(other, whole)
            if mine.is_floating_point():
                mine.lerp_(other.to(mine), 1 - decay)
            else:
                mine.copy_(other)
        self.policy_version = base.policy_version

    def saving(self, *, copy: bool) -> Saving:
        return checkpoint.saving(self, copy=copy)

    def save(self, folder: Path) -> None:
        self.saving(copy=False)(folder, self.options.ranks)

    def load(self, folder: Path) -> None:
        checkpoint.load(self, folder)
        self.restored = True

    def export(self, folder: Path) -> None:
        state.export(self, folder)

    def close(self) -> None:
        """Free the weights. A live model stays its owner's."""
        self.optimizer = None
        self.heads = {}
        if self.adapter is not None:
            self.adapter.close()
        del self.network
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _device(model: Model, options: EngineOptions) -> torch.device:
    named = model.device or options.device
    return torch.device(named or ("cuda" if torch.cuda.is_available() else "cpu"))


def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for matrix products of half precision. Only asked of x86."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    found = torch.cpu.get_capabilities()
    names = ("amx_bf16", "avx512_bf16") if dtype == torch.bfloat16 else ("amx_fp16", "avx512_fp16")
    return any(found.get(name) for name in names)
