"""The nodes that flows are composed of."""

from flowrl.nodes.advantage import GAE, GroupAdvantage
from flowrl.nodes.base import Node
from flowrl.nodes.critic import Critic
from flowrl.nodes.filter import DropUniformGroups, Filter
from flowrl.nodes.function import node
from flowrl.nodes.logprobs import PolicyLogprobs, ReferenceLogprobs
from flowrl.nodes.loss import Current, Loss, LossTerm, TokenLoss, loss
from flowrl.nodes.policy_losses import GRPOLoss, PPOLoss, SFTLoss, ValueLoss
from flowrl.nodes.reward import FunctionReward, KLPenalty, RewardModelScore, WeightedSum, rewards_like
from flowrl.nodes.rollout import Rollout, Sampling
from flowrl.nodes.shorthands import GRPOUpdater, PPOUpdater, SFTUpdater, ValueUpdater
from flowrl.nodes.source import Source, source
from flowrl.nodes.updater import AdamW, Updater

__all__ = [
    # the base, and how to write one's own
    "Node",
    "node",
    "Loss",
    "TokenLoss",
    "LossTerm",
    "Current",
    "loss",
    "Filter",
    "rewards_like",
    # from the source to the updater
    "Source",
    "source",
    "Rollout",
    "Sampling",
    "FunctionReward",
    "RewardModelScore",
    "WeightedSum",
    "KLPenalty",
    "PolicyLogprobs",
    "ReferenceLogprobs",
    "Critic",
    "DropUniformGroups",
    "GAE",
    "GroupAdvantage",
    "PPOLoss",
    "GRPOLoss",
    "ValueLoss",
    "SFTLoss",
    "Updater",
    "AdamW",
    "PPOUpdater",
    "GRPOUpdater",
    "ValueUpdater",
    "SFTUpdater",
]
