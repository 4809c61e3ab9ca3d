import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.batches import OldLogprobs, RefLogprobs, Rollouts
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.errors import BatchError, DataError, FlowError, GraphError, RewardError
from flowrl.nodes import FunctionReward, KLPenalty, RewardModelScore, WeightedSum, rewards_like
from flowrl.nodes.reward_function import prompt_text
from tests.nodes.test_advantage import ORIGIN, values_of, with_invalid
from tests.tiny import recorded_rollouts


@pytest.fixture(autouse=True)
def bindings():
    """Engines and pools of one test; closed as the runtime would."""

    def no_engine(model, bindings):
        raise AssertionError("no engine is needed here")

    bindings = Bindings(no_engine)
    with use_bindings(bindings):
        yield bindings
    for _, resource in bindings.resources.values():
        if resource is not None:
            resource.close()


def rollouts_of(*texts: str, **columns) -> Rollouts:
    rollouts = recorded_rollouts(len(texts), 1)
    extras = {name: tuple(column) for name, column in columns.items()}
    return replace(rollouts, response_text=texts, extras=extras)


def scores(rewards, name: str | None = None) -> list[float | None]:
    """Totals, or one component; None for invalid rows."""
    column = rewards.totals if name is None else rewards.components[name]
    return [x if v else None for x, v in zip(column.tolist(), rewards.valid.tolist(), strict=True)]


here = {"isolate": False}
LOCK = threading.Lock()


class TestWhatAFunctionIsGiven:
    rollouts = rollouts_of("4", "five", answer=["4", "5"])

    def test_names(self) -> None:
        seen = []

        def score(response, prompt, messages, finish_reason, num_tokens, answer, strict=False):
            seen.append((response, prompt, messages, finish_reason, num_tokens, answer, strict))
            return response == answer

        rewards = FunctionReward(score, **here)(self.rollouts)
        assert scores(rewards, "score") == [1.0, 0.0]
        assert seen[0] == ("4", "prompt 0", "prompt 0", "length", 4, "4", False)

    def test_a_single_argument_of_any_name_is_the_response(self) -> None:
        assert scores(FunctionReward(lambda text: len(text), **here)(self.rollouts)) == [1.0, 4.0]
        assert scores(FunctionReward(len, **here)(self.rollouts), "len") == [1.0, 4.0]
        assert scores(FunctionReward(lambda x, /, scale=2: scale * len(x), **here)(self.rollouts)) == [2.0, 8.0]
        assert scores(FunctionReward(lambda answer: int(answer), **here)(self.rollouts)) == [4.0, 5.0]

    def test_everything(self) -> None:
        given = []
        FunctionReward(lambda response, **rest: given.append(rest) or 0.0, **here)(self.rollouts)
        assert set(given[0]) == {"prompt", "messages", "finish_reason", "num_tokens", "answer"}

    @pytest.mark.parametrize(
        "fn", [lambda response, anwser: 0.0, lambda anwser: 0.0], ids=["two arguments", "a column misspelt"]
    )
    def test_an_unknown_name(self, fn) -> None:
        node = FunctionReward(fn, **here)
        with pytest.raises(DataError, match=r"'anwser'.*did you mean 'answer'"):
            node(self.rollouts)
        with pytest.raises(DataError):
            node.check_columns(["answer"])

    def test_required_columns(self) -> None:
        assert FunctionReward(lambda response, answer, level=1: 0.0).required_columns() == ("answer",)
        assert FunctionReward(lambda text: 0.0).required_columns() == ()
        assert FunctionReward(lambda responses, answers: 0.0).required_columns() == ()

    def test_batched(self) -> None:
        def score(responses: list[str], answers: list[str]) -> list[bool]:
            return [r == a for r, a in zip(responses, answers, strict=True)]

        assert scores(FunctionReward(score, **here)(self.rollouts), "score") == [1.0, 0.0]
        plain = FunctionReward(lambda response: np.asarray([len(r) for r in response]), batched=True, **here)
        assert scores(plain(self.rollouts)) == [1.0, 4.0]
        assert scores(FunctionReward(lambda r: torch.ones(len(r)), batched=True, **here)(self.rollouts)) == [1, 1]

    def test_prompt_text(self) -> None:
        chat = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": [{"type": "text", "text": "se"}, {"type": "text", "text": "cond"}]},
        ]
        assert prompt_text(chat) == "second"
        assert prompt_text(chat[:2]) == "first"
        assert prompt_text("text") == "text"
        assert prompt_text([]) == ""


