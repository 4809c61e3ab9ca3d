"""What the tests of the transformers engine share: engines on tiny models, plain forward passes, losses."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.batches import Rollouts, Sequences
from flowrl.context import Bindings
from flowrl.models import Model
from flowrl.nodes.loss import Current, LossTerm, TermRows, TokenLoss
from flowrl.runtime.worker import open_engine
from tests.tiny import tiny_tokenizer


def engine_of(module: Any, *, micro_batch_tokens: int = 4096, **settings: Any) -> Any:
    """An engine on a live module, with the tiny tokenizer."""
    model = Model(module, name="live", tokenizer=tiny_tokenizer(), device="cpu", **settings)
    return open_engine(model, Bindings(open_engine, micro_batch_tokens=micro_batch_tokens))


@torch.no_grad()
def plain_logprobs(module: Any, sequences: Sequences, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens, row by row, the model being called as anybody would; in response
    layout. Its eager attention is the reference: it leaves out nothing."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    logprobs, entropies = [], []
    for row, start in zip(sequences.tokens.rows(), sequences.prompt_lengths.tolist(), strict=True):
        table = torch.log_softmax(module(input_ids=row[None]).logits[0].float() / temperature, -1)
        for place in range(start, len(row)):
            logprobs.append(table[place - 1, row[place]])
            entropies.append(-(table[place - 1].exp() * table[place - 1]).sum())
    module.set_attn_implementation(before)
    return torch.stack(logprobs), torch.stack(entropies)


class Reinforce(TokenLoss):
    """``-weight of the token * log-prob``, with an entropy bonus where asked for."""

    entropy_coef: float = 0.0

    def __call__(self, rollouts: Rollouts) -> LossTerm:
        return self.term(rollouts=rollouts)

    @property
    def requires(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"logprobs", "entropy"} if self.entropy_coef else {"logprobs"})

    def token_losses(self, current: Current, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        rollouts: Rollouts = inputs["rollouts"]
        assert current.logprobs is not None
        losses = -rollouts.rollout_logprobs.values * current.logprobs  # any weight a token will do
        if current.entropy is not None:
            losses = losses - self.entropy_coef * current.entropy
        return losses, {"logprob": current.logprobs}


class GroupReinforce(Reinforce):
    """The same, but it wants to see whole groups."""

    couples: ClassVar[str] = "group"


class Regression(TokenLoss):
    """Values towards the rollout log-probs."""

    value_head: Any = None

    requires: ClassVar[frozenset[str]] = frozenset({"values"})

    def head(self) -> Any:
        return self.value_head

    def __call__(self, rollouts: Rollouts) -> LossTerm:
        return self.term(rollouts=rollouts)

    def token_losses(self, current: Current, **inputs: Any) -> Tensor:
        assert current.values is not None
        return (current.values - inputs["rollouts"].rollout_logprobs.values) ** 2


def term_rows(term: LossTerm) -> TermRows:
    """A term over the rows of one optimiser step."""
    nobody: Any = None  # none of these losses asks the policy anything beforehand
    return TermRows(term, term.loss.prepare(nobody, **term.inputs), term.loss.count(**term.inputs))


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    return float((found - expected).norm() / expected.norm())


def gradients(engine: Any, terms: list[TermRows]) -> Tensor:
    """All gradients of one step in one vector, ``[num_parameters]``: read before the optimiser would use them."""
    from flowrl.nodes.updater import AdamW

    seen: list[Tensor] = []
    optimizer = engine.torch_optimizer(AdamW())

    def read(*_: Any) -> None:
        parameters = [p for _, p in engine.trained_parameters()]
        seen.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))

    hook = optimizer.register_step_pre_hook(read)
    engine.train_step(terms, AdamW(learning_rate=0.0, weight_decay=0.0), max_grad_norm=None)
    hook.remove()
    return seen[0]
