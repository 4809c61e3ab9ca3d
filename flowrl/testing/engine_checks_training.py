"""Checks of engines: optimiser steps, against plain autograd and torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowrl.batches import Advantages, Demonstrations, Preferences, Rollouts, Values
from flowrl.testing.engine_bench import Bench, check
from flowrl.testing.engine_checks_scoring import wrong_rows
from flowrl.testing.engine_rows import advantages_of, pairs_of, plain_hidden, plain_rewards, plain_scores, rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowrl.nodes.loss import TermRows
    from flowrl.nodes.updater import AdamW
    from flowrl.runtime.engines.base import StepResult

#: Weights after two steps, and gradient norms, against plain autograd: relative L2.
WEIGHTS = 1e-5
#: What two steps did to the weights: relative L2 of the change.
CHANGE = 1e-3


def adamw(**settings: Any) -> AdamW:
    """An optimiser that makes large steps, and whose ``eps`` keeps rounding errors of tiny gradients small."""
    from flowrl.nodes.updater import AdamW

    return AdamW(**{"learning_rate": 1e-2, "eps": 1e-4, "weight_decay": 0.1, **settings})


# -- terms, and the same objectives written out ---------------------------------------------------------------------------


def term_rows(term: Any, engine: Any) -> TermRows:
    from flowrl.nodes.updater import term_rows as made

    return made(term, engine)


def policy_term(engine: Any, rollouts: Rollouts, advantages: Advantages, **settings: Any) -> TermRows:
    from flowrl.nodes.policy_losses import ReinforceLoss

    return term_rows(ReinforceLoss(**settings)(rollouts, advantages), engine)


def policy_objective(module: Any, rollouts: Rollouts, advantages: Advantages) -> Tensor:
    """−A·log π, mean over policy tokens."""
    mask = rollouts.loss_mask.values.bool()
    losses = -advantages.advantages.values[mask] * plain_scores(module, rollouts)["logprobs"][mask]
    return losses.sum() / max(1, int(mask.sum()))


def demonstrations(seed: int = 5) -> Demonstrations:
    some = rows(3, 1, seed=seed, response_lengths=(2, 3, 1))
    return Demonstrations(some.prompt_id, some.sample_id, some.tokens, some.spans)


def value_term(engine: Any, rollouts: Rollouts, advantages: Advantages) -> TermRows:
    import torch

    from flowrl.nodes.value_loss import ValueLoss

    old = rollouts.loss_mask.with_values(torch.zeros(len(rollouts.loss_mask.values)))
    return term_rows(ValueLoss()(rollouts, Values(rollouts.prompt_id, rollouts.sample_id, old), advantages), engine)


def value_objective(values: Tensor, rollouts: Rollouts, advantages: Advantages) -> Tensor:
    """Half the squared error, mean over policy tokens."""
    mask = rollouts.loss_mask.values.bool()
    return 0.5 * ((values - advantages.returns.values)[mask] ** 2).mean()


def pair_term(engine: Any, pairs: Preferences) -> TermRows:
    from flowrl.nodes.preference_losses import BradleyTerryLoss

    return term_rows(BradleyTerryLoss()(pairs), engine)


def pair_objective(module: Any, pairs: Preferences) -> Tensor:
    """−log σ(chosen − rejected), mean over pairs; the chosen are the even rows."""
    import torch

    scores = plain_rewards(module, pairs)
    return -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()


@dataclass
class Plain:
    """The plain model with torch's own AdamW.

    Args:
        parameters: by name, those that are trained.
    """

    parameters: dict[str, nn.Parameter]
    settings: AdamW
    max_grad_norm: float | None
    optimizer: Any = None
    steps: int = 0

    def step(self, objective: Callable[[], Tensor]) -> tuple[float, float]:
        """One step; the objective before it, and the gradient's norm before clipping."""
        import torch

        trained = list(self.parameters.values())
        if self.optimizer is None:
            s = self.settings
            self.optimizer = torch.optim.AdamW(trained, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay)
        value = objective()
        gradients = torch.autograd.grad(value, trained)
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        factor = self.max_grad_norm / norm if self.max_grad_norm and norm > self.max_grad_norm else 1.0
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient * factor
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate_at(self.steps)
        self.optimizer.step()
        self.steps += 1
        return float(value.detach()), norm


