"""What one call asks of one Model in one iteration: the unit that is estimated and placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["generate", "score", "train"]


@dataclass(frozen=True)
class Work:
    """Rows and lengths of a unit in one iteration.

    Args:
        kind: "generate": sample responses to prompts. "score": one forward pass of whole sequences (log-probs, values,
            rewards). "train": forward, backward and optimiser.
        sequences: rows.
        prompt_tokens: mean tokens of a prompt.
        response_tokens: mean tokens of a response.
        max_response_tokens: of the longest response, which generation waits for; at least ``response_tokens``.
        epochs: passes over the rows (training).
        optimizer_steps: of all epochs together (training).
        head: what the last layer gives: "lm" logits of the vocabulary, "value" one number a token.
        group_size: responses of one prompt, whose prompt is read once (generation).
    """

    kind: Kind
    sequences: int
    prompt_tokens: float
    response_tokens: float
    max_response_tokens: float
    epochs: int = 1
    optimizer_steps: int = 1
    head: Literal["lm", "value"] = "lm"
    group_size: int = 1

    @property
    def tokens(self) -> float:
        """Tokens of all rows, once."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)
