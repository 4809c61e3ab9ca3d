"""Node: a frozen dataclass whose fields are settings and whose annotated ``__call__`` is its inputs and its one output.

Called with data a node runs; called with a Ref it is recorded. Nodes hold no run state: what is mutable is a Model or a
State, what is live (pools, sandboxes) is opened in ``setup`` and closed by the runtime.
"""

from __future__ import annotations

import copyreg
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

from flowrl import context
from flowrl.alignment import Join
from flowrl.columns import Batch
from flowrl.errors import GraphError
from flowrl.graph import user_location
from flowrl.models import BaseModel, State
from flowrl.nodes.calling import (
    Port,
    Untouched,
    align_arguments,
    check_data,
    check_result,
    read_signature,
    record_or_run,
)

# A class that travels by value would bring along a copy of the mark for "no default", which nobody takes for that mark.
copyreg.pickle(type(MISSING), lambda _: "MISSING")

__all__ = ["Join", "Node", "Port", "Split"]

Split = Literal["rows", "groups", "whole"]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _NodeTransform:
    """Tells type checkers that every subclass of Node is a frozen dataclass; ``Node.__init_subclass__`` makes it
    one."""


@dataclass(frozen=True)
class Node(_NodeTransform):
    """The base of every node. A subclass is a frozen dataclass without having to say so.

    Example::

        class LengthPenalty(Node):
            per_token: float = 0.01

            def __call__(self, rollouts: Rollouts) -> Rewards:
                return rewards_like(rollouts, length=-self.per_token * rollouts.response_lengths)

    Every parameter of ``__call__`` is an input and is annotated, and so is what it returns. Two inputs of one type
    must be keyword-only, so that nobody swaps them.

    Class attributes that a subclass may set:

    * ``kind``: how pictures colour it.
    * ``split``: how a batch is split over a mesh: by ``rows`` (never through a group), by ``groups``, or ``whole``.
    * ``joins``: by argument, how its rows are matched with those of the first argument that is not listed: "exact"
      (default), "subset" (the argument may hold more rows) or "prompt" (it has one row a prompt).
    * ``needs_groups``: the smallest group that its result is defined for; 1 where it does not compare within groups.

    Raises:
        GraphError: when the class is made: an annotation is missing, two inputs can be swapped, or a field takes the
            name of something that nodes have.
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

    #: Made from ``__call__``: its inputs, what it returns, and itself as it was written.
    ports: ClassVar[tuple[Port, ...]] = ()
    output_type: ClassVar[Any] = object
    body: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_shadowing(cls)
        if "__dataclass_params__" not in cls.__dict__:  # it is there when @dataclass(slots=True) makes a class anew
            _make_dataclass(cls)
        if "__call__" in cls.__dict__:
            call = cls.__dict__["__call__"]
            body = getattr(
                call, "node_body", call
            )  # a call that is recorded already, where the class is made anew (slots)
            cls.ports, cls.output_type = read_signature(body, cls.__name__, sys._getframe(1).f_locals)
            cls.body = body
            cls.__call__ = record_or_run(body)  # type: ignore[method-assign]
        cls.check_class()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    # -- what a subclass may say about itself ------------------------------------------------------------------------

    @classmethod
    def check_class(cls) -> None:
        """Refuse a subclass that cannot work, when it is made.

        Raises:
            GraphError: says why.
        """

    def models(self) -> tuple[BaseModel, ...]:
        """The Models among its settings, also those inside of tuples, lists, dicts and dataclasses."""
        return tuple(dict.fromkeys(held(self.settings(), BaseModel)))

    def states(self) -> tuple[State, ...]:
        """The States among its settings."""
        return tuple(dict.fromkeys(held(self.settings(), State)))

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
        """Inputs that its settings need and that the wiring leaves out, a sentence each; collected when a flow is
        checked.

        Args:
            given: the names of the arguments that are wired.
        """
        return ()

    def maker_problems(self, makers: Mapping[str, Node]) -> Iterable[str]:
        """What is wrong with the settings of the nodes that its inputs come from, a sentence each; collected when a flow
        is checked.

        Args:
            makers: by argument, the node whose output it is.
        """
        return ()

    def setup(self, ctx: context.Bindings) -> Any:
        """Open live resources (pools, sandboxes): called once a run, at first use. What it returns is handed out by
        :meth:`resource` and closed (``close()``) by the runtime."""
        return None

    def resource(self) -> Any:
        """What :meth:`setup` returned for this node, opened at first use."""
        resources = context.current_bindings().resources
        if id(self) not in resources:  # the node is kept beside it, so that its id is not given to another
            resources[id(self)] = (self, self.setup(context.current_bindings()))
        return resources[id(self)][1]

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, arguments: Mapping[str, Any], label: str) -> Any:
        """Run the body on data as the call ``label``: check types, align rows by id, seed the global generators, call
        it.

        Args:
            arguments: by parameter name; a tuple for ``*args``.

        Raises:
            EdgeTypeError: an input or the result is of the wrong type.
            AlignmentError: the rows of the inputs do not belong together.
        """
        check_data(self, arguments)
        body = type(self).body
        bound = inspect.signature(body).bind_partial(self)
        bound.arguments.update(align_arguments(self, arguments))
        here = context.current_step_or_none()
        if here is not None and not here.label:  # a call inside of a body goes on drawing from the body's generators
            context.seed_call(label)
        here = here or context.StepContext()
        self._refuse_problems(frozenset(arguments))
        untouched = Untouched(self, dict(list(bound.arguments.items())[1:]))
        with context.use_step(replace(here, label=label, counts={}, writes=self.writes())):
            result = body(*bound.args, **bound.kwargs)
        untouched.check()
        return check_result(self, result)

    def _refuse_problems(self, given: frozenset[str]) -> None:
        """Refuse settings and wiring that cannot work, once: what the check of a flow does, where there is no flow."""
        if "_checked" in self.__dict__:
            return
        problems = [*nan_problems(self), *self.problems(), *self.wiring_problems(given)]
        if problems:
            raise GraphError(
                f"{self.name} cannot run: {'; '.join(problems)}",
                expected="settings that can work",
                received=f"{len(problems)} that cannot",
            )
        self.__dict__["_checked"] = True

    @property
    def name(self) -> str:
        """How pictures and errors call it."""
        return type(self).__name__

    def settings(self) -> dict[str, Any]:
        """Its fields by name, the label aside."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "label"}


