"""RLSD (arXiv 2604.03128): the outcome gives the direction of a token's advantage, a privileged teacher its size.

Equations 13 to 16, as quoted by a public translation; the full text was not read, the code released with SDAR and
AgentOPSD was (github ZethWang/AgentOPSD, verl/trainer/ppo/rlsd_utils.py and rlsd_ray_trainer.py). Both compute
`A [(1 - lam) + lam clip(exp(sign(A) gap), 1 - clip, 1 + clip)]`; the code also lets lam fall to 0 as training goes on.
The defaults are that code's scripts (clip .2 is its fallback); its own fallback for the decay is 50 steps.
Departures: that code takes the advantage of each turn row, ours comes from `grpo`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown
from ..records import Batch, Credit
from .gap import teacher_gap
from .grpo import GRPOConfig, turn_advantages


@dataclass(frozen=True)
class RLSDConfig:
    form: str = "paper"  # "paper": lam stays; "released": lam falls linearly to 0 over decay_steps
    lam: float = 0.5  # share of the advantage that is reweighted; 0 is GRPO
    clip: float = 0.2  # weights lie in [1 - clip, 1 + clip]
    decay_steps: int = 100  # training steps until lam is 0, in the released form
    grpo: GRPOConfig = field(default_factory=GRPOConfig)  # the advantage that is reweighted

    def __post_init__(self):
        if self.form not in ("paper", "released"):
            raise unknown("RLSD form", str(self.form), ("paper", "released"))
        for name in ("lam", "clip"):
            if not 0 <= getattr(self, name) <= 1:
                raise WorkbenchError(f"RLSD: {name} must lie in [0, 1], got {getattr(self, name)}")
        if self.decay_steps < 1:
            raise WorkbenchError(f"RLSD: decay_steps must be at least 1, got {self.decay_steps}")


def mixing(step: int, config: RLSDConfig = RLSDConfig()) -> float:
    """lam at a training step, of which the first is 0 here and 1 in the released trainer. Raises below step 0."""
    if step < 0:
        raise WorkbenchError(f"RLSD: a training step is at least 0, got {step}")
    left = max(0.0, 1 - (step + 1) / config.decay_steps) if config.form == "released" else 1.0
    return config.lam * left


def reweighting(gap: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """`clip(exp(sign(A) gap), 1 - clip, 1 + clip)` (eq. 13-15), detached; gap in nats, and A of the same shape.

    Raises WorkbenchError where the shapes differ.
    """
    if gap.shape != advantage.shape:
        raise WorkbenchError(
            f"RLSD: gap {tuple(gap.shape)} and advantage {tuple(advantage.shape)} must be of one shape"
        )
    return torch.exp(advantage.detach().sign().to(gap.dtype) * gap.detach()).clamp(1 - clip, 1 + clip)


def mix(advantage: Tensor, weights: Tensor, lam: float) -> Tensor:
    """`A [(1 - lam) + lam w]` (eq. 16); exactly A at lam = 0."""
    return advantage * ((1 - lam) + lam * weights.to(advantage.dtype))


def credit(batch: Batch, config: RLSDConfig = RLSDConfig(), step: int = 0) -> Credit:
    """Reweighted advantages (B,T); of each turn the token means weight and turn_advantage.

    step: training step, which only the released form uses. Raises WorkbenchError without teacher log-probs, or where a
    gap is not finite.
    """
    lam = mixing(step, config)
    gap = torch.where(batch.response_mask, teacher_gap(batch, "RLSD"), 0)
    turns = turn_advantages(batch, config.grpo)
    advantages = batch.to_tokens(turns)
    weights = reweighting(gap, advantages, config.clip)
    mean = batch.turn_mean(weights)
    return Credit(mix(advantages, weights, lam), {"weight": mean, "turn_advantage": mix(turns, mean, lam)})
