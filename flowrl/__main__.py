"""``python -m flowrl``: the ``flowrl`` command, where torchrun wants a module."""

from flowrl.cli import main

if __name__ == "__main__":
    main()
