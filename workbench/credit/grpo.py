"""GRPO (arXiv 2402.03300, eq. 3): a trajectory's reward against the mean of its group.

The released code of the agentic papers (github ZethWang/AgentOPSD, core_algos.py, read) differs in two ways: it takes
mean and standard deviation over the turn rows of a group, so long trajectories weigh more (`per="turn"`), and a group
of one keeps its raw reward as its advantage. Here a group of one, like a group of equal rewards, gets exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown
from ..records import Batch, Credit


@dataclass(frozen=True)
class GRPOConfig:
    std: bool = True  # divide by the group's standard deviation; False is Dr.GRPO (arXiv 2503.20783)
    eps: float = 1e-6  # added to the standard deviation
    ddof: int = 1  # 1: sample standard deviation, as the released code; 0: population
    per: str = "trajectory"  # what a group's mean and deviation run over: "trajectory", or "turn" as the released code

    def __post_init__(self):
        if self.per not in ("trajectory", "turn"):
            raise unknown("advantage per", str(self.per), ("trajectory", "turn"))
        if self.ddof not in (0, 1):
            raise WorkbenchError(f"GRPO: ddof must be 0 or 1, got {self.ddof}")
        if not self.eps >= 0:
            raise WorkbenchError(f"GRPO: eps must be at least 0, got {self.eps}")


def group_advantage(rewards: Tensor, groups: Tensor, *, std: bool = True, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """(N,) rewards on any scale and (N,) group labels -> (N,) advantages, `(r - mean) / (std + eps)` in each group.

    Exactly 0 in groups of one and of equal rewards; of torch's default dtype where rewards are integers. Raises
    WorkbenchError on a reward that is not finite.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise WorkbenchError(
            f"group_advantage: rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be (N,) both"
        )
    if not bool(torch.isfinite(rewards).all()):
        raise WorkbenchError(f"group_advantage: reward {int((~torch.isfinite(rewards)).nonzero()[0])} is not finite")
    rewards = rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
    if rewards.numel() == 0:
        return rewards.clone()
    labels, index = torch.unique(groups, return_inverse=True)
    zeros = rewards.new_zeros(len(labels))
    count = zeros.index_add(0, index, torch.ones_like(rewards))
    low = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    # The rounded mean of equal rewards need not equal them, and dividing by eps would make that residue large.
    mixed = high > low
    width = torch.where(mixed, high - low, 1)
    # In [0, 1], as the squares of very small or large rewards are out of range.
    share = (rewards - low[index]) / width[index]
    mean = zeros.index_add(0, index, share) / count
    centred = torch.where(mixed[index], share - mean[index], 0)
    if not std:
        return centred * width[index]
    variance = zeros.index_add(0, index, centred.square()) / (count - ddof).clamp(min=1)
    return centred / torch.where(mixed, variance.sqrt() + eps / width, 1)[index]


def turn_advantages(batch: Batch, config: GRPOConfig) -> Tensor:
    """(E,K) advantage of every turn, 0 where there is none; a turn counts once, however many rows repeat it."""
    episodes = torch.arange(len(batch.reward), device=batch.reward.device)
    if config.per == "turn":
        episodes = batch.turn_mask.nonzero()[:, 0]
    values = group_advantage(
        batch.reward[episodes], batch.group_index[episodes], std=config.std, eps=config.eps, ddof=config.ddof
    )
    per_episode = values.new_zeros(batch.reward.shape)
    per_episode[episodes] = values
    return torch.where(batch.turn_mask, per_episode[:, None], 0)


def credit(batch: Batch, config: GRPOConfig = GRPOConfig()) -> Credit:
    """Every sampled token of a trajectory gets the trajectory's advantage, from `batch.reward`."""
    turns = turn_advantages(batch, config)
    return Credit(batch.to_tokens(turns), {"turn_advantage": turns})
