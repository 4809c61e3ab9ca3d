"""``python -m flowrl``: the command."""

from flowrl.cli import main

if __name__ == "__main__":
    main()
