"""The architecture of a Model of a flow, without loading it."""

from __future__ import annotations

import os
from pathlib import Path

from flowrl.compiler.architecture import Architecture
from flowrl.compiler.architecture_known import KNOWN_CONFIGS, known_config
from flowrl.errors import FlowError
from flowrl.models import BaseModel, DerivedModel, Model


def architecture_of(model: BaseModel) -> Architecture:
    """The architecture of a Model, or of the one that a derived Model follows.

    The first of these that there is: the configuration of a live model, ``config.json`` or the GGUF file in a folder, what is
    in this machine's cache of the Hugging Face Hub, a built-in table of well-known models. No weights are read, and no network
    is used.

    Raises:
        FlowError: nothing can be read, or the family is not known; what was tried, and what to do.
    """
    base = model.base if isinstance(model, DerivedModel) else model
    assert isinstance(base, Model), "checks.possible_settings lets no derived Model of a derived one through"
    tried: list[str] = []
    try:
        for attempt in (_live, _folder, _cached, _known):
            found = attempt(base, tried)
            if found is not None:
                return found
    except FlowError as error:
        raise FlowError(
            f"{model!r}: {error.message}", expected=error.expected, received=error.received, do=error.do
        ) from error
    raise FlowError(
        f"The architecture of {model!r} is not known, so nothing of it can be estimated",
        expected="a model whose configuration is at hand",
        received="; ".join(tried),
        do=f"give a folder with its config.json as source, or download it: hf download {base.source} config.json",
    )


def _live(model: Model, tried: list[str]) -> Architecture | None:
    if isinstance(model.source, str | os.PathLike):
        return None
    config = getattr(model.source, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        tried.append(f"a live {type(model.source).__name__} without a configuration")
        return None
    return Architecture.from_config(config)


def _folder(model: Model, tried: list[str]) -> Architecture | None:
    if not isinstance(model.source, str | os.PathLike):
        return None
    folder = Path(model.source).expanduser()
    if not folder.is_dir():
        tried.append(f"no folder {str(model.source)!r} here")
        return None
    file = model.load_options.get("gguf_file")
    if file:
        return _of_gguf(folder / file)
    if (folder / "config.json").is_file():
        return Architecture.from_config(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _of_gguf(files[0])
    tried.append(f"the folder {str(model.source)!r} has neither a config.json nor one GGUF file")
    return None


def _of_gguf(path: Path) -> Architecture:
    from flowrl.compiler.gguf_header import gguf_config

    return Architecture.from_config(gguf_config(path))


def _cached(model: Model, tried: list[str]) -> Architecture | None:
    """From the Hub's cache on this machine, at the revision that would be loaded."""
    if not isinstance(model.source, str) or Path(model.source).is_absolute() or model.source.count("/") > 1:
        return None
    folder = hub_cache() / ("models--" + model.source.replace("/", "--"))
    revision = str(model.load_options.get("revision", "main"))
    try:
        snapshot = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        snapshot = revision
    found = folder / "snapshots" / snapshot / "config.json"
    if found.is_file():
        return Architecture.from_config(found)
    tried.append(f"no config.json of it in the cache of the Hub at {hub_cache()}")
    return None


def hub_cache() -> Path:
    """Where ``huggingface_hub`` keeps what it downloaded: ``$HF_HUB_CACHE``, ``$HF_HOME/hub`` or below ``~/.cache``."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "hub"


def _known(model: Model, tried: list[str]) -> Architecture | None:
    if not isinstance(model.source, str):
        return None
    found = known_config(model.source)
    if found is not None:
        return Architecture.from_config(found)
    tried.append(f"none of the {len(KNOWN_CONFIGS)} models whose numbers are built in")
    return None
