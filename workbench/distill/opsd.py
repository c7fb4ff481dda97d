"""OPSD (arXiv 2601.18734, "Self-Distilled Reasoner"): a divergence of whole next-token distributions, token by token.

Generalised Jensen-Shannon divergence (arXiv 2306.13649, eq. 1) between the student's distribution S and that of a
teacher T that also reads privileged text, at every position of the student's own rollouts. Matches the released code
(github siyan-zhao/OPSD, opsd_trainer.py, read; its later clip in the copy of coldsakrua/OPSD_Analysis); the paper was
seen in abstract and in write-ups only. Notes:

* beta = 0 and 1 are the two KLs by definition, not as limits: a small beta gives about beta * KL(T || S), near 0, so
  betas within .001 of an end are refused;
* the clip, "per-token pointwise" in the paper, caps what one vocabulary entry adds before the sum over the vocabulary
  (as the author confirms in issue 2 of the repository). Entries may be negative and keep their value, so a clipped
  divergence can be negative and need not fall towards the teacher; `clip_per="position"`, ours, caps the sum instead;
* the code divides logits by the sampling temperature (1.1) first; here the caller hands in logits so divided;
* mixtures are computed from log-ratios, so equal distributions give exactly 0 at every beta.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkbenchError, unknown

TEACHERS = ("frozen", "live")
CLIP_PER = ("entry", "position")

# Stands for log 0: products with a probability of 0 must be 0, which -inf would make nan.
MIN_LOG_PROB = -1e30

# Of either side in a mixture: float32 has no digits left for the log of a much smaller one's complement.
MIN_SHARE = 0.001


@dataclass(frozen=True)
class OPSDConfig:
    coef: float = 1.0  # weight of the loss beside the policy loss; 0 is GRPO
    beta: float = 0.0  # 0: forward KL(T || S), which the paper found best; 1: reverse KL(S || T); between: mixtures
    clip: float = 0.0  # cap on what counts, nats; 0: none. Later scripts of the released code use .05
    clip_per: str = "entry"  # what the cap holds: each vocabulary "entry" (paper), or the sum at a "position"
    top_k: int = 0  # only the teacher's k likeliest tokens, both sides renormalised over them; 0: whole vocabulary
    teacher: str = "frozen"  # weights that score as teacher: the "frozen" first ones (paper), or the "live" student's

    def __post_init__(self):
        if self.teacher not in TEACHERS:
            raise unknown("OPSD teacher", str(self.teacher), TEACHERS)
        if self.clip_per not in CLIP_PER:
            raise unknown("OPSD clip_per", str(self.clip_per), CLIP_PER)
        for name in ("coef", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise WorkbenchError(f"OPSD: {name} must be finite and at least 0, got {getattr(self, name)}")
        if self.beta not in (0, 1) and not MIN_SHARE <= self.beta <= 1 - MIN_SHARE:
            raise WorkbenchError(f"OPSD: beta must be 0, 1 or in [{MIN_SHARE}, {1 - MIN_SHARE}], got {self.beta}")
        if not isinstance(self.top_k, int) or self.top_k < 0 or self.top_k == 1:
            raise WorkbenchError(f"OPSD: top_k must be 0 or an integer of at least 2, got {self.top_k}")


def divergence(student_logits: Tensor, teacher_logits: Tensor, config: OPSDConfig = OPSDConfig()) -> Tensor:
    """Logits (N,V) of student and teacher at N positions -> divergence (N,) of each, nats, `coef` not included.

    beta = 0: KL(T || S); beta = 1: KL(S || T); else beta KL(T || M) + (1 - beta) KL(S || M), M = (1 - beta) S + beta T.
    Only student_logits carry gradient, and it is exact: no sampling. With top_k both distributions are renormalised
    over the teacher's k likeliest tokens, so the mass a student puts on any other token is neither seen nor moved.
    Logits of -inf are tokens of probability 0; where the other side needs one the result is very large, not infinite.
    Half precision is computed in float32. Three (beta = 0) to ten (N,V) tensors live until backward: slice long inputs.
    Raises WorkbenchError on shapes that do not fit, on nan or +inf, and on a row of nothing but -inf.
    """
    if student_logits.dim() != 2 or student_logits.shape != teacher_logits.shape:
        raise WorkbenchError(
            f"OPSD: student and teacher logits must be (N,V) both, got {tuple(student_logits.shape)} and "
            f"{tuple(teacher_logits.shape)}"
        )
    teacher_logits = teacher_logits.detach()
    if config.top_k:
        if config.top_k > teacher_logits.shape[1]:
            raise WorkbenchError(f"OPSD: top_k = {config.top_k} of a vocabulary of {teacher_logits.shape[1]}")
        teacher_logits, kept = teacher_logits.topk(config.top_k, dim=1)
        student_logits = student_logits.gather(1, kept)
    student, teacher = _log_probs(student_logits, "student"), _log_probs(teacher_logits, "teacher")
    entries = _entries(student, teacher, config.beta)
    if config.clip and config.clip_per == "entry":
        entries = entries.clamp(max=config.clip)
    total = entries.sum(1)
    return total.clamp(max=config.clip) if config.clip and config.clip_per == "position" else total


def token_loss(student_logits: Tensor, teacher_logits: Tensor, config: OPSDConfig = OPSDConfig()) -> Tensor:
    """(N,) loss of each position, `coef` included: coef * divergence, before aggregation."""
    return config.coef * divergence(student_logits, teacher_logits, config)


def _log_probs(logits: Tensor, whose: str) -> Tensor:
    bad = ~torch.isfinite(logits.amax(1))
    if bool(bad.any()):
        raise WorkbenchError(f"OPSD: {whose} logits of position {int(bad.nonzero()[0])} hold nan, +inf or only -inf")
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(1, dtype=wide).clamp(min=MIN_LOG_PROB)


def _entries(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """(N,V) what each vocabulary entry adds to the divergence, from log-probs; entries may be negative."""
    gap = teacher - student
    if beta == 0:
        return teacher.exp() * gap
    if beta == 1:
        return -student.exp() * gap
    # log M - log S and log M - log T, from whichever of the two is larger: exact at a gap of 0, no overflow anywhere.
    # The branch at 0 must keep its own derivative there, which abs() and clamp() would not.
    ahead = gap > 0
    share = torch.where(ahead, gap.new_tensor(1 - beta), gap.new_tensor(beta))
    rest = torch.log1p(share * torch.expm1(torch.where(ahead, -gap, gap)))
    over_student = torch.where(ahead, gap, 0) + rest
    over_teacher = torch.where(ahead, 0, -gap) + rest
    return -beta * teacher.exp() * over_teacher - (1 - beta) * student.exp() * over_student