def agree(bench: Bench, engine: Any, plain: Plain, before: dict[str, Tensor], names: dict[str, str]) -> None:
    """Weights, and what the steps did to them, are those of the plain model.

    Args:
        before: the engine's weights before the steps.
        names: the plain model's name of a weight of the engine, where it differs.
    """
    import torch

    after: dict[str, Tensor] = dict(engine.weights())
    bench.true("every trained weight is given out", len(after) == len(plain.parameters), sorted(after))
    theirs = {n: plain.parameters[names.get(n, n)].detach() for n in after}
    flat = [torch.cat([tensors[n].flatten() for n in sorted(after)]) for tensors in (after, theirs, before)]
    bench.near("weights after the steps", flat[0], flat[1], tolerance=WEIGHTS)
    bench.near("changes of the weights", flat[0] - flat[2], flat[1] - flat[2], tolerance=CHANGE)


def reported(bench: Bench, result: StepResult, loss: float, norm: float) -> None:
    import torch

    bench.true("the step was not skipped", not result.skipped and not result.nonfinite_rows, result)
    total, count = result.sums["loss"]
    bench.close("the loss reported", torch.tensor(total / count), torch.tensor(loss), tolerance=1e-5)
    bench.close("the gradient norm reported", torch.tensor(result.grad_norm / norm), torch.tensor(1.0), tolerance=1e-4)


# -- steps ----------------------------------------------------------------------------------------------------------------


@check("train: two steps of a policy are those of plain autograd and AdamW", "train", "weights")
def _(bench: Bench) -> None:
    for budget, limit in ((4096, None), (20, 0.5)):
        engine, module = bench.open("policy", micro_batch_tokens=budget), bench.plain("policy")
        before, settings = dict(engine.weights()), adamw()
        plain = Plain(dict(module.named_parameters()), settings, limit)
        for seed in (0, 1):
            some = rows(seed=seed)
            advantages = advantages_of(some)
            loss, norm = plain.step(lambda: policy_objective(module, some, advantages))  # noqa: B023
            bench.true("the gradient is clipped", limit is None or norm > limit, norm)
            result = engine.train_step([policy_term(engine, some, advantages)], settings, max_grad_norm=limit)
            reported(bench, result, loss, norm)
        agree(bench, engine, plain, before, {})


