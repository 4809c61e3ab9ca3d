"""Data sets and tasks: what a source draws from.

Importing this package loads neither torch nor reasoning_gym.
"""

from flowrl.data.datasets import Dataset, DemonstrationDataset, PromptDataset
from flowrl.data.entries import decode_entry
from flowrl.data.preferences import FeedbackDataset, PreferenceDataset
from flowrl.data.tasks import Task, reasoning_gym_task

__all__ = [
    "Dataset",
    "PromptDataset",
    "DemonstrationDataset",
    "PreferenceDataset",
    "FeedbackDataset",
    "Task",
    "reasoning_gym_task",
    "decode_entry",
]
