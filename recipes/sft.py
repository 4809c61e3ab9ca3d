"""SFT: imitate demonstrations."""

from __future__ import annotations

from common import choose, right

from flowrl import AdamW, Demonstrations, Experiment, RLFlow, SFTLoss, Updater, recipe, source


@recipe
def sft(
    model: str = "tiny",
    num_demonstrations: int = 64,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """SFT: maximise the likelihood of demonstrations, token by token (as in arXiv 2203.02155, section 3.5).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_demonstrations: in an iteration.
        learning_rate: of AdamW. [default: 2e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    optimizer = AdamW(setup.default(learning_rate, tiny=2e-2, real=1e-5))

    demonstrations = source(Demonstrations, name="demonstrations", batch_size=num_demonstrations)
    flow = RLFlow.from_outputs(Updater(setup.actor, optimizer=optimizer)(SFTLoss()(demonstrations)))

    evaluation = setup.evaluation(right, temperature=0.0)
    return setup.experiment(flow, setup.demonstrations(), "eval/heldout/reward", evaluation, tiny_steps=20)
