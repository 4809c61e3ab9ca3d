"""flowrl: dataflow for reinforcement-learning post-training of language models.

Compose an :class:`RLFlow` of nodes, check it, run it. ``import flowrl`` is light: torch, transformers and the rest are
loaded when something runs.
"""

from flowrl.batches import (
    Advantages,
    Batch,
    Demonstrations,
    FinishReason,
    LogprobOrigin,
    OldLogprobs,
    Preferences,
    Prompts,
    RefLogprobs,
    Rewards,
    Rollouts,
    Sequences,
    SpanKind,
    Spans,
    TrainStats,
    Values,
)
from flowrl.compiler.cluster import Cluster
from flowrl.compiler.compile import compile
from flowrl.compiler.plan import Plan, Program
from flowrl.context import report, step
from flowrl.errors import FlowError
from flowrl.flow import RLFlow, WeightEdge
from flowrl.graph import Ref
from flowrl.models import Ema, Frozen, Model, RewardModel, Snapshot, State, ValueHead, ValueModel
from flowrl.nodes import *  # noqa: F403
from flowrl.nodes import __all__ as _node_names
from flowrl.ragged import Ragged
from flowrl.recipes import recipe
from flowrl.run import Evaluation, Experiment, RunResult, run

__version__ = "0.1.0"

__all__ = [
    "Advantages",
    "Batch",
    "Cluster",
    "Demonstrations",
    "Ema",
    "Evaluation",
    "Experiment",
    "FinishReason",
    "FlowError",
    "Frozen",
    "LogprobOrigin",
    "Model",
    "OldLogprobs",
    "Plan",
    "Preferences",
    "Program",
    "Prompts",
    "RLFlow",
    "Ragged",
    "Ref",
    "RefLogprobs",
    "RewardModel",
    "Rewards",
    "Rollouts",
    "RunResult",
    "Sequences",
    "Snapshot",
    "SpanKind",
    "Spans",
    "State",
    "TrainStats",
    "ValueHead",
    "ValueModel",
    "Values",
    "WeightEdge",
    "compile",
    "recipe",
    "report",
    "run",
    "step",
    *_node_names,
]
