"""How right a credit signal is, against a truth: order of turns, signs, pivotal turns, and calibration of a belief.

Arrays only. Episodes whose truth is the same for all turns say nothing of an order and are left out of it; a credit
that is the same for all turns of an episode orders them by chance, which is a correlation of 0. Intervals resample
groups of episodes, which share states and outcomes, and not single episodes; one group has none.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..toy_world import rank_correlation
from .truth import THRESHOLD, Truth

METRICS = ("correlation", "sign", "precision", "recall", "brier")
RESAMPLES = 1000
DIGITS = 6


@dataclass(frozen=True)
class Score:
    """value and 95 % interval of each metric (NaN where it is not defined); told: share of the counted episodes whose
    turns the signal tells apart; episodes, counted: how many there are and how many have an order to be right about."""

    value: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    told: float
    episodes: int
    counted: int

    def row(self) -> dict[str, float | int]:
        """One flat row: <metric>, <metric>_low, <metric>_high, told, episodes, counted; None where not defined."""
        out: dict[str, float | int | None] = {"episodes": self.episodes, "counted": self.counted, "told": self.told}
        for name in METRICS:
            for end, found in (("", self.value), ("_low", self.low), ("_high", self.high)):
                out[name + end] = found[name] if np.isfinite(found[name]) else None
        return out


def score(
    credit: np.ndarray,
    truth: Truth,
    belief: np.ndarray | None = None,
    flags: np.ndarray | None = None,
    threshold: float = THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Score:
    """Every metric of one signal. credit: (E,K); belief: (E,K+1) of the states, where the signal has one; flags: (E,)
    how many turns of each episode it may call pivotal, default as many as there are."""
    counted, order, told = correlations(credit, truth)
    sums = {
        "correlation": np.stack([np.where(counted, order, 0), counted], 1),
        "sign": signs(credit, truth),
        **dict(zip(("precision", "recall"), hits(credit, truth, flags, threshold), strict=True)),
        "brier": np.zeros((len(credit), 2)) if belief is None else errors(belief, truth),
    }
    weights = resample(truth.group, resamples, seed)
    value, low, high = {}, {}, {}
    for name, pairs in sums.items():
        value[name], low[name], high[name] = _mean(pairs, weights)
    share = float(told[counted].mean()) if counted.any() else float("nan")
    return Score(value, low, high, share, len(credit), int(counted.sum()))


def correlations(credit: np.ndarray, truth: Truth) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(E,) whether the truth has an order, Spearman's correlation with it (0 where the credit has none), and whether
    the credit has one. Ties share their mean rank; values that differ by rounding alone are tied."""
    mask, own, right = _tensors(truth.mask, _scaled(credit, truth.mask), truth.advantage)
    found = rank_correlation(own, right, mask, digits=DIGITS).numpy()
    counted, told = varies(truth.advantage, truth.mask), varies(_scaled(credit, truth.mask), truth.mask)
    return counted, np.where(counted & told, np.nan_to_num(found), 0.0), told


