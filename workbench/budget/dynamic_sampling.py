"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are replaced by fresh ones.

Such a group has no advantage. As in the released agentic code (github langfengQ/verl-agent, filter_groups): whole
batches are drawn until there are enough mixed groups, at most `max_batches` of them. Here a step that still has too few
trains on those it has, where the released code stops with an error; every episode that was drawn counts as sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError


@dataclass(frozen=True)
class DynamicSamplingConfig:
    max_batches: int = 10  # batches of rollouts that one step may draw; 1 keeps every group, as GRPO does

    def __post_init__(self):
        if self.max_batches < 1:
            raise WorkbenchError(f"dynamic sampling: max_batches must be at least 1, got {self.max_batches}")


def mixed_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) rewards and group labels -> (N,) bool: members of a group that holds two different rewards."""
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise WorkbenchError(
            f"mixed_groups: rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be (N,) both"
        )
    labels, index = torch.unique(groups, return_inverse=True)
    extremes = [
        rewards.new_zeros(len(labels)).scatter_reduce(0, index, rewards, how, include_self=False)
        for how in ("amin", "amax")
    ]
    return (extremes[0] < extremes[1])[index]
