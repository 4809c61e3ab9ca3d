"""The ``flowrl`` command."""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.compiler.strategy import Strategy
from flowrl.errors import FlowError, nearest

if TYPE_CHECKING:
    from flowrl.run import RunResult

#: A mistake on the command line: click's class, or that of the copy of click which newer versions of typer bring along.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Dataflow for reinforcement learning of language models.",
)

#: How the command ends. An error that a user can cause is ERROR and one message, a mistake on the command line USAGE.
ERROR, USAGE, TIME_LIMIT = 1, 2, 124
#: 130 after Ctrl-C, 143 after SIGTERM, as shells count them.
SIGNAL_BASE = 128


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and exit."""
    given = sys.argv[1:] if arguments is None else arguments
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(run_command(given))
    from flowrl.runtime.spmd import end_now, tell_once

    tell_once()
    status = run_command(given)
    if status == ERROR:
        end_now(status)
    sys.exit(status)


def run_command(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    try:
        return int(app(args=list(arguments), prog_name="flowrl", standalone_mode=False) or 0)
    except FlowError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        if _tells(error):
            print(f"error: {error}{notes}", file=sys.stderr)
        return ERROR
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return USAGE
        where = f" (`{error.ctx.command_path} --help` lists what there is)" if error.ctx is not None else ""
        if not _tells(error):
            return USAGE
        print(f"error: {_usage_message(error)}{where}", file=sys.stderr)
        return USAGE


def _tells(error: BaseException) -> bool:
    """Whether this process is the one of several ranks that says so."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from flowrl.runtime.ranks import tells

    return tells(error)


def _usage_message(error: Any) -> str:
    wrong = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        flags = [o for p in error.ctx.command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        return f"No such option: {wrong}; {nearest(str(wrong), flags)}"
    return error.format_message()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C before a run is under way, and a second signal within one, end the command with the status of the signal."""
    try:
        yield
    except KeyboardInterrupt as error:
        if _tells(error):
            print("Ended at once. What the last checkpoint holds is whole.", file=sys.stderr)
        raise typer.Exit(SIGNAL_BASE + getattr(error, "signal_number", signal.SIGINT)) from None


class _Sharding(enum.Enum):
    full = "full"
    optimizer = "optimizer"
    none = "none"


class _Attention(enum.Enum):
    auto = "auto"
    sdpa = "sdpa"
    flex = "flex"
    flash = "flash"


_RECIPE_ARGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(
    context_settings=_RECIPE_ARGS,
    help="Train: run the recipe in FILE. `flowrl run FILE --help` lists its parameters.",
)
def run(ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    def start(
        arguments: dict[str, Any],
        num_steps: Annotated[int | None, typer.Option(help="Iterations in all.")] = None,
        out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<recipe>-<n>.")] = None,
        runtime: Annotated[
            str, typer.Option(help="What executes it: local; or spmd, all ranks that torchrun started.")
        ] = "local",
        resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
        seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
        time_limit: Annotated[float | None, typer.Option(help="Seconds after which to end cleanly.")] = None,
        checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
        dump_step: Annotated[
            list[int] | None, typer.Option(help="Keep this step for `flowrl replay`; may be repeated.")
        ] = None,
        tensor_parallel: Annotated[
            int | None, typer.Option(help="Ranks that share each layer; all others are data parallel.")
        ] = None,
        sharding: Annotated[
            _Sharding | None, typer.Option(help="What is sharded over data-parallel ranks.", show_choices=True)
        ] = None,
        attention: Annotated[
            _Attention | None, typer.Option(help="How attention over rows is computed.", show_choices=True)
        ] = None,
        deadline: Annotated[
            float | None, typer.Option(help="Seconds that one call may take on several ranks before they are ended.")
        ] = None,
    ) -> None:
        _check_launch(runtime)
        if resume and out is None:
            raise FlowError("--resume needs the run folder", expected="--out FOLDER", received="nothing")
        known = _parameters(file)
        shared = {k: v for k, v in {"num_steps": num_steps, "seed": seed}.items() if k in known and v is not None}
        experiment = _experiment(file, {**arguments, **shared})
        if seed is None and "seed" in known and "seed" not in experiment.options:
            default = known["seed"].default
            seed = default if isinstance(default, int) else None  # one seed: the recipe's own is the run's, too
        given = {
            "num_steps": num_steps,
            "out": out,
            "seed": seed,
            "time_limit": time_limit,
            "checkpoint_every": checkpoint_every,
            "dump_steps": tuple(dump_step) if dump_step else None,
            "strategy": _strategy(experiment.options.get("strategy"), tensor_parallel, sharding, attention),
            "deadline": deadline,
        }
        options = {k: v for k, v in given.items() if v is not None}
        options.setdefault("name", experiment.options.get("name", file.stem))
        result = experiment.run(runtime=runtime, resume=resume, **options)
        if result.rank == 0:
            _say_end(result)
        if result.status == "interrupted":
            raise typer.Exit(SIGNAL_BASE + (result.signal_number or 0))
        if result.status == "time limit":
            raise typer.Exit(TIME_LIMIT)

    _with_recipe_flags(ctx, file, start)


def _say_end(result: RunResult) -> None:
    end = f"{result.status} after {result.steps} steps. Run folder: {result.folder}."
    print(end + (f" Report: {result.report}" if result.report.exists() else ""))


def _check_launch(runtime: str) -> None:
    """Refuse to run once in each of several processes.

    Raises:
        FlowError: torchrun started several, and the runtime is not for them.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if runtime == "local" and ranks != "1":
        raise FlowError(
            f"{ranks} processes would each run the whole of this recipe",
            expected="--runtime spmd under torchrun",
            received=f"--runtime local and WORLD_SIZE={ranks}",
            do="add --runtime spmd, or run `flowrl run` without torchrun",
        )


def _strategy(
    recipes: Strategy | None, tensor_parallel: int | None, sharding: _Sharding | None, attention: _Attention | None
) -> Strategy | None:
    """The recipe's strategy for all Models, changed by flags."""
    given = {
        "tensor_parallel": tensor_parallel,
        "sharding": None if sharding is None else sharding.value,
        "attention": None if attention is None else attention.value,
    }
    changed: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    return replace(recipes or Strategy(), **changed) if changed else None


@app.command(
    context_settings=_RECIPE_ARGS,
    help="Check the flow of the recipe in FILE and its data; exits with 1 when something is wrong.",
)
def check(ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    def start(arguments: dict[str, Any]) -> None:
        experiment = _experiment(file, arguments)
        flows = {"training flow": experiment.flow} | {f"evaluation {e.name!r}": e.flow for e in experiment.evaluations}
        reports = {name: flow.check() for name, flow in flows.items()}
        for name, report in reports.items():
            print(f"{name}: {report}")
        if not all(r.ok for r in reports.values()):
            raise typer.Exit(ERROR)
        experiment.check_data()

    _with_recipe_flags(ctx, file, start)


@app.command(help="Run one step of a run again, alone, and compare it with what was recorded.")
def replay(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int, typer.Argument(metavar="STEP", help="From 1.")],
) -> None:
    from flowrl.runtime.replay import replay_step

    with _interruptible():
        result = replay_step(run_folder, step)
    print(result.table())
    if not result.equal:
        raise typer.Exit(ERROR)


@app.command(help="List the recipes in FOLDER (by default recipes/, here or in the clone) with one line each.")
def recipes(folder: Annotated[Path | None, typer.Argument(metavar="FOLDER")] = None) -> None:
    from flowrl.recipes import list_recipes, recipe_folder

    for file, line in list_recipes(recipe_folder() if folder is None else folder):
        print(f"{file}: {line}")


@app.command(help="Say what is installed, what works here, and what to type; exits with 1 when something is wrong.")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="All of it, for programs.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds that each trial may take.", min=1)] = 180.0,
    try_engines: Annotated[bool, typer.Option("--try/--no-try", help="Really run each engine.")] = True,
) -> None:
    from rich.console import Console

    from flowrl.doctor import examine

    with _status("what was tried has ended") as show:
        report = examine(deadline=deadline, try_engines=try_engines, show=show)
    if json:
        import json as json_module

        print(json_module.dumps(report.to_json(), indent=1))
    else:
        from flowrl.diagnostics.display import print_report

        print_report(report, Console())
    if not report.ok:
        raise typer.Exit(ERROR)


