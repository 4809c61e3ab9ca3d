"""How a network lies over ranks: each slice where it belongs, as much memory as the formula says, the same gradients.

All layouts are tried on four ranks in one launch (:func:`main`), a few on two in the one that the default tests share. Sizes
of the tiny model are such that dimensions are not divisible by ranks, also within the halves that tensor parallelism makes.

Bytes of a rank, with P those of all parameters (float32), n data-parallel ranks, s ranks of a shard group, t of tensor
parallelism, P_t the bytes of what tensor parallelism splits:

=========== ==================== ==================== ==================== ===================================
sharding    parameters at rest   gradients            optimiser            whole between forward and backward
=========== ==================== ==================== ==================== ===================================
full        P / n                P / n                2 P / n              embedding, final norm, head
optimizer   P / n                P / n                2 P / n              P
none        P                    P                    2 P                  P
hybrid      P / s                P / s                2 P / s              embedding, final norm, head
with tp     P becomes P_t / t + (P − P_t) in all of these
=========== ==================== ==================== ==================== ===================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.compiler.strategy import Strategy
from flowrl.context import Bindings
from flowrl.models import Model
from flowrl.nodes.loss import Current
from flowrl.nodes.rollout import Sampling
from flowrl.nodes.updater import AdamW
from flowrl.ragged import Ragged
from flowrl.runtime.ranks import Ranks
from flowrl.runtime.worker import open_engine
from tests.ranks import launch, shared
from tests.runtime.engines.engines import Reinforce, relative_distance, term_rows
from tests.tiny import recorded_rollouts, tiny_folder

#: What is tried on two ranks, as well.
FEW_LAYOUTS = ("full", "tp2")
LAYOUTS = {
    "full": Strategy(),
    "optimizer": Strategy(sharding="optimizer"),
    "none": Strategy(sharding="none"),
    "hybrid": Strategy(sharding="hybrid", shard_size=2),
    "tp2": Strategy(tensor_parallel=2),
    "tp2 none": Strategy(tensor_parallel=2, sharding="none"),
    "named layers": Strategy(shard_layers=("LlamaMLP", "LlamaAttention")),
    "tp2 named layers": Strategy(tensor_parallel=2, shard_layers=("LlamaMLP", "LlamaAttention")),
    "checkpointing": Strategy(activation_checkpointing="layers"),
    "activation offload": Strategy(activation_checkpointing="offload"),
    "cpu offload": Strategy(cpu_offload=True),
}
#: Ranks and layout of each test.
PLACES = [(2, name) for name in FEW_LAYOUTS]
PLACES += [pytest.param(4, name, marks=pytest.mark.slow) for name in LAYOUTS]  # type: ignore[misc]
MEASURED = ("full", "optimizer", "none", "hybrid", "tp2", "tp2 none", "tp2 named layers")
UNEVEN: dict[str, Any] = dict(vocab=267, hidden=40, intermediate_size=82)
EVEN: dict[str, Any] = dict(vocab=512, hidden=64, layers=4, tied=False)
ROLLOUTS = recorded_rollouts(num_prompts=5, group_size=3, observations=True)
STEP = AdamW(learning_rate=1e-2, eps=1e-4)
NO_CHANGE = AdamW(learning_rate=0.0, weight_decay=0.0)
FEW = (0, 1, 3)


def opened(folder: Path, strategy: Strategy | None = None, ranks: Ranks | None = None, budget: int = 60) -> Any:
    strategies = {} if strategy is None else {"tiny": strategy}
    bindings = Bindings(open_engine, micro_batch_tokens=budget, strategies=strategies, ranks=ranks)
    return open_engine(Model(folder, name="tiny", device="cpu"), bindings)


def whole_gradients(engine: Any, rows: Any = ROLLOUTS) -> dict[str, Tensor]:
    """By name the gradients of one step, put together from all ranks, read before the optimiser uses them."""
    found: dict[str, Tensor] = {}
    optimizer = engine.torch_optimizer(NO_CHANGE)

    def read(*_: Any) -> None:
        for name, parameter in engine.trained_parameters():
            found[name] = engine.shards.whole(parameter.grad).clone()

    hook = optimizer.register_step_pre_hook(read)
    result = engine.train_step([term_rows(Reinforce(entropy_coef=0.1)(rows))], NO_CHANGE, max_grad_norm=None)
    hook.remove()
    total = torch.stack([g.double().norm() for g in found.values()]).norm()
    assert math.isclose(float(total), result.grad_norm, rel_tol=1e-5)
    return found


def few_rows(engine: Any) -> list[tuple[Any, ...]]:
    """What fewer rows than ranks give: log-probs, samples, the norm and loss of a step."""
    found = []
    for count in FEW:
        rows = ROLLOUTS.select(torch.arange(count))
        samples = engine.generate(
            Ragged.from_rows([[1, 2, i] for i in range(count)], torch.int64), list(range(count)), Sampling(4)
        )
        result = engine.train_step([term_rows(Reinforce()(rows))], NO_CHANGE, max_grad_norm=None)
        total, norms = result.sums.get("loss", (0.0, 0.0)), result.grad_norm
        found.append((engine.logprobs(rows).logprobs.values, samples.tokens.to_lists(), total, norms))
    return found


def nonfinite(engine: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The rows to blame for a loss, and for a gradient, that is not finite."""
    found = []
    for value, places in ((math.nan, (4, 8, 13)), (3e38, (7,))):
        values = ROLLOUTS.rollout_logprobs.values.clone()
        for row in places:
            values[int(ROLLOUTS.rollout_logprobs.offsets[row])] = value
        bad = replace(ROLLOUTS, rollout_logprobs=ROLLOUTS.rollout_logprobs.with_values(values))
        result = engine.train_step([term_rows(Reinforce()(bad))], STEP, max_grad_norm=1.0)
        assert result.skipped
        found.append(tuple(sorted(result.nonfinite_rows)))
    return tuple(found)


