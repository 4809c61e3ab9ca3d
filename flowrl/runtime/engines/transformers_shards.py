"""How a network lies over the ranks of a run: FSDP2 over data-parallel ranks, tensor parallelism inside of layers.

Every rank is given whole batches and gives back whole results. What is dealt out is micro-batches: the same ones for every
number of ranks, so that a row is scored by the same arithmetic wherever that happens. Under FSDP a forward pass is a
conversation of all ranks, so a rank with fewer micro-batches than others runs idle ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowrl.compiler.strategy import Strategy
from flowrl.errors import ModelError
from flowrl.runtime.engines.base import EngineOptions
from flowrl.runtime.engines.transformers_layers import layers_of, prepare_layers, split_layers
from flowrl.runtime.engines.transformers_network import Network
from flowrl.runtime.ranks import Ranks, group_of, set_timeout

T = TypeVar("T")
R = TypeVar("R")


class Shards:
    """A network on one rank: nothing is dealt out, nothing is gathered."""

    dp_rank = 0
    dp_size = 1
    #: Ranks that work on the same rows, each on its part of every layer.
    tp_size = 1
    #: Whether every forward and backward pass is a conversation of all ranks.
    in_step = False

    def deal(self, items: Sequence[T], *, in_step: bool = False) -> list[tuple[T, bool]]:
        """This rank's share of what all ranks hold, with False for what is only run to keep in step.

        Args:
            in_step: whether another network is run on each item whose passes are conversations of all ranks.
        """
        return [(item, True) for item in items]

    def run(self, function: Callable[[], T], *, stays: bool = False) -> T:
        """Run a forward pass; what it returns may have ``columns()``, its tensors with gradient.

        Args:
            stays: whether the weights outside of layers are read after it, too.
        """
        return function()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Within it layers can be called any number of times, and not the same number on every rank."""
        yield

    def settle(self) -> None:
        """Let the module's parameters be what the optimiser changes: this rank's parts of them."""

    def everyone(self, value: T) -> list[T]:
        """What every data-parallel rank has."""
        return [value]

    def gather(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        """Work on items, each on one rank; all results, in order, on every rank."""
        mine = self.attempt(lambda: [(work(item), counts) for item, counts in self.deal(items)])
        shares = self.everyone([result for result, counts in mine if counts])
        return [shares[i % self.dp_size][i // self.dp_size] for i in range(len(items))]

    def attempt(self, work: Callable[[], T]) -> T:
        """Let every rank do its part; where one raises, all do."""
        return work()

    def total(self, column: Tensor) -> Tensor:
        """The sum of a CPU tensor over data-parallel ranks, in place."""
        return column

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients that nobody has added up yet."""

    def together(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Parameters that an optimiser may work on in one go."""
        return [list(parameters)] if parameters else []

    def grad_norm(self, parameters: Sequence[Tensor]) -> float:
        """L2 norm over all gradients, in float32."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return 0.0
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return True

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter as one tensor; every rank asks for it."""
        return tensor.detach()

    def place(self, target: Tensor, whole: Tensor) -> None:
        """Copy a whole tensor into this rank's part of a parameter."""
        target.copy_(whole)


class ParallelShards(Shards):
    """A network over several ranks.

    Args:
        ranks: of the run.
        strategy: how the network is held.
        network: whose module is sharded in place.
        name: of the Model, for messages.

    Raises:
        ModelError: the module has no layers, or its layers cannot be split.
    """

    def __init__(self, ranks: Ranks, strategy: Strategy, network: Network, name: str) -> None:
        module = network.module
        self.ranks, self.strategy = ranks, strategy
        tp = strategy.tensor_parallel
        dp = ranks.size // tp
        self.tp_size = tp
        shard = strategy.shard_size or dp
        device = next(module.parameters()).device.type
        self.mesh = _mesh(device, (dp // shard, shard, tp), ranks.deadline)
        self.dp_size, self.dp_rank = dp, ranks.rank // tp
        self.dp_group = group_of([[d * tp + t for d in range(dp)] for t in range(tp)], ranks.deadline)
        self.in_step = strategy.sharding != "none"
        self.root: nn.Module = _Root(module)
        self._running = False
        layers = layers_of(module, strategy.shard_layers, name)
        if tp > 1:
            # By the model's own plan, which goes by its own layers, whatever is sharded for itself.
            split_layers(module, layers_of(module, (), name), self.mesh["tensor"], name)
        prepare_layers(network, layers, strategy)
        if self.in_step:
            self._fully_shard(layers)

    def _fully_shard(self, layers: Sequence[nn.Module]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        hybrid = self.mesh["replicate"].size() > 1
        options: dict[str, Any] = {
            "mesh": self.mesh["replicate", "shard"] if hybrid else self.mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        if self.strategy.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu")
        frees = self.strategy.sharding != "optimizer"
        for layer in layers:
            fully_shard(layer, reshard_after_forward=frees, **options)
        # The root's weights (embedding, head) are needed at both ends of a pass.
        fully_shard(self.root, reshard_after_forward=False, **options)
        for module in self._sharded():
            # Losses are divided by the count over all ranks, so gradients are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _sharded(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [m for m in self.root.modules() if isinstance(m, FSDPModule)]

    # -- what is dealt out --------------------------------------------------------------------------------------------------

    def deal(self, items: Sequence[T], *, in_step: bool = False) -> list[tuple[T, bool]]:
        mine = [(item, True) for item in items[self.dp_rank :: self.dp_size]]
        most = math.ceil(len(items) / self.dp_size)
        idle = [(items[0], False) for _ in range(most - len(mine))] if self.in_step or in_step else []
        return mine + idle

    def everyone(self, value: T) -> list[T]:
        return self.ranks.everyone(value, self.dp_group)

    def attempt(self, work: Callable[[], T]) -> T:
        return self.ranks.together(work)

    def total(self, column: Tensor) -> Tensor:
        return self.ranks.total(column, self.dp_group)

    # -- passes -------------------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[], T], *, stays: bool = False) -> T:
        if self._running:  # a pass of the base within one of the adapter on it
            return function()
        made: list[T] = []

        def body() -> Any:
            made.append(function())
            columns = getattr(made[0], "columns", list)
            return columns()  # FSDP hooks into the gradients of these

        self._running = True
        try:
            self.root(body)
        finally:
            self._running = False
        if self.in_step and not torch.is_grad_enabled() and not stays:
            self.root.reshard()  # type: ignore[operator]  # no backward pass comes that would
        return made[0]

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        layers = [m for m in self._sharded() if m is not self.root]
        for layer in layers:
            layer.set_reshard_after_forward(False, recurse=False)
            layer.unshard()
        try:
            yield
        finally:
            for layer in layers:
                layer.reshard()
                layer.set_reshard_after_forward(self.strategy.sharding != "optimizer", recurse=False)

    def settle(self) -> None:
        for module in self._sharded():
            module.reshard()

    # -- gradients ----------------------------------------------------------------------------------------------------------

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        mine = {id(p) for m in self._sharded() for p in m.parameters()} if self.in_step else set()
        for parameter in parameters:
            if id(parameter) in mine or self.dp_size == 1:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = _local(parameter.grad)
            summed = self._added_up(local.contiguous())
            if summed is not local:
                local.copy_(summed)

    def _added_up(self, part: Tensor) -> Tensor:
        """The sum over data-parallel ranks, in place, on the device where it lies."""
        if part.device.type == "cpu":
            return self.total(part)
        for axis in ("shard", "replicate"):
            if self.mesh[axis].size() > 1:
                dist.all_reduce(part, group=self.mesh[axis].get_group())
        return part

    def together(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return list(by_mesh.values())

    def grad_norm(self, parameters: Sequence[Tensor]) -> float:
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in parameters:
            if parameter.grad is not None:
                local = _local(parameter.grad)
                norm = torch.linalg.vector_norm(local, dtype=torch.float32).double().cpu()
                squares += norm**2 / self._copies(parameter.grad)
        return float(self.ranks.total(squares).sqrt())

    def _copies(self, tensor: Tensor) -> int:
        """Ranks that hold each number of a tensor."""
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(tensor, DTensor):
            return self.ranks.size
        kept = math.prod(
            n for n, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if p == Replicate()
        )
        return kept * self.ranks.size // tensor.device_mesh.size()

    # -- weights ------------------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self.ranks.is_first

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def place(self, target: Tensor, whole: Tensor) -> None:
        from torch.distributed.tensor import DTensor

        if not isinstance(target, DTensor):
            target.copy_(whole)
            return
        local = target.to_local()
        local.copy_(local_part(target, whole).to(local))


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether each rank holds the same part of both."""
    from torch.distributed.tensor import DTensor

    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.device_mesh == b.device_mesh and a.placements == b.placements
    return not isinstance(a, DTensor) and not isinstance(b, DTensor)


def local_part(target: Any, whole: Tensor) -> Tensor:
    """What this rank holds of a whole tensor that lies as ``target`` does.

    The numbers 0 … n−1 are laid out as the target is; each rank reads from them which ones are its own. Along one dimension
    that is enough, since a DTensor is split along whole slices.
    """
    from torch.distributed.tensor import DTensor

    part = whole
    for dim in range(whole.ndim):
        places = _places(target, dim)
        part = part.index_select(dim, places)
    assert isinstance(target, DTensor) and part.shape == target.to_local().shape
    return part


def _places(target: Any, dim: int) -> Tensor:
    """int64: which slices along ``dim`` this rank holds. Splits are applied in the order in which they were made:
    tensor parallelism first, which FSDP's strided split says by its factor."""
    places = torch.arange(target.shape[dim])
    # A strided split is no Shard in all versions of torch; what is split has a dim.
    splits = [(i, p) for i, p in enumerate(target.placements) if getattr(p, "dim", None) in (dim, dim - target.ndim)]
    strided = [s for s in splits if type(s[1]).__name__ == "_StridedShard"]
    for axis, _ in [*(s for s in splits if s not in strided), *strided]:
        parts, mine = target.device_mesh.size(axis), target.device_mesh.get_local_rank(axis)
        size = math.ceil(len(places) / parts)
        places = places[mine * size : (mine + 1) * size]
    return places


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh(device: str, shape: tuple[int, int, int], deadline: float) -> Any:
    """The mesh of this shape; one for all Models, since each holds groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    key = (id(dist.group.WORLD), device, shape)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard", "tensor"))
    for group in _meshes[key].get_all_groups():
        set_timeout(group, deadline)
    return _meshes[key]


_meshes: dict[Any, Any] = {}


class _Root(nn.Module):
    """Whose forward pass is the whole pass, head and losses' inputs included, so that FSDP sees its ends."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, body: Callable[[], Any]) -> Any:
        return body()


def shards_of(network: Network, options: EngineOptions, name: str) -> Shards:
    """How a network that was just loaded lies over the ranks of the run; a run of one rank prepares its layers alone.

    Raises:
        ModelError: the strategy cannot work, or not with these layers; the same on one rank as on several.
    """
    if problems := list(options.strategy.problems(options.ranks.size)):
        raise ModelError(f"{name}: {'; '.join(problems)}")
    if options.ranks.size > 1:
        return ParallelShards(options.ranks, options.strategy, network, name)
    strategy = options.strategy
    if strategy.shard_layers or strategy.compile_layers or strategy.activation_checkpointing != "none":
        prepare_layers(network, layers_of(network.module, strategy.shard_layers, name), strategy)
    return Shards()
