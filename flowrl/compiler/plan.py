"""Plan and Program: what a runtime needs, as data.

A **Plan** is frozen, JSON, comparable, and explains itself. A **Program** is the labelled calls (they travel with
cloudpickle, also when their classes are defined in ``__main__``, in a function or in a notebook) plus the Plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flowrl.compiler.mapping import Mapping as DeviceMapping
from flowrl.compiler.strategy import Strategy
from flowrl.errors import FlowError, nearest
from flowrl.models import BaseModel, State

if TYPE_CHECKING:
    from flowrl.nodes.base import Node

SCHEMA_VERSION = 3


@dataclass(frozen=True)
class Binding:
    """Where an argument comes from: the call of this label, and the fields read from its output."""

    label: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.label, *self.path))


@dataclass(frozen=True)
class PlannedCall:
    """One call as the plan sees it.

    Args:
        node: the class of the node.
        kind: its kind.
        settings: (name, text) of its settings, as :func:`flowrl.stable_text.stable_text` writes them.
        arguments: (name, bindings): one binding, or several for ``*args``.
        reads: names of Models and States that it reads and does not write.
        writes: names of Models and States that it writes.
        device: where it runs.
        elided: why the call is left out; "" where it runs.
        once: whether it runs on the first rank alone, and the others are given its result. So does what holds no Model; a
            call with one is a conversation of all ranks, and a loss is only put together.
    """

    label: str
    node: str
    kind: str
    settings: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, tuple[str, ...]], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    device: str
    elided: str = ""
    once: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """One Model as the plan sees it.

    Args:
        kind: "policy", "value" or "reward".
        dtype: of the parameters.
        autocast: of matrix products; None for ``dtype`` itself.
        engine: what holds it.
        writer: label of the call, or of the derived writer, that writes it; "" where nobody does.
        strategy: how it is held over the ranks.
    """

    name: str
    kind: str
    device: str
    dtype: str
    autocast: str | None
    engine: str
    writer: str
    strategy: Strategy = field(default_factory=Strategy)


@dataclass(frozen=True)
class PlannedWeightEdge:
    """A (writer → reader) pair: in iteration i the reader uses a version in [i − max_staleness, i]."""

    model: str
    writer: str
    reader: str
    max_staleness: int


@dataclass(frozen=True)
class Plan:
    """What the compiler made of a flow: frozen, comparable, JSON.

    Args:
        calls: in execution order; those that are left out say why.
        models: in order of first use.
        weight_edges: of the calls that run.
        derived_writers: (label, name of the base) of what makes Snapshots and Emas follow.
        micro_batch_tokens: token budget of one forward pass in training and scoring.
        device: what the calls run on.
        num_devices: how many of them, a rank each.
        mapping: where every call runs and what that costs, where the compiler has placed them; None where all run on all
            devices with the strategies that were given.
    """

    calls: tuple[PlannedCall, ...]
    models: tuple[PlannedModel, ...]
    weight_edges: tuple[PlannedWeightEdge, ...]
    derived_writers: tuple[tuple[str, str], ...]
    micro_batch_tokens: int
    device: str
    num_devices: int = 1
    mapping: DeviceMapping | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """A JSON text; equal plans give equal texts."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan back from :meth:`to_json`.

        Raises:
            FlowError: the text is of another schema version, or not a plan.
        """
        try:
            raw = json.loads(text)
            version = raw["schema_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise _not_a_plan(error) from None
        if version != SCHEMA_VERSION:
            raise FlowError("This plan is of another version", expected=f"schema {SCHEMA_VERSION}", received=version)
        from flowrl.compiler.plan_diff import mapping_from_json

        try:
            return cls(
                calls=tuple(PlannedCall(**_tuples(c)) for c in raw["calls"]),
                models=tuple(
                    PlannedModel(**{**m, "strategy": Strategy(**_tuples(m["strategy"]))}) for m in raw["models"]
                ),
                weight_edges=tuple(PlannedWeightEdge(**e) for e in raw["weight_edges"]),
                derived_writers=_tuples(raw["derived_writers"]),
                micro_batch_tokens=raw["micro_batch_tokens"],
                device=raw["device"],
                num_devices=raw["num_devices"],
                mapping=None if raw["mapping"] is None else mapping_from_json(raw["mapping"]),
            )
        except (KeyError, TypeError) as error:
            raise _not_a_plan(error) from None

    @property
    def structure(self) -> str:
        """A hash of what a checkpoint depends on: calls, wiring and Models, but neither settings nor devices nor
        strategies: a checkpoint is resumed with others."""
        parts = [(c.label, c.node, c.arguments, c.reads, c.writes) for c in self.calls]
        models = [(m.name, m.kind, m.writer) for m in self.models]
        return hashlib.sha256(json.dumps([parts, models]).encode()).hexdigest()[:16]

    def not_everywhere(self) -> list[str]:
        """Why this plan cannot be run by ranks that all run every call, a sentence each; empty where it can."""
        if self.mapping is None:
            return []
        found = []
        meshes = self.mapping.meshes
        if any(mesh.size != self.num_devices for mesh in meshes):
            found.append(f"its calls run on {len(meshes)} meshes, not all on all {self.num_devices} devices")
        staged = sorted({u.model for u in self.mapping.units if u.parallelism.pipeline > 1})
        if staged:
            found.append(f"{', '.join(staged)} is cut into pipeline stages")
        layouts: dict[str, set[int]] = {}
        for unit in self.mapping.units:
            layouts.setdefault(unit.model, set()).add(unit.parallelism.tensor)
        several = sorted(name for name, found_here in layouts.items() if len(found_here) > 1)
        if several:
            found.append(f"{', '.join(several)} changes its layout between calls")
        return found

    def explain(self) -> str:
        """The plan in words: what runs in which order, what reads which weights, what was left out and why."""
        many = self.num_devices > 1
        on = f"{self.num_devices} ranks ({self.device})" if many else self.device
        lines = [f"{len(self.calls)} calls on {on}, in this order:"]
        for i, call in enumerate(self.calls, 1):
            inputs = ", ".join(f"{name}={' + '.join(b)}" for name, b in call.arguments)
            notes = [f"reads {', '.join(call.reads)}"] if call.reads else []
            notes += [f"writes {', '.join(call.writes)}"] if call.writes else []
            notes += ["on the first rank"] if many and call.once else []
            line = f"{i:3}. {call.label}({inputs})" + (f"  [{'; '.join(notes)}]" if notes else "")
            if call.elided:
                line += f"\n     left out: {call.elided}"
            lines.append(line)
        for name, base in self.derived_writers:
            lines.append(f"     {name} follows {base} after each version of it")
        for edge in self.weight_edges:
            lag = "this iteration's version" if edge.max_staleness == 0 else f"up to {edge.max_staleness} versions back"
            lines.append(f"Weights of {edge.model}: {edge.writer} → {edge.reader}, {lag}")
        for model in self.models:
            precision = model.dtype + (f", products in {model.autocast}" if model.autocast else "")
            written = f"written by {model.writer}" if model.writer else "never written"
            held = describe_strategy(model.strategy, self.num_devices)
            lines.append(
                f"Model {model.name}: {model.kind}, {model.engine} on {model.device}, {precision}, {written}"
                + (f"; {held}" if held else "")
            )
        lines.append(f"Training and scoring run in micro-batches of at most {self.micro_batch_tokens} tokens.")
        if self.mapping is not None:
            from flowrl.compiler.explain import explain

            lines += ["", explain(self.mapping)]
        return "\n".join(lines)

    def diff(self, other: Plan) -> str:
        """What the other plan does differently, a line each; "" for equal plans."""
        from flowrl.compiler.plan_diff import diff

        return diff(self, other)

    def html(self) -> str:
        """A page by itself: where calls run, the timeline, and the explanation.

        Raises:
            FlowError: the compiler has placed nothing.
        """
        from flowrl.drawing.mapping_page import mapping_html

        if self.mapping is None:
            raise FlowError(
                "This plan has no mapping to devices",
                expected="a plan that the compiler has placed",
                received=f"one whose calls all run on {self.num_devices} × {self.device}",
                do='compile(flow, cluster, strategy="auto")',
            )
        return mapping_html(self.mapping)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What Jupyter shows: the page where there is a map of devices, else the explanation."""
        bundle = {"text/plain": self.explain()}
        return bundle if self.mapping is None else {**bundle, "text/html": self.html()}


