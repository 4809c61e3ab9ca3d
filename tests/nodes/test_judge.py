"""Judges: what they are given and may say, both orders, ties, failures, and the ids of the pairs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flowrl
from flowrl.batches import Preferences, Rollouts
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.errors import DataError, RewardError
from flowrl.nodes import ReferenceLogprobs, Updater
from flowrl.nodes.judge import Judge
from flowrl.nodes.preference_losses import DPOLoss
from flowrl.runtime.worker import open_engine
from tests.nodes.test_pairs import pairs_in, rollouts_of
from tests.tiny import tiny_actor


@pytest.fixture(autouse=True)
def bindings() -> Iterator[None]:
    """Engines and pools of one test; closed as the runtime would."""
    bindings = Bindings(open_engine)
    with use_bindings(bindings):
        yield
    for _, resource in bindings.resources.values():
        if resource is not None:
            resource.close()


def judged(
    fn: Callable[..., Any], rollouts: Rollouts, **options: Any
) -> tuple[list[tuple[int, int, int]], dict[str, float]]:
    """(prompt, chosen sample, rejected sample) of each pair, and what the node reports."""
    reports: dict[str, float] = {}
    with use_step(StepContext(label="here", report=reports.__setitem__)):
        return pairs_in(Judge(fn, **{"isolate": False, **options})(rollouts), rollouts), reports


def answers(*texts: str, group_size: int = 2, **extras: Any) -> Rollouts:
    """Rollouts of prompts 10, 11, … with these responses."""
    rollouts = rollouts_of(len(texts) // group_size, group_size)
    return replace(rollouts, response_text=texts, extras={n: tuple(v) for n, v in extras.items()})


def longer(response_a: str, response_b: str) -> str:
    return "a" if len(response_a) > len(response_b) else "b"


class TestWhatAJudgeIsGiven:
    rollouts = answers("yes", "no", answer=["no", "no"])

    def test_names(self) -> None:
        seen: list[Any] = []

        def judge(prompt, messages, response_a, response_b, num_tokens_a, num_tokens_b, finish_reason_b, answer, k=3):
            seen.append(
                (prompt, messages, response_a, response_b, num_tokens_a, num_tokens_b, finish_reason_b, answer, k)
            )
            return "b" if response_b == answer else "a"

        assert judged(judge, self.rollouts)[0] == [(10, 1, 0)]
        assert seen == [("prompt 0", "prompt 0", "yes", "no", 3, 4, "length", "no", 3)]

    @pytest.mark.parametrize(
        "judge",
        [
            lambda a, b: len(a) > len(b),
            lambda prompt, x, y: len(x) > len(y),
            lambda x, y, /: len(x) > len(y),
            lambda one, two, answer: len(one) > len(two),
            lambda a, b, **rest: len(a) > len(b),
        ],
    )
    def test_two_arguments_of_other_names_are_the_responses(self, judge: Callable[..., Any]) -> None:
        assert judged(judge, self.rollouts)[0] == [(10, 0, 1)]

    def test_everything(self) -> None:
        given: list[Any] = []
        judged(lambda response_a, **rest: given.append(set(rest)) or "a", self.rollouts)
        sides = {f"{name}_{side}" for name in ("response", "finish_reason", "num_tokens") for side in "ab"}
        assert given == [{"prompt", "messages", "answer"} | sides - {"response_a"}]

    @pytest.mark.parametrize(
        ("judge", "name"),
        [
            (lambda response_a, response_b, anwser: "a", "anwser"),
            (lambda one, two, three: "a", "one"),
            (lambda response: "a", "response"),
            (lambda a, anwser: "a", "a"),
        ],
    )
    def test_unknown_names(self, judge: Callable[..., Any], name: str) -> None:
        node = Judge(judge, isolate=False)
        with pytest.raises(DataError, match=f"asks for '{name}'"):
            node(self.rollouts)
        with pytest.raises(DataError):
            node.check_columns(["answer"])

    def test_required_columns(self) -> None:
        assert Judge(longer).required_columns() == ()
        assert Judge(lambda response_a, response_b, answer, level=1: "a").required_columns() == ("answer",)
        assert Judge(lambda response_a, response_b, gold, level: "a").required_columns() == ("gold", "level")
        assert Judge(lambda a, b: "a").required_columns() == ()


class TestWhatAJudgeMaySay:
    @pytest.mark.parametrize("verdict", ["a", "A ", 1, 1.0, True, 0.51, torch.tensor(0.9)])
    def test_the_first(self, verdict: Any) -> None:
        assert judged(lambda a, b: verdict, answers("x", "y"))[0] == [(10, 0, 1)]

    @pytest.mark.parametrize("verdict", ["b", "B", 0, 0.0, False, 0.49])
    def test_the_second(self, verdict: Any) -> None:
        assert judged(lambda a, b: verdict, answers("x", "y"))[0] == [(10, 1, 0)]

    @pytest.mark.parametrize("verdict", ["tie", 0.5])
    def test_a_tie_is_dropped(self, verdict: Any) -> None:
        pairs, reports = judged(lambda a, b: verdict, answers("x", "y"))
        assert not pairs and reports == {"judged_pairs": 1, "pairs": 0, "ties": 1, "invalid_verdicts": 0}

    @pytest.mark.parametrize("verdict", [None, "c", "", 2, -0.1, math.nan, [1], {"a": 1}])
    def test_anything_else_is_invalid(self, verdict: Any, caplog: pytest.LogCaptureFixture) -> None:
        def judge(prompt: str, a: str, b: str) -> Any:
            return verdict if prompt == "prompt 0" else "a"

        with caplog.at_level(logging.WARNING, logger="flowrl"):
            pairs, reports = judged(judge, answers("x", "y", "x", "y"))
        assert pairs == [(11, 0, 1)] and reports["invalid_verdicts"] == 1
        assert "1 of 2 verdicts are invalid" in caplog.text and "prompt_id 10: returned" in caplog.text

    def test_it_may_be_async(self) -> None:
        async def judge(response_a: str, response_b: str) -> str:
            await asyncio.sleep(0)
            return longer(response_a, response_b)

        assert judged(judge, answers("x", "yy"))[0] == [(10, 1, 0)]

    def test_equal_tokens_are_a_tie_that_nobody_is_asked_about(self) -> None:
        rollouts = answers("x", "y", "x", "y")
        same = rollouts.select([0, 0, 2, 3])
        same = replace(same, sample_id=rollouts.sample_id)
        asked: list[str] = []
        pairs, reports = judged(lambda a, b: asked.append(a) or "a", same)
        assert len(asked) == 1 and pairs == [(11, 0, 1)]
        assert reports["ties"] == 1 and reports["judged_pairs"] == 2


class TestWhichPairs:
    rollouts = answers("1", "22", "333", "4444", "55555", group_size=5)

    @pytest.mark.parametrize(
        ("pairs", "expected"),
        [
            ("first_two", [(10, 1, 0)]),
            ("adjacent", [(10, 1, 0), (10, 3, 2)]),
            ("all", [(10, b, a) for b in range(1, 5) for a in range(b)]),
        ],
    )
    def test_of_a_group(self, pairs: str, expected: list[tuple[int, int, int]]) -> None:
        assert sorted(judged(longer, self.rollouts, pairs=pairs)[0]) == expected

    def test_rows_have_ids_of_their_own(self) -> None:
        made = Judge(longer, pairs="all", isolate=False)(self.rollouts)
        assert made.num_rows == 20 and len(set(map(tuple, made.row_ids.tolist()))) == 20  # type: ignore[union-attr]
        assert made.sample_id.tolist() == list(range(20)) and len(set(made.pair_id.tolist())) == 10

    def test_a_dropped_pair_leaves_the_ids_of_the_others(self) -> None:
        made = Judge(lambda a, b: "tie" if a == "1" else "a", pairs="adjacent", isolate=False)(self.rollouts)
        assert made.sample_id.tolist() == [2, 3]

    def test_the_order_of_rows_decides_nothing(self) -> None:
        rollouts = answers("1", "22", "333", "1", "4444", "22", group_size=3)
        expected = sorted(judged(longer, rollouts, pairs="all")[0])
        assert sorted(judged(longer, rollouts.select([5, 2, 0, 4, 3, 1]), pairs="all")[0]) == expected

    def test_groups_of_one_and_none(self) -> None:
        assert judged(longer, answers("x", "y", group_size=1)) == (
            [],
            {"judged_pairs": 0, "pairs": 0, "ties": 0, "invalid_verdicts": 0},
        )
        assert Judge(longer, isolate=False)(answers("x", "y").select([])).num_rows == 0


class TestBothOrders:
    def test_a_judge_who_prefers_what_comes_first_says_nothing(self) -> None:
        rollouts = answers("x", "yy", "x", "yy")
        pairs, reports = judged(lambda a, b: "a", rollouts, swap=True)
        assert not pairs and reports["inconsistent_verdicts"] == 2 and reports["prefers_first"] == 1
        assert judged(lambda a, b: "a", rollouts)[0] == [(10, 0, 1), (11, 0, 1)]

    def test_consistent_verdicts_are_kept(self) -> None:
        rollouts = answers("x", "yy", "yy", "x")
        pairs, reports = judged(longer, rollouts, swap=True)
        assert pairs == [(10, 1, 0), (11, 0, 1)] and reports["prefers_first"] == 0.5
        assert reports["inconsistent_verdicts"] == reports["invalid_verdicts"] == reports["ties"] == 0

    def test_one_tie_or_one_failure_is_enough(self) -> None:
        """Of four prompts: a tie twice, a tie and a verdict, a failure and a verdict, two verdicts."""

        def judge(prompt: str, response_a: str, response_b: str) -> Any:
            if prompt == "prompt 0" or (prompt == "prompt 1" and response_a == "x"):
                return "tie"
            if prompt == "prompt 2" and response_a == "x":
                raise ValueError("no idea")
            return longer(response_a, response_b)

        pairs, reports = judged(judge, answers(*4 * ("x", "yy")), swap=True)
        assert pairs == [(13, 1, 0)]
        assert (
            reports["judged_pairs"]
            == 4
            == sum(reports[n] for n in ("pairs", "ties", "inconsistent_verdicts", "invalid_verdicts"))
        )
        assert reports["ties"] == reports["inconsistent_verdicts"] == reports["invalid_verdicts"] == 1


class TestFailures:
    def test_too_many_stop_the_run(self) -> None:
        def judge(prompt: str, response_a: str, response_b: str) -> str:
            if prompt != "prompt 0":
                raise RuntimeError("the server is down")
            return "a"

        rollouts = answers(*3 * ("x", "y"))
        with pytest.raises(RewardError) as info:
            judged(judge, rollouts)
        assert "failed on 2 of 3 calls" in str(info.value) and "prompt_id 11" in str(info.value)
        assert "RuntimeError: the server is down" in str(info.value) and "test_judge.py" in str(info.value)
        assert judged(judge, rollouts, max_invalid_fraction=0.7)[0] == [(10, 0, 1)]

    def test_isolated_with_a_deadline(self) -> None:
        def judge(prompt: str, response_a: str, response_b: str) -> str:
            while prompt == "prompt 0":
                time.sleep(0.01)
            if prompt == "prompt 1":
                raise SystemExit(3)
            return longer(response_a, response_b)

        rollouts = answers(*5 * ("x", "yy"))
        pairs, reports = judged(judge, rollouts, isolate=True, timeout=2.0, num_workers=2)
        assert pairs == [(12, 1, 0), (13, 1, 0), (14, 1, 0)] and reports["invalid_verdicts"] == 2

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"fn": 3}, "fn is 3; expected a function"),
            ({"pairs": "some"}, "pairs is 'some'; expected one of first_two, adjacent, all"),
            ({"timeout": 0.0}, "timeout is 0.0"),
            ({"num_workers": 0}, "num_workers is 0"),
            ({"max_invalid_fraction": 1.5}, "max_invalid_fraction is 1.5"),
        ],
    )
    def test_settings_that_cannot_work(self, options: dict[str, Any], problem: str) -> None:
        assert any(problem in p for p in Judge(**{"fn": longer, **options}).problems())


class TestInAFlow:
    def test_preferences_train(self) -> None:
        actor, rollouts = tiny_actor(), answers("x", "yy", "yy", "x")
        with use_step(StepContext(label="here")):
            preferences = Judge(longer, isolate=False)(rollouts)
            assert isinstance(preferences, Preferences)
            reference = ReferenceLogprobs(actor.frozen())(preferences)
            stats = Updater(actor)(DPOLoss()(preferences, reference))
        assert stats.num_optimizer_steps == 1

    def test_no_verdict_trains_nothing(self) -> None:
        actor = tiny_actor()
        with use_step(StepContext(label="here")):
            preferences = Judge(lambda a, b: "tie", isolate=False)(answers("x", "y"))
            reference = ReferenceLogprobs(actor.frozen())(preferences)
            assert Updater(actor)(DPOLoss()(preferences, reference)).num_optimizer_steps == 0

    def test_one_response_a_prompt_is_refused(self) -> None:
        actor = tiny_actor()
        prompts = flowrl.source(flowrl.Prompts, name="prompts", batch_size=2)
        preferences = Judge(longer)(flowrl.Rollout(actor, group_size=1)(prompts))
        loss = DPOLoss(reference_free=True)(preferences)
        report = flowrl.RLFlow.from_outputs(Updater(actor)(loss)).check()
        assert any("Judge" in str(violation) and "group" in str(violation) for violation in report.violations), report
