"""What success rates of few runs can and cannot tell: aggregates, intervals, and times that were never reached.

Arrays only. `games` is (runs, G) 0/1 outcomes of one method's runs on the same G games; `strata` is (runs,) the warm
start of each run. Intervals come from resampling runs within their stratum and games jointly, since every run of every
method played the same ones. Aggregates and their intervals follow Agarwal et al. (arXiv 2108.13264): a run's success
rate is a score, a stratum is what a task is there.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .errors import WorkbenchError

LEVEL = 0.05
TRIM = 0.25  # cut from either end by the interquartile mean
Runs = tuple[np.ndarray, np.ndarray]  # games (runs, G) and strata (runs,) of one method


def iqm(scores: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Interquartile mean: the mean of the middle half (arXiv 2108.13264, section 4.3), along an axis or over all.

    Whole scores are cut, floor(n / 4) from either end, as in the authors' rliable; below 4 scores it is the mean.
    """
    return stats.trim_mean(scores, TRIM, axis=axis)


def pool_lone(*strata: np.ndarray) -> list[np.ndarray]:
    """The strata (runs,) of several methods as they can be resampled: one stratum where any has a stratum of one run.

    A lone run says nothing of how far another seed would have ended, and resampled alone it would claim no spread.
    """
    lone = any((np.unique(s, return_counts=True)[1] < 2).any() for s in strata)
    return [np.zeros(len(s), int) if lone else np.asarray(s) for s in strata]


