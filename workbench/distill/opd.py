"""On-policy distillation (OPD): a policy gradient on sampled tokens whose reward is how far the teacher is ahead.

The score-function estimator of reverse KL, `-sg[gap] * student` with gap = teacher - student log-prob: over tokens that
the student itself samples its expected gradient is that of KL(student || teacher) at the contexts it visited. What a
token does to later contexts is left out, so it is not the gradient of the KL of whole sequences. The gap itself as a
loss estimates nothing: its gradient is a bare score, whose expectation is 0. The value of this loss is no divergence.

As the sampled-token option of the released OPSD code (github siyan-zhao/OPSD, opsd_trainer.py, read), which takes it
from thinkingmachines.ai/blog/on-policy-distillation; `clip` is ours. No importance ratio: exact only while the weights
are those that sampled; `skill_sd.py` has one.
"""

from dataclasses import dataclass

from torch import Tensor

from ..errors import WorkbenchError


@dataclass(frozen=True)
class OPDConfig:
    coef: float = 1.0  # weight of the loss beside the policy loss; 0 is GRPO
    clip: float = 0.0  # largest |gap| a token may count with, nats; 0: no bound, as the released code

    def __post_init__(self):
        for name in ("coef", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise WorkbenchError(f"OPD: {name} must be finite and at least 0, got {getattr(self, name)}")


def token_loss(student_logprobs: Tensor, teacher_logprobs: Tensor, config: OPDConfig = OPDConfig()) -> Tensor:
    """(B,T) loss of each token, `coef` included: -coef * sg[clip(teacher - student)] * student, before aggregation.

    student_logprobs: of the current forward pass, the only input that carries gradient. Minimising it raises tokens the
    teacher prefers and lowers those it does not, by the gap. Raises WorkbenchError on shapes that differ.
    """
    return gradient_coefficient(student_logprobs, teacher_logprobs, config) * student_logprobs


def gradient_coefficient(student_logprobs: Tensor, teacher_logprobs: Tensor, config: OPDConfig = OPDConfig()) -> Tensor:
    """(B,T) d token_loss / d student log-prob = -coef * clip(teacher - student)."""
    if student_logprobs.shape != teacher_logprobs.shape:
        raise WorkbenchError(
            f"OPD: student {tuple(student_logprobs.shape)} and teacher {tuple(teacher_logprobs.shape)} log-probs must "
            "have one shape"
        )
    gap = teacher_logprobs.detach() - student_logprobs.detach()
    return -config.coef * (gap.clamp(-config.clip, config.clip) if config.clip else gap)
