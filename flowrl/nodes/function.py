"""Nodes from functions: ``@flowrl.node``, and what ``@flowrl.loss`` shares with it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload, runtime_checkable

from flowrl.alignment import Join
from flowrl.annotations import is_edge_annotation, resolve_hints
from flowrl.errors import EdgeTypeError, GraphError
from flowrl.graph import user_location
from flowrl.nodes.base import Node, Split
from flowrl.nodes.calling import describe_arguments

P = ParamSpec("P")
R = TypeVar("R")


class NodeFunction(Generic[P, R]):
    """A function as a node. Called with data it runs, called with Refs it is recorded, as any node.

    Its batch-annotated parameters are the node's inputs, the others its settings.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(
        self, function: Callable[..., Any], node_class: type[Node], signature: inspect.Signature, **options: Any
    ) -> None:
        functools.update_wrapper(self, function)
        #: The node class: its name is the function's.
        self.node_class = node_class
        self.__signature__ = signature
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        options = {f.name: kwargs.pop(f.name) for f in fields(self.node_class.__base__) if f.name in kwargs}  # type: ignore[arg-type]
        try:
            arguments = self.__signature__.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise EdgeTypeError(
                f"{self.__name__} is called with the wrong arguments: {error}",
                expected=f"{self.__name__}{self.__signature__}",
                received=describe_arguments(args, kwargs),
                where=user_location(),
            ) from None
        inputs = {p.name for p in self.node_class.ports}
        made = self.node_class(
            **{**self._options, **options}, **{n: v for n, v in arguments.items() if n not in inputs}
        )
        return _call_with(made, self.__signature__, {n: v for n, v in arguments.items() if n in inputs})

    def options(self, **options: Any) -> NodeFunction[P, R]:
        """The same function with settings that every node (or every loss) has: ``label=``, of a loss ``weight=`` and
        ``aggregation=`` too. They may also be given in the call itself, where type checkers do not know them.

        Example::

            shorter = shorter_is_better.options(label="shorter")(rollouts, per_token=0.02)
        """
        return NodeFunction(self.__wrapped__, self.node_class, self.__signature__, **{**self._options, **options})

    def __repr__(self) -> str:
        return f"<node {self.__name__}{self.__signature__}>"


@overload
def node(function: Callable[P, R]) -> NodeFunction[P, R]: ...
@overload
def node(
    *, kind: str = ..., split: Split = ..., joins: Mapping[str, Join] = ..., needs_groups: int = ...
) -> Callable[[Callable[P, R]], NodeFunction[P, R]]: ...
def node(function: Any = None, **options: Any) -> Any:
    """Make a node of a function: batch-annotated parameters are inputs, the rest are settings.

    Example::

        @flowrl.node
        def shorter_is_better(rollouts: Rollouts, per_token: float = 0.01) -> Rewards: ...

        rewards = shorter_is_better(rollouts, per_token=0.02)   # records, or runs, as any node does

    Args:
        options: the class attributes of :class:`Node` to set: ``kind``, ``split``, ``joins``, ``needs_groups``.

    Raises:
        GraphError: the function has no input, an unannotated one or no return type, ``**kwargs``, or a setting with a
            name that nodes have.
    """
    localns = sys._getframe(1).f_locals
    if function is None:
        return functools.partial(node_from_function, localns=localns, options=options)
    return node_from_function(function, localns=localns, options=options)


def _run_function(self: Any, **inputs: Any) -> Any:
    return call_function(self, inputs)


def call_function(node: Any, inputs: Mapping[str, Any], *leading: Any) -> Any:
    """Call the function of a node with its inputs and settings; ``leading`` fill its first parameters."""
    settings = {name: getattr(node, name) for name in node.function_settings}
    return _call_with(functools.partial(node.function, *leading), node.function_signature, {**inputs, **settings})


