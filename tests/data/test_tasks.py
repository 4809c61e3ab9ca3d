"""Tasks from reasoning_gym: every data set is served, scored as the library does, and made alike in every process."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.batches import Prompts
from flowrl.data import Task, decode_entry, reasoning_gym_task
from flowrl.data.entries import encode_entry
from flowrl.data.tasks import HASH_DEPENDENT
from flowrl.errors import DataError

#: Data sets that raise on some wrong answers instead of scoring them; docs/data.md lists them.
RAISE_ON_NONSENSE = {"boxnet", "game_of_life", "prime_factorization"}
#: Made in a process of their own, or slow in the library itself.
SLOW = HASH_DEPENDENT | {"arc_agi", "codeio", "figlet_font", "group_anagrams", "intermediate_integration"}


def all_names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def outcome(score: Any, *arguments: Any) -> Any:
    """What a call gives, an exception included."""
    try:
        return float(score(*arguments))
    except Exception as error:
        return type(error)


def check_served(name: str, **config: Any) -> None:
    from flowrl.data.reasoning_gym_verifier import _built, own_random_state

    task = reasoning_gym_task(name, size=2, seed=1, **config)
    batch = task.dataset.rows(0, 2, seed=0)
    arrived = Prompts.from_arrow(batch.to_arrow())
    assert arrived == batch, name
    library = _built(pickle.dumps((name, {**config, "size": 2, "seed": 1})))  # the one that the verifier uses
    for row in range(2):
        with own_random_state():
            entry = library[row]
        for answer in (entry["answer"], "x"):
            if answer is not None:
                travelled = json.loads(json.dumps(encode_entry(entry)))
                expected = outcome(library.score_answer, answer, entry)
                assert outcome(task.verifier, answer, travelled) == expected, (name, answer)
        if arrived.extras["answer"][row] is not None:
            answer, entry = arrived.extras["answer"][row], arrived.extras["entry"][row]
            assert task.verifier(answer, entry) == 1.0, name


def test_data_sets_are_served_and_scored_as_the_library_does() -> None:
    for name in all_names():
        if name not in SLOW:
            check_served(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW - {"composite"}))
def test_slow_data_sets_are_served_and_scored_as_the_library_does(name: str) -> None:
    check_served(name)


@pytest.mark.slow
def test_a_mixture_is_served() -> None:
    from reasoning_gym.composite import DatasetSpec

    check_served("composite", datasets=[DatasetSpec("chain_sum", 1.0, {}), DatasetSpec("word_ladder", 1.0, {})])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_questions_are_equal_in_every_process() -> None:
    """A resume compares fingerprints: a data set that differs between processes could never be resumed."""
    code = (
        "import json; from reasoning_gym.factory import DATASETS; from flowrl.data import reasoning_gym_task as t;"
        "print('\\n' + json.dumps({n: t(n, size=3, seed=7).dataset.fingerprint for n in DATASETS if n != 'composite'}))"
    )
    made = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        made.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert made[0] == made[1]


def chain_sum(**options: Any) -> Task:
    settings: dict[str, Any] = dict(size=6, seed=3, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    return reasoning_gym_task("chain_sum", **{**settings, **options})


def test_prompt_answer_and_entry() -> None:
    task = chain_sum(instruction="Reply with only the number.", system="Be brief.")
    batch = task.dataset.unshuffled(0, 1)
    system, user = batch.messages[0]
    assert system == {"role": "system", "content": "Be brief."}
    question, instruction = user["content"].split("\n")
    expression = question.split(":")[1].removesuffix("=")
    assert instruction == "Reply with only the number."
    assert batch.extras["answer"][0] == str(eval(expression))
    assert decode_entry(batch.extras["entry"][0])["metadata"]["difficulty"]["num_terms"] == (2, 2)
    assert task.dataset.columns == ("answer", "entry")


def test_a_prefix_of_a_larger_task_is_the_smaller_one() -> None:
    small, large = chain_sum(size=3), chain_sum(size=6)
    assert small.dataset.unshuffled(0, 3).messages == large.dataset.unshuffled(0, 3).messages


def test_global_generators_are_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    reasoning_gym_task("pool_matrix", size=2, seed=1)
    reasoning_gym_task("list_functions", size=2, seed=1)
    assert (random.random(), np.random.random()) == expected


def test_verifier_is_small_and_picklable() -> None:
    task = chain_sum()
    travelled = cloudpickle.dumps(task.verifier)
    assert len(travelled) < 500
    batch = task.dataset.unshuffled(0, 1)
    verifier = pickle.loads(travelled)
    assert verifier == task.verifier and hash(verifier) == hash(task.verifier)
    assert verifier(batch.extras["answer"][0], batch.extras["entry"][0]) == 1.0
    assert verifier("77777", batch.extras["entry"][0]) < 1.0
    assert verifier.__name__ == "chain_sum"


def test_verifier_in_a_reward_node() -> None:
    import torch

    from flowrl.nodes.reward import FunctionReward
    from tests.tiny import recorded_rollouts

    task = chain_sum()
    batch = task.dataset.unshuffled(0, 2)
    right, wrong = batch.extras["answer"][0], "77777"
    rollouts = replace(
        recorded_rollouts(num_prompts=2, group_size=1), response_text=(right, wrong), extras=batch.extras
    )
    rewards = FunctionReward(task.verifier, timeout=60.0)(rollouts)
    assert list(rewards.components) == ["chain_sum"]
    assert rewards.valid.tolist() == [1, 1]
    assert rewards.totals[0] == 1.0 and torch.lt(rewards.totals[1], 1.0)


def test_answer_tag_scores_what_stands_in_the_last_tag() -> None:
    task = chain_sum(answer_tag="answer")
    batch = task.dataset.unshuffled(0, 1)
    answer, entry = batch.extras["answer"][0], batch.extras["entry"][0]
    assert task.verifier(f"<answer>99</answer> no, <answer> {answer} </answer>.", entry) == 1.0
    assert task.verifier(answer, entry) == 0.0


@pytest.mark.parametrize("name", sorted(RAISE_ON_NONSENSE))
def test_error_score_is_what_the_library_gets_where_it_raises(name: str) -> None:
    nonsense = {"boxnet": "1", "game_of_life": "{}", "prime_factorization": "x"}[name]
    plain = reasoning_gym_task(name, size=1, seed=1)
    entry = plain.dataset.unshuffled(0, 1).extras["entry"][0]
    with pytest.raises((ValueError, TypeError, KeyError)):
        plain.verifier(nonsense, entry)
    lenient = reasoning_gym_task(name, size=1, seed=1, error_score=0.25)
    assert lenient.verifier(nonsense, entry) == 0.25


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: reasoning_gym_task("chainsum", size=1, seed=0), "no data set 'chainsum'.*'chain_sum'"),
        (lambda: chain_sum(max_term=2), "no setting 'max_term'.*did you mean 'max_terms'"),
        (lambda: chain_sum(min_terms=5), "refuses the settings of 'chain_sum'.*max_terms must be >= min_terms"),
        (lambda: chain_sum(min_terms="two"), "refuses the settings of 'chain_sum'.*min_terms='two'"),
        (lambda: chain_sum(size=0), "size is wrong.*Received the number 0"),
        (lambda: chain_sum(size=True), "size is wrong.*Received true"),
        (lambda: chain_sum(seed=None), "seed is wrong.*Received null"),
        (lambda: chain_sum(instruction=""), "'instruction' is empty"),
        (lambda: chain_sum(system="x", as_chat=False), "cannot have a system message"),
        (lambda: reasoning_gym_task("composite", size=1, seed=0), "Must specify at least one dataset"),
        (lambda: reasoning_gym_task(7, size=1, seed=0), "no data set 7"),  # type: ignore[arg-type]
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_importing_the_package_does_not_import_the_library() -> None:
    code = "import flowrl.data, sys; assert not {'torch', 'reasoning_gym', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.sets(st.integers())
    | st.frozensets(st.text()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["__tuple__", "__set__", "__x__"]), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(json_like)
def test_entries_survive_json(value: Any) -> None:
    back = decode_entry(json.loads(json.dumps(encode_entry(value))))
    assert back == value
    assert type(back) is type(value)


def test_entry_values() -> None:
    value = {"grid": ((1, 2), (3, 4)), 5: Fraction(1, 3), "d": Decimal("1.10"), "n": np.int64(4)}
    back = decode_entry(json.loads(json.dumps(encode_entry(value))))
    assert back == {"grid": ((1, 2), (3, 4)), 5: Fraction(1, 3), "d": Decimal("1.10"), "n": 4}
    array = decode_entry(json.loads(json.dumps(encode_entry(np.array([[1, 2]], dtype=np.int8)))))
    assert array.dtype == np.int8 and array.tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"cannot travel as JSON.*Received a object"):
        encode_entry({"x": object()}, "chain_sum")