def describe_strategy(strategy: Strategy, num_ranks: int) -> str:
    """How a Model is held over ranks, in words; "" for one rank that does nothing particular."""
    parts = []
    if num_ranks > 1:
        tensor, data = strategy.tensor_parallel, num_ranks // strategy.tensor_parallel
        sharded = {
            "full": "parameters, gradients and optimiser sharded",
            "optimizer": "gradients and optimiser sharded, parameters whole between forward and backward",
            "none": "a copy on each",
            "hybrid": f"sharded within groups of {strategy.shard_size}, copied between them",
        }
        axes = ([f"{tensor} ranks share each layer"] if tensor > 1 else []) + [f"{data} data-parallel ranks"]
        parts += [f"{' × '.join(axes)}, {sharded[strategy.sharding]}"]
        parts += [f"sharded by {', '.join(strategy.shard_layers)}"] if strategy.shard_layers else []
    parts += ["parameters and optimiser in host memory"] if strategy.cpu_offload else []
    kept = {"layers": "activations of layers computed again", "offload": "inputs of layers kept in host memory"}
    parts += [kept[strategy.activation_checkpointing]] if strategy.activation_checkpointing in kept else []
    parts += ["layers compiled"] if strategy.compile_layers else []
    parts += [f"{strategy.attention} attention"] if strategy.attention != "auto" else []
    return "; ".join(parts)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


