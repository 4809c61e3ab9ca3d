"""What every test needs: no network, one thread, no progress bars, and Ctrl-C as a terminal gives it."""

from __future__ import annotations

import os
import signal
import threading

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models are faster on one thread, and two test processes then share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TQDM_DISABLE", "1")

# A shell starts background jobs with Ctrl-C ignored, and processes inherit that: tests send it to runs of their own.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
