"""RLFlow: the graph of one training iteration, made from its output Refs.

Two kinds of edges. **Data edges** are what a user wires: the output of a call, or a field of it, goes into an argument.
**Weight edges** are derived and never drawn by hand: an updater writes a Model, other calls read it, and each (writer,
reader) pair is an edge that crosses iterations. The cycle in reinforcement learning is in the weights, not in the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx

from flowrl import context
from flowrl.annotations import type_name
from flowrl.batches import Batch, Prompts
from flowrl.errors import EdgeTypeError, GraphError, nearest
from flowrl.graph import Call, Ref, recorded_from, user_location, walk
from flowrl.models import AnyModel, BaseModel, DerivedModel, Ema, Snapshot, State
from flowrl.nodes.function import NodeLike
from flowrl.nodes.loss import Loss
from flowrl.nodes.source import Source, source
from flowrl.stable_text import stable_text
from flowrl.weight_edges import (
    WeightEdge,
    followed_by,
    follower_label,
    order_with_readers_first,
    owner,
    weight_edges,
)

if TYPE_CHECKING:
    from flowrl.checks import Report

__all__ = ["RLFlow", "WeightEdge", "follower_label"]


class RLFlow:
    """The graph of one iteration: the calls that its outputs need, in recording order.

    Made from its outputs, ``RLFlow.from_outputs(…)``, or in the short form from its parts, which are wired by their
    annotated types into

        source → rollout → each reward → sum (where several) → policy log-probs → [critic values, where the estimator
        asks for ``Values``: a critic started from the policy, and its updater] → [reference log-probs, where
        ``reference=`` or a KL coefficient asks] → estimator → updater (without a policy it trains the rollout's)

    which is nothing that one could not write by hand. A flow is not changed after it is made.

    Example::

        flow = RLFlow(
            rollout=Rollout(actor, group_size=8),
            reward=FunctionReward(is_correct),
            advantage_estimator=GroupAdvantage(),
            policy_updater=GRPOUpdater(),
        )
        flow.check()                        # all violations at once
        flow.step(prompts)                  # one iteration, here and now
        flow.graph                          # a networkx graph: data edges and weight edges
    """

    def __init__(
        self,
        *,
        rollout: NodeLike | None = None,
        reward: NodeLike | None = None,
        reward_models: Sequence[NodeLike] = (),
        advantage_estimator: NodeLike | None = None,
        policy_updater: NodeLike | None = None,
        critic: AnyModel | None = None,
        critic_updater: NodeLike | None = None,
        reference: AnyModel | None = None,
        prompts: Prompts | None = None,
        batch_size: int = 64,
    ) -> None:
        """Wire parts by their annotated types, as the class says.

        Args:
            rollout: the node (or engine) that answers prompts. Needed, as are a reward, the estimator and the updater.
            reward: one reward node.
            reward_models: several, which are summed with ``reward``, if that is given too.
            advantage_estimator: the node that makes Advantages.
            policy_updater: the updater of the policy; its Model is filled in when it has none.
            critic: the value model; by default one is started from the policy where values are needed.
            critic_updater: its updater; by default ``ValueUpdater(critic)``.
            reference: the Model for reference log-probs; by default ``policy.frozen()`` where a KL coefficient asks.
            prompts: the Ref of a source; by default ``source(Prompts, name="prompts", batch_size=batch_size)``.
            batch_size: prompts an iteration of that default source.

        Raises:
            GraphError: a part is missing (the message lists what there is), or two parts fit one argument.
        """
        from flowrl.short_form import wire

        outputs = wire(
            rollout=rollout,
            rewards=[*([reward] if reward is not None else []), *reward_models],
            advantage_estimator=advantage_estimator,
            policy_updater=policy_updater,
            critic=critic,
            critic_updater=critic_updater,
            reference=reference,
            prompts=prompts if prompts is not None else source(Prompts, name="prompts", batch_size=batch_size),
        )
        self._build(outputs)

    @classmethod
    def from_outputs(cls, *outputs: Any) -> RLFlow:
        """The flow of everything that these outputs need.

        Raises:
            GraphError: there is no output.
            EdgeTypeError: an output is not a Ref.
        """
        if not outputs:
            raise GraphError(
                "RLFlow.from_outputs needs outputs", expected="at least one Ref", received="none", where=user_location()
            )
        for i, output in enumerate(outputs):
            if not isinstance(output, Ref):
                raise EdgeTypeError(
                    f"RLFlow.from_outputs: output {i} is not a Ref",
                    expected="what a node returned while the flow was built",
                    received=type(output).__name__,
                    do="feed the first node from source(…), so that calls are recorded instead of run",
                    where=user_location(),
                )
        flow = cls.__new__(cls)
        flow._build(outputs)
        return flow

    def _build(self, outputs: Sequence[Ref]) -> None:
        self.outputs: tuple[Ref, ...] = tuple(outputs)
        self.calls: tuple[Call, ...] = tuple(walk(self.outputs))
        self.where = user_location()
        self._labels = _label(self.calls)
        for call in self.calls:
            object.__setattr__(call, "_claimed", True)

    # -- looking -----------------------------------------------------------------------------------------------------

    def label(self, of: Any) -> str:
        """The label of a Ref or Call of this flow.

        Raises:
            GraphError: it is not of this flow.
        """
        call = of._call if isinstance(of, Ref) else of
        if id(call) not in self._labels:
            raise GraphError(f"{of!r} is not part of this flow", do=nearest(repr(of), self.labels))
        return self._labels[id(call)]

    @property
    def labels(self) -> tuple[str, ...]:
        """Of all calls, in the order of :attr:`calls`."""
        return tuple(self._labels[id(c)] for c in self.calls)

    def call(self, label: str) -> Call:
        """The call of this label."""
        for call in self.calls:
            if self._labels[id(call)] == label:
                return call
        raise GraphError(f"No call is labelled {label!r}", do=nearest(label, self.labels))

    @property
    def sources(self) -> dict[str, Source]:
        """Source nodes by name."""
        return {c.node.source_name: c.node for c in self.calls if isinstance(c.node, Source)}

    @property
    def models(self) -> tuple[BaseModel, ...]:
        """Every Model that a call reads or writes, the bases of derived ones too, in order of first use."""
        found: dict[int, BaseModel] = {}
        for call in self.calls:
            for thing in (*call.node.models(), *call.node.reads(), *call.node.writes()):
                if isinstance(thing, DerivedModel):
                    found.setdefault(id(thing.base), thing.base)
                if isinstance(thing, BaseModel):
                    found.setdefault(id(thing), thing)
        return tuple(found.values())

    @property
    def states(self) -> tuple[State, ...]:
        """Every State that a call reads or writes."""
        found = {id(s): s for c in self.calls for s in (*c.node.reads(), *c.node.writes()) if isinstance(s, State)}
        return tuple(found.values())

    def writers(self) -> dict[int, list[Call]]:
        """By id of the parameter set (or State), the calls that write it."""
        out: dict[int, list[Call]] = {}
        for call in self.calls:
            for thing in call.node.writes():
                out.setdefault(id(owner(thing)), []).append(call)
        return out

    def effective_reads(self, call: Call) -> tuple[BaseModel | State, ...]:
        """What a call reads: of an updater also what the losses that it minimises hold."""
        reads = list(call.node.reads())
        for _, ref in call.inputs():
            if isinstance(ref._call.node, Loss):
                reads += ref._call.node.reads()
        return tuple({id(r): r for r in reads}.values())

    @property
    def followers(self) -> tuple[DerivedModel, ...]:
        """Snapshots and Emas: each has a derived writer that runs after its base's writer."""
        return tuple(m for m in self.models if isinstance(m, Snapshot | Ema))

    @property
    def weight_edges(self) -> tuple[WeightEdge, ...]:
        """Every (writer → reader) pair of a Model or State; the writers of Snapshots and Emas are derived."""
        return weight_edges(self)

    @property
    def graph(self) -> nx.MultiDiGraph:
        """Nodes are labels; edges have ``kind`` "data" (argument, type, path) or "weights" (model, staleness)."""
        graph = nx.MultiDiGraph()
        for call in self.calls:
            node = call.node
            graph.add_node(
                self.label(call),
                title=node.name,
                kind=node.kind,
                settings={k: _short(v) for k, v in node.settings().items()},
                models=tuple(m.name for m in node.models()),
                where=call.where,
                elided=False,
                call=call,
            )
        for follower in self.followers:
            graph.add_node(
                follower_label(follower),
                title=type(follower).__name__,
                kind="derived",
                settings={"base": follower.base.name},
                models=(follower.name,),
                where="",
                elided=False,
                call=None,
            )
        for call in self.calls:
            for argument, ref in call.inputs():
                graph.add_edge(
                    self.label(ref._call),
                    self.label(call),
                    key=f"data:{argument}",
                    kind="data",
                    argument=argument,
                    type=type_name(ref._type),
                    path=".".join(ref._path),
                )
        for edge in self.weight_edges:
            graph.add_edge(
                edge.writer,
                edge.reader,
                key=f"weights:{edge.model}",
                kind="weights",
                model=edge.model,
                staleness=edge.max_staleness,
            )
        return graph

    def execution_order(self) -> tuple[Call, ...]:
        """Calls in an order that respects the data edges, and lets every reader of a Model run before its writer."""
        order, cycle = order_with_readers_first(self)
        if cycle:
            raise GraphError(
                "This flow has a cycle: a Model would have to be read after it is written",
                received=" → ".join(self.label(c) for c in (*cycle, cycle[0])),
                do="see `print(flow.check())`",
            )
        return order

    def unreached(self) -> tuple[Call, ...]:
        """Calls recorded from this flow's sources whose result nobody takes, and which are no output of any flow."""
        recorded = {id(c): c for call in self.calls if not call.arguments for c in recorded_from(call)}
        unclaimed = [c for c in recorded.values() if "_claimed" not in c.__dict__]
        taken = {id(ref._call) for c in unclaimed for _, ref in c.inputs()}
        return tuple(c for c in unclaimed if id(c) not in taken)

    def check(self) -> Report:
        """All violations at once. See :mod:`flowrl.checks`."""
        from flowrl.checks import check

        return check(self)

    # -- running, eagerly --------------------------------------------------------------------------------------------

    def step(self, data: Batch | Mapping[str, Batch], *, seed: int = 0, iteration: int = 0) -> Any:
        """Run one iteration here and now, call by call, with nothing left out: the reference that every runtime is
        compared with.

        Args:
            data: the batch of the one source, or batches by source name.
            seed: of the randomness; inside of ``with flowrl.step(…)`` that one holds.

        Returns:
            The output, or a tuple of the outputs.

        Raises:
            GraphError: a source has no data, or data name no source.
            EdgeTypeError: a source is given the wrong kind of batch.
        """
        data = self._by_source(data)
        order = self.execution_order()
        outer = context.current_step_or_none()
        values: dict[int, Any] = {}
        with context.use_step(outer or context.StepContext(seed=seed, iteration=iteration)):
            for call in order:
                if isinstance(call.node, Source):
                    values[id(call)] = data[call.node.source_name]
                    continue
                arguments = {
                    name: tuple(_read(r, values) for r in value) if isinstance(value, tuple) else _read(value, values)
                    for name, value in call.arguments.items()
                }
                values[id(call)] = call.node.run(arguments, label=self.label(call))
            # Last, so that no reader of a Snapshot or Ema sees what this iteration made of it.
            followers = [m for call in order for m in followed_by(call, self.followers)]
            if followers:
                context.follow_writers(followers)
        outputs = tuple(_read(ref, values) for ref in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _by_source(self, data: Batch | Mapping[str, Batch]) -> dict[str, Batch]:
        sources = self.sources
        if not isinstance(data, Mapping):
            if len(sources) != 1:
                raise GraphError(
                    f"This flow has {len(sources)} sources",
                    expected=f"batches by name: {sorted(sources)}",
                    received="one batch",
                )
            data = {next(iter(sources)): data}
        for name in data:
            if name not in sources:
                raise GraphError(f"There is no source {name!r}", do=nearest(name, sources))
        for name, node in sources.items():
            if name not in data:
                raise GraphError(f"No data for source {name!r}", do=nearest(name, data))
            if not isinstance(data[name], node.batch_type):
                raise EdgeTypeError(
                    f"Source {name!r} is given the wrong batch",
                    expected=node.batch_type.__name__,
                    received=type(data[name]).__name__,
                )
        return dict(data)

    # -- showing -----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"RLFlow({' → '.join(self.labels)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from flowrl.display import mimebundle

        return mimebundle(self.graph)


def _label(calls: Iterable[Call]) -> dict[int, str]:
    """By id of the call: the label given, or class#n in recording order."""
    labels: dict[int, str] = {}
    counts: dict[str, int] = {}
    for call in sorted(calls, key=lambda c: c.order):
        if call.node.label:
            labels[id(call)] = call.node.label
        else:
            count = counts.get(call.node.name, 0)
            counts[call.node.name] = count + 1
            labels[id(call)] = f"{call.node.name}#{count}"
    return labels


def _read(ref: Ref, values: Mapping[int, Any]) -> Any:
    value = values[id(ref._call)]
    for name in ref._path:
        value = getattr(value, name)
    return value


def _short(value: Any) -> str:
    text = value.__name__ if callable(value) and hasattr(value, "__name__") else stable_text(value)
    return text if len(text) <= 60 else text[:57] + "…"
