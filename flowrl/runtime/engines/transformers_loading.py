"""Models and tokenizers from a name, a folder or a live object, and errors that say what to do when there is none.

GGUF files take transformers most of a minute to convert. The converted model is kept in
``$XDG_CACHE_HOME/flowrl/converted`` (``~/.cache/flowrl/converted``), one folder for each file (path, size, time of
change), ``load_options``, dtype and version of transformers; delete the folder to be rid of them. Where it cannot be
written, the file is converted each time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from flowrl.errors import ModelError
from flowrl.models import Model
from flowrl.runtime.engines.transformers_adapters import require_peft
from flowrl.runtime.engines.transformers_quantization import quantised_options

logger = logging.getLogger("flowrl")

#: Load options that concern the model alone and that a tokenizer would refuse or ignore.
MODEL_ONLY = {
    "attn_implementation",
    "device_map",
    "dtype",
    "max_memory",
    "quantization_config",
    "torch_dtype",
    "use_safetensors",
}
#: Beside an exported model, its value heads.
VALUE_HEADS = "value_heads.safetensors"
#: Seconds that the Hugging Face Hub has to answer before we look on this machine alone.
HUB_TIMEOUT = 5.0


def load_module(model: Model, device: torch.device | None = None) -> PreTrainedModel:
    """The network of a Model, on the CPU, in its dtype: a causal language model, the body alone of a ValueModel, or the
    classifier of a RewardModel. A ValueModel's is a copy where the source is live: its trunk is its own, unless it has an
    adapter, which leaves the trunk as it is.

    Args:
        device: where a Model with ``quantization`` is loaded to, since it is quantised there.

    Raises:
        ModelError: there is no such model, it cannot be loaded, weights are missing from it, or this machine cannot
            quantise it as asked.
    """
    for problem in model.problems() if model.lora is not None or model.quantization is not None else ():
        raise ModelError(f"{model!r}: {problem}")
    if model.lora is not None:
        require_peft(model)
    if is_live(model.source):
        return _live_module(model)
    auto: Any = {"reward": AutoModelForSequenceClassification, "value": AutoModel}.get(model.kind, AutoModelForCausalLM)
    source, options = resolve(model)
    options.setdefault("dtype", getattr(torch, model.dtype))
    if model.kind == "reward":
        options.setdefault("num_labels", 1)
    if model.quantization is not None:
        options.update(quantised_options(model, source, options, device or torch.device("cpu")))
    with _loading(model), quiet():
        module, info = auto.from_pretrained(source, output_loading_info=True, **options)
    if getattr(model, "new_head", False):
        _zero_score_head(model, module)
    else:
        _check_loaded(model, module, info)
    _forget_quantisation(module)
    _refuse_training_quantised(model, module)
    return module


def load_tokenizer(model: Model) -> Any:
    """The tokenizer of a Model: the one given, else the source's own.

    Raises:
        ModelError: there is none.
    """
    given = model.tokenizer
    if given is not None and not isinstance(given, str | os.PathLike):
        return given
    if given is None and is_live(model.source):
        raise ModelError(
            f"{model!r} is a live model without a tokenizer",
            expected="a tokenizer, where text is read or written",
            received="None",
            do="pass tokenizer= a live tokenizer, a name or a folder",
        )
    if given is None:
        source, options = resolve(model)
    else:
        source, options = _expand(given), {}
        if not os.path.isdir(source):
            _check_source(model, source, options)
    options = {k: v for k, v in options.items() if k not in MODEL_ONLY}
    with _loading(model, "its tokenizer"), quiet():
        return AutoTokenizer.from_pretrained(source, **options)


def load_value_head(model: Model, name: str, head: torch.nn.Linear) -> None:
    """Fill a new head from the source where that is a folder which an engine exported with a head of this name."""
    if is_live(model.source) or not (file := Path(_expand(model.source)) / VALUE_HEADS).is_file():
        return
    from safetensors.torch import load_file

    tensors = load_file(file)
    prefix = f"{name}."
    found = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    if found:
        head.load_state_dict(found)


def is_live(source: Any) -> bool:
    """Whether a source is an object rather than a name."""
    return not isinstance(source, str | os.PathLike)


def resolve(model: Model) -> tuple[str, dict[str, Any]]:
    """Where to load from and with which options: the converted folder where the source is a GGUF file."""
    source, options = _expand(model.source), dict(model.load_options)
    _check_source(model, source, options)
    if options.get("gguf_file"):
        converted = _converted(model, source, options)
        if converted is not None:
            del options["gguf_file"]
            return str(converted), {k: v for k, v in options.items() if k not in ("revision", "subfolder")}
    return source, options


def _expand(source: str | os.PathLike[str]) -> str:
    return os.path.expanduser(os.fspath(source))


def _live_module(model: Model) -> PreTrainedModel:
    module = model.source
    if not isinstance(module, torch.nn.Module) or not hasattr(module, "config"):
        raise ModelError(
            f"{model!r} cannot be loaded from a {type(module).__name__}",
            expected="a model name, a folder, or a live PreTrainedModel",
            received=f"{type(module).__name__}",
        )
    if hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
        raise ModelError(
            f"{model!r} is a live model that peft has wrapped",
            expected="the base, and the adapter by lora=",
            received=type(module).__name__,
            do="save the adapter, and give the base with lora=LoRA(adapter_source=folder); or merge_and_unload() it",
        )
    if model.kind == "value":
        trunk: Any = getattr(module, "base_model", module)
        module = copy.deepcopy(trunk) if model.lora is None else _sharing_tensors(trunk)
    elif getattr(model, "new_head", False):
        module = _classifier_on(module)
    elif model.lora is not None:
        module = _sharing_tensors(module)
    dtype = getattr(torch, model.dtype)
    for parameter in module.parameters():  # buffers keep their precision: rotary frequencies need it
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return module  # type: ignore[return-value]


def _sharing_tensors(module: Any) -> Any:
    """The same network of other modules: what is put into it does not reach the one that was given, but its numbers, which
    an adapter never changes, are not copied."""
    memo: dict[int, Any] = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    memo |= {id(b): b for b in module.buffers()}
    return copy.deepcopy(module, memo)


def _classifier_on(module: Any) -> Any:
    """A sequence classifier with a copy of a live language model's body, and a head of zeros."""
    config = copy.deepcopy(module.config)
    config.num_labels = 1
    with quiet():
        classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.base_model.load_state_dict(module.base_model.state_dict())
    torch.nn.init.zeros_(classifier.score.weight)
    return classifier.eval()


