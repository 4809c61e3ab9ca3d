"""KTO: learn from answers that were liked or not, each for itself."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    Experiment,
    Feedback,
    KTOLoss,
    MismatchedCompletions,
    ReferenceLogprobs,
    RLFlow,
    Updater,
    recipe,
    source,
)


@recipe
def kto(
    model: str = "tiny",
    num_answers: int = 64,
    beta: float = 0.1,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """KTO: no pairs: each answer has a thumb up or down, and is compared with mismatched answers (arXiv 2402.01306).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_answers: in an iteration.
        beta: how closely the policy is held to the weights at the start.
        learning_rate: of AdamW. [default: 2e-2 for tiny, else 5e-6]
    """
    setup = choose(model, seed)
    actor = setup.actor
    optimizer = AdamW(setup.default(learning_rate, tiny=2e-2, real=5e-6))

    feedback = source(Feedback, name="feedback", batch_size=num_answers)
    mismatched = MismatchedCompletions()(feedback)  # each prompt with the answer to another one
    reference = ReferenceLogprobs(actor.frozen())
    loss = KTOLoss(beta=beta)(
        feedback, reference(feedback), mismatched=mismatched, mismatched_ref=reference(mismatched)
    )
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.feedback(), "accuracy", tiny_steps=16)
