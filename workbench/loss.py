"""Policy losses per token, and weights that add them up.

A loss is `(weights * per_token).sum()`: the weights come from the whole batch, so micro-batches are sums of their own
rows and their size changes nothing. Formulas: PPO clip (arXiv 1707.06347), dual clip (1912.09729), k3
(joschu.net/blog/kl-approx.html), as in the released code of the agentic papers (core_algos.py, read).

DORA's (arXiv 2509.18883, eq. 4) is the clipped surrogate with both of its bounds and the dual clip, times a truncated
weight for what sampling and training engine differ by. The equation prints the dual clip for either sign; its text
says negative advantages alone, as here: for positive ones it would be the whole loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import WorkbenchError, unknown
from .records import Batch

AGGREGATIONS = ("episode_mean", "token_mean", "turn_mean", "turn_sum", "token_sum_norm")
RATIOS = ("token", "turn", "row", "episode")

# exp() of a larger log-ratio overflows float32 soon after, and an infinite branch turns a masked gradient into nan.
MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


@dataclass(frozen=True)
class PolicyLossConfig:
    pg_coef: float = 1.0  # weight of the policy loss; 0 leaves the auxiliary loss alone
    clip_low: float = 0.2  # the importance ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 3.0  # a negative advantage's loss is at most -dual_clip * A (arXiv 1912.09729); 0: no bound
    engine_cap: float = 0.0  # most that a token's loss is weighed by pi_old / pi_sampled (TIS, DORA); 0: no weight
    ratio: str = "token"  # importance ratio of each "token", or the geometric mean of its "turn", "row" or "episode"
    aggregation: str = "episode_mean"  # of token losses, see token_weights

    def __post_init__(self):
        if self.ratio not in RATIOS:
            raise unknown("importance ratio", str(self.ratio), RATIOS)
        if self.aggregation not in AGGREGATIONS:
            raise unknown("aggregation", str(self.aggregation), AGGREGATIONS)
        if not (0 <= self.clip_low < 1 and self.clip_high >= 0):
            raise WorkbenchError(
                f"policy loss: clip_low must lie in [0, 1) and clip_high be at least 0, got {self.clip_low} and "
                f"{self.clip_high}"
            )
        if self.dual_clip != 0 and not self.dual_clip > 1:
            raise WorkbenchError(f"policy loss: dual_clip must be above 1, or 0 for none, got {self.dual_clip}")
        if self.engine_cap != 0 and not self.engine_cap >= 1:
            raise WorkbenchError(f"policy loss: engine_cap must be at least 1, or 0 for none, got {self.engine_cap}")
        if not 0 <= self.pg_coef < float("inf"):
            raise WorkbenchError(f"policy loss: pg_coef must be finite and at least 0, got {self.pg_coef}")

    @property
    def clip(self) -> dict[str, float | None]:
        """The clips, by the names that `surrogate` and its kin take them."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip or None}


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """(B,T) importance ratio pi / pi_old of each token, its log held within +-20.

    The released token loss has no bound, its GSPO holds the log of a sequence's ratio below 10.
    """
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def engine_weight(old: Tensor, sampled: Tensor | None, cap: float) -> Tensor | None:
    """(B,T) weight min(pi_old / pi_sampled, cap) of each token (arXiv 2509.18883, eq. 4, r_t(mu)), without gradient.

    old, sampled: log-probs of one policy in the training and the sampling engine. None, for a weight of 1 everywhere,
    without a cap (0) or where nothing else sampled than what scored.
    """
    return None if sampled is None or not cap else ratio(old, sampled).clamp(max=cap).detach()


def weighted(advantages: Tensor, batch: Batch, config: PolicyLossConfig) -> Tensor:
    """(B,T) advantages times the engine weight: a surrogate of these is the weighted surrogate, as weights are >= 0."""
    weight = engine_weight(batch.old_logprobs, batch.sampled_logprobs, config.engine_cap)
    return advantages if weight is None else advantages * weight


def _first_copies(turn_index: Tensor, episode_index: Tensor) -> Tensor:
    """(B,T) bool: sampled tokens, each turn of an episode in the first row that holds it."""
    sampled, turns = turn_index >= 0, int(turn_index.max()) + 1
    key = (episode_index[:, None] * turns + turn_index).clamp(min=0)
    rows = torch.arange(len(key), device=key.device)[:, None].expand_as(key)
    first = rows.new_full((int(key.max()) + 1,), len(key)).scatter_reduce(0, key[sampled], rows[sampled], "amin")
    return sampled & (first[key] == rows)