# -- memory -------------------------------------------------------------------------------------------------------------


def local_bytes(tensors: Any) -> int:
    """Bytes of the memory behind the local parts of tensors, each counted once."""
    from torch.distributed.tensor import DTensor

    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


class Watching(Reinforce):
    """Looks at the parameters between forward and backward."""

    seen: Any = None

    def token_losses(self, current: Current, **inputs: Any) -> Any:
        self.seen()
        return super().token_losses(current, **inputs)


def measured(engine: Any) -> dict[str, int]:
    """Bytes of this rank, in a second step and after it."""
    from torch.distributed.tensor import DTensor

    found: dict[str, int] = {}

    def whole(parameter: Tensor) -> bool:
        """Whether nothing of it is elsewhere, but for what tensor parallelism splits."""
        return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == ("tensor",)

    def between() -> None:
        found["whole"] = local_bytes(p for p in engine.network.module.parameters() if whole(p))

    terms = [term_rows(Watching(seen=between)(ROLLOUTS))]
    engine.train_step(terms, STEP, max_grad_norm=None)
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: found.update(gradients=local_bytes(p.grad for _, p in engine.trained_parameters()))
    )
    engine.train_step(terms, STEP, max_grad_norm=None)
    hook.remove()
    found["parameters"] = local_bytes(p for _, p in engine.trained_parameters())
    moments = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    found["optimizer"] = local_bytes(moments)
    return found