def game_counts(n_games: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """(R, G) how often each game is drawn in each of R resamples of G games."""
    return rng.multinomial(n_games, np.full(n_games, 1 / n_games), resamples).astype(float)


def run_picks(strata: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """(R, runs) places of runs drawn with replacement, each within the stratum of the run it stands for."""
    picks = np.empty((resamples, len(strata)), int)
    for stratum in np.unique(strata):
        here = np.flatnonzero(strata == stratum)
        picks[:, here] = here[rng.integers(0, len(here), (resamples, len(here)))]
    return picks


def score_draws(
    games: np.ndarray, strata: np.ndarray, counts: np.ndarray, picks: np.ndarray, stretch: float = 1.0
) -> np.ndarray:
    """(R, runs) success rates of resampled runs on resampled games; they may leave [0, 1].

    A bootstrap of n runs spreads by (n - 1) / n too little in variance, which matters at 3 runs a stratum: deviations
    from the stratum's mean are widened by sqrt(n / (n - 1)), and by `stretch`. scipy.stats.bootstrap draws either axis
    alone and each sample apart; here two methods must share their games, and runs stay within strata, hence this.
    """
    by_run = counts @ games.T / games.shape[1]
    wide = np.empty_like(by_run)
    for stratum in np.unique(strata):
        here = np.flatnonzero(strata == stratum)
        n, centre = len(here), by_run[:, here].mean(1, keepdims=True)
        wide[:, here] = centre + (by_run[:, here] - centre) * (stretch * np.sqrt(n / (n - 1)) if n > 1 else 1.0)
    return np.take_along_axis(wide, picks, 1)


def interval(draws: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The percentile interval of (R,) draws that leaves out `level` of them."""
    low, high = np.quantile(draws, [level / 2, 1 - level / 2])
    return float(low), float(high)


def aggregate(
    games: np.ndarray, strata: np.ndarray, resamples: int = 4000, seed: int = 0, statistic: Callable = iqm
) -> tuple[float, float, float]:
    """A method's aggregate success over runs and its 95 % interval (see `score_draws`). With one run it covers games
    alone."""
    (strata,), rng = pool_lone(strata), np.random.default_rng(seed)
    counts = game_counts(games.shape[1], resamples, rng)
    draws = score_draws(games, strata, counts, run_picks(strata, resamples, rng))
    low, high = interval(statistic(draws, axis=1))
    return float(statistic(games.mean(1), axis=0)), max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True)
class Difference:
    """A method's interquartile mean less the control's: 95 % interval, and the interval at Holm's level."""

    difference: float
    low: float
    high: float
    p: float
    corrected_low: float
    corrected_high: float
    clear: bool  # zero lies outside the corrected interval, and outside those of all methods with smaller p


def differences(pairs: Sequence[tuple[Runs, Runs]], resamples: int = 10_000, seed: int = 0) -> list[Difference]:
    """Each (method, control) of (games, strata), corrected for how many there are by Holm's step-down.

    p is the two-sided share of draws beyond zero. In order of p, the k-th of m is held to the level .05 / (m - k + 1),
    and from the first that fails on, all are. Far tails of few runs are too short, so an interval at a level below .05
    is stretched by how much faster Student's t grows from .05 to that level than the normal does, at
    (runs - strata) degrees of freedom of both.

    How often a winner is named that is none, measured on made-up comparisons of a method with itself (64 games, warm
    starts 5 points apart, seeds of one warm start 0, 4 and 8 points apart, 1000 comparisons each): 0.1, 3.0 and 7.4 %
    with 3 runs of one warm start, 0.0, 0.1 and 2.0 % with 5, 0.0, 0.8 and 2.2 % with 3 runs of each of 3 warm starts.
    In any of 4 comparisons at once, 8 points apart: 1.3, 0.7 and 2.0 % (150 each). It errs on the careful side where
    games rather than seeds make the noise, as both resamplings then count it.
    """
    counts = None if not pairs else game_counts(pairs[0][0][0].shape[1], resamples, np.random.default_rng([seed, 0]))
    raw = [_draws(pair, counts, seed) for pair in pairs]
    tails = [2 * min((d <= 0).mean(), (d >= 0).mean()) for d in raw]
    order = sorted(range(len(raw)), key=lambda i: (tails[i], -abs(raw[i].mean()) / (raw[i].std() + 1e-12)))
    out: list[Difference | None] = [None] * len(raw)
    held, level = True, LEVEL
    for rank, i in enumerate(order):
        level = LEVEL / (len(raw) - rank) if held else level
        (new, new_strata), (base, base_strata) = pairs[i]
        df = sum(len(s) - len(np.unique(s)) for s in pool_lone(new_strata, base_strata))
        stretch = _tail(level, df) / _tail(LEVEL, df)
        draws = raw[i] if stretch == 1 else _draws(pairs[i], counts, seed, stretch)
        low, high = interval(draws, level)
        held = held and not low <= 0 <= high
        point = float(iqm(new.mean(1)) - iqm(base.mean(1)))
        p = min(1.0, float(tails[i]) + 2 / (resamples + 1))
        out[i] = Difference(point, *interval(raw[i]), p, low, high, held)
    return out


def _draws(pair: tuple[Runs, Runs], counts: np.ndarray, seed: int, stretch: float = 1.0) -> np.ndarray:
    """(R,) differences of interquartile means, the same games on both sides."""
    strata, rng = pool_lone(*(s for _, s in pair)), np.random.default_rng([seed, 1])
    new, base = (
        iqm(score_draws(games, s, counts, run_picks(s, len(counts), rng), stretch), axis=1)
        for (games, _), s in zip(pair, strata, strict=True)
    )
    return new - base


def _tail(level: float, df: int) -> float:
    return 1.0 if df < 1 else float(stats.t.isf(level / 2, df) / stats.norm.isf(level / 2))


def improvement(method: Runs, control: Runs, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """The chance that a run of the method ends above a run of the control, ties half (arXiv 2108.13264, section 4.3:
    the Mann-Whitney statistic over n m, averaged over strata that both have), and its 95 % percentile interval.

    Runs are drawn as they are, so where all runs of one lie above all of the other the interval is one point: at 3
    runs each that happens to equal methods once in ten times. Raises WorkbenchError where they share no stratum.
    """
    shared = np.intersect1d(method[1], control[1])
    if not len(shared):
        raise WorkbenchError("probability of improvement: the two methods share no warm start to be compared on")
    (x, xs), (y, ys) = ((g[np.isin(s, shared)], s[np.isin(s, shared)]) for g, s in (method, control))
    xd, yd = pool_lone(xs, ys)
    rng = np.random.default_rng(seed)
    counts = game_counts(x.shape[1], resamples, rng)
    xr, yr = (
        np.take_along_axis(counts @ g.T / g.shape[1], run_picks(d, resamples, rng), 1) for g, d in ((x, xd), (y, yd))
    )
    point = _above(x.mean(1)[None], y.mean(1)[None], xs, ys)[0]
    low, high = interval(_above(xr, yr, xd, yd))
    return float(point), min(low, float(point)), max(high, float(point))


def _above(x: np.ndarray, y: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """(R,) P(x > y) + P(x = y) / 2 over pairs within a stratum, averaged over strata; x (R, n), y (R, m)."""
    parts = []
    for stratum in np.unique(xs):
        gap = np.round(x[:, xs == stratum, None] - y[:, None, ys == stratum], 9)
        parts.append((0.5 + np.sign(gap) / 2).mean((1, 2)))
    return np.mean(parts, 0)


@dataclass(frozen=True)
class Profile:
    """Shares above each threshold, (T,), with pointwise 95 % bands."""

    thresholds: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


def run_profile(
    games: np.ndarray, strata: np.ndarray, thresholds: np.ndarray, resamples: int = 1000, seed: int = 0
) -> Profile:
    """Share of runs whose success is above each threshold (arXiv 2108.13264, equation 1, runs as scores)."""
    (strata,), rng = pool_lone(strata), np.random.default_rng(seed)
    counts = game_counts(games.shape[1], resamples, rng)
    scores = np.take_along_axis(counts @ games.T / games.shape[1], run_picks(strata, resamples, rng), 1)
    drawn = np.stack([(scores > t + 1e-9).mean(1) for t in thresholds], 1)
    share = (games.mean(1)[:, None] > thresholds + 1e-9).mean(0)
    return Profile(thresholds, share, *np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=0))


def game_profile(
    games: np.ndarray, strata: np.ndarray, thresholds: np.ndarray, resamples: int = 1000, seed: int = 0
) -> Profile:
    """Share of games that more than each threshold of the runs win."""
    (strata,), rng = pool_lone(strata), np.random.default_rng(seed)
    n_runs, n_games = games.shape
    counts = game_counts(n_games, resamples, rng)
    picks = run_picks(strata, resamples, rng)
    weight = np.stack([(picks == run).sum(1) for run in range(n_runs)], 1)
    rates = weight @ games / n_runs
    drawn = np.stack([((rates > t + 1e-9) * counts).sum(1) / n_games for t in thresholds], 1)
    share = (games.mean(0)[:, None] > thresholds + 1e-9).mean(0)
    return Profile(thresholds, share, *np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=0))


@dataclass(frozen=True)
class Reached:
    """Kaplan-Meier estimate of a cost until a target: the share not yet there after each cost, and the median.

    median: None where fewer than half of the runs got there: runs end by their budget, not at random, so the curve
    falls lower on the few that spent most. low, high: None where the bound never falls to one half.
    """

    runs: int
    reached: int
    cost: np.ndarray  # (K,) distinct costs, rising
    waiting: np.ndarray  # (K,) share of runs not there yet, from that cost on
    median: float | None
    low: float | None
    high: float | None


def time_to_target(cost: np.ndarray, reached: np.ndarray) -> Reached:
    """Cost until the target, a run each: the cost at which it was reached, or, right-censored, of the whole run.

    The 95 % interval of the median inverts the log-log bands of the curve (Brookmeyer and Crowley 1982).
    """
    cost, reached = np.asarray(cost, float), np.asarray(reached, bool)
    if not reached.any():
        ends = np.unique(cost)
        return Reached(len(cost), 0, ends, np.ones(len(ends)), None, None, None)
    curve = stats.ecdf(stats.CensoredData(uncensored=cost[reached], right=cost[~reached])).sf
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no band where the curve is 1 or 0, which is told below
        bands = curve.confidence_interval(1 - LEVEL, method="log-log")
    at, waiting = curve.quantiles, curve.probabilities
    # At 0 the lower bound is 0 and of the upper nothing is known.
    lower = np.where(waiting >= 1, 1.0, np.nan_to_num(bands.low.probabilities, nan=0.0))
    upper = np.where(waiting >= 1, 1.0, np.nan_to_num(bands.high.probabilities, nan=1.0))
    median, low, high = (
        float(at[np.argmax(s <= 0.5 + 1e-12)]) if (s <= 0.5 + 1e-12).any() else None for s in (waiting, lower, upper)
    )
    median = median if 2 * reached.sum() >= len(reached) else None
    return Reached(len(cost), int(reached.sum()), at, waiting, median, low, high)


def slope(
    games: np.ndarray, strata: np.ndarray, length: np.ndarray, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Change of success for each further turn a game needs, by least squares over games, and its 95 % interval.

    games: (runs, G); length: (G,) turns. NaN where all games need the same.
    """
    (strata,), rng = pool_lone(strata), np.random.default_rng(seed)
    counts = game_counts(len(length), resamples, rng)
    picks = run_picks(strata, resamples, rng)
    weight = np.stack([(picks == run).sum(1) for run in range(len(games))], 1)
    drawn = _fit(counts, weight @ games / len(games), length)
    point = _fit(np.ones((1, len(length))), games.mean(0)[None], length)[0]
    drawn = drawn[np.isfinite(drawn)]
    return (float(point), *interval(drawn)) if np.isfinite(point) else (float("nan"),) * 3


def _fit(weight: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(R,) weighted least-squares slopes of y (R, G) on x (G,)."""
    total = weight.sum(1, keepdims=True)
    centred = x - (weight * x).sum(1, keepdims=True) / total
    with np.errstate(all="ignore"):
        return (weight * centred * y).sum(1) / (weight * centred**2).sum(1)
