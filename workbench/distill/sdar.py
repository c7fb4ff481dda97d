"""SDAR (arXiv 2605.15155): a distillation loss on sampled tokens, gated by how far teacher and student differ.

Matches the released code (github ZJU-REAL/SDAR, verl/trainer/ppo/sdar_utils.py, read); its aggregation, a mean of
micro-batch means, is left to the weights of `loss.py`. The entropy and soft-OR gates are known from write-ups only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown

GATES = ("gap", "entropy", "soft_or")


@dataclass(frozen=True)
class SDARConfig:
    coef: float = 0.01  # weight of the loss beside the policy loss; 0 is GRPO
    beta: float = 5.0  # sharpness of the gate; 0 opens every gate halfway, which is GRPO+OPSD
    gate: str = "gap"  # what opens the gate: "gap", student "entropy", or "soft_or" of both

    def __post_init__(self):
        if self.gate not in GATES:
            raise unknown("SDAR gate", str(self.gate), GATES)
        for name in ("coef", "beta"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise WorkbenchError(f"SDAR: {name} must be finite and at least 0, got {getattr(self, name)}")


def gate(gap: Tensor, config: SDARConfig = SDARConfig(), entropy: Tensor | None = None) -> Tensor:
    """Teacher minus student log-prob (B,T), nats -> detached gate (B,T) in (0, 1).

    gap: sigmoid(beta gap). entropy: sigmoid(beta h). soft_or: sigmoid(beta [1 - (1 - h)(1 - gap)]), which is an OR only
    when the caller scales both to [0, 1]; the sources leave that open, and where h > 1 it closes as the gap grows. The
    entropy is the same for every token that may follow a context, so on policy its gate, like beta = 0, has an expected
    gradient of exactly 0. Raises WorkbenchError where entropy is missing or of another shape.
    """
    gap = gap.detach()
    if config.gate == "gap":
        return torch.sigmoid(config.beta * gap)
    if entropy is None:
        raise WorkbenchError(f"SDAR: gate={config.gate!r} needs the student's entropy of every token")
    if entropy.shape != gap.shape:
        raise WorkbenchError(f"SDAR: entropy {tuple(entropy.shape)} and gap {tuple(gap.shape)} must be of one shape")
    entropy = entropy.detach()
    return torch.sigmoid(config.beta * (entropy if config.gate == "entropy" else 1 - (1 - entropy) * (1 - gap)))


def _gap(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    if student_logprobs.shape != teacher_logprobs.shape:
        raise WorkbenchError(
            f"SDAR: log-probs of student {tuple(student_logprobs.shape)} and teacher {tuple(teacher_logprobs.shape)} "
            "must be of one shape"
        )
    return teacher_logprobs.detach() - student_logprobs


def token_loss(
    student_logprobs: Tensor, teacher_logprobs: Tensor, config: SDARConfig = SDARConfig(), entropy: Tensor | None = None
) -> Tensor:
    """(B,T) loss of each token, `coef` included: coef * sg[gate] * (sg[teacher] - student), before aggregation.

    student_logprobs: of the current forward pass, the only input that carries gradient; teacher_logprobs: under the
    weights the batch was sampled with. Minimising it raises every sampled token's log-prob, more where gates are open.
    Raises WorkbenchError where shapes differ.
    """
    gap = _gap(student_logprobs, teacher_logprobs)
    return config.coef * gate(gap, config, entropy) * gap


def gradient_coefficient(
    student_logprobs: Tensor, teacher_logprobs: Tensor, config: SDARConfig = SDARConfig(), entropy: Tensor | None = None
) -> Tensor:
    """(B,T) d token_loss / d student log-prob = -coef * gate. Raises WorkbenchError as `token_loss`."""
    return -config.coef * gate(_gap(student_logprobs, teacher_logprobs), config, entropy)
