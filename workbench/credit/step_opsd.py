"""StepOPSD (arXiv 2605.27140), inferred: token credit inside a step from a hindsight teacher, a fixed budget a step.

Only the abstract was read and there is no released code: it speaks of teacher-student log-prob gaps turned into
sign-preserving shaping "with a normalized per-step credit budget" before the GRPO update, and of the two knobs
alpha_clip (small is stable) and lambda_mix (depends on the task). The form here is the smallest that fits [inferred]:

    A_kt = A [(1 - lam) + lam n_kt],   n_kt = w_kt / mean of w over turn k,   w = clip(exp(sign(A) gap), 1 -+ alpha)

Also inferred: a step is a whole turn, the weights are RLSD's, and both defaults. As n has mean 1 in a turn, every
turn's mean advantage stays A: this rule moves credit between the tokens of a turn, never between turns.
"""

from dataclasses import dataclass, field

import torch

from ..errors import WorkbenchError
from ..records import Batch, Credit
from .gap import teacher_gap
from .grpo import GRPOConfig, turn_advantages
from .rlsd import mix, reweighting


@dataclass(frozen=True)
class StepOPSDConfig:
    alpha: float = 0.2  # alpha_clip: weights lie in [1 - alpha, 1 + alpha] before they are normalised
    lam: float = 0.5  # lambda_mix: share of the advantage that is shaped; 0 is GRPO
    grpo: GRPOConfig = field(default_factory=GRPOConfig)  # the advantage that is shaped

    def __post_init__(self):
        if not 0 <= self.alpha < 1:
            raise WorkbenchError(f"StepOPSD: alpha must lie in [0, 1), got {self.alpha}")
        if not 0 <= self.lam <= 1:
            raise WorkbenchError(f"StepOPSD: lam must lie in [0, 1], got {self.lam}")


def credit(batch: Batch, config: StepOPSDConfig = StepOPSDConfig()) -> Credit:
    """Shaped advantages (B,T); of each turn the mean weight before it is normalised, and turn_advantage, which is A.

    Raises WorkbenchError without teacher log-probs, or where a gap is not finite.
    """
    gap = torch.where(batch.response_mask, teacher_gap(batch, "StepOPSD"), 0)
    turns = turn_advantages(batch, config.grpo)
    advantages = batch.to_tokens(turns)
    weights = reweighting(gap, advantages, config.alpha)
    budget = batch.turn_mean(weights)
    normalised = weights / torch.where(batch.response_mask, batch.to_tokens(budget), 1)
    return Credit(mix(advantages, normalised, config.lam), {"weight": budget, "turn_advantage": turns})