def sequence_form(
    logp: Tensor, old: Tensor, turn_index: Tensor, per: str = "turn", episode_index: Tensor | None = None
) -> Tensor:
    """GSPO's token form (arXiv 2507.18071, eq. 7 and 14): (B,T) log-probs to put in place of `logp`.

    Their ratio to `old` is s = exp(mean(logp - old)) over the token's sequence, and its gradient s * grad logp of each
    token. turn_index (B,T): -1 off the sampled tokens. The paper's sequence is one response: `per="turn"`, in either
    layout and as in released agentic code. An agent's is its whole trajectory (arXiv 2601.16725 has a sequence's ratio
    for agents; that its sequence is the trajectory is inferred): "episode", over all rows of one episode_index (B,),
    which must all be here; a turn that two rows hold counts once. "row" takes each row by itself, and "token" gives
    `logp` back.
    """
    if per == "token":
        return logp
    if per not in RATIOS:
        raise unknown("importance ratio", str(per), RATIOS)
    mask = counted = turn_index >= 0
    if per == "episode":
        if episode_index is None:
            raise WorkbenchError("an importance ratio per episode needs episode_index, which says whose a row is")
        counted = _first_copies(turn_index, episode_index)
    part = turn_index.clamp(min=0) if per == "turn" else torch.zeros_like(turn_index)
    difference = torch.where(counted, (logp - old).detach(), 0)
    zeros = difference.new_zeros(len(logp), int(part.max()) + 1)
    sums, counts = (zeros.scatter_add(1, part, x) for x in (difference, counted.to(zeros.dtype)))
    if per == "episode":
        none = zeros.new_zeros(int(episode_index.max()) + 1, 1)
        sums, counts = (none.index_add(0, episode_index, x)[episode_index] for x in (sums, counts))
    mean = (sums / counts.clamp(min=1)).gather(1, part)
    return torch.where(mask, old + mean + (logp - logp.detach()), logp)


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

    episode_mean: mean over an episode's tokens, then over episodes. token_mean: mean over all tokens. turn_mean,
    turn_sum: mean or sum over a turn's tokens, then mean over turns (seq-mean-token-mean and -sum where a row is a
    turn). token_sum_norm: sum over tokens / (episodes * max_tokens), Dr.GRPO (arXiv 2503.20783; the released code
    divides by the padded width alone); max_tokens is the most an episode may sample and should stay the same over a
    run; without it, the most that an episode of this batch did. All are the same in both layouts.
    """
    if how not in AGGREGATIONS:
        raise unknown("aggregation", str(how), AGGREGATIONS)
    counted = batch.counted.to(batch.old_logprobs.dtype)
    if how == "token_mean":
        return counted / counted.sum()
    if how in ("turn_mean", "turn_sum"):
        tokens = batch.to_tokens(batch.turn_tokens) if how == "turn_mean" else torch.ones_like(counted)
        return counted / (tokens.clamp(min=1) * batch.turn_counts.sum())
    episodes, in_episode = len(batch.group_index), batch.turn_tokens.sum(1)
    if how == "episode_mean":
        return counted / (in_episode[batch.episode_index] * episodes)[:, None]
    if max_tokens is not None and not max_tokens > 0:
        raise WorkbenchError(f"token_sum_norm: max_tokens must be positive, got {max_tokens}")
    return counted / (episodes * (in_episode.max() if max_tokens is None else max_tokens))


def _ratio_logp(
    logp: Tensor, old: Tensor, turn_index: Tensor | None, config: PolicyLossConfig, episode_index: Tensor | None
) -> Tensor:
    if config.ratio == "token":
        return logp
    if turn_index is None:
        raise WorkbenchError(f"an importance ratio per {config.ratio} needs turn_index, which says where turns lie")
    return sequence_form(logp, old, turn_index, config.ratio, episode_index)


def dloss_dlogp(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: PolicyLossConfig = PolicyLossConfig(),
    turn_index: Tensor | None = None,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
    episode_index: Tensor | None = None,
) -> Tensor:
    """(B,T) gradient of policy loss and KL with respect to each sampled token's log-prob, in closed form.

    turn_index: needed where config.ratio is not "token", episode_index (B,) where it is "episode". advantages: times
    the engine weight where there is one (`weighted`). An entropy bonus is not a function of the sampled token's
    log-prob alone and has no part here.
    """
    ratio_logp = _ratio_logp(logp, old, turn_index, config, episode_index)
    total = config.pg_coef * surrogate_gradient(ratio_logp, old, advantages, **config.clip)
    if reference is not None and kl_coef:
        total = total + kl_coef * kl_k3_gradient(logp, reference)
    return torch.where(weights > 0, weights * total, 0)


def ratio_metrics(
    logp: Tensor,
    old: Tensor,
    mask: Tensor,
    advantages: Tensor,
    config: PolicyLossConfig = PolicyLossConfig(),
    turn_index: Tensor | None = None,
    episode_index: Tensor | None = None,
) -> dict[str, float]:
    """How far the policy has moved from the one that sampled, over the masked tokens (B,T).

    ratio_mean, ratio_max, ratio_min; chi2 = mean(r^2) - 1, a sample estimate of the Pearson chi-square divergence;
    approx_kl = mean(r - 1 - log r), nats, all of token ratios; clip_fraction: share of tokens whose gradient a clip of
    `config` holds at 0 (of its sequence ratios, which need turn_index (B,T), where it has such, and those of episodes
    episode_index (B,)).
    """
    if not bool(mask.any()):
        raise WorkbenchError("ratio_metrics: the mask is empty")
    clipped = _ratio_logp(logp, old, turn_index, config, episode_index)
    logp, clipped, old, advantages = (x.detach()[mask] for x in (logp, clipped, old, advantages))
    rho, r = ratio(logp, old), ratio(clipped, old)
    held = torch.where(advantages < 0, r < 1 - config.clip_low, (r > 1 + config.clip_high) & (advantages > 0))
    if config.dual_clip:
        held |= (advantages < 0) & (r > config.dual_clip)
    values = {
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "ratio_min": rho.min(),
        "chi2": rho.square().mean() - 1,
        "approx_kl": (rho - 1 - rho.log()).mean(),
        "clip_fraction": held.to(rho.dtype).mean(),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
