"""From the values of an iteration to flat metrics: what the display, the metrics file and the trackers show."""

from __future__ import annotations

from typing import Any

from flowrl.batches import FinishReason, OldLogprobs, RefLogprobs, Rewards, Rollouts, TrainStats
from flowrl.compiler.plan import Program, ProgramCall
from flowrl.functional.metrics import sampled_entropy
from flowrl.models import BaseModel
from flowrl.runtime.interpreter import Iteration, read


def step_metrics(program: Program, done: Iteration) -> dict[str, float]:
    """Metrics by name, all plain numbers.

    The first rollout and the first updater give the plain names; further ones put their label, or the name of what they
    write, before them. ``reward/mean`` is over valid rows, before a normalisation that would make it 0; ``entropy`` is that
    of the trained distribution where a loss computes it, else the sampler's, estimated from its samples;
    ``kl_before_update`` is the mean of log π − log π_ref over policy tokens, and so is ``kl`` where no loss reports its own
    estimate; ``logprob_difference/…`` compares the sampler's log-probs with the trainer's (law 10); ``ess`` is the effective
    sample size of the importance ratios.
    """
    out: dict[str, float] = {}
    trained = [c for c in program.calls if isinstance(done.values.get(c.label), TrainStats)]
    trained.sort(key=lambda c: not any(isinstance(t, BaseModel) for t in c.node.writes()))  # those of a Model first
    samplers = [c.label for c in program.calls if c.node.kind == "rollout"]
    for call in program.calls:
        value = done.values.get(call.label)
        if isinstance(value, Rollouts) and call.node.kind == "rollout":
            _rollouts(out, value, "" if call.label == samplers[0] else f"{call.label}/")
        elif isinstance(value, Rewards) and not getattr(call.node, "rescales", False):
            sampler = _sampler_above(program, call)
            _rewards(out, value, "" if sampler is None or sampler == samplers[0] else f"{sampler}/")
        elif isinstance(value, TrainStats):
            written = call.node.writes()
            prefix = "" if call is trained[0] else f"{written[0].name if written else call.label}/"
            out.update({prefix + name: float(v) for name, v in value.metrics.items()})
            out[prefix + "policy_version"] = float(value.policy_version)
            out["skipped_steps"] = out.get("skipped_steps", 0.0) + value.num_skipped_steps
            if value.num_optimizer_steps == 0:
                out["empty_updates"] = out.get("empty_updates", 0.0) + 1
    _logprobs(out, program, done)
    _effective_sample_size(out)
    for label, counts in done.flow_of_groups.items():
        out[f"{label}/acceptance"] = (counts["emitted"] - counts["dropped"]) / max(1, counts["emitted"])
        out.update({f"{label}/groups_{name}": float(v) for name, v in counts.items()})
        out[f"{label}/pulls"] = float(done.pulls)
    out.update(done.reports)
    return out


def timing_metrics(program: Program, done: Iteration, seconds: float) -> dict[str, float]:
    """Times by call, and tokens (prompts and responses) a second; kept apart, because they differ between equal runs."""
    out = {"time/step": seconds}
    out.update({f"time/{label}": value for label, value in done.seconds.items()})
    sampled = [done.values[c.label] for c in program.calls if c.node.kind == "rollout" and c.label in done.values]
    tokens = sum(len(v.tokens.values) for v in sampled if isinstance(v, Rollouts))
    if tokens:
        out["tokens_per_second"] = tokens / max(seconds, 1e-9)
    return out


def main_rollouts(program: Program, done: Iteration) -> Rollouts | None:
    """What the first rollout of the flow sampled; of a flow without one, the first Rollouts there are."""
    found = [(c.node.kind != "rollout", done.values.get(c.label)) for c in program.calls]
    rollouts = sorted(((late, v) for late, v in found if isinstance(v, Rollouts)), key=lambda lv: lv[0])
    return rollouts[0][1] if rollouts else None


def _sampler_above(program: Program, call: ProgramCall) -> str | None:
    """The label of the rollout that a call descends from; the nearest in execution order."""
    above = {b.label for b in call.bindings()}
    sampler = None
    for other in reversed(program.calls):
        if other.label in above:
            above |= {b.label for b in other.bindings()}
            if other.node.kind == "rollout" and sampler is None:
                sampler = other.label
    return sampler