def formula(layout: str, module: Any, num_ranks: int) -> dict[str, float]:
    """What the table above says."""
    strategy = LAYOUTS[layout]
    sizes = {name: 4 * p.numel() for name, p in module.named_parameters()}
    split = sum(size for name, size in sizes.items() if "_proj" in name)
    tp = strategy.tensor_parallel
    total = split / tp + (sum(sizes.values()) - split)
    outside = sum(size for name, size in sizes.items() if ".layers." not in name)
    shards = {"none": 1, "hybrid": strategy.shard_size}.get(strategy.sharding, num_ranks // tp)
    assert shards is not None
    part = total / shards
    return {
        "parameters": part,
        "gradients": part,
        "optimizer": 2 * part,
        "whole": total if strategy.sharding in ("optimizer", "none") else outside,
    }


# -- where slices belong ------------------------------------------------------------------------------------------------


def slices_by_hand() -> list[str]:
    """On four ranks: where slices of DTensors of all kinds are not what cutting by hand gives: nowhere, it is hoped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from flowrl.runtime.engines.transformers_shards import ParallelShards, local_part

    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def cut(whole: Tensor, *cuts: tuple[int, int, int]) -> Tensor:
        """Cut along ``dim`` into so many parts and take one; as often as there are cuts."""
        for dim, parts, mine in cuts:
            size = math.ceil(whole.shape[dim] / parts)
            whole = whole.narrow(
                dim, min(mine * size, whole.shape[dim]), max(0, min(size, whole.shape[dim] - mine * size))
            )
        return whole

    r, d, t = line.get_local_rank(), square.get_local_rank("data"), square.get_local_rank("tensor")
    wrong = []
    for shape in ((8, 6), (7, 5), (3, 4), (1, 9), (82, 3), (5,), (4, 3, 7)):
        whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        last = len(shape) - 1
        kinds: list[tuple[str, Any, list[Any], Tensor]] = [
            ("a line", line, [Shard(0)], cut(whole, (0, 4, r))),
            ("a line, last dim", line, [Shard(last)], cut(whole, (last, 4, r))),
            ("copies", line, [Replicate()], whole),
            ("copies of shards", square, [Replicate(), Shard(0)], cut(whole, (0, 2, t))),
            ("shards of copies", square, [Shard(0), Replicate()], cut(whole, (0, 2, d))),
            ("one in the other", square, [Shard(0), Shard(0)], cut(whole, (0, 2, d), (0, 2, t))),
            ("strided", square, [_StridedShard(0, split_factor=2), Shard(0)], cut(whole, (0, 2, t), (0, 2, d))),
        ]
        if last:
            kinds.append(("crossed", square, [Shard(0), Shard(1)], cut(whole, (0, 2, d), (1, 2, t))))
            kinds.append(("crossed, turned", square, [Shard(1), Shard(0)], cut(whole, (1, 2, d), (0, 2, t))))
        for name, mesh, placements, expected in kinds:
            made = DTensor.from_local(
                torch.full_like(expected, -1.0),
                mesh,
                placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            if not torch.equal(local_part(made, whole), expected):
                wrong.append(f"{name} {shape}: {local_part(made, whole).flatten().tolist()[:9]}")
            with torch.no_grad():
                ParallelShards.place(Any, made, whole)  # type: ignore[arg-type]
            if not torch.equal(made.to_local(), expected):
                wrong.append(f"{name} {shape}, placed: {made.to_local().flatten().tolist()[:9]}")
            if name != "strided" and not torch.equal(made.full_tensor(), whole):  # torch agrees
                wrong.append(f"{name} {shape}, put together: {made.full_tensor().flatten().tolist()[:9]}")
    return wrong


# -- one launch for all of it -------------------------------------------------------------------------------------------


def on_two_ranks(place: str) -> None:
    """On one rank of the launch that the default tests share."""
    main(place, list(FEW_LAYOUTS))


def main(place: str, layouts: list[str]) -> None:
    """On one rank: write what it has under each layout."""
    folder = Path(place)
    ranks = Ranks.join(deadline=300)
    ranks.once(lambda: (tiny_folder(folder / "uneven", **UNEVEN), tiny_folder(folder / "even", **EVEN)))
    if ranks.size == 4:
        torch.save(slices_by_hand(), folder / f"slices.{ranks.rank}.pt")
    for layout in layouts:
        strategy = LAYOUTS[layout]
        print(ranks.rank, layout, flush=True)
        found: dict[str, Any] = {}
        engine = opened(folder / "uneven", strategy, ranks)
        found["weights"] = dict(engine.weights())
        found["gradients"] = whole_gradients(engine)
        found["few"] = few_rows(engine)
        found["nonfinite"] = nonfinite(engine)
        new = {
            n: torch.randn(t.shape, generator=torch.Generator().manual_seed(i))
            for i, (n, t) in enumerate(engine.weights())
        }
        engine.load_weights(new, policy_version=1)
        found["loaded"] = dict(engine.weights())
        target = folder / f"export {layout}"
        ranks.once(target.mkdir)
        engine.export(target)
        engine.close()
        if layout in MEASURED:
            engine = opened(folder / "even", strategy, ranks, budget=30)  # every rank has rows
            found["bytes"] = measured(engine)
            engine.close()
        torch.save(found, folder / f"{layout}.{ranks.rank}.pt")


Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """By number of ranks, what they wrote."""

    @functools.cache
    def of(num_ranks: int) -> Path:
        if num_ranks == 2:
            return shared("shards", request, tmp_path_factory)
        folder = tmp_path_factory.mktemp("shards")
        launch(main, str(folder), list(LAYOUTS), num_ranks=num_ranks, timeout=560).succeeded()
        return folder

    return of


def found(folder: Path, layout: str) -> list[dict[str, Any]]:
    """What each rank has."""
    places = sorted(folder.glob(f"{layout}.*.pt"))
    assert len(places) in (2, 4)
    return [torch.load(place, weights_only=False) for place in places]


@pytest.fixture(scope="module")
def expected(plain_folder: Path) -> dict[str, Any]:
    """What one rank has."""
    engine = opened(plain_folder)
    return {
        "weights": dict(engine.weights()),
        "gradients": whole_gradients(engine),
        "few": few_rows(engine),
        "nonfinite": nonfinite(engine),
    }


pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_slices_lie_where_they_belong(folders: Callable[[int], Path]) -> None:
    for rank in range(4):
        assert torch.load(folders(4) / f"slices.{rank}.pt") == [], f"rank {rank}"


@pytest.mark.parametrize(("ranks", "layout"), PLACES)
def test_there_and_back_is_the_identity(
    ranks: int, layout: str, folders: Callable[[int], Path], expected: dict[str, Any]
) -> None:
    """HuggingFace → ranks → HuggingFace, bit for bit: by weights(), by load_weights(), and by an export."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = folders(ranks)
    exported = load_file(folder / f"export {layout}" / "model.safetensors")
    module = AutoModelForCausalLM.from_pretrained(folder / f"export {layout}")
    plain = AutoModelForCausalLM.from_pretrained(folder / "uneven").state_dict()
    for rank, has in enumerate(found(folder, layout)):
        assert has["weights"].keys() == expected["weights"].keys() == exported.keys() == has["loaded"].keys()
        for i, (name, tensor) in enumerate(has["weights"].items()):
            assert torch.equal(tensor, plain[name]), f"rank {rank}: {name}"
            new = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i))
            assert torch.equal(has["loaded"][name], new), f"rank {rank}: {name} after load_weights"
            assert torch.equal(exported[name], new) and torch.equal(module.state_dict()[name], new), name
    assert torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)


