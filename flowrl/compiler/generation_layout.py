"""Generation with other degrees of parallelism on the devices that train: which device takes which part, and what that moves.

Training on p stages of t tensor ranks and generation on p_g of t_g: HybridFlow (arXiv 2409.19256, §5.3) lets generation's
tensor and pipeline groups be the training ranks at intervals of t / t_g and p / p_g, so that what a device holds for training
is part of what it holds for generation. Then each receives (d_g − 1) / (t·p) of the model, d_g = p·t / (p_g·t_g), and holds
no byte twice.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.compiler.layout import Coordinates, Layout
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.parallelism import Parallelism
from flowrl.compiler.parameter_map import Naming
from flowrl.errors import FlowError


def generation_layout(
    train: Layout, tensor: int, pipeline: int, *, naming: Naming | None = None, num_layers: int | None = None
) -> Layout:
    """The layout of generation on the devices of training that leaves nothing redundant.

    Args:
        train: how the weights lie in training.
        tensor: tensor-parallel ranks of generation: a divisor of training's, or a multiple.
        pipeline: its stages; the same holds.
        naming: whose tensors generation has; None: those of training.
        num_layers: of the model, so that stages of generation are whole stages of training where those are uneven.

    Raises:
        FlowError: a degree does not divide the other, or the devices are too few.
    """
    size = train.mesh.size
    if tensor < 1 or pipeline < 1 or size % (tensor * pipeline):
        raise FlowError(
            "Generation cannot be laid over these devices",
            expected=f"tensor × pipeline to divide {size}",
            received=f"{tensor} × {pipeline}",
        )
    degrees = Parallelism(data=size // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
    ranks = grouping(train, degrees)
    if ranks is None:
        p = train.parallelism
        raise FlowError(
            "Generation cannot be grouped so that it holds what training holds",
            expected=f"a divisor or a multiple of tensor {p.tensor}, and of pipeline {p.pipeline}",
            received=f"tensor {tensor}, pipeline {pipeline}",
        )
    stages = _stages(train, pipeline, num_layers)
    made = Layout(train.mesh, degrees, naming or train.naming, stages, ranks, None)
    same = made.naming == train.naming  # what is said of the vocabulary is said of one naming
    return replace(made, split_vocabulary=train.split_vocabulary) if same else made


def target_layout(
    source: Layout,
    mesh: Mesh,
    parallelism: Parallelism,
    *,
    naming: Naming = "huggingface",
    num_layers: int | None = None,
) -> Layout:
    """How weights that lie in ``source`` best lie on a mesh: grouped as :func:`generation_layout` does where that is the
    source's own mesh and one degree divides the other, else in order."""
    ranks = grouping(source, parallelism) if mesh == source.mesh else None
    if ranks is None:
        return Layout(mesh, parallelism, naming)
    return Layout(mesh, parallelism, naming, _stages(source, parallelism.pipeline, num_layers), ranks)


def grouping(source: Layout, target: Parallelism) -> tuple[int, ...] | None:
    """``Layout.ranks`` of a target on the source's devices, so that each keeps what it can; None where one degree of tensor or
    pipeline parallelism does not divide the other.

    An index along an axis of the source is (index along the target's, place within the interval) where the target's degree is
    smaller; where it is greater, it is the target's index without its last digit, which data-parallel neighbours make up.
    """
    p, g = source.parallelism, target
    if not (_nested(p.tensor, g.tensor) and _nested(p.pipeline, g.pipeline)) or p.size != g.size:
        return None
    wide_t, wide_p = max(1, p.tensor // g.tensor), max(1, p.pipeline // g.pipeline)
    fine_t, fine_p = max(1, g.tensor // p.tensor), max(1, g.pipeline // p.pipeline)
    if (p.data * wide_t * wide_p) % (fine_t * fine_p):
        return None
    ranks = [0] * g.size
    for pipeline in range(p.pipeline):
        for data in range(p.data):
            for tensor in range(p.tensor):
                device = source.device(Coordinates(pipeline, data, tensor)).device - source.mesh.start
                # Data-parallel ranks, and places within intervals: the copies that generation gains. Neighbours differ last.
                spare = (data * wide_p + pipeline % wide_p) * wide_t + tensor % wide_t
                spare, last_t = divmod(spare, fine_t)
                spare, last_p = divmod(spare, fine_p)
                at_p = pipeline // wide_p * fine_p + last_p
                at_t = tensor // wide_t * fine_t + last_t
                ranks[(at_p * g.data + spare) * g.tensor + at_t] = device
    return () if ranks == list(range(g.size)) else tuple(ranks)


def volume(num_bytes: float, source: Parallelism, target: Parallelism, *, same_mesh: bool) -> float:
    """Bytes that a device receives when a Model's weights go from one layout to another: a closed form for an ideal model,
    all of whose tensors are split evenly.

    On another mesh a device receives its whole share. On the same one, grouped as :func:`generation_layout` does, what
    exceeds what it holds: M / (t_g·p_g) − M / (t·p) = (d_g − 1) / (t·p) · M for HybridFlow's case, a target whose degrees
    divide the source's. With ZeRO-3 at the source a device holds 1 / data of that: exact in the same case, the mean
    over devices otherwise. With ZeRO-3 at the target, the mean over tensors that lie independently. Where one degree does not
    divide the other, an upper bound: nothing is counted as held.

    Args:
        num_bytes: of one whole copy, M.
        source: how it lies.
        target: how it shall lie.
        same_mesh: whether on the same devices.
    """
    if same_mesh and source.layout == target.layout:
        return 0.0
    s, t = source, target
    shards_s, shards_t = (x.data if x.zero == 3 else 1 for x in (s, t))
    share = num_bytes / (t.tensor * t.pipeline * shards_t)
    if not same_mesh or not (_nested(s.tensor, t.tensor) and _nested(s.pipeline, t.pipeline)):
        return share
    held = num_bytes / (max(s.tensor, t.tensor) * max(s.pipeline, t.pipeline) * shards_s * shards_t)
    return max(0.0, share - held)


def _nested(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _stages(source: Layout, pipeline: int, num_layers: int | None) -> tuple[int, ...]:
    """Layers of each stage of the target, where they are whole stages of the source; empty: as even as can be."""
    known = source.stages or (tuple(map(len, source.layers_of(num_layers))) if num_layers else ())
    wide, rest = divmod(source.parallelism.pipeline, pipeline)
    if not known or rest:
        return ()
    return tuple(sum(known[i * wide : (i + 1) * wide]) for i in range(pipeline))
