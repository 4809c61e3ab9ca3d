"""Filters: refills draw new randomness, exhaustion is declared, and groups are conserved (law 6)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    DropUniformGroups,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    PolicyLogprobs,
    Prompts,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    source,
)
from flowrl.data import PromptDataset
from flowrl.errors import ExhaustedError, FlowError
from flowrl.nodes.filter import Filter
from tests.flows import FAST, SAMPLING, prompts, share_of_vowels
from tests.runs import checkpoint_weights, quick_run, rows, training
from tests.tiny import tiny_actor

BATCH_SIZE = 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def odd_answers_only(response: str, answer: str) -> float:
    """Varied for the prompts with an odd answer, uniform for the others."""
    return zlib.crc32(response.encode()) % 997 / 997 if int(answer) % 2 else 0.0


@flowrl.node
def keep(rollouts: Rollouts, into: list[Any]) -> Rollouts:
    into.append(rollouts)
    return rollouts


def filtered(
    *, reward: Callable[..., float] = odd_answers_only, sampled: Any = None, trained: Any = None, **options: Any
) -> RLFlow:
    """GRPO on the groups that differ.

    Args:
        sampled: a list that gets what each pull sampled.
        trained: a list that gets what each update trained on.
        options: of the filter.
    """
    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=BATCH_SIZE))
    if sampled is not None:
        rollouts = keep(rollouts, into=sampled, label="sampled")
    rewards = FunctionReward(reward, isolate=False)(rollouts)
    kept = DropUniformGroups(label="filter", **options)(rollouts, rewards)
    if trained is not None:
        kept = keep(kept, into=trained, label="trained")
    advantages = GroupAdvantage()(kept, rewards)
    return RLFlow.from_outputs(GRPOUpdater(actor, optimizer=FAST)(kept, advantages, PolicyLogprobs(actor)(kept)))


def conserved(row: dict[str, Any], label: str = "filter") -> None:
    count = {k.removeprefix(f"{label}/groups_"): v for k, v in row.items() if k.startswith(f"{label}/groups_")}
    came = count["emitted"] + count.get("carried_in", 0)
    assert came == count["dropped"] + count["consumed"] + count["surplus"] + count.get("carried_out", 0)


def test_a_refill_pulls_new_prompts_with_new_randomness(tmp_path: Path) -> None:
    sampled: list[Rollouts] = []
    trained: list[Rollouts] = []
    result = quick_run(filtered(sampled=sampled, trained=trained), 2, tmp_path / "run", prompts(4, shuffle=False))
    # Prompts 0 to 3, in this order: every pull of two has one with an odd answer.
    for row in training(result):
        assert (row["filter/pulls"], row["filter/groups_consumed"], row["filter/acceptance"]) == (2, 2, 0.5)
        assert (row["filter/groups_emitted"], row["filter/groups_dropped"], row["filter/groups_surplus"]) == (4, 2, 0)
        assert row["filter/kept_groups"] == 2  # counts add up over the pulls
        conserved(row)
    assert [r.prompt_id.tolist() for r in sampled] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5], [6, 6, 7, 7]]
    assert [r.prompt_id.tolist() for r in trained] == [[1, 1, 3, 3], [5, 5, 7, 7]]
    texts = [tuple(t) for r in sampled for t in r.response_tokens.to_lists()]
    assert len(set(texts)) == len(texts)


def test_the_same_rows_in_another_pull_draw_other_tokens() -> None:
    """Also where a data set gives the same ``prompt_id`` again."""
    data = prompts(2)
    sampled: list[Rollouts] = []
    program = flowrl.compile(filtered(sampled=sampled, max_pulls=2, on_exhausted="fail", reward=lambda answer: 1.0))
    from flowrl.context import Bindings, use_bindings
    from flowrl.runtime.interpreter import run_iteration
    from flowrl.runtime.worker import open_engine

    with use_bindings(Bindings(open_engine)), pytest.raises(ExhaustedError):
        run_iteration(program, draw=lambda name, count: data.rows(0, count, 0), seed=0, iteration=0)
    first, second = (r.response_tokens.to_lists() for r in sampled)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_surplus_groups_are_dropped_and_counted(tmp_path: Path) -> None:
    data = PromptDataset.from_rows([{"prompt": f"say {a}", "answer": a} for a in "0135"], shuffle=False)
    trained: list[Rollouts] = []
    row = training(quick_run(filtered(trained=trained), 1, tmp_path / "run", data))[0]
    # The first pull lets one through, the second two, and one of these is not needed.
    assert trained[0].prompt_id.tolist() == [1, 1, 2, 2]
    assert (row["filter/pulls"], row["filter/groups_consumed"], row["filter/groups_surplus"]) == (2, 2, 1)
    conserved(row)


def test_each_filter_is_filled_to_the_size_of_its_own_source(tmp_path: Path) -> None:
    class KeepsTwice(Filter):
        """Lets nothing through in the first pull, and everything in the second."""

        def __call__(self, rollouts: Rollouts) -> Rollouts:
            from flowrl.context import current_step

            return rollouts.select([] if current_step().pull == 0 else list(range(rollouts.num_rows)))

    actor = tiny_actor()
    few = source(Prompts, name="few", batch_size=2)
    many = source(Prompts, name="many", batch_size=3)
    kept = KeepsTwice(label="filter")(Rollout(actor, group_size=2, sampling=SAMPLING)(few))
    other = KeepsTwice(label="other")(Rollout(actor.frozen(), group_size=2, sampling=SAMPLING)(many))
    rewards = FunctionReward(share_of_vowels, isolate=False)(kept)
    update = GRPOUpdater(actor, optimizer=FAST)(kept, GroupAdvantage()(kept, rewards), PolicyLogprobs(actor)(kept))
    flow = RLFlow.from_outputs(update, keep(other, into=[], label="rest"))
    row = training(quick_run(flow, 1, tmp_path / "run", {"few": prompts(), "many": prompts()}))[0]
    assert (row["filter/groups_consumed"], row["other/groups_consumed"]) == (2, 3)
    conserved(row)
    conserved(row, "other")


def test_filters_in_a_row_count_what_each_lets_through(tmp_path: Path) -> None:
    class DropFirst(Filter):
        def __call__(self, rollouts: Rollouts) -> Rollouts:
            return rollouts.select((rollouts.prompt_id % 4 != 0).nonzero().flatten())

    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=BATCH_SIZE))
    rewards = FunctionReward(odd_answers_only, isolate=False)(rollouts)
    some = DropFirst(label="first")(rollouts)
    kept = DropUniformGroups(label="second")(some, rewards)
    update = GRPOUpdater(actor, optimizer=FAST)(kept, GroupAdvantage()(kept, rewards), PolicyLogprobs(actor)(kept))
    row = training(quick_run(RLFlow.from_outputs(update), 1, tmp_path / "run", prompts(4, shuffle=False)))[0]
    conserved(row, "first")
    conserved(row, "second")
    assert row["first/groups_consumed"] == row["second/groups_emitted"] == 3
    assert row["second/groups_consumed"] == 2


# -- exhaustion ------------------------------------------------------------------------------------------------------------


def test_exhausted_trains_short(tmp_path: Path) -> None:
    trained: list[Rollouts] = []
    result = quick_run(filtered(trained=trained, max_pulls=1), 2, tmp_path / "run", prompts(4, shuffle=False))
    assert [r.prompt_id.tolist() for r in trained] == [[1, 1], [3, 3]]
    for row in training(result):
        assert (row["filter/groups_consumed"], row["filter/pulls"]) == (1, 1)
        conserved(row)


def test_exhausted_with_nothing_at_all_does_what_the_setting_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(policy: Any, **options: Any) -> list[dict[str, Any]]:
        flow = filtered(reward=lambda answer: 1.0, max_pulls=3, on_exhausted=policy)
        return training(quick_run(flow, 2, tmp_path / policy, **options))

    for row in run("train_short", progress=True):  # an update on no rows, which is said
        assert (row["filter/acceptance"], row["filter/groups_consumed"], row["empty_updates"]) == (0, 0, 1)
        assert not any(isinstance(value, float) and value != value for value in row.values())
        conserved(row)
    assert "Step 2: nothing was trained" in capsys.readouterr().out
    for row in run("carry_over"):
        assert (row["filter/groups_carried_out"], row["filter/pulls"]) == (0, 3) and "policy_version" not in row
        conserved(row)
    with pytest.raises(ExhaustedError, match=r"filter let 0 of 2 groups through in 3 pulls"):
        run("fail")


def test_exhausted_fails(tmp_path: Path) -> None:
    flow = filtered(max_pulls=1, on_exhausted="fail")
    with pytest.raises(ExhaustedError, match=r"filter let 1 of 2 groups through in 1 pulls.*raise max_pulls"):
        quick_run(flow, 1, tmp_path / "run", prompts(4, shuffle=False))


def test_exhausted_carries_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The groups wait for the next iteration; no Model is updated meanwhile, so they stay on-policy."""

    def run(name: str, steps: int, **options: Any) -> list[Rollouts]:
        trained: list[Rollouts] = []
        flow = filtered(trained=trained, max_pulls=1, on_exhausted="carry_over")
        quick_run(flow, steps, tmp_path / name, prompts(4, shuffle=False), **options)
        return trained

    trained = run("reference", 4, progress=True)
    assert [r.prompt_id.tolist() for r in trained] == [[1, 1, 3, 3], [5, 5, 7, 7]]
    assert (
        "Step 1: too few groups passed the filter; they are carried over, nothing was updated."
        in capsys.readouterr().out
    )
    one, two, three, four = training(tmp_path / "reference")
    for row in (one, two, three, four):
        conserved(row)
    assert (one["filter/groups_carried_in"], one["filter/groups_carried_out"]) == (0, 1)
    assert (two["filter/groups_carried_in"], two["filter/groups_carried_out"]) == (1, 0)
    assert "loss" not in one and "loss" in two
    assert (two["policy_version"], four["policy_version"]) == (1, 2)
    # What is carried is in the checkpoint.
    run("run", 1)
    assert [r.prompt_id.tolist() for r in run("run", 4, resume=True)] == [[1, 1, 3, 3], [5, 5, 7, 7]]
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")
    assert checkpoint_weights(tmp_path / "run", 4) == checkpoint_weights(tmp_path / "reference", 4)

    from flowrl.runtime.replay import replay_step

    assert replay_step(tmp_path / "run", 2).equal