def _is_classifier(model: Model) -> bool:
    """Whether the source of a Model holds a sequence classifier; a reward model with a new head starts from a language
    model."""
    return model.kind == "reward" and not getattr(model, "new_head", False)


def _zero_score_head(model: Model, module: Any) -> None:
    head = getattr(module, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"{model!r}: a {type(module).__name__} cannot be given a new head",
            expected="a sequence classifier whose head is a layer called 'score'",
            received=type(head).__name__,
            do="take a source that is a sequence classifier, without new_head",
        )
    torch.nn.init.zeros_(head.weight)
    if head.bias is not None:
        torch.nn.init.zeros_(head.bias)


def _check_loaded(model: Model, module: Any, info: Any) -> None:
    """Weights that were not in the files are random: nobody wants to train or score with those unawares."""
    missing = sorted(info["missing_keys"]) if isinstance(info, Mapping) else sorted(info.missing_keys)
    if not missing:
        return
    what = "a sequence classifier" if model.kind == "reward" else "a causal language model"
    raise ModelError(
        f"{model!r}: {os.fspath(model.source)!r} lacks weights",
        expected=f"all weights of {what} ({type(module).__name__})",
        received=f"{len(missing)} missing: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}",
        do=f"take a source that holds {what}",
    )


def _forget_quantisation(module: Any) -> None:
    """A dequantised model is an ordinary one, but says otherwise and then refuses to be saved."""
    if getattr(module, "quantization_method", None) is None or "gguf" not in str(module.quantization_method).lower():
        return
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(module, name):
            delattr(module, name)
    module.is_quantized = False
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config


def _refuse_training_quantised(model: Model, module: Any) -> None:
    """A source may be quantised without anybody having said so."""
    if model.quantization is None and model.trainable and getattr(module, "is_quantized", False):
        method = getattr(module, "quantization_method", "quantised")
        raise ModelError(
            f"{model!r} is trainable, and its source holds quantised weights",
            expected="lora=LoRA(…) and quantization=, or trainable=False",
            received=str(getattr(method, "value", method)),
            do="train an adapter on it, or take a source that is not quantised",
        )


# -- is it there? ------------------------------------------------------------------------------------------------------


def _check_source(model: Model, source: str, options: dict[str, Any]) -> None:
    """Refuse a folder or a name that does not exist, and keep a machine without a network from waiting for one."""
    if os.path.isdir(source):
        if not options.get("gguf_file") and not (Path(source) / "config.json").is_file():
            raise ModelError(
                f"{model!r}: folder {source!r} holds no model",
                expected="a HuggingFace directory with a config.json, or load_options={'gguf_file': …}",
                received=", ".join(sorted(os.listdir(source))[:5]) or "an empty folder",
                do="check the path, or download or export the model there",
            )
        return
    looks_like_path = source.startswith((".", os.sep)) or source.count("/") > 1 or os.path.exists(source)
    if looks_like_path:
        raise ModelError(
            f"{model!r}: there is no folder {source!r}",
            expected="a HuggingFace directory, or a model name such as 'Qwen/Qwen3-0.6B'",
            received="a path that is not a folder" if os.path.exists(source) else "a path that does not exist",
            do="check the path, or download or export the model there",
        )
    if not options.get("local_files_only"):
        options.update(_ask_hub(model, source, options))


