"""Sources: where rows enter a flow. The runtime draws them from the data set of the source's name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from flowrl.batches import Batch, Prompts
from flowrl.errors import GraphError
from flowrl.graph import record, user_location
from flowrl.nodes.base import Node

B = TypeVar("B", bound=Batch)


class Source(Node):
    """Draws ``batch_size`` rows an iteration from the data set called ``name``, and mints their ``prompt_id``."""

    batch_type: type[Batch] = Prompts
    source_name: str = "prompts"
    batch_size: int = 64

    kind: ClassVar[str] = "source"

    def problems(self) -> Iterable[str]:
        if self.batch_size < 1:
            yield f"batch_size is {self.batch_size}; expected at least 1"
        if not self.source_name:
            yield "name is empty; expected the key of its data set in data={…}"


def source(batch_type: type[B], *, name: str, batch_size: int = 64) -> B:
    """A source of rows of one type; typed as the batch that it stands for.

    Args:
        batch_type: what a row is: Prompts, Demonstrations, Preferences, …
        name: the key of its data set in ``run(flow, data={name: …})``.
        batch_size: rows an iteration, over all ranks.

    Example::

        prompts = source(Prompts, name="prompts", batch_size=64)
    """
    if not (isinstance(batch_type, type) and issubclass(batch_type, Batch)):
        raise GraphError(
            "source() needs the type of its rows",
            expected="a batch type, such as Prompts",
            received=repr(batch_type),
            where=user_location(),
        )
    node: Any = Source(batch_type, name, batch_size, label=name)
    return record(node, {}, batch_type)
