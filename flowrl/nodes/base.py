"""Node: a frozen dataclass whose fields are settings and whose annotated ``__call__`` is its inputs and its one output.

Called with data a node runs; called with a Ref it is recorded. Nodes hold no run state: what is mutable is a Model or a
State, what is live (pools, sandboxes) is opened in ``setup`` and closed by the runtime.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, FrozenInstanceError, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar, dataclass_transform, overload

from flowrl import context
from flowrl.batches import Batch, align
from flowrl.errors import EdgeTypeError, GraphError
from flowrl.graph import (
    Ref,
    check_edge_type,
    edge_types,
    is_edge_annotation,
    record,
    resolve_hints,
    type_name,
    user_location,
)
from flowrl.models import BaseModel, State

P = ParamSpec("P")
R = TypeVar("R")

Split = Literal["rows", "groups", "whole"]
Join = Literal["exact", "subset", "prompt"]


@dataclass(frozen=True)
class Port:
    """One parameter of a node's ``__call__``."""

    name: str
    annotation: Any
    required: bool
    variadic: bool


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _NodeTransform:
    """Tells type checkers that every subclass of Node is a frozen dataclass; ``Node.__init_subclass__`` makes it one."""


@dataclass(frozen=True)
class Node(_NodeTransform):
    """The base of every node. A subclass is a frozen dataclass without having to say so.

    Example::

        class LengthPenalty(Node):
            per_token: float = 0.01

            def __call__(self, rollouts: Rollouts) -> Rewards:
                return rewards_like(rollouts, length=-self.per_token * rollouts.response_lengths)

    Class attributes that a subclass may set:

    * ``kind``: how pictures colour it.
    * ``split``: how a batch is split over a mesh: by ``rows`` (never through a group), by ``groups``, or ``whole``.
    * ``joins``: by argument, how its rows are matched with those of the first argument that is not listed: "exact"
      (default), "subset" (the argument may hold more rows) or "prompt" (it has one row a prompt).
    * ``needs_groups``: the smallest group that its result is defined for; 1 where it does not compare within groups.
    """

    label: str | None = field(default=None, kw_only=True)

    kind: ClassVar[str] = "host"
    split: ClassVar[Split] = "rows"
    joins: ClassVar[Mapping[str, Join]] = {}
    needs_groups: ClassVar[int] = 1
    #: The kind that its Models must be of: "policy", "value" or "reward"; None where it does not matter.
    wants_kind: ClassVar[str | None] = None
    #: Whether it may return fewer groups than it is given; the runtime then pulls upstream again. See nodes/filter.py.
    is_filter: ClassVar[bool] = False

    #: Whether ``*args`` are aligned by row id with each other.
    aligns_variadic: ClassVar[bool] = True
    #: A composite is not recorded itself: its body records the nodes that it is a shorthand for.
    composite: ClassVar[bool] = False

    ports: ClassVar[tuple[Port, ...]] = ()
    output_type: ClassVar[Any] = object
    body: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = {k: v for k, v in cls.__dict__.items() if isinstance(v, Field)}
        dataclass(frozen=True)(cls)
        # A user may also write @dataclass(frozen=True): it must find the class as it was written.
        for name, value in declared.items():
            setattr(cls, name, value)
        for name in ("__setattr__", "__delattr__"):
            delattr(cls, name)
        if "__call__" in cls.__dict__:
            body = cls.__dict__["__call__"]
            cls.ports, cls.output_type = _read_signature(body, cls.__name__, sys._getframe(1).f_locals)
            cls.body = body
            cls.__call__ = _record_or_run(body)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    # -- what a subclass may say about itself -------------------------------------------------------------------------

    def models(self) -> tuple[BaseModel, ...]:
        """The Models among its settings."""
        values = [getattr(self, f.name) for f in fields(self)]
        return tuple(v for v in values if isinstance(v, BaseModel))

    def states(self) -> tuple[State, ...]:
        """The States among its settings."""
        values = [getattr(self, f.name) for f in fields(self)]
        return tuple(v for v in values if isinstance(v, State))

    def reads(self) -> tuple[BaseModel | State, ...]:
        """What it reads: all its Models and States unless it says otherwise."""
        return (*self.models(), *self.states())

    def writes(self) -> tuple[BaseModel | State, ...]:
        """What it writes: nothing unless it says otherwise."""
        return ()

    def staleness(self) -> int:
        """``max_staleness`` of its reading: 0 unless the node has a setting of that name."""
        return int(getattr(self, "max_staleness", 0))

    def problems(self) -> Iterable[str]:
        """Settings that cannot work, a sentence each; collected when a flow is checked."""
        return ()

    def wiring_problems(self, given: frozenset[str]) -> Iterable[str]:
        """Inputs that its settings need and that the wiring leaves out, a sentence each; collected when a flow is checked.

        Args:
            given: the names of the arguments that are wired.
        """
        return ()

    def setup(self, ctx: context.Bindings) -> Any:
        """Open live resources (pools, sandboxes). What it returns is handed out by :meth:`resource` and closed (``close()``)
        by the runtime. Resources are keyed by the node's settings."""
        return None

    def resource(self) -> Any:
        """What :meth:`setup` returned, opened at first use."""
        resources = context.current_bindings().resources
        if id(self) not in resources:
            resources[id(self)] = (self, self.setup(context.current_bindings()))
        return resources[id(self)][1]

    def run(self, arguments: Mapping[str, Any], label: str) -> Any:
        """Run the body on data as the call ``label``: check types, align rows by id, then call it.

        Args:
            arguments: by parameter name; a tuple for ``*args``.
        """
        _check_data_types(self, arguments)
        arguments = _align_arguments(self, arguments)
        bound = inspect.signature(type(self).body).bind_partial(self)
        bound.arguments.update(arguments)
        here = context.current_step()
        with context.use_step(replace(here, label=label, counts={})):
            return type(self).body(*bound.args, **bound.kwargs)

    @property
    def name(self) -> str:
        """How pictures and errors call it."""
        return type(self).__name__

    def settings(self) -> dict[str, Any]:
        """Its fields by name, the label aside."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "label"}


def _read_signature(body: Callable[..., Any], owner: str, localns: Mapping[str, Any]) -> tuple[tuple[Port, ...], Any]:
    hints = resolve_hints(body, localns)
    ports: list[Port] = []
    positional: dict[Any, str] = {}
    for parameter in list(inspect.signature(body).parameters.values())[1:]:
        annotation = hints.get(parameter.name, object)
        variadic = parameter.kind is parameter.VAR_POSITIONAL
        ports.append(Port(parameter.name, annotation, parameter.default is parameter.empty and not variadic, variadic))
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and is_edge_annotation(annotation):
            key = edge_types(annotation)[0]
            if key in positional:
                raise GraphError(
                    f"{owner}.__call__ takes {positional[key]!r} and {parameter.name!r} of one type by position",
                    expected="same-typed inputs to be keyword-only",
                    received="two that can be swapped unnoticed",
                    do=f"write `*` before {parameter.name!r}",
                )
            positional[key] = parameter.name
    return tuple(ports), hints.get("return", object)


def _record_or_run(body: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(body)

    @functools.wraps(body)
    def call(self: Node, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise EdgeTypeError(
                f"{self.name} is called with the wrong arguments: {error}",
                expected=f"{self.name}({', '.join(_describe(p) for p in self.ports)})",
                received=_describe_given(args, kwargs),
                do="name each argument as the signature does",
                where=user_location(),
            ) from None
        arguments = dict(list(bound.arguments.items())[1:])
        recording = any(isinstance(v, Ref) for v in _flat(arguments.values()))
        if recording:
            arguments = _check_recorded(self, arguments)
        if self.composite:
            return body(*bound.args, **bound.kwargs)
        if recording:
            return record(self, arguments, self.output_type)
        return self.run(arguments, _eager_label(self))

    return call


def _describe(port: Port) -> str:
    star = "*" if port.variadic else ""
    names = " | ".join(type_name(t) for t in edge_types(port.annotation)[0]) or type_name(port.annotation)
    return f"{star}{port.name}: {names}" + ("" if port.required or port.variadic else " = …")


def _describe_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    def describe(value: Any) -> str:
        return type_name(value._type) if isinstance(value, Ref) else type(value).__name__

    return "(" + ", ".join([*map(describe, args), *(f"{k}: {describe(v)}" for k, v in kwargs.items())]) + ")"


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _check_recorded(node: Node, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are edges; raise at the line for data among Refs and for a Ref of the wrong type."""
    ports = {p.name: p for p in node.ports}
    edges: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None and not ports[name].required:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if not isinstance(item, Ref):
                raise EdgeTypeError(
                    f"{node.name}: argument {name!r} is data while another argument is a Ref",
                    expected="a Ref, as everything on an edge of a flow being built",
                    received=type(item).__name__,
                    do="make it a setting (a field of the node), or bring it in through a source",
                    where=user_location(),
                )
            check_edge_type(item, ports[name].annotation, node=node.name, argument=name)
        edges[name] = value
    return edges


