"""What happens when a node is called: its signature is read once, its arguments are checked, and the call is recorded
(a Ref is among the arguments) or run (they are data).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from flowrl import context
from flowrl.alignment import align
from flowrl.annotations import edge_types, fits, is_edge_annotation, resolve_hints, type_name
from flowrl.columns import Batch
from flowrl.errors import EdgeTypeError, GraphError, nearest
from flowrl.graph import Ref, check_edge_type, record, user_location

if TYPE_CHECKING:
    from flowrl.nodes.base import Node


@dataclass(frozen=True)
class Port:
    """One parameter of a node's ``__call__``."""

    name: str
    annotation: Any
    required: bool
    variadic: bool

    def __str__(self) -> str:
        names = " | ".join(type_name(t) for t in edge_types(self.annotation)[0]) or type_name(self.annotation)
        return f"{'*' if self.variadic else ''}{self.name}: {names}" + (
            "" if self.required or self.variadic else " = None"
        )


# -- the signature, read when the class is made ----------------------------------------------------------------------


def read_signature(body: Callable[..., Any], owner: str, localns: Mapping[str, Any]) -> tuple[tuple[Port, ...], Any]:
    """(ports, output type) of a node's ``__call__``.

    Args:
        owner: the class, for errors.
        localns: the names around the class, where it is defined in a function.

    Raises:
        GraphError: an annotation is missing, the signature has ``**kwargs``, or two inputs of one type are positional.
    """
    hints = resolve_hints(body, localns)
    ports: list[Port] = []
    positional: list[Port] = []
    for parameter in list(inspect.signature(body).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            _refuse_definition(owner, f"takes **{parameter.name}", "named inputs", "write every input out")
        if parameter.name not in hints:
            _refuse_definition(
                owner, f"input {parameter.name!r} has no type", "an annotation, such as Rollouts", "annotate it"
            )
        variadic = parameter.kind is parameter.VAR_POSITIONAL
        required = parameter.default is parameter.empty and not variadic
        port = Port(parameter.name, hints[parameter.name], required, variadic)
        ports.append(port)
        if parameter.kind is parameter.KEYWORD_ONLY or variadic or not is_edge_annotation(port.annotation):
            continue
        for other in positional:
            if _swappable(port, other):
                _refuse_definition(
                    owner,
                    f"takes {other.name!r} and {port.name!r} by position, and one could be given for the other",
                    "same-typed inputs to be keyword-only",
                    f"write `*` before {port.name!r}",
                )
        positional.append(port)
    if "return" not in hints:
        _refuse_definition(owner, "has no return type", "an annotation: -> Rewards", "annotate what it returns")
    return tuple(ports), hints["return"]


def _refuse_definition(owner: str, what: str, expected: str, do: str) -> None:
    raise GraphError(f"{owner}.__call__ {what}", expected=expected, do=do, where=user_location())


def _swappable(a: Port, b: Port) -> bool:
    types_a, types_b = edge_types(a.annotation)[0], edge_types(b.annotation)[0]
    return any(issubclass(s, t) or issubclass(t, s) for s in types_a for t in types_b)


# -- a call ----------------------------------------------------------------------------------------------------------


def record_or_run(body: Callable[..., Any]) -> Callable[..., Any]:
    """The ``__call__`` of a node with this body."""
    signature = inspect.signature(body)

    @functools.wraps(body)
    def call(self: Node, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            names = [p.name for p in self.ports]
            unknown = [name for name in kwargs if name not in names]
            raise EdgeTypeError(
                f"{self.name} is called with the wrong arguments: {error}",
                expected=f"{self.name}({', '.join(map(str, self.ports))})",
                received=describe_arguments(args, kwargs),
                do=f"it has no {unknown[0]!r}; {nearest(unknown[0], names)}" if unknown else None,
                where=user_location(),
            ) from None
        if type(self).body is not body:  # super().__call__(…) inside of the body of a subclass
            return body(*bound.args, **bound.kwargs)
        arguments = dict(list(bound.arguments.items())[1:])
        if not any(True for _ in flat(arguments.values())) and self.ports:
            raise EdgeTypeError(
                f"{self.name} is called without inputs",
                expected=f"{self.name}({', '.join(map(str, self.ports))})",
                received="()",
                where=user_location(),
            )
        _refuse_refs_in_settings(self)
        recording = any(isinstance(v, Ref) for v in flat(arguments.values()))
        if recording:
            arguments = _checked_edges(self, arguments)
        if self.composite:
            return body(*bound.args, **bound.kwargs)
        if recording:
            return record(self, arguments, self.output_type)
        return self.run(arguments, _eager_label(self))

    call.node_body = body  # type: ignore[attr-defined]
    return call


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, tuples (of ``*args``) taken apart."""
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def describe_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Arguments by their types, as a call would write them."""

    def describe(value: Any) -> str:
        return type_name(value._type) if isinstance(value, Ref) else type(value).__name__

    return "(" + ", ".join([*map(describe, args), *(f"{k}: {describe(v)}" for k, v in kwargs.items())]) + ")"


def _refuse_refs_in_settings(node: Node) -> None:
    for name, value in node.settings().items():
        if isinstance(value, Ref):
            raise EdgeTypeError(
                f"{node.name}: setting {name!r} is given a Ref",
                expected="a value that is known while the flow is built",
                received=repr(value),
                do="make it an input: a parameter that is annotated with the batch type (imported where the node is"
                " defined, not only under TYPE_CHECKING)",
                where=user_location(),
            )


def _checked_edges(node: Node, arguments: dict[str, Any]) -> dict[str, Any]:
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


# -- running ---------------------------------------------------------------------------------------------------------


def check_data(node: Node, arguments: Mapping[str, Any]) -> None:
    """Refuse data of the wrong type. Ports that are no edges (a plain number) take what comes, as Python does."""
    ports = {p.name: p for p in node.ports}
    for name, value in arguments.items():
        port = ports[name]
        if not is_edge_annotation(port.annotation):
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if item is None and (not port.required or edge_types(port.annotation)[1]):
                continue
            if not fits(type(item), port.annotation):
                raise EdgeTypeError(
                    f"{node.name}: argument {name!r} has the wrong type",
                    expected=" or ".join(type_name(t) for t in edge_types(port.annotation)[0]),
                    received=type(item).__name__,
                    where=user_location(),
                )


def check_result(node: Node, result: Any) -> Any:
    """The result; refused where it is not what the node says that it returns."""
    if is_edge_annotation(node.output_type) and not fits(type(result), node.output_type):
        raise EdgeTypeError(
            f"{node.name} returned the wrong type",
            expected=type_name(node.output_type),
            received=type(result).__name__,
            do=f"return what `-> {type_name(node.output_type)}` promises, or change the annotation",
        )
    return result


def tensors_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of an input with the name of its column."""
    import torch

    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"[{key!r}]{name}", tensor) for name, tensor in tensors_in(item))
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from ((f".{f.name}{name}", tensor) for name, tensor in tensors_in(getattr(value, f.name)))


class Untouched:
    """Notices a body that writes into its inputs: other nodes read the same memory.

    torch counts the in-place changes of each tensor. A write through NumPy is not seen.
    """

    def __init__(self, node: Node, arguments: Mapping[str, Any]) -> None:
        self.node = node
        batches = [(n, item) for n, v in arguments.items() for item in (v if isinstance(v, tuple) else (v,))]
        self.seen = [
            (name, tensor, tensor._version)
            for argument, batch in batches
            for name, tensor in ((argument + column, t) for column, t in tensors_in(batch))
            if not tensor.is_inference()
        ]

    def check(self) -> None:
        """Raise for the first input that was written.

        Raises:
            GraphError: names the node and the column.
        """
        for name, tensor, version in self.seen:
            if tensor._version != version:
                raise GraphError(
                    f"{self.node.name} writes into its input {name}",
                    expected="inputs that stay as they are: other nodes read the same memory",
                    received=f"{tensor._version - version} change(s) in place",
                    do="clone the tensor before you change it",
                )


def align_arguments(node: Node, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Bring every input with row ids into the row order of the anchor: the first one that joins "exact".

    A field of a batch (a Ragged, a Tensor) carries no ids and comes as it is.
    """
    anchor: Batch | None = None
    for name, value in arguments.items():
        first = (value[0] if value else None) if isinstance(value, tuple) and node.aligns_variadic else value
        if isinstance(first, Batch) and first.row_ids is not None and node.joins.get(name, "exact") == "exact":
            anchor = first
            break
    if anchor is None:
        return dict(arguments)

    def aligned(value: Any, name: str, argument: str) -> Any:
        if not isinstance(value, Batch):
            return value
        return align(anchor, value, join=node.joins.get(name, "exact"), node=node.name, argument=argument)

    out: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple):
            together = node.aligns_variadic
            out[name] = tuple(aligned(v, name, f"{name}[{i}]") if together else v for i, v in enumerate(value))
        else:
            out[name] = aligned(value, name, name)
    return out
