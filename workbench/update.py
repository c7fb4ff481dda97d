"""One gradient of the training loss, computed in micro-batches that change nothing but memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import loss as losses
from .distill import sdar
from .errors import WorkbenchError
from .policy import Policy, microbatches
from .records import Batch
from .reuse.lm_head import IsolatedHead


class Diverged(WorkbenchError):
    """The loss or its gradient is not finite or has exploded; the last checkpoint is kept."""


@dataclass(frozen=True)
class LossConfig:
    """clip_low, clip_high: of the importance ratio; dual_clip: bound on the loss of negative advantages, 0 none;
    kl_coef: weight of k3 to the reference; entropy_coef: of the entropy bonus; aggregation: see loss.token_weights;
    temperature: at which log-probs are taken, that of sampling; micro_tokens: padded tokens in one micro-batch."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: str = "episode_mean"
    temperature: float = 1.0
    micro_tokens: int = 16384
    max_loss: float = 1e4


@dataclass(frozen=True)
class Gradient:
    """What one backward pass saw: log-probs and entropy (B,T) of the current policy, and scalars of the loss."""

    logprobs: Tensor
    entropy: Tensor
    loss: float
    pg_loss: float
    kl: float | None
    aux_loss: float | None


def accumulate(
    policy: Policy,
    head: IsolatedHead,
    batch: Batch,
    advantages: Tensor,
    aux: sdar.SDARConfig | None,
    config: LossConfig,
) -> Gradient:
    """Add the gradient of the whole batch's loss to the parameters (the head's stays in `head` until merged).

    loss = sum over tokens of weight * (clipped surrogate + kl_coef * k3 - entropy_coef * entropy) + the auxiliary loss,
    a mean over tokens as in its paper. Weights come from the whole batch, so the micro-batch size changes nothing but
    rounding. Rows whose every advantage is 0 have a gradient of exactly 0 where nothing else is in the loss, so they
    are only scored; a batch of such rows leaves no gradient at all. Raises Diverged where the loss is not finite or
    above max_loss.
    """
    weights = losses.token_weights(batch, config.aggregation)
    aux_weights = losses.token_weights(batch, "token_mean") if aux and aux.coef else None
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high, "dual_clip": config.dual_clip or None}
    logprobs, entropy = torch.zeros_like(batch.old_logprobs), torch.zeros_like(batch.old_logprobs)
    totals = torch.zeros(4, dtype=torch.float64)
    other_terms = aux_weights is not None or batch.reference_logprobs is not None or config.entropy_coef != 0
    signal = (advantages != 0).any(1) | other_terms
    for rows in _groups(batch.lengths, signal, config.micro_tokens):
        width = int(batch.lengths[rows].max())

        def cut(x: Tensor, rows=rows, width=width) -> Tensor:
            return x[rows, :width]

        with torch.set_grad_enabled(bool(signal[rows[0]])):
            logp, ent = policy.score(
                cut(batch.input_ids),
                cut(batch.response_mask),
                config.temperature,
                (head.weight, head.bias),
                entropy_grad=config.entropy_coef != 0,
            )
        old, w = cut(batch.old_logprobs), cut(weights)
        pg = (w * losses.surrogate(logp, old, cut(advantages), **clip)).sum()
        total, kl, extra = pg, None, None
        if batch.reference_logprobs is not None:
            kl = (w * losses.kl_k3(logp, cut(batch.reference_logprobs))).sum()
            total = total + config.kl_coef * kl
        if config.entropy_coef:
            total = total - config.entropy_coef * (w * ent).sum()
        if aux_weights is not None:
            extra = (cut(aux_weights) * sdar.token_loss(logp, cut(batch.teacher_logprobs), aux, ent)).sum()
            total = total + extra
        if not torch.isfinite(total) or total.abs() > config.max_loss:
            raise Diverged(f"the loss of a micro-batch is {total.item():.4g}: training has diverged")
        if total.requires_grad:
            total.backward()
        logprobs[rows, :width], entropy[rows, :width] = logp.detach(), ent.detach()
        totals += torch.tensor([0.0 if x is None else x.item() for x in (total, pg, kl, extra)], dtype=torch.float64)
    loss, pg_loss, kl, extra = totals.tolist()
    return Gradient(
        logprobs,
        entropy,
        loss,
        pg_loss,
        kl if batch.reference_logprobs is not None else None,
        extra if aux_weights is not None else None,
    )


def _groups(lengths: Tensor, signal: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Micro-batches that hold only rows with a signal or only rows without."""
    for kind in (signal, ~signal):
        rows = torch.nonzero(kind)[:, 0]
        yield from (rows[group] for group in microbatches(lengths[rows], max_tokens))
