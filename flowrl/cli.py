"""The ``flowrl`` command."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.compiler.strategy import Strategy
from flowrl.errors import FlowError, nearest
from flowrl.recipe_flags import SIGNAL_BASE, experiment_of, interruptible, parameters_of, tells, with_recipe_flags

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
        if tells(error):
            print(f"error: {error}{notes}", file=sys.stderr)
        return ERROR
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return USAGE
        where = f" (`{error.ctx.command_path} --help` lists what there is)" if error.ctx is not None else ""
        if not tells(error):
            return USAGE
        print(f"error: {_usage_message(error)}{where}", file=sys.stderr)
        return USAGE


def _usage_message(error: Any) -> str:
    wrong = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        flags = [o for p in error.ctx.command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        return f"No such option: {wrong}; {nearest(str(wrong), flags)}"
    return error.format_message()


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
        strategy: Annotated[
            str | None, typer.Option(help="auto: the compiler chooses how each Model is held, by its estimates.")
        ] = None,
        deadline: Annotated[
            float | None, typer.Option(help="Seconds that one call may take on several ranks before they are ended.")
        ] = None,
    ) -> None:
        _check_launch(runtime)
        if resume and out is None:
            raise FlowError("--resume needs the run folder", expected="--out FOLDER", received="nothing")
        known = parameters_of(file)
        shared = {k: v for k, v in {"num_steps": num_steps, "seed": seed}.items() if k in known and v is not None}
        experiment = experiment_of(file, {**arguments, **shared})
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
            "strategy": _strategy(experiment.options.get("strategy"), strategy, tensor_parallel, sharding, attention),
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

    with_recipe_flags(ctx, file, start)


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
    recipes: Strategy | str | None,
    chosen: str | None,
    tensor_parallel: int | None,
    sharding: _Sharding | None,
    attention: _Attention | None,
) -> Strategy | str | None:
    """The recipe's strategy for all Models, changed by flags; "auto" leaves the choice to the compiler.

    Raises:
        FlowError: ``chosen`` is something else, or is given together with other flags.
    """
    if chosen is not None:
        if chosen != "auto" or (tensor_parallel, sharding, attention) != (None, None, None):
            raise FlowError(
                "--strategy cannot be meant so",
                expected="--strategy auto by itself, or --tensor-parallel, --sharding and --attention without it",
                received=f"--strategy {chosen}" + (" and other flags of a strategy" if chosen == "auto" else ""),
            )
        return "auto"
    given = {
        "tensor_parallel": tensor_parallel,
        "sharding": None if sharding is None else sharding.value,
        "attention": None if attention is None else attention.value,
    }
    changed: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    return replace(recipes if isinstance(recipes, Strategy) else Strategy(), **changed) if changed else None


@app.command(
    context_settings=_RECIPE_ARGS,
    help="Check the flow of the recipe in FILE and its data; exits with 1 when something is wrong.",
)
def check(ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    def start(arguments: dict[str, Any]) -> None:
        experiment = experiment_of(file, arguments)
        flows = {"training flow": experiment.flow} | {f"evaluation {e.name!r}": e.flow for e in experiment.evaluations}
        reports = {name: flow.check() for name, flow in flows.items()}
        for name, report in reports.items():
            print(f"{name}: {report}")
        if not all(r.ok for r in reports.values()):
            raise typer.Exit(ERROR)
        experiment.check_data()

    with_recipe_flags(ctx, file, start)


@app.command(
    context_settings=_RECIPE_ARGS,
    help="Say where every call of the recipe in FILE would run on a cluster, what that takes, and why; takes no device.",
)
def plan(ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    def start(
        arguments: dict[str, Any],
        cluster: Annotated[
            str | None, typer.Option(help="nodes×devices:name, as in 16x8:H100; pools joined by +; or a YAML file.")
        ] = None,
        prompt_tokens: Annotated[float | None, typer.Option(help="Mean tokens of a prompt.")] = None,
        response_tokens: Annotated[float | None, typer.Option(help="Mean tokens of a response.")] = None,
        longest_response: Annotated[float | None, typer.Option(help="Tokens of the longest response.")] = None,
        calibration: Annotated[
            Path | None, typer.Option(help="A file of `flowrl calibrate`, in place of data sheets.")
        ] = None,
        runtime: Annotated[
            str | None, typer.Option(help="What will run it; spmd and local run every call on all devices.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="The plan, for programs.")] = False,
        html: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file.")] = None,
        explain: Annotated[
            bool, typer.Option("--explain", help="Also what more nodes, and longer or shorter responses, would take.")
        ] = False,
    ) -> None:
        from flowrl.plan_command import PlanAsked, plan_recipe

        asked = PlanAsked(
            cluster, prompt_tokens, response_tokens, longest_response, calibration, runtime, as_json, html, explain
        )
        print(plan_recipe(experiment_of(file, arguments), asked))

    with_recipe_flags(ctx, file, start)


@app.command(help="Run one step of a run again, alone, and compare it with what was recorded.")
def replay(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int, typer.Argument(metavar="STEP", help="From 1.")],
) -> None:
    from flowrl.runtime.replay import replay_step

    with interruptible():
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


if __name__ == "__main__":
    main()
