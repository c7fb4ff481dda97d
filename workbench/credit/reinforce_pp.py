"""REINFORCE++-baseline (arXiv 2501.03262): reward less its group's mean, whitened over the whole batch.

Matches the released code (github volcengine/verl and its fork in ZethWang/AgentOPSD, core_algos.py, read): the mean and
the sample variance run over the batch's sampled tokens, and the mean is taken out. As long trajectories hold more
tokens, that mean is not 0, so trajectories of a group without a signal of its own get a small advantage there;
`over="trajectory"` has no such shift. Departures: a row that repeats a turn counts once, a group of one is 0 before
whitening (the code leaves its raw reward), and the fork's group mean over turn rows is `per="turn"`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown
from ..records import Batch, Credit
from .grpo import GRPOConfig, turn_advantages

_CHOICES = {"over": ("token", "trajectory"), "per": ("trajectory", "turn")}


@dataclass(frozen=True)
class ReinforcePPConfig:
    over: str = "token"  # what the batch's mean and variance run over: every "token" (released code), or "trajectory"
    per: str = "trajectory"  # what a group's mean runs over: "trajectory", or "turn" rows
    eps: float = 1e-8  # added to the variance

    def __post_init__(self):
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(f"REINFORCE++ {name}", str(getattr(self, name)), known)
        if not 0 < self.eps < float("inf"):
            raise WorkbenchError(f"REINFORCE++: eps must be finite and above 0, got {self.eps}")


def whiten(values: Tensor, sizes: Tensor, eps: float = 1e-8) -> Tensor:
    """(N,) values that each stand for `sizes` (N,) samples -> (N,) `(x - mean) / sqrt(var + eps)` over all samples.

    var is the sample variance; values that are all 0 stay exactly 0.
    """
    sizes = sizes.to(values.dtype)
    total = sizes.sum()
    centred = values - (values * sizes).sum() / total
    variance = (sizes * centred.square()).sum() / (total - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + eps)


def credit(batch: Batch, config: ReinforcePPConfig = ReinforcePPConfig()) -> Credit:
    """Every sampled token of a trajectory gets the trajectory's whitened advantage, from `batch.reward`."""
    centred = turn_advantages(batch, GRPOConfig(std=False, per=config.per))[:, 0]
    sizes = batch.turn_tokens.sum(1) if config.over == "token" else torch.ones_like(batch.turn_counts)
    turns = torch.where(batch.turn_mask, whiten(centred, sizes, config.eps)[:, None], 0)
    return Credit(batch.to_tokens(turns), {"turn_advantage": turns})