@check("train: two steps of a critic", "train", "values", "weights")
def _(bench: Bench) -> None:
    import torch

    engine, body = bench.open("value", micro_batch_tokens=30), bench.plain("value")
    before, settings = dict(engine.weights()), adamw()
    head = torch.nn.Linear(body.config.hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = dict(body.named_parameters()) | {f"head.{n}": p for n, p in head.named_parameters()}
    extra = [n for n in before if n not in parameters]
    bench.same("tensors of the head", sorted(before[n].numel() for n in extra), [1, body.config.hidden_size])
    names = {n: "head.bias" if before[n].numel() == 1 else "head.weight" for n in extra}
    plain = Plain(parameters, settings, None)
    for seed in (0, 1):
        some = rows(seed=seed)
        advantages = advantages_of(some)

        def objective(some: Rollouts = some, advantages: Advantages = advantages) -> Tensor:
            return value_objective(head(plain_hidden(body, some))[:, 0], some, advantages)

        loss, norm = plain.step(objective)
        reported(
            bench, engine.train_step([value_term(engine, some, advantages)], settings, max_grad_norm=None), loss, norm
        )
    agree(bench, engine, plain, before, names)


@check("train: two steps of a reward model; pairs stay together", "train", "score", "weights")
def _(bench: Bench) -> None:
    for budget in (4096, 1):
        engine, module = bench.open("reward", micro_batch_tokens=budget), bench.plain("reward")
        before, settings = dict(engine.weights()), adamw()
        plain = Plain(dict(module.named_parameters()), settings, 1.0)
        for seed in (0, 1):
            pairs = pairs_of(5, seed=seed)
            loss, norm = plain.step(lambda: pair_objective(module, pairs))  # noqa: B023
            reported(bench, engine.train_step([pair_term(engine, pairs)], settings, max_grad_norm=1.0), loss, norm)
        agree(bench, engine, plain, before, {})


@check("train: terms over the same rows and over others add up", "train", "weights")
def _(bench: Bench) -> None:
    from flowrl.nodes.sft import SFTLoss

    engine, module = bench.open("policy", micro_batch_tokens=25), bench.plain("policy")
    before, settings, some, demos = dict(engine.weights()), adamw(), rows(), demonstrations()
    first, second = advantages_of(some), advantages_of(some, seed=1)
    plain = Plain(dict(module.named_parameters()), settings, None)

    def objective() -> Tensor:
        mask = demos.loss_mask.values.bool()
        imitate = -plain_scores(module, demos)["logprobs"][mask].mean()
        return policy_objective(module, some, first) + 0.5 * policy_objective(module, some, second) + 0.3 * imitate

    loss, norm = plain.step(objective)
    terms = [
        policy_term(engine, some, first),
        policy_term(engine, some, second, weight=0.5),
        term_rows(SFTLoss(weight=0.3)(demos), engine),
    ]
    reported(bench, engine.train_step(terms, settings, max_grad_norm=None), loss, norm)
    agree(bench, engine, plain, before, {})


@check("train: a value head and its trunk in one step", "train", "values", "weights")
def _(bench: Bench) -> None:
    import torch

    from flowrl.models import ValueHead
    from flowrl.nodes.value_loss import ValueLoss

    engine, module = bench.open("policy", micro_batch_tokens=25), bench.plain("policy")
    head = ValueHead(engine.model) if hasattr(engine, "model") else None
    if head is None:
        return
    engine.add_value_head(head.name)
    before, settings, some = dict(engine.weights()), adamw(), rows()
    advantages = advantages_of(some)
    linear = torch.nn.Linear(module.config.hidden_size, 1)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    parameters = dict(module.named_parameters()) | {f"head.{n}": p for n, p in linear.named_parameters()}
    names = {n: "head.bias" if before[n].numel() == 1 else "head.weight" for n in before if n not in parameters}
    plain = Plain(parameters, settings, None)
    zeros = some.loss_mask.with_values(torch.zeros(len(some.loss_mask.values)))
    old = Values(some.prompt_id, some.sample_id, zeros)
    for _step in range(2):

        def objective() -> Tensor:
            values = linear(plain_hidden(module.base_model, some))[:, 0]
            return policy_objective(module, some, advantages) + value_objective(values, some, advantages)

        loss, norm = plain.step(objective)
        terms = [policy_term(engine, some, advantages), term_rows(ValueLoss(head)(some, old, advantages), engine)]
        reported(bench, engine.train_step(terms, settings, max_grad_norm=None), loss, norm)
    agree(bench, engine, plain, before, names)


@check("train: few, single and long rows, whatever the budget", "train", "weights")
def _(bench: Bench) -> None:
    """1, 2, 3, 5 and 7 rows: fewer than ranks, or not divisible by them; and a row above the budget."""
    import torch

    module = bench.plain("policy")
    engine = bench.open("policy", micro_batch_tokens=10)
    weights = dict(engine.weights())
    for count in (1, 2, 3, 5, 7):
        some = rows(7, 1, response_lengths=(4, 2, 30, 0, 6, 3)).select(torch.arange(count))
        advantages = advantages_of(some)
        with torch.enable_grad():
            value = policy_objective(module, some, advantages)
        norm = float(torch.stack([g.norm() for g in torch.autograd.grad(value, list(module.parameters()))]).norm())
        engine.load_weights(weights, policy_version=0)
        result = engine.train_step([policy_term(engine, some, advantages)], adamw(), max_grad_norm=None)
        reported(bench, result, float(value.detach()), norm)


@check("train: a step in which nothing pulls is a step with a gradient of 0", "train", "weights")
def _(bench: Bench) -> None:
    """Advantages that are all 0: momentum and weight decay go on, as they do in the plain optimiser."""
    import torch

    engine, module = bench.open("policy", micro_batch_tokens=25), bench.plain("policy")
    before, settings, some = dict(engine.weights()), adamw(), rows()
    advantages = advantages_of(some)
    nothing = replace(advantages, advantages=some.loss_mask.with_values(torch.zeros(len(some.loss_mask.values))))
    plain = Plain(dict(module.named_parameters()), settings, None)
    for pull in (advantages, nothing):
        plain.step(lambda: policy_objective(module, some, pull))  # noqa: B023
        result = engine.train_step([policy_term(engine, some, pull)], settings, max_grad_norm=1e9)
    bench.same("the gradient norm", (result.grad_norm, result.skipped), (0.0, False))
    agree(bench, engine, plain, before, {})


@check("train: no rows", "train", "weights")
def _(bench: Bench) -> None:
    import torch

    engine = bench.open("policy")
    before = dict(engine.weights())
    none = rows().select(torch.zeros(0, dtype=torch.int64))
    for terms in ([], [policy_term(engine, none, advantages_of(none))]):
        result = engine.train_step(terms, adamw(weight_decay=0.0), max_grad_norm=1.0)
        bench.same("norm and skipped", (result.grad_norm, result.skipped, result.nonfinite_rows), (0.0, False, ()))
        bench.true("sums of nothing are 0", all(total == 0 for total, _ in result.sums.values()), result.sums)
    bench.unchanged(engine, before)


@check("train: the learning rate follows its schedule, counted in steps", "train")
def _(bench: Bench) -> None:
    engine, some = bench.open("policy"), rows(2, 1)
    warm = adamw(learning_rate=1e-3, warmup_steps=4)
    terms = [policy_term(engine, some, advantages_of(some))]
    rates = [engine.train_step(terms, warm, max_grad_norm=None).learning_rate for _ in range(3)]
    bench.same("learning rates", rates, [warm.learning_rate_at(i) for i in range(3)])


@check("train: equal engines give equal weights, bit for bit", "train", "weights")
def _(bench: Bench) -> None:
    engines = [bench.open("policy", micro_batch_tokens=25) for _ in range(2)]
    some = rows()
    for engine in engines:
        for seed in (0, 1):
            terms = [policy_term(engine, some, advantages_of(some, seed=seed))]
            engine.train_step(terms, adamw(), max_grad_norm=1.0)
    bench.unchanged(engines[0], dict(engines[1].weights()))


# -- what is not finite -----------------------------------------------------------------------------------------------------


def spoilt(advantages: Advantages, spoils: dict[int, float]) -> Advantages:
    """The same with one advantage of these rows set."""
    values = advantages.advantages.values.clone()
    for row, value in spoils.items():
        values[int(advantages.advantages.offsets[row])] = value
    return replace(advantages, advantages=advantages.advantages.with_values(values))


def skips(bench: Bench, spoils: dict[int, float], expected: Sequence[tuple[int, int]], budget: int) -> None:
    some = rows()
    advantages = advantages_of(some)
    engine, untouched = (bench.open("policy", micro_batch_tokens=budget) for _ in range(2))
    good, bad = (policy_term(engine, some, a) for a in (advantages, spoilt(advantages, spoils)))
    engine.train_step([good], adamw(), max_grad_norm=1.0)
    before = dict(engine.weights())
    result = engine.train_step([bad], adamw(), max_grad_norm=1.0)
    bench.true("the step is skipped", result.skipped, result)
    bench.same("rows to blame, by (prompt_id, sample_id)", sorted(result.nonfinite_rows), sorted(expected))
    bench.unchanged(engine, before)
    for other in (engine, untouched):  # which had no bad step: neither its optimiser nor its counters may tell
        if other is untouched:
            other.train_step([good], adamw(), max_grad_norm=1.0)
        last = other.train_step([good], adamw(warmup_steps=9), max_grad_norm=1.0)
        bench.true("the next step is an ordinary one", not last.skipped and math.isfinite(last.grad_norm), last)
    bench.unchanged(engine, dict(untouched.weights()))


@check("train: a loss that is not finite skips the step and names its rows", "train", "weights")
def _(bench: Bench) -> None:
    for budget, spoils, expected in (
        (4096, {4: math.nan, 8: math.inf}, [(1, 1), (2, 2)]),
        (20, {4: math.nan, 8: math.inf}, [(1, 1), (2, 2)]),
        (1, {0: math.nan}, [(0, 0)]),
    ):
        skips(bench, spoils, expected, budget)


@check("train: a gradient that is not finite skips the step and names its rows", "train", "weights")
def _(bench: Bench) -> None:
    """An advantage so large that the loss is finite, and its gradient is not."""
    for budget in (4096, 20):
        skips(bench, {4: 3e38}, [(1, 1)], budget)


@check("train: NaN where no token counts changes nothing", "train", "weights")
def _(bench: Bench) -> None:
    import torch

    some = rows()
    advantages = advantages_of(some)
    values = advantages.advantages.values
    nan = torch.where(some.loss_mask.values.bool(), values, torch.nan)
    engines = [bench.open("policy", micro_batch_tokens=25) for _ in range(2)]
    for engine, column in zip(engines, (values, nan), strict=True):
        part = replace(advantages, advantages=some.loss_mask.with_values(column))
        result = engine.train_step([policy_term(engine, some, part)], adamw(), max_grad_norm=1.0)
        bench.true("the step is not skipped", not result.skipped, result)
    bench.unchanged(engines[0], dict(engines[1].weights()))


# -- what is refused ----------------------------------------------------------------------------------------------------------


@check("train: a Model that is not trainable is refused", "train", "weights")
def _(bench: Bench) -> None:
    engine, some = bench.open("policy", trainable=False), rows()
    before = dict(engine.weights())
    with bench.refused("A step of a Model with trainable=False"):
        engine.train_step([policy_term(engine, some, advantages_of(some))], adamw(), max_grad_norm=1.0)
    bench.unchanged(engine, before)


@check("train: rows that no model can take are refused by name", "train", "weights")
def _(bench: Bench) -> None:
    engine = bench.open("policy", micro_batch_tokens=20)
    before = dict(engine.weights())
    for what, (wrong, row) in wrong_rows(bench, engine).items():
        with bench.refused(what, naming=[f"prompt_id {int(wrong.prompt_id[row])}"]):
            engine.train_step([policy_term(engine, wrong, advantages_of(wrong))], adamw(), max_grad_norm=1.0)
    bench.unchanged(engine, before)
