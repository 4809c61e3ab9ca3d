"""The rules that a flow must keep, one small function a rule. All violations come in one report.

What can be seen at a line (a wrong edge type, an unknown field, ``if ref``) raises there; what needs the whole graph is
collected here. The compiler adds what depends on the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from flowrl.batches import OldLogprobs, RefLogprobs, Sequences
from flowrl.flow import RLFlow
from flowrl.graph import Call, Ref, in_notebook
from flowrl.models import BaseModel, State
from flowrl.nodes.base import Node, nan_problems
from flowrl.nodes.loss import Loss
from flowrl.nodes.updater import Updater
from flowrl.same_rows import columns_of_other_rows
from flowrl.violations import Report, Violation
from flowrl.weight_edges import order_with_readers_first, owner


def check(flow: RLFlow) -> Report:
    """Run every rule over a flow."""
    found = [violation for rule in RULES for violation in rule(flow)]
    found.sort(key=lambda v: v.severity)  # errors first, else in the order of the rules
    return Report(tuple(found), num_calls=len(flow.calls), num_rules=len(RULES))


# -- names -----------------------------------------------------------------------------------------------------------


def unique_labels(flow: RLFlow) -> Iterator[Violation]:
    """Every call has a label of its own."""
    for label, count in Counter(flow.labels).items():
        if count > 1:
            calls = [c for c in flow.calls if flow.label(c) == label]
            yield Violation(
                "unique label",
                label,
                expected="a label of its own for each call",
                received=f"{count} calls of this label",
                do="give each its own label=",
                where=", ".join(c.where for c in calls),
            )


def unique_model_names(flow: RLFlow) -> Iterator[Violation]:
    """Two distinct Models, or States, or one of each, never share a name."""
    by_name: dict[str, list[object]] = {}
    for thing in (*flow.models, *flow.states):
        by_name.setdefault(thing.name, []).append(thing)
    for name, things in by_name.items():
        if len(things) > 1:
            yield Violation(
                "unique model name",
                name,
                expected="one Model or State of this name",
                received=f"{len(things)} distinct ones ({', '.join(type(t).__name__ for t in things)})",
                do="use one object for shared weights, or give name= to each",
                where=flow.where,
            )


# -- writers and readers ---------------------------------------------------------------------------------------------


def one_writer(flow: RLFlow) -> Iterator[Violation]:
    """A parameter set has one writer; a value head shares the set of its trunk."""
    for calls in flow.writers().values():
        if len(calls) > 1:
            things = [t for t in calls[0].node.writes() if calls[-1] in flow.writers()[id(owner(t))]]
            yield Violation(
                "one writer",
                owner(things[0]).name,
                expected="one writer of a parameter set",
                received=" and ".join(f"{flow.label(c)} at {c.where}" for c in calls),
                do="give one Updater several loss terms: Updater(model)(term, term)",
                where=calls[-1].where,
            )


def writable_models(flow: RLFlow) -> Iterator[Violation]:
    """Nobody writes a frozen Model."""
    for call in flow.calls:
        for thing in call.node.writes():
            if isinstance(thing, BaseModel) and not thing.writable:
                yield Violation(
                    "frozen model",
                    flow.label(call),
                    expected="a trainable Model to write",
                    received=f"{type(thing).__name__} {thing.name!r}, which is frozen",
                    do="train its base, or make it trainable",
                    where=call.where,
                    argument="model",
                )


def no_cycle(flow: RLFlow) -> Iterator[Violation]:
    """No call waits for itself: through data, or by reading a version that is written only after it."""
    _, cycle = order_with_readers_first(flow)
    if cycle:
        labels = [flow.label(c) for c in cycle]
        yield Violation(
            "cycle",
            labels[0],
            expected="an order in which every reader of a Model runs before its writer",
            received=" → ".join([*labels, labels[0]]),
            do="read the Model before its updater, or read a Snapshot of it",
            where=cycle[0].where,
        )


# -- settings and inputs ---------------------------------------------------------------------------------------------


def possible_settings(flow: RLFlow) -> Iterator[Violation]:
    """Settings of nodes, Models and States can work."""
    for call in flow.calls:
        for problem in _problems_of(call.node):
            yield _problem("settings", flow.label(call), problem, call.where)
    for thing in (*flow.models, *flow.states):
        for problem in _problems_of(thing):
            yield _problem("settings", f"{type(thing).__name__} {thing.name!r}", problem, flow.where)


def _problems_of(thing: Node | BaseModel | State) -> list[str]:
    """What a thing says of its settings; a setting of the wrong type is a problem too, not an end of the check."""
    try:
        return [*(nan_problems(thing) if isinstance(thing, Node) else ()), *thing.problems()]
    except (TypeError, ValueError, AttributeError) as error:
        return [f"a setting of the wrong type ({error}): {thing!r}; expected the types that the class declares"]


def needed_inputs(flow: RLFlow) -> Iterator[Violation]:
    """Optional inputs that a setting asks for are wired, and come from nodes that give what is asked of them."""
    for call in flow.calls:
        makers = {argument: ref._call.node for argument, ref in call.inputs() if not ref._path}
        found = [*call.node.wiring_problems(frozenset(call.arguments)), *call.node.maker_problems(makers)]
        for problem in found:
            yield _problem("missing input", flow.label(call), problem, call.where)


def _problem(rule: str, node: str, problem: str, where: str) -> Violation:
    """A violation from a sentence "<setting> is <value>; expected <what>"."""
    received, _, expected = problem.partition("; expected ")
    return Violation(rule, node, expected or "settings that can work", received, where=where)


def everything_used(flow: RLFlow) -> Iterator[Violation]:
    """Every call recorded from the flow's sources reaches an output of a flow. A warning in a notebook, where cells are
    edited and run again."""
    for call in flow.unreached():
        yield Violation(
            "unused call",
            call.node.label or call.node.name,
            expected="every recorded call to reach an output",
            received="a call whose result no output needs",
            do="use its result, pass it to from_outputs, or remove it",
            where=call.where,
            severity="warning" if in_notebook(call.where) else "error",
        )


def groups_for_group_relative(flow: RLFlow) -> Iterator[Violation]:
    """A node that compares within groups is fed by a rollout that makes groups."""
    for call in flow.calls:
        need = call.node.needs_groups
        for argument, ref in call.inputs() if need > 1 else ():
            for maker in _makers_of_rows(ref):
                size = getattr(maker.node, "group_size", need)
                if size < need:
                    yield Violation(
                        "groups",
                        flow.label(call),
                        expected=f"groups of at least {need} responses a prompt",
                        received=f"group_size={size} of {flow.label(maker)} at {maker.where}",
                        do=f"set group_size of {flow.label(maker)} to {need} or more",
                        where=call.where,
                        argument=argument,
                    )


def columns_of_the_same_rows(flow: RLFlow) -> Iterator[Violation]:
    """What stands beside sequences in a loss or an advantage was computed from these sequences: ids alone do not tell two
    rollouts of one source apart."""
    for call in flow.calls:
        for argument, beside, about in columns_of_other_rows(call):
            yield Violation(
                "same rows",
                flow.label(call),
                expected=f"{argument} of the rows of {beside}",
                received=f"one computed from {about}",
                do=f"compute {argument} from what is passed as {beside}",
                where=call.where,
                argument=argument,
            )


def _makers_of_rows(ref: Ref) -> list[Call]:
    """The calls that the rows of sequences come from: filters and the like are followed to the rollouts behind them."""
    if not (isinstance(ref._type, type) and issubclass(ref._type, Sequences)):
        return []
    return [c for c in _ancestors(ref._call, through=Sequences) if issubclass(c.output_type, Sequences)]


def _ancestors(call: Call, through: type = object) -> list[Call]:
    """A call and all that it descends from by edges whose batch is of the type ``through``."""
    seen: dict[int, Call] = {}
    stack = [call]
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen[id(current)] = current
            edges = [ref for _, ref in current.inputs()]
            stack += [r._call for r in edges if isinstance(r._type, type) and issubclass(r._type, through)]
    return list(seen.values())


# -- models and losses -----------------------------------------------------------------------------------------------

_KIND_HELP = {
    "policy": "use Model(…)",
    "value": "use ValueModel(…), or ValueHead(policy)",
    "reward": "use RewardModel(…)",
}


def model_kinds(flow: RLFlow) -> Iterator[Violation]:
    """A policy is sampled from, a critic gives values, a reward model scores; losses fit the Model they train."""
    for call in flow.calls:
        kind = call.node.wants_kind
        for model in call.node.models() if kind else ():
            if _kind(model) != kind:
                yield Violation(
                    "model kind",
                    flow.label(call),
                    expected=f"a {kind} model",
                    received=f"{type(model).__name__} {model.name!r}",
                    do=_KIND_HELP.get(kind or "", ""),
                    where=call.where,
                    argument="model",
                )
        if isinstance(call.node, Updater) and call.node.model is not None:
            for argument, ref in call.inputs():
                if isinstance(ref._call.node, Loss):
                    for expected, received, do in _loss_problems(ref._call.node, call.node.model):
                        yield Violation(
                            "loss and model", flow.label(call), expected, received, do, ref._call.where, argument
                        )


def _kind(model: BaseModel) -> str:
    base = getattr(model, "base", None)
    return base.kind if base is not None and model.kind == "policy" else model.kind


def _loss_problems(loss: Loss, model: BaseModel) -> Iterator[tuple[str, str, str]]:
    """(expected, received, what to do) of a loss that cannot train this model."""
    head, trained = loss.head(), f"{type(model).__name__} {model.name!r}"
    if head is not None and owner(head) is not owner(model):
        yield f"a value head on {model.name!r}", f"one on {owner(head).name!r}", "train it with its own trunk"
    elif "values" in loss.requires and head is None and _kind(model) != "value":
        yield f"a model with values for {loss.name}", trained, f"name the head: {loss.name}(ValueHead(model))"
    if loss.requires & {"logprobs", "entropy", "divergence", "candidates"} and _kind(model) != "policy":
        yield f"a policy for {loss.name}", trained, "train the policy with it"
    if "scores" in loss.requires and _kind(model) != "reward":
        yield f"a reward model for {loss.name}", trained, "train a RewardModel(…, trainable=True) with it"


def same_logprob_origin(flow: RLFlow) -> Iterator[Violation]:
    """Old log-probs come from the policy that is trained, at the temperature that the rollouts were sampled at."""
    for call in flow.calls:
        if isinstance(call.node, Updater) and call.node.model is not None:
            yield from _old_logprobs_of_another(flow, call, call.node.model)
        if call.output_type in (OldLogprobs, RefLogprobs):
            yield from _another_temperature(flow, call)


def _old_logprobs_of_another(flow: RLFlow, call: Call, trained: BaseModel) -> Iterator[Violation]:
    for term in (ref._call for _, ref in call.inputs()):
        for argument, ref in term.inputs():
            models = ref._call.node.models() if ref._call.output_type is OldLogprobs else ()
            if models and all(owner(m) is not owner(trained) for m in models):
                yield Violation(
                    "log-prob origin",
                    flow.label(term),
                    expected=f"old log-probs of {trained.name!r}, which {flow.label(call)} trains",
                    received=f"those of {models[0].name!r} from {flow.label(ref._call)}",
                    do="compute them with PolicyLogprobs of the trained Model",
                    where=term.where,
                    argument=argument,
                )


def _another_temperature(flow: RLFlow, call: Call) -> Iterator[Violation]:
    temperature = getattr(call.node, "temperature", None)
    for argument, ref in call.inputs() if temperature is not None else ():
        for maker in _makers_of_rows(ref):
            sampling = getattr(maker.node, "sampling", None)
            if sampling is not None and sampling.temperature not in (0, temperature):
                yield Violation(
                    "log-prob origin",
                    flow.label(call),
                    expected=f"temperature {sampling.temperature}, as {flow.label(maker)} samples",
                    received=f"temperature {temperature}",
                    do="leave temperature out: it is then taken from the rollouts",
                    where=call.where,
                    argument=argument,
                )


def full_support(flow: RLFlow) -> Iterator[Violation]:
    """Truncated sampling biases importance ratios, because the trainer's distribution has full support: a warning."""
    for call in flow.calls:
        sampling = getattr(call.node, "sampling", None)
        if sampling is None or not (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
            continue
        if any(call in _makers_of_rows(ref) for loss in _ratio_losses(flow) for _, ref in loss.inputs()):
            yield Violation(
                "full support",
                flow.label(call),
                expected="sampling from the full distribution for a loss with importance ratios",
                received=f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p}",
                do="sample with top_p=1, top_k=0, min_p=0",
                where=call.where,
                severity="warning",
            )


