"""What a flow may run on. Today: one device; the presets and link tiers of real clusters come with the mapper."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".
        num_devices: how many; 1 today.
    """

    device: str = "cpu"
    num_devices: int = 1

    @classmethod
    def detect(cls) -> Cluster:
        """The best single device of this machine."""
        import torch

        return cls("cuda" if torch.cuda.is_available() else "cpu")
