"""Spans: who wrote which tokens of a sequence, with the version of the policy that did."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flowrl.columns import ColumnGroup, check_lengths, nested
from flowrl.errors import BatchError
from flowrl.ragged import Ragged

if TYPE_CHECKING:
    from torch import Tensor


class SpanKind(enum.IntEnum):
    """Who wrote a span of tokens."""

    PROMPT = 0
    POLICY = 1
    OBSERVATION = 2


@nested
@dataclass(frozen=True, eq=False)
class Spans(ColumnGroup):
    """Who wrote which tokens, in order: three ragged columns with one value a span.

    Args:
        kinds: uint8, a :class:`SpanKind`.
        lengths: int64, tokens in the span.
        policy_versions: int64, the version of the policy that wrote the span; -1 where no policy did.
    """

    kinds: Ragged
    lengths: Ragged
    policy_versions: Ragged

    column_types: ClassVar[Mapping[str, str]] = {
        "kinds": "uint8 ragged",
        "lengths": "int64 ragged",
        "policy_versions": "int64 ragged",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "policy_versions"):
            check_lengths("Spans", name, getattr(self, name), self.kinds.lengths, "its number of spans")
        if bool((self.lengths.values < 0).any()):
            raise BatchError("Spans.lengths has a negative length", expected="at least 0")

    @classmethod
    def prompt_then_response(cls, prompt_lengths: Tensor, response_lengths: Tensor, policy_version: int) -> Spans:
        """The spans of single-turn rows: one prompt span, one policy span (also where it is empty)."""
        import torch

        rows = len(prompt_lengths)
        offsets = torch.arange(0, 2 * rows + 1, 2)
        kinds = torch.tensor([SpanKind.PROMPT, SpanKind.POLICY], dtype=torch.uint8).repeat(rows)
        versions = torch.tensor([-1, policy_version], dtype=torch.int64).repeat(rows)
        lengths = torch.stack([prompt_lengths, response_lengths], dim=1).flatten().to(torch.int64)
        return cls(Ragged(kinds, offsets), Ragged(lengths, offsets), Ragged(versions, offsets))
