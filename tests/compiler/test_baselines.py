"""The two baselines of the benchmarks do what their papers say, on problems small enough to know the answer."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.baselines.hybridflow import hybridflow, num_placements, set_partitions
from benchmarks.baselines.real_mcmc import real_mcmc
from flowrl.compiler.placement import PlacementError, place
from flowrl.compiler.problem import Problem, evaluate
from tests.compiler.brute_force import assignments, optimum
from tests.compiler.random_problems import random_problem

SAME = 1e-9
SEEDS = range(0, 25)


def hybridflow_space(problem: Problem) -> float | None:
    """The best assignment in which units of one Model share a mesh, and different meshes share no device; by brute force."""
    best = None
    for choices in assignments(problem):
        meshes = {u.weights: c.mesh for u, c in zip(problem.units, choices, strict=True)}
        if any(meshes[u.weights] != c.mesh for u, c in zip(problem.units, choices, strict=True)):
            continue
        distinct = sorted(set(meshes.values()))
        if any(a.overlaps(b) for a in distinct for b in distinct if a < b):
            continue
        cost = evaluate(problem, choices)
        if cost.overfull == 0 and (best is None or cost.period < best):
            best = cost.period
    return best


def unpinned(seed: int) -> Problem | None:
    """A random problem that HybridFlow can be asked: one pool, no pin."""
    problem = dataclasses.replace(random_problem(seed), pinned=())
    return problem if len(problem.cluster.pools) == 1 else None


@pytest.mark.parametrize("models", range(1, 7))
def test_every_partition_into_sets_once(models: int) -> None:
    """As many as the Bell number: 1, 2, 5, 15, 52, 203."""
    items = [f"m{i}" for i in range(models)]
    found = {frozenset(map(frozenset, partition)) for partition in set_partitions(items)}
    assert (
        len(found) == len(list(set_partitions(items))) == num_placements(models) == (1, 2, 5, 15, 52, 203)[models - 1]
    )
    assert all(sorted(m for group in p for m in group) == items for p in set_partitions(items))


def test_hybridflow_is_never_better_than_its_space_and_mostly_its_best() -> None:
    """It is a heuristic in two places (the fastest parallelism by itself, stages), so it is not always the best."""
    ratios = []
    for problem in filter(None, map(unpinned, SEEDS)):
        best, found = hybridflow_space(problem), hybridflow(problem)
        if found.choices is None:
            continue
        assert best is not None and found.period >= best * (1 - SAME)
        assert evaluate(problem, found.choices).period == pytest.approx(found.period, rel=SAME)
        ratios.append(found.period / best)
    assert len(ratios) > 10
    assert sorted(ratios)[len(ratios) // 2] < 1.001


def test_hybridflow_refuses_what_it_does_not_know() -> None:
    problem = next(p for p in map(random_problem, SEEDS) if p.pinned or len(p.cluster.pools) > 1)
    with pytest.raises(ValueError, match="one pool"):
        hybridflow(problem)


@pytest.mark.parametrize("seed", range(0, 10))
def test_the_chain_comes_near_the_optimum_and_is_never_better(seed: int) -> None:
    problem = random_problem(seed)
    best, found = optimum(problem), real_mcmc(problem, seconds=60, steps=3000)
    assert found.evaluations == 3001
    if found.choices is not None:
        assert best is not None and found.period >= best[0] * (1 - SAME)
        assert found.period <= best[0] * 1.25
        assert found.choices in set(assignments(problem)), "pins are kept"


def test_the_same_seed_draws_the_same_chain() -> None:
    differ = []
    for problem in map(random_problem, range(10)):
        one, again, other = (real_mcmc(problem, seconds=60, steps=50, seed=seed).choices for seed in (5, 5, 6))
        assert one == again
        differ.append(one != other)
    assert any(differ)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_never_worse_than_either(seed: int) -> None:
    problem = unpinned(seed)
    if problem is None:
        return
    try:
        plan = place(problem).cost.period
    except PlacementError:
        plan = float("inf")
    assert plan <= hybridflow(problem).period * (1 + SAME)
    assert plan <= real_mcmc(problem, seconds=60, steps=300).period * (1 + SAME)
