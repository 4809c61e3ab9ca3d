"""What each name of the reference values is, in terms of ``flowrl.functional``: a table, and how a case is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.functional.advantages import (
    gae,
    num_policy_tokens,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    spread_over_tokens,
    whitened,
)
from flowrl.functional.aggregation import aggregate
from flowrl.functional.covariance import kl_cov_loss, kl_cov_tokens
from flowrl.functional.group_advantages import (
    gpg_advantages,
    group_advantages,
    opo_advantages,
    pass_at_k_advantages,
)
from flowrl.functional.importance import geometric_row_means, importance_weights, truncate_weights
from flowrl.functional.kl import kl_estimate
from flowrl.functional.policy_losses import (
    cispo_loss,
    dppo_loss,
    dro_loss,
    geo_mean_loss,
    gpg_loss,
    gspo_loss,
    ppo_loss,
    sapo_loss,
)
from flowrl.functional.value_loss import value_loss
from flowrl.ragged import Ragged
from tests.reference_cases import Case

RTOL, ATOL = 1e-4, 1e-5
#: The coefficient of the penalty of kl_cov, which the format does not carry.
KL_COV_COEF = 0.1

Results = dict[str, Tensor | Ragged]


class UnknownCase(Exception):
    """A kind, a name, a parameter or an input that the table does not know, or one that is missing."""


@dataclass(frozen=True)
class Entry:
    """How to compute one name.

    Args:
        compute: from a case, the results by name.
        inputs: by name; those that end in "?" may be left out.
        params: the same.
        expected: what it gives.
        only_policy_tokens: compare where the policy produced the token alone.
    """

    compute: Callable[[Case], Results]
    inputs: tuple[str, ...]
    params: tuple[str, ...] = ()
    expected: tuple[str, ...] = ("advantages",)
    only_policy_tokens: bool = False


@dataclass(frozen=True)
class Deviation:
    """The number of a result that is furthest from what is expected, measured in what is allowed."""

    name: str
    place: str
    expected: float
    received: float

    @property
    def by(self) -> float:
        return abs(self.received - self.expected)

    @property
    def share(self) -> float:
        """Of the tolerance; more than 1, or NaN, is a mismatch."""
        return self.by / (ATOL + RTOL * abs(self.expected))

    @property
    def is_match(self) -> bool:
        return self.share <= 1  # False for NaN, also where NaN is expected

    def __str__(self) -> str:
        allowed = ATOL + RTOL * abs(self.expected)
        where = f"{self.name}{self.place}"
        return (
            f"{where} is {self.received:.8g}, expected {self.expected:.8g}: off by {self.by:.3g}, allowed {allowed:.3g}"
        )


def compare(case: Case) -> Deviation:
    """The largest deviation of a case, over all its results.

    Raises:
        UnknownCase: the table does not know how to compute it.
    """
    entry = look_up(case)
    received = entry.compute(case)
    found = [
        deviation
        for name, expected in case.expected.items()
        for deviation in _deviations(name, expected, received[name], case, entry.only_policy_tokens)
    ]
    if not found:
        raise UnknownCase(f"{case}: there is no number to compare")
    return max(found, key=lambda d: math.inf if math.isnan(d.share) else d.share)


def look_up(case: Case) -> Entry:
    """The entry of a case.

    Raises:
        UnknownCase: see there.
    """
    names = TABLE.get(case.kind)
    if names is None:
        raise UnknownCase(f"{case}: no kind {case.kind!r}; there is {', '.join(TABLE)}")
    entry = names.get(case.name)
    if entry is None:
        raise UnknownCase(f"{case}: no {case.kind} {case.name!r}; there is {', '.join(names)}")
    for what, given, known in (
        ("input", case.inputs, entry.inputs),
        ("parameter", case.params, entry.params),
        ("result", case.expected, entry.expected),
    ):
        for name in given:
            if name not in known and f"{name}?" not in known:
                raise UnknownCase(f"{case}: no {what} {name!r}; there is {', '.join(known) or 'none'}")
        for name in known:
            if what != "result" and not name.endswith("?") and name not in given:
                raise UnknownCase(f"{case}: {what} {name!r} is missing")
    return entry


def _deviations(
    name: str, expected: Any, received: Tensor | Ragged, case: Case, only_policy_tokens: bool
) -> list[Deviation]:
    if isinstance(received, Tensor):
        numbers = torch.tensor(expected, dtype=torch.float64).reshape(-1).tolist()
        values = received.detach().reshape(-1).tolist()
        return [Deviation(name, "", e, float(r)) for e, r in zip(numbers, values, strict=True)]
    found = []
    for row, (numbers, values, mask) in enumerate(zip(expected, received.to_lists(), case.masks, strict=True)):
        for place, (e, r, m) in enumerate(zip(numbers, values, mask, strict=True)):
            if m or not only_policy_tokens:
                found.append(Deviation(name, f"[{row}][{place}]", float(e), r))
    return found


# -- advantages --------------------------------------------------------------------------------------------------------


def _total(case: Case) -> Tensor:
    """R: the sum of a response's token rewards."""
    return case.column("rewards").sum_rows()


