"""Every loss and every advantage there is: subclasses are found, nothing is registered by hand."""

from __future__ import annotations

import dis
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any

from flowrl import nodes
from flowrl.annotations import edge_types
from flowrl.batches import Advantages
from flowrl.nodes.base import Node
from flowrl.nodes.loss import Loss


def registered_losses() -> tuple[type[Loss], ...]:
    """Every concrete subclass of :class:`Loss` that has been defined, those made by ``@flowrl.loss`` included, by module
    and name. A class is concrete if it can be called and none of its methods is left to be written (raises
    ``NotImplementedError`` whatever it is given).

    Example::

        mine = [loss for loss in registered_losses() if loss.__module__ == __name__]
    """
    return tuple(cls for cls in _concrete(Loss) if issubclass(cls, Loss))


def registered_advantages() -> tuple[type[Node], ...]:
    """Every concrete node that returns ``Advantages``, those made by ``@flowrl.node`` included, by module and name."""
    return tuple(cls for cls in _concrete(Node) if edge_types(cls.output_type)[0] == (Advantages,))


def _concrete(base: type[Node]) -> list[type[Node]]:
    _load_nodes()
    found = {cls for cls in _subclasses(base) if cls.ports and not _unwritten(cls)}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


@cache
def _load_nodes() -> None:
    """Import every module of nodes: a class is found only once it is defined."""
    for module in pkgutil.iter_modules(nodes.__path__):
        importlib.import_module(f"{nodes.__name__}.{module.name}")


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _unwritten(cls: type[Node]) -> list[str]:
    """The methods that a subclass still has to write."""
    functions = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("__")}
    return [name for name, value in functions.items() if inspect.isfunction(value) and _only_raises(value)]


def _only_raises(function: Any) -> bool:
    """Whether a function does nothing but raise NotImplementedError."""
    code = function.__code__
    if "NotImplementedError" not in code.co_names:
        return False
    return not any(step.opname.startswith(("RETURN", "YIELD")) for step in dis.get_instructions(code))