def nan_problems(node: Node) -> Iterator[str]:
    """Settings that are not a number, a sentence each: no comparison would find them."""
    for name, value in node.settings().items():
        if isinstance(value, float) and value != value:
            yield f"{name} is nan; expected a number"


def held(value: Any, kind: type[T]) -> Iterator[T]:
    """Everything of a kind in a setting, containers and dataclasses taken apart."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from held(item, kind)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from held(item, kind)
    elif is_dataclass(value) and not isinstance(value, type | BaseModel | State | Batch):
        for f in fields(value):
            yield from held(getattr(value, f.name), kind)


def _make_dataclass(cls: type) -> None:
    declared = {k: v for k, v in cls.__dict__.items() if isinstance(v, Field)}
    dataclass(frozen=True)(cls)
    # A user may also write @dataclass(frozen=True): it must find the class as it was written.
    for name, value in declared.items():
        setattr(cls, name, value)
    for name in ("__setattr__", "__delattr__"):
        delattr(cls, name)


def _refuse_shadowing(cls: type) -> None:
    """Refuse fields that would hide a method or a class attribute of a base: `name: str` would hide `Node.name`."""
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" in str(annotation):
            continue
        for base in cls.__mro__[1:]:
            own = getattr(base, "__dataclass_fields__", {}).get(name)
            is_field = own is not None and "ClassVar" not in str(own.type)
            if name in vars(base) and not is_field and issubclass(base, Node):
                raise GraphError(
                    f"{cls.__name__} has a setting {name!r}, which is something that every {base.__name__} has",
                    expected="settings with names of their own",
                    received=name,
                    do=f"call it otherwise, such as {name}_",
                    where=user_location(),
                )


def _refuse_change(self: Node, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot change {name!r} of {self.name}: nodes are frozen; use dataclasses.replace")


Node.__setattr__ = Node.__delattr__ = _refuse_change  # type: ignore[method-assign,assignment]
