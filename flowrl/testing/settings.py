"""Which nodes and which inputs a law is tried with: the examples of a class, and the optional inputs that they allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from flowrl.annotations import edge_types, resolve_hints
from flowrl.batches import OldLogprobs
from flowrl.errors import FlowError
from flowrl.models import BaseModel, Model
from flowrl.nodes.base import Node
from flowrl.nodes.function import NodeFunction
from flowrl.nodes.loss import Loss, TokenLoss


@dataclass(frozen=True)
class Choice:
    """Which inputs are given.

    Args:
        given: the optional ones.
        left_out: old log-probs are those that a plan leaves out, because they equal the current ones.
    """

    given: tuple[str, ...] = ()
    left_out: bool = False


def choices(loss: Node) -> list[Choice]:
    """All optional inputs, none, and each alone, as far as the settings allow.

    Raises:
        FlowError: the settings allow nothing.
    """
    optional = [p.name for p in loss.ports if not p.required and not p.variadic]
    required = frozenset(p.name for p in loss.ports if p.required)
    sets = dict.fromkeys([tuple(optional), (), *itertools.combinations(optional, 1)])
    found = [Choice(s) for s in sets if not list(loss.wiring_problems(required | frozenset(s)))]
    if not found:
        raise FlowError(
            f"{loss.name} takes no inputs with these settings",
            expected=f"some of {', '.join(map(str, loss.ports))} to be allowed",
            received="; ".join(loss.wiring_problems(required | frozenset(optional))),
        )
    if isinstance(loss, TokenLoss) and _plan_may_leave_out(loss):
        found.append(replace(found[0], left_out=True))
    return found


def _plan_may_leave_out(loss: TokenLoss) -> bool:
    """As the compiler decides it: the loss looks at old log-probs in ``token_losses`` alone."""
    kind = type(loss)
    old = any(OldLogprobs in edge_types(port.annotation)[0] for port in loss.ports)
    return old and kind.sums is TokenLoss.sums and kind.prepare is Loss.prepare


def instances(loss: Any, settings: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """The nodes to try: the one that is given, or one for each of the examples of a class.

    Raises:
        FlowError: a setting is missing or impossible.
    """
    if isinstance(loss, NodeFunction):
        made: list[Any] = [complete(loss.node_class, {**loss._options, **(settings or {})})]
    elif isinstance(loss, type):
        examples = getattr(loss, "examples", ({},)) if settings is None else (settings,)
        made = [complete(loss, example) for example in examples]
        if not made:
            raise FlowError(
                f"{loss.__name__} has no examples to try",
                expected="examples = ({…},) on the class",
                received="examples = ()",
                do="give settings={…}, or a node instead of the class",
            )
    else:
        made = [loss if settings is None else replace(loss, **settings)]
    for node in made:
        problems = list(node.problems())
        if problems:
            raise FlowError(f"{node.name} has impossible settings: {'; '.join(problems)}")
        yield node


def complete(cls: type[Node], settings: Mapping[str, Any]) -> Node:
    """A node with these settings, and some Model wherever one is wanted."""
    hints = resolve_hints(cls)
    made = dict(settings)
    for f in fields(cls):
        if f.name in made or f.default is not MISSING or f.default_factory is not MISSING:
            continue
        if not any(issubclass(t, BaseModel) for t in edge_types(hints[f.name])[0]):
            raise FlowError(
                f"{cls.__name__} cannot be made without {f.name}",
                expected="a setting with a default, or examples = ({…},) on the class",
                received=f"neither a default of {f.name} nor a value",
                do=f"give it: settings={{{f.name!r}: …}}",
            )
        made[f.name] = Model(f"some-{f.name}")
    return cls(**made)


def described(node: Node) -> str:
    """The node with the settings that are not the defaults; the same text in every process."""

    def shown(value: object) -> str:
        return getattr(value, "__name__", repr(value)) if callable(value) else repr(value)

    defaults = {f.name: f.default for f in fields(node)}
    settings = {k: v for k, v in node.settings().items() if repr(defaults.get(k)) != repr(v)}
    return f"{node.name}({', '.join(f'{k}={shown(v)}' for k, v in settings.items())})"


def require_draws(num_draws: int) -> None:
    """Refuse a check that would look at nothing.

    Raises:
        FlowError: fewer than one draw.
    """
    if num_draws < 1:
        raise FlowError("A check without draws tests nothing", expected="num_draws of at least 1", received=num_draws)