class TestWhatAFunctionMayReturn:
    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (None, "returned None"),
            ("1.0", "returned a str ('1.0')"),
            (math.nan, "returned nan"),
            (-math.inf, "returned -inf"),
            (10**400, "returned a int: OverflowError: int too large to convert to float"),
            (1e39, "returned 1e+39"),
            ([1.0, 2.0], "returned a list of 2"),
            ({}, "returned no components"),
            ({"a": 1.0, "b": None}, "component 'b': returned None"),
            ({1: 1.0}, "returned a component whose name is a int"),
            pytest.param(object(), "returned a object", id="object"),  # its repr differs between processes
            (1j, "returned a complex"),
        ],
        ids=str,
    )
    def test_anything_but_a_number_is_invalid(self, value, reason: str) -> None:
        rewards = FunctionReward(lambda r: value, max_invalid_fraction=1.0, **here)(rollouts_of("a"))
        assert rewards.reasons == (reason,) and rewards.valid.tolist() == [0]
        assert math.isnan(float(rewards.totals[0])), "never 0"

    def test_numbers(self) -> None:
        for value in (True, 2, 2.5, np.float32(0.5), np.bool_(True), np.int64(3), torch.tensor(1.5)):
            assert scores(FunctionReward(lambda r, v=value: v, **here)(rollouts_of("a"))) == [float(value)]

    def test_components(self) -> None:
        def score(response: str) -> dict[str, float]:
            return {"right": len(response) > 1, "format": 0.5}

        rewards = FunctionReward(score, **here)(rollouts_of("a", "bc"))
        assert (scores(rewards, "right"), scores(rewards, "format")) == ([0.0, 1.0], [0.5, 0.5])

    def test_rows_with_other_components_than_most_are_invalid(self) -> None:
        def score(response: str):
            return {"right": 1.0} if response == "x" else {"right": 1.0, "format": 1.0}

        rewards = FunctionReward(score, **here)(rollouts_of("a", "x", "b"))
        assert scores(rewards) == [2.0, None, 2.0]
        assert "['right'], most rows ['format', 'right']" in rewards.reasons[1]

    @pytest.mark.parametrize(
        ("result", "reason"),
        [
            ([1.0], "returned 1 rewards for 3 rows"),
            (1.0, "returned a float instead of a list"),
            ("abc", "returned a str ('abc') instead of a list"),
        ],
    )
    def test_a_batch_of_the_wrong_size(self, result, reason: str) -> None:
        node = FunctionReward(lambda responses: result, max_invalid_fraction=1.0, **here)
        assert node(rollouts_of("a", "b", "c")).reasons == (reason,) * 3

    def test_a_batch_with_some_failures(self) -> None:
        rewards = FunctionReward(lambda responses: [1.0, None, 0.0], **here)(rollouts_of("a", "b", "c"))
        assert scores(rewards) == [1.0, None, 0.0]

    def test_async_functions(self) -> None:
        async def score(response: str) -> float:
            return 1.0

        assert scores(FunctionReward(score, **here)(rollouts_of("a"))) == [1.0]


