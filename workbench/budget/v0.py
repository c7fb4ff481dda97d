"""V0 (arXiv 2602.03584): what a policy will earn on a question it has not met, from what it earned on others lately.

The policy is described by its recent (question, outcome) pairs alone, so that a new policy needs new pairs and no
training. The paper embeds questions with Qwen3-Embedding-0.6B and an adapter of learned queries, and reads the pairs
with TabPFN v2.5, a transformer that fits in context. Here the head is a small one, and not TabPFN: nearest neighbours,
or ridge logistic regression fitted to the pairs under the paper's loss, on embeddings that are given. The paper's own
comparison has nearest neighbours .04 to .13 of AUC below V0 within a policy; expect the same of these.

Constants as in the released code (github Now-Join-Us/V0, trainer.py, read); the utility of rollouts, its bounds and the
routing score as quoted by public write-ups of the paper, whose full text was not available.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import WorkbenchError, unknown
from . import exact

HEADS = ("logistic", "knn")


@dataclass(frozen=True)
class V0Config:
    head: str = "logistic"  # "logistic": ridge logistic regression; "knn": mean outcome of the nearest questions
    context: int = 256  # most recent pairs that describe the policy
    neighbours: int = 16  # of "knn"
    ridge: float = 1.0  # of "logistic", on embeddings scaled to a mean squared length of 1
    rank_share: float = 0.25  # of "logistic": weight of the ranking loss, the rest is the cross-entropy's; below 1
    prior: float = 1.0  # outcomes of one half that are added, so that no value is 0 or 1

    def __post_init__(self):
        if self.head not in HEADS:
            raise unknown("V0 head", str(self.head), HEADS)
        if self.context < 1 or self.neighbours < 1:
            raise WorkbenchError(
                f"V0: context and neighbours must be at least 1, got {self.context} and {self.neighbours}"
            )
        for name in ("ridge", "prior"):
            if not 0 < getattr(self, name) < math.inf:
                raise WorkbenchError(f"V0: {name} must be finite and above 0, got {getattr(self, name)}")
        if not 0 <= self.rank_share < 1:
            raise WorkbenchError(f"V0: rank_share must lie in [0, 1), got {self.rank_share}")


@dataclass(frozen=True)
class V0AllocationConfig:
    dynamic: bool = True  # groups as large as values make them; False: equal groups
    lo: int = 2  # least rollouts of a task
    hi: int = 128  # most rollouts of a task

    def __post_init__(self):
        if not 1 <= self.lo <= self.hi:
            raise WorkbenchError(f"V0: bounds must be 1 <= lo <= hi, got {self.lo} and {self.hi}")


def value_loss(scores: Tensor, outcomes: Tensor, contexts: Tensor, rank_share: float = 0.25) -> Tensor:
    """(Q,) logits, outcomes in [0, 1] and labels of the context that each was predicted from -> scalar loss.

    rank_share * ranking + (1 - rank_share) * cross-entropy: the mean of -log sigmoid(s_i - s_j) over pairs of one
    context with outcome i at least one half and j below, 0 without such pairs, and the mean of the cross-entropy with
    the outcome as a soft label. The ranking part does not change when all scores of a context move together, so that
    how strong a policy is teaches it nothing.
    """
    if not scores.shape == outcomes.shape == contexts.shape or scores.dim() != 1 or not len(scores):
        raise WorkbenchError(
            f"V0: scores {tuple(scores.shape)}, outcomes {tuple(outcomes.shape)} and contexts {tuple(contexts.shape)} "
            "must be (Q,) all, with Q at least 1"
        )
    _rates(outcomes.tolist(), "outcome")
    won = outcomes >= 0.5
    pairs = (contexts[:, None] == contexts) & won[:, None] & ~won
    ranking = F.softplus(-(scores[:, None] - scores)[pairs]).mean() if bool(pairs.any()) else scores.sum() * 0
    return rank_share * ranking + (1 - rank_share) * F.binary_cross_entropy_with_logits(scores, outcomes)


def predict(embeddings: Tensor, outcomes: Tensor, queries: Tensor, config: V0Config = V0Config()) -> Tensor:
    """A policy's history, oldest first: (N,D) embeddings of questions and (N,) outcomes in [0, 1]; (Q,D) queries ->
    (Q,) float64 expected outcome of each query, in (0, 1).

    Only the last `context` pairs count. Dimensions are standardised over them. A history of one outcome throughout is
    fine: values are drawn towards one half by `prior`. Raises WorkbenchError without history, on outcomes outside
    [0, 1], or on embeddings that do not fit each other or are not finite.
    """
    if embeddings.dim() != 2 or queries.dim() != 2 or embeddings.shape[1:] != queries.shape[1:]:
        raise WorkbenchError(
            f"V0: embeddings {tuple(embeddings.shape)} and queries {tuple(queries.shape)} must be (N,D) and (Q,D)"
        )
    if outcomes.shape != embeddings.shape[:1]:
        raise WorkbenchError(
            f"V0: {len(embeddings)} embeddings but outcomes of shape {tuple(outcomes.shape)}; one each expected"
        )
    _rates(outcomes.tolist(), "outcome", "the history is empty: there is nothing to describe the policy")
    for name, x in (("history", embeddings), ("queries", queries)):
        if not bool(torch.isfinite(x).all()):
            raise WorkbenchError(f"V0: an embedding of the {name} is not finite")
    context, y = embeddings[-config.context :].double(), outcomes[-config.context :].double()
    mean, deviation = context.mean(0), context.std(0, correction=0)
    # A dimension that only rounding moves would otherwise be blown up to the size of the others.
    moves = deviation > 1e-9 * context.abs().amax(0).clamp(min=1e-300)
    scale = torch.where(moves, deviation * math.sqrt(max(1, int(moves.sum()))), math.inf)
    context, queries = (context - mean) / scale, (queries.double() - mean) / scale
    if config.head == "knn":
        return _nearest(context, y, queries, config)
    return _logistic(context, y, queries, config).sigmoid()


def _nearest(context: Tensor, y: Tensor, queries: Tensor, config: V0Config) -> Tensor:
    average = (y.sum() + config.prior / 2) / (len(y) + config.prior)
    # The latest first, which a stable sort prefers among equally near ones.
    near = torch.cdist(queries, context.flip(0)).argsort(dim=1, stable=True)[:, : config.neighbours]
    return (y.flip(0)[near].sum(1) + config.prior * average) / (near.shape[1] + config.prior)


def _logistic(context: Tensor, y: Tensor, queries: Tensor, config: V0Config) -> Tensor:
    """Logits of the queries by the (w, b) of least N * value_loss + ridge / 2 * |w|^2 + prior * cross-entropy of b with
    one half, by Newton's method: all of it is convex."""
    if context.shape[1] > len(context):  # the best w is a combination of the context's rows
        basis = torch.linalg.svd(context, full_matrices=False).Vh.T
        context, queries = context @ basis, queries @ basis
    n, share = len(y), config.rank_share
    x = torch.cat([context, torch.ones_like(y)[:, None]], 1)
    penalty = torch.full((x.shape[1],), config.ridge, dtype=x.dtype, device=x.device)
    penalty[-1] = 0
    won, lost = (y >= 0.5).nonzero()[:, 0], (y < 0.5).nonzero()[:, 0]
    pairs = len(won) * len(lost)
    one_context = torch.zeros(n, dtype=torch.long, device=y.device)

    def total(theta: Tensor) -> Tensor:
        neutral = F.softplus(theta[-1]) - theta[-1] / 2
        own = n * value_loss(x @ theta, y, one_context, share)
        return own + (penalty * theta.square()).sum() / 2 + config.prior * neutral

    theta = x.new_zeros(x.shape[1])
    before = total(theta)
    for _ in range(50):
        s = x @ theta
        q = s.sigmoid()
        gradient_s, curvature = (1 - share) * (q - y), torch.diag((1 - share) * q * (1 - q))
        if pairs:
            wrong = (s[lost] - s[won][:, None]).sigmoid() * share * n / pairs
            gradient_s = gradient_s.index_add(0, won, -wrong.sum(1)).index_add(0, lost, wrong.sum(0))
            bend = wrong * (s[won][:, None] - s[lost]).sigmoid()
            between = torch.zeros_like(curvature)
            between[won[:, None], lost] = bend
            between = between + between.T
            curvature = curvature + torch.diag(between.sum(1)) - between
        gradient, hessian = x.T @ gradient_s + penalty * theta, x.T @ curvature @ x + torch.diag(penalty)
        b = theta[-1].sigmoid()
        gradient[-1] += config.prior * (b - 0.5)
        hessian[-1, -1] += config.prior * b * (1 - b)
        step = torch.linalg.solve(hessian, gradient)
        slope, size = float(gradient @ step), 1.0
        if slope < 1e-14 * max(1.0, float(before)):
            break
        while (after := total(theta - size * step)) > before - 1e-4 * size * slope and size > 1e-6:
            size /= 2
        theta, before = theta - size * step, after
    return queries @ theta[:-1] + theta[-1]


