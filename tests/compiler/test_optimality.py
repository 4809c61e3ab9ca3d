"""Plans against the best of all assignments, on random problems small enough to try every one."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from flowrl.compiler.mesh import Mesh
from flowrl.compiler.placement import Placed, PlacementError, place
from flowrl.compiler.problem import Choice, Problem, evaluate
from tests.compiler.brute_force import assignments, optimum, rating
from tests.compiler.random_problems import num_assignments, one_node_more, random_problem, shuffled

ROOT = Path(__file__).parents[2]
#: Two sums of the same seconds in another order.
SAME = 1e-9
#: Seeds of the default tests, and of the slow ones.
FEW, MANY = range(60), range(60, 620)


@functools.cache
def best_of(seed: int) -> tuple[float, tuple[Choice, ...]] | None:
    """(period, choices) of the best assignment of a random problem; None where none fits."""
    return optimum(random_problem(seed))


def plan_or_none(problem: Problem) -> Placed | None:
    """The compiler's plan; None where it says that nothing fits."""
    try:
        return place(problem)
    except PlacementError:
        return None


def planned(problem: Problem) -> Placed | None:
    """The compiler's plan, checked against the problem; None where it says that nothing fits."""
    found = plan_or_none(problem)
    if found is None:
        return None
    cost = evaluate(problem, found.choices)
    assert cost.overfull == 0 and cost.period == pytest.approx(found.cost.period, rel=SAME)
    assert found.choices in set(assignments(problem)), (
        "a mesh or an option that the problem does not have, or a moved pin"
    )
    return found


def check_optimal(seed: int) -> None:
    """lower bound ≤ optimum = plan, or both find that nothing fits."""
    best, plan = best_of(seed), planned(random_problem(seed))
    assert (plan is None) == (best is None), f"seed {seed}: brute force {best}, plan {plan}"
    if best is None or plan is None:
        return
    period = best[0]
    assert plan.lower_bound <= period * (1 + SAME), (
        f"seed {seed}: a bound of {plan.lower_bound}, an optimum of {period}"
    )
    assert plan.cost.period == pytest.approx(period, rel=SAME), f"seed {seed}: {plan.cost}; optimum {period}: {best[1]}"
    assert plan.exact, f"seed {seed}: small enough to be solved exactly"


@pytest.mark.parametrize("first", range(FEW.start, FEW.stop, 10))
def test_plans_are_the_best_of_all_assignments(first: int) -> None:
    for seed in range(first, first + 10):
        check_optimal(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(MANY.start, MANY.stop, 40))
def test_many_plans_are_the_best_of_all_assignments(first: int) -> None:
    for seed in range(first, first + 40):
        check_optimal(seed)


def test_the_random_problems_are_what_they_should_be() -> None:
    """Of every kind that the tests are about there are some among those that run by default."""
    problems = [random_problem(seed) for seed in FEW]
    solved = [best_of(seed) for seed in FEW]
    best = [(p, s[1]) for p, s in zip(problems, solved, strict=True) if s]
    unlimited = [min(evaluate(p, a).period for a in assignments(p)) for p, _ in best[:20]]
    assert any(s is None for s in solved), "nothing fits"
    assert any(evaluate(p, c).period > u * (1 + SAME) for (p, c), u in zip(best, unlimited, strict=False)), (
        "memory binds"
    )
    assert any(c.option.offload for _, choices in best for c in choices), "offloading pays"
    assert any(len({c.mesh for c in choices}) > 1 for _, choices in best), "a split is best"
    assert any(len({c.mesh for c in choices}) == 1 for p, choices in best if p.cluster.num_devices > 1), (
        "colocated is best"
    )
    assert any(len({c.mesh.pool for c in choices}) > 1 for _, choices in best), "two pools are used"
    assert any(p.pinned for p in problems) and any(e.staleness for p in problems for e in p.weights)
    assert max(num_assignments(p.cluster, p.options) for p in problems) > 2000


@pytest.mark.parametrize("seed", FEW)
def test_the_cost_of_an_assignment_agrees_with_another_road(seed: int) -> None:
    """Simple cycles one by one and memory painted device by device give what :func:`evaluate` gives."""
    problem = random_problem(seed)
    every = list(assignments(problem))
    for choices in random.Random(seed).sample(every, min(len(every), 12)):
        cost, (period, overfull) = evaluate(problem, choices), rating(problem, choices)
        assert cost.period == pytest.approx(period, rel=SAME)
        assert cost.overfull == pytest.approx(max(0.0, overfull), rel=SAME, abs=1)
        ratio = sum(cost.seconds[u] for u in cost.critical) / cost.critical_span
        assert ratio == pytest.approx(period, rel=SAME), "the critical cycle is one that sets the period"


@pytest.mark.parametrize("seed", FEW)
def test_one_node_more_never_makes_the_optimum_worse(seed: int) -> None:
    problem = random_problem(seed)
    plan = planned(problem)
    for pool in range(len(problem.cluster.pools)):
        larger = plan_or_none(one_node_more(problem, pool))
        if plan is not None:
            assert larger is not None and larger.exact
            assert larger.cost.period <= plan.cost.period * (1 + SAME)


@pytest.mark.parametrize("seed", FEW)
def test_the_order_of_options_and_edges_changes_nothing(seed: int) -> None:
    problem = random_problem(seed)
    plan, other = plan_or_none(problem), plan_or_none(shuffled(problem, seed))
    assert (plan is None) == (other is None)
    if plan is not None and other is not None:
        assert other.cost.period == pytest.approx(plan.cost.period, rel=SAME)


def plan_as_json(choices: tuple[Choice, ...] | None) -> str:
    """Every choice, field by field."""
    return json.dumps(None if choices is None else [asdict(c) for c in choices])


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    seeds = list(FEW)[::6]
    code = f"""
from tests.compiler.random_problems import random_problem
from tests.compiler.test_optimality import plan_as_json, plan_or_none
for seed in {seeds}:
    plan = plan_or_none(random_problem(seed))
    print(plan_as_json(plan and plan.choices), plan and (plan.lower_bound, plan.evaluations))
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4021")
    ]
    assert len(outputs[0].splitlines()) == len(seeds)
    assert outputs[0] == outputs[1]


def test_a_pin_is_kept_and_never_makes_a_plan_better() -> None:
    """Pinned to any mesh that it could have, a unit lies there, and the period is that of the best such assignment."""
    usable = (s for s in FEW if not random_problem(s).pinned and random_problem(s).cluster.num_devices >= 4)
    seed = next(s for s in usable if best_of(s))
    problem, free = random_problem(seed), best_of(seed)
    assert free is not None
    meshes: set[Mesh] = {choices[0].mesh for choices in assignments(problem)}
    for mesh in sorted(meshes):
        pinned = Problem(**{**vars(problem), "pinned": ((0, mesh),)})
        best, plan = optimum(pinned), planned(pinned)
        assert (best is None) == (plan is None)
        if best is not None and plan is not None:
            assert plan.choices[0].mesh == mesh
            assert plan.cost.period == pytest.approx(best[0], rel=SAME)
            assert best[0] >= free[0] * (1 - SAME)
