"""Recipes: a Python function whose annotated parameters become flags, and which returns an Experiment."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec

from flowrl.errors import FlowError
from flowrl.run import Experiment

P = ParamSpec("P")

FLAG_TYPES = "int, float, str, bool, Path, an Enum, a Literal of texts, a list of them, or one of these or None"


def recipe(function: Callable[P, Experiment]) -> Callable[P, Experiment]:
    """Mark the function of a file that ``flowrl run FILE`` calls.

    Its parameters become flags; an ``Args:`` section of its docstring explains them in ``--help``.

    Example::

        @flowrl.recipe
        def main(group_size: int = 8, learning_rate: float = 1e-5) -> flowrl.Experiment:
            \"\"\"GRPO on my task.\"\"\"
            ...

        # flowrl run my_recipe.py --group-size 16 --num-steps 100
    """
    function.__flowrl_recipe__ = True  # type: ignore[attr-defined]
    return function


def load_recipe(path: Path) -> Callable[..., Experiment]:
    """The recipe function of a Python file.

    Raises:
        FlowError: there is no such file, or it has no recipe, or several.
    """
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise FlowError(
            f"There is no recipe {path}",
            expected="a Python file",
            received="a folder" if path.is_dir() else "no such file",
            do=f"choose one of {', '.join(near)}" if near else "`flowrl recipes` lists what there is",
        )
    return _only(_recipes_of(_import_file(path)), path)


def _only(own: Sequence[Callable[..., Experiment]], path: Path) -> Callable[..., Experiment]:
    if len(own) != 1:
        raise FlowError(
            f"{path} does not hold one recipe",
            expected="one function decorated with @flowrl.recipe",
            received=", ".join(v.__name__ for v in own) or "none",
            do="decorate the function that returns the Experiment" if not own else "put each into a file of its own",
        )
    return own[0]


def _recipes_of(module: ModuleType) -> list[Callable[..., Experiment]]:
    """The recipes of a module: its own, or those that it imports where it has none."""
    found = [v for v in vars(module).values() if getattr(v, "__flowrl_recipe__", False)]
    return [v for v in found if v.__module__ == module.__name__] or found


def recipe_folder() -> Path:
    """The folder that ``flowrl recipes`` lists when none is named: ``recipes`` here, else the one of the clone that this
    package runs from.

    Raises:
        FlowError: there is neither.
    """
    for folder in (Path("recipes"), Path(__file__).parents[1] / "recipes"):
        if any(folder.glob("*.py")):
            return folder
    raise FlowError(
        "There are no recipes here",
        expected="a folder recipes/ in this directory: the repository has one, and so has the source distribution",
        received=f"no such folder in {Path.cwd()}; an installed package brings none along",
        do="run this in a clone, or name a folder: flowrl recipes FOLDER",
    )


def list_recipes(folder: Path) -> list[tuple[Path, str]]:
    """Each recipe of a folder with the first line of its docstring. Files that hold none are left out; of one that cannot be
    imported the line says so.

    Raises:
        FlowError: there is none.
    """
    listed: list[tuple[Path, str]] = []
    for file in sorted(p for p in folder.glob("*.py") if not p.name.startswith("_")):
        try:
            own = _recipes_of(_import_file(file))
            doc = inspect.getdoc(_only(own, file)) or "no description" if own else ""
        except Exception as error:  # one file that cannot be imported must not hide the others
            doc = f"not a recipe ({type(error).__name__}: {error})"
        if doc:
            listed.append((file, doc.splitlines()[0]))
    if not listed:
        raise FlowError(
            f"There are no recipes in {folder}",
            expected="Python files with a @flowrl.recipe",
            received="none" if folder.is_dir() else "no such folder",
        )
    return listed


def _import_file(path: Path) -> ModuleType:
    """Import as `python FILE` does: files beside it can be imported by name."""
    import cloudpickle

    name = f"flowrl_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FlowError(f"{path} is not a Python file", expected="a name that ends in .py", received=path.name)
    module = importlib.util.module_from_spec(spec)
    folder = path.parent.resolve()
    before = set(sys.modules)
    sys.modules[name] = module
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "no known parent package" in str(error):
            raise FlowError(
                f"{path} imports a file beside it as if it were in a package",
                expected="`import helper` or `from helper import …`",
                received=str(error),
                do="leave out the dot: a recipe is run as `python FILE` is",
            ) from error
        raise
    # No other process can import these by name: what they define travels by value.
    for each in [name, *(set(sys.modules) - before)]:
        file = getattr(sys.modules[each], "__file__", None)
        if file is not None and Path(file).resolve().is_relative_to(folder) and "site-packages" not in file:
            cloudpickle.register_pickle_by_value(sys.modules[each])
    return module


def build(function: Callable[..., Experiment], arguments: dict[str, Any]) -> Experiment:
    """Call a recipe.

    Raises:
        FlowError: it returns something else than an Experiment.
    """
    experiment = function(**arguments)
    if not isinstance(experiment, Experiment):
        raise FlowError(
            f"Recipe {function.__name__} returned no Experiment",
            expected="flowrl.Experiment(flow=…, data=…, num_steps=…)",
            received=type(experiment).__name__,
        )
    return experiment


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a recipe by name, annotations resolved.

    Raises:
        FlowError: a parameter has no annotation, or one that no flag can carry.
    """
    signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if starred or parameter.kind is parameter.POSITIONAL_ONLY or not _is_flag_type(parameter.annotation):
            raise FlowError(
                f"Parameter {str(parameter)!r} of recipe {function.__name__} cannot become a flag",
                expected=FLAG_TYPES,
                received="no annotation" if parameter.annotation is parameter.empty else str(parameter.annotation),
                do="annotate it, or take it out of the parameters",
            )
    return dict(signature.parameters)


def _is_flag_type(annotation: Any) -> bool:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _is_flag_type(inner[0])
    if origin in (typing.Union, types.UnionType):
        rest = [t for t in inner if t is not type(None)]
        return len(rest) == 1 and _is_flag_type(rest[0])
    if origin is typing.Literal:
        return all(isinstance(v, str) for v in inner)
    if origin is list:
        return len(inner) == 1 and _is_flag_type(inner[0])
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return True
    return annotation in (int, float, str, bool, Path)


def parameter_help(function: Callable[..., Any]) -> dict[str, str]:
    """What the ``Args:`` section of a docstring says of each parameter."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", inspect.getdoc(function) or "", re.MULTILINE)
    found: dict[str, str] = {}
    name, indent = "", None
    for line in section.group(1).splitlines() if section else ():
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        entry = re.match(r"\s*(\w+)(?: \(.*?\))?:\s*(.*)", line)
        if entry is not None and depth == indent:
            name = entry.group(1)
            found[name] = entry.group(2)
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found
