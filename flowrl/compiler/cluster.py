"""What a flow may run on. Today: devices of one kind, a rank each; the presets and link tiers of real clusters come with the
mapper."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.compiler.strategy import is_whole
from flowrl.errors import FlowError


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".
        num_devices: how many, a rank each. More than one are run by ``runtime="spmd"`` under torchrun.

    Raises:
        FlowError: ``device`` is no name, ``num_devices`` is not a positive number, or several are asked for on one that is
            named by its index.
    """

    device: str = "cpu"
    num_devices: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not self.device:
            raise FlowError(
                "A cluster needs a device", expected="'cpu', 'cuda' or 'cuda:<index>'", received=repr(self.device)
            )
        if not is_whole(self.num_devices, 1):
            raise FlowError(
                "A cluster needs a device",
                expected="num_devices, a whole number of at least 1",
                received=repr(self.num_devices),
            )
        if self.num_devices > 1 and ":" in self.device:
            raise FlowError(
                f"{self.num_devices} ranks cannot share {self.device}",
                expected="a kind of device, of which each rank takes its own",
                received=self.device,
                do=f"Cluster({self.device.partition(':')[0]!r}, num_devices={self.num_devices})",
            )

    @classmethod
    def detect(cls, num_devices: int = 1) -> Cluster:
        """The best devices of this machine."""
        try:
            import torch
        except ImportError:  # a machine that only plans
            return cls("cpu", num_devices)
        return cls("cuda" if torch.cuda.is_available() else "cpu", num_devices)
