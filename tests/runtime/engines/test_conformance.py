"""The transformers engine keeps every promise of the engine protocol: on one rank, and on two in each layout."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings
from flowrl.models import Model
from flowrl.runtime.ranks import Ranks
from flowrl.runtime.worker import open_engine
from flowrl.testing.engines import Bench, EngineCheck, EngineError, bench, check_engine, engine_checks, run_checks
from tests.ranks import launch

#: By name the strategy, and whether the head is the embedding.
LAYOUTS = {
    "full": (Strategy(), False),
    "none": (Strategy(sharding="none"), True),
    "tp2": (Strategy(tensor_parallel=2), True),
}
#: Of a model whose head is not its embedding, the checks that could tell.
UNTIED = ["weights: ", "export: ", "save: ", "logprobs: those", "train: two steps of a policy"]


class Opens:
    """Opens the transformers engine."""

    def __init__(self, strategy: Strategy | None = None, ranks: Ranks | None = None) -> None:
        self.strategy, self.ranks = strategy, ranks

    def __call__(self, model: Model, *, micro_batch_tokens: int) -> Any:
        strategies = {} if self.strategy is None else {model.name: self.strategy}
        bindings = Bindings(open_engine, micro_batch_tokens=micro_batch_tokens, strategies=strategies, ranks=self.ranks)
        return open_engine(model, bindings)


def kept(place: Bench, check: EngineCheck) -> None:
    error = place.run(check.work)
    if error is not None:
        raise error


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(Opens(), tmp_path_factory.mktemp("bench")) as place:
        yield place


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(Opens(), tmp_path_factory.mktemp("bench"), tiny={"tied": False}) as place:
        yield place


@pytest.mark.parametrize("check", engine_checks(), ids=lambda check: check.name)
def test_on_one_rank(check: EngineCheck, one_rank: Bench) -> None:
    kept(one_rank, check)


@pytest.mark.parametrize(
    "check", [c for c in engine_checks() if c.name.startswith(tuple(UNTIED))], ids=lambda check: check.name
)
def test_with_a_head_of_its_own(check: EngineCheck, untied: Bench) -> None:
    kept(untied, check)


# -- two ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """By layout and check, the error, or None."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(main, str(folder), num_ranks=2, timeout=900).succeeded()
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_two_ranks(layout: str, two_ranks: dict[str, dict[str, str | None]]) -> None:
    found = two_ranks[layout]
    assert list(found) == [check.name for check in engine_checks()]
    broken = [f"- {name}: {error}" for name, error in found.items() if error is not None]
    assert not broken, "\n".join(broken)


def main(scratch: str) -> None:
    """On one rank: all checks in all layouts."""
    folder = Path(scratch)
    ranks = Ranks.join(deadline=300)
    found: dict[str, dict[str, str | None]] = {}
    for layout, (strategy, tied) in LAYOUTS.items():
        place = folder / layout
        ranks.once(place.mkdir)
        with bench(Opens(strategy, ranks), place, ranks=ranks, tiny={"tied": tied}) as workbench:
            for check in engine_checks():
                print(ranks.rank, layout, check.name, flush=True)  # of a launch that hangs, the last line says where
                error = workbench.run(check.work)
                if error is not None:
                    traceback.print_exception(error)
                found.setdefault(layout, {})[check.name] = None if error is None else f"{type(error).__name__}: {error}"
    if ranks.is_first:
        (folder / "outcomes.json").write_text(json.dumps(found))


# -- the suite itself ---------------------------------------------------------------------------------------------------


class Off:
    """An engine that is wrong in one way: everything else is the engine's."""

    def __init__(self, engine: Any, **wrong: Any) -> None:
        self.engine, self.wrong = engine, wrong

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.engine, name)
        return (lambda *a, **k: self.wrong[name](found, *a, **k)) if name in self.wrong else found


def test_a_broken_engine_is_noticed(tmp_path: Path) -> None:
    """What is broken is named, and all of it."""
    from dataclasses import replace

    def shifted(logprobs: Any, *args: Any, **options: Any) -> Any:
        scores = logprobs(*args, **options)
        return replace(scores, logprobs=scores.logprobs.with_values(scores.logprobs.values + 1e-3))

    def keyless(generate: Any, prompts: Any, keys: Any, sampling: Any) -> Any:
        return generate(prompts, list(range(len(keys))), sampling)

    def lenient(load_weights: Any, weights: Any, *, policy_version: int) -> None:
        """Takes what fits, and says nothing of the rest."""
        own = dict(load_weights.__self__.weights())
        fits = {n: t for n, t in weights.items() if n in own and t.shape == own[n].shape}
        load_weights(own | fits, policy_version=policy_version)

    def make(model: Model, *, micro_batch_tokens: int) -> Any:
        engine = Opens()(model, micro_batch_tokens=micro_batch_tokens)
        return Off(engine, logprobs=shifted, generate=keyless, load_weights=lenient)

    tried = [
        "generate: the same keys give the same samples, others give others",
        "generate: log-probs are those that scoring gives",
        "logprobs: those of the plain model, at any temperature",
        "logprobs: the most likely tokens",
        "weights: what does not fit is refused, all of it at once, and changes nothing",
    ]
    broken = {o.name for o in run_checks(make, tmp_path, only=tried) if o.error is not None}
    assert broken == set(tried) - {"logprobs: the most likely tokens"}
    with pytest.raises(EngineError) as caught:
        check_engine(make, tmp_path, only=tried)
    assert "4 of 5 promises" in str(caught.value) and all(name in str(caught.value) for name in broken)


def test_an_engine_is_asked_for_no_more_than_it_can() -> None:
    sampler = engine_checks(["text", "generate", "weights"])
    assert {c.name.split(":")[0] for c in sampler} == {"text", "generate", "weights"}
    assert all("train" not in c.needs for c in sampler)
    assert len(sampler) < len(engine_checks()) == len({c.name for c in engine_checks()})
    with pytest.raises(ValueError, match="fly"):
        engine_checks(["fly"])
