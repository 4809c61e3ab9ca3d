"""The placement problems that the benchmarks are about: PPO, GRPO and others, with the numbers of public models.

All times are estimates, from data sheets: nothing here has been measured on such devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.compiler.architecture import Architecture, known_architecture
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.estimate import Estimator
from flowrl.compiler.options import options_of
from flowrl.compiler.precision import Precision
from flowrl.compiler.problem import Option, Problem, Unit, WeightEdge
from flowrl.compiler.work import Kind, Work

#: B/s of each device between hosts: 200 Gb/s for a host of eight, as in HybridFlow's and ReaL's measurements.
PUBLISHED_NETWORK = 3.125e9

#: Llama 2 by its size, as the published comparisons have it.
LLAMA = {"7B": "llama-2-7b", "13B": "llama-2-13b", "34B": "llama-2-34b", "70B": "llama-2-70b"}


@dataclass(frozen=True)
class Workload:
    """Rows and lengths of an iteration.

    Args:
        prompts: of a batch.
        group_size: responses to each.
        prompt_tokens, response_tokens: mean.
        longest: response of all, in tokens; 0: all are as long as the mean.
        updates: optimiser steps of an epoch.
        epochs: passes over the batch.
    """

    prompts: int = 1024
    group_size: int = 1
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    longest: int = 0
    updates: int = 8
    epochs: int = 1

    def work(self, kind: Kind, head: str = "lm") -> Work:
        """What a unit of a kind does in an iteration."""
        trains = kind == "train"
        return Work(
            kind=kind,
            sequences=self.prompts * self.group_size,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            max_response_tokens=max(self.response_tokens, self.longest),
            epochs=self.epochs if trains else 1,
            optimizer_steps=self.updates * self.epochs if trains else 1,
            head="lm" if head == "lm" else "value",
            group_size=self.group_size if kind == "generate" else 1,
        )


@dataclass(frozen=True)
class Role:
    """A unit by name.

    Args:
        label: of the unit.
        model: whose weights it uses.
        kind: what it does.
        waits: labels of the units whose results it needs.
        head: "lm" or "value".
        staleness: of the weights that it reads, where another unit writes them.
    """

    label: str
    model: str
    kind: Kind
    waits: tuple[str, ...] = ()
    head: str = "lm"
    staleness: int = 0


@dataclass(frozen=True)
class Case:
    """A problem with a name.

    Args:
        name: of the problem.
        cluster: on what.
        roles: the units, in an order in which they can run.
        models: by Model, the name of an architecture.
        workload: of an iteration.
    """

    name: str
    cluster: Cluster
    roles: tuple[Role, ...]
    models: tuple[tuple[str, str], ...]
    workload: Workload = Workload()

    def problem(self, fixed: Mapping[str, Mapping[str, int]] | None = None) -> Problem:
        """The placement problem; all its times are estimates. Nothing of it is kept: building it is part of planning.

        Args:
            fixed: by label of a unit, what of its parallelism is fixed: {"train actor": {"tensor": 8}}.
        """
        known = {model: known_architecture(name) for model, name in self.models}
        index = {role.label: u for u, role in enumerate(self.roles)}
        writers = {role.model: u for u, role in enumerate(self.roles) if role.kind == "train"}
        estimator = Estimator(self.cluster)

        @functools.cache
        def options(
            architecture: Architecture, work: Work, trained: bool, read: bool, pins: tuple[tuple[str, int], ...]
        ) -> tuple[Option, ...]:
            precision = Precision.mixed() if trained else Precision.served()
            return options_of(estimator, architecture, work, precision, read=read, fixed=dict(pins))

        units, ways = [], []
        for role in self.roles:
            architecture, work = known[role.model], self.workload.work(role.kind, role.head)
            trains = role.kind == "train"
            size = 2.0 * architecture.num_parameters(work.head)  # bfloat16
            units.append(Unit(role.label, role.label, role.model, role.model, work, trains, size))
            pins = tuple((fixed or {}).get(role.label, {}).items())
            ways.append(options(architecture, work, trains, role.model in writers and not trains, pins))
        return Problem(
            cluster=self.cluster,
            units=tuple(units),
            data=tuple((index[before], u) for u, role in enumerate(self.roles) for before in role.waits),
            weights=tuple(
                WeightEdge(writers[role.model], u, role.staleness)
                for u, role in enumerate(self.roles)
                if role.kind != "train" and role.model in writers
            ),
            options=tuple(ways),
        )


def ppo_roles(staleness: int = 0) -> tuple[Role, ...]:
    """PPO with an actor, a critic, a reference and a reward model: seven units."""
    scores = ("old log-probs", "reference log-probs", "values", "rewards")
    return (
        Role("generate", "actor", "generate", staleness=staleness),
        Role("old log-probs", "actor", "score", ("generate",), staleness=staleness),
        Role("reference log-probs", "reference", "score", ("generate",)),
        Role("values", "critic", "score", ("generate",), head="value", staleness=staleness),
        Role("rewards", "reward", "score", ("generate",), head="value"),
        Role("train actor", "actor", "train", scores),
        Role("train critic", "critic", "train", scores, head="value"),
    )


def grpo_roles(staleness: int = 0) -> tuple[Role, ...]:
    """GRPO with a rule for the reward: an actor and a reference, four units."""
    return (
        Role("generate", "actor", "generate", staleness=staleness),
        Role("old log-probs", "actor", "score", ("generate",)),
        Role("reference log-probs", "reference", "score", ("generate",)),
        Role("train actor", "actor", "train", ("old log-probs", "reference log-probs")),
    )


def safe_rlhf_roles() -> tuple[Role, ...]:
    """PPO with a cost beside the reward, and a critic of each (Dai et al., arXiv 2310.12773): six Models, ten units."""
    scores = ("old log-probs", "reference log-probs", "values", "cost values", "rewards", "costs")
    return (
        Role("generate", "actor", "generate"),
        Role("old log-probs", "actor", "score", ("generate",)),
        Role("reference log-probs", "reference", "score", ("generate",)),
        Role("values", "critic", "score", ("generate",), head="value"),
        Role("cost values", "cost critic", "score", ("generate",), head="value"),
        Role("rewards", "reward", "score", ("generate",), head="value"),
        Role("costs", "cost", "score", ("generate",), head="value"),
        Role("train actor", "actor", "train", scores),
        Role("train critic", "critic", "train", scores, head="value"),
        Role("train cost critic", "cost critic", "train", scores, head="value"),
    )


def judged_roles(num_judges: int) -> tuple[Role, ...]:
    """GRPO with so many judges beside the actor and the reference: to see how planning grows with Models."""
    judges = tuple(Role(f"judge {j}", f"judge {j}", "score", ("generate",), head="value") for j in range(num_judges))
    first, old, reference, _ = grpo_roles()
    scores = (old.label, reference.label, *(judge.label for judge in judges))
    return (first, old, reference, *judges, Role("train actor", "actor", "train", scores))


def models_of(roles: Sequence[Role], architecture: str, **others: str) -> tuple[tuple[str, str], ...]:
    """Every Model of the roles with one architecture, or another where it is named (``cost_critic`` for "cost critic")."""
    named = {name.replace("_", " "): other for name, other in others.items()}
    return tuple((model, named.get(model, architecture)) for model in dict.fromkeys(role.model for role in roles))


def ppo(size: str, nodes: int, device: str = "A100-80G", network: float | None = PUBLISHED_NETWORK) -> Case:
    """PPO as the published comparisons have it: all four Models of one size, prompts and responses of 1,024 tokens, 1,024
    rows, 8 updates."""
    roles = ppo_roles()
    cluster = Cluster(device, nodes=nodes, gpus_per_node=8, network_bandwidth=network)
    return Case(f"PPO {size}, {8 * nodes:,} {device}", cluster, roles, models_of(roles, LLAMA[size]))


def ppo_problem(size: str, nodes: int, device: str = "A100-80G", network: float | None = PUBLISHED_NETWORK) -> Problem:
    """The placement problem of :func:`ppo`."""
    return ppo(size, nodes, device, network).problem()


def _grpo(architecture: str, nodes: int, name: str, staleness: int = 0, **shape: int) -> Case:
    roles = grpo_roles(staleness)
    workload = Workload(**{"prompts": 512, "group_size": 8, "response_tokens": 2048, "longest": 8192, **shape})
    late = f", staleness {staleness}" if staleness else ""
    cluster = Cluster("H100", nodes=nodes, gpus_per_node=8)
    return Case(f"GRPO {name}{late}, {8 * nodes:,} H100", cluster, roles, models_of(roles, architecture), workload)


def _judged_ppo(nodes: int) -> Case:
    """A large actor and its reference beside a small critic and reward model."""
    roles = ppo_roles()
    models = models_of(roles, "llama-3-70b", critic="llama-3-8b", reward="llama-3-8b")
    cluster = Cluster("H100", nodes=nodes, gpus_per_node=8)
    return Case(f"PPO 70B with critic and reward 8B, {8 * nodes:,} H100", cluster, roles, models)


def _mixture_ppo(nodes: int) -> Case:
    roles = ppo_roles()
    cluster = Cluster("H100", nodes=nodes, gpus_per_node=8)
    return Case(f"PPO Mixtral 8x7B, {8 * nodes:,} H100", cluster, roles, models_of(roles, "mixtral-8x7b"))


#: The standard set: 7B to 70B, dense and mixtures, 8 to 1,024 devices.
STANDARD: tuple[Callable[[], Case], ...] = (
    lambda: ppo("7B", 1),
    lambda: ppo("7B", 2),
    lambda: ppo("13B", 4),
    lambda: ppo("34B", 8),
    lambda: ppo("34B", 16),
    lambda: ppo("70B", 32),
    lambda: ppo("70B", 128, "H100", None),
    lambda: _judged_ppo(32),
    lambda: _grpo("qwen2.5-7b", 1, "Qwen2.5-7B", prompts=128),
    lambda: _grpo("qwen3-30b-a3b", 8, "Qwen3-30B-A3B"),
    lambda: _grpo("qwen2.5-32b", 32, "Qwen2.5-32B", staleness=1),
    lambda: _mixture_ppo(64),
)


def standard() -> tuple[Case, ...]:
    """The twelve problems of the standard set."""
    return tuple(make() for make in STANDARD)


def largest() -> Case:
    """Six Models on 4,096 devices."""
    roles = safe_rlhf_roles()
    models = models_of(roles, "llama-3-70b", reward="llama-3-8b", cost="llama-3-8b")
    cluster = Cluster("H100", nodes=512, gpus_per_node=8)
    return Case("Safe RLHF 70B, six Models, 4,096 H100", cluster, roles, models, Workload(prompts=4096))


def judged(num_models: int, nodes: int = 32) -> Case:
    """A flow of ``num_models`` Models of 8B, at least two."""
    roles = judged_roles(num_models - 2)
    cluster = Cluster("H100", nodes=nodes, gpus_per_node=8)
    return Case(f"{num_models} Models of 8B, {8 * nodes} H100", cluster, roles, models_of(roles, "llama-3-8b"))
