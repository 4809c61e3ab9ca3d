"""Faults that a stranger found by trying to break the package, each with the right outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import AdamW, Advantages, Current, FlowError, FunctionReward, Model, Rewards, Rollout, Rollouts, Sampling
from flowrl.batches import Prompts
from flowrl.data import PromptDataset
from flowrl.errors import BatchError, DataError, GraphError, ModelError
from flowrl.nodes import GroupAdvantage, GRPOUpdater, Updater, rewards_like, source
from flowrl.runtime.checkpoint import list_checkpoints
from flowrl.runtime.run_folder import default_folder
from tests.flows import SAMPLING, prompts, reward, tiny_grpo
from tests.runs import quick_run
from tests.tiny import tiny_actor, tiny_folder, tiny_model, tiny_tokenizer


@flowrl.loss
def summed(current: Current, rollouts: Rollouts, advantages: Advantages) -> Any:
    return (-current.logprobs * advantages.advantages.values).sum()


@flowrl.loss
def stacked(current: Current, rollouts: Rollouts, advantages: Advantages) -> Any:
    return (-current.logprobs * advantages.advantages.values)[:, None]


@flowrl.loss
def nothing(current: Current, rollouts: Rollouts, advantages: Advantages) -> Any:
    return None


@flowrl.loss
def detached(current: Current, rollouts: Rollouts, advantages: Advantages) -> Any:
    return (-current.logprobs * advantages.advantages.values).detach()


@flowrl.loss
def plain_metric(current: Current, rollouts: Rollouts, advantages: Advantages) -> Any:
    return -current.logprobs * advantages.advantages.values, {"mean": 1.0}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (summed, r"The loss summed: its result has the wrong shape.*Tensor of shape \[\]"),
        (stacked, r"The loss stacked: its result has the wrong shape.*, 1\]"),
        (nothing, r"The loss nothing: its result has the wrong shape.*NoneType"),
        (detached, r"The loss detached has no gradient"),
        (plain_metric, r"The loss plain_metric: metric 'mean' has the wrong shape.*float"),
    ],
)
def test_a_loss_that_would_broadcast_or_train_nothing(loss: Any, message: str) -> None:
    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    advantages = GroupAdvantage()(rollouts, reward()(rollouts))
    flow = flowrl.RLFlow.from_outputs(Updater(actor)(loss(rollouts, advantages)))
    with pytest.raises(GraphError, match=message):
        flow.step(prompts().rows(0, 2, 0))


def test_a_node_that_writes_into_its_input() -> None:
    @flowrl.node(kind="reward")
    def careless(rollouts: Rollouts) -> Rewards:
        rollouts.tokens.values.fill_(3)
        return rewards_like(rollouts, x=[1.0] * rollouts.num_rows)

    rollouts = Rollout(tiny_actor(), group_size=2, sampling=SAMPLING)(prompts().rows(0, 2, 0))
    with pytest.raises(GraphError, match=r"careless writes into its input rollouts\.tokens\.values"):
        careless(rollouts)


def test_rewards_without_a_component() -> None:
    rollouts = Rollout(tiny_actor(), sampling=SAMPLING)(prompts().rows(0, 1, 0))
    with pytest.raises(BatchError, match="needs a component"):
        rewards_like(rollouts)


def test_a_reward_that_takes_anything_gets_the_response() -> None:
    def length(*args: Any) -> float:
        (response,) = args
        return float(len(response))

    rollouts = Rollout(tiny_actor(), sampling=SAMPLING)(prompts().rows(0, 2, 0))
    totals = FunctionReward(length, isolate=False)(rollouts).totals.tolist()
    assert totals == [float(len(text)) for text in rollouts.response_text]


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(weight_decay=float("nan")),
        AdamW(learning_rate=float("inf")),
        AdamW(eps=-1.0),
        AdamW(warmup_steps=-1),
        AdamW(schedule="linear", total_steps=-5),
        AdamW(betas=(0.9,)),  # type: ignore[arg-type]
        AdamW(learning_rate="1e-3"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_optimiser_settings_that_cannot_work(optimizer: AdamW) -> None:
    actor = tiny_actor()
    flow = flowrl.RLFlow(
        rollout=Rollout(actor, group_size=2, sampling=SAMPLING),
        reward=reward(),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(optimizer=optimizer),
    )
    assert [v.rule for v in flow.check().errors] == ["settings"]


def test_a_setting_of_the_wrong_type_hides_no_other_violation() -> None:
    actor = tiny_actor()
    flow = flowrl.RLFlow(
        rollout=Rollout(actor, group_size=1, sampling=Sampling(max_new_tokens="8")),  # type: ignore[arg-type]
        reward=reward(),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(),
    )
    assert {v.rule for v in flow.check().errors} == {"settings", "groups"}


@pytest.mark.parametrize("name", ["../escape", "a/b", "..", ".", "x" * 300, "\x00", "a\\b", 5])
def test_model_names_that_no_folder_can_have(name: Any) -> None:
    with pytest.raises(ModelError, match="cannot be the name of a Model"):
        Model("some/policy", name=name)


def test_a_model_from_the_current_folder_is_called_as_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "sub")
    assert (Model(".").name, Model("..").name) == ("sub", "mine")


def test_copies_of_checkpoints_are_the_users(tmp_path: Path) -> None:
    for name in ("step-000002", "step-000002-good", "step-backup"):
        (tmp_path / name).mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000002"]


def test_a_run_that_cannot_begin_leaves_the_users_folder(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    too_long = PromptDataset.from_rows([{"prompt": "x" * 500, "answer": "1"}])
    with pytest.raises(DataError, match="does not fit"):
        quick_run(tiny_grpo(), 1, out, data=too_long)
    assert out.is_dir()
    assert list(out.iterdir()) == []


def test_a_huge_limit_costs_only_what_the_model_takes() -> None:
    rollouts = Rollout(tiny_actor(), sampling=Sampling(max_new_tokens=10**9))(prompts().rows(0, 1, 0))
    assert int(rollouts.tokens.lengths.max()) <= 256


def test_a_tokenizer_of_another_model() -> None:
    actor = Model(
        tiny_model(vocab=100, bos_token_id=1, eos_token_id=2, pad_token_id=0), name="x", tokenizer=tiny_tokenizer()
    )
    with pytest.raises(ModelError, match=r"The tokenizer of Model\('x'\) does not fit it"):
        Rollout(actor, sampling=SAMPLING)(prompts().rows(0, 1, 0))


def test_a_chat_template_that_refuses(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system messages here') }}"
    actor = Model(str(tiny_folder(tmp_path)), name="x", tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"chat template of Model\('x'\) refuses.*no system messages here"):
        Rollout(actor, sampling=SAMPLING)(prompts().rows(0, 1, 0))


@pytest.mark.parametrize("seed", [2**70, "a", None])
def test_seeds_that_cannot_be_used(seed: Any) -> None:
    with pytest.raises(FlowError, match="The seed cannot be used"), flowrl.step(seed=seed):
        pass


def test_default_folders_stay_in_runs() -> None:
    assert default_folder("../../esc/😀 y") == Path("runs/esc-y-001")


def test_a_step_that_trains_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @flowrl.node(kind="reward")
    def never(rollouts: Rollouts) -> Rewards:
        return rewards_like(rollouts, x=[float("inf")] * rollouts.num_rows)

    actor = tiny_actor()
    flow = flowrl.RLFlow(
        rollout=Rollout(actor, group_size=2, sampling=SAMPLING),
        reward=never,
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(),
        batch_size=2,
    )
    result = quick_run(flow, 1, tmp_path / "run", progress=True)
    assert result.metrics.column("empty_updates").to_pylist() == [1.0]
    assert "Step 1: nothing was trained" in capsys.readouterr().out
