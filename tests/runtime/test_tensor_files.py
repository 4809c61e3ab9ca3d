"""Tensors as files: what one number of ranks and one sharding has written, any other reads, bit for bit.

Sizes of the tiny model are such that dimensions are not divisible by ranks, also within the halves of tensor parallelism.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings
from flowrl.errors import CheckpointError
from flowrl.models import Model
from flowrl.nodes.updater import AdamW
from flowrl.runtime import tensor_files
from flowrl.runtime.ranks import ONE_RANK, Ranks
from flowrl.runtime.worker import open_engine
from tests.ranks import launch, shared
from tests.runtime.engines.engines import Reinforce, term_rows
from tests.tiny import recorded_rollouts, tiny_folder

UNEVEN: dict[str, Any] = dict(vocab=267, hidden=40, intermediate_size=82)
ROLLOUTS = recorded_rollouts(num_prompts=5, group_size=3)
STEP = AdamW(learning_rate=1e-2)
#: By number of ranks, the layouts that write and read each other's checkpoints, and that of one rank.
LAYOUTS: dict[int, dict[str, Strategy]] = {
    1: {"one": Strategy()},
    2: {"dp2": Strategy(), "copies": Strategy(sharding="none"), "tp2": Strategy(tensor_parallel=2)},
    4: {
        "dp4": Strategy(),
        "dp2 x tp2": Strategy(tensor_parallel=2),
        "hybrid": Strategy(sharding="hybrid", shard_size=2),
    },
}


def opened(folder: Path, strategy: Strategy, ranks: Ranks, *, lived: bool = False) -> Any:
    """An engine with a value head; one that has ``lived`` has trained already, on other rows."""
    bindings = Bindings(open_engine, micro_batch_tokens=60, strategies={"tiny": strategy}, ranks=ranks)
    engine: Any = open_engine(Model(folder / "model", name="tiny", device="cpu"), bindings)
    if lived:
        engine.train_step([term_rows(Reinforce()(ROLLOUTS.select(torch.arange(4))))], STEP, max_grad_norm=1.0)
    else:
        engine.add_value_head("extra")
    return engine


def whole(engine: Any) -> dict[str, Tensor]:
    """Weights, heads and optimiser in whole tensors."""
    from flowrl.runtime.engines.transformers_checkpoint import optimizer_state

    moments = {
        f"{key} of {name}": engine.shards.whole(tensor).cpu().clone()
        for name, tensors in optimizer_state(engine).items()
        for key, tensor in tensors.items()
    }
    return {**dict(engine.weights()), **moments}


def train(engine: Any, steps: int = 2) -> float:
    results = [engine.train_step([term_rows(Reinforce()(ROLLOUTS))], STEP, max_grad_norm=1.0) for _ in range(steps)]
    engine.complete_version()
    return results[-1].grad_norm


def write_all(folder: Path, ranks: Ranks) -> None:
    """Under each layout of so many ranks: train, save, and say what was saved and how training goes on."""
    for layout, strategy in LAYOUTS[ranks.size].items():
        target = folder / layout
        ranks.once(target.mkdir)
        engine = opened(folder, strategy, ranks)
        train(engine)
        saving = engine.saving(copy=True)  # what is written is that moment's, whatever comes before the writing
        found = {"tensors": whole(engine), "grad_norm": train(engine, 1)}
        saving(target, ranks)
        if ranks.is_first:
            torch.save(found, folder / f"{layout}.pt")
        engine.close()
    ranks.everyone(None)


def read_all(folder: Path, ranks: Ranks) -> list[str]:
    """Under each layout of so many ranks: load every checkpoint that there is; what is not as it was."""
    wrong: list[str] = []
    for layout, strategy in LAYOUTS[ranks.size].items():
        for file in sorted(folder.glob("*.pt")):
            written = torch.load(file)
            engine = opened(folder, strategy, ranks, lived=True)
            engine.load(folder / file.stem)
            now, then = whole(engine), written["tensors"]
            if now.keys() != then.keys():
                wrong.append(f"{file.stem} in {layout}: other names")
            wrong += [
                f"{file.stem} in {layout}: {n}" for n in now.keys() & then.keys() if not torch.equal(then[n], now[n])
            ]
            if (engine.policy_version, engine.optimizer_steps) != (1, 2):
                wrong.append(f"{file.stem} in {layout}: counters")
            if abs(train(engine, 1) - written["grad_norm"]) > 1e-3 * written["grad_norm"]:
                wrong.append(f"{file.stem} in {layout}: it goes on otherwise")
            engine.close()
    return wrong


def start(folder: Path) -> None:
    """The model, and what one rank has written."""
    tiny_folder(folder / "model", **UNEVEN)
    write_all(folder, ONE_RANK)


def on_ranks(place: str) -> None:
    """On one rank of several."""
    folder = Path(place)
    ranks = Ranks.join(deadline=300)
    ranks.once(lambda: None if (folder / "model").exists() else start(folder))
    write_all(folder, ranks)
    wrong = ranks.everyone(read_all(folder, ranks))
    if ranks.is_first:
        (folder / f"wrong.{ranks.size}.json").write_text(json.dumps(wrong))


def look_at(folder: Path, num_ranks: int) -> None:
    """Nothing was wrong on so many ranks, and one rank reads all that was written."""
    written = {p.stem for p in folder.glob("*.pt")}
    assert written >= {*LAYOUTS[1], *LAYOUTS[num_ranks]}
    assert json.loads((folder / f"wrong.{num_ranks}.json").read_text()) == [[]] * num_ranks
    assert read_all(folder, ONE_RANK) == []
    for layout in LAYOUTS[num_ranks]:  # each rank has written its part, once
        files = sorted((folder / layout).glob("*.distcp"))
        assert [f.name for f in files] == [f"__{rank}_0.distcp" for rank in range(num_ranks)]
        bytes_of_tensors = sum(t.numel() * t.element_size() for t in tensor_files.contents(folder / layout).values())
        assert bytes_of_tensors < sum(f.stat().st_size for f in files) < 2 * bytes_of_tensors + 200_000


@pytest.mark.timeout(900)
def test_two_ranks_write_and_others_read(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    look_at(shared("checkpoints", request, tmp_path_factory), 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dp4_dp2_x_tp2_and_one_rank_read_each_other_s(tmp_path: Path) -> None:
    launch(on_ranks, str(tmp_path), num_ranks=2, timeout=800).succeeded()
    launch(on_ranks, str(tmp_path), num_ranks=4, timeout=1700).succeeded()
    look_at(tmp_path, 4)


# -- one rank ------------------------------------------------------------------------------------------------------------


def test_contents_are_what_was_written(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "empty": torch.zeros(0, 4),
        "number": torch.tensor(7),
        "half": torch.randn(4).to(torch.bfloat16),
    }
    tensor_files.write(tensors, tmp_path, ONE_RANK)
    assert tensor_files.described(tmp_path)["half"] == (torch.Size([4]), torch.bfloat16)
    found = tensor_files.contents(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())


def test_equal_tensors_give_equal_files(tmp_path: Path) -> None:
    """Else checkpoints could not be compared."""
    for name in ("a", "b"):
        tensor_files.write({"x": torch.arange(5.0), "y": torch.ones(2, 2)}, tmp_path / name, ONE_RANK)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1] and len(files[0]) == 2


def test_nothing_can_be_written_and_read(tmp_path: Path) -> None:
    """A quantised Model that is not trained has nothing of its own."""
    tensor_files.write({}, tmp_path, ONE_RANK)
    assert tensor_files.contents(tmp_path) == {}


def test_a_copy_is_not_what_it_was_copied_from() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    copied = tensor_files.copied({"weight": weight, "part": weight[:2]})
    with torch.no_grad():
        weight.zero_()
    assert copied["weight"].tolist() == [1, 1, 1] and copied["part"].tolist() == [1, 1]


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        tensor_files.described(tmp_path)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """All of it is named at once: names, shapes, and an optimiser of what is not trained here."""
    tiny_folder(tmp_path / "model", **UNEVEN)
    engine = opened(tmp_path, Strategy(), ONE_RANK)
    train(engine)
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    tiny_folder(tmp_path / "other" / "model", **{**UNEVEN, "hidden": 48, "layers": 1})
    other = opened(tmp_path / "other", Strategy(), ONE_RANK, lived=True)
    before = whole(other)
    with pytest.raises(CheckpointError, match=r"of another model") as error:
        other.load(tmp_path / "saved")
    text = str(error.value)
    assert "model.embed_tokens.weight has shape [267, 40], not [267, 48]" in text
    assert "model.layers.1.mlp.up_proj.weight is unknown" in text
    now = whole(other)
    assert now.keys() == before.keys() and all(torch.equal(t, now[n]) for n, t in before.items())
    assert other.heads == {}