def gain(
    one: np.ndarray, other: np.ndarray, truth: Truth, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """By how much the mean rank correlation of one credit is above another's on the same episodes, and its interval;
    NaN where it is not defined, or cannot be told."""
    counted, first, _ = correlations(one, truth)
    apart = first - correlations(other, truth)[1]
    pairs = np.stack([np.where(counted, apart, 0), counted], 1)
    return _mean(pairs, resample(truth.group, resamples, seed))


def varies(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(E,) whether an episode's turns differ in it."""
    rounded = np.round(values, DIGITS)
    top = np.where(mask, rounded, -np.inf).max(1)
    return top > np.where(mask, rounded, np.inf).min(1)


def signs(credit: np.ndarray, truth: Truth) -> np.ndarray:
    """(E,2) of the turns with an advantage that is not 0, those whose credit has its sign (no sign counts one half),
    and how many there are."""
    some = truth.mask & (np.abs(truth.advantage) > 1e-9)
    own = np.sign(np.round(_scaled(credit, truth.mask), DIGITS))
    right = 0.5 + 0.5 * own * np.sign(truth.advantage)
    return np.stack([np.where(some, right, 0).sum(1), some.sum(1)], 1)


def hits(
    credit: np.ndarray, truth: Truth, flags: np.ndarray | None = None, threshold: float = THRESHOLD
) -> tuple[np.ndarray, np.ndarray]:
    """((E,2), (E,2)): turns that are flagged and pivotal, over those flagged and over those pivotal.

    Flagged are the turns of largest |credit|; where equal ones compete for the last flags each has its chance."""
    pivotal = truth.pivotal(threshold)
    count = pivotal.sum(1) if flags is None else flags
    right = np.where(pivotal, flagged(credit, truth.mask, count), 0).sum(1)
    return np.stack([right, count], 1), np.stack([right, pivotal.sum(1)], 1)


def flagged(credit: np.ndarray, mask: np.ndarray, count: np.ndarray) -> np.ndarray:
    """(E,K) the chance of each turn to be among the `count` (E,) of largest |credit|, ties broken at random."""
    size = np.where(mask, np.round(np.abs(_scaled(credit, mask)), DIGITS), -1.0)
    above = (size[:, None, :] > size[:, :, None]).sum(2)
    level = (size[:, None, :] == size[:, :, None]).sum(2)
    return np.where(mask, np.clip((count[:, None] - above) / level, 0, 1), 0)


def errors(belief: np.ndarray, truth: Truth) -> np.ndarray:
    """(E,2) squared distance of belief from V summed over states, less the noise of the estimate of V, and states.

    Less its noise, as E (b - estimate)^2 = (b - V)^2 + the estimate's variance; over few states it can fall below 0.
    """
    distance = (belief - truth.value) ** 2 - truth.variance
    return np.stack([np.where(truth.state_mask, distance, 0).sum(1), truth.state_mask.sum(1)], 1)


def reliability(
    belief: np.ndarray, truth: Truth, bins: int = 10, resamples: int = RESAMPLES, seed: int = 0
) -> list[dict[str, float]]:
    """One row a bin of the belief that holds a state: belief, value (means over its states), value_low, value_high
    (over groups of episodes, None where too few have such a state), states. Calibrated is where value equals belief."""
    place = np.clip((belief * bins).astype(int), 0, bins - 1)
    weights = resample(truth.group, resamples, seed)
    rows = []
    for n in range(bins):
        here = truth.state_mask & (place == n)
        if not here.any():
            continue
        sums = np.stack([np.where(here, truth.value, 0).sum(1), here.sum(1)], 1)
        value, *ends = _mean(sums, weights)
        low, high = (end if np.isfinite(end) else None for end in ends)
        rows.append(
            {"belief": float(belief[here].mean()), "value": value, "value_low": low, "value_high": high,
             "states": int(here.sum())}
        )  # fmt: skip
    return rows


def ceiling(truth: Truth, draws: int = 100, seed: int = 0) -> tuple[float, float, float]:
    """About the mean rank correlation of perfect credit with a truth as noisy as this one, and between which values
    95 % of the draws lie. 1 where all values are exact, NaN where no truth has an order.

    Each value is drawn towards the mean of all states as far as its noise demands (a beta prior fitted by its moments)
    and taken for true; rolled again as often, that world tells what credit perfect in it would reach. Noise that is
    left in its values parts turns that are alike, so this is too high; by about as much as the same done to what was
    rolled again is higher still, which is taken off (a double bootstrap). With 16 rolls, in worlds whose values are
    known, it is off by up to .1 on average (upwards where wins are rare, by .2 without the second step), and a single
    one by as much again either way.
    """
    if not varies(truth.advantage, truth.mask).any():
        return (float("nan"),) * 3
    if not (truth.rolls > 0).any():
        return 1.0, 1.0, 1.0
    rng, found = np.random.default_rng([seed, 31]), np.zeros((draws, 2))
    world = _shrunk(truth)
    for pair in found:
        again = _rerolled(truth, world, rng)
        guessed = _shrunk(again)
        pair[:] = _order(world, again), _order(guessed, _rerolled(truth, guessed, rng))
    once, twice = np.nanmean(found, 0)
    low, high = np.nanquantile(found[:, 0], [0.025, 0.975])
    return tuple(float(np.clip(value - (twice - once), -1, 1)) for value in (once, low, high))


def _shrunk(truth: Truth) -> np.ndarray:
    """(E,K+1) values drawn towards the mean of all states that were rolled, those that are exact as they are."""
    rolled = truth.rolls > 0
    _, first = np.unique(np.where(rolled, truth.state, -1), return_index=True)
    first = first[rolled.reshape(-1)[first]]
    a, b = _beta(truth.value.reshape(-1)[first], truth.variance.reshape(-1)[first])
    return np.where(rolled, (a + truth.value * truth.rolls) / (a + b + truth.rolls), truth.value)


def _rerolled(truth: Truth, world: np.ndarray, rng: np.random.Generator) -> Truth:
    """The truth of as many rolls again, were `world` (E,K+1) the true values; a state that is shared is rolled once."""
    state = np.where(truth.state_mask, truth.state, -1)
    _, first, place = np.unique(state, return_index=True, return_inverse=True)
    n, chance = (x.reshape(-1)[first] for x in (truth.rolls, world))
    rates = np.where(n > 0, rng.binomial(n.astype(int), chance) / np.maximum(n, 1), chance)
    noise = np.where(n > 1, rates * (1 - rates) / np.maximum(n - 1, 1), 0)
    value, variance = (x[place].reshape(world.shape) for x in (rates, noise))
    return replace(truth, value=value, variance=variance, advantage=np.where(truth.mask, np.diff(value, axis=1), 0))


def _order(world: np.ndarray, truth: Truth) -> float:
    """Mean rank correlation of credit that is perfect in a world with a truth."""
    counted, order, _ = correlations(np.diff(world, axis=1), truth)
    return float(order[counted].mean()) if counted.any() else float("nan")


def _beta(rate: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """The beta distribution with the mean and variance of the states' values, the noise of the rolls taken off."""
    mean = float(np.clip(rate.mean(), 1e-3, 1 - 1e-3))
    spread = float(np.clip(rate.var() - noise.mean(), 1e-4, 0.95 * mean * (1 - mean)))
    size = mean * (1 - mean) / spread - 1
    return mean * size, (1 - mean) * size


def resample(group: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """(R,E) how often each episode counts where groups are drawn with replacement."""
    names, owner = np.unique(group, return_inverse=True)
    n = len(names)
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples)[:, owner].astype(float)


def _mean(pairs: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Sums over counts (E,2), and between which values 95 % of the draws of `resample` lie: NaN where it has no count,
    and where over 5 % of the draws have none, as with the counts of one group alone, which say nothing of others."""
    value, draws = _ratio(pairs.sum(0)), _ratio(weights @ pairs)
    known = draws[np.isfinite(draws)]
    several = (weights != 1).any()
    if not several or not np.isfinite(value) or len(known) < 0.95 * len(draws):
        return value, float("nan"), float("nan")
    return value, *map(float, np.quantile(known, [0.025, 0.975]))


def _ratio(pairs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        out = pairs[..., 0] / pairs[..., 1]
    return np.where(np.isfinite(out), out, np.nan) if out.ndim else float(out)


def _scaled(credit: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Credit over its largest size in the episode, so that rounding is told from differences on any scale."""
    own = np.where(mask, credit, 0.0)
    return own / np.maximum(np.abs(own).max(1, keepdims=True), 1e-300)


def _tensors(mask: np.ndarray, *values: np.ndarray) -> tuple[torch.Tensor, ...]:
    return torch.from_numpy(mask), *(torch.from_numpy(np.where(mask, v, 0.0)) for v in values)
