"""Flags of commands that take a recipe: the recipe's own parameters, beside those of the command."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.errors import FlowError


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C before a run is under way, and a second signal within one, end the command with the status of the signal."""
    try:
        yield
    except KeyboardInterrupt as error:
        if _tells(error):
            print("Ended at once. What the last checkpoint holds is whole.", file=sys.stderr)
        raise typer.Exit(SIGNAL_BASE + getattr(error, "signal_number", signal.SIGINT)) from None


def experiment_of(file: Path, arguments: dict[str, Any]) -> Any:
    from flowrl.recipes import build

    return build(_load(file), arguments)


_loaded: dict[Path, Callable[..., Any]] = {}


def _load(file: Path) -> Callable[..., Any]:
    from flowrl.recipes import load_recipe

    path = file.resolve()
    if path not in _loaded:
        _loaded[path] = load_recipe(file)
    return _loaded[path]


def parameters_of(file: Path) -> dict[str, inspect.Parameter]:
    from flowrl.recipes import parameters

    return parameters(_load(file))


#: Flags of ``flowrl run`` that a recipe may have as a parameter, too: it then gets to know them.
_SHARED = ("num_steps", "seed")


def with_recipe_flags(ctx: typer.Context, file: Path, start: Callable[..., None]) -> None:
    """Call ``start(arguments, **flags)`` with the recipe's parameters and the command's own flags, both from the rest of
    the command line."""
    if str(file) == "--help":
        print(ctx.get_help())
        return
    with interruptible():
        recipe = _load(file)
    theirs = parameters_of(file)
    own = dict(list(inspect.signature(start, eval_str=True).parameters.items())[1:])
    for name in theirs.keys() & own.keys() - set(_SHARED):
        raise FlowError(
            f"Recipe {recipe.__name__} has a parameter {name!r}, which is a flag of `flowrl {ctx.info_name}`",
            expected=f"another name; only {' and '.join(_SHARED)} may be both",
            received=name,
        )
    for name in theirs.keys() & own.keys():
        own[name] = _with_default_of(theirs.pop(name), own[name])
    flags = _as_flags(recipe, theirs)

    def command(**values: Any) -> None:
        with interruptible():
            start({k: values[k] for k in theirs}, **{k: values[k] for k in own})

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*flags, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values())]
    )
    command.__annotations__ = {p.name: p.annotation for p in flags} | {k: p.annotation for k, p in own.items()}
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    inner.command(help=_description(recipe))(command)
    raise typer.Exit(inner(args=ctx.args, prog_name=f"flowrl {ctx.info_name} {file}", standalone_mode=False) or 0)


def _description(recipe: Callable[..., Any]) -> str:
    """Its docstring up to the section of arguments, which the flags show."""
    return (inspect.getdoc(recipe) or "").split("\nArgs:\n")[0].strip()


def _as_flags(recipe: Callable[..., Any], theirs: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """The recipe's parameters as options, those without a default too (which typer would take by position)."""
    from flowrl.recipes import parameter_help

    helps = parameter_help(recipe)
    flags = []
    for name, parameter in theirs.items():
        annotation = parameter.annotation
        if typing.get_origin(annotation) is not Annotated:
            annotation = Annotated[annotation, typer.Option(help=helps.get(name))]
        flags.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))
    return flags


def _with_default_of(theirs: inspect.Parameter, own: inspect.Parameter) -> inspect.Parameter:
    """The command's own flag, whose help tells the recipe's default."""
    if theirs.default is theirs.empty or theirs.default is None:
        return own
    kind, option = typing.get_args(own.annotation)[:2]
    shown = typer.Option(help=f"{option.help}  [default: {theirs.default}]", show_default=False)
    return own.replace(annotation=Annotated[kind, shown])