def _masked_rewards(case: Case) -> Ragged:
    """The rewards of the policy's tokens. (Here a reward at an observation is dropped, not given to the token before.)"""
    column = case.column("rewards")
    return column.with_values(torch.where(case.mask.values.bool(), column.values, 0.0))


def _gae(case: Case) -> Results:
    gamma, lam = case.params["gamma"], case.params["lam"]
    advantages, returns = gae(_masked_rewards(case), case.column("values"), case.mask, gamma=gamma, lam=lam)
    if case.params["whiten"]:
        advantages = whitened(advantages, case.mask)
    return {"advantages": advantages, "returns": returns}


def _reinforce_plus_plus(case: Case) -> Results:
    advantages, returns = reinforce_plus_plus(_masked_rewards(case), case.mask, gamma=case.params["gamma"])
    return {"advantages": advantages, "returns": returns}


def _optimal_token_baseline(case: Case) -> Results:
    columns = (case.column("old_logprobs"), case.column("sum_pi_squared"))
    return {"advantages": optimal_token_baseline(_masked_rewards(case), *columns, case.prompt_id, case.mask)[0]}


def _spread(function: Callable[[Case], Tensor]) -> Callable[[Case], Results]:
    """A number a response, at each of its policy's tokens."""
    return lambda case: {"advantages": spread_over_tokens(function(case), case.mask)}


_ADVANTAGES: dict[str, Entry] = {
    "gae": Entry(_gae, ("rewards", "values"), ("gamma", "lam", "whiten"), ("advantages", "returns")),
    "grpo": Entry(
        _spread(lambda c: group_advantages(_total(c), c.prompt_id, **c.params)),
        ("rewards",),
        ("normalize_by_std", "eps?"),
    ),
    "grpo_passk": Entry(
        _spread(lambda c: pass_at_k_advantages(_total(c), c.prompt_id, **c.params)),
        ("rewards",),
        ("normalize_by_std", "eps?"),
    ),
    "rloo": Entry(
        _spread(lambda c: group_advantages(_total(c), c.prompt_id, normalize_by_std=False, leave_one_out=True)),
        ("rewards",),
    ),
    "opo": Entry(_spread(lambda c: opo_advantages(_total(c), c.prompt_id, num_policy_tokens(c.mask))), ("rewards",)),
    "gpg": Entry(_spread(lambda c: gpg_advantages(_total(c), c.prompt_id)), ("rewards",)),
    "reinforce_plus_plus": Entry(_reinforce_plus_plus, ("rewards",), ("gamma",), ("advantages", "returns")),
    "reinforce_plus_plus_baseline": Entry(
        lambda c: {"advantages": reinforce_plus_plus_baseline(_total(c), c.prompt_id, c.mask)}, ("rewards",)
    ),
    "remax": Entry(
        lambda c: {"advantages": remax(_masked_rewards(c), c.rows("greedy_rewards"), c.mask)[0]},
        ("rewards", "greedy_rewards"),
    ),
    "optimal_token_baseline": Entry(_optimal_token_baseline, ("rewards", "old_logprobs", "sum_pi_squared")),
}


# -- losses ------------------------------------------------------------------------------------------------------------

#: From logprobs, old_logprobs, advantages and the case, a loss a token.
Surrogate = Callable[[Tensor, Tensor, Tensor, Case], Tensor]


def _aggregated(losses: Tensor, case: Case, mode: str) -> Tensor:
    total, count = aggregate(losses, case.mask, mode, float(case.params.get("scale", 1.0)))
    return total if count is None else total / count


def _policy_loss(surrogate: Surrogate, mode: str | None = None, by_row: bool = False) -> Callable[[Case], Results]:
    """The loss and its gradient.

    Args:
        mode: how token losses are aggregated, where the name itself says so.
        by_row: importance weights enter as their geometric mean over the response.
    """

    def compute(case: Case) -> Results:
        logprobs = case.column("logprobs").values.requires_grad_()
        losses = surrogate(logprobs, case.column("old_logprobs").values, case.column("advantages").values, case)
        if "importance_weights" in case.inputs:
            weights = case.column("importance_weights").values
            losses = losses * (geometric_row_means(weights, case.mask)[case.mask.row_of_value] if by_row else weights)
        loss = _aggregated(losses, case, mode or case.params["aggregate"])
        loss.backward()
        assert logprobs.grad is not None
        return {"loss": loss, "grad_logprobs": case.mask.with_values(logprobs.grad)}

    return compute


