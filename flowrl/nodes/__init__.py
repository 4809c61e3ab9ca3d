"""The nodes that flows are composed of."""
