"""Clusters from YAML files and from the word of a command line: what they mean, and all that is refused, with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, FlowError
from flowrl.compiler.cluster_file import parse_cluster
from flowrl.compiler.presets import PRESETS, Device, Tier

GB = 10**9


def write(place: Path, text: str) -> Path:
    path = place / "cluster.yaml"
    path.write_text(text)
    return path


def refused(place: Path, text: str) -> str:
    with pytest.raises(FlowError) as caught:
        Cluster.from_yaml(write(place, text))
    return str(caught.value)


# -- what is meant --------------------------------------------------------------------------------------------------------


def test_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path, "device: h100\nnodes: 2\n")
    assert Cluster.from_yaml(path) == Cluster.from_yaml(str(path)) == Cluster("H100", nodes=2)


def test_figures_replace_those_of_a_preset(tmp_path: Path) -> None:
    text = "device: H100\nnodes: 2\ngpus_per_node: 4\nmemory_gb: 64\nnetwork_gb_per_s: 12.5\nlink_gb_per_s: 1e2\n"
    (pool,) = Cluster.from_yaml(write(tmp_path, text)).pools
    assert (pool.nodes, pool.gpus_per_node, pool.device.memory_bytes) == (2, 4, 64 * GB)
    assert [(t.size, t.bandwidth) for t in pool.tiers] == [(4, 100e9), (8, 12.5e9)]
    assert pool.device.flops == PRESETS["H100"].device.flops


def test_pools_and_a_device_of_ones_own(tmp_path: Path) -> None:
    text = """
pools:
  - {device: A100-80G, nodes: 2}
  - device:
      name: Gaudi
      kind: cuda
      memory_gb: 96
      tflops: 432
      memory_gb_per_s: 2450
      host_gb_per_s: 25
    nodes: 3
    gpus_per_node: 8
    link_gb_per_s: 262.5
    link_latency_us: 4
    network_gb_per_s: 37.5
    network_latency_us: 20