def auc_within(scores: Tensor, outcomes: Tensor, contexts: Tensor) -> float:
    """Share of pairs of one context, one won and one lost, that (Q,) scores put in order; ties count half. Nan without
    such pairs. Guessing a policy's strength, the shortcut, gains nothing here."""
    won = outcomes >= 0.5
    pairs = (contexts[:, None] == contexts) & won[:, None] & ~won
    ahead = (scores[:, None] - scores)[pairs]
    return float(((ahead > 0).double() + (ahead == 0).double() / 2).mean()) if len(ahead) else math.nan


def auc_between_groups(values: Tensor, won: Tensor, lost: Tensor) -> float:
    """As `auc_within` for one context, over pairs of rollouts of two tasks: (M,) value of each task and how many of its
    rollouts were won and lost. Rollouts of one task have one value and say nothing of it. Nan without pairs."""
    pairs = won.double()[:, None] * lost.double()
    pairs.fill_diagonal_(0)
    ahead = values[:, None] - values
    return float((pairs * ((ahead > 0).double() + (ahead == 0).double() / 2)).sum() / pairs.sum())


def residual_correlation(values: Tensor, outcomes: Tensor, against: Tensor) -> float:
    """Spearman correlation of (Q,) residuals, value - outcome, with what should not explain them: the mean success of
    each one's context (then the policy's strength is read wrongly) or the question's difficulty. 0 where one is
    constant."""
    ranks = torch.stack([_ranks(values - outcomes), _ranks(against)])
    ranks = ranks - ranks.mean(1, keepdim=True)
    size = ranks.norm(dim=1).prod()
    return float((ranks[0] * ranks[1]).sum() / size) if size > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    """Ranks of (Q,) values, of equal ones their mean."""
    _, place, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]


