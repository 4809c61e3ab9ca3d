"""What one call asks of one Model in one iteration: the unit that is estimated and placed; and how long rows are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flowrl.errors import FlowError

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
        group_size: responses of one prompt, which is read once where the engine shares it.
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


#: Tokens of a prompt where nobody says how many there are.
DEFAULT_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row, as they are expected.

    Args:
        prompt: mean tokens of a prompt.
        response: mean tokens of a response; None for the most that the rollout may sample.
        max_response: of the longest response, which generation waits for; None likewise.

    Raises:
        FlowError: a length is no positive number, or the mean is above the longest.

    Example::

        compile(flow, cluster, lengths=Lengths(prompt=300, response=800, max_response=4096))
    """

    prompt: float = DEFAULT_PROMPT_TOKENS
    response: float | None = None
    max_response: float | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value!r}; expected a number above 0"
            for name, value in vars(self).items()
            if value is not None
            and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf)
        ]
        if not wrong and self.response and self.max_response and self.response > self.max_response:
            wrong.append(f"response is {self.response}, more than max_response, which is {self.max_response}")
        if wrong:
            raise FlowError("These lengths cannot be: " + "; ".join(wrong))
