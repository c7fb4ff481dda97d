"""How much likelier the privileged teacher finds a sampled token than the student did: the signal of several rules."""

import torch
from torch import Tensor

from ..errors import WorkbenchError
from ..records import Batch


def teacher_gap(batch: Batch, method: str) -> Tensor:
    """(B,T) teacher minus student log-prob, nats; of no meaning off the sampled tokens.

    Raises WorkbenchError, naming the method, where the batch has no teacher or a sampled token's gap is not finite.
    """
    if batch.teacher_logprobs is None:
        raise WorkbenchError(f"{method}: the batch has no teacher_logprobs; run the teacher pass first")
    gap = batch.teacher_logprobs - batch.old_logprobs
    # A sum is finite only where all its terms are; it may also overflow, or meet what lies off the mask.
    if not bool(torch.isfinite(gap.sum())) and not bool(torch.isfinite(gap[batch.response_mask]).all()):
        raise WorkbenchError(f"{method}: a teacher-student gap is not finite")
    return gap
