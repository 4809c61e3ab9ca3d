"""The loop: seeds, signals, time limits, resuming, non-finite steps, threads, what follows what."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import (
    Advantages,
    Ema,
    Evaluation,
    GroupAdvantage,
    Model,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Rollouts,
    Sampling,
    State,
    Updater,
    source,
)
from flowrl.errors import CheckpointError, NonFiniteError, UnsupportedError
from flowrl.nodes import rewards_like
from flowrl.runtime.signals import EndedAtOnce
from tests.flows import FAST, SAMPLING, prompts, reward, tiny_grpo
from tests.laws.everything import everything, held_out
from tests.runs import checkpoint_weights, checkpoints, quick_run, rows, training
from tests.tiny import tiny_actor, tiny_folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@flowrl.node
def look(rollouts: Rollouts, at: Callable[[int], None]) -> Rollouts:
    """Call a function of the step, in its middle."""
    from flowrl.context import current_step

    at(current_step().iteration + 1)
    return rollouts


def looked_at(at: Callable[[int], None], actor: Model | None = None) -> RLFlow:
    """GRPO that calls ``at(step)`` in the middle of each step."""
    actor = actor or tiny_actor()
    sampled = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    rollouts = look(sampled, at=at)
    advantages = GroupAdvantage()(rollouts, reward()(rollouts))
    old = flowrl.PolicyLogprobs(actor)(rollouts)
    return RLFlow.from_outputs(flowrl.GRPOUpdater(actor, optimizer=FAST)(rollouts, advantages, old))


# -- seeds ---------------------------------------------------------------------------------------------------------------


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        quick_run(tiny_grpo(), 2, tmp_path / name, seed=seed)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert checkpoint_weights(tmp_path / "a", 2) == checkpoint_weights(tmp_path / "b", 2)
    for a, c in zip(rows(tmp_path / "a"), rows(tmp_path / "c"), strict=True):
        assert a["loss"] != c["loss"] and a["entropy"] != c["entropy"]


def test_two_epochs_and_two_identical_prompts_draw_different_randomness(tmp_path: Path) -> None:
    seen: list[Rollouts] = []

    @flowrl.node
    def keep(rollouts: Rollouts) -> Rollouts:
        seen.append(rollouts)
        return rollouts

    actor = tiny_actor()
    sampled = keep(Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2)))
    advantages = GroupAdvantage()(sampled, reward()(sampled))
    frozen = flowrl.AdamW(learning_rate=0.0)  # the weights stay, so that only randomness can differ
    flow = RLFlow.from_outputs(
        flowrl.GRPOUpdater(actor, optimizer=frozen)(sampled, advantages, flowrl.PolicyLogprobs(actor)(sampled))
    )
    from flowrl.data import PromptDataset

    data = PromptDataset.from_rows([{"prompt": "the same"}, {"prompt": "the same"}], as_chat=False)
    quick_run(flow, 2, tmp_path / "run", data)
    texts = [tuple(tokens) for rollouts in seen for tokens in rollouts.response_tokens.to_lists()]
    assert len(texts) == 8
    assert len(set(texts)) == 8, "prompts, samples of a prompt and epochs draw for themselves"


# -- stopping --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_cleanly_and_it_goes_on_bit_for_bit(number: signal.Signals, tmp_path: Path) -> None:
    def at(step: int) -> None:
        if step == 2 and interrupting:
            os.kill(os.getpid(), number)

    interrupting = False
    quick_run(looked_at(at), 4, tmp_path / "reference")
    interrupting = True
    before = signal.getsignal(number)
    result = quick_run(looked_at(at), 4, tmp_path / "run")
    assert signal.getsignal(number) is before
    assert (result.status, result.steps, result.signal_number) == ("interrupted", 2, number)
    assert checkpoints(tmp_path / "run") == [2]
    resumed = quick_run(looked_at(lambda step: None), 4, tmp_path / "run", resume=True)
    assert (resumed.status, resumed.steps) == ("finished", 4)
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")
    assert checkpoint_weights(tmp_path / "run", 4) == checkpoint_weights(tmp_path / "reference", 4)


def test_a_signal_in_the_last_step_does_not_unfinish_it(tmp_path: Path) -> None:
    result = quick_run(looked_at(lambda step: os.kill(os.getpid(), signal.SIGINT)), 1, tmp_path / "run")
    assert (result.status, result.steps) == ("finished", 1)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    def at(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the step went on")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(EndedAtOnce) as error:
        quick_run(looked_at(at), 3, tmp_path / "run", checkpoint_every=1)
    assert error.value.signal_number == signal.SIGTERM
    assert checkpoints(tmp_path / "run") == [1]
    assert signal.getsignal(signal.SIGINT) is before
    result = quick_run(looked_at(lambda step: None), 3, tmp_path / "run", resume=True)
    assert result.steps == 3


def test_in_a_thread_signals_are_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(
            quick_run(looked_at(lambda step: results.append(signal.getsignal(signal.SIGINT))), 1, tmp_path / "run")
        )
    )
    thread.start()
    thread.join()
    assert results[0] is before
    assert results[1].status == "finished"


def test_a_time_limit_ends_before_a_step_that_would_pass_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.runtime import local

    clock = [1000.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: clock[0])

    def at(step: int) -> None:
        clock[0] += 10

    result = quick_run(looked_at(at), 9, tmp_path / "run", time_limit=35.0)
    assert (result.status, result.steps) == ("time limit", 3)
    assert checkpoints(tmp_path / "run") == [3]
    result = quick_run(looked_at(at), 9, tmp_path / "run", time_limit=25.0, resume=True)
    assert (result.status, result.steps) == ("time limit", 5)


def test_a_time_limit_that_is_over_before_the_first_step(tmp_path: Path) -> None:
    result = quick_run(tiny_grpo(), 3, tmp_path / "run", time_limit=1e-9, report=True)
    assert (result.status, result.steps) == ("time limit", 0)
    assert checkpoints(tmp_path / "run") == []
    assert quick_run(tiny_grpo(), 1, tmp_path / "run", resume=True).steps == 1


# -- resuming ------------------------------------------------------------------------------------------------------------


def test_a_finished_run_goes_on_with_more_steps_and_has_nothing_to_do_with_as_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick_run(tiny_grpo(), 4, tmp_path / "reference")
    quick_run(tiny_grpo(), 2, tmp_path / "run")
    quick_run(tiny_grpo(), 4, tmp_path / "run", resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")
    before = checkpoint_weights(tmp_path / "run", 4)

    capsys.readouterr()
    again = quick_run(tiny_grpo(), 4, tmp_path / "run", resume=True, progress=True)
    assert (again.status, again.steps) == ("finished", 4)
    assert "there is nothing to do" in capsys.readouterr().out
    assert checkpoint_weights(tmp_path / "run", 4) == before
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")

    with pytest.raises(CheckpointError, match=r"more steps than are asked for.*at least 4.*num_steps=3"):
        quick_run(tiny_grpo(), 3, tmp_path / "run", resume=True)


def test_everything_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Two writers, frozen reference, Ema, Snapshot, State, evaluation, best checkpoint: resumed after every step."""
    actor = tiny_actor()
    options: dict[str, Any] = dict(seed=3, keep_best="eval/heldout/reward", checkpoint_every=1)
    quick_run(
        everything(actor), 4, tmp_path / "reference", prompts(4), evaluations=[held_out(actor, prompts(3))], **options
    )
    for steps in (1, 2, 3, 4):
        actor = tiny_actor()
        quick_run(
            everything(actor), steps, tmp_path / "run", prompts(4), evaluations=[held_out(actor, prompts(3), every=2)],
            resume=steps > 1, **options,
        )  # fmt: skip
    assert training(tmp_path / "run") == training(tmp_path / "reference")
    assert checkpoint_weights(tmp_path / "run", 4) == checkpoint_weights(tmp_path / "reference", 4)


