"""What a flow may run on. Today: one device; the presets and link tiers of real clusters come with the mapper."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import UnsupportedError


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".
        num_devices: how many; 1 today.
    """

    device: str = "cpu"
    num_devices: int = 1

    def __post_init__(self) -> None:
        if self.num_devices != 1:
            raise UnsupportedError(
                "This version plans for one device", expected="num_devices=1", received=self.num_devices
            )

    @classmethod
    def detect(cls) -> Cluster:
        """The best single device of this machine."""
        try:
            import torch
        except ImportError:  # a machine that only plans
            return cls("cpu")
        return cls("cuda" if torch.cuda.is_available() else "cpu")
