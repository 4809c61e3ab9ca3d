"""Recipes: a Python function whose annotated parameters become flags, and which returns an Experiment."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec

from flowrl.errors import FlowError
from flowrl.run import Experiment

P = ParamSpec("P")


def recipe(function: Callable[P, Experiment]) -> Callable[P, Experiment]:
    """Mark the function of a file that ``flowrl run FILE`` calls.

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
    module = _import_file(path)
    found = [v for v in vars(module).values() if getattr(v, "__flowrl_recipe__", False)]
    if len(found) != 1:
        raise FlowError(
            f"{path} does not hold one recipe",
            expected="one function decorated with @flowrl.recipe",
            received=f"{len(found)}",
            do="decorate the function that returns the Experiment",
        )
    return found[0]


def _import_file(path: Path) -> ModuleType:
    import cloudpickle

    name = f"flowrl_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # no other process can import it by this name
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
        if parameter.annotation is parameter.empty:
            raise FlowError(
                f"Parameter {parameter.name!r} of recipe {function.__name__} has no annotation",
                expected="int, float, str, bool, Path, Literal or an optional one of them",
                received="nothing",
            )
    return dict(signature.parameters)