def _ask_hub(model: Model, source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a name of the Hub needs: ``local_files_only`` where the Hub cannot be reached."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if constants.is_offline_mode():
        return {"local_files_only": True}
    try:
        HfApi().model_info(source, revision=options.get("revision"), token=options.get("token"), timeout=HUB_TIMEOUT)
    except GatedRepoError as error:
        raise ModelError(
            f"{model!r}: {source!r} is gated",
            expected="access to its files",
            received=_first_line(error),
            do="accept its licence on the Hugging Face Hub and log in with `hf auth login`",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _not_found(model, source, "the Hugging Face Hub knows no such model") from error
    except Exception:  # no network, a proxy, a Hub that is down: whatever is on this machine must do
        return {"local_files_only": True}
    return {}


def _not_found(model: Model, source: str, received: str) -> ModelError:
    return ModelError(
        f"{model!r} cannot be loaded: there is no model {source!r}",
        expected="a folder, or the name of a model on the Hugging Face Hub or in this machine's cache of it",
        received=received,
        do=f"check the name; without a network, run `hf download {source}` where there is one, or pass a folder",
    )


@contextlib.contextmanager
def _loading(model: Model, what: str = "its weights") -> Iterator[None]:
    """Turn whatever a loader raises into one error that names the Model."""
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        if not os.path.isdir(_expand(model.source)) and what == "its weights":
            raise _not_found(model, os.fspath(model.source), _first_line(error)) from error
        raise _unloadable(model, what, error) from error
    except Exception as error:
        raise _unloadable(model, what, error) from error


def _unloadable(model: Model, what: str, error: Exception) -> ModelError:
    return ModelError(
        f"{model!r}: {what} cannot be loaded from {os.fspath(model.source)!r}",
        expected="files that this version of transformers reads",
        received=f"{type(error).__name__}: {_first_line(error)}",
        do="check the files and load_options",
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


# -- converted GGUF files ----------------------------------------------------------------------------------------------


def _converted(model: Model, source: str, options: Mapping[str, Any]) -> Path | None:
    """The folder of the converted file, made now if it is not there; None where it cannot be written."""
    file = _gguf_path(model, source, options)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowrl" / "converted"
    stat = file.stat()
    key = json.dumps(
        [str(file.resolve()), stat.st_size, stat.st_mtime_ns, sorted((k, str(v)) for k, v in options.items())]
        + [_is_classifier(model), model.dtype, transformers.__version__]
    )
    target = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if (target / "config.json").is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cache))
    except OSError as error:
        logger.info("%s cannot be written (%s): %s is converted each time", cache, error, file.name)
        return None
    try:
        _convert(model, source, options, work)
        work.rename(target)
    except OSError as error:
        if (target / "config.json").is_file():  # another process was quicker
            return target
        logger.info("%s cannot be written (%s): %s is converted each time", cache, error, file.name)
        return None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(model: Model, source: str, options: Mapping[str, Any], folder: Path) -> None:
    auto: Any = AutoModelForSequenceClassification if _is_classifier(model) else AutoModelForCausalLM
    with _converting(model), quiet():
        more = {"dtype": getattr(torch, model.dtype), **options}
        module, info = auto.from_pretrained(source, output_loading_info=True, **more)
        tokenizer = AutoTokenizer.from_pretrained(source, **{k: v for k, v in options.items() if k not in MODEL_ONLY})
    _check_loaded(model, module, info)
    _forget_quantisation(module)
    with quiet():
        tokenizer.save_pretrained(folder)
        module.save_pretrained(folder)


@contextlib.contextmanager
def _converting(model: Model) -> Iterator[None]:
    """As :func:`_loading`, but an OSError of the loader must not look like a cache that cannot be written."""
    try:
        yield
    except Exception as error:
        raise _unloadable(model, "its GGUF file", error) from error


def _gguf_path(model: Model, source: str, options: Mapping[str, Any]) -> Path:
    name = str(options["gguf_file"])
    if os.path.isdir(source):
        file = Path(source) / str(options.get("subfolder", "")) / name
        if not file.is_file():
            there = sorted(p.name for p in Path(source).glob("*.gguf"))
            raise ModelError(
                f"{model!r}: folder {source!r} has no file {name!r}",
                expected="the GGUF file that load_options names",
                received=f"the GGUF files {', '.join(there)}" if there else "no GGUF file",
                do="correct gguf_file in load_options",
            )
        return file
    from transformers.utils.hub import cached_file

    names = ("revision", "token", "subfolder", "local_files_only", "cache_dir")
    with _loading(model):
        path = cached_file(source, name, **{k: options[k] for k in names if k in options})
    assert path is not None
    return Path(path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no chatter of transformers inside the body."""
    from transformers import modeling_gguf_pytorch_utils

    gguf_reader: Any = modeling_gguf_pytorch_utils
    enabled = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    bar = getattr(gguf_reader, "tqdm", None)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    gguf_reader.tqdm = lambda items, **settings: items  # a plain tqdm, which has no other switch
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        transformers_logging.set_verbosity(verbosity)
        if enabled:
            transformers_logging.enable_progress_bar()
