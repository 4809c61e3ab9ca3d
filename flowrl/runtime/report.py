"""The report of a run: one HTML file that opens offline, in a light or a dark theme, without scripts.

Completions are text that nobody has vetted: everything is escaped, huge texts are cut, and a content security policy
forbids scripts even where that failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.drawing.svg import escape
from flowrl.runtime.atomic import write_atomically
from flowrl.runtime.curves import Curve, draw_curves
from flowrl.runtime.formats import number
from flowrl.runtime.report_style import STYLE

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT_LIMIT = 1500
_PROMPT_LIMIT = 600
_MAX_PAIRS = 12
_MAX_SAMPLES = 12


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    graph_svg: str,
    metrics: pa.Table,
    samples: Sequence[Mapping[str, Any]],
    summary: Mapping[str, str],
    plan_text: str,
) -> None:
    """Write the report, whole or not at all.

    Args:
        path: of the HTML file.
        title: the name of the run.
        graph_svg: the picture of the flow, from :func:`flowrl.display.graph_svg`; it is trusted. "" leaves it out.
        metrics: a row a step, as :func:`flowrl.runtime.metrics.read_metrics` gives them.
        samples: completions, as :func:`flowrl.runtime.samples.read_samples` gives them; those with an "evaluation" are
            of held-out data.
        summary: settings and environment, by name.
        plan_text: the plan's explanation.

    Raises:
        RunFolderError: the file cannot be written.
    """
    names = metrics.column_names
    columns = {name: metrics.column(name).to_pylist() for name in names}
    steps = [int(s) for s in columns.pop("step", [])]
    sections = [
        _section("Result", _headline(steps, columns)),
        _section("Curves", _curves_html(steps, columns)),
        _section("Completions", _completions(samples)),
        _section("Flow", f'<div class="picture">{graph_svg}</div>' if graph_svg else ""),
        _section("Plan", f"<pre>{escape(plan_text, 100_000)}</pre>" if plan_text else ""),
        _section("Settings and environment", _table_of(summary)),
        _section("Last metrics", _last_metrics(steps, columns)),
    ]
    name = escape(title or "flowrl run", 200)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><style>{STYLE}</style></head>\n"
        f"<body><main><header><h1>{name}</h1>{_status(summary)}</header>\n"
        + "\n".join(s for s in sections if s)
        + "\n<footer>Written by flowrl.</footer></main></body></html>\n"
    )
    write_atomically(Path(path), page.encode("utf-8"))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _status(summary: Mapping[str, str]) -> str:
    """The status and the steps, which the reader wants first."""
    shown = [summary[n] for n in ("status", "steps") if n in summary]
    labels = ("", " steps")
    return "".join(f'<span class="badge">{escape(v, 80)}{unit}</span>' for v, unit in zip(shown, labels, strict=False))


def _table_of(pairs: Mapping[str, str]) -> str:
    if not pairs:
        return ""
    rows = "".join(f"<tr><th>{escape(name, 200)}</th><td>{escape(value)}</td></tr>" for name, value in pairs.items())
    return f'<table class="pairs">{rows}</table>'


# -- numbers -----------------------------------------------------------------------------------------------------------


def _series(steps: list[int], values: Iterable[Any]) -> list[tuple[int, float]]:
    """(step, value) where there is a number, finite or not."""
    return [(s, float(v)) for s, v in zip(steps, values, strict=True) if isinstance(v, int | float)]


def _headline(steps: list[int], columns: Mapping[str, list[Any]]) -> str:
    """First and last value of what says whether it learned: evaluations, then the reward."""
    cards = ""
    names = [n for n in columns if n.startswith("eval/") and _is_score(n)]
    for name in [*names, *(n for n in ("reward/mean", "length/mean", "kl", "entropy") if n in columns)]:
        series = _series(steps, columns[name])
        if series:
            (first_step, first), (last_step, last) = series[0], series[-1]
            change = f'{number(first)} <span class="arrow">→</span> ' if last_step > first_step else ""
            at = f"step {first_step} → {last_step}" if last_step > first_step else f"step {last_step}"
            cards += (
                f'<div class="card"><div class="name">{escape(name, 120)}</div>'
                f'<div class="value">{change}<b>{number(last)}</b></div><div class="at">{at}</div></div>'
            )
    return f'<div class="cards">{cards}</div>' if cards else ""


def _is_score(name: str) -> bool:
    last = name.rsplit("/", 1)[-1]
    return last in ("mean", "reward", "accuracy", "solved") or last.startswith(("pass@", "reward"))


def _curves_html(steps: list[int], columns: Mapping[str, list[Any]]) -> str:
    if not steps:
        return "<p>No step was completed.</p>"
    curves = []
    for title, names in _charts(columns):
        lines = {name: _series(steps, columns[name]) for name in names}
        lines = {n: s for n, s in lines.items() if s}
        if lines:
            curves.append(Curve(title, lines))
    drawn, note = draw_curves(curves)
    if note:
        return f'<p class="note">{escape(note)}</p>'
    return f'<div class="curves">{"".join(drawn)}</div>'


def _charts(columns: Mapping[str, list[Any]]) -> list[tuple[str, list[str]]]:
    """(title, names of metrics) of each chart, the most telling first."""
    numeric = [n for n, values in columns.items() if any(isinstance(v, int | float) for v in values)]

    def under(prefix: str, *without: str) -> list[str]:
        return [n for n in numeric if n.startswith(prefix) and n not in without]

    def there(*names: str) -> list[str]:
        return [n for n in names if n in numeric]

    charts = [("reward", there("reward/mean"))]
    components = under("reward/", "reward/mean", "reward/std", "reward/invalid")
    charts += [("reward by component", components)] if components else []
    evaluations: dict[str, list[str]] = {}
    for name in under("eval/"):
        # "eval/<name>/reward/mean" and "eval/<name>/pass@1" of all evaluations of one metric share a chart.
        evaluations.setdefault(name.split("/", 2)[-1], []).append(name)
    charts += [(f"evaluation: {metric}", names) for metric, names in evaluations.items() if _is_score(metric)]
    charts += [
        ("KL to the reference", there("kl")),
        ("entropy", there("entropy")),
        ("clip fraction", there("clip_fraction")),
        ("loss", there("loss")),
        ("gradient norm", there("grad_norm")),
        ("response length", there("length/mean", "length/max")),
        ("effective sample size", there("ess")),
        ("rollout and trainer log-probs: mean difference", there("logprob_difference/mean")),
        ("seconds a step", there("time/step")),
        ("seconds by call", _slowest(under("time/", "time/step"), columns)),
        ("tokens a second", there("tokens_per_second")),
        ("skipped optimiser steps", there("skipped_steps") if _ever(columns.get("skipped_steps", ())) else []),
        ("learning rate", there("learning_rate")),
    ]
    return [(title, names) for title, names in charts if names]


def _slowest(names: list[str], columns: Mapping[str, list[Any]], limit: int = 6) -> list[str]:
    def total(name: str) -> float:
        return sum(v for v in columns[name] if isinstance(v, int | float))

    return sorted(names, key=total, reverse=True)[:limit]


def _ever(values: Iterable[Any]) -> bool:
    return any(bool(v) for v in values)


def _last_metrics(steps: list[int], columns: Mapping[str, list[Any]]) -> str:
    if not steps:
        return ""
    rows = ""
    for name in sorted(columns):
        known = [(s, v) for s, v in zip(steps, columns[name], strict=True) if v is not None]
        if known:
            step, value = known[-1]
            shown = number(value) if isinstance(value, int | float) else escape(value, 200)
            rows += f"<tr><th>{escape(name, 200)}</th><td>{shown}</td><td>{step}</td></tr>"
    return (
        '<details><summary>all metrics, the last value of each</summary><table class="pairs">'
        f"<tr><th>metric</th><th>value</th><th>step</th></tr>{rows}</table></details>"
    )


# -- completions -------------------------------------------------------------------------------------------------------

Sample = Mapping[str, Any]


def _completions(samples: Sequence[Sample]) -> str:
    """Prompts that were answered early and late side by side; then what else was sampled first and last."""
    if not samples:
        return ""
    pairs = _before_and_after(samples)
    out = ""
    if pairs:
        rows = "".join(
            f'<tr><td class="prompt">{_source(a)}{_prompt(a)}</td><td>{_answer(a)}</td><td>{_answer(b)}</td></tr>'
            for a, b in pairs[:_MAX_PAIRS]
        )
        out += (
            "<h3>Before and after</h3>"
            f'<table class="samples"><tr><th>prompt</th><th>before</th><th>after</th></tr>{rows}</table>'
        )
    training = [s for s in samples if not s.get("evaluation")]
    if not training:
        return out
    first, last = min(map(_step, training)), max(map(_step, training))
    for step in dict.fromkeys((last, first)):
        shown = [s for s in training if _step(s) == step][:_MAX_SAMPLES]
        rows = "".join(f'<tr><td class="prompt">{_prompt(s)}</td><td>{_answer(s)}</td></tr>' for s in shown)
        out += (
            f"<details><summary>sampled at step {step}</summary>"
            f'<table class="samples two"><tr><th>prompt</th><th>response</th></tr>{rows}</table></details>'
        )
    return out


def _before_and_after(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """For each prompt the first and the last answer, where their steps differ; held-out prompts first."""
    seen: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        seen.setdefault((str(sample.get("evaluation", "")), _prompt_text(sample)), []).append(sample)
    pairs = [(min(group, key=_step), max(group, key=_step)) for group in seen.values()]
    pairs = [(a, b) for a, b in pairs if _step(a) < _step(b)]
    return sorted(pairs, key=lambda pair: not pair[0].get("evaluation"))


def _step(sample: Sample) -> int:
    step = sample.get("step", 0)
    return int(step) if isinstance(step, int | float) else 0


def _prompt_text(sample: Sample) -> str:
    """A prompt is a text or a list of messages."""
    prompt = sample.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in prompt)
    return str(prompt)


def _source(sample: Sample) -> str:
    return f'<div class="meta">{escape(sample["evaluation"], 80)}</div>' if sample.get("evaluation") else ""


def _prompt(sample: Sample) -> str:
    return _text(_prompt_text(sample), _PROMPT_LIMIT)


def _text(text: Any, limit: int) -> str:
    # dir="auto" in a block of its own: text with marks for right-to-left writing cannot turn the page around.
    return f'<div class="text" dir="auto">{escape(text, limit)}</div>'


def _answer(sample: Sample) -> str:
    """One response with its step, rewards and finish reason."""
    facts = [f"step {_step(sample)}"]
    reward = sample.get("reward")
    rewards = sample.get("rewards")
    if sample.get("invalid"):
        facts.append(f"no reward: {sample['invalid']}")
    elif reward is not None:
        facts.append(f"reward {number(reward)}")
    if isinstance(rewards, Mapping) and (len(rewards) > 1 or reward is None):
        facts += [f"{name} {number(v)}" for name, v in rewards.items() if v is not None]
    if sample.get("finish_reason"):
        facts.append(str(sample["finish_reason"]))
    meta = "".join(f"<span>{escape(fact, 200)}</span>" for fact in facts)
    return f'<div class="meta">{meta}</div>{_text(sample.get("response", ""), _TEXT_LIMIT)}'
