"""One forward pass over a micro-batch: everything that scoring and training may want of it, from one trunk pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.batches import Sequences
from flowrl.errors import ModelError, UnsupportedError
from flowrl.functional.divergence import divergence
from flowrl.nodes.loss import Divergence
from flowrl.runtime.engines.transformers_distribution import Distributions
from flowrl.runtime.engines.transformers_layout import padded_layout

if TYPE_CHECKING:
    from flowrl.runtime.engines.transformers import TransformersEngine


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is asked of a forward pass.

    Args:
        temperature: of the log-probs and of all that follows from the distribution.
        logprobs, entropy, sum_pi_squared: of the response tokens.
        heads: value heads to read; "" is a ValueModel's own.
        scores: a reward model's, of the whole sequences.
        divergences: to other Models.
        candidates: int64 ``[num_tokens, k]`` each: tokens whose log-probs are asked.
        top_k: the most likely tokens of each position; 0 for none.
    """

    temperature: float = 1.0
    logprobs: bool = False
    entropy: bool = False
    sum_pi_squared: bool = False
    heads: tuple[str, ...] = ()
    scores: bool = False
    divergences: tuple[Divergence, ...] = ()
    candidates: tuple[Tensor, ...] = ()
    top_k: int = 0

    @property
    def distributions(self) -> bool:
        """Whether something needs the whole distribution at each token."""
        return bool(self.sum_pi_squared or self.divergences or self.candidates or self.top_k)


@dataclass
class Forward:
    """What one micro-batch gives, float32 on the CPU, with gradient where torch's grad mode is on: ``[num_tokens]`` each,
    ``scores`` ``[num_rows]``, ``candidates`` ``[num_tokens, k]``, ``top`` (int64 ids, log-probs) of that shape."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    scores: Tensor | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    divergences: dict[Divergence, Tensor] = field(default_factory=dict)
    candidates: list[Tensor] = field(default_factory=list)
    top: tuple[Tensor, Tensor] | None = None

    def columns(self) -> list[Tensor]:
        """Everything that may carry a gradient."""
        plain = (self.logprobs, self.entropy, self.scores)
        return [
            t for t in (*plain, *self.values.values(), *self.divergences.values(), *self.candidates) if t is not None
        ]


def forward(engine: TransformersEngine, sequences: Sequences, wanted: Wanted) -> Forward:
    """Run one micro-batch; all ranks of the network run one at the same time.

    Raises:
        ModelError: a value head that is not there, or a divergence to a Model of another vocabulary.
        UnsupportedError: scores of a Model that is no reward model.
    """
    return engine.shards.run(lambda: _forward(engine, sequences, wanted))


def _forward(engine: TransformersEngine, sequences: Sequences, wanted: Wanted) -> Forward:
    network, out = engine.network, Forward()
    layout = network.layout(sequences)
    head = _score_head(engine) if wanted.scores else None
    from_hidden = (wanted.logprobs or wanted.distributions) and network.computes_logits_here
    with network.compute():
        hidden = network.hidden(layout) if wanted.heads or from_hidden or head is not None else None
        if wanted.logprobs:
            out.logprobs, out.entropy = network.logprobs(
                layout, hidden, temperature=wanted.temperature, entropy=wanted.entropy
            )
        if wanted.distributions:
            _read_distributions(out, Distributions(network, layout, hidden, wanted.temperature), sequences, wanted)
        if head is not None:  # at the last token by length: padding may look like any token
            assert hidden is not None
            out.scores = head(hidden[layout.last]).float()[:, 0].clone()
    if wanted.scores and head is None:
        out.scores = _padded_scores(engine, sequences)
    if wanted.heads:
        assert hidden is not None
        predicting = hidden[layout.predictors].float()
        # What a pass returns is no view: FSDP hooks into its gradient, and an operation in place would lose the hook.
        out.values = {
            name: engine.heads[engine.head_name(name)](predicting)[:, 0].clone().cpu() for name in wanted.heads
        }
    for name in ("logprobs", "entropy", "sum_pi_squared", "scores"):
        if (value := getattr(out, name)) is not None:
            setattr(out, name, value.cpu())
    return out


def _read_distributions(out: Forward, mine: Distributions, sequences: Sequences, wanted: Wanted) -> None:
    device = mine.device
    if wanted.sum_pi_squared:
        out.sum_pi_squared = mine.map(lambda logprobs: (2 * logprobs).exp().sum(-1))
    for spec in wanted.divergences:
        theirs = _of_other(spec, sequences, wanted.temperature)
        if theirs.vocab_size != mine.vocab_size:
            raise ModelError(
                f"A divergence to {spec.model!r} cannot be taken",
                expected=f"a Model with the same vocabulary, {mine.vocab_size} tokens",
                received=f"one with {theirs.vocab_size}",
                do="take a teacher or reference of the same family",
            )
        compare = functools.partial(divergence, kind=spec.kind, beta=spec.beta)
        out.divergences[spec] = mine.map(compare, theirs).cpu()
    for ids in wanted.candidates:
        if ids.numel() and int(ids.max()) >= mine.vocab_size:
            raise ModelError(
                "A teacher's tokens are not in the student's vocabulary",
                expected=f"token ids below {mine.vocab_size}",
                received=int(ids.max()),
                do="take a teacher of the same family, with the same tokenizer",
            )
        out.candidates.append(mine.map(lambda logprobs, ids: logprobs.gather(1, ids), ids.to(device)).cpu())
    if wanted.top_k:
        parts = mine.map(lambda logprobs: torch.cat(_top(logprobs, wanted.top_k), dim=-1)).cpu()
        ids, logprobs = parts.split(wanted.top_k, dim=-1)
        out.top = ids.to(torch.int64), logprobs.float()


def _top(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """float64 ids, which hold any token id exactly, and log-probs."""
    values, ids = logprobs.topk(k, dim=-1)
    return ids.double(), values.double()


def _of_other(spec: Divergence, sequences: Sequences, temperature: float) -> Distributions:
    """The distributions of the other Model for the same tokens, without gradient."""
    other: Any = spec.model.bound_engine()
    network = other.network

    def distributions() -> Distributions:
        layout = network.layout(sequences)  # at the first pass it probes the network, which only a pass may
        with torch.no_grad(), network.compute():
            hidden = network.hidden(layout) if network.computes_logits_here else None
            return Distributions(network, layout, hidden, temperature)

    with torch.no_grad():
        return other.shards.run(distributions, stays=True)  # its head is read when the losses are


def _score_head(engine: TransformersEngine) -> nn.Linear | None:
    """The head of a reward model that is a plain layer on the trunk."""
    if engine.settings.kind != "reward":
        raise UnsupportedError(f"{engine.model!r} scores no sequences", expected="a RewardModel")
    head = getattr(engine.network.module, "score", None)
    return head if isinstance(head, nn.Linear) else None


def _padded_scores(engine: TransformersEngine, sequences: Sequences) -> Tensor:
    """float32 ``[num_rows]`` of a classifier of another make, which is called as anybody would."""
    layout = padded_layout(sequences, engine.network.device)
    with engine.network.compute():
        logits = engine.network.module(input_ids=layout.input_ids, attention_mask=layout.attention_mask).logits
    return logits.float().reshape(sequences.num_rows, -1)[:, 0].clone()


def joined(parts: Sequence[Tensor | None]) -> Tensor:
    """The column of all micro-batches."""
    return torch.cat([p for p in parts if p is not None]) if parts else torch.zeros(0)