class TestIsolated:
    def test_every_failure_stays_with_its_row(self) -> None:
        def misbehave(response: str) -> float:
            if response == "raise":
                return 1 / 0
            if response == "hang":
                time.sleep(1000)
            if response == "exit":
                os._exit(7)
            if response == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if response == "print":
                print("x" * 100_000)
            return 1.0

        texts = ["ok", "raise", "print", "hang", "ok", "exit", "kill", "ok", "ok"]
        reported: dict[str, float] = {}
        with use_step(StepContext(report=reported.__setitem__)):
            rewards = FunctionReward(misbehave, timeout=6.0, num_workers=2)(rollouts_of(*texts))
        assert scores(rewards, "misbehave") == [1.0, None, 1.0, None, 1.0, None, None, 1.0, 1.0]
        assert [r for r in rewards.reasons if r] == [
            "raised ZeroDivisionError: division by zero",
            "timed out after 6 s",
            "process exited with code 7",
            "process killed by SIGKILL",
        ]
        assert reported == {"invalid_rows": 4, "misbehave_mean": 1.0}

    def test_a_batch_that_hangs(self) -> None:
        node = FunctionReward(lambda responses: time.sleep(1000), timeout=0.5, max_invalid_fraction=1.0)
        assert node(rollouts_of("a", "b")).reasons == ("timed out after 0.5 s",) * 2

    def test_the_processes_are_kept_and_closed(self, bindings: Bindings) -> None:
        node = FunctionReward(lambda response: os.getpid())
        first, second = (scores(node(rollouts_of("a")))[0] for _ in range(2))
        assert first == second != os.getpid()
        ((_, pool),) = bindings.resources.values()
        pool.close()
        with pytest.raises(ProcessLookupError):
            os.kill(int(first), 0)

    def test_a_function_that_cannot_travel(self) -> None:
        with pytest.raises(FlowError, match="isolate=False"):
            FunctionReward(lambda response, lock=LOCK: 1.0)(rollouts_of("a"))

    def test_a_function_of_a_script(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "from dataclasses import replace\n"
            "from flowrl.nodes import FunctionReward\n"
            "from tests.tiny import recorded_rollouts\n"
            "bonus = 2\n"
            "def score(response, answer):\n"
            "    return bonus * (response == answer)\n"
            "rollouts = replace(recorded_rollouts(2, 1), response_text=('0', '?'))\n"
            "print(FunctionReward(score)(rollouts).totals.tolist())\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
        assert (run.stdout, run.stderr) == ("[2.0, 0.0]\n", "")


class TestBreaker:
    def test_it_names_what_went_wrong(self) -> None:
        def parse(response: str) -> float:
            return float(response)

        rollouts = rollouts_of("1", "x", "y", "z", "")
        node = FunctionReward(parse, **here)
        with pytest.raises(RewardError) as caught:
            node(rollouts)
        message = str(caught.value)
        assert "'parse' failed on 4 of 5 rows" in message
        assert "4 rows that raised ValueError; first (prompt_id 1, response 'x')" in message
        assert "could not convert string to float: 'x' at" in message and "test_reward.py:" in message
        assert scores(FunctionReward(parse, max_invalid_fraction=0.8, **here)(rollouts))[0] == 1.0

    def test_half_may_fail_and_no_rows_may_not(self) -> None:
        node = FunctionReward(lambda response: float(response), **here)
        assert scores(node(rollouts_of("1", "x"))) == [1.0, None]
        empty = node(rollouts_of("1").select([]))
        assert empty.num_rows == 0 and list(empty.components) == ["reward"]


class TestSums:
    rollouts = rollouts_of("a", "b")
    a = rewards_like(rollouts, score=[1.0, 2.0])
    b = rewards_like(rollouts, score=[10.0, 20.0], style=[100.0, 200.0])

    def test_components_are_kept(self) -> None:
        total = WeightedSum()(self.a, self.b)
        assert {n: c.tolist() for n, c in total.components.items()} == {
            "score": [1.0, 2.0],
            "score_2": [10.0, 20.0],
            "style": [100.0, 200.0],
        }
        assert total.totals.tolist() == [111.0, 222.0]

    def test_weights(self) -> None:
        assert WeightedSum((2.0, 0.5))(self.a, self.b).totals.tolist() == [57.0, 114.0]
        assert WeightedSum({"style": 0.0})(self.a, self.b).totals.tolist() == [11.0, 22.0]
        with pytest.raises(GraphError, match="2 weights"):
            WeightedSum((1.0,))(self.a, self.b)
        with pytest.raises(GraphError, match="did you mean 'style'"):
            WeightedSum({"stile": 1.0})(self.a, self.b)
        assert len(list(WeightedSum((math.inf,)).problems())) == 1

    def test_a_row_is_valid_only_where_all_are(self) -> None:
        total = WeightedSum((0.0, 1.0))(with_invalid(self.a, 0), self.b)
        assert total.valid.tolist() == [0, 1] and total.reasons == ("timed out", "")

    def test_rows_are_joined_by_id(self) -> None:
        total = WeightedSum()(self.a, self.b.select([1, 0]))
        assert total.totals.tolist() == [111.0, 222.0]

    def test_token_components(self) -> None:
        mask = self.rollouts.loss_mask
        tokens = rewards_like(self.rollouts, steps=mask.with_values(torch.ones(len(mask.values))))
        total = WeightedSum({"steps": 2.0})(self.a, tokens)
        assert total.totals.tolist() == [1.0 + 2 * 4, 2.0 + 2 * 1]


def test_rewards_like() -> None:
    rollouts = rollouts_of("a", "b")
    rewards = rewards_like(rollouts, length=rollouts.response_lengths, bad=[math.nan, 0.0])
    assert rewards.components["length"].tolist() == [4.0, 1.0]
    assert rewards.valid.tolist() == [0, 1] and "'bad'" in rewards.reasons[0]
    mask = rollouts.loss_mask
    poisoned = mask.with_values(torch.tensor([0.0, math.inf, 0.0, 0.0, 1.0]))
    assert rewards_like(rollouts, steps=poisoned).valid.tolist() == [0, 1]
    with pytest.raises(BatchError, match="'length'"):
        rewards_like(rollouts, length=[1.0])


def test_kl_penalty() -> None:
    rollouts = recorded_rollouts(1, 2, response_lengths=(5, 0), observations=True)
    ids = rollouts.prompt_id, rollouts.sample_id
    old = OldLogprobs(*ids, values_of(rollouts, -1.0).values, ORIGIN)
    ref = RefLogprobs(*ids, values_of(rollouts, -3.0).values, ORIGIN)
    rewards = KLPenalty(0.5)(rollouts, rewards_like(rollouts, score=[1.0, 2.0]), old, ref)
    assert rewards.token_components["kl"].to_lists() == [[-1.0, -1.0, 0.0, 0.0, -1.0], []]
    assert rewards.totals.tolist() == [-2.0, 2.0]
    again = KLPenalty(0.5, "k2")(rollouts, rewards, old, ref)
    assert set(again.token_components) == {"kl", "kl_2"}
    assert len(list(KLPenalty(-1.0, "?").problems())) == 2
    nothing = KLPenalty(0.5)(rollouts.select([]), rewards, old, ref)
    assert nothing.num_rows == 0 and nothing.token_components["kl"].num_rows == 0


def test_reward_model_score(bindings: Bindings) -> None:
    from flowrl.models import Model, RewardModel

    class Scorer:
        def score(self, sequences):
            return torch.tensor([0.5, math.nan])

    model = RewardModel("somewhere/judge")
    bindings.engines[model] = Scorer()  # type: ignore[assignment]
    rewards = RewardModelScore(model)(rollouts_of("a", "b"))
    assert scores(rewards, "judge-reward") == [0.5, None]
    assert list(RewardModelScore(model).problems()) == []
    assert len(list(RewardModelScore(Model("m")).problems())) == 1


def test_several_reward_models_that_score() -> None:
    """Two real ones, summed: what each gives is what its network gives, row by row, prompt alone included."""
    from transformers import LlamaForSequenceClassification

    from flowrl.models import RewardModel
    from flowrl.nodes.reward_shaping import ClipReward, RunningNormalization
    from flowrl.runtime.worker import open_engine
    from tests.tiny import tiny_model, tiny_tokenizer

    torch.manual_seed(0)
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, 0
    networks = [LlamaForSequenceClassification(config).eval() for _ in range(2)]
    helpful, kind = (
        RewardModel(network, name=name, tokenizer=tiny_tokenizer(), device="cpu")
        for network, name in zip(networks, ("helpful", "kind"), strict=True)
    )
    rollouts = recorded_rollouts(3, 2)
    said: dict[str, float] = {}
    with use_bindings(Bindings(open_engine)), use_step(StepContext(report=said.__setitem__)):
        parts = RewardModelScore(helpful)(rollouts), RewardModelScore(kind, component="kindness")(rollouts)
        total = WeightedSum({"kindness": 0.5})(*parts)
        shaped = RunningNormalization("statistics", clip=1.0)(ClipReward(-1.0, 1.0)(total))
        nothing = RewardModelScore(helpful)(rollouts.select([]))
    with torch.no_grad():
        a, b = ([float(n(row[None]).logits) for row in rollouts.tokens.rows()] for n in networks)
    expected = torch.tensor(a) + 0.5 * torch.tensor(b)
    torch.testing.assert_close(total.totals, expected, rtol=1e-5, atol=1e-5)
    assert set(total.components) == {"helpful", "kindness"} and bool(total.valid.all())
    assert said["helpful_mean"] == pytest.approx(sum(a) / 6, abs=1e-5)
    assert said["kindness_mean"] == pytest.approx(sum(b) / 6, abs=1e-5)
    clipped = expected.clamp(-1.0, 1.0)
    normal = ((clipped - clipped.mean()) / clipped.std()).clamp(-1.0, 1.0)
    torch.testing.assert_close(shaped.totals, normal, rtol=1e-4, atol=1e-4)
    assert nothing.num_rows == 0 and list(nothing.components) == ["helpful"]


def test_problems() -> None:
    assert list(FunctionReward(len).problems()) == []
    node = FunctionReward("len", timeout=0.0, num_workers=0, max_invalid_fraction=2.0)  # type: ignore[arg-type]
    assert len(list(node.problems())) == 4
