"""Try the laws on losses and advantages of your own, in one line each. See ``docs/testing.md``."""

from flowrl.testing.advantages import check_advantage
from flowrl.testing.errors import LawError
from flowrl.testing.inputs import Draw
from flowrl.testing.losses import check_loss
from flowrl.testing.registry import registered_advantages, registered_losses

__all__ = ["Draw", "LawError", "check_advantage", "check_loss", "registered_advantages", "registered_losses"]