def _clips(case: Case) -> dict[str, float]:
    return {"clip_low": case.params["clip_ratio_low"], "clip_high": case.params["clip_ratio_high"]}


def _kl_cov(new: Tensor, old: Tensor, advantages: Tensor, case: Case) -> Tensor:
    penalised = kl_cov_tokens(new, advantages, case.mask, share=case.params["kl_cov_ratio"])
    return kl_cov_loss(new, old, advantages, penalised, coef=KL_COV_COEF)


def _dppo(divergence: str) -> Surrogate:
    return lambda new, old, a, c: dppo_loss(
        new, old, a, divergence=divergence, **_clips(c), ratio_cap=c.params["dual_clip"]
    )[0]


def _policy(compute: Callable[[Case], Results], *params: str) -> Entry:
    """All are given the settings of PPO's clips, whether they read them or not."""
    return Entry(
        compute,
        ("logprobs", "old_logprobs", "advantages", "importance_weights?"),
        ("aggregate", "clip_ratio_low", "clip_ratio_high", "dual_clip", "scale?", *params),
        ("loss", "grad_logprobs"),
    )


_POLICY_LOSSES: dict[str, Entry] = {
    "vanilla": _policy(
        _policy_loss(lambda new, old, a, c: ppo_loss(new, old, a, **_clips(c), dual_clip=c.params["dual_clip"])[0])
    ),
    "gspo": _policy(_policy_loss(lambda new, old, a, c: gspo_loss(new, old, a, c.mask, **_clips(c))[0])),
    "sapo": _policy(
        _policy_loss(
            lambda new, old, a, c: sapo_loss(new, old, a, tau_pos=c.params["tau_pos"], tau_neg=c.params["tau_neg"])
        ),
        "tau_pos",
        "tau_neg",
    ),
    "gpg": _policy(_policy_loss(lambda new, old, a, c: gpg_loss(new, a))),
    "cispo": _policy(_policy_loss(lambda new, old, a, c: cispo_loss(new, old, a, **_clips(c))[0])),
    "dro": _policy(_policy_loss(lambda new, old, a, c: dro_loss(new, old, a, beta=c.params["dro_beta"])), "dro_beta"),
    "kl_cov": _policy(_policy_loss(_kl_cov), "kl_cov_ratio"),
    "geo_mean": _policy(
        _policy_loss(
            lambda new, old, a, c: geo_mean_loss(new, old, a, c.mask, **_clips(c))[0],
            mode="seq-mean-token-mean",  # of a loss that is the same at each token: the plain mean over responses
            by_row=True,
        )
    ),
    "dppo_tv": _policy(_policy_loss(_dppo("tv"))),
    "dppo_kl": _policy(_policy_loss(_dppo("kl"))),
}


def _value_loss(case: Case) -> Results:
    columns = [case.column(name).values for name in ("values", "returns", "old_values")]
    losses, _ = value_loss(*columns, clip=case.params["clip"])
    return {"loss": _aggregated(losses, case, case.params["aggregate"])}


def _importance(level: str) -> Callable[[Case], Results]:
    def compute(case: Case) -> Results:
        old, rollout = case.column("old_logprobs").values, case.column("rollout_logprobs").values
        weights = importance_weights(old, rollout, case.mask, level=level)
        return {"weights": case.mask.with_values(truncate_weights(weights, case.params["threshold"]))}

    return compute


def _kl(name: str) -> Entry:
    def compute(case: Case) -> Results:
        values = kl_estimate(case.column("logprobs").values, case.column("ref_logprobs").values, name)
        return {"kl": case.mask.with_values(values)}

    return Entry(compute, ("logprobs", "ref_logprobs"), (), ("kl",))


def _aggregate(mode: str) -> Entry:
    scale = ("scale",) if mode.endswith("norm") else ()
    return Entry(lambda c: {"value": _aggregated(c.column("loss").values, c, mode)}, ("loss",), scale, ("value",))


#: By kind and name.
TABLE: dict[str, dict[str, Entry]] = {
    "advantage": _ADVANTAGES,
    "policy_loss": _POLICY_LOSSES,
    "value_loss": {
        "clipped": Entry(_value_loss, ("values", "returns", "old_values"), ("clip", "aggregate", "scale?"), ("loss",))
    },
    "kl": {name: _kl(name) for name in ("k1", "abs", "k2", "k3")},
    "importance": {
        f"truncated_{level}": Entry(
            _importance(level),
            ("old_logprobs", "rollout_logprobs"),
            ("threshold",),
            ("weights",),
            only_policy_tokens=True,
        )
        for level in ("token", "sequence")
    },
    "aggregate": {
        name: _aggregate(name)
        for name in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
}
