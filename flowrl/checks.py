"""The rules that a flow must keep, one small function a rule. All violations come in one report.

What can be seen at a line (a wrong edge type, an unknown field, ``if ref``) raises there; what needs the whole graph is
collected here. The compiler adds what depends on the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl.batches import Rollouts
from flowrl.errors import CheckError
from flowrl.flow import RLFlow, _order_with_readers_first, _owner
from flowrl.graph import Call
from flowrl.models import BaseModel
from flowrl.nodes.loss import Loss
from flowrl.nodes.updater import Updater


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Args:
        rule: its name.
        node: the label of the call at fault, or the name of the Model.
        expected: what the rule asks for.
        received: what the flow has.
        do: what to change.
        where: the user's ``file:line``.
        argument: the argument at fault, where there is one.
        severity: an "error" refuses the flow, a "warning" is shown.
    """

    rule: str
    node: str
    expected: str
    received: str
    do: str = ""
    where: str = ""
    argument: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        thing = f"{self.node}, argument {self.argument!r}" if self.argument else self.node
        text = f"[{self.rule}] {thing}: expected {self.expected}; received {self.received}."
        if self.do:
            text += f" Do: {self.do}."
        return text + (f" (at {self.where})" if self.where else "")


@dataclass(frozen=True)
class Report:
    """What a check found."""

    violations: tuple[Violation, ...]
    calls: int

    @property
    def errors(self) -> tuple[Violation, ...]:
        return tuple(v for v in self.violations if v.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether nothing refuses the flow; warnings do not."""
        return not self.errors

    def __str__(self) -> str:
        if not self.violations:
            return f"The flow keeps all {len(RULES)} rules ({self.calls} calls)."
        warnings = len(self.violations) - len(self.errors)
        head = f"The flow breaks {len(self.errors)} rule(s)" + (f", with {warnings} warning(s)" if warnings else "") + ":"
        marks = {"error": "✗", "warning": "!"}
        return "\n".join([head, *(f"  {marks[v.severity]} {v}" for v in self.violations)])

    def raise_if_broken(self) -> None:
        """Raise one CheckError with all errors."""
        if not self.ok:
            raise CheckError(str(self), self.violations)


def check(flow: RLFlow) -> Report:
    """Run every rule over a flow."""
    found = [violation for rule in RULES for violation in rule(flow)]
    found.sort(key=lambda v: v.severity)  # errors first, else in the order of the rules
    return Report(tuple(found), len(flow.calls))


def unique_labels(flow: RLFlow) -> Iterator[Violation]:
    """Every call has a label of its own."""
    for label, count in Counter(flow.labels).items():
        if count > 1:
            calls = [c for c in flow.calls if flow.label(c) == label]
            yield Violation("unique label", label, "a label of its own for each call", f"{count} calls of this label",
                            "give each its own label=", ", ".join(c.where for c in calls))  # fmt: skip


def unique_model_names(flow: RLFlow) -> Iterator[Violation]:
    """Two distinct Models, or States, never share a name."""
    by_name: dict[str, list[object]] = {}
    for thing in (*flow.models, *flow.states):
        by_name.setdefault(thing.name, []).append(thing)
    for name, things in by_name.items():
        if len(things) > 1:
            yield Violation("unique model name", name, "one Model of this name",
                            f"{len(things)} distinct ones ({', '.join(type(t).__name__ for t in things)})",
                            "use one Model object for shared weights, or give name= to each", flow.where)  # fmt: skip


def one_writer(flow: RLFlow) -> Iterator[Violation]:
    """A parameter set has one writer; a value head shares the set of its trunk."""
    for calls in flow.writers().values():
        if len(calls) > 1:
            owner = next(_owner(t) for t in calls[0].node.writes())
            yield Violation("one writer", owner.name, "one writer of a parameter set",
                            "; ".join(f"{flow.label(c)} at {c.where}" for c in calls),
                            "give one Updater several loss terms: Updater(model)(term, term)", calls[-1].where)  # fmt: skip


def writable_models(flow: RLFlow) -> Iterator[Violation]:
    """Nobody writes a frozen Model."""
    for call in flow.calls:
        for thing in call.node.writes():
            if isinstance(thing, BaseModel) and not thing.writable:
                yield Violation("frozen model", flow.label(call), "a trainable Model to write",
                                f"{type(thing).__name__} {thing.name!r}, which is frozen",
                                "train its base, or make it trainable", call.where, "model")  # fmt: skip


def no_cycle(flow: RLFlow) -> Iterator[Violation]:
    """No call waits for itself: through data, or by reading a version that is written only after it."""
    _, cycle = _order_with_readers_first(flow)
    if cycle:
        yield Violation("cycle", cycle[0], "an order in which every reader of a Model runs before its writer",
                        " → ".join([*cycle, cycle[0]]),
                        "read the Model before its updater, or read a Snapshot of it", flow.call(cycle[0]).where)  # fmt: skip


def possible_settings(flow: RLFlow) -> Iterator[Violation]:
    """Settings of nodes and Models that can work."""
    for call in flow.calls:
        for problem in call.node.problems():
            yield Violation("settings", flow.label(call), *_split(problem), where=call.where)
    for model in flow.models:
        for problem in model.problems():
            yield Violation("settings", f"Model {model.name!r}", *_split(problem), where=flow.where)


def needed_inputs(flow: RLFlow) -> Iterator[Violation]:
    """Optional inputs that a setting asks for are wired."""
    for call in flow.calls:
        for problem in call.node.wiring_problems(frozenset(call.arguments)):
            yield Violation("missing input", flow.label(call), *_split(problem), where=call.where)


def _split(problem: str) -> tuple[str, str]:
    received, _, expected = problem.partition("; expected ")
    return expected or "settings that can work", received


def groups_for_group_relative(flow: RLFlow) -> Iterator[Violation]:
    """A node that compares within groups is fed by a rollout that makes groups."""
    for call in flow.calls:
        need = call.node.needs_groups
        for argument, ref in call.inputs() if need > 1 else ():
            if not issubclass(ref._type, Rollouts):
                continue
            for upstream in _ancestors(ref._call):
                size = getattr(upstream.node, "group_size", None)
                if size is not None and size < need:
                    yield Violation("groups", flow.label(call), f"groups of at least {need} responses a prompt",
                                    f"group_size={size} of {flow.label(upstream)} at {upstream.where}",
                                    f"set group_size of {flow.label(upstream)} to {need} or more", call.where, argument)  # fmt: skip


def _ancestors(call: Call) -> list[Call]:
    seen: dict[int, Call] = {}
    stack = [call]
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen[id(current)] = current
            stack += [ref._call for _, ref in current.inputs()]
    return list(seen.values())


def everything_used(flow: RLFlow) -> Iterator[Violation]:
    """Every call recorded from the flow's sources reaches an output of a flow."""
    for call in flow.unreached():
        yield Violation("unused call", call.node.name, "every recorded call to reach an output",
                        "a call whose result no output needs", "use its result, pass it to from_outputs, or remove it", call.where)  # fmt: skip


def model_kinds(flow: RLFlow) -> Iterator[Violation]:
    """A policy is sampled from, a critic gives values, a reward model scores; losses fit the Model they train."""
    for call in flow.calls:
        kind = call.node.wants_kind
        for model in call.node.models() if kind else ():
            if _kind(model) != kind:
                yield Violation("model kind", flow.label(call), f"a {kind} model",
                                f"{type(model).__name__} {model.name!r}", _KIND_HELP.get(kind or "", ""), call.where, "model")  # fmt: skip
        if isinstance(call.node, Updater):
            yield from _losses_fit(flow, call, call.node)


_KIND_HELP = {
    "policy": "use Model(…)",
    "value": "use ValueModel(…), or ValueHead(policy)",
    "reward": "use RewardModel(…)",
}


def _kind(model: BaseModel) -> str:
    base = getattr(model, "base", None)
    return base.kind if base is not None and model.kind == "policy" else model.kind


def _losses_fit(flow: RLFlow, call: Call, node: Updater) -> Iterator[Violation]:
    if node.model is None:
        return
    for argument, ref in call.inputs():
        loss = ref._call.node
        if not isinstance(loss, Loss):
            continue
        head = loss.head()
        if head is not None and _owner(head) is not _owner(node.model):
            yield Violation("loss and model", flow.label(call), f"a value head on {node.model.name!r}",
                            f"one on {_owner(head).name!r}", "train it in the updater of its own trunk", ref._call.where, argument)  # fmt: skip
        if "values" in loss.requires and head is None and _kind(node.model) != "value":
            yield Violation("loss and model", flow.label(call), f"a model with values for {loss.name}",
                            f"{type(node.model).__name__} {node.model.name!r}",
                            "name the head: ValueLoss(ValueHead(model))", ref._call.where, argument)  # fmt: skip
        if "logprobs" in loss.requires and _kind(node.model) != "policy":
            yield Violation("loss and model", flow.label(call), f"a policy for {loss.name}",
                            f"{type(node.model).__name__} {node.model.name!r}", "train the policy with it", ref._call.where, argument)  # fmt: skip


def same_logprob_origin(flow: RLFlow) -> Iterator[Violation]:
    """Old log-probs come from the policy that is trained, at the temperature that the rollouts were sampled at."""
    for call in flow.calls:
        if not isinstance(call.node, Updater) or call.node.model is None:
            continue
        for _, term in call.inputs():
            for argument, ref in term._call.inputs():
                producer = ref._call.node
                if ref._type.__name__ != "OldLogprobs" or not producer.models():
                    continue
                made_by = producer.models()[0]
                if _owner(made_by) is not _owner(call.node.model):
                    yield Violation("log-prob origin", flow.label(term._call), f"old log-probs of {call.node.model.name!r}, which {flow.label(call)} trains",
                                    f"those of {made_by.name!r} from {flow.label(ref._call)}", "compute them with PolicyLogprobs of the trained Model",
                                    term._call.where, argument)  # fmt: skip
    for call in flow.calls:
        temperature = getattr(call.node, "temperature", None)
        if temperature is None or not call.node.models():
            continue
        for argument, ref in call.inputs():
            for upstream in _ancestors(ref._call):
                sampling = getattr(upstream.node, "sampling", None)
                if sampling is not None and sampling.temperature not in (0, temperature):
                    yield Violation("log-prob origin", flow.label(call), f"temperature {sampling.temperature}, as {flow.label(upstream)} samples",
                                    f"temperature {temperature}", "leave temperature out: it is then taken from the rollouts", call.where, argument)  # fmt: skip


def full_support(flow: RLFlow) -> Iterator[Violation]:
    """Truncated sampling biases importance ratios, because the trainer's distribution has full support."""
    ratio_losses = [c for c in flow.calls if isinstance(c.node, Loss) and "old_logprobs" in c.arguments]
    for call in flow.calls:
        sampling = getattr(call.node, "sampling", None)
        if sampling is None or not (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
            continue
        if any(call in _ancestors(loss) for loss in ratio_losses):
            yield Violation("full support", flow.label(call), "sampling from the full distribution for a loss with importance ratios",
                            f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p}",
                            "sample with top_p=1, top_k=0, min_p=0", call.where, severity="warning")  # fmt: skip


def splittable_before_filter(flow: RLFlow) -> Iterator[Violation]:
    """What runs upstream of a filter is pulled again until enough groups are there, so it must work group by group."""
    for call in flow.calls:
        if not call.node.is_filter:
            continue
        for upstream in _ancestors(call):
            if upstream is not call and upstream.node.split == "whole":
                yield Violation("before a filter", flow.label(upstream), "a node that can be split by group",
                                f"split='whole', upstream of {flow.label(call)}", "move it behind the filter", upstream.where)  # fmt: skip
            if upstream is not call and upstream.node.writes():
                yield Violation("before a filter", flow.label(upstream), "no writer upstream of a filter",
                                f"{upstream.node.name}, which writes {upstream.node.writes()[0].name!r}", "move it behind the filter", upstream.where)  # fmt: skip


RULES: tuple[Callable[[RLFlow], Iterator[Violation]], ...] = (
    unique_labels,
    unique_model_names,
    one_writer,
    writable_models,
    no_cycle,
    possible_settings,
    needed_inputs,
    groups_for_group_relative,
    everything_used,
    model_kinds,
    same_logprob_origin,
    full_support,
    splittable_before_filter,
)

