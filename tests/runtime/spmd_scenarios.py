"""What the tests of the spmd runtime run on every rank: PPO with a filter, and trouble at a chosen place."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flowrl
from flowrl import (
    GAE,
    AdamW,
    Critic,
    DropUniformGroups,
    Evaluation,
    FunctionReward,
    KLPenalty,
    PolicyLogprobs,
    PPOLoss,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Rollouts,
    State,
    Updater,
    ValueModel,
    ValueUpdater,
    source,
)
from flowrl.compiler.strategy import Strategy
from flowrl.context import current_step
from flowrl.errors import FlowError, RankError, RunFolderError
from flowrl.nodes.kl_control import AdaptiveKL
from flowrl.runtime import checkpoint
from flowrl.runtime.ranks import tells
from flowrl.runtime.torchrun import world_rank
from tests.flows import SAMPLING, prompts
from tests.runtime import spmd_nodes
from tests.tiny import tiny_actor

MICRO_BATCH_TOKENS = 40


@dataclass
class Trouble:
    """What happens at a chosen place of a run.

    Args:
        kind: "raise", "hang", "kill", "stop" (no line of Python runs any more), "terminate", or to torchrun: "orphan" (it is
            killed), "end" (SIGTERM), "interrupt" and "interrupt twice" (Ctrl-C).
        place: "load" (of a Model), "reward", "host" (a node without a Model, on rank 0), "actor" (a node that holds the actor,
            on every rank), "engine" (in the middle of a forward pass).
        rank: which rank it happens on.
        step: from 1.
    """

    kind: str = ""
    place: str = ""
    rank: int = 0
    step: int = 0

    def here(self, place: str) -> None:
        step = current_step().iteration + 1
        if (place, world_rank(), step) != (self.place, self.rank, self.step):
            return
        self.step = 0  # once
        mine, torchruns = os.getpid(), os.getppid()
        sent = {
            "kill": [(mine, signal.SIGKILL)],
            "stop": [(mine, signal.SIGSTOP)],
            "terminate": [(mine, signal.SIGTERM)],
            "orphan": [(torchruns, signal.SIGKILL)],
            "end": [(torchruns, signal.SIGTERM)],
            "interrupt": [(torchruns, signal.SIGINT)],
            "interrupt twice": [(torchruns, signal.SIGINT)] * 2,
        }
        if self.kind == "raise":
            raise ValueError("nothing to see")
        if self.kind == "hang":
            time.sleep(10_000)
        for number, (process, which) in enumerate(sent[self.kind]):
            time.sleep(number)
            os.kill(process, which)
        time.sleep(0.5)  # a signal arrives when it does


def reach_engines() -> None:
    """Let trouble find its way into the loading of Models, and into their forward passes."""
    from flowrl.runtime import local, worker

    def open_engine(model: Any, bindings: Any) -> Any:
        TROUBLE.here("load")
        engine: Any = worker.open_engine(model, bindings)
        engine.network.module.register_forward_pre_hook(lambda *_: TROUBLE.here("engine"))
        return engine

    local.open_engine = open_engine


TROUBLE = Trouble()


class Calls:
    """A reward that writes down each of its calls: a line with the rank."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def __call__(self, response: str) -> float:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{world_rank()}\n")
        TROUBLE.here("reward")
        return sum(c in "aeiouAEIOU" for c in response) / max(1, len(response)) + 0.01 * len(response)


@flowrl.node
def looked_at(rollouts: Rollouts) -> Rollouts:
    """A node that holds no Model, and so runs on rank 0."""
    TROUBLE.here("host")
    return rollouts


@flowrl.node
def scored_by(rollouts: Rollouts, model: flowrl.Model | None = None) -> Rollouts:
    """A node that holds a Model, and so runs on every rank: a conversation of them, and trouble before it."""
    assert model is not None
    TROUBLE.here("actor")
    model.bound_engine().logprobs(rollouts)
    return rollouts