@pytest.mark.parametrize(("ranks", "layout"), PLACES)
def test_gradients_are_those_of_one_rank(
    ranks: int, layout: str, folders: Callable[[int], Path], expected: dict[str, Any]
) -> None:
    for has in found(folders(ranks), layout):
        assert has["gradients"].keys() == expected["gradients"].keys()
        flat = [torch.cat([g[n].flatten() for n in sorted(g)]) for g in (has["gradients"], expected["gradients"])]
        assert relative_distance(*flat) <= 1e-5


@pytest.mark.parametrize(("ranks", "layout"), PLACES)
def test_fewer_rows_than_ranks(
    ranks: int, layout: str, folders: Callable[[int], Path], expected: dict[str, Any]
) -> None:
    for has in found(folders(ranks), layout):
        for count, mine, other in zip(FEW, has["few"], expected["few"], strict=True):
            assert len(mine[1]) == count and mine[1] == other[1]
            torch.testing.assert_close(mine[0], other[0], rtol=1e-5, atol=1e-5)
            assert mine[2] == pytest.approx(other[2], rel=1e-4, abs=1e-6)
            assert mine[3] == pytest.approx(other[3], rel=1e-4)


@pytest.mark.parametrize(("ranks", "layout"), PLACES)
def test_the_same_rows_are_to_blame(
    ranks: int, layout: str, folders: Callable[[int], Path], expected: dict[str, Any]
) -> None:
    """Row 4 is (1, 1), row 8 is (2, 2), and so on; row 7 has the gradient that is too large."""
    assert expected["nonfinite"] == (((1, 1), (2, 2), (4, 1)), ((2, 1),))
    for has in found(folders(ranks), layout):
        assert has["nonfinite"] == expected["nonfinite"]


