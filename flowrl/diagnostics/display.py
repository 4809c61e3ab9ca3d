"""Reports of the doctor and calibrations, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flowrl.diagnostics.packages import TOOLS, Package, pip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrl.calibration import Calibration, Rate
    from flowrl.doctor import Report

_MARKS = {"works": "[green]✓[/]", "not installed": "[dim]–[/]"}


def print_report(report: Report, console: Console) -> None:
    """The doctor's report: what there is, what works, and at the end what is wrong."""
    console.print(
        f"[bold]flowrl {report.flowrl}[/] in {escape(report.location)}, Python {escape(report.python)}", soft_wrap=True
    )
    _print_machine(report, console)
    _print_packages(report, console)
    _print_engines(report, console)
    _print_places(report, console)
    _print_problems(report, console)


def _print_engines(report: Report, console: Console) -> None:
    console.print("[bold]engines[/]")
    widths = [max((len(getattr(e, name)) for e in report.engines), default=0) for name in ("name", "status")]
    for engine in report.engines:
        mark = _MARKS.get(engine.status, "[red]✗[/]")
        detail = engine.detail or (engine.do if engine.status == "not installed" else "")
        columns = f"{engine.name:<{widths[0]}}  {engine.status:<{widths[1]}}"
        # Not folded: what is to be typed can be copied as one line.
        console.print(f"{mark}  {columns}  {escape(detail)}".rstrip(), soft_wrap=True, highlight=False)


def _print_machine(report: Report, console: Console) -> None:
    machine, torch = report.machine, report.torch
    table = _table("machine", "", "")
    cores = f"{machine.num_usable_cores} of {machine.num_cores} cores"
    table.add_row(
        "processor", escape(f"{machine.cpu}, {cores}, {', '.join(machine.instruction_sets) or 'no vector sets'}")
    )
    table.add_row(
        "bfloat16", "multiplied by the processor" if machine.fast_bfloat16 else "slow on the processor: converted"
    )
    table.add_row("memory", _size(machine.memory_bytes))
    for i, gpu in enumerate(machine.gpus):
        table.add_row(f"GPU {i}", escape(f"{gpu.name}, {_size(gpu.memory_bytes)}, compute capability {gpu.capability}"))
    if not machine.gpus:
        table.add_row("GPU", "none that torch can use")
    if report.driver is not None and not report.driver.error:
        table.add_row("driver", escape(report.driver.version))
    if torch:
        built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "no GPU"
        backends = [name for name in ("gloo", "nccl") if torch[name]]
        threads = f"{torch['num_threads']} thread{'s' if torch['num_threads'] != 1 else ''}"
        table.add_row("torch", f"built for {built}; {threads}; {' and '.join(backends) or 'no'} backend")
    console.print(table)


def _print_packages(report: Report, console: Console) -> None:
    table = _table("packages", "extra", "packages", "to install")
    table.columns[2].no_wrap = True  # to be copied as one line
    extras = list(dict.fromkeys(e for p in report.packages for e in p.extras if e not in TOOLS))
    shown: set[tuple[str, ...]] = set()
    for extra in extras:
        members = [p for p in report.packages if extra in p.extras]
        names = tuple(sorted(p.name for p in members))
        others = {
            p.name
            for e in extras
            if e != extra
            for p in report.packages
            if e in p.extras and _smaller(report, e, extra)
        }
        if set(names) <= others or names in shown:
            continue  # made of other extras
        shown.add(names)
        parts = [_package(p) for p in members]
        missing = any(p.version is None for p in members)
        table.add_row(extra or "flowrl", ", ".join(parts), escape(pip(extra)) if missing and extra else "")
    if report.companions:
        table.add_row("beside", ", ".join(f"{name} {version}" for name, version in report.companions.items()), "")
    console.print(table)


def _package(package: Package) -> str:
    if package.version is None:
        return f"[dim]{package.name} –[/]"
    return f"{package.name} {package.version}" if package.fits else f"{package.name} [red]{package.version}[/]"


def _smaller(report: Report, one: str, other: str) -> bool:
    sizes = [sum(extra in p.extras for p in report.packages) for extra in (one, other)]
    return sizes[0] < sizes[1]


def _print_places(report: Report, console: Console) -> None:
    table = _table("surroundings", "", "")
    for place in report.places:
        writable = "" if place.writable else ", [red]not writable[/]"
        table.add_row(place.what, f"{escape(place.path)}: {_size(place.free_bytes)} free{writable}")
    for name, value in report.variables.items():
        table.add_row(name, escape(value))
    console.print(table)


def _print_problems(report: Report, console: Console) -> None:
    for problem in report.problems:
        mark = "[red]✗[/]" if problem.severity == "problem" else "[yellow]![/]"
        console.print(f"{mark} {escape(problem.what)}\n    do: {escape(problem.do)}", soft_wrap=True, highlight=False)
    count = sum(p.severity == "problem" for p in report.problems)
    console.print(
        f"[red]{count} problem{'s' if count > 1 else ''}.[/]" if count else "[green]All that is installed works.[/]"
    )


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Every rate, a line each; what all rates of one kind were measured with is said once, above them."""
    kinds: dict[str, list[Rate]] = {}
    for rate in calibration.rates:
        kind = "engine" if "model" in rate.conditions else "links" if "backend" in rate.conditions else "hardware"
        kinds.setdefault(kind, []).append(rate)
    for kind, rates in kinds.items():
        _print_rates(kind, rates, console)
    for sentence in calibration.notes:
        console.print(f"[yellow]![/] {escape(sentence)}", soft_wrap=True)


def _print_rates(title: str, rates: Sequence[Rate], console: Console) -> None:
    first = rates[0].conditions
    common = {n: v for n, v in first.items() if len(rates) > 1 and all(r.conditions.get(n) == v for r in rates)}
    said = ", ".join(_condition(n, v) for n, v in common.items())
    table = _table(escape(f"{title}: {said}" if said else title), "rate", "with", "median", "half of all", "times")
    for rate in rates:
        table.add_row(
            rate.name,
            escape(", ".join(_condition(n, v) for n, v in rate.conditions.items() if n not in common)),
            _with_unit(rate.value, rate.unit),
            f"{_without_unit(rate.low, rate.unit)} – {_without_unit(rate.high, rate.unit)}",
            str(rate.repetitions),
        )
    console.print(table)


def _condition(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return _size(value)
    if name == "parameters":
        return f"{value:,} parameters"
    return f"{name} {value}" if not isinstance(value, str) else value


def _with_unit(value: float, unit: str) -> str:
    """With an SI prefix, "61.3 GB/s"; tokens as they are counted, "1,630 token/s"."""
    if unit == "token/s":
        return f"{_rounded(value)} {unit}"
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _without_unit(value: float, unit: str) -> str:
    return _with_unit(value, unit).removesuffix(unit).rstrip()


def _rounded(value: float) -> str:
    """To three digits: "1,630", "44.2"."""
    text = f"{float(f'{value:.3g}'):,.10f}".rstrip("0")
    return text.rstrip(".")


def _size(number: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=any(columns), pad_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