def ppo(
    log: Path | None = None, learning_rate: float = 1e-3, actor: flowrl.Model | None = None
) -> tuple[RLFlow, flowrl.Model, ValueModel]:
    """Actor, critic, reference, adaptive KL in the reward, a filter, two epochs of two minibatches."""
    actor = actor or tiny_actor()
    critic = ValueModel.from_policy(actor)
    slow = AdamW(learning_rate=learning_rate)  # differences in the order of sums stay small
    coefficient = State("kl_coef", 0.05)
    sampled = Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="prompts", batch_size=3))
    scores = FunctionReward(Calls(log), isolate=False, label="reward")(sampled)
    kept = DropUniformGroups(max_pulls=3)(sampled, scores)
    rollouts = scored_by.options(label="scored")(looked_at.options(label="looked")(kept), model=actor)
    values = Critic(critic)(rollouts)
    old = PolicyLogprobs(actor)(rollouts)
    ref = ReferenceLogprobs(actor.frozen())(rollouts)
    rewards = KLPenalty(coefficient)(rollouts, scores, old, ref)
    advantages = GAE(gamma=1.0, lam=0.95)(rollouts, rewards, values, old, ref)
    flow = RLFlow.from_outputs(
        Updater(actor, epochs=2, num_minibatches=2, optimizer=slow)(
            PPOLoss(kl_coef=coefficient)(rollouts, advantages, old, ref)
        ),
        ValueUpdater(critic, optimizer=slow)(rollouts, values, advantages),
        AdaptiveKL(coefficient, target=0.1, horizon=100)(rollouts, old, ref),
    )
    return flow, actor, critic


def train(
    out: str | Path | None,
    *,
    runtime: str = "spmd",
    num_steps: int = 3,
    log: Path | None = None,
    learning_rate: float = 1e-3,
    actor: flowrl.Model | None = None,
    **options: Any,
) -> flowrl.RunResult:
    """Train quietly, with an evaluation before and after."""
    torch.set_num_threads(1)
    flow, actor, _ = ppo(log, learning_rate, actor)
    held_out = RLFlow.from_outputs(
        FunctionReward(Calls(), isolate=False)(
            Rollout(actor, group_size=2, sampling=SAMPLING)(source(Prompts, name="held_out", batch_size=2))
        )
    )
    usual: dict[str, Any] = dict(progress=False, report=False, export=False, samples_every=2, checkpoint_every=1)
    usual["evaluations"] = [Evaluation(held_out, prompts(3), every=10)]
    return flowrl.run(
        flow,
        prompts(),
        num_steps,
        out=out,
        runtime=runtime,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        **usual | options,
    )


def with_trouble(out: str, trouble: dict[str, Any], options: dict[str, Any]) -> None:
    """One run, with the trouble that is asked for; an error is the process's own."""
    TROUBLE.__dict__.update(trouble)
    reach_engines()
    strategy = Strategy(**options.pop("strategy", {}))
    train(out, strategy=strategy, **options)


def error_of(work: Callable[[], Any]) -> BaseException:
    """The error that ``work`` raises."""
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


# -- many things in one launch -------------------------------------------------------------------------------------------------


def everything(folder: str) -> None:
    """On two ranks: runs that end well, and such that end with an error on all ranks, one after the other."""
    place = Path(folder)
    none = Strategy(sharding="none")
    result = train(place / "none", log=place / "calls", strategy=none, export=True, report=True)
    assert (result.status, result.steps, result.rank) == ("finished", 3, world_rank())
    assert result.evaluation() is not None and result.report.exists()
    again = train(place / "none", resume=True, num_steps=4, strategies={"tiny": Strategy(tensor_parallel=2)})
    assert (again.status, again.steps) == ("finished", 4)

    chosen = train(place / "auto", num_steps=1, strategy="auto", checkpoint_every=None)
    assert (chosen.status, chosen.steps) == ("finished", 1)

    own_nodes(place)
    shuts_down(place)
    raises(place)
    checkpoints_beside_the_training(place)


def own_nodes(place: Path) -> None:
    """What every rank has seen of nodes that are not flowrl's, and what they may not do."""
    seen = spmd_nodes.train(place / "nodes")
    (place / f"seen.{world_rank()}.json").write_text(json.dumps(seen))
    error = error_of(lambda: spmd_nodes.train(place / "sneaks", sneaks=True))
    assert isinstance(error, FlowError) and "call 'sneaky#0' (sneaky), step 1 uses Model('tiny')" in str(error)
    error = error_of(lambda: spmd_nodes.train(place / "seeds", seed=world_rank()))
    assert str(error).startswith("Rank 1 would run something else than rank 0: seed differs. Expected 0, as on rank 0.")
    other = {"autocast": "bfloat16"} if world_rank() else {}
    error = error_of(lambda: train(place / "seeds", actor=tiny_actor(**other), evaluations=[]))
    assert "tiny.autocast differs. Expected 'None', as on rank 0. Received 'bfloat16'" in str(error)
    error = error_of(lambda: train(place / "seeds", actor=tiny_actor(seed=world_rank()), evaluations=[]))
    assert "the live model of 'tiny' differs" in str(error) and "Do: seed what makes it" in str(error)
    error = error_of(lambda: train(place / "rates", learning_rate=1e-3 * (1 + world_rank())))
    assert "Updater#0.optimizer differs" in str(error)
    assert not (place / "seeds").exists() and not (place / "rates").exists()


