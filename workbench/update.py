"""One gradient of the training loss, computed in micro-batches that change nothing but memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import loss as losses
from .composition import Method
from .distill import opsd
from .errors import WorkbenchError
from .passes import microbatches, passes
from .policy import Policy
from .records import Batch
from .reuse.lm_head import IsolatedHead


class Diverged(WorkbenchError):
    """The loss or its gradient is not finite or has exploded; the last checkpoint is kept."""


@dataclass(frozen=True)
class UpdateConfig:
    """kl_coef: weight of k3 to the reference; entropy_coef: of the entropy bonus; temperature: at which log-probs are
    taken, that of sampling; max_tokens: the most an episode may sample, for token_sum_norm, None the batch's most;
    micro_tokens: about how many tokens one micro-batch has; max_loss: a micro-batch's loss beyond it is divergence."""

    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    temperature: float = 1.0
    max_tokens: int | None = None
    micro_tokens: int = 16384
    max_loss: float = 1e4


@dataclass(frozen=True)
class TeacherRows:
    """What the teacher reads of each row of the batch: input_ids (B,T') with the skill text in, lengths (B,), and how
    far (B,) that text shifts the row's tokens; policy: whose weights read it; keep (B,T): of a method that chooses, the
    batch's tokens at which the teacher is followed."""

    policy: Policy
    input_ids: Tensor
    lengths: Tensor
    shift: Tensor
    keep: Tensor | None = None

    @torch.no_grad()
    def states(self, rows: Tensor, mask: Tensor) -> Tensor:
        """(N,D) hidden states that predict the tokens of mask (R,W), row-major, in the given rows of the batch."""
        b, t = torch.nonzero(mask, as_tuple=True)
        t, states = t + self.shift[rows][b] - 1, None
        # The student's rows may share a prompt and be many; these are read whole.
        for part in microbatches(self.lengths[rows], self.policy.micro_tokens):
            width = int(self.lengths[rows[part]].max())
            hidden = self.policy.hidden(self.input_ids[rows[part], :width])
            place = torch.full_like(rows, -1)
            place[part] = torch.arange(len(part), device=rows.device)
            here = place[b] >= 0
            states = hidden.new_zeros(len(b), hidden.shape[-1]) if states is None else states
            states[here] = hidden[place[b[here]], t[here]]
        return states


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
    size changes nothing but rounding; where the importance ratio is one of whole episodes, none is split. Rows whose
    every advantage is 0 have a gradient of exactly 0 where nothing else is in the loss, so they are only scored; a
    batch of such rows leaves no gradient at all. teacher: needed for a divergence over the whole vocabulary. Raises
    Diverged where the loss is not finite or above max_loss.
    """
    own, aux = method.loss, method.aux
    advantages = losses.weighted(advantages, batch, own)
    weights = losses.token_weights(batch, own.aggregation, config.max_tokens)
    aux_weights = losses.token_weights(batch, "token_mean") if aux and aux.coef else None
    divergence = aux.divergence if aux_weights is not None else None
    if divergence is not None and teacher is None:
        raise WorkbenchError(f"method {method.name}: its divergence needs the rows that the teacher reads")
    if aux_weights is not None and aux.keep:
        if teacher.keep is None:
            raise WorkbenchError(f"method {method.name}: it distils chosen tokens, and none were chosen")
        kept = (batch.counted & teacher.keep).to(aux_weights.dtype)
        aux_weights = kept / kept.sum()
    logprobs, entropy = torch.zeros_like(batch.old_logprobs), torch.zeros_like(batch.old_logprobs)
    totals = torch.zeros(4, dtype=torch.float64)
    other_terms = aux_weights is not None or batch.reference_logprobs is not None or config.entropy_coef != 0
    signal = (advantages != 0).any(1) & (own.pg_coef != 0) | other_terms
    # The teacher's rows are longer than the student's, and both are held at once.
    lengths = teacher.lengths if divergence is not None else batch.lengths
    whole = batch.episode_index if own.ratio == "episode" else None
    for rows, shared in _groups(batch, lengths, signal, config.micro_tokens, whole):
        width = int(batch.lengths[rows].max())

        def cut(x: Tensor, rows=rows, width=width) -> Tensor:
            return x[rows, :width]

        mask = cut(batch.response_mask)
        with torch.set_grad_enabled(bool(signal[rows].any())):
            logp, ent, *diverging = policy.score(
                cut(batch.input_ids),
                mask,
                config.temperature,
                (head.weight, head.bias),
                entropy_grad=config.entropy_coef != 0,
                also=divergence and _divergence(divergence, teacher, rows, mask, config.temperature),
                shared=shared,
            )
        old, w = cut(batch.old_logprobs), cut(weights)
        ratio_logp = losses.sequence_form(logp, old, cut(batch.turn_index), own.ratio, batch.episode_index[rows])
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


def _groups(
    batch: Batch, lengths: Tensor, signal: Tensor, max_tokens: int, whole: Tensor | None = None
) -> Iterator[tuple[Tensor, int]]:
    """Micro-batches that hold only rows with a signal or only rows without, and how many leading tokens they share;
    with the rows of an episode together, as `whole` (B,) labels them, where it is given. An episode above max_tokens is
    then a micro-batch by itself."""
    if whole is not None:
        zeros = lengths.new_zeros(int(whole.max()) + 1)
        signal = zeros.index_add(0, whole, signal.to(zeros.dtype))[whole] > 0
    for kind in (signal, ~signal):
        rows = torch.nonzero(kind)[:, 0]
        if whole is None:
            cut = passes(batch.input_ids[rows], lengths[rows], batch.response_mask[rows], max_tokens)
            yield from ((rows[part], shared) for part, shared in cut)
        elif len(rows):
            yield from ((part, 0) for part in _whole_episodes(rows, lengths, whole, max_tokens))


def _whole_episodes(rows: Tensor, lengths: Tensor, whole: Tensor, max_tokens: int) -> Iterator[Tensor]:
    members = [rows[whole[rows] == episode] for episode in whole[rows].unique()]
    widths = [int(lengths[own].max()) for own in members]
    taken, width = [], 0
    for i in sorted(range(len(members)), key=lambda i: -widths[i]):
        if taken and width * (sum(map(len, taken)) + len(members[i])) > max_tokens:
            yield torch.cat(taken)
            taken = []
        width = width if taken else widths[i]
        taken.append(members[i])
    yield torch.cat(taken)
