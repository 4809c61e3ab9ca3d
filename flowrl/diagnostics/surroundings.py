"""Where a run would live: disks, folders, environment variables, the driver of GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl.diagnostics.packages import Problem

#: Variables that change what a run does. Tokens and passwords are none of them, so all may be shown.
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_LOGS", "TOKENIZERS_PARALLELISM", "GLOO_SOCKET_IFNAME",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LD_LIBRARY_PATH", "PYTHONPATH",
)  # fmt: skip
#: And all that begin so.
PREFIXES = ("NCCL_", "TORCH_NCCL_", "RAY_", "VLLM_", "FLOWRL_")
#: Ends of words in names whose values nobody should see in a pasted report.
_SECRET = ("TOKEN", "TOKENS", "KEY", "KEYS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIALS")
#: With less than this, the first checkpoint of a small model does not fit.
LITTLE_BYTES = 5 << 30


@dataclass(frozen=True)
class Place:
    """A folder that runs write to.

    Args:
        what: what it is for.
        writable: tried by writing a file into it, or into the nearest folder above it that exists.
    """

    what: str
    path: str
    free_bytes: int
    writable: bool


def places() -> list[Place]:
    """The folders that a run started here writes to."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or cache / "huggingface") / "hub"
    wanted = [
        ("run folders", Path.cwd()),
        ("cache", cache),
        ("models", Path(hub)),
        ("temporary files", Path(tempfile.gettempdir())),
    ]
    if Path("/dev/shm").is_dir():
        wanted.append(("shared memory", Path("/dev/shm")))
    return [_place(what, path) for what, path in wanted]


def _place(what: str, path: Path) -> Place:
    there = next((p for p in (path, *path.parents) if p.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"1")
            writable = True
    except OSError:
        writable = False
    return Place(what, str(path), shutil.disk_usage(there).free, writable)


def place_problems(found: list[Place]) -> Iterator[Problem]:
    for place in found:
        if not place.writable:
            do = {
                "cache": "export XDG_CACHE_HOME=/a/folder/that/is/writable",
                "models": "export HF_HOME=/a/folder/that/is/writable",
                "temporary files": "export TMPDIR=/a/folder/that/is/writable",
                "run folders": "cd into a folder that is writable, or flowrl run FILE --out FOLDER",
            }.get(place.what, f"make {place.path} writable")
            yield Problem(f"{place.path} ({place.what}) cannot be written", do)
        elif place.what in ("run folders", "models") and place.free_bytes < LITTLE_BYTES:
            free = place.free_bytes / 2**30
            yield Problem(
                f"{place.path} ({place.what}) has {free:.1f} GiB free", "free space, or use another disk", "note"
            )


def variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of the variables that matter, those that are set."""
    env = os.environ if env is None else env
    names = [*(n for n in VARIABLES if n in env), *sorted(n for n in env if n.startswith(PREFIXES))]
    return {n: "(set)" if any(word.endswith(_SECRET) for word in n.split("_")) else env[n] for n in names}


def variable_problems(found: Mapping[str, str], num_usable_cores: int) -> Iterator[Problem]:
    """Values that surprise."""
    threads = found.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > num_usable_cores:
        yield Problem(
            f"OMP_NUM_THREADS is {threads}, and this process may use {num_usable_cores} cores",
            f"export OMP_NUM_THREADS={num_usable_cores}, or less where several ranks share the machine",
            "note",
        )
    elif threads and not threads.split(",")[0].strip().isdigit():
        yield Problem(f"OMP_NUM_THREADS is {threads!r}, which is no number", "unset OMP_NUM_THREADS")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if found.get(name, "").upper() in ("1", "TRUE", "YES", "ON"):
            yield Problem(
                f"{name} is set: models come from the cache and from folders alone",
                f"unset {name}, to download",
                "note",
            )
    if found.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Problem("CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES, to use them", "note")
    if found.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Problem("CUDA_LAUNCH_BLOCKING makes every kernel wait", "unset CUDA_LAUNCH_BLOCKING", "note")
    if "WORLD_SIZE" in found and "MASTER_ADDR" not in found:
        yield Problem(
            f"WORLD_SIZE is {found['WORLD_SIZE']} outside of a launch: a run here would wait for other ranks",
            "unset WORLD_SIZE RANK LOCAL_RANK",
        )


@dataclass(frozen=True)
class Driver:
    """What NVIDIA's driver knows.

    Args:
        error: why it could not be asked, where its tool is there and fails.
    """

    version: str = ""
    gpus: tuple[str, ...] = ()
    error: str = ""


def driver(deadline: float = 20.0) -> Driver | None:
    """Ask nvidia-smi; None where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=deadline)
    except (OSError, subprocess.SubprocessError) as error:
        return Driver(error=str(error))
    lines = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    if done.returncode != 0 or not lines:
        said = done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}"
        return Driver(error=said.splitlines()[0])
    return Driver(lines[0][0], tuple(rest for _, rest in lines))