def shuts_down(place: Path) -> None:
    """A signal on one rank, the time limit, and the folder that rank 0 chooses."""
    TROUBLE.__dict__.update(kind="terminate", place="actor", rank=1, step=1)
    result = train(place / "terminated", num_steps=5, checkpoint_every=None)
    assert (result.status, result.steps, result.signal_number) == ("interrupted", 1, signal.SIGTERM)
    assert [p.name for p in (place / "terminated" / "checkpoints").iterdir()] == ["step-000001"]
    os.chdir(place)
    result = train(None, num_steps=5, time_limit=1e-3, name="mine", evaluations=[])
    assert (result.status, result.steps, str(result.folder)) == ("time limit", 0, "runs/mine-001")
    assert sorted(os.listdir("runs")) == ["mine-001"]


def checkpoints_beside_the_training(place: Path) -> None:
    """One that is begun gets its end where a rank raises; one that a rank cannot write ends the run before the next step."""
    first, seal = world_rank() == 0, checkpoint._seal

    def slow(path: Path) -> Any:
        if "checkpoints/.step-000001." in str(path):
            time.sleep(0.3)
        return seal(path)

    def full(path: Path) -> Any:
        if "checkpoints/.step-000002." in str(path) and not first:
            raise OSError(28, "No space left on device")
        return seal(path)

    options: dict[str, Any] = dict(num_steps=40, evaluations=[], strategy=Strategy(sharding="none"))
    checkpoint._seal = slow
    TROUBLE.__dict__.update(kind="raise", place="actor", rank=1, step=2)
    error = error_of(lambda: train(place / "begun", **options))
    assert isinstance(error, RankError if first else ValueError) and "nothing to see" in str(error)
    assert os.listdir(place / "begun" / "checkpoints") == ["step-000001"]
    checkpoint._seal = full
    error = error_of(lambda: train(place / "full", checkpoint_every=2, **options))
    assert isinstance(error, RankError if first else RunFolderError)
    assert "step-000002: the disk is full" in str(error) and tells(error) == (not first)
    assert os.listdir(place / "full" / "checkpoints") == []
    checkpoint._seal = seal


def raises(place: Path) -> None:
    """Errors that every rank hears of, and after which it can go on."""
    first = world_rank() == 0
    TROUBLE.__dict__.update(kind="raise", place="host", rank=0, step=2)
    error = error_of(lambda: train(place / "host", evaluations=[]))
    assert isinstance(error, ValueError) and str(error) == "nothing to see"
    assert error.__notes__ == ["on rank 0 of 2", "in call 'looked' (looked_at), step 2"]
    assert tells(error) == first
    TROUBLE.__dict__.update(kind="raise", place="actor", rank=1, step=1)
    error = error_of(lambda: train(place / "actor", evaluations=[], strategy=Strategy(sharding="none")))
    assert isinstance(error, RankError if first else ValueError) and "nothing to see" in str(error)
    assert error.__notes__ == ["on rank 1 of 2", "in call 'scored' (scored_by), step 1"]
    assert tells(error) == (not first)
    error = error_of(lambda: train(place / "host"))
    assert isinstance(error, RunFolderError) and "exists already" in str(error), "rank 0 looked, and both were told"
    error = error_of(lambda: train(place / "no", strategy=Strategy(tensor_parallel=4)))
    assert "tensor_parallel is 4; expected a divisor of the 2 ranks" in str(error)
    assert "torchrun --nproc-per-node 4 -m flowrl run FILE --runtime spmd" in str(error)
    error = error_of(lambda: train(place / "no", strategies={"tinny": Strategy()}))
    assert "strategies name 'tinny', which is no Model of this run" in str(error)
    error = error_of(lambda: train(place / "no", cluster=flowrl.Cluster("cpu")))
    assert "The cluster has 1 devices, and this run 2 ranks" in str(error)
    assert not (place / "no").exists()
