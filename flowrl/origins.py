"""Where log-probs come from: what importance ratios between two of them depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.columns import nested
from flowrl.errors import BatchError


@nested
@dataclass(frozen=True)
class LogprobOrigin:
    """Which model, at which version, under which sampling settings and in which engine gave a log-prob."""

    model: str
    policy_version: int
    engine: str
    dtype: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether sampling cut the support (top-p, top-k or min-p)."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @classmethod
    def joined(cls, parts: Sequence[LogprobOrigin | None], name: str) -> LogprobOrigin | None:
        """The origin of rows that come from several: names joined by "+", the oldest version. What importance ratios
        depend on must be the same in all parts.

        Raises:
            BatchError: the parts were sampled under other settings, or some of them are of unknown origin.
        """
        first = parts[0]
        if all(part == first for part in parts):
            return first
        known = [part for part in parts if part is not None]
        sampling = {(o.temperature, o.top_p, o.top_k, o.min_p) for o in known}
        if len(known) < len(parts) or len(sampling) > 1:
            raise BatchError(
                f"Parts of a batch differ in {name}",
                expected="one temperature, top_p, top_k and min_p in all of them: ratios of log-probs depend on these",
                received="; ".join(dict.fromkeys("unknown" if o is None else str(o) for o in parts)),
                do="sample with the same settings, or train on the parts by a loss term each",
            )

        def names(field_name: str) -> str:
            return "+".join(dict.fromkeys(getattr(o, field_name) for o in known))

        return replace(
            known[0],
            model=names("model"),
            engine=names("engine"),
            dtype=names("dtype"),
            policy_version=min(o.policy_version for o in known),
        )
