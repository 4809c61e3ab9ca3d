"""What one rank holds under torch's FSDP2 over tensor parallelism; a process of its own, since torch keeps meshes for good.

``python -m tests.compiler.torch_ranks rank data tensor`` prints JSON: of each tensor its shape on the rank, and its numbers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: Dims that tensor parallelism splits.
SPLITS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Uneven(nn.Module):
    """Matrices whose sizes nothing divides, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 10)
        self.down = nn.Linear(10, 7, bias=False)
        self.norm = nn.LayerNorm(3)


def held_by(rank: int, data: int, tensor: int) -> dict[str, tuple[list[int], list[Any]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from flowrl.runtime.engines.transformers_shards import local_part

    dist.init_process_group("fake", rank=rank, world_size=data * tensor, store=FakeStore())
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    module = Uneven()
    if tensor > 1:
        parallelize_module(module, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh["data"])
    found = {}
    for name, parameter in module.named_parameters():
        part: Any = parameter
        whole = torch.arange(parameter.numel()).reshape(parameter.shape)
        found[name] = (list(part.to_local().shape), local_part(part, whole).tolist())
    return found


if __name__ == "__main__":
    print(json.dumps(held_by(*map(int, sys.argv[1:]))))
