"""Clusters as people write them down: a YAML file, or ``16x8:H100`` on a command line."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.compiler.cluster import Cluster, Pool
from flowrl.compiler.presets import NETWORK_LATENCY, PRESETS, Device, Preset, Tier
from flowrl.errors import FlowError, nearest

#: A node of PyYAML: its stubs do not know what tells one kind from another.
Node = Any

GIGA = 1e9
_POOL = (
    "device",
    "nodes",
    "gpus_per_node",
    "memory_gb",
    "link_gb_per_s",
    "link_latency_us",
    "network_gb_per_s",
    "network_latency_us",
)
_DEVICE = ("name", "kind", "memory_gb", "tflops", "memory_gb_per_s", "host_gb_per_s")
_KINDS = ("cuda", "cpu")
_USAGE = "16x8:H100 is 16 nodes of 8 each; join pools with +; or name a .yaml file"
_TERM = re.compile(r"(?:(?:(?P<nodes>[^:]*)[x×])?(?P<gpus>[^:x×]*):)?(?P<device>.*)", re.DOTALL)


# -- a command line's word ------------------------------------------------------------------------------------------------


def parse_cluster(text: str) -> Cluster:
    """The cluster that a word means.

    Args:
        text: ``NODESxGPUS:DEVICE``, ``GPUS:DEVICE`` on one node, or ``DEVICE``, the usual host of a preset; several joined by
            ``+``; or the path of a YAML file, which ends in .yaml or .yml.

    Raises:
        FlowError: it means none; all that is wrong with it.
    """
    if text.lower().endswith((".yaml", ".yml")):
        return read_cluster(text)
    problems: list[str] = []
    clusters = [cluster for term in text.split("+") if (cluster := _term(term.strip(), problems)) is not None]
    kinds = {cluster.device for cluster in clusters}
    if not problems and len(kinds) > 1:
        problems.append(f"{text!r} joins devices of kinds {', '.join(sorted(kinds))}; expected one kind")
    if problems:
        raise FlowError("This cluster cannot be: " + "; ".join(problems), do=_USAGE)
    return clusters[0] if len(clusters) == 1 else Cluster.of([pool for cluster in clusters for pool in cluster.pools])


def _term(text: str, problems: list[str]) -> Cluster | None:
    found = _TERM.fullmatch(text)
    assert found is not None, "any text has a device"
    device = found["device"].strip()
    known = {name.lower(): name for name in [*PRESETS, "cuda"]}
    before = len(problems)
    numbers: dict[str, int] = {}
    for name, argument in (("nodes", "nodes"), ("gpus", "gpus_per_node")):
        if (given := found[name]) is None:
            continue
        if not re.fullmatch(r"0*[1-9][0-9]*", given.strip()):
            problems.append(f"{text!r} has {given.strip()!r} {name}; expected a whole number, at least 1")
        else:
            numbers[argument] = int(given)
    if device.lower() not in known:
        problems.append(f"{text!r} has the device {device!r}; expected a preset: {nearest(device, [*PRESETS, 'cuda'])}")
    return Cluster(known[device.lower()], **numbers) if len(problems) == before else None


# -- a YAML file ----------------------------------------------------------------------------------------------------------


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """See :meth:`Cluster.from_yaml`."""
    import yaml

    file = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlowError(f"{file} cannot be read", expected="a YAML file of a cluster", received=error) from None
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _no_yaml(file, text, error) from None
    finally:
        if loader is not None:
            loader.dispose()
    return _File(file).cluster(root)


def _no_yaml(file: str, text: str, error: Any) -> FlowError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else text.count("\n", 0, getattr(error, "position", 0)) + 1
    said = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    why = ", ".join(str(part) for part in said if part) or str(error)
    return FlowError(f"{file}, line {line}: this is no YAML: {why}", expected="a YAML file of a cluster")


class _File:
    """Reads a cluster from nodes of YAML, which know their lines; collects all that is wrong."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[str] = []

    def cluster(self, root: Node) -> Cluster:
        pools = self._pools(root)
        kinds = {pool.device.kind for pool in pools}
        if not self.problems and len(kinds) > 1:
            self._refuse(root, f"the pools have devices of kinds {', '.join(sorted(kinds))}; expected one kind")
        if self.problems:
            raise FlowError("This cluster cannot be: " + "; ".join(self.problems), do="see docs/clusters.md")
        return Cluster.of(pools)

    def _pools(self, root: Node) -> list[Pool]:
        if root is None:
            self.problems.append(f"{self.file}, line 1: the file is empty; expected a device, or pools")
            return []
        found = self._mapping(root, "the file", (*_POOL, "pools"))
        if "pools" not in found:
            return self._made([self._pool(root, found)] if found or root.id == "mapping" else [])
        for name, node in found.items():
            if name != "pools":
                self._refuse(node, f"{name} stands beside pools; expected it within one of them")
        listed: Any = found["pools"]
        if listed.id != "sequence" or not listed.value:
            self._refuse(listed, f"pools is {_shown(listed)}; expected a list of pools")
            return []
        return self._made([self._pool(node, self._mapping(node, "a pool", _POOL)) for node in listed.value])

    def _made(self, pools: list[Pool | None]) -> list[Pool]:
        return [pool for pool in pools if pool is not None]

    def _pool(self, node: Node, found: dict[str, Node]) -> Pool | None:
        before = len(self.problems)
        preset = self._device(node, found)
        nodes = self._whole(found, "nodes", 1)
        per_node = self._whole(found, "gpus_per_node", preset.per_node)
        link, bandwidth, latency = preset.link
        memory = self._number(found, "memory_gb", preset.device.memory_bytes / GIGA)
        bandwidth = self._number(found, "link_gb_per_s", bandwidth / GIGA) * GIGA
        latency = self._number(found, "link_latency_us", latency * 1e6) / 1e6
        network = self._number(found, "network_gb_per_s", preset.network / GIGA) * GIGA
        far = self._number(found, "network_latency_us", NETWORK_LATENCY * 1e6) / 1e6
        own = preset.device.name not in PRESETS
        if own and "memory_gb" in found:
            self._refuse(found["memory_gb"], "memory_gb stands beside a device of its own; expected it within device")
        needed = [("link_gb_per_s", per_node > 1), ("network_gb_per_s", nodes > 1)]
        missing = [name for name, wanted in needed if own and wanted and name not in found]
        if missing:
            self._refuse(
                node, f"{' and '.join(missing)} missing, which no preset says; expected GB/s of a device, one way"
            )
        if len(self.problems) > before:
            return None
        memory_bytes = round(memory * GIGA) if "memory_gb" in found else preset.device.memory_bytes
        device = Device(**{**vars(preset.device), "memory_bytes": memory_bytes})
        inside = Tier(link, per_node, bandwidth, latency)
        outside = Tier("network", nodes * per_node, network, far)
        return Pool(device, nodes, per_node, (inside, outside) if network else (inside,))

    def _device(self, node: Node, found: dict[str, Node]) -> Preset:
        """The preset that is named, or one of the figures that are given."""
        given: Any = found.get("device")
        if given is None:
            self._refuse(node, f"device is missing; expected a preset ({', '.join(PRESETS)}), or figures of a device")
            return PRESETS["CPU"]
        if given.id == "mapping":
            return self._own_device(given)
        known = {name.lower(): name for name in PRESETS}
        name = given.value if given.id == "scalar" else None
        if name is None or name.lower() not in known:
            hint = f"; {nearest(name, PRESETS)}" if name else ""
            self._refuse(given, f"device is {_shown(given)}; expected one of {', '.join(PRESETS)}, or figures{hint}")
            return PRESETS["CPU"]
        return PRESETS[known[name.lower()]]

    def _own_device(self, given: Node) -> Preset:
        found = self._mapping(given, "device", _DEVICE)
        missing = [name for name in _DEVICE if name not in found and name != "kind"]
        if missing:
            self._refuse(given, f"device lacks {', '.join(missing)}; expected all figures of a device")
        texts = {name: self._text(found, name, default) for name, default in (("name", "own"), ("kind", "cuda"))}
        if texts["name"].lower() in {name.lower() for name in PRESETS}:
            self._refuse(found["name"], f"name is {texts['name']!r}, a preset; expected a name of its own")
        if texts["kind"] not in _KINDS:
            self._refuse(found["kind"], f"kind is {texts['kind']!r}; expected one of {', '.join(_KINDS)}")
        figures = {name: self._number(found, name, 1.0) for name in _DEVICE[2:]}
        memory, tera, rate, host = figures.values()
        device = Device(texts["name"], texts["kind"], round(memory * GIGA), tera * 1e12, rate * GIGA, host * GIGA)
        # What no data sheet says of links: latencies as of PCIe, bandwidths must be given where they are used.
        return Preset(device, 1, ("link", GIGA, 5e-6), GIGA)

    # -- values --------------------------------------------------------------------------------------------------------

    def _mapping(self, node: Node, what: str, names: tuple[str, ...]) -> dict[str, Node]:
        """By name its value; the first of two."""
        if node.id != "mapping":
            self._refuse(node, f"{what} is {_shown(node)}; expected names with values: {', '.join(names)}")
            return {}
        found: dict[str, Node] = {}
        for key, value in node.value:
            name = key.value if key.id == "scalar" else None
            if name not in names:
                self._refuse(key, f"there is no {_shown(key)} in {what}; {nearest(str(name), names)}")
            elif name in found:
                self._refuse(key, f"{name} is given twice")
            else:
                found[name] = value
        return found

    def _text(self, found: dict[str, Node], name: str, default: str) -> str:
        node: Any = found.get(name)
        if node is None:
            return default
        if node.id != "scalar" or not node.value.strip():
            self._refuse(node, f"{name} is {_shown(node)}; expected a text")
            return default
        return node.value

    def _whole(self, found: dict[str, Node], name: str, default: int) -> int:
        def read(text: str) -> int | None:
            return int(text) if re.fullmatch(r"0*[1-9][0-9]*", text) else None

        return self._value(found, name, default, read, "a whole number, at least 1")

    def _number(self, found: dict[str, Node], name: str, default: float) -> float:
        def read(text: str) -> float | None:
            try:
                value = float(text)
            except ValueError:
                return None
            return value if math.isfinite(value) and value > 0 else None

        return self._value(found, name, default, read, "a positive number")

    def _value(self, found: dict[str, Node], name: str, default: Any, read: Callable[[str], Any], expected: str) -> Any:
        node: Any = found.get(name)
        if node is None:
            return default
        # A number in quotes is a text; and YAML 1.1 has numbers that nobody means, 010 for 8, 1:30 for 90.
        value = read(node.value) if node.id == "scalar" and node.style is None else None
        if value is None:
            self._refuse(node, f"{name} is {_shown(node)}; expected {expected}")
            return default
        return value

    def _refuse(self, node: Node, text: str) -> None:
        line = node.start_mark.line + 1 if node is not None else 1
        self.problems.append(f"{self.file}, line {line}: {text}")


def _shown(node: Any) -> str:
    """A value in few words."""
    if node.id == "scalar":
        return repr(node.value)[:80] if node.value or node.style else "empty"
    return {"sequence": "a list", "mapping": "names with values"}[node.id]