def _eager_label(node: Node) -> str:
    """The label that recording would give: the node's own, or class#n by order of calls within the step or the body."""
    here = context.current_step()
    name = node.label
    if not name:
        count = here.counts.get(node.name, 0)
        here.counts[node.name] = count + 1
        name = f"{node.name}#{count}"
    return f"{here.label}/{name}" if here.label else name


def _check_data_types(node: Node, arguments: Mapping[str, Any]) -> None:
    ports = {p.name: p for p in node.ports}
    for name, value in arguments.items():
        allowed, optional = edge_types(ports[name].annotation)
        if not is_edge_annotation(ports[name].annotation):
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if item is None and (optional or not ports[name].required):
                continue
            if not isinstance(item, allowed):
                raise EdgeTypeError(
                    f"{node.name}: argument {name!r} has the wrong type",
                    expected=" or ".join(type_name(t) for t in allowed),
                    received=type(item).__name__,
                    where=user_location(),
                )


def _align_arguments(node: Node, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Bring every input with row ids into the row order of the first one that is not listed in ``joins``."""
    batches = [(n, v) for n, v in arguments.items() if isinstance(v, Batch) and v.row_ids is not None]
    anchors = [(n, v) for n, v in batches if node.joins.get(n, "exact") == "exact"]
    variadic = [v for v in arguments.values() if isinstance(v, tuple)]
    if not anchors and variadic and all(isinstance(b, Batch) for b in variadic[0]) and variadic[0]:
        anchors = [("", variadic[0][0])]
    if not anchors or anchors[0][1].row_ids is None:
        return dict(arguments)
    anchor = anchors[0][1]
    out: dict[str, Any] = {}
    for name, value in arguments.items():
        join = node.joins.get(name, "exact")
        if isinstance(value, tuple) and node.aligns_variadic:
            out[name] = tuple(
                item if item is anchor else align(anchor, item, join=join, node=node.name, argument=f"{name}[{i}]")
                for i, item in enumerate(value)
            )
        elif isinstance(value, Batch) and value is not anchor:
            out[name] = align(anchor, value, join=join, node=node.name, argument=name)
        else:
            out[name] = value
    return out


def _refuse_change(self: Node, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot change {name!r} of {self.name}: nodes are frozen; use dataclasses.replace")


Node.__setattr__ = Node.__delattr__ = _refuse_change  # type: ignore[method-assign,assignment]


# -- @node -----------------------------------------------------------------------------------------------------------


@overload
def node(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def node(
    *, kind: str = ..., split: Split = ..., joins: Mapping[str, Join] = ..., needs_groups: int = ...
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def node(function: Any = None, **options: Any) -> Any:
    """Make a node of a function: batch-annotated parameters are inputs, the rest are settings.

    Example::

        @flowrl.node
        def shorter_is_better(rollouts: Rollouts, per_token: float = 0.01) -> Rewards: ...

        rewards = shorter_is_better(rollouts, per_token=0.02)   # records, or runs, as any node does

    Args:
        options: the class attributes of :class:`Node` to set: ``kind``, ``split``, ``joins``, ``needs_groups``.
    """
    localns = sys._getframe(1).f_locals
    if function is None:
        return functools.partial(node_from_function, localns=localns, options=options)
    return node_from_function(function, localns=localns, options=options)


def _call_function(self: Node, function: Callable[..., Any], inputs: dict[str, Any], settings: list[str]) -> Any:
    return function(**inputs, **{name: getattr(self, name) for name in settings})


def node_from_function(
    function: Callable[..., Any],
    *,
    localns: Mapping[str, Any],
    options: dict[str, Any],
    base: type[Node] = Node,
    run: Callable[..., Any] = _call_function,
    skip: int = 0,
    returns: Any = None,
) -> Any:
    """A callable that makes and calls a node of class ``base`` for a function.

    Args:
        localns: the names around the function, for its annotations.
        options: class attributes of the node.
        run: what ``__call__`` does with (node, function, inputs, names of settings).
        skip: leading parameters of the function that are neither inputs nor settings.
        returns: the output type; None takes the function's own annotation.
    """
    hints = resolve_hints(function, localns)
    signature = inspect.signature(function)
    signature = signature.replace(parameters=list(signature.parameters.values())[skip:])
    edges = {n for n in signature.parameters if is_edge_annotation(hints.get(n))}
    if not edges:
        raise GraphError(
            f"@node {function.__name__} has no input",
            expected="at least one parameter annotated with a batch type (Rollouts, Rewards, …)",
            received=str(signature),
            where=user_location(),
        )
    namespace: dict[str, Any] = {"__annotations__": {}, "__module__": function.__module__, "__doc__": function.__doc__}
    for name, parameter in signature.parameters.items():
        if name not in edges:
            namespace["__annotations__"][name] = hints.get(name, Any)
            # Settings of a function are given by name, so that one without a default may follow one with.
            default = {} if parameter.default is parameter.empty else {"default_factory": _constant(parameter.default)}
            namespace[name] = field(kw_only=True, **default)

    settings = [n for n in signature.parameters if n not in edges]

    def body(self: Node, *args: Any, **kwargs: Any) -> Any:
        bound = edge_signature.bind(self, *args, **kwargs)
        return run(self, function, dict(list(bound.arguments.items())[1:]), settings)

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    edge_signature = inspect.Signature(
        [self_parameter, *(p for n, p in signature.parameters.items() if n in edges)]
    )
    body.__signature__ = edge_signature  # type: ignore[attr-defined]
    body.__annotations__ = {n: hints[n] for n in edges} | {"return": returns or hints.get("return", object)}
    node_class: type[Node] = type(function.__name__, (base,), {**namespace, **options, "__call__": body})

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        base_settings = {f.name: kwargs.pop(f.name) for f in fields(base) if f.name in kwargs}
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise EdgeTypeError(
                f"{function.__name__} is called with the wrong arguments: {error}",
                expected=f"{function.__name__}{signature}",
                received=_describe_given(args, kwargs),
                where=user_location(),
            ) from None
        made = node_class(**base_settings, **{n: v for n, v in arguments.items() if n not in edges})
        return made(**{n: v for n, v in arguments.items() if n in edges})

    call.node_class = node_class  # type: ignore[attr-defined]
    return call


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def as_node(thing: Any) -> Node:
    """A node from what the short form accepts: a node, a function made by :func:`node`, or an engine (``as_node()``)."""
    if isinstance(thing, Node):
        return thing
    if hasattr(thing, "node_class"):
        return thing.node_class()
    if hasattr(thing, "as_node"):
        return thing.as_node()
    raise GraphError(
        f"{thing!r} is not a node",
        expected="a Node, a function decorated with @flowrl.node, or an engine",
        received=type(thing).__name__,
        do="decorate the function with @flowrl.node, or wrap a reward function: FunctionReward(fn)",
        where=user_location(),
    )
