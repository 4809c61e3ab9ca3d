"""From the values of an iteration to flat metrics: what the display, the metrics file and the trackers show."""

from __future__ import annotations

from flowrl.batches import FinishReason, OldLogprobs, RefLogprobs, Rewards, Rollouts, TrainStats
from flowrl.compiler.plan import Program
from flowrl.runtime.interpreter import Iteration


def step_metrics(program: Program, done: Iteration) -> dict[str, float]:
    """Metrics by name, all plain numbers.

    ``reward/mean`` is over valid rows; ``kl`` is the mean of log π − log π_ref over policy tokens;
    ``logprob_difference/…`` compares the sampler's log-probs with the trainer's (law 10).
    """
    out: dict[str, float] = {}
    writers = [c for c in program.calls if c.node.writes()]
    for call in program.calls:
        value = done.values.get(call.label)
        if isinstance(value, Rollouts):
            _rollouts(out, value)
        elif isinstance(value, Rewards):
            _rewards(out, value)
        elif isinstance(value, TrainStats):
            prefix = "" if call is writers[0] else f"{call.node.writes()[0].name}/"
            out.update({prefix + name: float(v) for name, v in value.metrics.items()})
            out[prefix + "policy_version"] = float(value.policy_version)
            out["skipped_steps"] = out.get("skipped_steps", 0.0) + value.num_skipped_steps
    _logprobs(out, done)
    if "ratio" in out and out.get("ratio_squared"):
        out["ess"] = out["ratio"] ** 2 / out["ratio_squared"]
    for label, counts in done.flow_of_groups.items():
        out[f"{label}/acceptance"] = (counts["emitted"] - counts["dropped"]) / max(1, counts["emitted"])
        out.update({f"{label}/groups_{name}": float(v) for name, v in counts.items()})
        out[f"{label}/pulls"] = float(done.pulls)
    out.update(done.reports)
    return out


def timing_metrics(done: Iteration, seconds: float) -> dict[str, float]:
    """Times by call, and tokens a second; kept apart, because they differ between equal runs."""
    out = {"time/step": seconds}
    out.update({f"time/{label}": value for label, value in done.seconds.items()})
    tokens = sum(len(v.tokens.values) for v in done.values.values() if isinstance(v, Rollouts))
    if tokens:
        out["tokens_per_second"] = tokens / max(seconds, 1e-9)
    return out


def _rollouts(out: dict[str, float], rollouts: Rollouts) -> None:
    lengths = rollouts.response_lengths
    if not len(lengths):
        return
    out["length/mean"] = float(lengths.double().mean())
    out["length/max"] = float(lengths.max())
    out["length/prompt_mean"] = float(rollouts.prompt_lengths.double().mean())
    out["length/truncated"] = float((rollouts.finish_reason == FinishReason.LENGTH).double().mean())


def _rewards(out: dict[str, float], rewards: Rewards) -> None:
    valid = rewards.valid.bool()
    totals = rewards.totals[valid].double()
    if len(totals):
        out["reward/mean"] = float(totals.mean())
        out["reward/std"] = float(totals.std(correction=0))
    if rewards.num_rows:
        out["reward/invalid"] = float((~valid).double().mean())
    if len(rewards.components) + len(rewards.token_components) > 1:
        for name, component in rewards.components.items():
            out[f"reward/{name}"] = float(component[valid].double().mean()) if len(totals) else 0.0
        for name, column in rewards.token_components.items():
            out[f"reward/{name}"] = float(column.sum_rows()[valid].double().mean()) if len(totals) else 0.0


def _logprobs(out: dict[str, float], done: Iteration) -> None:
    from flowrl.batches import align

    olds = [v for v in done.values.values() if isinstance(v, OldLogprobs) and not v.is_current]
    refs = [v for v in done.values.values() if isinstance(v, RefLogprobs)]
    rollouts = [v for v in done.values.values() if isinstance(v, Rollouts)]
    if not rollouts or not rollouts[-1].num_rows:
        return
    rows = rollouts[-1]
    mask = rows.loss_mask.values.bool()
    if not bool(mask.any()):
        return
    sampler = rows.rollout_logprobs.values
    if olds:
        old = align(rows, olds[0], join="subset", node="metrics", argument="old_logprobs").old_logprobs.values  # type: ignore[attr-defined]
        difference = (sampler - old)[mask].abs().double()
        out["logprob_difference/mean"] = float(difference.mean())
        out["logprob_difference/max"] = float(difference.max())
        sampler = old
    if refs:
        ref = align(rows, refs[0], join="subset", node="metrics", argument="ref_logprobs").ref_logprobs.values  # type: ignore[attr-defined]
        out["kl"] = float((sampler - ref)[mask].double().mean())