def _ratio_losses(flow: RLFlow) -> list[Call]:
    """Losses that compare the current policy with the one before the update."""
    losses = [c for c in flow.calls if isinstance(c.node, Loss)]
    return [c for c in losses if any(ref._call.output_type is OldLogprobs for _, ref in c.inputs())]


# -- filters ---------------------------------------------------------------------------------------------------------


def splittable_before_filter(flow: RLFlow) -> Iterator[Violation]:
    """What runs upstream of a filter is pulled again until enough groups are there: it must work group by group."""
    for call in (c for c in flow.calls if c.node.is_filter):
        for upstream in (c for c in _ancestors(call) if c is not call):
            written = upstream.node.writes()
            if upstream.node.split == "whole" or written:
                received = f"one that writes {written[0].name!r}" if written else "split='whole'"
                yield Violation(
                    "before a filter",
                    flow.label(upstream),
                    expected="a node that can be called again for further groups, without a writer",
                    received=f"{received}, upstream of {flow.label(call)}",
                    do="move it behind the filter",
                    where=upstream.where,
                )


RULES: tuple[Callable[[RLFlow], Iterator[Violation]], ...] = (
    unique_labels,
    unique_model_names,
    one_writer,
    writable_models,
    no_cycle,
    possible_settings,
    needed_inputs,
    everything_used,
    groups_for_group_relative,
    columns_of_the_same_rows,
    model_kinds,
    same_logprob_origin,
    full_support,
    splittable_before_filter,
)
