"""The nodes that flows are composed of."""

from flowrl.nodes.advantage import GAE
from flowrl.nodes.base import Node
from flowrl.nodes.concat import Concat
from flowrl.nodes.covariance_losses import ClipCovLoss, KLCovLoss
from flowrl.nodes.critic import Critic
from flowrl.nodes.distillation import DistillLoss, FullKLLoss, TeacherTopK, TopKDistillLoss, TopLogprobs
from flowrl.nodes.filter import DropUniformGroups, Filter, KeepAccuracyBand
from flowrl.nodes.function import node
from flowrl.nodes.group_advantage import (
    GDPOAdvantage,
    GPGAdvantage,
    GroupAdvantage,
    NormalizedAdvantage,
    OPOAdvantage,
    PassKAdvantage,
)
from flowrl.nodes.importance import IcePop, ImportanceCorrection, RejectionMask, TruncatedImportance
from flowrl.nodes.judge import Judge
from flowrl.nodes.kl_control import AdaptiveKL, FixedKL
from flowrl.nodes.logprobs import PolicyLogprobs, ReferenceLogprobs
from flowrl.nodes.loss import Current, Loss, LossTerm, TokenLoss, loss
from flowrl.nodes.pairs import BestOfN, MismatchedCompletions, RewardPairs, ToFeedback
from flowrl.nodes.policy_loss_base import PolicyLoss, PolicyTokens
from flowrl.nodes.policy_losses import (
    CISPOLoss,
    DecoupledPPOLoss,
    DPPOLoss,
    DROLoss,
    GMPOLoss,
    GPGLoss,
    GRPOLoss,
    GSPOLoss,
    PPOLoss,
    ReinforceLoss,
    SAPOLoss,
)
from flowrl.nodes.preference_losses import BradleyTerryLoss, DPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from flowrl.nodes.reward import FunctionReward, KLPenalty, RewardModelScore, WeightedSum, rewards_like
from flowrl.nodes.reward_shaping import (
    ClipReward,
    DropTruncated,
    GroupLengthReward,
    LengthPenalty,
    MaskTruncated,
    OverlongPenalty,
    RunningNormalization,
)
from flowrl.nodes.rollout import Rollout, Sampling
from flowrl.nodes.row_advantage import FunctionAdvantage, RowAdvantage, ScoredRows
from flowrl.nodes.sequence_loss import PairLoss, Pairs, RowLoss
from flowrl.nodes.sft import SFTLoss
from flowrl.nodes.shorthands import GRPOUpdater, PolicyUpdater, PPOUpdater, SFTUpdater, ValueUpdater
from flowrl.nodes.source import Source, source
from flowrl.nodes.token_advantage import OptimalTokenBaseline, ReinforcePlusPlus, ReMaxAdvantage
from flowrl.nodes.updater import AdamW, Updater
from flowrl.nodes.value_loss import ValueLoss

__all__ = [
    # the base, and how to write one's own
    "Node",
    "node",
    "Loss",
    "TokenLoss",
    "LossTerm",
    "Current",
    "loss",
    "RowLoss",
    "PairLoss",
    "Pairs",
    "Filter",
    "rewards_like",
    # from the source to rewards
    "Source",
    "source",
    "Rollout",
    "Sampling",
    "Concat",
    "FunctionReward",
    "RewardModelScore",
    "WeightedSum",
    "KLPenalty",
    "OverlongPenalty",
    "LengthPenalty",
    "GroupLengthReward",
    "ClipReward",
    "RunningNormalization",
    "MaskTruncated",
    # filters
    "DropUniformGroups",
    "KeepAccuracyBand",
    "DropTruncated",
    # scores, and controllers of a KL coefficient
    "PolicyLogprobs",
    "ReferenceLogprobs",
    "Critic",
    "FixedKL",
    "AdaptiveKL",
    # off-policy correction
    "ImportanceCorrection",
    "TruncatedImportance",
    "IcePop",
    "RejectionMask",
    # advantages
    "GAE",
    "GroupAdvantage",
    "NormalizedAdvantage",
    "OPOAdvantage",
    "GPGAdvantage",
    "PassKAdvantage",
    "GDPOAdvantage",
    "RowAdvantage",
    "FunctionAdvantage",
    "ScoredRows",
    "ReinforcePlusPlus",
    "ReMaxAdvantage",
    "OptimalTokenBaseline",
    # policy losses
    "PPOLoss",
    "GRPOLoss",
    "DecoupledPPOLoss",
    "GSPOLoss",
    "GMPOLoss",
    "SAPOLoss",
    "CISPOLoss",
    "DROLoss",
    "DPPOLoss",
    "ReinforceLoss",
    "GPGLoss",
    "ClipCovLoss",
    "KLCovLoss",
    "PolicyLoss",
    "PolicyTokens",
    "FullKLLoss",
    # other losses
    "ValueLoss",
    "SFTLoss",
    "DistillLoss",
    "TopKDistillLoss",
    "TeacherTopK",
    "TopLogprobs",
    "DPOLoss",
    "SimPOLoss",
    "ORPOLoss",
    "KTOLoss",
    "BradleyTerryLoss",
    # pairs, labels and demonstrations from rollouts
    "Judge",
    "RewardPairs",
    "BestOfN",
    "ToFeedback",
    "MismatchedCompletions",
    # writers
    "Updater",
    "AdamW",
    "PPOUpdater",
    "GRPOUpdater",
    "PolicyUpdater",
    "ValueUpdater",
    "SFTUpdater",
]
