"""DPO: learn from pairs of a chosen and a rejected answer."""

from __future__ import annotations

from typing import Literal

from common import choose

from flowrl import AdamW, DPOLoss, Experiment, Preferences, ReferenceLogprobs, RLFlow, Updater, recipe, source


@recipe
def dpo(
    model: str = "tiny",
    num_pairs: int = 32,
    beta: float = 0.1,
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid",
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """DPO: raise the log-ratio to the start of chosen answers above that of rejected ones (arXiv 2305.18290).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_pairs: in an iteration.
        beta: how closely the policy is held to the weights at the start.
        loss: sigmoid is DPO; ipo, hinge and robust are its variants.
        learning_rate: of AdamW. [default: 2e-2 for tiny, else 5e-6]
    """
    setup = choose(model, seed)
    actor = setup.actor
    optimizer = AdamW(setup.default(learning_rate, tiny=2e-2, real=5e-6))

    preferences = source(Preferences, name="preferences", batch_size=num_pairs)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(preferences)
    term = DPOLoss(beta=beta, loss=loss)(preferences, ref_logprobs)
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(term))

    return setup.experiment(flow, setup.preferences(), "accuracy", tiny_steps=20)
