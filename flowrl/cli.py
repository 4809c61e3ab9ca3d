"""The ``flowrl`` command."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.errors import FlowError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Dataflow for reinforcement learning of language models.",
)

#: Exit statuses of a run that a signal ended, as shells count them.
_SIGNAL_BASE = 128


def main() -> None:
    """Run the command; an error that a user can cause is one message, not a traceback."""
    try:
        app()
    except FlowError as error:
        _fail(error)


def _fail(error: FlowError) -> None:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1)


_RECIPE_ARGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(
    context_settings=_RECIPE_ARGS,
    help="Train: run the recipe in FILE. `flowrl run FILE --help` lists its parameters.",
)
def run(ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    if str(file) == "--help":
        print(ctx.get_help())
        return

    def start(
        arguments: dict[str, Any],
        num_steps: Annotated[int | None, typer.Option(help="Iterations in all.")] = None,
        out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<recipe>-<n>.")] = None,
        runtime: Annotated[str, typer.Option(help="What executes it: local.")] = "local",
        resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
        seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
        time_limit: Annotated[float | None, typer.Option(help="Seconds after which to end cleanly.")] = None,
        checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
        dump_step: Annotated[
            list[int] | None, typer.Option(help="Keep this step for `flowrl replay`; may be repeated.")
        ] = None,
    ) -> None:
        experiment = _experiment(file, {**arguments, **_shared(file, num_steps=num_steps, seed=seed)})
        if resume and out is None:
            raise FlowError("--resume needs the run folder", expected="--out FOLDER", received="nothing")
        given = {
            "num_steps": num_steps,
            "out": out,
            "time_limit": time_limit,
            "checkpoint_every": checkpoint_every,
            "dump_steps": tuple(dump_step) if dump_step else None,
        }
        options = {k: v for k, v in given.items() if v is not None}
        options.setdefault("name", experiment.options.get("name", file.stem))
        result = experiment.run(runtime=runtime, resume=resume, seed=seed, **options)
        print(f"{result.status} after {result.steps} steps. Run folder: {result.folder}. Report: {result.report}")
        if result.signal_number is not None:
            raise SystemExit(_SIGNAL_BASE + result.signal_number)

    _with_recipe_flags(ctx, file, start)


@app.command(
    context_settings=_RECIPE_ARGS,
    help="Check the flow of the recipe in FILE; exits with 1 when it breaks a rule.",
)
def check(ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    def start(arguments: dict[str, Any]) -> None:
        experiment = _experiment(file, arguments)
        flows = {
            "training flow": experiment.flow,
            **{f"evaluation {e.name!r}": e.flow for e in experiment.evaluations},
        }
        reports = {name: flow.check() for name, flow in flows.items()}
        for name, report in reports.items():
            print(f"{name}: {report}")
        if not all(r.ok for r in reports.values()):
            raise SystemExit(1)

    _with_recipe_flags(ctx, file, start)


@app.command(help="Run one step of a run again, alone, and compare it with what was recorded.")
def replay(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int, typer.Argument(metavar="STEP", help="From 1.")],
) -> None:
    from flowrl.runtime.replay import replay_step

    result = replay_step(run_folder, step)
    print(result.table())
    if not result.equal:
        raise SystemExit(1)


@app.command(help="List the recipes in FOLDER with one line each.")
def recipes(folder: Annotated[Path, typer.Argument(metavar="FOLDER")] = Path("recipes")) -> None:
    from flowrl.recipes import load_recipe

    files = sorted(folder.glob("*.py"))
    if not files:
        raise FlowError(
            f"There are no recipes in {folder}",
            expected="Python files with a @flowrl.recipe",
            received="none",
        )
    for file in files:
        doc = inspect.getdoc(load_recipe(file)) or ""
        print(f"{file}: {doc.splitlines()[0] if doc else 'no description'}")


@app.command(help="Print the version.")
def version() -> None:
    import flowrl

    print(flowrl.__version__)


def _experiment(file: Path, arguments: dict[str, Any]) -> Any:
    from flowrl.recipes import build

    return build(_load(file), arguments)


_loaded: dict[Path, Callable[..., Any]] = {}


def _load(file: Path) -> Callable[..., Any]:
    from flowrl.recipes import load_recipe

    if file not in _loaded:
        _loaded[file] = load_recipe(file)
    return _loaded[file]


def _shared(file: Path, **values: Any) -> dict[str, Any]:
    """Flags of the command that the recipe has parameters for, too: it gets to know them."""
    from flowrl.recipes import parameters

    return {k: v for k, v in values.items() if k in parameters(_load(file)) and v is not None}


def _with_recipe_flags(ctx: typer.Context, file: Path, start: Callable[..., None]) -> None:
    """Call ``start(arguments, **flags)`` with the recipe's parameters and the command's own flags, both from the rest of
    the command line."""
    from flowrl.recipes import parameters

    own = dict(list(inspect.signature(start, eval_str=True).parameters.items())[1:])
    recipe = _load(file)
    theirs = {k: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for k, p in parameters(recipe).items() if k not in own}

    def command(**values: Any) -> None:
        start({k: values[k] for k in theirs}, **{k: values[k] for k in own})

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*theirs.values(), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values())]
    )
    command.__annotations__ = {k: p.annotation for k, p in (theirs | own).items()}
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command(help=inspect.getdoc(recipe))(command)
    inner(args=ctx.args, prog_name=f"flowrl {ctx.info_name} {file}")


if __name__ == "__main__":
    main()
