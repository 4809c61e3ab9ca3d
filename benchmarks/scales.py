"""At which sizes the benchmarks are run."""

from __future__ import annotations

#: Nodes of eight devices on which PPO 13B is planned.
GROWTH_NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Models of 8B, on 256 devices.
GROWTH_MODELS = (2, 3, 4, 5, 6, 7, 8)
#: (size, nodes) of PPO on which the three methods are compared: 8 to 1,024 devices.
COMPARED = (("7B", 1), ("7B", 2), ("13B", 4), ("34B", 8), ("34B", 16), ("70B", 32), ("70B", 64), ("70B", 128))
#: (size, devices) at which placements of PPO are compared with what was published.
PUBLISHED = (
    ("7B", 16),
    ("7B", 32),
    ("7B", 64),
    ("7B", 128),
    ("13B", 16),
    ("13B", 32),
    ("13B", 64),
    ("13B", 96),
    ("13B", 128),
    ("34B", 32),
    ("34B", 64),
    ("34B", 96),
    ("34B", 128),
)