# -- errors ----------------------------------------------------------------------------------------------------------------


def test_an_error_says_in_which_call_and_step(tmp_path: Path) -> None:
    @flowrl.node
    def broken(rollouts: Rollouts, flow_error: bool = False) -> Rewards:
        raise FlowError("the thing") if flow_error else ZeroDivisionError("by zero")

    for flow_error, kind in {True: FlowError, False: ZeroDivisionError}.items():
        rollouts = Rollout(tiny_actor(), group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
        flow = RLFlow.from_outputs(broken(rollouts, flow_error=flow_error))
        with pytest.raises(kind) as error:
            quick_run(flow, 1, tmp_path / kind.__name__)
        assert error.value.__notes__ == ["in call 'broken#0' (broken), step 1"]


def test_a_data_set_that_gives_other_rows_than_it_says_is_named(tmp_path: Path) -> None:
    class Liar:
        batch_type, columns, fingerprint = Prompts, (), "x"

        def __len__(self) -> int:
            return 1

        def rows(self, start: int, count: int, seed: int) -> Any:
            return flowrl.TrainStats({}, 0, 0, 0)

    rollouts = Rollout(tiny_actor(), sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    with pytest.raises(FlowError, match=r"'prompts' gives the wrong rows. Expected Prompts. Received TrainStats"):
        quick_run(RLFlow.from_outputs(rollouts), 1, tmp_path / "run", Liar())
