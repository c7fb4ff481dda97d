"""CoBA-RL (arXiv 2602.03048): rollouts go where the policy's present capability gains most from practice.

Follows the paper's equations. The bounds of alpha and the window are those of the released code (github
Within-yao/CoBA-RL, recipe/coba_rl/budget_allocators.py, read), which differs in more that is left out here: it first
splits tasks by success rate, caps the share of each part, smooths rates, and adapts tau.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from ..errors import WorkbenchError

_SAME = 1 - 1e-12  # gains this close, relative to the larger, are equal but for rounding
_CLEAR = 1 + 1e-9  # gains this much larger than another are larger however they are rounded


@dataclass(frozen=True)
class CoBAConfig:
    kappa: float = 11.0  # alpha + beta of the Beta density: how sharply it prefers one difficulty
    gamma: float = 10.0  # steepness of the squashing below a failure rate of one half
    alpha_min: float = 1.0  # alpha lies in [alpha_min, kappa - alpha_min]
    window: int = 3  # steps that the failure rate is averaged over
    lo: int = 2  # rollouts that every task gets
    hi: int = 128  # rollouts that no task exceeds; the paper's, for steps of thousands: a small step needs a lower one
    tau: float = 10.0  # rollouts after which a task saturates, see `allocate`
    dynamic: bool = True  # False gives every task the same number

    def __post_init__(self):
        if not 0 < self.alpha_min <= self.kappa / 2 < math.inf:
            raise WorkbenchError(f"CoBA: alpha_min must lie in (0, kappa / 2], got {self.alpha_min} of {self.kappa}")
        if not 0 < self.gamma < math.inf:
            raise WorkbenchError(f"CoBA: gamma must be finite and above 0, got {self.gamma}")
        if self.window < 1:
            raise WorkbenchError(f"CoBA: window must be at least 1, got {self.window}")
        if not 0 <= self.lo <= self.hi:
            raise WorkbenchError(f"CoBA: bounds must be 0 <= lo <= hi, got {self.lo} and {self.hi}")
        if not 0 < self.tau < math.inf:
            raise WorkbenchError(f"CoBA: tau must be finite and above 0, got {self.tau}")


def _rates(rates: Sequence[float], what: str) -> list[float]:
    rates = [float(p) for p in rates]
    for i, p in enumerate(rates):
        if not 0 <= p <= 1:
            raise WorkbenchError(f"CoBA: {what} {i} must be a success rate in [0, 1], got {p}")
    if not rates:
        raise WorkbenchError(f"CoBA: no {what} was given; it needs the success rate of at least one")
    return rates


def squash(failure: float, gamma: float = 10.0) -> float:
    """Mean failure rate -> itself above one half, sigmoid(gamma (failure - 1/2)) below: .5 at one half either way."""
    return failure if failure > 0.5 else 1 / (1 + math.exp(-gamma * (failure - 0.5)))


def density_parameters(success: Sequence[float], config: CoBAConfig = CoBAConfig()) -> tuple[float, float]:
    """The policy's mean success rate at each step so far -> (alpha, beta) of the Beta density over difficulty.

    A weak policy gets a large alpha, which favours tasks it mostly solves; a strong one practises hard tasks.
    Raises WorkbenchError without a step, or on a rate outside [0, 1].
    """
    last = _rates(success, "step")[-config.window :]
    failure = 1 - math.fsum(last) / len(last)
    high = config.kappa - config.alpha_min
    alpha = config.alpha_min + (high - config.alpha_min) * squash(failure, config.gamma)
    alpha = min(max(alpha, config.alpha_min), high)
    return alpha, config.kappa - alpha


def _density(p: float, alpha: float, beta: float) -> float:
    scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return math.exp(scale + (alpha - 1) * math.log(p) + (beta - 1) * math.log1p(-p))


def value(p: float, budget: int, alpha: float, beta: float, tau: float) -> float:
    """What `budget` rollouts are worth at success rate p: (1 - exp(-budget p(1-p) / tau)) Beta(p; alpha, beta).

    Concave in the budget, so that greedy allocation is optimal. 0 at p = 0 and p = 1, where rollouts teach nothing.
    """
    return -math.expm1(-budget * p * (1 - p) / tau) * _density(p, alpha, beta) if 0 < p < 1 else 0.0


def total_value(p: Sequence[float], budget: Sequence[int], alpha: float, beta: float, tau: float) -> float:
    """Sum of `value` over the tasks."""
    return math.fsum(value(q, b, alpha, beta, tau) for q, b in zip(p, budget, strict=True))


def _surely(first: Sequence[float], p: Sequence[float], total: int, lo: int, hi: int, tau: float) -> list[int]:
    """Rollouts of each task whose gain is beyond doubt among the largest: in any order, all of them are served."""
    left = total - lo * len(p)
    if not left:
        return [lo] * len(p)
    q, hi = np.array(p), min(hi, lo + left)
    gains = np.array(first)[:, None] * np.exp(-(q * (1 - q))[:, None] * np.arange(lo, hi) / tau)
    level = np.partition(gains, gains.size - left, axis=None)[gains.size - left]
    return (lo + (gains > level * _CLEAR).sum(1)).tolist()


def allocate(
    p: Sequence[float], total: int, *, lo: int = 2, hi: int = 128, alpha: float, beta: float, tau: float
) -> list[int]:
    """Success rate of each task -> rollouts of each, `lo` to `hi`, `total` together, of the largest total value.

    Every rollout goes to the task that gains most by it, of equals (within 1e-12 of the gain, as rounding parts those
    of p and 1 - p) to the first. tau, in rollouts, is how soon a task saturates: the sources give none for the paper;
    the released code adapts it between 3 and 12.
    Raises WorkbenchError where the bounds cannot hold the total, or on a rate outside [0, 1].
    """
    p = _rates(p, "task")
    if not 0 <= lo <= hi:
        raise WorkbenchError(f"CoBA: bounds must be 0 <= lo <= hi, got {lo} and {hi}")
    if not isinstance(total, Integral):
        raise WorkbenchError(f"CoBA: a total of whole rollouts is expected, got {total!r}")
    if not len(p) * lo <= total <= len(p) * hi:
        raise WorkbenchError(
            f"CoBA: {len(p)} tasks of {lo} to {hi} rollouts take {len(p) * lo} to {len(p) * hi} in all, got {total}"
        )
    for name, number in (("alpha", alpha), ("beta", beta), ("tau", tau)):
        if not 0 < number < math.inf:
            raise WorkbenchError(f"CoBA: {name} must be finite and above 0, got {number}")

    # The gain of one more rollout is that of the first, shrunk by one factor for each that the task has.
    first = [value(q, 1, alpha, beta, tau) for q in p]
    budget = _surely(first, p, total, lo, hi, tau)
    left = total - sum(budget)
    heap = [(-first[i] * math.exp(-b * p[i] * (1 - p[i]) / tau), i) for i, b in enumerate(budget) if b < hi]
    heapq.heapify(heap)
    while left:
        bound, tied = heap[0][0] * _SAME, []
        while heap and heap[0][0] <= bound:
            tied.append(heapq.heappop(heap))
        for key, i in sorted(tied, key=lambda pair: pair[1]):
            # Again while its gain hardly shrinks: it is still the first of equals.
            while left and key <= bound and budget[i] < hi:
                budget[i] += 1
                left -= 1
                key = -first[i] * math.exp(-budget[i] * p[i] * (1 - p[i]) / tau)
            if budget[i] < hi:
                heapq.heappush(heap, (key, i))
    return budget
