"""Controllers of the KL coefficient: nodes that measure the KL of the policy from the reference and set a State."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from flowrl.batches import OldLogprobs, RefLogprobs, Rollouts, TrainStats
from flowrl.models import BaseModel, State
from flowrl.nodes.base import Join, Node

#: The KL of a batch: the mean over policy tokens, or over responses of the sum over their policy tokens.
Per = Literal["token", "sequence"]


def coefficient(coef: float | State) -> float:
    """The value of a setting that is a number or a State, here and now."""
    return float(coef.value) if isinstance(coef, State) else coef


def coefficient_problems(coef: float | State, name: str = "coef") -> Iterable[str]:
    """What is wrong with a coefficient that is a number or a State that starts at one, a sentence each."""
    value = coef.init if isinstance(coef, State) else coef
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf"):
        where = (
            f"{name} is State {coef.name!r} with init {value!r}" if isinstance(coef, State) else f"{name} is {value!r}"
        )
        yield f"{where}; expected a finite number, at least 0"


class _KLControl(Node):
    """What the controllers share: measuring the KL."""

    coef: float | State

    split: ClassVar[Literal["rows", "groups", "whole"]] = "whole"
    joins: ClassVar[Mapping[str, Join]] = {"old_logprobs": "subset", "ref_logprobs": "subset"}

    def measured(
        self, rollouts: Rollouts, old: OldLogprobs, ref: RefLogprobs, estimator: str, per: Per
    ) -> float | None:
        """The KL of these rollouts; None without a policy token."""
        from flowrl.functional.kl_control import measured_kl

        assert not old.is_current, "the plan removed log-probs that a controller measures"
        old_logprobs, ref_logprobs = old.old_logprobs.values, ref.ref_logprobs.values
        return measured_kl(old_logprobs, ref_logprobs, rollouts.loss_mask, estimator=estimator, per=per)

    def stats(self, old: OldLogprobs, kl: float | None, before: float, after: float) -> TrainStats:
        """Metrics of one update. One that measured nothing counts as no step."""
        metrics = {"kl_coef": before, "kl_coef_next": after} | ({} if kl is None else {"kl": kl})
        return TrainStats(metrics, old.origin.policy_version, num_optimizer_steps=0 if kl is None else 1)


def _control_problems(estimator: str, per: str) -> Iterable[str]:
    from flowrl.functional.kl import KL_ESTIMATORS

    if estimator not in KL_ESTIMATORS:
        yield f"estimator is {estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}"
    if per not in ("token", "sequence"):
        yield f"per is {per!r}; expected token or sequence"


class FixedKL(_KLControl):
    """Measure the KL and leave the coefficient as it is: what :class:`AdaptiveKL` is compared with.

    Args:
        coef: the coefficient, a number or a State.
        estimator: see :func:`flowrl.functional.kl.kl_estimate`.
        per: "token" or "sequence"; see :func:`flowrl.functional.kl_control.measured_kl`.

    Metrics: ``kl``, ``kl_coef`` and ``kl_coef_next``, which is the same.
    """

    estimator: str = "k1"
    per: Per = "token"

    def problems(self) -> Iterable[str]:
        yield from coefficient_problems(self.coef)
        yield from _control_problems(self.estimator, self.per)

    def __call__(self, rollouts: Rollouts, old_logprobs: OldLogprobs, ref_logprobs: RefLogprobs) -> TrainStats:
        coef = coefficient(self.coef)
        kl = self.measured(rollouts, old_logprobs, ref_logprobs, self.estimator, self.per)
        return self.stats(old_logprobs, kl, coef, coef)


class AdaptiveKL(_KLControl):
    """The one writer of an adaptive KL coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

    error = clip(kl/target − 1, −0.2, 0.2), coefficient ← coefficient · (1 + error · n/horizon), with n responses in
    the batch (K_β of the paper is n/horizon); see :func:`flowrl.functional.kl_control.adapted_kl_coef`. What reads
    the State (``KLPenalty(coef)``, a loss with ``kl_coef=coef``) runs before it in an iteration, and so sees the
    value that the iteration before left.

    Args:
        coef: the State that is written, which starts at a number above 0.
        target: the KL that is wanted, in nats, in the unit that ``per`` says.
        horizon: in responses, not in updates: after so many the coefficient has changed by a fifth at most.
        estimator: see :func:`flowrl.functional.kl.kl_estimate`.
        per: "token": ``target`` is the mean over policy tokens, as ``kl`` is elsewhere; "sequence": the mean over
            responses of their sums, as in the paper.

    Metrics: ``kl`` as measured, ``kl_coef`` that this iteration's readers saw, ``kl_coef_next``. ``policy_version``
    is that of the policy that was measured. Without a policy token in the batch, or with a KL of NaN, the coefficient
    stays as it is; the former counts as an empty update and has no ``kl``.

    Raises:
        FlowError: the batch has 5 times ``horizon`` responses or more.

    Example::

        coef = State("kl_coef", 0.05)
        rewards = KLPenalty(coef)(rollouts, scores, old_logprobs, ref_logprobs)
        control = AdaptiveKL(coef, target=0.1, horizon=10_000)(rollouts, old_logprobs, ref_logprobs)
        flow = RLFlow.from_outputs(PPOUpdater(actor)(rollouts, advantages, old_logprobs), control)
    """

    coef: State
    target: float
    horizon: float
    estimator: str = "k1"
    per: Per = "token"

    def writes(self) -> tuple[BaseModel | State, ...]:
        return (self.coef,)

    def problems(self) -> Iterable[str]:
        if not isinstance(self.coef, State):
            yield f"coef is {self.coef!r}; expected a State that starts at the coefficient: State('kl_coef', 0.05)"
        else:
            yield from coefficient_problems(self.coef)
            if self.coef.init == 0:
                yield f"coef is State {self.coef.name!r} with init 0; expected more than 0, since 0 times anything stays 0"
        for name, value in {"target": self.target, "horizon": self.horizon}.items():
            if not 0 < value < float("inf"):
                yield f"{name} is {value}; expected a finite number above 0"
        yield from _control_problems(self.estimator, self.per)

    def __call__(self, rollouts: Rollouts, old_logprobs: OldLogprobs, ref_logprobs: RefLogprobs) -> TrainStats:
        from flowrl.functional.kl_control import adapted_kl_coef

        before = after = coefficient(self.coef)
        kl = self.measured(rollouts, old_logprobs, ref_logprobs, self.estimator, self.per)
        if kl is not None:
            after = adapted_kl_coef(before, kl, target=self.target, horizon=self.horizon, num_rows=rollouts.num_rows)
            self.coef.set(after)
        return self.stats(old_logprobs, kl, before, after)