def _rates(rates: Sequence[float], what: str, empty: str = "") -> list[float]:
    rates = [float(p) for p in rates]
    for i, p in enumerate(rates):
        if not 0 <= p <= 1:
            raise WorkbenchError(f"V0: {what} {i} must lie in [0, 1], got {p}")
    if not rates:
        raise WorkbenchError(f"V0: {empty or f'no {what} was given'}")
    return rates


def utility(p: float, budget: int) -> float:
    """What `budget` rollouts are worth at success rate p: budget (1-p) (1 - (1-p)^(budget-1)).

    Not concave: the second rollout of a hard task is worth less than its tenth. It bends upwards up to about
    2 / -log(1-p) rollouts and runs on at a slope of nearly 1-p. 0 at p = 0 and p = 1.
    """
    return budget * (1 - p) * (1 - (1 - p) ** (budget - 1)) if budget > 0 else 0.0


def total_utility(p: Sequence[float], budget: Sequence[int]) -> float:
    """Sum of `utility` over the tasks."""
    return math.fsum(utility(q, b) for q, b in zip(p, budget, strict=True))


def _table(p: Sequence[float], total: int, lo: int, hi: int) -> np.ndarray:
    """(M,K) utility of each task at lo, lo + 1, .. of rollouts, as many as the total lets it have, at most hi."""
    p = _rates(p, "success rate of task", "no task was given; it needs the success rate of at least one")
    if not 1 <= lo <= hi:
        raise WorkbenchError(f"V0: bounds must be 1 <= lo <= hi, got {lo} and {hi}")
    if not isinstance(total, Integral):
        raise WorkbenchError(f"V0: a total of whole rollouts is expected, got {total!r}")
    if not len(p) * lo <= total <= len(p) * hi:
        raise WorkbenchError(
            f"V0: {len(p)} tasks of {lo} to {hi} rollouts take {len(p) * lo} to {len(p) * hi} in all, got {total}"
        )
    hi = min(hi, total - lo * (len(p) - 1))  # no task can get more
    failing, budget = 1 - np.array(p)[:, None], np.arange(lo, hi + 1)
    return budget * failing * (1 - failing ** (budget - 1))


