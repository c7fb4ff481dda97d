"""Statistics of few runs, against values worked out by hand, recorded from rliable, or true by construction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import statistics
from workbench.errors import WorkbenchError

ONE = np.zeros


def made(rng, n, games=48, hard=None, shift=0.0, spread=0.05):
    """(n, games) outcomes of runs of one strength that differ by `spread`."""
    hard = rng.random(games) if hard is None else hard
    at = 0.6 + shift + rng.normal(0, spread, n)
    return (rng.random((n, games)) / 2 + hard / 2 < at[:, None]).astype(float)


# Aggregates


def test_interquartile_mean_cuts_whole_scores_from_either_end():
    assert statistics.iqm(np.array([0.0, 0.2, 0.3, 1.0])) == pytest.approx(0.25)
    assert statistics.iqm(np.array([0.9, 0.1, 0.5])) == pytest.approx(0.5), "below four it is the mean"
    scores = np.array([[0.1, 0.9], [0.4, 0.2], [0.8, 0.3], [0.6, 0.5], [0.2, 0.7]])
    assert statistics.iqm(scores) == pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.6 + 0.7) / 6)
    assert statistics.iqm(scores, axis=0) == pytest.approx([(0.2 + 0.4 + 0.6) / 3, (0.3 + 0.5 + 0.7) / 3])


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=40), st.integers(0, 5000))
def test_interquartile_mean_lies_among_the_middle_and_ignores_how_far_the_best_is(whole, far):
    scores = np.array(whole) / 1000
    middle, ordered = statistics.iqm(scores), np.sort(scores)
    assert ordered[len(scores) // 4] - 1e-9 <= middle <= ordered[-1 - len(scores) // 4] + 1e-9
    scores[scores.argmax()] += far / 1000
    assert statistics.iqm(scores) == pytest.approx(middle)


# 9 runs by 3 strata, wins of 64 games; the values below were computed from them by rliable 1.2.0.
WON = [[35, 25, 39], [32, 32, 43], [49, 44, 36], [28, 20, 30], [46, 49, 50], [23, 29, 42], [49, 38, 47], [48, 41, 39],
       [25, 31, 53]]  # fmt: skip
RLIABLE_IQM, RLIABLE_INTERVAL = 0.59895833, (0.52916667, 0.67083333)
RLIABLE_PROFILE = {0.3: 1.0, 0.5: 0.62962963, 0.7: 0.2962963}


def test_aggregates_are_those_of_rliable():
    scores = np.array(WON) / 64
    assert statistics.iqm(scores) == pytest.approx(RLIABLE_IQM)
    games = (np.arange(64) < np.array(WON).T.reshape(-1, 1)).astype(float)
    strata = np.repeat(np.arange(3), 9)
    at = np.array(list(RLIABLE_PROFILE))
    share = statistics.run_profile(games, strata, at, resamples=10).share
    assert share == pytest.approx(list(RLIABLE_PROFILE.values()))
    # Its bootstrap draws runs alone and does not widen.
    picks = statistics.run_picks(strata, 5000, np.random.default_rng(0))
    draws = statistics.score_draws(games, strata, np.ones((5000, 64)), picks, stretch=np.sqrt(8 / 9))
    assert statistics.interval(statistics.iqm(draws, axis=1)) == pytest.approx(RLIABLE_INTERVAL, abs=0.008)


def test_draws_of_runs_spread_as_the_mean_of_runs_does():
    rng, games = np.random.default_rng(0), np.array([[0.0] * 8, [1.0] * 8, [0.0] * 8])
    strata, counts = ONE(3, int), np.ones((20_000, 8))
    draws = statistics.score_draws(games, strata, counts, statistics.run_picks(strata, 20_000, rng)).mean(1)
    assert draws.mean() == pytest.approx(1 / 3, abs=0.01)
    assert draws.var() == pytest.approx(games[:, 0].var(ddof=1) / 3, rel=0.03), "a plain bootstrap has two thirds of it"


def test_runs_are_drawn_within_their_stratum_and_lone_ones_are_pooled():
    strata = np.array(["a", "b", "a", "b", "b"])
    picks = statistics.run_picks(strata, 500, np.random.default_rng(0))
    assert (strata[picks] == strata).all() and {0, 2} == set(picks[:, 0])
    assert (statistics.pool_lone(strata)[0] == strata).all()
    for pooled in statistics.pool_lone(strata, np.array(["a", "a", "c"])):
        assert not pooled.any()


def test_strata_take_the_distance_between_warm_starts_out_of_the_interval():
    rng = np.random.default_rng(2)
    games = np.concatenate([made(rng, 3, 400, shift=-0.3, spread=0), made(rng, 3, 400, shift=0.3, spread=0)])
    strata = np.array([0, 0, 0, 1, 1, 1])
    _, low, high = statistics.aggregate(games, strata)
    _, wide_low, wide_high = statistics.aggregate(games, ONE(6, int))
    assert high - low < 0.5 * (wide_high - wide_low)


# Differences


def test_differences_do_not_hang_on_the_draw_of_games_that_both_played():
    rng = np.random.default_rng(4)
    hard = (rng.random(60) < 0.5).astype(float)
    base = np.tile(hard, (4, 1))
    better = base.copy()
    better[:, :6] = 1
    s = ONE(4, int)
    (found,) = statistics.differences([((better, s), (base, s))])
    assert found.difference == pytest.approx(better.mean() - base.mean()) and found.low >= 0
    (same,) = statistics.differences([((base, s), (base, s))])
    assert (same.difference, same.low, same.high, same.clear) == (0, 0, 0, False) and same.p == 1


def test_correction_widens_with_the_number_of_comparisons_and_stops_at_the_first_that_fails():
    rng = np.random.default_rng(5)
    hard, s = rng.random(64), ONE(6, int)
    base = (made(rng, 6, 64, hard), s)
    better = (made(rng, 6, 64, hard, 0.25), s)
    nulls = [(made(rng, 6, 64, hard), s) for _ in range(5)]
    (alone,) = statistics.differences([(better, base)])
    found = statistics.differences([(m, base) for m in (*nulls, better)])
    assert (alone.low, alone.high) == (alone.corrected_low, alone.corrected_high) and alone.clear
    assert found[-1].clear and (found[-1].low, found[-1].high) == (alone.low, alone.high)
    assert found[-1].corrected_low < alone.low and found[-1].corrected_high > alone.high
    assert not any(f.clear for f in found[:-1])
    assert all(f.corrected_low <= f.low and f.corrected_high >= f.high for f in found)
    assert found == statistics.differences([(m, base) for m in (*nulls, better)]), "one seed, one answer"


def test_a_method_is_rarely_ahead_of_itself():
    rng, wrong, s = np.random.default_rng(3), 0, ONE(3, int)
    for _ in range(60):
        hard = rng.random(64)
        pair = [(made(rng, 3, 64, hard), s) for _ in range(2)]
        wrong += statistics.differences([tuple(pair)], resamples=400)[0].clear
    assert wrong <= 6, "a plain bootstrap over seeds says so in about 10 of 60"


# Probability of improvement

SCORES_X = np.array([[0.1, 0.5], [0.4, 0.5], [0.9, 0.25], [0.6, 0.75]])  # runs by tasks
SCORES_Y = np.array([[0.2, 0.5], [0.3, 0.25], [0.5, 0.5], [0.6, 0.0]])
GAMES = 20


def as_games(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(runs, tasks) scores in twentieths as games of runs, a stratum a task."""
    flat = scores.T.reshape(-1)
    games = (np.arange(GAMES) < np.round(flat * GAMES)[:, None]).astype(float)
    return games, np.repeat(np.arange(scores.shape[1]), scores.shape[0])


