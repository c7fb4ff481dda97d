"""Policy losses per token, and weights that add them up.

A loss is `(weights * per_token).sum()`: the weights come from the whole batch, so micro-batches are sums of their own
rows and their size changes nothing. Formulas: PPO clip (arXiv 1707.06347), dual clip (1912.09729), k3
(joschu.net/blog/kl-approx.html), as in the released code of the agentic papers (core_algos.py, read).
"""

import torch
from torch import Tensor

from .errors import WorkbenchError, unknown
from .records import Batch

AGGREGATIONS = ("episode_mean", "token_mean", "row_mean", "row_sum", "token_sum_norm")

# exp() of a larger log-ratio overflows float32 soon after, and an infinite branch turns a masked gradient into nan.
MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """(B,T) importance ratio pi / pi_old of each token, its log held within +-20 (the released code has no bound)."""
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def surrogate(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """(B,T) clipped policy loss of each token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at
    most -dual_clip * A (None: no such bound)."""
    rho = ratio(logp, old)
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(-dual_clip * advantages, loss), loss)


def surrogate_gradient(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """(B,T) d surrogate / d logp: -A r, and 0 where the clip or the dual clip holds."""
    rho = ratio(logp, old)
    held = torch.where(advantages < 0, rho < 1 - clip_low, rho > 1 + clip_high)
    if dual_clip is not None:
        held |= (advantages < 0) & (rho > dual_clip)
    held |= (logp - old).abs() > MAX_LOG_RATIO
    return torch.where(held, 0, -advantages * rho)


def kl_k3(logp: Tensor, reference: Tensor) -> Tensor:
    """(B,T) k3 estimate of KL(pi || reference) per token, nats: exp(d) - d - 1 with d = reference - logp, at most 10.

    The bound is on the value, as in the released code: a token beyond it no longer pulls the policy back.
    """
    d = (reference - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (d.exp() - d - 1).clamp(max=MAX_KL)


def kl_k3_gradient(logp: Tensor, reference: Tensor) -> Tensor:
    """(B,T) d kl_k3 / d logp: 1 - exp(reference - logp), and 0 beyond the bound."""
    d = (reference - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(d.exp() - d - 1 > MAX_KL, 0, 1 - d.exp())


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked values, as a scalar tensor; 0 where the mask is empty."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def token_weights(batch: Batch, how: str = "episode_mean", max_tokens: int | None = None) -> Tensor:
    """(B,T) weights >= 0, 0 off the mask, with which `(weights * per_token).sum()` is the loss. Repeats count once.

    episode_mean: mean over an episode's tokens, then over episodes; with token_mean the two that are the same in both
    layouts. token_mean: mean over all tokens. row_mean, row_sum: mean or sum over a row's tokens, then mean over rows
    (seq-mean-token-mean, seq-mean-token-sum). token_sum_norm: sum over tokens / (rows * max_tokens), Dr.GRPO
    (arXiv 2503.20783; the released code divides by the padded width alone); max_tokens is the most a row may sample and
    should stay the same over a run; without it, the most that a row of this batch did.
    """
    if how not in AGGREGATIONS:
        raise unknown("aggregation", str(how), AGGREGATIONS)
    counted = batch.counted.to(batch.old_logprobs.dtype)
    in_row = counted.sum(1)
    rows = (in_row > 0).sum()
    if how == "token_mean":
        return counted / in_row.sum()
    if how == "episode_mean":
        in_episode = in_row.new_zeros(len(batch.group_index)).index_add(0, batch.episode_index, in_row)
        return counted / (in_episode[batch.episode_index] * len(batch.group_index))[:, None]
    if how == "row_mean":
        return counted / (in_row.clamp(min=1) * rows)[:, None]
    if how == "row_sum":
        return counted / rows
    if max_tokens is not None and not max_tokens > 0:
        raise WorkbenchError(f"token_sum_norm: max_tokens must be positive, got {max_tokens}")
    return counted / (rows * (in_row.max() if max_tokens is None else max_tokens))


def dloss_dlogp(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
    aux: Tensor | None = None,
) -> Tensor:
    """(B,T) gradient of the whole loss with respect to each sampled token's log-prob, in closed form.

    aux: what an auxiliary loss adds per token before weighting (e.g. `sdar.gradient_coefficient`). An entropy bonus is
    not a function of the sampled token's log-prob alone and has no part here.
    """
    total = surrogate_gradient(logp, old, advantages, clip_low, clip_high, dual_clip)
    if reference is not None and kl_coef:
        total = total + kl_coef * kl_k3_gradient(logp, reference)
    if aux is not None:
        total = total + aux
    return torch.where(weights > 0, weights * total, 0)


def ratio_metrics(
    logp: Tensor,
    old: Tensor,
    mask: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> dict[str, float]:
    """How far the policy has moved from the one that sampled, over the masked tokens (B,T).

    ratio_mean, ratio_max, ratio_min; chi2 = mean(r^2) - 1, a sample estimate of the Pearson chi-square divergence;
    approx_kl = mean(r - 1 - log r), nats; clip_fraction: share of tokens whose gradient a clip holds at 0.
    """
    if not bool(mask.any()):
        raise WorkbenchError("ratio_metrics: the mask is empty")
    logp, old, advantages = (x.detach()[mask] for x in (logp, old, advantages))
    rho = ratio(logp, old)
    held = torch.where(advantages < 0, rho < 1 - clip_low, (rho > 1 + clip_high) & (advantages > 0))
    if dual_clip is not None:
        held |= (advantages < 0) & (rho > dual_clip)
    values = {
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "ratio_min": rho.min(),
        "chi2": rho.square().mean() - 1,
        "approx_kl": (rho - 1 - rho.log()).mean(),
        "clip_fraction": held.to(rho.dtype).mean(),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