def allocate(p: Sequence[float], total: int, *, lo: int = 2, hi: int = 128) -> list[int]:
    """Success rate of each task -> rollouts of each, `lo` to `hi`, `total` together, of the largest total utility.

    The paper allocates greedily (`allocate_greedy`), which its utility does not allow: success rates .05 and .5, 20
    rollouts, at least 2 each: 18 and 2 are worth 10.45, the greedy 2 and 18 only 9.09. Raises WorkbenchError where the
    bounds cannot hold the total, or on a rate outside [0, 1].
    """
    return (lo + exact.share(_table(p, total, lo, hi), total - lo * len(p))).tolist()


def allocate_greedy(p: Sequence[float], total: int, *, lo: int = 2, hi: int = 128) -> list[int]:
    """As `allocate`, every rollout going to the task that gains most by that one: the paper's way, and not the best.

    It starves hard tasks, whose next rollout is worth little and whose next twenty are worth much.
    """
    gains = np.diff(_table(p, total, lo, hi), axis=1).tolist()
    extra = [0] * len(p)
    heap = [(-own[0], i) for i, own in enumerate(gains) if own]
    heapq.heapify(heap)
    for _ in range(total - lo * len(p)):
        _, i = heap[0]
        extra[i] += 1
        if extra[i] < len(gains[i]):
            heapq.heapreplace(heap, (-gains[i][extra[i]], i))
        else:
            heapq.heappop(heap)
    return [lo + e for e in extra]


def routing_score(values: Tensor, costs: Tensor, beta: float) -> Tensor:
    """(Q,M) expected outcome of each question under each model, (M,) cost of a call -> (Q,M) score to route by.

    beta * value + (1 - beta) * (1 - cost), with the costs scaled to [0, 1] between cheapest and dearest (how the paper
    normalises them is inferred), 0 where all are equal. `argmax(1)` is the model to ask. Raises WorkbenchError on
    values outside [0, 1], costs that are negative or not finite, or beta outside [0, 1].
    """
    if values.dim() != 2 or costs.shape != values.shape[1:] or not values.numel():
        raise WorkbenchError(f"V0: values {tuple(values.shape)} and costs {tuple(costs.shape)} must be (Q,M) and (M,)")
    _rates(values.flatten().tolist(), "value")
    if not bool((torch.isfinite(costs) & (costs >= 0)).all()):
        raise WorkbenchError(f"V0: costs must be finite and at least 0, got {costs.tolist()}")
    if not 0 <= beta <= 1:
        raise WorkbenchError(f"V0: beta must lie in [0, 1], got {beta}")
    spread = costs.max() - costs.min()
    scaled = (costs - costs.min()) / spread if spread > 0 else torch.zeros_like(costs)
    return beta * values + (1 - beta) * (1 - scaled)