def _call_with(callee: Callable[..., Any], signature: inspect.Signature, values: Mapping[str, Any]) -> Any:
    """Call with values by parameter name, each in the way that its parameter is passed (``*args`` are spread)."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name not in values:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += values[name]
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(values[name])
        else:
            kwargs[name] = values[name]
    return callee(*args, **kwargs)


def node_from_function(
    function: Callable[..., Any],
    *,
    localns: Mapping[str, Any],
    options: Mapping[str, Any],
    base: type[Node] = Node,
    run: Callable[..., Any] = _run_function,
    skip: int = 0,
    returns: Any = None,
) -> NodeFunction[..., Any]:
    """A NodeFunction whose node is of class ``base``.

    Args:
        localns: the names around the function, for its annotations.
        options: class attributes of the node.
        run: what ``__call__`` does with (node, inputs by name).
        skip: leading parameters of the function that are neither inputs nor settings.
        returns: the output type; None takes the function's own annotation.
    """
    hints = resolve_hints(function, localns)
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    signature = inspect.Signature(parameters)
    inputs = [p for p in parameters if is_edge_annotation(hints.get(p.name))]
    settings = [p for p in parameters if p not in inputs]
    _check_parameters(function, inputs, settings, base)

    def body(self: Node, *args: Any, **kwargs: Any) -> Any:
        bound = body_signature.bind(self, *args, **kwargs)
        return run(self, **dict(list(bound.arguments.items())[1:]))

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    body_signature = inspect.Signature([self_parameter, *inputs])
    body.__signature__ = body_signature  # type: ignore[attr-defined]
    output = {"return": returns or hints["return"]} if returns or "return" in hints else {}
    body.__annotations__ = {p.name: hints[p.name] for p in inputs} | output
    namespace: dict[str, Any] = {
        "__annotations__": {p.name: hints.get(p.name, Any) for p in settings},
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "__call__": body,
        "function": staticmethod(function),
        "function_signature": signature,
        "function_settings": tuple(p.name for p in settings),
        **options,
    }
    for p in settings:
        # Given by name, so that one without a default may follow one with; a constant may be mutable, as in Python.
        default = Any if p.default is p.empty else _constant(p.default)
        namespace[p.name] = field(kw_only=True) if default is Any else field(kw_only=True, default_factory=default)
    return NodeFunction(function, type(function.__name__, (base,), namespace), signature)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _check_parameters(
    function: Callable[..., Any],
    inputs: list[inspect.Parameter],
    settings: list[inspect.Parameter],
    base: type[Node],
) -> None:
    def refuse(what: str, expected: str, received: object, do: str | None = None) -> None:
        raise GraphError(
            f"{function.__name__} {what}", expected=expected, received=received, do=do, where=user_location()
        )

    if not inputs:
        refuse(
            "has no input",
            "at least one parameter annotated with a batch type (Rollouts, Rewards, …)",
            str(inspect.signature(function)),
        )
    for p in settings:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            refuse(
                f"takes {p}", "settings by name, and *args of a batch type at most", str(p), "write every setting out"
            )
        if hasattr(base, p.name) or p.name in {f.name for f in fields(base)}:
            refuse(
                f"has a setting {p.name!r}, which is something that every {base.__name__} has",
                "settings with names of their own",
                p.name,
                f"call it otherwise, such as {p.name}_",
            )


@runtime_checkable
class SupportsAsNode(Protocol):
    """What the short form takes beside nodes: engines."""

    def as_node(self) -> Node:
        """The node that does this engine's work."""
        ...


#: What the short form takes as a part.
NodeLike = Node | NodeFunction[..., Any] | SupportsAsNode


def as_node(thing: NodeLike) -> Node:
    """A node from what the short form accepts: a node, a function made by :func:`node`, or an engine (``as_node()``).

    Raises:
        GraphError: it is none of them, or a function with settings that have no default.
    """
    if isinstance(thing, Node):
        return thing
    if isinstance(thing, NodeFunction):
        try:
            return thing.node_class(**thing._options)
        except TypeError:
            raise GraphError(
                f"{thing!r} has settings without a default",
                expected="a node that is complete",
                received=f"@node function {thing.__name__}",
                do="give the settings defaults, or compose the flow by hand: RLFlow.from_outputs(…)",
                where=user_location(),
            ) from None
    if isinstance(thing, SupportsAsNode):
        return thing.as_node()
    raise GraphError(
        f"{thing!r} is not a node",
        expected="a Node, a function decorated with @flowrl.node, or an engine",
        received=type(thing).__name__,
        do="decorate the function with @flowrl.node, or wrap a reward function: FunctionReward(fn)",
        where=user_location(),
    )
