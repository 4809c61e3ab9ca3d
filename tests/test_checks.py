"""Each rule of a flow is broken alone, and its message read once; all violations come at once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flowrl import (
    GAE,
    AdamW,
    Critic,
    Demonstrations,
    DropUniformGroups,
    Ema,
    Feedback,
    FunctionReward,
    GroupAdvantage,
    GRPOLoss,
    GRPOUpdater,
    KTOLoss,
    MismatchedCompletions,
    Model,
    Node,
    OptimalTokenBaseline,
    PolicyLogprobs,
    PPOLoss,
    PPOUpdater,
    Prompts,
    ReferenceLogprobs,
    ReMaxAdvantage,
    Rewards,
    RLFlow,
    Rollout,
    Rollouts,
    Sampling,
    SFTLoss,
    State,
    TrainStats,
    TruncatedImportance,
    Updater,
    ValueHead,
    ValueLoss,
    ValueModel,
    ValueUpdater,
    WeightedSum,
    source,
)
from flowrl.checks import RULES, check
from flowrl.errors import CheckError


class Wired:
    """Everything up to the advantages, to be broken in one place."""

    def __init__(self, rollout: Rollout | None = None, **changes: Any) -> None:
        self.actor = Model("m", name="actor")
        self.rollouts = (rollout or Rollout(self.actor, group_size=4))(source(Prompts, name="prompts", batch_size=8))
        if rollout is not None:
            self.actor = rollout.model  # type: ignore[assignment]
        self.rewards = FunctionReward(len)(self.rollouts)
        self.advantages = GroupAdvantage()(self.rollouts, self.rewards)
        self.old = PolicyLogprobs(self.actor, **changes)(self.rollouts)

    def update(self, updater: Any = None) -> TrainStats:
        return (updater or PPOUpdater(self.actor))(self.rollouts, self.advantages, self.old)


def lines(flow: RLFlow) -> list[str]:
    """The violations, without this file's name and line numbers."""
    return [re.sub(re.escape(__file__) + r":\d+", "HERE", str(v)) for v in flow.check().violations]


def test_a_flow_that_keeps_all_rules() -> None:
    report = RLFlow.from_outputs(Wired().update()).check()
    assert report.ok and str(report) == f"The flow keeps all {len(RULES)} rules (7 calls)."
    report.raise_if_broken()


def test_every_rule_says_what_it_is() -> None:
    assert all(rule.__doc__ for rule in RULES) and len({r.__name__ for r in RULES}) == len(RULES)


def test_unique_labels() -> None:
    w = Wired()
    one, two = FunctionReward(len, label="r")(w.rollouts), FunctionReward(len, label="r")(w.rollouts)
    assert lines(RLFlow.from_outputs(w.update(), WeightedSum()(one, two))) == [
        "[unique label] r: expected a label of its own for each call; received 2 calls of this label. "
        "Do: give each its own label=. (at HERE, HERE)"
    ]


def test_unique_model_names() -> None:
    w = Wired()
    twin = Model("other", name="actor", trainable=False)
    assert lines(RLFlow.from_outputs(w.update(), ReferenceLogprobs(twin)(w.rollouts))) == [
        "[unique model name] actor: expected one Model or State of this name; received 2 distinct ones (Model, Model). "
        "Do: use one object for shared weights, or give name= to each. (at HERE)"
    ]


