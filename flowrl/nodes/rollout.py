"""Rollout: sample responses from a policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from flowrl import context
from flowrl.batches import Prompts, Rollouts, Spans
from flowrl.models import AnyModel
from flowrl.nodes.base import Node
from flowrl.ragged import Ragged


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. The distribution is softmax(logits / temperature), cut to its top-k, top-p and min-p part.

    Args:
        max_new_tokens: the longest response.
        temperature: 0 takes the most likely token.
        top_p: 1 keeps all.
        top_k: 0 keeps all.
        min_p: 0 keeps all.
        stop_token_ids: end a response; empty takes those of the model's generation config and tokenizer.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


class Rollout(Node):
    """Sample ``group_size`` responses to each prompt.

    Args:
        model: the policy.
        group_size: responses a prompt.
        sampling: how tokens are drawn.
        max_staleness: how many versions old the weights may be.

    Shapes: a row a prompt in, ``group_size`` rows a prompt out, of one prompt side by side.
    """

    model: AnyModel
    group_size: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    max_staleness: int = 0

    kind: ClassVar[str] = "rollout"
    wants_kind: ClassVar[str | None] = "policy"

    def problems(self) -> Iterable[str]:
        s = self.sampling
        if self.group_size < 1:
            yield f"group_size is {self.group_size}; expected at least 1"
        if s.max_new_tokens < 1:
            yield f"max_new_tokens is {s.max_new_tokens}; expected at least 1"
        if not s.temperature >= 0:
            yield f"temperature is {s.temperature}; expected at least 0"
        if not 0 < s.top_p <= 1:
            yield f"top_p is {s.top_p}; expected 0 < top_p <= 1"
        if s.top_k < 0:
            yield f"top_k is {s.top_k}; expected at least 0"
        if not 0 <= s.min_p < 1:
            yield f"min_p is {s.min_p}; expected 0 <= min_p < 1"
        if self.max_staleness < 0:
            yield f"max_staleness is {self.max_staleness}; expected at least 0"
        if s.temperature == 0 and self.group_size > 1:
            yield f"group_size is {self.group_size} at temperature 0: all responses of a prompt would be equal"

    def __call__(self, prompts: Prompts) -> Rollouts:
        import torch

        engine = self.model.bound_engine()
        here = context.current_step()
        rows = torch.arange(prompts.num_rows).repeat_interleave(self.group_size)
        sample_id = torch.arange(self.group_size).repeat(prompts.num_rows)
        expanded = prompts.select(rows)
        prompt_tokens = engine.encode(prompts.messages).select(rows)
        keys = [here.key(p, s) for p, s in zip(expanded.prompt_id.tolist(), sample_id.tolist(), strict=True)]
        generated = engine.generate(prompt_tokens, keys, self.sampling)
        return Rollouts(
            prompt_id=expanded.prompt_id,
            sample_id=sample_id,
            tokens=Ragged.join(prompt_tokens, generated.tokens),
            spans=Spans.prompt_then_response(prompt_tokens.lengths, generated.tokens.lengths, engine.policy_version),
            rollout_logprobs=generated.logprobs,
            finish_reason=generated.finish_reason,
            messages=expanded.messages,
            response_text=engine.decode(generated.tokens),
            extras=expanded.extras,
            origin=engine.origin(self.sampling),
        )