@pytest.mark.parametrize(("ranks", "layout"), [p for p in PLACES if getattr(p, "values", p)[1] in MEASURED])
def test_memory_is_what_the_formula_says(ranks: int, layout: str, folders: Callable[[int], Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders(ranks)
    module = AutoModelForCausalLM.from_pretrained(folder / "even")
    said = formula(layout, module, ranks)
    for rank, has in enumerate(found(folder, layout)):
        for what, size in said.items():
            assert has["bytes"][what] == pytest.approx(size, rel=0.05), f"rank {rank}: {what}"


@pytest.mark.slow
def test_sharding_saves_memory(folders: Callable[[int], Path]) -> None:
    """The other way round: not everything is as large as everything."""
    sizes = {layout: found(folders(4), layout)[0]["bytes"] for layout in MEASURED}
    for what in ("parameters", "gradients", "optimizer"):
        assert 3.8 * sizes["full"][what] < sizes["none"][what] < 4.2 * sizes["full"][what]
        assert 1.9 * sizes["hybrid"][what] < sizes["none"][what] < 2.1 * sizes["hybrid"][what]
    assert sizes["full"]["whole"] < sizes["optimizer"]["whole"] == sizes["none"]["whole"]


# -- one rank -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("plain"), **UNEVEN)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(activation_checkpointing="layers"),
        Strategy(activation_checkpointing="offload"),
        Strategy(activation_checkpointing="layers", shard_layers=("LlamaMLP", "LlamaAttention")),
        pytest.param(Strategy(compile_layers=True), marks=pytest.mark.slow),
        pytest.param(Strategy(compile_layers=True, activation_checkpointing="layers"), marks=pytest.mark.slow),
    ],
    ids=["checkpointing", "activation offload", "checkpointing of named", "compiled", "compiled checkpointing"],
)
def test_one_rank_with(strategy: Strategy, plain_folder: Path) -> None:
    expected, engine = whole_gradients(opened(plain_folder)), opened(plain_folder, strategy)
    gradients = whole_gradients(engine)
    flat = [torch.cat([g[n].flatten() for n in sorted(g)]) for g in (gradients, expected)]
    assert relative_distance(*flat) <= 1e-5
    before, after = opened(plain_folder).logprobs(ROLLOUTS), engine.logprobs(ROLLOUTS)
    torch.testing.assert_close(after.logprobs.values, before.logprobs.values, rtol=1e-5, atol=1e-5)


def test_checkpointing_keeps_less(plain_folder: Path) -> None:
    """Bytes that autograd keeps for the backward pass, which is what it is for."""
    kept = {}
    for name in ("none", "layers"):
        engine = opened(plain_folder, Strategy(activation_checkpointing=name), budget=10_000)
        storages: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in engine.network.module.parameters()}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        from flowrl.runtime.engines.transformers_forward import Wanted, forward

        engine.network.abilities  # noqa: B018  # the probe's own pass is not counted
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward(engine, ROLLOUTS, Wanted(logprobs=True))
        assert out.logprobs is not None and out.logprobs.requires_grad
        kept[name] = sum(size for place, size in storages.items() if place not in weights)
    assert kept["layers"] < kept["none"] / 4
