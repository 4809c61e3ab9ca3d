"""The engine protocol: what a node may ask of the thing that holds a Model's weights.

Every engine speaks batches: ragged columns in, ragged columns in response layout out. Padding, packing, sharding and
devices are its own business. All returned tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.batches import LogprobOrigin, Sequences
from flowrl.compiler.strategy import Strategy
from flowrl.ragged import Ragged
from flowrl.runtime.ranks import ONE_RANK, Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.nodes.loss import TermRows
    from flowrl.nodes.rollout import Sampling
    from flowrl.nodes.updater import AdamW


@dataclass(frozen=True)
class Generated:
    """Sampled responses, one row a prompt given.

    Args:
        tokens: int64 ragged, the response tokens, a sampled stop token included.
        logprobs: float32 ragged, of each token under the distribution that it was sampled from.
        finish_reason: uint8 ``[num_rows]``, a ``FinishReason``.
    """

    tokens: Ragged
    logprobs: Ragged
    finish_reason: Tensor


@dataclass(frozen=True)
class TokenScores:
    """float32 ragged columns in response layout; values at observations mean nothing but are finite."""

    logprobs: Ragged
    entropy: Ragged | None = None
    sum_pi_squared: Ragged | None = None


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step did.

    Args:
        sums: by metric name, (sum, count) over all rows of the step; the mean is their quotient.
        grad_norm: L2 norm over all trained parameters before clipping.
        learning_rate: that the step used.
        skipped: whether the step was left out because a loss or a gradient was not finite.
        nonfinite_rows: (prompt_id, sample_id) of the rows to blame, when skipped.
    """

    sums: Mapping[str, tuple[float, float]]
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    nonfinite_rows: tuple[tuple[int, int], ...] = ()


#: Writes an engine into an existing empty folder: ``saving(folder, ranks)``. All ranks call it, from any thread; they talk to
#: each other over the group of ``ranks`` alone.
Saving = Callable[[Path, Ranks], None]


class Engine(Protocol):
    """Holds the weights of one Model (and the value heads on it) and works on batches."""

    policy_version: int

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and response together that the model takes; None where there is no limit."""
        ...

    def origin(self, sampling: Sampling | None = None, temperature: float = 1.0) -> LogprobOrigin:
        """The provenance of log-probs that it would give now."""
        ...

    def encode(self, messages: Sequence[Any]) -> Ragged:
        """int64 ragged token ids of prompts: a text as it is, a list of chat messages through the chat template
        with the generation prompt."""
        ...

    def decode(self, tokens: Ragged) -> tuple[str, ...]:
        """The text of each row, special tokens left out."""
        ...

    def generate(self, prompts: Ragged, keys: Sequence[int], sampling: Sampling) -> Generated:
        """Sample one response a row. ``keys[i]`` (128 bits) is the random stream of row i: the result of a row depends on
        its prompt, its key and the settings alone, up to floating-point effects of batching."""
        ...

    def logprobs(
        self,
        sequences: Sequences,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> TokenScores:
        """Log-probs of the response tokens, no gradient. ``temperature`` divides the logits."""
        ...

    def top_logprobs(self, sequences: Sequences, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The ``k`` most likely tokens at each response token, and their log-probs: int64 and float32
        ``[num_tokens, k]``, no gradient."""
        ...

    def values(self, sequences: Sequences, head: str | None = None) -> Ragged:
        """float32 ragged, response layout: the value before each token. ``head`` names a ValueHead on this Model."""
        ...

    def score(self, sequences: Sequences) -> Tensor:
        """float32 ``[num_rows]``: a reward model's score of each whole sequence."""
        ...

    def train_step(self, terms: Sequence[TermRows], optimizer: AdamW, *, max_grad_norm: float | None) -> StepResult:
        """One optimiser step over the rows of all terms, in micro-batches. Each term's summed loss is divided by its count
        over the whole step before it is differentiated, so the split into micro-batches does not matter."""
        ...

    def complete_version(self) -> None:
        """A writer finished one call: ``policy_version`` grows by one."""
        ...

    def add_value_head(self, name: str) -> None:
        """Put a value head of zeros on the trunk, trained with it."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and detached CPU float tensors of all parameters and persistent buffers, heads included.

        Of a Model with ``lora`` or ``quantization`` they are those of an ordinary one: under the base's names, the adapter
        added and nothing quantised. :meth:`load_weights` of such an engine takes what changes alone, which engines that
        have adapters give as ``adapter_weights()``."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], *, policy_version: int) -> None:
        """Replace all weights (of a Model with ``lora`` the adapter's and the heads'); refuses missing, unknown and
        misshapen names before it changes any."""
        ...

    def saving(self, *, copy: bool) -> Saving:
        """What writes weights, optimiser and version, as they are now, for :meth:`load`.

        Args:
            copy: whether it keeps a copy in host memory, and so may write while training goes on; else it must be called
                before anything changes.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write into an existing empty folder what :meth:`saving` would, now. All ranks of the run call it."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what :meth:`saving` wrote, bit for bit, whatever ranks and sharding it was written by."""
        ...

    def export(self, folder: Path) -> None:
        """Write a HuggingFace directory: model and tokenizer."""
        ...

    def close(self) -> None:
        """Free the weights."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """What a plan decides for an engine.

    Args:
        micro_batch_tokens: the token budget of one forward pass when training or scoring.
        device: "cpu", "cuda", …; None takes the machine's best.
        strategy: how the Model is held over the ranks of the run.
        ranks: this process among them.
    """

    micro_batch_tokens: int = 4096
    device: str | None = None
    strategy: Strategy = field(default_factory=Strategy)
    ranks: Ranks = field(default_factory=lambda: ONE_RANK)


def micro_batches(lengths: Tensor, budget: int) -> list[list[int]]:
    """Rows in order, cut greedily into micro-batches of at most ``budget`` tokens; a longer row goes alone.

    Args:
        lengths: int64 ``[num_rows]``, tokens of each row.
    """
    batches: list[list[int]] = []
    used = 0
    for row, length in enumerate(lengths.tolist()):
        if batches and batches[-1] and used + length <= budget:
            batches[-1].append(row)
            used += length
        else:
            batches.append([row])
            used = length
    return batches
