"""Data sets and tasks: what a source draws from."""
