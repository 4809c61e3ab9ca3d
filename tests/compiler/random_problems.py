"""Random placement problems that are small enough to try every assignment.

Some are arbitrary; others look like PPO, like a flow whose updates run beside the next rollouts, or like judges on devices of
their own. Memory is ample in some, binds in others, and in a few nothing fits.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.problem import Option, Problem, Unit, WeightEdge
from flowrl.compiler.work import Kind, Work

GB = 10**9
#: Assignments of a random problem, at most.
LIMIT = 2_500


@dataclass(frozen=True)
class Sketch:
    """A unit before it has options.

    Args:
        kind: what it does.
        model: the Model that it is of.
        weights: whose weights it uses.
        seconds: on one device of the first pool.
    """

    kind: Kind
    model: str
    weights: str
    seconds: float


def random_problem(seed: int, limit: int = LIMIT) -> Problem:
    """A problem of at most ``limit`` assignments, the same for the same seed in every process."""
    rng = random.Random(seed)
    cluster = _cluster(rng)
    shape = (_arbitrary, _ppo, _asynchronous, _arbitrary, _judges)[seed % 5]
    sketches, data, weights = shape(rng)
    bytes_of = {s.weights: rng.uniform(2, 16) * GB for s in sorted(sketches, key=lambda s: s.weights)}
    ways = [_ways(rng, cluster, s, bytes_of[s.weights]) for s in sketches]
    _thin(rng, cluster, ways, limit)
    units = tuple(
        Unit(f"{s.kind}#{i}", f"call{i}", s.model, s.weights, _work(s.kind), s.kind == "train", bytes_of[s.weights])
        for i, s in enumerate(sketches)
    )
    pinned = _pins(rng, cluster, ways)
    problem = Problem(cluster, units, data, weights, tuple(map(tuple, ways)), pinned)
    return with_memory(problem, _memory(rng, problem))


def one_node_more(problem: Problem, pool: int = 0) -> Problem:
    """The same on a cluster whose pool has one node more; what could run before can run still."""
    pools = list(problem.cluster.pools)
    here = pools[pool]
    device = here.device
    grown = Cluster(
        device.name, nodes=here.nodes + 1, gpus_per_node=here.gpus_per_node, memory_bytes=device.memory_bytes
    )
    pools[pool] = grown.pools[0]
    return dataclasses.replace(problem, cluster=Cluster.of(pools))


def with_memory(problem: Problem, memory_bytes: int) -> Problem:
    """The same with devices of this memory."""
    pools = [
        dataclasses.replace(p, device=dataclasses.replace(p.device, memory_bytes=memory_bytes))
        for p in problem.cluster.pools
    ]
    return dataclasses.replace(problem, cluster=Cluster.of(pools))


def shuffled(problem: Problem, seed: int) -> Problem:
    """The same, with everything whose order means nothing in another order. (The first weight edge of several that read
    one copy pays for it.)"""
    rng = random.Random(seed)

    def mixed(items: Sequence) -> tuple:
        return tuple(rng.sample(items, len(items)))

    return dataclasses.replace(
        problem,
        data=mixed(problem.data),
        options=tuple(mixed(options) for options in problem.options),
        pinned=mixed(problem.pinned),
    )


def num_assignments(cluster: Cluster, ways: Sequence[Sequence[Option]]) -> int:
    """How many ways there are to give every unit a mesh and an option."""
    return math.prod(sum(_places(cluster, option) for option in options) for options in ways)


def _places(cluster: Cluster, option: Option) -> int:
    return sum(1 for _ in cluster.meshes(option.size, option.pool))


def _cluster(rng: random.Random) -> Cluster:
    one = rng.choice([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4), (1, 8), (3, 1), (2, 3)])
    first = Cluster("A100-80G", nodes=one[0], gpus_per_node=one[1])
    if rng.random() < 0.25 and first.num_devices <= 4:
        return first + Cluster("L40S", nodes=1, gpus_per_node=rng.choice([1, 2]))
    return first


Shape = tuple[list[Sketch], tuple[tuple[int, int], ...], tuple[WeightEdge, ...]]


def _arbitrary(rng: random.Random) -> Shape:
    """Units of one to three Models, in any order that lets every reader of a Model come before its writer."""
    count, names = rng.randint(2, 4), ["a", "b", "c"][: rng.randint(1, 3)]
    owner = [rng.choice(names) for _ in range(count)]
    kinds: list[Kind] = []
    for i, name in enumerate(owner):
        last = name not in owner[i + 1 :]
        kinds.append("train" if last and rng.random() < 0.7 else rng.choice(["generate", "score"]))
    sketches = [Sketch(k, n, n, rng.uniform(1, 20)) for k, n in zip(kinds, owner, strict=True)]
    data = tuple((u, v) for v in range(count) for u in range(v) if rng.random() < 0.4)
    return sketches, data, _weight_edges(rng, sketches, 0.5)


def _ppo(rng: random.Random) -> Shape:
    """Generate, score in two or three ways, train the actor and perhaps a critic."""
    scores = ["reference", "critic", "reward"][: rng.randint(1, 3)]
    sketches = [Sketch("generate", "actor", "actor", rng.uniform(5, 30))]
    sketches += [Sketch("score", name, name, rng.uniform(1, 8)) for name in scores]
    sketches.append(Sketch("train", "actor", "actor", rng.uniform(5, 30)))
    trains = 1
    if "critic" in scores:
        sketches.append(Sketch("train", "critic", "critic", rng.uniform(2, 20)))
        trains = 2
    first_train = len(sketches) - trains
    data = [(0, i) for i in range(1, first_train)]
    data += [(i, j) for i in range(1, first_train) for j in range(first_train, len(sketches))]
    return sketches, tuple(data), _weight_edges(rng, sketches, 0.0)


def _asynchronous(rng: random.Random) -> Shape:
    """Generation with weights that may be older, a score or two, an update."""
    sketches = [Sketch("generate", "actor", "actor", rng.uniform(5, 30))]
    sketches += [Sketch("score", n, n, rng.uniform(1, 10)) for n in ("actor", "reference")[: rng.randint(0, 2)]]
    sketches.append(Sketch("train", "actor", "actor", rng.uniform(5, 30)))
    last = len(sketches) - 1
    data = [(0, i) for i in range(1, last)] + [(i, last) for i in range(last)]
    edges = [
        WeightEdge(last, i, rng.randint(1, 2) if i == 0 else rng.randint(0, 2))
        for i, s in enumerate(sketches[:last])
        if s.weights == "actor"
    ]
    return sketches, tuple(dict.fromkeys(data)), tuple(edges)


def _judges(rng: random.Random) -> Shape:
    """Generation, judges of which two may share their weights, an update that does not wait for all of them."""
    names = rng.choice([["judge", "judge"], ["judge", "other"], ["judge"]])
    sketches = [Sketch("generate", "actor", "actor", rng.uniform(5, 20))]
    sketches += [Sketch("score", f"{n}{i}", n, rng.uniform(5, 20)) for i, n in enumerate(names)]
    sketches.append(Sketch("train", "actor", "actor", rng.uniform(5, 20)))
    last = len(sketches) - 1
    data = [(0, i) for i in range(1, last + 1)] + [(1, last)]
    return sketches, tuple(dict.fromkeys(data)), _weight_edges(rng, sketches, 0.3)


def _weight_edges(rng: random.Random, sketches: Sequence[Sketch], stale: float) -> tuple[WeightEdge, ...]:
    """Everyone who uses weights that a later unit trains reads them, with a staleness in a share of the cases."""
    writers = {s.weights: i for i, s in enumerate(sketches) if s.kind == "train"}
    return tuple(
        WeightEdge(writers[s.weights], i, rng.randint(1, 2) if rng.random() < stale else 0)
        for i, s in enumerate(sketches)
        if s.kind != "train" and s.weights in writers
    )


def _ways(rng: random.Random, cluster: Cluster, sketch: Sketch, weight_bytes: float) -> list[Option]:
    """Ways to run a unit on meshes of every size, with imperfect scaling."""
    scaling, activations = rng.uniform(0.5, 0.98), rng.uniform(0.1, 1.2) * weight_bytes
    found: list[Option] = []
    for pool, here in enumerate(cluster.pools):
        slower = cluster.pools[0].device.flops / here.device.flops * rng.uniform(0.8, 1.6)
        for size in cluster.sizes(pool):
            for parallelism in _parallelisms(rng, size, sketch.kind):
                sharded = parallelism.tensor * parallelism.pipeline
                seconds = sketch.seconds * slower / size**scaling * rng.uniform(0.9, 1.3)
                seconds *= 1 + 0.1 * (parallelism.zero == 3) + 0.25 * parallelism.checkpointing
                weights = weight_bytes / sharded / (parallelism.data if parallelism.zero == 3 else 1)
                held = weights
                if sketch.kind == "train":
                    held += 6 * weight_bytes / sharded / (parallelism.data if parallelism.zero else 1)
                transient = activations / size * (0.3 if parallelism.checkpointing else 1.0)
                option = Option(pool, size, parallelism, seconds, held, transient, weights)
                found.append(option)
                if rng.random() < 0.5:
                    passes = 2 if sketch.kind == "train" else 1
                    loading = passes * held / here.device.host_bandwidth
                    found.append(
                        dataclasses.replace(
                            option, seconds=seconds + loading, held=0.0, transient=transient + held, offload=True
                        )
                    )
    return found


def _parallelisms(rng: random.Random, size: int, kind: Kind) -> list[Parallelism]:
    """One to three ways to lay axes over ``size`` devices."""
    splits = [
        (size // (tensor * pipeline), tensor, pipeline)
        for tensor in range(1, size + 1)
        for pipeline in range(1, size + 1)
        if size % (tensor * pipeline) == 0
    ]
    chosen = rng.sample(splits, min(len(splits), rng.randint(1, 3)))
    stages = (0, 1, 3) if kind == "train" else (0, 3) if kind == "score" else (0,)
    return [
        Parallelism(d, t, p, rng.choice(stages) if d > 1 else 0, kind == "train" and rng.random() < 0.4)
        for d, t, p in chosen
    ]


def _thin(rng: random.Random, cluster: Cluster, ways: list[list[Option]], limit: int) -> None:
    """Drops ways until the assignments can all be tried; of each unit one that lies on most of a pool stays."""
    while num_assignments(cluster, ways) > limit:
        fullest = max((o for o in ways if len(o) > 1), key=lambda options: sum(_places(cluster, o) for o in options))
        stays = min(fullest, key=lambda option: _places(cluster, option))
        fullest.remove(rng.choice([option for option in fullest if option is not stays]))


def _pins(rng: random.Random, cluster: Cluster, ways: Sequence[Sequence[Option]]) -> tuple[tuple[int, Mesh], ...]:
    if rng.random() > 0.2:
        return ()
    unit = rng.randrange(len(ways))
    option = rng.choice(ways[unit])
    return ((unit, rng.choice(list(cluster.meshes(option.size, option.pool)))),)


def _memory(rng: random.Random, problem: Problem) -> int:
    """Bytes of a device: from too few for the neediest unit to enough for all at once."""
    least = max(min(o.held + o.transient for o in options) for options in problem.options)
    most = sum(max(o.held for o in options) for options in problem.options)
    most += max(o.transient for options in problem.options for o in options)
    share = rng.choice([-0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 1.0])
    return int(max(least / 2, least + share * (most - least)) / 0.9)


def _work(kind: Kind) -> Work:
    return Work(kind, sequences=64, prompt_tokens=128, response_tokens=128, max_response_tokens=256)
