"""One gradient of the training loss, computed in micro-batches that change nothing but memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import loss as losses
from .composition import Method
from .distill import opsd
from .errors import WorkbenchError
from .policy import Policy, microbatches
from .records import Batch
from .reuse.lm_head import IsolatedHead


class Diverged(WorkbenchError):
    """The loss or its gradient is not finite or has exploded; the last checkpoint is kept."""


@dataclass(frozen=True)
class UpdateConfig:
    """kl_coef: weight of k3 to the reference; entropy_coef: of the entropy bonus; temperature: at which log-probs are
    taken, that of sampling; max_tokens: the most an episode may sample, for token_sum_norm, None the batch's most;
    micro_tokens: padded tokens in one micro-batch; max_loss: a micro-batch's loss beyond it is divergence."""

    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    temperature: float = 1.0
    max_tokens: int | None = None
    micro_tokens: int = 16384
    max_loss: float = 1e4


@dataclass(frozen=True)
class TeacherRows:
    """What the teacher reads of each row of the batch: input_ids (B,T') with the skill text in, lengths (B,), and how
    far (B,) that text shifts the row's tokens; policy: whose weights read it."""

    policy: Policy
    input_ids: Tensor
    lengths: Tensor
    shift: Tensor

    @torch.no_grad()
    def states(self, rows: Tensor, mask: Tensor) -> Tensor:
        """(N,D) hidden states that predict the tokens of mask (R,W), row-major, in the given rows of the batch."""
        hidden = self.policy.hidden(self.input_ids[rows, : int(self.lengths[rows].max())])
        b, t = torch.nonzero(mask, as_tuple=True)
        return hidden[b, t + self.shift[rows][b] - 1]


def teacher_logprobs(batch: Batch, rows: TeacherRows, temperature: float = 1.0) -> Tensor:
    """(B,T) log-probs of the batch's sampled tokens as the teacher sees them, 0 off the mask."""
    b, t = torch.nonzero(batch.response_mask, as_tuple=True)
    there = t + rows.shift[b]
    mask = torch.zeros(rows.input_ids.shape, dtype=torch.bool, device=there.device)
    mask[b, there] = True
    scored, _ = rows.policy.score_rows(rows.input_ids, rows.lengths, mask, temperature)
    out = torch.zeros_like(batch.old_logprobs)
    out[b, t] = scored[b, there]
    return out


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
    method: Method,
    config: UpdateConfig = UpdateConfig(),
    teacher: TeacherRows | None = None,
) -> Gradient:
    """Add the gradient of the whole batch's loss to the parameters (the head's stays in `head` until merged).

    loss = sum over tokens of weight * (pg_coef * clipped surrogate + kl_coef * k3 - entropy_coef * entropy) + the
    method's auxiliary loss, a mean over tokens as in its paper. Weights come from the whole batch, so the micro-batch
    size changes nothing but rounding. Rows whose every advantage is 0 have a gradient of exactly 0 where nothing else
    is in the loss, so they are only scored; a batch of such rows leaves no gradient at all. teacher: needed for a
    divergence over the whole vocabulary. Raises Diverged where the loss is not finite or above max_loss.
    """
    own, aux = method.loss, method.aux
    weights = losses.token_weights(batch, own.aggregation, config.max_tokens)
    aux_weights = losses.token_weights(batch, "token_mean") if aux and aux.coef else None
    divergence = aux.divergence if aux_weights is not None else None
    if divergence is not None and teacher is None:
        raise WorkbenchError(f"method {method.name}: its divergence needs the rows that the teacher reads")
    logprobs, entropy = torch.zeros_like(batch.old_logprobs), torch.zeros_like(batch.old_logprobs)
    totals = torch.zeros(4, dtype=torch.float64)
    other_terms = aux_weights is not None or batch.reference_logprobs is not None or config.entropy_coef != 0
    signal = (advantages != 0).any(1) & (own.pg_coef != 0) | other_terms
    # The teacher's rows are longer than the student's, and both are held at once.
    lengths = teacher.lengths if divergence is not None else batch.lengths
    for rows in _groups(lengths, signal, config.micro_tokens):
        width = int(batch.lengths[rows].max())

        def cut(x: Tensor, rows=rows, width=width) -> Tensor:
            return x[rows, :width]

        mask = cut(batch.response_mask)
        with torch.set_grad_enabled(bool(signal[rows[0]])):
            logp, ent, *diverging = policy.score(
                cut(batch.input_ids),
                mask,
                config.temperature,
                (head.weight, head.bias),
                entropy_grad=config.entropy_coef != 0,
                also=divergence and _divergence(divergence, teacher, rows, mask, config.temperature),
            )
        old, w = cut(batch.old_logprobs), cut(weights)
        ratio_logp = losses.sequence_form(logp, old, cut(batch.turn_index), own.ratio)
        pg = (w * losses.surrogate(ratio_logp, old, cut(advantages), **own.clip)).sum()
        total, kl, extra = own.pg_coef * pg, None, None
        if batch.reference_logprobs is not None:
            kl = (w * losses.kl_k3(logp, cut(batch.reference_logprobs))).sum()
            total = total + config.kl_coef * kl
        if config.entropy_coef:
            total = total - config.entropy_coef * (w * ent).sum()
        if aux_weights is not None:
            per_token = diverging[0] if diverging else aux.loss(logp, cut(batch.teacher_logprobs), old, ent)
            extra = (cut(aux_weights) * per_token).sum()
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


def _divergence(
    config: opsd.OPSDConfig, teacher: TeacherRows, rows: Tensor, mask: Tensor, temperature: float
) -> Callable[[Tensor, slice], Tensor]:
    """Loss of each token from the student's logits and, a chunk at a time, the teacher's."""
    states = teacher.states(rows, mask)

    def per_token(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            wanted = teacher.policy.logits(states[part]) / temperature
        return opsd.token_loss(logits, wanted, config)

    return per_token


def _groups(lengths: Tensor, signal: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Micro-batches that hold only rows with a signal or only rows without."""
    for kind in (signal, ~signal):
        rows = torch.nonzero(kind)[:, 0]
        yield from (rows[group] for group in microbatches(lengths[rows], max_tokens))