@app.command(help="Measure this machine (matrix products, memory, links, the engine) into a file for estimates.")
def calibrate(
    out: Annotated[Path | None, typer.Option(help="The file; by default in the user's cache folder.")] = None,
    model: Annotated[str, typer.Option(help="tiny, smollm2, a folder, or a name on a hub.")] = "tiny",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<index>; by default the best.")] = None,
) -> None:
    from rich.console import Console

    from flowrl.calibrate import calibrate as measure
    from flowrl.calibrate import check_writable
    from flowrl.calibration import default_path
    from flowrl.diagnostics.display import print_calibration

    path = default_path() if out is None else out
    with _status(f"{path} is as it was") as show:
        check_writable(path)
        measured = measure(model, quick=quick, device=device, show=show)
        measured.save(path)
    print_calibration(measured, Console())
    print(f"Written to {path}.")


@contextlib.contextmanager
def _status(interrupted: str) -> Iterator[Callable[[str], None]]:
    """Inside the body, a function that shows what happens now, on stderr; Ctrl-C says ``interrupted`` and exits."""
    from rich.console import Console

    console = Console(stderr=True)
    try:
        with console.status("") as status:
            yield (
                status.update if console.is_terminal else (lambda text: print(f"{text} …", file=sys.stderr, flush=True))
            )
    except KeyboardInterrupt:
        print(f"Interrupted: {interrupted}.", file=sys.stderr)
        raise typer.Exit(SIGNAL_BASE + signal.SIGINT) from None


@app.command(help="Print the version.")
def version() -> None:
    import flowrl

    print(flowrl.__version__)


# -- flags from recipes ----------------------------------------------------------------------------------------------


def _experiment(file: Path, arguments: dict[str, Any]) -> Any:
    from flowrl.recipes import build

    return build(_load(file), arguments)


_loaded: dict[Path, Callable[..., Any]] = {}


def _load(file: Path) -> Callable[..., Any]:
    from flowrl.recipes import load_recipe

    path = file.resolve()
    if path not in _loaded:
        _loaded[path] = load_recipe(file)
    return _loaded[path]


def _parameters(file: Path) -> dict[str, inspect.Parameter]:
    from flowrl.recipes import parameters

    return parameters(_load(file))


#: Flags of ``flowrl run`` that a recipe may have as a parameter, too: it then gets to know them.
_SHARED = ("num_steps", "seed")


def _with_recipe_flags(ctx: typer.Context, file: Path, start: Callable[..., None]) -> None:
    """Call ``start(arguments, **flags)`` with the recipe's parameters and the command's own flags, both from the rest of
    the command line."""
    if str(file) == "--help":
        print(ctx.get_help())
        return
    with _interruptible():
        recipe = _load(file)
    theirs = _parameters(file)
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
        with _interruptible():
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


if __name__ == "__main__":
    main()
