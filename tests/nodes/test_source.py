"""Sources: where rows enter a flow."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import Demonstrations, Prompts, Ref, RLFlow, source
from flowrl.errors import GraphError


def test_a_source_is_a_ref_of_its_rows() -> None:
    ref: Any = source(Demonstrations, name="demos", batch_size=7)
    assert isinstance(ref, Ref) and ref._type is Demonstrations
    flow = RLFlow.from_outputs(ref)
    assert flow.labels == ("demos",)
    assert flow.sources["demos"].batch_size == 7


def test_it_needs_the_type_of_its_rows() -> None:
    with pytest.raises(GraphError, match="source\\(\\) needs the type of its rows") as info:
        source("prompts", name="prompts")  # type: ignore[type-var]
    assert info.value.where is not None and info.value.where.startswith(__file__)


def test_impossible_settings_are_in_the_report() -> None:
    report = RLFlow.from_outputs(source(Prompts, name="p", batch_size=0)).check()
    assert [(v.expected, v.received) for v in report.errors] == [("at least 1", "batch_size is 0")]
