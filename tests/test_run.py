"""flowrl.run: bad input gets one clear error that names the thing before any training; what a run gives back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    Evaluation,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Model,
    Prompts,
    RLFlow,
    Rollout,
    Sampling,
    source,
)
from flowrl.compiler.strategy import Strategy
from flowrl.data import PromptDataset
from flowrl.errors import CheckError, DataError, FlowError, ModelError, RewardError, RunFolderError
from tests.flows import FAST, SAMPLING, prompts, reward, tiny_grpo
from tests.laws.everything import held_out
from tests.runs import checkpoints, quick_run
from tests.tiny import tiny_actor


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def flow_with(reward_function: Any, actor: Model | None = None, **options: Any) -> RLFlow:
    options = {"isolate": False} | options
    return RLFlow(
        rollout=Rollout(actor or tiny_actor(), group_size=2, sampling=SAMPLING),
        reward=FunctionReward(reward_function, **options),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(),
        batch_size=2,
    )


def untouched(folder: Path) -> bool:
    """Whether no trace of a run is left."""
    return not folder.exists()


# -- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, r"num_steps is 0; expected a whole number, at least 1"),
        ({"num_steps": 2.5}, r"num_steps is 2\.5"),
        ({"num_steps": True}, r"num_steps is True"),
        ({"runtime": "locl"}, r"runtime is 'locl'; did you mean 'local'\?"),
        ({"runtime": "kubernetes"}, r"runtime is 'kubernetes'; there is 'local'"),
        ({"seed": "one"}, r"seed is 'one'"),
        ({"seed": 2**63}, r"seed is 9223372036854775808; expected a whole number of at most 64 bits"),
        ({"checkpoint_every": 0}, r"checkpoint_every is 0"),
        ({"keep_last": 0}, r"keep_last is 0"),
        ({"time_limit": 0}, r"time_limit is 0; expected seconds, more than 0"),
        ({"max_nonfinite_steps": -1}, r"max_nonfinite_steps is -1"),
        ({"max_empty_steps": -1}, r"max_empty_steps is -1"),
        ({"samples_every": None}, r"samples_every is None"),
        ({"micro_batch_tokens": 0}, r"micro_batch_tokens is 0"),
        ({"dump_steps": [9]}, r"dump_steps holds 9; expected steps from 1 to num_steps=1"),
        ({"dump_steps": 9}, r"dump_steps is 9; expected a list of steps"),
        ({"deadline": True}, r"deadline is True; expected seconds, more than 0"),
        ({"time_limit": True}, r"time_limit is True; expected seconds, more than 0"),
        (
            {"async_checkpoints": "no", "resume": 1},
            r"resume is 1; expected True or False; async_checkpoints is 'no'; expected True or False",
        ),
        (
            {"export": None, "report": "", "progress": 0},
            r"export is None; .*; report is ''; .*; progress is 0; expected True",
        ),
        ({"cluster": "cpu"}, r"cluster is no Cluster"),
        ({"strategies": ["tiny"]}, r"strategies are no mapping"),
        ({"strategies": {"tiny": Strategy(tensor_parallel=1.0)}}, r"tiny: tensor_parallel is 1\.0"),  # type: ignore[arg-type]
        ({"strategy": {}}, r"strategy is \{\}; expected a flowrl\.Strategy, or None"),
        ({"strategy": Strategy(shard_layers=("Nope",))}, r"tiny has no module of class Nope"),
        ({"keep_best": "eval/heldout/reward"}, r"keep_best is 'eval/heldout/reward', but there is no evaluation"),
    ],
)
def test_settings(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    num_steps = options.pop("num_steps", 1)
    with pytest.raises(FlowError, match=message):
        quick_run(tiny_grpo(), num_steps, tmp_path / "run", **options)
    assert untouched(tmp_path / "run")


def test_all_settings_at_once(tmp_path: Path) -> None:
    with pytest.raises(FlowError) as error:
        quick_run(tiny_grpo(), 0, tmp_path / "run", runtime="ray2", keep_last=-1)
    assert [word in str(error.value) for word in ("num_steps", "runtime", "keep_last")] == [True] * 3


def test_evaluations(tmp_path: Path) -> None:
    actor = tiny_actor()
    trains = Evaluation(tiny_grpo(tiny_actor(name="other")), prompts(), name="trains")
    good = held_out(actor, prompts(2))
    bad_name = Evaluation(good.flow, prompts(2), name="a/b")
    never = Evaluation(good.flow, prompts(2), name="never", every=0)
    with pytest.raises(FlowError) as error:
        quick_run(
            tiny_grpo(actor),
            1,
            tmp_path / "run",
            evaluations=[trains, good, good, bad_name, never],
            keep_best="eval/heldot/reward",
        )
    message = str(error.value)
    assert "evaluation 'trains' trains (Updater#0); expected a flow without an updater" in message
    assert "2 evaluations are called 'heldout'; expected names of their own" in message
    assert "an evaluation is called 'a/b'" in message
    assert "evaluation 'never' runs every 0 steps" in message
    assert "keep_best is 'eval/heldot/reward'" in message and "did you mean 'heldout'?" in message


def test_a_flow_that_breaks_rules_lists_them_all(tmp_path: Path) -> None:
    flow = RLFlow(
        rollout=Rollout(tiny_actor(), group_size=1, sampling=Sampling(max_new_tokens=0)),
        reward=reward(),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(epochs=0),
    )
    with pytest.raises(CheckError) as error:
        quick_run(flow, 1, tmp_path / "run")
    assert [word in str(error.value) for word in ("group_size", "max_new_tokens", "epochs")] == [True] * 3
    assert untouched(tmp_path / "run")


# -- data ------------------------------------------------------------------------------------------------------------------


def test_data_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        PromptDataset.from_jsonl(tmp_path / "nothing.jsonl")
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "1+1"}\n')
    with pytest.raises(DataError, match=r"data\.jsonl.*no column 'prompt'"):
        PromptDataset.from_jsonl(file)
    file.write_text('{"prompt": "1+1"}\n{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"data\.jsonl.*line 2.*'prompt' has the wrong type"):
        PromptDataset.from_jsonl(file)
    file.write_text("")
    with pytest.raises(DataError, match=r"data\.jsonl is empty"):
        PromptDataset.from_jsonl(file)


def test_sources(tmp_path: Path) -> None:
    def refused(flow: RLFlow, data: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            quick_run(flow, 1, tmp_path / "run", data)
        assert untouched(tmp_path / "run")

    refused(
        tiny_grpo(), {"promts": prompts()}, r"data has 'promts', but no source is called so.*did you mean 'prompts'"
    )
    refused(
        tiny_grpo(), {}, r"There is no data set for source 'prompts'. Expected data=\{'prompts': …\}. Received no data"
    )
    refused(
        tiny_grpo(), [{"prompt": "a"}], r"The data of source 'prompts' are not a data set.*a list without batch_type"
    )
    from flowrl.data import DemonstrationDataset
    from tests.tiny import tiny_tokenizer

    demos = DemonstrationDataset.from_rows([{"prompt": "a", "completion": "b"}], tokenizer=tiny_tokenizer())
    refused(tiny_grpo(), demos, r"'prompts' gives the wrong rows. Expected Prompts. Received Demonstrations")
    actor = tiny_actor()
    two = [Rollout(actor, sampling=SAMPLING)(source(Prompts, name=name, batch_size=1)) for name in ("a", "b")]
    refused(
        RLFlow.from_outputs(*two),
        prompts(),
        r"This flow has 2 sources, and data is a single data set. Expected data=\{'a'",
    )


def test_columns(tmp_path: Path) -> None:
    def wants(response: str, answr: str) -> float:
        return 0.0

    with pytest.raises(
        DataError,
        match=r"reads column 'answr', which the data set of source 'prompts' does not have.*did you mean 'answer'",
    ):
        quick_run(flow_with(wants), 1, tmp_path / "run")
    assert untouched(tmp_path / "run")


def test_an_evaluation_is_checked_too(tmp_path: Path) -> None:
    def wants(response: str, solution: str) -> float:
        return 0.0

    actor = tiny_actor()
    answers = Rollout(actor, sampling=SAMPLING)(source(Prompts, name="p", batch_size=1))
    evaluation = Evaluation(RLFlow.from_outputs(FunctionReward(wants)(answers)), prompts())
    with pytest.raises(DataError, match=r"reads column 'solution', which the data set of source 'p' does not have"):
        quick_run(tiny_grpo(actor), 1, tmp_path / "run", evaluations=[evaluation])


def test_a_prompt_that_the_model_cannot_take(tmp_path: Path) -> None:
    rows = [{"prompt": "short", "answer": "1"}, {"prompt": "long " * 100, "answer": "2"}]
    data = PromptDataset.from_rows(rows, name="train.jsonl")
    with pytest.raises(
        DataError,
        match=r"train\.jsonl, row 2: the prompt does not fit Rollout#0. Expected 1 to 255 tokens.*Received 5\d\d tokens",
    ):
        quick_run(tiny_grpo(), 1, tmp_path / "run", data)
    assert untouched(tmp_path / "run")


# -- models and folders ------------------------------------------------------------------------------------------------------


def test_an_unknown_model(tmp_path: Path) -> None:
    for name in (str(tmp_path / "no-such-folder"), "nobody/no-such-model"):
        with pytest.raises(ModelError, match=name.split("/")[-1]):
            quick_run(flow_with(lambda response: 0.0, Model(name)), 1, tmp_path / "run")
        assert untouched(tmp_path / "run")


def test_a_run_folder_that_exists(tmp_path: Path) -> None:
    quick_run(tiny_grpo(), 1, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError, match=r"exists already.*Received a run.*go on with --resume"):
        quick_run(tiny_grpo(), 1, tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


# -- rewards -----------------------------------------------------------------------------------------------------------------


def bad_rewards() -> dict[str, Callable[..., Any]]:
    """Defined in a function, so that they travel by value: a process that needs none of this file starts quickly."""

    def raises(response: str) -> float:
        raise ValueError("not today")

    def hangs(response: str) -> float:
        import time

        time.sleep(100)
        return 0.0

    def dies(response: str) -> float:
        import os

        os._exit(7)

    return {"raises": raises, "hangs": hangs, "dies": dies}


BAD = bad_rewards()
REWARDS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "raises": (BAD["raises"], {}, r"'raises' failed on 4 of 4 rows.*raised ValueError: not today.*test_run\.py:\d+"),
    "NaN": (lambda response: float("nan"), {}, r"returned nan"),
    "a string": (lambda response: "good", {}, r"returned a str \('good'\)"),
    "None": (lambda response: None, {}, r"returned None"),
    "the wrong count": (lambda responses: [1.0], {}, r"returned 1 rewards for 4 rows"),
    "hangs": (BAD["hangs"], {"isolate": True, "timeout": 0.3, "num_workers": 2}, r"timed out after 0\.3 s"),
    "kills its process": (BAD["dies"], {"isolate": True, "num_workers": 2}, r"process exited with code 7"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_fails_stops_the_run_before_any_update(name: str, tmp_path: Path) -> None:
    function, options, message = REWARDS[name]
    actor = tiny_actor()
    before = {n: t.clone() for n, t in actor.source.state_dict().items()}
    with pytest.raises(RewardError, match=message) as error:
        quick_run(flow_with(function, actor, **options), 3, tmp_path / "run")
    assert error.value.__notes__ == ["in call 'FunctionReward#0' (FunctionReward), step 1"]
    assert all(torch.equal(t, before[n]) for n, t in actor.source.state_dict().items())
    assert checkpoints(tmp_path / "run") == []
    raw = json.loads((tmp_path / "run" / "run.json").read_text())
    assert raw["status"] == "failed" and raw["error"].startswith("RewardError: ")
    # Repaired, the run goes on in the same folder.
    if name == "raises":
        result = quick_run(flow_with(lambda response: len(response), tiny_actor()), 1, tmp_path / "run", resume=True)
        assert result.steps == 1


def test_a_reward_that_fails_seldom_is_invalid_rows_and_not_zeros(tmp_path: Path) -> None:
    calls = []

    def seldom(response: str) -> float:
        calls.append(response)
        if len(calls) == 2:
            raise ValueError("once")
        return float(len(calls))

    result = quick_run(flow_with(seldom), 1, tmp_path / "run")
    row = result.metrics.to_pylist()[0]
    assert row["reward/invalid"] == 0.25
    assert row["reward/mean"] == pytest.approx((1 + 3 + 4) / 3)
    assert row["FunctionReward#0/invalid_rows"] == 1


# -- what a run gives back -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_says(tmp_path: Path) -> None:
    actor = tiny_actor()
    result = flowrl.run(tiny_grpo(actor), prompts(), 2, out=tmp_path / "run", evaluations=[held_out(actor, prompts(2))],
                        progress=False, samples_every=1, dump_steps=[2])  # fmt: skip
    assert result.status == "finished" and result.steps == 2 and result.signal_number is None
    assert result.metrics.num_rows == 3
    names = {p.name for p in result.folder.iterdir()}
    assert {"run.json", "plan.json", "program.pkl", "metrics.parquet", "samples", "checkpoints", "evaluations", "dumps",
            "report.html", "export", "live"} <= names  # fmt: skip
    assert result.report.read_text().startswith("<!doctype html>")
    assert "1 of" not in result.report.read_text()[:100]
    assert sorted(p.name for p in (result.folder / "samples").iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    exported = Model(str(result.folder / "export" / "tiny"))
    from flowrl.context import Bindings, use_bindings
    from flowrl.runtime.worker import open_engine

    with use_bindings(Bindings(open_engine)):
        weights = dict(exported.bound_engine().weights())
        assert exported.bound_engine().encode(["abc"]).lengths.tolist() == [3]
    trained = actor.source.state_dict()
    assert all(torch.equal(t, trained[n]) for n, t in weights.items())


def test_a_flow_without_rollouts(tmp_path: Path) -> None:
    """Supervised fine-tuning: the loop asks for nothing that only sampling gives."""
    from flowrl import Demonstrations, SFTUpdater
    from flowrl.data import DemonstrationDataset

    actor = tiny_actor()
    rows = [{"prompt": f"say {c}", "completion": c} for c in "abc"]
    data = DemonstrationDataset.from_rows(rows, tokenizer=actor)
    update = SFTUpdater(actor, optimizer=FAST)(source(Demonstrations, name="demos", batch_size=2))
    result = quick_run(RLFlow.from_outputs(update), 4, tmp_path / "run", data, report=True, samples_every=1)
    losses = [row["loss"] for row in result.metrics.to_pylist()]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_the_folder_is_chosen_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = flowrl.run(tiny_grpo(), prompts(), 1, progress=False, report=False, export=False, name="mine")
    second = flowrl.run(tiny_grpo(), prompts(), 1, progress=False, report=False, export=False, name="mine")
    assert [str(r.folder) for r in (first, second)] == ["runs/mine-001", "runs/mine-002"]


def test_an_experiment_calls_its_end_unless_it_was_interrupted(tmp_path: Path) -> None:
    ended: list[flowrl.RunResult] = []
    experiment = flowrl.Experiment(
        tiny_grpo(), prompts(), 2, on_end=ended.append, options={"progress": False, "report": False, "export": False}
    )
    result = experiment.run(out=tmp_path / "run", num_steps=1)
    assert ended == [result] and result.steps == 1

    import signal

    @flowrl.node
    def interrupt(rollouts: flowrl.Rollouts) -> flowrl.Rewards:
        os.kill(os.getpid(), signal.SIGINT)
        return reward()(rollouts)

    flow = RLFlow(
        rollout=Rollout(tiny_actor(), group_size=2, sampling=SAMPLING),
        reward=interrupt,
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(),
        batch_size=2,
    )
    experiment = flowrl.Experiment(flow, prompts(), 2, on_end=ended.append, options={"progress": False})
    assert experiment.run(out=tmp_path / "interrupted").status == "interrupted"
    assert len(ended) == 1
    assert (tmp_path / "interrupted" / "report.html").exists()
    assert not (tmp_path / "interrupted" / "export").exists()
