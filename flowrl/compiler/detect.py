"""What this machine has to run a flow on."""

from __future__ import annotations

import re

from flowrl.compiler.cluster import Cluster
from flowrl.compiler.presets import GB, PRESETS
from flowrl.machine import Machine

#: What a driver calls a GPU, and the presets whose figures it has; memory decides between several. PCIe cards and the NVL
#: ones of H100 and H200 have other rates and links than the modules that presets describe, and match none.
_NAMES = (
    (re.compile(r"\bA100-SXM4\b"), ("A100-40G", "A100-80G")),
    (re.compile(r"\bH100 80GB HBM3\b"), ("H100",)),
    (re.compile(r"\bH200$"), ("H200",)),
    (re.compile(r"\bB200$"), ("B200",)),
    (re.compile(r"\bL40S\b"), ("L40S",)),
)


def detect(num_devices: int = 1) -> Cluster:
    """See :meth:`Cluster.detect`."""
    try:
        import torch
    except ImportError:  # a machine that only plans
        return _cpu(num_devices)
    if not torch.cuda.is_available():
        return _cpu(num_devices)
    memory = torch.cuda.get_device_properties(0).total_memory
    preset = preset_of(torch.cuda.get_device_name(0), memory)
    here = torch.cuda.device_count()
    if num_devices > here and num_devices % here == 0:
        return Cluster(preset, nodes=num_devices // here, gpus_per_node=here, memory_bytes=memory)
    return Cluster(preset, num_devices, memory_bytes=memory)


def preset_of(name: str, memory_bytes: int) -> str:
    """The preset of a GPU by its driver's name for it and its memory; "cuda" where none describes it."""
    for pattern, presets in _NAMES:
        if pattern.search(name):
            return min(presets, key=lambda p: abs(PRESETS[p].device.memory_bytes - memory_bytes))
    return "cuda"


def _cpu(num_devices: int) -> Cluster:
    share = Machine.here().memory_bytes // num_devices if num_devices > 0 else 0
    # A machine that does not say is taken for the preset's.
    return Cluster("cpu", num_devices, memory_bytes=share if share > GB // 10 else None)
