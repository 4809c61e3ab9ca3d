from dataclasses import replace

import pytest
import torch

from flowrl.batches import LogprobOrigin, Values
from flowrl.context import Bindings, StepContext, use_bindings, use_step
from flowrl.models import Model, ValueHead, ValueModel
from flowrl.nodes import Critic, PolicyLogprobs, ReferenceLogprobs
from flowrl.runtime.engines.base import TokenScores
from tests.tiny import recorded_rollouts

ROLLOUTS = recorded_rollouts(2, 2, response_lengths=(5, 1, 0, 4), observations=True)
ORIGIN = LogprobOrigin("actor", 0, "test", "float32")


class RecordingEngine:
    """Gives the sampler's log-probs less 0.25, and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def origin(self, sampling=None, temperature: float = 1.0) -> LogprobOrigin:
        return replace(ORIGIN, temperature=temperature)

    def logprobs(self, sequences, *, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
        self.asked.append(temperature)
        column = ROLLOUTS.rollout_logprobs
        return TokenScores(column.with_values(column.values - 0.25))

    def values(self, sequences, head: str | None = None):
        self.asked.append(head)
        return ROLLOUTS.rollout_logprobs


@pytest.fixture
def engine():
    engine = RecordingEngine()
    bindings = Bindings(lambda model, bindings: engine)  # type: ignore[arg-type,return-value]
    with use_bindings(bindings):
        yield engine


ACTOR = Model("actor")


@pytest.mark.parametrize(
    ("origin", "setting", "want"),
    [
        (None, None, 1.0),
        (ORIGIN, None, 1.0),
        (replace(ORIGIN, temperature=0.7), None, 0.7),
        (replace(ORIGIN, temperature=0.0), None, 1.0),  # greedy answers have no distribution: 1 it is
        (replace(ORIGIN, temperature=0.7), 1.0, 1.0),
    ],
)
def test_the_temperature_is_that_of_the_rollouts(engine: RecordingEngine, origin, setting, want) -> None:
    rollouts = replace(ROLLOUTS, origin=origin)
    old = PolicyLogprobs(ACTOR, temperature=setting)(rollouts)
    ref = ReferenceLogprobs(ACTOR.frozen(), temperature=setting)(rollouts)
    assert engine.asked == [want, want]
    assert old.origin.temperature == ref.origin.temperature == want
    assert torch.equal(old.old_logprobs.values, ref.ref_logprobs.values)
    assert old.row_ids is not None and torch.equal(old.row_ids, torch.stack([*ids(rollouts)], 1))


def ids(rollouts):
    return rollouts.prompt_id, rollouts.sample_id


@pytest.mark.parametrize(
    ("origin", "measured"),
    [
        (ORIGIN, True),
        (None, False),
        (replace(ORIGIN, top_p=0.9), False),
        (replace(ORIGIN, temperature=0.0), False),
    ],
)
def test_law_10_the_gap_to_the_sampler_is_measured(engine: RecordingEngine, origin, measured: bool) -> None:
    reported: dict[str, float] = {}
    with use_step(StepContext(report=reported.__setitem__)):
        PolicyLogprobs(ACTOR)(replace(ROLLOUTS, origin=origin))
    want = {"rollout_logprob_gap": 0.25, "rollout_logprob_gap_max": 0.25} if measured else {}
    assert reported == pytest.approx(want)


def test_critic(engine: RecordingEngine) -> None:
    head = ValueHead(ACTOR)
    for model in (ValueModel("critic"), head):
        values = Critic(model)(ROLLOUTS)
        assert isinstance(values, Values) and torch.equal(values.prompt_id, ROLLOUTS.prompt_id)
        assert list(Critic(model).problems()) == []
    assert engine.asked == [None, None], "the engine bound to a head knows which it is"
    assert len(Critic(ACTOR).problems()) == 1


def test_problems() -> None:
    assert list(PolicyLogprobs(ACTOR).problems()) == []
    assert len(list(ReferenceLogprobs(ACTOR, temperature=0.0).problems())) == 1
