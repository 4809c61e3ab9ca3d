"""The short form of a flow: parts, wired by their annotated types. Nothing here that a user could not write by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from flowrl.annotations import edge_types, is_edge_annotation, type_name
from flowrl.batches import OldLogprobs, RefLogprobs, Values
from flowrl.errors import GraphError
from flowrl.graph import Ref, user_location
from flowrl.models import AnyModel, Model, ValueModel
from flowrl.nodes.base import Node
from flowrl.nodes.function import NodeLike, as_node


class _Pool:
    """What is there to wire: by type, Refs made already and factories of those made on demand."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []
        self.factories: dict[type, Callable[[], Any]] = {}

    def add(self, name: str, ref: Any) -> Any:
        self.made.append((name, ref))
        return ref

    def find(self, types: tuple[type, ...]) -> list[tuple[str, Any]]:
        found = [(name, ref) for name, ref in self.made if issubclass(_type_of(ref), types)]
        if not found:
            for made_type in [t for t in self.factories if issubclass(t, types)]:
                made = self.factories.pop(made_type)()
                found.append((made_type.__name__, self.add(made_type.__name__, made)))
        return found

    def describe(self) -> str:
        names = [f"{type_name(_type_of(ref))} ({name})" for name, ref in self.made]
        return ", ".join(names + [f"{t.__name__} (on demand)" for t in self.factories]) or "nothing"


def _type_of(ref: Ref) -> type:
    return ref._type


def wire(
    *,
    rollout: NodeLike | None,
    rewards: Sequence[NodeLike],
    advantage_estimator: NodeLike | None,
    policy_updater: NodeLike | None,
    critic: AnyModel | None,
    critic_updater: NodeLike | None,
    reference: AnyModel | None,
    prompts: Any,
) -> list[Any]:
    """The outputs of the short form. See :class:`flowrl.flow.RLFlow` for what is wired to what."""
    from flowrl.nodes import Critic, WeightedSum

    if rollout is None or not rewards or advantage_estimator is None or policy_updater is None:
        _refuse_missing(
            rollout=rollout,
            reward=rewards or None,
            advantage_estimator=advantage_estimator,
            policy_updater=policy_updater,
        )
    rollout_node, estimator, updater = as_node(rollout), as_node(advantage_estimator), as_node(policy_updater)
    policy = getattr(updater, "model", None) or _policy_of(rollout_node)
    pool = _Pool()
    pool.add("source", prompts)
    rollouts = pool.add("rollout", _connect(rollout_node, pool))
    _offer_logprobs(pool, rollouts, policy, reference, estimator)
    critics: list[AnyModel] = []

    def make_values() -> Any:
        critics.append(critic or _started_from(policy))
        return Critic(critics[0])(rollouts)

    pool.factories[Values] = make_values
    # Reward nodes see the rollouts and what can be made from them, not each other.
    reward_refs = [_connect(as_node(part), pool) for part in rewards]
    pool.add("reward", reward_refs[0] if len(reward_refs) == 1 else WeightedSum()(*reward_refs))
    pool.add("advantage_estimator", _connect(estimator, pool))
    outputs = [_connect(_training(updater, policy), pool, also=(RefLogprobs,) if reference is not None else ())]
    if critics:
        outputs.append(_connect(_training(_critic_updater(critic_updater), critics[0]), pool))
    elif critic is not None or critic_updater is not None:
        raise GraphError(
            f"RLFlow is given a critic, but {estimator.name} takes no Values",
            expected="an advantage_estimator with a Values argument, such as GAE()",
            received=estimator.name,
            where=user_location(),
        )
    if reference is not None and RefLogprobs in pool.factories:
        raise GraphError(
            "RLFlow is given a reference, but no part asks for reference log-probs",
            expected="a KL coefficient, as in GAE(kl_coef=0.05), or an updater with RefLogprobs, as GRPOUpdater()",
            received=f"{estimator.name} and {updater.name}",
            where=user_location(),
        )
    return outputs


