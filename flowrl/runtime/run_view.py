"""What is known of a run while it goes on, in the words that every display shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.drawing.svg import one_line
from flowrl.runtime.formats import below, is_finite, number, pairs, seconds, sparkline

#: What is shown, in this order: the name of the metric, the name on the screen.
SHOWN = (
    ("loss", "loss"),
    ("kl", "KL"),
    ("entropy", "entropy"),
    ("clip_fraction", "clip fraction"),
    ("grad_norm", "gradient norm"),
    ("learning_rate", "learning rate"),
    ("ess", "effective sample size"),
    ("tokens_per_second", "tokens/s"),
)

# Under "reward/", but not a component of the reward.
_NOT_COMPONENTS = ("mean", "std", "invalid")
_HISTORY = 40
_MESSAGES = 6


@dataclass
class RunView:
    """What is known of the run. A display may draw from it in a thread of its own."""

    num_steps: int
    title: str
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    skipped: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    last_update: float | None = None
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    done: bool = False

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        now = time.monotonic()
        took = metrics.get("time/step")
        # From one step to the next also counts evaluations and checkpoints; before the first, models were loaded.
        since = now - (self.started if self.last_update is None else self.last_update)
        if is_finite(took):
            since = took if self.last_update is None else max(took, since)
        self.step_seconds.append(float(since))
        self.last_update = now
        self.step = step
        self.metrics = {n: v for n, v in metrics.items() if v is not None}
        skipped, reward = self.metrics.get("skipped_steps"), self.metrics.get("reward/mean")
        self.skipped += int(skipped) if is_finite(skipped) else 0
        if is_finite(reward):
            self.rewards.append(float(reward))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """From the mean of the last steps; None before the first."""
        if not self.step_seconds or self.step >= self.num_steps:
            return None
        return sum(self.step_seconds) / len(self.step_seconds) * (self.num_steps - self.step)

    def rows(self) -> Iterator[tuple[str, str]]:
        """(name, text) of what is shown; absent metrics are left out."""
        m = self.metrics
        if "reward/mean" in m:
            parts = below(m, "reward", skip=_NOT_COMPONENTS)
            detail = f"   {pairs(parts)}" if parts else ""
            yield "reward", f"{number(m['reward/mean'])}  {sparkline(list(self.rewards))}{detail}"
        for name, shown in SHOWN:
            if name in m:
                yield shown, number(m[name])
        if self.skipped:
            yield "skipped optimiser steps", f"{self.skipped} so far"
        if "length/mean" in m:
            longest = f", longest {number(m['length/max'])}" if "length/max" in m else ""
            yield "response length", f"mean {number(m['length/mean'])}{longest}"
        if "time/step" in m:
            yield "step time", f"{seconds(m['time/step'])}   {_shares(m)}".rstrip()
        for name, metrics in list(self.evaluations.items()):
            yield f"eval {name}", pairs(metrics)

    def line(self) -> str:
        """The step in one line."""
        m = self.metrics
        width = len(str(self.num_steps))
        parts = [f"step {self.step:>{width}}/{self.num_steps}"]
        if "reward/mean" in m:
            components = below(m, "reward", skip=_NOT_COMPONENTS)
            detail = f" ({pairs(components)})" if len(components) > 1 else ""
            parts.append(f"reward {number(m['reward/mean'])}{detail}")
        short = {"clip_fraction": "clip", "grad_norm": "grad", "tokens_per_second": "tok/s"}
        for name in ("loss", "kl", "entropy", "clip_fraction", "grad_norm", "ess", "tokens_per_second"):
            if name in m:
                parts.append(f"{short.get(name, name)} {number(m[name])}")
        if m.get("skipped_steps"):
            parts.append(f"skipped {number(m['skipped_steps'])}")
        if "length/mean" in m:
            parts.append(f"length {number(m['length/mean'])}")
        parts.append(seconds(m["time/step"]) if is_finite(m.get("time/step")) else seconds(self.step_seconds[-1]))
        if self.seconds_left is not None:
            parts.append(f"ETA {seconds(self.seconds_left)}")
        return " | ".join(parts)

    def clock(self) -> str:
        """Elapsed time, and what is left of it."""
        text = f"elapsed {seconds(self.elapsed)}"
        if self.done and self.step >= self.num_steps:
            return text + " · done"
        return text + (f" · ETA {seconds(self.seconds_left)}" if self.seconds_left is not None else "")


def _shares(metrics: Mapping[str, Any], limit: int = 4) -> str:
    """The calls that take the most time, with their share of the step."""
    total = metrics["time/step"]
    timed = [(n, v) for n, v in below(metrics, "time", skip=("step",)).items() if is_finite(v)]
    if not is_finite(total) or total <= 0:
        return ""
    slowest = sorted(timed, key=lambda pair: -pair[1])[:limit]
    return " · ".join(f"{one_line(name)} {value / total:.0%}" for name, value in slowest)