@pytest.mark.parametrize("live", [False, True], ids=["folder", "live"])
def test_the_reference_stays_that_of_step_0(live: bool, tmp_path: Path) -> None:
    """After a resume too, also where the source on disk, or the live object, is another by then."""
    folder = tiny_folder(tmp_path / "model")

    def flow(seed: int) -> RLFlow:
        if not live and seed:
            tiny_folder(folder, seed=seed)
        actor = tiny_actor(seed) if live else Model(str(folder), name="tiny")
        return tiny_grpo(actor, kl_coef=0.1)

    quick_run(flow(0), 3, tmp_path / "reference")
    quick_run(flow(0), 1, tmp_path / "run")
    quick_run(flow(1), 3, tmp_path / "run", resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")
    assert rows(tmp_path / "run")[2]["kl"] != 0


def test_a_live_model_that_was_trained_in_this_process_resumes(tmp_path: Path) -> None:
    quick_run(tiny_grpo(kl_coef=0.1), 3, tmp_path / "reference")
    actor = tiny_actor()
    flow = tiny_grpo(actor, kl_coef=0.1)
    quick_run(flow, 2, tmp_path / "run")
    quick_run(flow, 3, tmp_path / "run", resume=True)  # the object holds the weights of step 2, not of step 0
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")


def test_an_untrained_model_that_changed_on_disk_is_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "reference", seed=4)

    def flow() -> RLFlow:
        reference = Model(str(folder), name="teacher", trainable=False)
        return RLFlow(
            rollout=Rollout(tiny_actor(), group_size=2, sampling=SAMPLING),
            reward=reward(),
            advantage_estimator=GroupAdvantage(),
            policy_updater=flowrl.GRPOUpdater(optimizer=FAST, kl_coef=0.1),
            reference=reference,
            batch_size=2,
        )

    quick_run(flow(), 1, tmp_path / "run")
    tiny_folder(folder, seed=5)
    with pytest.raises(CheckpointError, match="'teacher' has other weights than when the run began"):
        quick_run(flow(), 2, tmp_path / "run", resume=True)