def _refuse_missing(**parts: Any) -> NoReturn:
    missing = [name for name, part in parts.items() if part is None]
    raise GraphError(
        f"RLFlow lacks {', '.join(missing)}",
        expected="rollout, reward (or reward_models), advantage_estimator and policy_updater",
        received=", ".join(n for n in parts if n not in missing) or "none of them",
        do="give the missing part, or compose the flow by hand: RLFlow.from_outputs(…)",
        where=user_location(),
    )


def _offer_logprobs(pool: _Pool, rollouts: Any, policy: AnyModel, reference: AnyModel | None, estimator: Node) -> None:
    from flowrl.nodes import PolicyLogprobs, ReferenceLogprobs

    old_logprobs = PolicyLogprobs(policy)
    if list(estimator.maker_problems({"old_logprobs": old_logprobs})):
        old_logprobs = replace(old_logprobs, sum_pi_squared=True)
    pool.factories[OldLogprobs] = lambda: old_logprobs(rollouts)
    pool.factories[RefLogprobs] = lambda: ReferenceLogprobs(reference or policy.frozen())(rollouts)


def _started_from(policy: AnyModel) -> ValueModel:
    if isinstance(policy, Model):
        return ValueModel.from_policy(policy)
    raise GraphError(
        "RLFlow cannot start a critic from a derived Model",
        expected="critic=ValueModel(…)",
        received=repr(policy),
        where=user_location(),
    )


def _critic_updater(given: NodeLike | None) -> Node:
    from flowrl.nodes import ValueUpdater

    return as_node(given) if given is not None else ValueUpdater()


def _training(updater: Node, model: AnyModel) -> Node:
    """The updater, with this Model where it has none."""
    if getattr(updater, "model", model) is None:
        return replace(updater, model=model)  # type: ignore[call-arg]
    return updater


def _policy_of(node: Node) -> Any:
    for model in node.models():
        return model
    raise GraphError(
        f"{node.name} has no Model",
        expected="a rollout node with the policy among its fields",
        received=repr(node),
        where=user_location(),
    )


def _connect(node: Node, pool: _Pool, also: tuple[type, ...] = ()) -> Any:
    """Call a node with what the pool holds for its ports. An optional port is wired where the node would miss it (a KL
    coefficient asks for reference log-probs), or where its type is in ``also``."""
    edges = [p for p in node.ports if is_edge_annotation(p.annotation)]
    required = {p.name for p in edges if p.required}
    wanted = list(node.wiring_problems(frozenset(required)))
    arguments: dict[str, Any] = {}
    for port in edges:
        types = edge_types(port.annotation)[0]
        if port.name not in required and not (wanted or (also and issubclass(types[0], also))):
            continue
        found = pool.find(types)
        if len(found) > 1:
            raise GraphError(
                f"RLFlow: {len(found)} candidates for argument {port.name!r} of {node.name}",
                expected=f"one {' or '.join(type_name(t) for t in types)}",
                received=", ".join(name for name, _ in found),
                do="compose the flow by hand: RLFlow.from_outputs(…)",
                where=user_location(),
            )
        if not found:
            raise GraphError(
                f"RLFlow: nothing fits argument {port.name!r} of {node.name}",
                expected=" or ".join(type_name(t) for t in types),
                received=pool.describe(),
                do="compose the flow by hand: RLFlow.from_outputs(…)",
                where=user_location(),
            )
        _refuse_twice(node, port.name, found[0], arguments)
        arguments[port.name] = found[0][1]
    return node(**arguments)


def _refuse_twice(node: Node, argument: str, found: tuple[str, Any], arguments: dict[str, Any]) -> None:
    """Two inputs of one type mean two different things, and there is one."""
    twin = next((name for name, ref in arguments.items() if ref is found[1]), None)
    if twin is not None:
        raise GraphError(
            f"RLFlow: {node.name} needs two {type_name(_type_of(found[1]))}, {twin!r} and {argument!r}",
            expected="parts that the short form can tell apart by type",
            received=f"one: {found[0]}",
            do="compose the flow by hand: RLFlow.from_outputs(…)",
            where=user_location(),
        )