def _not_a_plan(error: Exception) -> FlowError:
    return FlowError("This is not a plan", expected="JSON written by Plan.to_json", received=repr(error))


@dataclass(frozen=True, eq=False)
class ProgramCall:
    """A call with its node, ready to run.

    Args:
        label: unique and stable.
        node: the node.
        arguments: by parameter name, a Binding, or a tuple of them for ``*args``.
    """

    label: str
    node: Node
    arguments: Mapping[str, Binding | tuple[Binding, ...]]

    def bindings(self) -> Iterator[Binding]:
        """Every edge into this call."""
        for value in self.arguments.values():
            yield from value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, eq=False)
class Program:
    """The labelled calls in execution order, the outputs, and the Plan: all that a runtime needs.

    Args:
        calls: in execution order.
        outputs: what the flow was made from.
        models: every Model that a call reads or writes, and the bases of derived ones.
        states: every State that a call reads or writes.
        plan: what the compiler decided.
        graph_svg: the picture of the flow.
    """

    calls: tuple[ProgramCall, ...]
    outputs: tuple[Binding, ...]
    models: tuple[BaseModel, ...]
    states: tuple[State, ...]
    plan: Plan
    graph_svg: str = field(default="", repr=False)

    def call(self, label: str) -> ProgramCall:
        """The call of this label.

        Raises:
            FlowError: there is none; the nearest label is offered.
        """
        for call in self.calls:
            if call.label == label:
                return call
        raise FlowError(f"No call is labelled {label!r}", do=nearest(label, [c.label for c in self.calls]))

    def elided(self) -> dict[str, str]:
        """Labels of calls that are left out, with the reason."""
        return {c.label: c.elided for c in self.plan.calls if c.elided}

    def once(self) -> frozenset[str]:
        """Labels of calls that run on the first rank alone."""
        return frozenset(c.label for c in self.plan.calls if c.once)

    def strategies(self) -> dict[str, Strategy]:
        """By name of the Model, how it is held over the ranks."""
        return {m.name: m.strategy for m in self.plan.models}

    def to_bytes(self) -> bytes:
        """The whole program with cloudpickle; :func:`load_program` is the inverse."""
        import cloudpickle

        return cloudpickle.dumps(self)


def load_program(data: bytes) -> Program:
    """A program from :meth:`Program.to_bytes`. Only load what you trust: it is a pickle.

    Raises:
        FlowError: the bytes hold something else.
    """
    import pickle

    program: Any = pickle.loads(data)
    if not isinstance(program, Program):
        raise FlowError("These bytes are not a program", expected="Program.to_bytes()", received=type(program).__name__)
    return program
