"""Skill-SD (arXiv 2604.10674): an importance-weighted k3 distillation loss on sampled tokens.

`rho * k3` with l = student - teacher log-prob, k3 = exp(-l) - 1 + l and rho = exp(student - old), which carries
gradient. Then d/d student = rho * (k3 + 1 - exp(-l)) = rho * l, so over tokens drawn from the old policy the expected
gradient is that of KL(student || teacher) at the contexts that policy visited, and on policy every token's gradient is
OPD's. With rho detached, or left out on policy, the expectation is the gradient of KL(teacher || student) instead.

Matches the token loss of the released code (github ZethWang/AgentOPSD, verl/trainer/ppo/skillsd_utils.py, read), both
of its bounds included; the paper's abstract alone was read. One bound is worth knowing: where the teacher is more than
20 nats ahead exp(-l) stands still but rho does not, and the gradient jumps from rho * l to rho * (exp(20) + l), away
from the teacher. `coef` is that of its scripts; the code falls back to .1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError

MAX_EXPONENT = 20.0  # of exp(teacher - student), nats
MAX_LOG_RATIO = 10.0  # of student - old, nats


@dataclass(frozen=True)
class SkillSDConfig:
    coef: float = 0.001  # weight of the loss beside the policy loss; 0 is GRPO
    detach_ratio: bool = False  # hold rho fixed: the gradient is no longer that of the reverse KL (ablation)

    def __post_init__(self):
        if not 0 <= self.coef < float("inf"):
            raise WorkbenchError(f"Skill-SD: coef must be finite and at least 0, got {self.coef}")


def _check(student: Tensor, teacher: Tensor, old: Tensor) -> None:
    if not student.shape == teacher.shape == old.shape:
        raise WorkbenchError(
            f"Skill-SD: student {tuple(student.shape)}, teacher {tuple(teacher.shape)} and old {tuple(old.shape)} "
            "log-probs must have one shape"
        )


def token_loss(
    student_logprobs: Tensor, teacher_logprobs: Tensor, old_logprobs: Tensor, config: SkillSDConfig = SkillSDConfig()
) -> Tensor:
    """(B,T) loss of each token, `coef` included: coef * rho * k3, nats, at least 0, before aggregation.

    student_logprobs: of the current forward pass, the only input that carries gradient; old_logprobs: of the policy
    that sampled. Raises WorkbenchError on shapes that differ.
    """
    _check(student_logprobs, teacher_logprobs, old_logprobs)
    ahead = student_logprobs - teacher_logprobs.detach()
    k3 = torch.expm1((-ahead).clamp(max=MAX_EXPONENT)) + ahead
    rho = (student_logprobs - old_logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return config.coef * (rho.detach() if config.detach_ratio else rho) * k3


def gradient_coefficient(
    student_logprobs: Tensor, teacher_logprobs: Tensor, old_logprobs: Tensor, config: SkillSDConfig = SkillSDConfig()
) -> Tensor:
    """(B,T) d token_loss / d student log-prob: coef * rho * l inside both bounds.

    In general coef * rho * (slope + k3), slope = 1 - exp(-l), or 1 beyond the exponent's bound; the k3 is rho's own
    share and is missing where rho is held: beyond its bound, or everywhere with `detach_ratio`.
    """
    _check(student_logprobs, teacher_logprobs, old_logprobs)
    student = student_logprobs.detach()
    ahead, log_ratio = student - teacher_logprobs.detach(), student - old_logprobs.detach()
    rho = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    bounded = -ahead > MAX_EXPONENT
    growth = torch.expm1((-ahead).clamp(max=MAX_EXPONENT))
    slope = torch.where(bounded, 1.0, -growth)
    # slope + k3 is l inside the bound; adding the two instead would cancel exp(-l) against itself.
    whole = torch.where(bounded, 1 + growth + ahead, ahead)
    held = (log_ratio > MAX_LOG_RATIO) | config.detach_ratio
    return config.coef * rho * torch.where(held, slope, whole)