def test_what_changed_since_a_run_began_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick_run(tiny_grpo(), 1, tmp_path / "run")
    quick_run(tiny_grpo(clip=0.3), 2, tmp_path / "run", resume=True, progress=True, micro_batch_tokens=99)
    out = capsys.readouterr().out
    assert "micro_batch_tokens from 4096 to 99" in out
    assert "GRPOLoss#0.clip from 0.2 to 0.3" in out
    assert out.count("Changed since the run began") == 2


def test_an_ema_that_only_an_evaluation_reads_follows(tmp_path: Path) -> None:
    def run(name: str, num_steps: int, **options: Any) -> None:
        actor = tiny_actor()
        ema = Ema(actor, decay=0.5)
        answers = Rollout(ema, sampling=Sampling(3, temperature=0.0))(source(Prompts, name="held_out", batch_size=4))
        gap = ReferenceLogprobs(actor)(answers)
        evaluation = Evaluation(RLFlow.from_outputs(reward()(answers), gap), prompts(4), every=1)
        quick_run(tiny_grpo(actor), num_steps, tmp_path / name, evaluations=[evaluation], **options)

    run("reference", 3)
    rewards = [row["eval/heldout/reward"] for row in rows(tmp_path / "reference")]
    assert len(set(rewards)) > 1, "the average does not move"
    run("run", 2)
    run("run", 3, resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")


# -- non-finite steps ----------------------------------------------------------------------------------------------------


@flowrl.loss
def poisoned(current: Any, rollouts: Rollouts, advantages: Advantages, when: Callable[[int], bool] = bool) -> Any:
    """A policy-gradient loss that is NaN for the rows of the second prompt."""
    from flowrl.context import current_step

    losses = -advantages.advantages.values * current.logprobs
    if when(current_step().iteration + 1):
        ids = rollouts.prompt_id[rollouts.loss_mask.row_of_value]
        losses = torch.where(ids % 2 == 1, torch.nan, losses)
    return losses


def poisoned_flow(when: Callable[[int], bool]) -> RLFlow:
    actor = tiny_actor()
    rollouts = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    advantages = GroupAdvantage()(rollouts, reward()(rollouts))
    return RLFlow.from_outputs(Updater(actor, optimizer=FAST)(poisoned(rollouts, advantages, when=when)))


def test_a_non_finite_step_is_skipped_named_dumped_and_replayable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quick_run(
        poisoned_flow(lambda s: s == 2), 3, tmp_path / "run", progress=True, checkpoint_every=1, keep_last=9
    )
    assert result.status == "finished"
    one, two, three = training(result)
    assert [r["skipped_steps"] for r in (one, two, three)] == [0, 1, 0]
    assert checkpoint_weights(tmp_path / "run", 1) == checkpoint_weights(tmp_path / "run", 2)
    assert checkpoint_weights(tmp_path / "run", 2) != checkpoint_weights(tmp_path / "run", 3)
    out = capsys.readouterr().out
    assert "Step 2: a loss or gradient was not finite; the optimiser step was skipped." in out
    assert "Rows (prompt_id, sample_id): (3, 0), (3, 1)." in out
    edges = tmp_path / "run" / "dumps" / "step-000002" / "edges"
    assert {p.name for p in edges.glob("*.arrow")} >= {
        "Rollout#0.arrow",
        "FunctionReward#0.arrow",
        "GroupAdvantage#0.arrow",
    }

    from flowrl.runtime.replay import replay_step

    assert replay_step(tmp_path / "run", 2).equal


def test_too_many_non_finite_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as error:
        quick_run(poisoned_flow(lambda s: s >= 3), 9, tmp_path / "run", max_nonfinite_steps=1, checkpoint_every=2)
    assert "2 iterations in a row" in str(error.value)
    assert "step 4, rows (prompt_id, sample_id) (7, 0), (7, 1)" in str(error.value)
    assert len(training(tmp_path / "run")) == 4
    assert '"status": "failed"' in (tmp_path / "run" / "run.json").read_text()
    # Repaired, it goes on from the last checkpoint.
    result = quick_run(poisoned_flow(lambda s: False), 4, tmp_path / "run", resume=True)
    assert [r["skipped_steps"] for r in training(result)] == [0, 0, 0, 0]
    assert not (tmp_path / "run" / "dumps" / "step-000003").exists(), "dumps of steps that are run again are gone"


def test_skipped_steps_are_counted_in_a_row_across_a_resume(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        quick_run(poisoned_flow(lambda s: s >= 2), 9, tmp_path / "reference", max_nonfinite_steps=2)
    quick_run(poisoned_flow(lambda s: s >= 2), 3, tmp_path / "run", max_nonfinite_steps=2)
    with pytest.raises(NonFiniteError):
        quick_run(poisoned_flow(lambda s: s >= 2), 9, tmp_path / "run", max_nonfinite_steps=2, resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "reference")
    assert len(rows(tmp_path / "run")) == 4


# -- the rest --------------------------------------------------------------------------------------------------------------


def test_staleness_is_refused(tmp_path: Path) -> None:
    flow = RLFlow(
        rollout=Rollout(tiny_actor(), group_size=2, sampling=SAMPLING, max_staleness=1),
        reward=reward(),
        advantage_estimator=GroupAdvantage(),
        policy_updater=flowrl.GRPOUpdater(),
    )
    with pytest.raises(UnsupportedError, match="Rollout#0 asks for max_staleness=1"):
        quick_run(flow, 1, tmp_path / "run")


def test_a_state_that_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    class Remember(flowrl.Node):
        state: State
        kind = "updater"

        def writes(self) -> tuple[Any, ...]:
            return (self.state,)

        def __call__(self, rollouts: Rollouts) -> flowrl.TrainStats:
            self.state.set({"when": threading.Lock()})
            return flowrl.TrainStats({}, 0, 0, 0)

    rollouts = Rollout(tiny_actor(), sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=2))
    flow = RLFlow.from_outputs(Remember(State("memory", {}))(rollouts))
    with pytest.raises(flowrl.FlowError, match=r"State 'memory' cannot be written.*a _thread\.lock"):
        quick_run(flow, 1, tmp_path / "run")


def test_resources_are_closed_also_when_a_node_raises(tmp_path: Path) -> None:
    class Pool:
        closed = 0

        def close(self) -> None:
            Pool.closed += 1

    class UsesPool(flowrl.Node):
        fail: bool = False
        kind = "reward"

        def setup(self, ctx: Any) -> Pool:
            return Pool()

        def __call__(self, rollouts: Rollouts) -> flowrl.Rewards:
            self.resource()
            if self.fail:
                raise RuntimeError("broken")
            return rewards_like(rollouts, r=rollouts.response_lengths)

    def flow(fail: bool) -> RLFlow:
        return RLFlow(
            rollout=Rollout(tiny_actor(), group_size=2, sampling=SAMPLING),
            reward=UsesPool(fail),
            advantage_estimator=GroupAdvantage(),
            policy_updater=flowrl.GRPOUpdater(),
            batch_size=2,
        )

    quick_run(flow(False), 1, tmp_path / "a")
    assert Pool.closed == 1
    with pytest.raises(RuntimeError, match="broken") as error:
        quick_run(flow(True), 1, tmp_path / "b")
    assert Pool.closed == 2
    assert error.value.__notes__ == ["in call 'UsesPool#0' (UsesPool), step 1"]
