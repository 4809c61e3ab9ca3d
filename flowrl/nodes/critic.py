"""Critic: the return that a value model expects before each token."""

from __future__ import annotations

from typing import ClassVar

from flowrl.batches import Sequences, Values
from flowrl.models import AnyModel, ValueHead
from flowrl.nodes.base import Node


class Critic(Node):
    """Values of the responses.

    Args:
        model: a ``ValueModel`` with a trunk of its own, or a ``ValueHead`` on the policy's.

    Shapes: one value a response token: the return expected before the token is taken.
    """

    model: AnyModel

    kind: ClassVar[str] = "critic"

    def problems(self) -> list[str]:
        base = getattr(self.model, "base", self.model)
        if isinstance(self.model, ValueHead) or base.kind == "value":
            return []
        return [f"model is {self.model!r}; expected a ValueModel, or a ValueHead on a policy"]

    def __call__(self, sequences: Sequences) -> Values:
        values = self.model.bound_engine().values(sequences)
        return Values(sequences.prompt_id, sequences.sample_id, values)
