"""Two policies in one flow: each answers, a referee compares, each is trained on its own share of one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from flowrl import (
    Batch,
    GroupAdvantage,
    Model,
    Node,
    PolicyLogprobs,
    PPOUpdater,
    Prompts,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    node,
    rewards_like,
    source,
)
from flowrl.models import AnyModel
from tests.compositions.harness import Composition, run_both
from tests.flows import FAST, SAMPLING, prompts
from tests.tiny import tiny_actor


@dataclass(frozen=True, eq=False, repr=False)
class Match(Batch):
    """Two sides of a debate, row by row, and what each side earned."""

    pro: Rollouts
    con: Rollouts
    pro_rewards: Rewards
    con_rewards: Rewards


def referee(pro: Rollouts, con: Rollouts) -> Match:
    """The side with more distinct characters wins; a tie pays both the same."""
    distinct = [len(set(p)) - len(set(c)) for p, c in zip(pro.response_text, con.response_text, strict=True)]
    won = torch.tensor(distinct).sign() / 2
    return Match(pro, con, rewards_like(pro, won=won), rewards_like(con, won=-won))


@node
def judged(pro: Rollouts, *, con: Rollouts) -> Match:
    return referee(pro, con)


class Debate(Node):
    """The whole match in one call, which holds two Models."""

    pro: AnyModel
    con: AnyModel
    group_size: int = 2

    kind: ClassVar[str] = "rollout"

    def __call__(self, prompts: Prompts) -> Match:
        pro = Rollout(self.pro, self.group_size, SAMPLING, label="pro")(prompts)
        con = Rollout(self.con, self.group_size, SAMPLING, label="con")(prompts)
        return referee(pro, con)


def two_rollouts() -> Composition:
    pro, con = tiny_actor(0, "pro"), tiny_actor(1, "con")
    rows = source(Prompts, name="prompts", batch_size=3)
    match = judged(
        Rollout(pro, group_size=2, sampling=SAMPLING)(rows), con=Rollout(con, group_size=2, sampling=SAMPLING)(rows)
    )
    return trained(match, pro, con)


def one_call() -> Composition:
    pro, con = tiny_actor(0, "pro"), tiny_actor(1, "con")
    return trained(Debate(pro, con)(source(Prompts, name="prompts", batch_size=3)), pro, con)


def trained(match: Match, pro: Model, con: Model) -> Composition:
    """Both sides; ``match`` is a Ref, and its fields are edges."""
    updates = [
        PPOUpdater(model, epochs=2, optimizer=FAST)(
            rollouts, GroupAdvantage()(rollouts, rewards), PolicyLogprobs(model)(rollouts)
        )
        for model, rollouts, rewards in ((pro, match.pro, match.pro_rewards), (con, match.con, match.con_rewards))
    ]
    return Composition(RLFlow.from_outputs(*updates, match), {"prompts": prompts()}, [pro, con])


def test_two_rollouts_and_a_referee(tmp_path: Path) -> None:
    eager, _ = run_both(two_rollouts, tmp_path / "run")
    for *_, match in eager.outputs:
        assert torch.equal(match.pro_rewards.totals, -match.con_rewards.totals)
        assert match.pro_rewards.totals.any()
    paths = {(e["path"], b) for _, b, e in two_rollouts().flow.graph.edges(data=True) if e.get("path")}
    assert ("pro", "PolicyLogprobs#0") in paths and ("con", "PolicyLogprobs#1") in paths


def test_one_call_that_holds_two_models(tmp_path: Path) -> None:
    run_both(one_call, tmp_path / "run")
    readers = {(e.model, e.reader) for e in one_call().flow.weight_edges}
    assert {("pro", "Debate#0"), ("con", "Debate#0")} <= readers
