"""What is known of a run while it goes on, in the words that every display shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    ("skipped_steps", "skipped steps"),
)

# Under "reward/", but not a component of the reward.
_NOT_COMPONENTS = ("mean", "std", "invalid")
_HISTORY = 40
_MESSAGES = 6


@dataclass
class RunView:
    """What is known of the run: what every display draws from."""

    num_steps: int
    title: str
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    first_step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    last_update: float | None = None
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    done: bool = False

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        took = metrics.get("time/step")
        if not is_finite(took):
            took = now - (self.last_update if self.last_update is not None else self.started)
        self.step_seconds.append(float(took))
        self.last_update = now
        self.step = step
        self.metrics = {n: v for n, v in metrics.items() if v is not None}
        if is_finite(self.metrics.get("reward/mean")):
            self.rewards.append(float(self.metrics["reward/mean"]))

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
            yield "reward", f"{number(m['reward/mean'])}  {sparkline(self.rewards)}{detail}"
        for name, shown in SHOWN:
            if name in m and not (name == "skipped_steps" and not m[name]):
                yield shown, number(m[name])
        if "length/mean" in m:
            longest = f", longest {number(m['length/max'])}" if "length/max" in m else ""
            yield "response length", f"mean {number(m['length/mean'])}{longest}"
        if "time/step" in m:
            yield "step time", f"{seconds(m['time/step'])}   {self._shares()}".rstrip()
        for name, metrics in self.evaluations.items():
            yield f"eval {name}", pairs(metrics)

    def _shares(self, limit: int = 4) -> str:
        """The calls that take the most time, with their share of the step."""
        total = self.metrics["time/step"]
        calls = below(self.metrics, "time", skip=("step",))
        timed = sorted(((n, v) for n, v in calls.items() if is_finite(v)), key=lambda nv: -nv[1])[:limit]
        if not is_finite(total) or total <= 0:
            return ""
        return " · ".join(f"{name} {value / total:.0%}" for name, value in timed)

    def line(self) -> str:
        """The step in one line."""
        m = self.metrics
        width = len(str(self.num_steps))
        parts = [f"step {self.step:>{width}}/{self.num_steps}"]
        if "reward/mean" in m:
            components = below(m, "reward", skip=_NOT_COMPONENTS)
            parts.append(
                f"reward {number(m['reward/mean'])}" + (f" ({pairs(components)})" if len(components) > 1 else "")
            )
        short = {
            "clip_fraction": "clip",
            "grad_norm": "grad",
            "tokens_per_second": "tok/s",
            "skipped_steps": "skipped",
        }
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
