"""Clusters: what presets say, meshes and tiers, what this machine is taken for, and what cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, FlowError
from flowrl.compiler.cluster import Pool
from flowrl.compiler.detect import preset_of
from flowrl.compiler.mesh import Mesh
from flowrl.compiler.presets import PRESETS
from flowrl.machine import Machine

GB = 10**9
PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


# -- what is said of one --------------------------------------------------------------------------------------------------


def test_the_table_of_the_docs_is_that_of_the_presets() -> None:
    rows = [
        "| preset | memory | bf16 | memory bandwidth | inside a host | network, a GPU | usual host |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, preset in PRESETS.items():
        device, (link, bandwidth, _) = preset.device, preset.link
        rows.append(
            f"| `{name}` | {device.memory_bytes / GB:g} GB | {device.flops / 1e12:,g} TFLOP/s "
            f"| {device.memory_bandwidth / GB:,g} GB/s | {link}, {bandwidth / GB:g} GB/s | {preset.network / GB:g} GB/s "
            f"| {preset.per_node} |"
        )
    assert "\n".join(rows) in PAGE.read_text(), "write into docs/clusters.md:\n" + "\n".join(rows)


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (Cluster("h100", nodes=2), 'Cluster("H100", nodes=2, gpus_per_node=8)'),
        (Cluster("H100", 4), 'Cluster("H100", nodes=1, gpus_per_node=4)'),
        (Cluster("cpu"), 'Cluster("cpu")'),
        (Cluster("CPU", 4), 'Cluster("cpu", num_devices=4)'),
        (Cluster("cuda:1"), 'Cluster("cuda:1")'),
        (Cluster("cuda", 2, nodes=3), 'Cluster("cuda", nodes=3, gpus_per_node=2)'),
        (
            Cluster("L40S", nodes=2, network_bandwidth=1e9, memory_bytes=40 * GB),
            'Cluster("L40S", nodes=2, gpus_per_node=8, network_bandwidth=1000000000.0, memory_bytes=40000000000)',
        ),
        (
            Cluster("A100-80G", nodes=2) + Cluster("L40S", gpus_per_node=4),
            'Cluster("A100-80G", nodes=2, gpus_per_node=8) + Cluster("L40S", nodes=1, gpus_per_node=4)',
        ),
    ],
)
def test_repr_makes_it_again(cluster: Cluster, text: str) -> None:
    assert repr(cluster) == text
    assert eval(text, {"Cluster": Cluster}) == cluster


def test_repr_of_what_no_arguments_make() -> None:
    (pool,) = Cluster("H100", nodes=2).pools
    other = replace(pool, device=replace(pool.device, name="H100-mod", flops=1e15))
    slower = replace(pool, tiers=(replace(pool.tiers[0], bandwidth=1e9), pool.tiers[1]))
    renamed = replace(pool, device=replace(pool.device, flops=1e15))
    assert [repr(Cluster.of([p])) for p in (other, slower, renamed)] == ["<2x8 H100-mod>", "<2x8 H100>", "<2x8 H100>"]


# -- meshes ---------------------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 5))
def test_meshes_are_within_a_node_or_whole_nodes(per_node: int, nodes: int) -> None:
    cluster = Cluster("H100", nodes=nodes, gpus_per_node=per_node)
    sizes = cluster.sizes()
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == cluster.num_devices
    for size in sizes:
        meshes = list(cluster.meshes(size))
        assert meshes and all(mesh.size == size and mesh.stop <= cluster.num_devices for mesh in meshes)
        for mesh in meshes:
            first, last = mesh.start // per_node, (mesh.stop - 1) // per_node
            assert first == last or (mesh.start % per_node == 0 and mesh.stop % per_node == 0)
        if size <= per_node:
            assert sorted(d for m in meshes for d in range(m.start, m.stop)) == list(range(cluster.num_devices))


def test_tiers_join_what_lies_in_one_host() -> None:
    (pool,) = Cluster("H100", nodes=2).pools
    assert [pool.tier(*ends).name for ends in [(0, 8), (8, 9), (7, 9), (0, 16)]] == [
        "nvlink",
        "nvlink",
        "network",
        "network",
    ]
    (alone,) = Cluster("H100").pools
    assert alone.tier(0, 8).name == "nvlink", "the network that would join it to others is known, and not used"
    assert alone.with_nodes(2) == pool


def test_meshes_overlap_within_a_pool() -> None:
    assert Mesh(0, 0, 8).overlaps(Mesh(0, 7, 1)) and not Mesh(0, 0, 8).overlaps(Mesh(0, 8, 8))
    assert not Mesh(0, 0, 8).overlaps(Mesh(1, 0, 8))


# -- this machine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "H100"),
        ("NVIDIA A100-SXM4-40GB", 42, "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", 85, "A100-80G"),
        ("NVIDIA H200", 150, "H200"),
        ("NVIDIA B200", 192, "B200"),
        ("NVIDIA L40S", 47, "L40S"),
        ("NVIDIA L40", 47, "cuda"),
        ("NVIDIA H100 PCIe", 85, "cuda"),  # another card: slower, and without NVLink switches
        ("NVIDIA H100 NVL", 100, "cuda"),
        ("NVIDIA H200 NVL", 150, "cuda"),
        ("NVIDIA GH200 480GB", 100, "cuda"),
        ("NVIDIA A100-PCIE-40GB", 42, "cuda"),
        ("NVIDIA GeForce RTX 4090", 24, "cuda"),
        ("", 1, "cuda"),
    ],
)
def test_names_of_drivers(name: str, gigabytes: int, preset: str) -> None:
    assert preset_of(name, gigabytes * GB) == preset


def machine_with(monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, memory: int) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=memory))


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [
        (1, {"num_devices": 1}),
        (8, {"num_devices": 8}),
        (16, {"nodes": 2, "gpus_per_node": 8}),
        (12, {"num_devices": 12}),  # no whole machines: nothing is known of how they lie
    ],
)
def test_gpus_are_known_by_name_with_their_own_memory(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, expected: dict[str, Any]
) -> None:
    machine_with(monkeypatch, 8, "NVIDIA H100 80GB HBM3", 79 * GB)
    assert Cluster.detect(num_devices) == Cluster("H100", memory_bytes=79 * GB, **expected)


def test_gpus_that_no_preset_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 1, "NVIDIA GeForce RTX 4090", 25 * GB)
    assert Cluster.detect() == Cluster("cuda", memory_bytes=25 * GB)


def test_ranks_of_a_processor_share_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, 0, "", 0)
    for count in (1, 4):
        memory = Machine.here().memory_bytes // count
        assert Cluster.detect(count) == Cluster("cpu", count, memory_bytes=memory)
    silent = replace(Machine.here(), memory_bytes=0)
    monkeypatch.setattr(Machine, "here", lambda: silent)
    assert Cluster.detect() == Cluster("cpu")


# -- what cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "H10"}, r"device is 'H10'; expected 'cpu', 'cuda', .*; did you mean 'H100'\?"),
        ({"device": "tpu"}, "device is 'tpu'; expected 'cpu', 'cuda'"),
        ({"device": None}, "device is None; expected 'cpu'"),
        ({"device": ""}, "device is ''; expected 'cpu'"),
        ({"device": "H100", "gpus_per_node": 0}, "gpus_per_node is 0; expected a whole number, at least 1"),
        ({"device": "H100", "nodes": 0}, "nodes is 0; expected a whole number, at least 1"),
        ({"num_devices": 0}, "num_devices is 0; expected a whole number, at least 1"),
        ({"num_devices": True}, "num_devices is True"),
        ({"num_devices": "2"}, "num_devices is '2'"),
        ({"nodes": 1.5}, "nodes is 1.5"),
        ({"num_devices": 2, "gpus_per_node": 2}, "num_devices and gpus_per_node are both given"),
        ({"network_bandwidth": 0}, "network_bandwidth is 0; expected a positive number"),
        ({"memory_bytes": "80 GB"}, "memory_bytes is '80 GB'; expected a positive number"),
        ({"device": "cuda:1", "num_devices": 2}, r"2 ranks cannot share cuda:1; .*: Cluster\('cuda', num_devices=2\)"),
        ({"device": "H10", "nodes": 0, "memory_bytes": -1}, "nodes is 0; .*; memory_bytes is -1; .*; device is 'H10'"),
    ],
)
def test_refused_with_reasons(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message) as caught:
        Cluster(**arguments)
    assert re.search(r'Do: Cluster\("H100", nodes=2, gpus_per_node=8\)', str(caught.value))


def test_pools_that_are_no_cluster() -> None:
    with pytest.raises(FlowError, match="Received none"):
        Cluster.of([])
    with pytest.raises(FlowError, match=r"whose devices are of one kind\. Received cpu, cuda"):
        Cluster("H100") + Cluster("cpu")
    pool = Cluster("H100").pools[0]
    assert isinstance(pool, Pool) and Cluster.of([pool]) == Cluster("H100")


# -- the docs -------------------------------------------------------------------------------------------------------------


def test_the_file_of_the_docs(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "docs.yaml").write_text(text)
    preset, own = Cluster.from_yaml(tmp_path / "docs.yaml").pools
    assert (preset,) == Cluster("A100-80G", nodes=16, network_bandwidth=12.5e9).pools
    assert (own.device.name, own.size, own.device.flops, own.tiers[0].bandwidth) == ("MI300X", 16, 1307e12, 448e9)


def test_what_the_docs_print(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("device: H100\nnodes: 4\nnetwork_gb_per_s: 25\n")
    assert f"# {Cluster.from_yaml(tmp_path / 'cluster.yaml')}\n" in PAGE.read_text()
