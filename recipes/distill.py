"""On-policy distillation: the student speaks, and the teacher says what it would have said there."""

from __future__ import annotations

from typing import Literal

from common import Setup, choose, load_model, right

from flowrl import (
    AdamW,
    Demonstrations,
    DistillLoss,
    Experiment,
    FlowError,
    Model,
    Prompts,
    RLFlow,
    Rollout,
    SFTLoss,
    Updater,
    recipe,
    source,
)


def tiny_teacher(setup: Setup, seed: int) -> Model:
    """Another tiny model, which has learnt the task from demonstrations; see sft.py."""
    teacher = load_model("tiny", seed, name="teacher")
    demonstrations = source(Demonstrations, name="demonstrations", batch_size=64)
    flow = RLFlow.from_outputs(Updater(teacher, optimizer=AdamW(2e-2))(SFTLoss()(demonstrations)))
    data = setup.demonstrations()
    for i in range(20):
        flow.step(data.rows(64 * i, 64, seed), seed=seed, iteration=i)
    return teacher


@recipe
def distill(
    model: str = "tiny",
    teacher: str | None = None,
    num_prompts: int = 32,
    objective: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    learning_rate: float | None = None,
    seed: int = 0,
) -> Experiment:
    """On-policy distillation: towards a teacher, on what the student says itself (arXiv 2306.13649).

    Args:
        model: the student: tiny, smollm2, or the name or folder of a chat model.
        teacher: a model with the student's vocabulary: a larger one of its family, or what another run exported. [default:
            for tiny one that learns the task first; a real student needs one]
        num_prompts: in an iteration.
        objective: forward_kl covers what the teacher would say, reverse_kl seeks what it would say most, jsd lies between.
        learning_rate: of AdamW. [default: 2e-2 for tiny, else 1e-5]
    """
    setup = choose(model, seed)
    student = setup.actor
    optimizer = AdamW(setup.default(learning_rate, tiny=2e-2, real=1e-5))
    if teacher is not None:
        expert = load_model(teacher, name="teacher")
    elif setup.tiny:
        expert = tiny_teacher(setup, seed + 1000)
    else:
        raise FlowError(
            "This student has no teacher", expected="--teacher with the name or folder of one", received="none"
        )

    prompts = source(Prompts, name="prompts", batch_size=num_prompts)
    rollouts = Rollout(student, sampling=setup.sampling())(prompts)
    loss = DistillLoss(expert, objective=objective)(rollouts)  # exact, over the whole vocabulary
    flow = RLFlow.from_outputs(Updater(student, optimizer=optimizer)(loss))

    evaluation = setup.evaluation(right, temperature=0.0)
    return setup.experiment(flow, setup.train, objective, evaluation, tiny_steps=30)