def _rollouts(out: dict[str, float], rollouts: Rollouts, prefix: str) -> None:
    lengths = rollouts.response_lengths
    if not len(lengths):
        return
    out[prefix + "length/mean"] = float(lengths.double().mean())
    out[prefix + "length/max"] = float(lengths.max())
    out[prefix + "length/prompt_mean"] = float(rollouts.prompt_lengths.double().mean())
    out[prefix + "length/truncated"] = float((rollouts.finish_reason == FinishReason.LENGTH).double().mean())
    mask = rollouts.loss_mask.values.bool()
    if bool(mask.any()):
        out[prefix + "entropy"] = sampled_entropy(rollouts.rollout_logprobs.values, mask)


def _rewards(out: dict[str, float], rewards: Rewards, prefix: str) -> None:
    valid = rewards.valid.bool()
    totals = rewards.totals[valid].double()
    if len(totals):
        out[prefix + "reward/mean"] = float(totals.mean())
        out[prefix + "reward/std"] = float(totals.std(correction=0))
    if rewards.num_rows:
        out[prefix + "reward/invalid"] = float((~valid).double().mean())
    if len(rewards.components) + len(rewards.token_components) > 1 and len(totals):
        for name, component in rewards.components.items():
            out[f"{prefix}reward/{name}"] = float(component[valid].double().mean())
        for name, column in rewards.token_components.items():
            out[f"{prefix}reward/{name}"] = float(column.sum_rows()[valid].double().mean())


def _logprobs(out: dict[str, float], program: Program, done: Iteration) -> None:
    """Sampler against trainer, and policy against reference, of the first old and the first reference log-probs."""
    old_rows, old = _first(program, done, OldLogprobs)
    ref_rows, ref = _first(program, done, RefLogprobs)
    policy = None
    if old is not None and not old.is_current:
        policy = old.old_logprobs
        if old_rows is not None:
            difference = _at_policy_tokens(old_rows, old_rows.rollout_logprobs, policy)
            if len(difference):
                out["logprob_difference/mean"] = float(difference.abs().mean())
                out["logprob_difference/max"] = float(difference.abs().max())
    else:  # the plan left them out; the loss has compared what it computed itself
        gap = next((v for k, v in out.items() if k.split("/")[-1] == "rollout_logprob_gap"), None)
        if gap is not None:
            out["logprob_difference/mean"] = gap
    if ref is not None and ref_rows is not None:
        same_rows = policy is not None and old_rows is ref_rows
        difference = _at_policy_tokens(ref_rows, policy if same_rows else ref_rows.rollout_logprobs, ref.ref_logprobs)
        if len(difference):
            out["kl_before_update"] = float(difference.mean())
            out.setdefault("kl", out["kl_before_update"])  # a loss with a KL term has reported its own estimate


def _at_policy_tokens(rows: Rollouts, a: Any, b: Any) -> Any:
    """float64: a − b where the policy wrote the token."""
    return (a.values - b.values)[rows.loss_mask.values.bool()].double()


def _effective_sample_size(out: dict[str, float]) -> None:
    """(Σw)² / (n Σw²) of the importance ratios over policy tokens: 1 where all are equal."""
    for name in [n for n in out if n.split("/")[-1] == "ratio_squared"]:
        mean = out.get(name.removesuffix("_squared"), 0.0)
        out.setdefault("ess", mean**2 / out[name] if out[name] else 0.0)


def _first(program: Program, done: Iteration, kind: type) -> tuple[Rollouts | None, Any]:
    """The first output of this type and the rollouts that it scores, row by row; None for what there is not."""
    for call in program.calls:
        value = done.values.get(call.label)
        if isinstance(value, kind):
            given = [read(b, done.values) for b in call.bindings()]
            rows = next((v for v in given if isinstance(v, Rollouts) and v.num_rows == value.num_rows), None)  # type: ignore[attr-defined]
            return rows, value
    return None, None