def test_a_model_and_a_state_of_one_name() -> None:
    class Coefficient(Node):
        coef: State

        def __call__(self, rollouts: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

    w = Wired()
    (line,) = lines(RLFlow.from_outputs(w.update(), Coefficient(State("actor", 0.1))(w.rollouts)))
    assert "received 2 distinct ones (Model, State)" in line


def test_two_value_heads_of_one_name() -> None:
    w = Wired()
    values = Critic(ValueHead(w.actor))(w.rollouts)
    update = Updater(w.actor)(
        PPOLoss()(w.rollouts, w.advantages, w.old), ValueLoss(ValueHead(w.actor))(w.rollouts, values, w.advantages)
    )
    (line,) = lines(RLFlow.from_outputs(update))
    assert line.startswith("[unique model name] actor.value_head") and "(ValueHead, ValueHead)" in line


def test_one_writer() -> None:
    w = Wired()
    assert lines(RLFlow.from_outputs(w.update(), w.update())) == [
        "[one writer] actor: expected one writer of a parameter set; received Updater#0 at HERE and Updater#1 at HERE. "
        "Do: give one Updater several loss terms: Updater(model)(term, term). (at HERE)"
    ]


def test_one_writer_of_a_shared_trunk() -> None:
    w = Wired()
    head = ValueHead(w.actor)
    values = Critic(head)(w.rollouts)
    (line,) = lines(RLFlow.from_outputs(w.update(), ValueUpdater(head)(w.rollouts, values, w.advantages)))
    assert line.startswith("[one writer] actor: ")


def test_one_writer_of_a_state() -> None:
    class Writes(Node):
        coef: State

        def writes(self) -> tuple[State, ...]:
            return (self.coef,)

        def __call__(self, rollouts: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

    w, coef = Wired(), State("coef", 0.1)
    (line,) = lines(RLFlow.from_outputs(w.update(), Writes(coef)(w.rollouts), Writes(coef)(w.rollouts)))
    assert line.startswith("[one writer] coef: ") and "Writes#0" in line and "Writes#1" in line


@pytest.mark.parametrize("derive", [lambda a: a.frozen(), Ema, lambda a: Model("m", name="closed", trainable=False)])
def test_frozen_models_are_not_written(derive: Any) -> None:
    w = Wired()
    frozen = derive(w.actor)
    w.old = PolicyLogprobs(frozen)(w.rollouts)
    w2 = RLFlow.from_outputs(w.update(PPOUpdater(frozen)), PolicyLogprobs(w.actor, label="a")(w.rollouts))
    (line,) = [x for x in lines(w2) if "unused" not in x]
    assert line == (
        "[frozen model] Updater#0, argument 'model': expected a trainable Model to write; received "
        f"{type(frozen).__name__} {frozen.name!r}, which is frozen. Do: train its base, or make it trainable. (at HERE)"
    )


def test_cycles() -> None:
    class After(Node):
        model: Model

        def __call__(self, rollouts: Rollouts, stats: TrainStats) -> Rewards: ...  # type: ignore[empty-body]

    w = Wired()
    (line,) = lines(RLFlow.from_outputs(After(w.actor)(w.rollouts, w.update())))
    assert line in (
        "[cycle] Updater#0: expected an order in which every reader of a Model runs before its writer; received "
        "Updater#0 → After#0 → Updater#0. Do: read the Model before its updater, or read a Snapshot of it. (at HERE)",
        "[cycle] After#0: expected an order in which every reader of a Model runs before its writer; received "
        "After#0 → Updater#0 → After#0. Do: read the Model before its updater, or read a Snapshot of it. (at HERE)",
    )


def test_settings_of_nodes_and_models() -> None:
    w = Wired()
    updater = PPOUpdater(w.actor, epochs=0, clip=2.0, optimizer=AdamW(schedule="linear"))
    report = RLFlow.from_outputs(w.update(updater)).check()
    assert {(v.rule, v.node, v.received) for v in report.violations} == {
        ("settings", "Updater#0", "epochs is 0"),
        ("settings", "PPOLoss#0", "clip is 2.0"),
        ("settings", "Updater#0", "schedule is 'linear' without total_steps"),
    }
    w = Wired(Rollout(Model("m", name="actor", dtype="int4"), group_size=4))  # type: ignore[arg-type]
    assert lines(RLFlow.from_outputs(w.update())) == [
        "[settings] Model 'actor': expected float32, bfloat16 or float16; received dtype is 'int4'. (at HERE)"
    ]


@pytest.mark.parametrize(
    ("rollout", "received"),
    [
        (dict(group_size=0), "group_size is 0"),
        (dict(max_staleness=-1), "max_staleness is -1"),
        (dict(sampling=Sampling(max_new_tokens=0)), "max_new_tokens is 0"),
        (dict(sampling=Sampling(temperature=-1.0)), "temperature is -1.0"),
        (dict(sampling=Sampling(top_p=0.0)), "top_p is 0.0"),
        (dict(sampling=Sampling(top_k=-1)), "top_k is -1"),
        (dict(sampling=Sampling(min_p=1.0)), "min_p is 1.0"),
        (dict(group_size=2, sampling=Sampling(temperature=0.0)), "group_size is 2 at temperature 0"),
    ],
)
def test_settings_of_rollouts(rollout: dict[str, Any], received: str) -> None:
    flow = RLFlow.from_outputs(Rollout(Model("m"), **rollout)(source(Prompts, name="p")))
    (violation,) = flow.check().violations
    assert violation.rule == "settings" and violation.received.startswith(received)


def test_inputs_that_a_setting_needs() -> None:
    w = Wired()
    loss = GRPOLoss(kl_coef=0.1)(w.rollouts, w.advantages, w.old)
    assert lines(RLFlow.from_outputs(Updater(w.actor)(loss))) == [
        "[missing input] GRPOLoss#0: expected ReferenceLogprobs(…)(rollouts); "
        "received kl_coef is 0.1 without ref_logprobs. (at HERE)"
    ]


def test_unused_calls() -> None:
    w = Wired()
    Critic(ValueModel("v"))(w.rollouts)
    assert lines(RLFlow.from_outputs(w.update())) == [
        "[unused call] Critic: expected every recorded call to reach an output; received a call whose result no output "
        "needs. Do: use its result, pass it to from_outputs, or remove it. (at HERE)"
    ]


def test_unused_calls_in_a_notebook_are_warnings() -> None:
    names: dict[str, Any] = {"w": Wired(), "FunctionReward": FunctionReward}
    exec(compile("FunctionReward(len)(w.rollouts)", "/tmp/ipykernel_1/2.py", "exec"), names)
    report = RLFlow.from_outputs(names["w"].update()).check()
    assert report.ok and [v.rule for v in report.warnings] == ["unused call"]
    assert str(report).startswith("The flow keeps all 14 rules (7 calls), with 1 warning:\n  ! [unused call]")


def test_groups() -> None:
    w = Wired(Rollout(Model("m", name="actor"), group_size=1))
    assert lines(RLFlow.from_outputs(w.update())) == [
        "[groups] GroupAdvantage#0, argument 'rollouts': expected groups of at least 2 responses a prompt; received "
        "group_size=1 of Rollout#0 at HERE. Do: set group_size of Rollout#0 to 2 or more. (at HERE)"
    ]


def test_groups_are_followed_through_filters_only() -> None:
    w = Wired(Rollout(Model("m", name="actor"), group_size=1))
    kept = DropUniformGroups()(w.rollouts, w.rewards)
    advantages = GroupAdvantage(label="behind")(kept, w.rewards)
    loss = PPOLoss()(kept, advantages, w.old)
    flow = RLFlow.from_outputs(Updater(w.actor)(loss), w.advantages)
    behind = [v for v in flow.check().violations if v.node == "behind"]
    assert [v.rule for v in behind] == ["groups"]

    class Judged(Node):  # one judgement a response: no group is compared here
        def __call__(self, rollouts: Rollouts, *, judge: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

    w = Wired()
    judge = Rollout(Model("j", name="judge"), group_size=1)(source(Prompts, name="questions"))
    advantages = GroupAdvantage(label="judged")(w.rollouts, Judged()(w.rollouts, judge=judge))
    loss = PPOLoss()(w.rollouts, advantages, w.old)
    assert RLFlow.from_outputs(Updater(w.actor)(loss), w.advantages).check().ok


def test_model_kinds() -> None:
    w = Wired(Rollout(ValueModel("m", name="actor"), group_size=4))
    report = RLFlow.from_outputs(w.rewards, w.advantages, w.old).check()
    assert {(v.rule, v.node) for v in report.violations} == {
        ("model kind", "Rollout#0"),
        ("model kind", "PolicyLogprobs#0"),
    }
    assert lines(RLFlow.from_outputs(w.rewards, w.advantages, w.old))[0] == (
        "[model kind] Rollout#0, argument 'model': expected a policy model; received ValueModel 'actor'. "
        "Do: use Model(…). (at HERE)"
    )


def test_losses_that_do_not_fit_the_model() -> None:
    w = Wired()
    critic, other = ValueModel("v", name="critic"), Model("o", name="other")
    values = Critic(critic)(w.rollouts)
    plain = ValueLoss()(w.rollouts, values, w.advantages)
    (line,) = lines(RLFlow.from_outputs(Updater(w.actor)(PPOLoss()(w.rollouts, w.advantages, w.old), plain)))
    assert line == (
        "[loss and model] Updater#0, argument 'terms[1]': expected a model with values for ValueLoss; received Model "
        "'actor'. Do: name the head: ValueLoss(ValueHead(model)). (at HERE)"
    )
    w = Wired()
    foreign = ValueLoss(ValueHead(other))(w.rollouts, Critic(critic)(w.rollouts), w.advantages)
    (line,) = lines(RLFlow.from_outputs(Updater(w.actor)(PPOLoss()(w.rollouts, w.advantages, w.old), foreign)))
    assert "expected a value head on 'actor'; received one on 'other'" in line
    w = Wired()
    flow = RLFlow.from_outputs(
        Updater(critic)(PPOLoss()(w.rollouts, w.advantages, PolicyLogprobs(critic)(w.rollouts))), w.old
    )
    found = [v for v in flow.check().violations if v.rule == "loss and model"]
    assert [(v.expected, v.received) for v in found] == [("a policy for PPOLoss", "ValueModel 'critic'")]


def test_old_logprobs_of_another_model() -> None:
    w = Wired()
    other = Model("o", name="other")
    loss = PPOLoss()(w.rollouts, w.advantages, PolicyLogprobs(other, label="others")(w.rollouts))
    assert lines(RLFlow.from_outputs(Updater(w.actor)(loss), w.old)) == [
        "[log-prob origin] PPOLoss#0, argument 'old_logprobs': expected old log-probs of 'actor', which Updater#0 "
        "trains; received those of 'other' from others. Do: compute them with PolicyLogprobs of the trained Model. "
        "(at HERE)"
    ]


def test_old_logprobs_at_another_temperature() -> None:
    w = Wired(Rollout(Model("m", name="actor"), group_size=4, sampling=Sampling(temperature=0.7)), temperature=1.0)
    assert lines(RLFlow.from_outputs(w.update())) == [
        "[log-prob origin] PolicyLogprobs#0, argument 'sequences': expected temperature 0.7, as Rollout#0 samples; "
        "received temperature 1.0. Do: leave temperature out: it is then taken from the rollouts. (at HERE)"
    ]


def test_a_temperature_of_something_else_is_left_alone() -> None:
    class Annealed(Node):
        model: Model
        temperature: float = 3.0

        def __call__(self, rollouts: Rollouts) -> Rewards: ...  # type: ignore[empty-body]

    w = Wired()
    assert RLFlow.from_outputs(w.update(), Annealed(Model("j"))(w.rollouts)).check().ok


def test_truncated_sampling_is_a_warning() -> None:
    w = Wired(Rollout(Model("m", name="actor"), group_size=4, sampling=Sampling(top_p=0.9)))
    flow = RLFlow.from_outputs(w.update())
    assert flow.check().ok
    assert lines(flow) == [
        "[full support] Rollout#0: expected sampling from the full distribution for a loss with importance ratios; "
        "received top_p=0.9, top_k=0, min_p=0.0. Do: sample with top_p=1, top_k=0, min_p=0. (at HERE)"
    ]
    assert RLFlow.from_outputs(FunctionReward(len)(w.rollouts), w.advantages, w.old).check().warnings == ()


def test_what_is_upstream_of_a_filter() -> None:
    w = Wired()
    whitened = GAE(whiten=True)(w.rollouts, w.rewards, Critic(ValueModel("v"))(w.rollouts))

    class Sieve(DropUniformGroups):
        def __call__(self, rollouts: Rollouts, advantages: Any) -> Rollouts: ...  # type: ignore[empty-body,override]

    kept = Sieve()(w.rollouts, whitened)
    loss = PPOLoss()(kept, w.advantages, w.old)
    assert lines(RLFlow.from_outputs(Updater(w.actor)(loss))) == [
        "[before a filter] GAE#0: expected a node that can be called again for further groups, without a writer; "
        "received split='whole', upstream of Sieve#0. Do: move it behind the filter. (at HERE)"
    ]


def test_all_violations_come_at_once() -> None:
    actor = Model("m", name="actor")
    rollouts = Rollout(actor, group_size=1, sampling=Sampling(top_k=5))(source(Prompts, name="prompts"))
    rewards = FunctionReward(len)(rollouts)
    old = PolicyLogprobs(actor)(rollouts)
    FunctionReward(len)(rollouts)
    flow = RLFlow.from_outputs(
        GRPOUpdater(actor.frozen(), epochs=0, kl_coef=1.0)(rollouts, GroupAdvantage()(rollouts, rewards), old)
    )
    report = check(flow)
    assert [v.rule for v in report.violations] == [
        "frozen model", "settings", "missing input", "unused call", "groups", "log-prob origin", "full support"
    ]  # fmt: skip
    assert not report.ok and len(report.errors) == 6 and len(report.warnings) == 1
    text = str(report)
    assert text.startswith("The flow is refused: 6 violations, with 1 warning:\n  ✗ [frozen model] Updater#0")
    assert text.count("\n") == 7 and "\n  ! [full support] Rollout#0" in text
    with pytest.raises(CheckError) as info:
        report.raise_if_broken()
    assert str(info.value) == text and info.value.violations == report.violations


def test_log_probs_without_what_the_estimator_reads() -> None:
    actor = Model("m")
    rollouts = Rollout(actor, group_size=2)(source(Prompts, name="prompts", batch_size=2))
    old_logprobs = PolicyLogprobs(actor)(rollouts)
    advantages = OptimalTokenBaseline()(rollouts, FunctionReward(len)(rollouts), old_logprobs)
    report = RLFlow.from_outputs(PPOUpdater(actor)(rollouts, advantages, old_logprobs)).check()
    assert "[missing input] OptimalTokenBaseline#0: expected PolicyLogprobs(model, sum_pi_squared=True)" in str(report)


class TestColumnsOfTheSameRows:
    """Two rollouts of one source mint the same ids, so only the graph tells whose rows a column is about."""

    def flow(self, **wrong: str) -> RLFlow:
        actor = Model("m")
        rows = source(Prompts, name="prompts", batch_size=2)
        by_name = {name: Rollout(actor, group_size=2, label=name)(rows) for name in ("a", "b")}

        def of(what: str) -> Rollouts:
            return by_name[wrong.get(what, "a")]

        advantages = GroupAdvantage()(by_name["a"], FunctionReward(len)(of("rewards")))
        old, ref = PolicyLogprobs(actor)(of("old")), ReferenceLogprobs(actor.frozen())(of("ref"))
        weights = TruncatedImportance()(of("weights"), PolicyLogprobs(actor)(of("weights")))
        loss = GRPOLoss(kl_coef=0.1)(by_name["a"], advantages, old, ref, importance_weights=weights)
        b = by_name["b"]
        other = GRPOLoss()(b, GroupAdvantage()(b, FunctionReward(len)(b)), PolicyLogprobs(actor)(b))
        return RLFlow.from_outputs(Updater(actor)(loss, other))

    @pytest.mark.parametrize("what", ["rewards", "old", "ref", "weights"])
    def test_another_rollout_is_refused(self, what: str) -> None:
        found = [v for v in self.flow(**{what: "b"}).check().violations if v.rule == "same rows"]
        assert len(found) == 1 and "one computed from b" in found[0].received

    def test_the_right_one_is_fine(self) -> None:
        assert self.flow().check().ok

    def test_filters_and_greedy_baselines_are_fine(self) -> None:
        actor = Model("m")
        rows = source(Prompts, name="prompts", batch_size=2)
        sampled = Rollout(actor, group_size=2)(rows)
        rewards = FunctionReward(len)(sampled)
        kept = DropUniformGroups()(sampled, rewards)
        greedy = FunctionReward(len)(Rollout(actor, sampling=Sampling(temperature=0.0))(rows))
        advantages = ReMaxAdvantage()(kept, rewards, greedy_rewards=greedy)
        report = RLFlow.from_outputs(PPOUpdater(actor)(kept, advantages, PolicyLogprobs(actor)(sampled))).check()
        assert report.ok, report

    def test_the_references_of_kto_swapped(self) -> None:
        actor = Model("m")
        feedback = source(Feedback, name="feedback", batch_size=4)
        mismatched, reference = MismatchedCompletions()(feedback), ReferenceLogprobs(actor.frozen())
        right, wrong = reference(feedback), reference(mismatched)
        good = KTOLoss()(feedback, right, mismatched=mismatched, mismatched_ref=wrong)
        assert RLFlow.from_outputs(Updater(actor)(good)).check().ok
        swapped = KTOLoss()(feedback, wrong, mismatched=mismatched, mismatched_ref=right)
        report = RLFlow.from_outputs(Updater(actor)(swapped, good)).check()
        assert {v.argument for v in report.violations if v.rule == "same rows"} >= {"ref_logprobs"}


def test_a_setting_that_is_no_number() -> None:
    flow = RLFlow.from_outputs(Updater(Model("m"))(SFTLoss(weight=float("nan"))(source(Demonstrations, name="demos"))))
    assert any(v.received == "weight is nan" for v in flow.check().violations)