"""
    first, own = Cluster.from_yaml(write(tmp_path, text)).pools
    assert (first,) == Cluster("A100-80G", nodes=2).pools
    assert own.device == Device("Gaudi", "cuda", 96 * GB, 432e12, 2450e9, 25e9)
    assert own.tiers == (Tier("link", 8, 262.5e9, 4e-6), Tier("network", 24, 37.5e9, 2e-5))


def test_one_device_of_ones_own_needs_no_links(tmp_path: Path) -> None:
    text = "device: {name: mine, kind: cpu, memory_gb: 4, tflops: 0.1, memory_gb_per_s: 10, host_gb_per_s: 10}"
    cluster = Cluster.from_yaml(write(tmp_path, text))
    assert (cluster.device, cluster.num_devices) == ("cpu", 1)


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 4096), st.integers(1, 64))
def test_a_word_a_file_and_arguments_mean_one_thing(name: str, nodes: int, gpus: int) -> None:
    assert parse_cluster(f"{nodes}x{gpus}:{name}") == Cluster(name, nodes=nodes, gpus_per_node=gpus)


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("16x8:H100", Cluster("H100", nodes=16)),
        (" 16 × 8 : h100 ", Cluster("H100", nodes=16)),
        ("4:L40S", Cluster("L40S", gpus_per_node=4)),
        ("B200", Cluster("B200")),
        ("cpu", Cluster("cpu")),
        ("4:cpu", Cluster("cpu", 4)),
        ("2x8:cuda", Cluster("cuda", nodes=2, gpus_per_node=8)),
        ("2x8:A100-80G+1x4:L40S", Cluster("A100-80G", nodes=2) + Cluster("L40S", gpus_per_node=4)),
    ],
)
def test_words(text: str, cluster: Cluster) -> None:
    assert parse_cluster(text) == cluster


def test_a_word_may_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "device: H200\n").rename("mine.YML")
    assert parse_cluster("mine.YML") == Cluster("H200")


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' has the device ''; expected a preset: there is 'A100-40G'"),
        ("16x8:H10", "'16x8:H10' has the device 'H10'; expected a preset: did you mean 'H100'?"),
        ("0x8:H100", "'0x8:H100' has '0' nodes; expected a whole number, at least 1"),
        ("16x0:H100", "has '0' gpus; expected a whole number, at least 1"),
        ("-1x8:H100", "has '-1' nodes; expected a whole number"),
        ("x8:H100", "has '' nodes; expected a whole number"),
        (":H100", "has '' gpus; expected a whole number"),
        ("2x2x2:H100", "has '2x2' nodes"),
        ("1.5x8:H100", "has '1.5' nodes"),
        ("16x8", "has the device '16x8'; expected a preset"),
        ("cuda:1", "'cuda:1' has 'cuda' gpus; expected a whole number, at least 1; 'cuda:1' has the device '1'"),
        ("0x8:H100+2x8:H20", "has '0' nodes; expected a whole number, at least 1; '2x8:H20' has the device 'H20'"),
        ("2x8:H100+", "'' has the device ''"),
        ("2x8:H100+4:cpu", "joins devices of kinds cpu, cuda; expected one kind"),
        ("no/such.yaml", "no/such.yaml cannot be read. Expected a YAML file of a cluster. Received .*No such file"),
    ],
)
def test_words_that_mean_none(text: str, message: str) -> None:
    with pytest.raises(FlowError) as caught:
        parse_cluster(text)
    before, _, after = message.partition(".*")
    assert before in str(caught.value) and after in str(caught.value)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("device: H100\nnodes: 0\n", ["line 2: nodes is '0'; expected a whole number, at least 1"]),
        ("device: H100\ngpus_per_node: 0\n", ["line 2: gpus_per_node is '0'; expected a whole number, at least 1"]),
        ("\n\ndevice: H10\n", ["line 3: device is 'H10'; expected one of A100-40G", "did you mean 'H100'?"]),
        ("device: H100\nnode: 2\n", ["line 2: there is no 'node' in the file; did you mean 'nodes'?"]),
        ("nodes: 2\n", ["line 1: device is missing; expected a preset (A100-40G"]),
        ("device: H100\nnodes: '2'\n", ["line 2: nodes is '2'; expected a whole number"]),
        ("device: H100\nnodes: 2.0\n", ["line 2: nodes is '2.0'"]),
        ("device: H100\nnodes: true\n", ["line 2: nodes is 'true'"]),
        ("device: H100\nnodes:\n", ["line 2: nodes is empty"]),
        ("device: H100\nnodes: [2]\n", ["line 2: nodes is a list"]),
        ("device: H100\nmemory_gb: -4\n", ["line 2: memory_gb is '-4'; expected a positive number"]),
        ("device: H100\nmemory_gb: .inf\n", ["line 2: memory_gb is '.inf'"]),
        ("device: H100\nmemory_gb: nan\n", ["line 2: memory_gb is 'nan'"]),
        ("device: H100\ndevice: L40S\n", ["line 2: device is given twice"]),
        ("device: [H100]\n", ["line 1: device is a list; expected one of"]),
        ("device:\n", ["line 1: device is empty; expected one of"]),
        ("", ["line 1: the file is empty"]),
        ("H100\n", ["line 1: the file is 'H100'; expected names with values"]),
        ("- H100\n", ["line 1: the file is a list; expected names with values"]),
        ("[1]: 2\ndevice: H100\n", ["line 1: there is no a list in the file"]),
        ("pools: []\n", ["line 1: pools is a list; expected a list of pools"]),
        ("pools: 3\n", ["line 1: pools is '3'; expected a list of pools"]),
        ("pools:\n  - H100\n", ["line 2: a pool is 'H100'; expected names with values"]),
        ("nodes: 2\npools:\n  - device: H100\n", ["line 1: nodes stands beside pools; expected it within one of them"]),
        ("pools:\n  - device: H100\n  - device: CPU\n", ["the pools have devices of kinds cpu, cuda; expected one kind"]),
        (
            "pools:\n  - device: H100\n    nodes: 0\n  - device: X\n  - devize: H100\n    nodes: 1\n",
            ["line 3: nodes is '0'", "line 4: device is 'X'", "line 5: there is no 'devize' in a pool; did you mean 'device'?",
             "line 5: device is missing"],
        ),
        (
            "device:\n  name: H100\n  kind: tpu\n  tflops: 0\nnodes: 2\nmemory_gb: 3\n",
            ["line 2: device lacks memory_gb, memory_gb_per_s, host_gb_per_s", "line 2: name is 'H100', a preset",
             "line 3: kind is 'tpu'; expected one of cuda, cpu", "line 4: tflops is '0'; expected a positive number"],
        ),
        (
            "device: {name: X, memory_gb: 1, tflops: 1, memory_gb_per_s: 1, host_gb_per_s: 1}\nnodes: 2\ngpus_per_node: 2\n"
            "memory_gb: 3\n",
            ["line 1: link_gb_per_s and network_gb_per_s missing", "line 4: memory_gb stands beside a device of its own"],
        ),
        ("device: {name: [], tflop: 1}\n", ["name is a list; expected a text", "no 'tflop' in device; did you mean 'tflops'?"]),
    ],
)  # fmt: skip
def test_files_that_cannot_be(tmp_path: Path, text: str, messages: list[str]) -> None:
    said = refused(tmp_path, text)
    for message in messages:
        assert message in said
    assert str(tmp_path / "cluster.yaml") in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("device: H100\nnodes: [2\n", 3),
        ("device: H100\n nodes: 2\n", 2),
        ("device: H100\n\tnodes: 2\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("device: *nobody\n", 1),
        ("device: H100\nname: \x07\n", 2),
        ("device: 'H100\n", 2),
    ],
)
def test_malformed_yaml_says_its_line(tmp_path: Path, text: str, line: int) -> None:
    assert f"cluster.yaml, line {line}: this is no YAML" in refused(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("device: é".encode("latin-1"))
    for path in (tmp_path, tmp_path / "no.yaml", tmp_path / "latin.yaml"):
        with pytest.raises(FlowError, match=f"{path}.* cannot be read"):
            Cluster.from_yaml(path)


def test_an_alias_of_itself_ends(tmp_path: Path) -> None:
    assert "expected one of" in refused(tmp_path, "device: &x [*x]\n")
    assert "there is no" in refused(tmp_path, "&x a: *x\n")


@given(st.text(max_size=60))
def test_any_text_is_a_cluster_or_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read in (lambda: Cluster.from_yaml(path), lambda: parse_cluster(text)):
        try:
            assert isinstance(read(), Cluster)
        except FlowError as error:
            assert str(error)
