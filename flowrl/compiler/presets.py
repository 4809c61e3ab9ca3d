"""Devices by name: what their makers' data sheets say. Rates are peaks; what of them is reached is the estimate's business."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Device:
    """One accelerator, or one socket of a host.

    Args:
        name: of the preset, or of the user's own.
        kind: what torch calls it: "cuda" or "cpu".
        memory_bytes: of the device.
        flops: dense bfloat16 FLOP/s, peak, without sparsity.
        memory_bandwidth: B/s, peak.
        host_bandwidth: B/s between it and its host's memory, one direction.
    """

    name: str
    kind: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    host_bandwidth: float


@dataclass(frozen=True)
class Tier:
    """Devices that reach one another at one rate.

    Args:
        name: "nvlink", "pcie", "network", …
        size: devices of an aligned group that the links of this tier join; the outermost joins all of the pool.
        bandwidth: B/s that each device can send, one direction.
        latency: seconds of a message.
    """

    name: str
    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Preset:
    """A device, and how its usual host joins it to others.

    Args:
        device: the device.
        per_node: devices of the usual host.
        link: the tier inside a host: its name, B/s of a device one way, and seconds of latency.
        network: B/s that the host can send for each device of it, one way.
    """

    device: Device
    per_node: int
    link: tuple[str, float, float]
    network: float


#: Seconds of a message over the network between hosts.
NETWORK_LATENCY = 1e-5


def _gpu(name: str, memory: float, tera: float, bandwidth: float, host: float) -> Device:
    return Device(name, "cuda", int(memory * GB), tera * TERA, bandwidth * GB, host * GB)


#: By name. Sources: NVIDIA's data sheets of A100, H100, H200, B200 (HGX) and L40S; hosts as DGX/HGX ship them.
PRESETS: dict[str, Preset] = {
    "A100-40G": Preset(_gpu("A100-40G", 40, 312, 1555, 25), 8, ("nvlink", 300 * GB, 3e-6), 25 * GB),
    "A100-80G": Preset(_gpu("A100-80G", 80, 312, 2039, 25), 8, ("nvlink", 300 * GB, 3e-6), 25 * GB),
    "H100": Preset(_gpu("H100", 80, 989, 3350, 50), 8, ("nvlink", 450 * GB, 3e-6), 50 * GB),
    "H200": Preset(_gpu("H200", 141, 989, 4800, 50), 8, ("nvlink", 450 * GB, 3e-6), 50 * GB),
    "B200": Preset(_gpu("B200", 180, 2250, 7700, 50), 8, ("nvlink", 900 * GB, 3e-6), 50 * GB),
    "L40S": Preset(_gpu("L40S", 48, 362, 864, 25), 8, ("pcie", 25 * GB, 5e-6), 12.5 * GB),
    # A rank of a small server: no data sheet covers it, and a calibration replaces it.
    "CPU": Preset(Device("CPU", "cpu", 16 * GB, 1 * TERA, 20 * GB, 20 * GB), 1, ("memory", 5 * GB, 5e-5), 1 * GB),
}

#: "cuda": a GPU of which nothing is known until a calibration says it. Figures of the smallest preset.
UNKNOWN_GPU = Preset(_gpu("cuda", 24, 100, 600, 12), 1, ("pcie", 12 * GB, 1e-5), 1 * GB)
