"""RLOO (arXiv 2402.14740): a trajectory's reward against the mean reward of the others in its group.

The released code of the agentic papers (github ZethWang/AgentOPSD, core_algos.py, read) differs in two ways: it counts
the turn rows of a group (`per="turn"`), where a trajectory's own other rows are in its baseline, and a group of one
keeps its raw reward as its advantage. Here a group of one, like a group of equal rewards, gets exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import unknown
from ..records import Batch, Credit
from .grpo import group_advantage


@dataclass(frozen=True)
class RLOOConfig:
    per: str = "trajectory"  # the baseline is a mean over each "trajectory", or "turn" row as in the released code

    def __post_init__(self):
        if self.per not in ("trajectory", "turn"):
            raise unknown("advantage per", str(self.per), ("trajectory", "turn"))


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) rewards on any scale and (N,) group labels -> (N,) rewards less the mean of the others in their group.

    That is `n / (n - 1) (r - mean)` in a group of n, exactly 0 in groups of one and of equal rewards.
    Raises WorkbenchError on a reward that is not finite.
    """
    centred = group_advantage(rewards, groups, std=False)
    if rewards.numel() == 0:
        return centred
    _, index, count = torch.unique(groups, return_inverse=True, return_counts=True)
    count = count.to(centred.dtype)
    return centred * (count / (count - 1).clamp(min=1))[index]


def credit(batch: Batch, config: RLOOConfig = RLOOConfig()) -> Credit:
    """Every sampled token of a trajectory gets the trajectory's advantage, from `batch.reward`."""
    episodes = torch.arange(len(batch.reward), device=batch.reward.device)
    if config.per == "turn":
        episodes = batch.turn_mask.nonzero()[:, 0]
    values = leave_one_out(batch.reward[episodes], batch.group_index[episodes])
    per_episode = values.new_zeros(batch.reward.shape)
    per_episode[episodes] = values
    turns = torch.where(batch.turn_mask, per_episode[:, None], 0)
    return Credit(batch.to_tokens(turns), {"turn_advantage": turns})
