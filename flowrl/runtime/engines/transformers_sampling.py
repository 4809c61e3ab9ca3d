"""Sampling with a key-value cache: prompts padded on the left, one row a response.

Each row draws from a random stream of its own, so its tokens do not depend on which rows it shares a batch with, up to
floating-point effects. Log-probs are taken where a token is drawn, in float32, under the distribution it is drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flowrl.batches import FinishReason
from flowrl.errors import DataError, UnsupportedError
from flowrl.ragged import Ragged
from flowrl.runtime.engines.base import Generated
from flowrl.runtime.engines.transformers_cache import new_cache
from flowrl.runtime.engines.transformers_network import Network

if TYPE_CHECKING:
    from flowrl.nodes.rollout import Sampling

#: Bytes that the key-value cache of one batch of rows may take, by kind of device. A constant, not a share of what is
#: free: the same rows form the same batches on every machine of a kind.
CACHE_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}
#: Rows of one batch at most.
MAX_ROWS = 512
#: Finished rows leave the batch when they are at least this share of it: leaving copies the cache.
LEAVE_SHARE = 0.25
#: Of a distribution cut by top-p, how many of the largest probabilities are sorted before all of them are.
NUCLEUS = 512


def generate(
    network: Network, prompts: Ragged, keys: Sequence[int], sampling: Sampling, stop_token_ids: Sequence[int]
) -> Generated:
    """Sample one response a row; see :meth:`flowrl.runtime.engines.base.Engine.generate`.

    The prompts are some that :func:`check_prompts` lets pass.
    """
    rows = prompts.num_rows
    responses: list[Tensor] = []
    logprobs: list[Tensor] = []
    finish_reason = torch.full((rows,), FinishReason.LENGTH, dtype=torch.uint8)
    with torch.no_grad(), cached_casts(network), network.compute():
        for part in _batches(prompts.lengths.tolist(), sampling.max_new_tokens, network):
            batch = _Batch(network, [prompts.row(i) for i in part], [keys[i] for i in part], sampling, stop_token_ids)
            batch.run()
            for row, i in enumerate(part):
                length = int(batch.lengths[row])
                responses.append(batch.tokens[row, :length])
                logprobs.append(batch.logprobs[row, :length])
                if batch.stopped[row]:
                    finish_reason[i] = FinishReason.STOP
    tokens = Ragged.from_rows(responses, torch.int64)
    return Generated(tokens, Ragged.from_rows(logprobs, torch.float32), finish_reason)


def check_prompts(network: Network, prompts: Ragged) -> None:
    """Refuse what cannot be sampled from. Over ranks it is asked of all rows, before they are dealt out: a rank that raised
    alone would leave the others waiting.

    Raises:
        DataError: an empty prompt, one that leaves no room for a token, or one with a token that the model does not know.
        UnsupportedError: a model without a key-value cache.
    """
    if network.head is None or "past_key_values" not in network.parameters_of_module:
        raise UnsupportedError(
            f"{network.name} cannot be sampled from by the transformers engine",
            expected="a causal language model with a key-value cache",
            received=type(network.module).__name__,
        )
    unknown = (prompts.values < 0) | (prompts.values >= network.vocab_size)
    if bool(unknown.any()):
        place = int(unknown.nonzero()[0])
        raise DataError(
            f"The prompt of row {int(prompts.row_of_value[place])} has a token that the model does not know",
            expected=f"token ids from 0 to {network.vocab_size - 1}",
            received=int(prompts.values[place]),
            do="use the model's own tokenizer",
        )
    max_length = network.max_length
    for row, length in enumerate(prompts.lengths.tolist()):
        if length == 0:
            raise DataError(
                f"The prompt of row {row} is empty",
                expected="at least one token",
                received="none",
                do="start the prompt with the model's beginning-of-sequence token",
            )
        if max_length is not None and length >= max_length:
            raise DataError(
                f"The prompt of row {row} is longer than the model takes",
                expected=f"at most {max_length - 1} tokens, so that one can follow",
                received=f"{length}",
                do="shorten or filter the prompts, or take a model with a longer context",
            )


def _batches(lengths: Sequence[int], max_new_tokens: int, network: Network) -> Iterator[list[int]]:
    """Rows in order, cut so that the cache of each batch fits."""
    budget = CACHE_BYTES.get(network.device.type, CACHE_BYTES["cuda"]) // _cache_bytes_per_token(network)
    part: list[int] = []
    longest = 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if part and ((longest + max_new_tokens) * (len(part) + 1) > budget or len(part) == MAX_ROWS):
            yield part
            part, longest = [], length
        part.append(row)
    if part:
        yield part


def _cache_bytes_per_token(network: Network) -> int:
    config = network.module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    dim = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
    itemsize = (network.autocast_dtype or network.dtype).itemsize
    return max(1, 2 * int(config.num_hidden_layers) * int(heads) * int(dim) * itemsize)


class cached_casts:
    """Let autocast cast each weight once and not once a token: it keeps the casts of leaves that require a gradient,
    also where none is computed. Frozen weights therefore pretend to, inside the body."""

    def __init__(self, network: Network) -> None:
        self.parameters = (
            [p for p in network.module.parameters() if not p.requires_grad and p.is_floating_point()]
            if network.autocast_dtype is not None
            else []
        )

    def __enter__(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def __exit__(self, *exception: Any) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(False)


class _Batch:
    """Rows that are sampled together.

    Results, on the CPU: ``tokens`` int64 and ``logprobs`` float32 ``[rows, max_new]``, ``lengths`` int64 ``[rows]``,
    ``stopped`` bool ``[rows]``.
    """

    def __init__(
        self,
        network: Network,
        prompts: Sequence[Tensor],
        keys: Sequence[int],
        sampling: Sampling,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.network = network
        self.sampling = sampling
        self.prompts = prompts
        self.stop = torch.tensor(list(stop_token_ids), dtype=torch.int64)
        rows, most = len(prompts), sampling.max_new_tokens
        self.prompt_lengths = torch.tensor([len(p) for p in prompts])
        self.limits = torch.full((rows,), most)
        if network.max_length is not None:
            self.limits = torch.minimum(self.limits, network.max_length - self.prompt_lengths)
        most = int(self.limits.max()) if rows else 0
        # Philox is counter-based: the stream of a row is a function of its key.
        draws = [np.random.Generator(np.random.Philox(key=key)).random(most) for key in keys]
        self.uniforms = torch.from_numpy(np.stack(draws))
        self.tokens = torch.zeros(rows, most, dtype=torch.int64)
        self.logprobs = torch.zeros(rows, most)
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.stopped = torch.zeros(rows, dtype=torch.bool)

    def run(self) -> None:
        """Sample until every row has stopped or is at its limit."""
        alive = torch.arange(len(self.prompts))  # the rows that the cache holds
        logits, cache, mask = self._prefill()
        for place in range(int(self.limits.max())):
            draws = self.uniforms[alive, place].to(logits.device)
            tokens, logprobs = (x.cpu() for x in draw(logits, draws, self.sampling))
            # finished rows may stay in the batch for a while
            running = ~self.stopped[alive] & (place < self.limits[alive])
            rows = alive[running]
            self.tokens[rows, place] = tokens[running]
            self.logprobs[rows, place] = logprobs[running]
            self.lengths[rows] = place + 1
            self.stopped[rows] = torch.isin(tokens[running], self.stop)
            going_on = running & ~self.stopped[alive] & (place + 1 < self.limits[alive])
            if not bool(going_on.any()):
                return
            if int(going_on.sum()) <= (1 - LEAVE_SHARE) * len(alive):
                kept = going_on.nonzero()[:, 0]
                cache.batch_select_indices(kept.to(logits.device))
                alive, tokens, mask = alive[kept], tokens[kept], mask[kept.to(mask.device)]
            logits, mask = self._decode(tokens, alive, place, cache, mask)

    def _prefill(self) -> tuple[Tensor, Any, Tensor]:
        """Run the prompts, each once however many rows share it. Returns ``logits [rows, vocab]``, the cache of all
        rows and their attention mask ``[rows, longest prompt]``."""
        owners: list[int] = []
        distinct: list[Tensor] = []
        for prompt in self.prompts:
            if not distinct or not torch.equal(distinct[-1], prompt):
                distinct.append(prompt)
            owners.append(len(distinct) - 1)
        longest = max(len(p) for p in distinct)
        input_ids = torch.zeros(len(distinct), longest, dtype=torch.int64)
        mask = torch.zeros(len(distinct), longest, dtype=torch.int64)
        for line, prompt in enumerate(distinct):
            input_ids[line, longest - len(prompt) :] = prompt
            mask[line, longest - len(prompt) :] = 1
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        device = self.network.device
        mask = mask.to(device)
        cache = new_cache(self.network.module.config)
        logits, cache = self._forward(input_ids.to(device), position_ids.to(device), mask, cache)
        if len(distinct) < len(owners):
            owner = torch.tensor(owners, device=device)
            cache.batch_select_indices(owner)
            logits, mask = logits[owner], mask[owner]
        return logits, cache, mask

    def _decode(self, tokens: Tensor, alive: Tensor, place: int, cache: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One more token for the rows in the cache."""
        device = self.network.device
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = self.prompt_lengths[alive] + place
        if self.network.max_length is not None:  # of a row at its limit nothing is used any more
            positions = positions.clamp(max=self.network.max_length - 1)
        logits, _ = self._forward(tokens[:, None].to(device), positions[:, None].to(device), mask, cache)
        return logits, mask

    def _forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """float32 ``[rows, vocab]`` after the last token, and the cache."""
        network = self.network
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, "past_key_values": cache}
        if "position_ids" in network.parameters_of_module:
            inputs["position_ids"] = position_ids
        if "logits_to_keep" in network.parameters_of_module:
            inputs["logits_to_keep"] = 1
        output = network.module(use_cache=True, **inputs)
        return output.logits[:, -1].float(), output.past_key_values


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: float32 ``[rows, vocab]``; may be overwritten.
        uniforms: float64 ``[rows]`` in [0, 1).
        sampling: how; temperature 0 takes the most likely token and its log-prob at temperature 1.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probs under the distribution drawn from, float32 ``[rows]``.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    logits = logits.div_(sampling.temperature) if sampling.temperature != 1.0 else logits
    logits = truncate(logits, sampling)
    normaliser = torch.logsumexp(logits, -1, keepdim=True)
    cumulative = (logits - normaliser).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, else rounding could pick a token after the last that has any probability.
    points = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, points, right=True)
    return tokens[:, 0], (logits.gather(1, tokens) - normaliser)[:, 0]


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Cut a distribution to its top-k, then top-p, then min-p part: the rest gets -inf. Ties at the edge stay in.

    Args:
        logits: float32 ``[rows, vocab]``, divided by the temperature.
    """
    floor: Tensor | None = None
    if 0 < sampling.top_k < logits.shape[1]:
        floor = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if sampling.top_p < 1.0:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, sampling.top_p), -torch.inf)
    if sampling.min_p > 0.0:
        least = logits.amax(-1, keepdim=True) + float(np.log(sampling.min_p))
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """``[rows, 1]``: the smallest logit of the smallest set of tokens whose probability is at least ``top_p``."""
    normaliser = torch.logsumexp(logits, -1, keepdim=True)
    for count in (min(NUCLEUS, logits.shape[1]), logits.shape[1]):  # sorting everything is slow and seldom needed
        largest = logits.topk(count, dim=-1).values
        before = torch.nn.functional.pad((largest - normaliser).exp().cumsum(-1)[:, :-1], (1, 0))
        inside = before < top_p
        if count == logits.shape[1] or not bool(inside[:, -1].any()):
            break
    return largest.gather(1, inside.sum(-1, keepdim=True) - 1)