def test_probability_of_improvement_is_the_share_of_pairs_won_within_a_stratum():
    point, low, high = statistics.improvement(as_games(SCORES_X), as_games(SCORES_Y))
    # Task 1: 2 + 9.5 pairs by hand: .1 beats none; .4 beats 2; .9 all 4; .6 beats 3 and ties 1. Task 2 likewise.
    first, second = (0 + 2 + 4 + 3.5) / 16, (3 + 3 + 1.5 + 4) / 16
    assert point == pytest.approx((first + second) / 2) == 0.65625, "as rliable 1.2.0 says"
    assert low <= point <= high
    swapped, *_ = statistics.improvement(as_games(SCORES_Y), as_games(SCORES_X))
    assert swapped == pytest.approx(1 - point)
    with pytest.raises(WorkbenchError, match="share no warm start"):
        statistics.improvement((np.ones((2, 3)), np.array(["a", "a"])), (np.ones((2, 3)), np.array(["b", "b"])))


# Profiles


def test_profiles_are_shares_above_a_threshold():
    games, s = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], float), ONE(3, int)
    at = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    assert statistics.run_profile(games, s, at).share.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0, 0])
    by_game = statistics.game_profile(games, s, np.array([0.0, 0.4, 0.7, 1.0]))
    assert by_game.share.tolist() == pytest.approx([0.75, 0.5, 0.25, 0])
    for profile in (statistics.run_profile(games, s, at), by_game):
        assert (profile.low <= profile.share).all() and (profile.share <= profile.high).all()
        assert (np.diff(profile.share) <= 0).all()


# Time to a target


def test_kaplan_meier_by_hand():
    # 5 runs: there at 2, 4, 4; ended without at 3 and 6. At risk 5, 3 (one censored before), so 4/5, 4/5 * 1/3.
    found = statistics.time_to_target([2, 4, 4, 3, 6], [True, True, True, False, False])
    at = dict(zip(found.cost.tolist(), found.waiting.tolist(), strict=True))
    assert at[2] == pytest.approx(0.8) and at[4] == pytest.approx(0.8 / 3)
    assert (found.runs, found.reached, found.median, found.low, found.high) == (5, 3, 4, 2, None)


def test_what_is_not_reached_is_not_given_a_number():
    none = statistics.time_to_target([8, 8, 8], [False] * 3)
    assert (none.reached, none.median, none.low, none.high) == (0, None, None, None) and none.waiting.tolist() == [1]
    few = statistics.time_to_target([4, 8, 8, 8], [True, False, False, False])
    assert few.median is None and few.waiting[-1] == pytest.approx(0.75)
    late = statistics.time_to_target([1, 2, 2, 9], [False, False, False, True])
    assert late.waiting[-1] == 0 and late.median is None, "one run that spent most is not half of them"
    every = statistics.time_to_target([4, 4, 4], [True] * 3)
    assert (every.median, every.low, every.high) == (4, 4, None)
    many = statistics.time_to_target(np.arange(1, 41), [True] * 40)
    assert many.median == 20 and 10 < many.low < 20 < many.high < 30


# Horizon


def test_slope_is_least_squares_over_games():
    length = np.array([2.0, 2.0, 3.0, 5.0, 6.0, 8.0])
    games = np.array([[1, 1, 1, 0, 1, 0], [1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]], float)
    point, low, high = statistics.slope(games, ONE(3, int), length)
    assert point == pytest.approx(np.polyfit(length, games.mean(0), 1)[0]) and low < point < high
    assert np.isnan(statistics.slope(games, ONE(3, int), np.full(6, 4.0))[0])
