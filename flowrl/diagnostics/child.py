"""The trial's side of :mod:`flowrl.diagnostics.trial`: what runs in the process of its own."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from flowrl.errors import FlowError

#: Seconds past the deadline after which the process ends itself, should nobody have ended it.
_PAST = 15.0
#: Seconds between two looks at the parent.
_LOOK_SECONDS = 1.0


class Say:
    """Tells the parent how far a trial is, a line each.

    Args:
        path: the file of this rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, stage: str, **facts: Any) -> None:
        """What begins now ("scoring"), and anything that is known already."""
        self.write({"stage": stage, **facts})

    def write(self, event: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")


def main(argument: str) -> int:
    """Call the function that the argument names; the exit status."""
    call = json.loads(argument)
    say = Say(Path(call["folder"]) / f"events-{os.environ.get('RANK', '0')}.jsonl")
    # A thread that needs no lock of Python's: it works where a library hangs in C, and where the parent is gone.
    faulthandler.dump_traceback_later(call["deadline"] + _PAST, exit=True)
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_follow, args=(call["parent"],), daemon=True).start()
    say.write({"pid": os.getpid()})
    warnings.simplefilter("ignore")
    try:
        module, name = call["function"].split(":")
        result = getattr(importlib.import_module(module), name)(say, **call["arguments"])
    except Exception as error:  # whatever it is: the parent says it
        say.write({"error": describe(error), "at": time.time()})
        raise
    say.write({"result": result})
    return 0


def _follow(parent: int) -> None:
    """End with the process that asked, however it ended: nobody would read the answer."""
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        except PermissionError:
            pass
        time.sleep(_LOOK_SECONDS)


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = str(error) if isinstance(error, FlowError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:600]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
