"""Online DPO: sample, judge, learn from the pairs."""

from __future__ import annotations

from common import choose

from flowrl import (
    AdamW,
    DPOLoss,
    Experiment,
    Judge,
    Prompts,
    ReferenceLogprobs,
    RLFlow,
    Rollout,
    Updater,
    recipe,
    source,
)


@recipe
def online_dpo(
    model: str = "tiny",
    num_prompts: int | None = None,
    group_size: int = 6,
    beta: float = 0.1,
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """Online DPO: the policy's own responses, judged pair by pair, in place of recorded ones (arXiv 2402.04792).

    Args:
        model: tiny, smollm2, or the name or folder of a chat model.
        num_prompts: in an iteration. [default: 4 for tiny, else 8]
        group_size: responses to a prompt; the judge compares each with each.
        beta: how closely the policy is held to the weights at the start.
        learning_rate: of AdamW. [default: 3e-2 for tiny, else 5e-6]
    """
    setup = choose(model, seed)
    actor, worth = setup.actor, setup.reward_function
    optimizer = AdamW(setup.default(learning_rate, tiny=3e-2, real=5e-6))

    def better(response_a: str, response_b: str, answer: str) -> str:
        """In place of a judge that is asked: another model, or a person."""
        a, b = worth(response_a, answer), worth(response_b, answer)
        return "tie" if a == b else "a" if a > b else "b"

    prompts = source(Prompts, name="prompts", batch_size=setup.default(num_prompts, tiny=4, real=8))
    rollouts = Rollout(actor, group_size=group_size, sampling=setup.sampling())(prompts)
    preferences = Judge(better, pairs="all", isolate=False)(rollouts)
    ref_logprobs = ReferenceLogprobs(actor.frozen())(preferences)
    loss = DPOLoss(beta=beta)(preferences, ref_logprobs)
    flow = RLFlow.from_outputs(Updater(actor, optimizer=optimizer)(loss))

    return setup.experiment(flow, setup.train, "eval/heldout/reward", setup.evaluation(), tiny_steps=15)
