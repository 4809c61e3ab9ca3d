"""Laws 5 and 9, and the declared split, for every advantage of the package, found by the registry: a new one is tested
without writing a test. That a planted fault is caught is in ``tests/test_testing.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl import Node
from flowrl.nodes.row_advantage import FunctionAdvantage
from flowrl.testing import Draw, registered_advantages
from flowrl.testing.advantages import check_drawn_advantage
from flowrl.testing.settings import choices, described, instances


def lead(rewards: Tensor, prompt_id: Tensor) -> Tensor:
    """A user's own advantage: over the median of the batch."""
    return rewards - rewards.median()


#: Those that need a setting without a default.
MADE_BY_HAND: dict[type[Node], list[Node]] = {FunctionAdvantage: [FunctionAdvantage(lead, within_groups=False)]}

OWN = [cls for cls in registered_advantages() if cls.__module__.startswith("flowrl.")]
ADVANTAGES = [node for cls in OWN for node in MADE_BY_HAND.get(cls) or instances(cls)]

quick = settings(
    max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_advantages_of_the_package_are_here() -> None:
    names = {type(node).__name__ for node in ADVANTAGES}
    assert names >= {"GAE", "GroupAdvantage", "NormalizedAdvantage", "ReinforcePlusPlus", "OptimalTokenBaseline"}
    assert {type(node) for node in ADVANTAGES} == set(OWN)


@pytest.mark.parametrize("node", ADVANTAGES, ids=described)
@quick
@given(data=st.data())
def test_laws(node: Node, data: st.DataObject) -> None:
    sizes = st.integers(max(1, node.needs_groups), 4)
    draw = Draw(
        seed=data.draw(st.integers(0, 9999), "seed"),
        group_sizes=data.draw(st.lists(sizes, min_size=1, max_size=4).map(tuple), "group_sizes"),
        response_lengths=data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple), "response_lengths"),
    )
    check_drawn_advantage(node, draw, data.draw(st.sampled_from(choices(node)), "inputs"))
