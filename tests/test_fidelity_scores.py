"""Truth and scores: values from rolls against values that are known, and every score on cases worked by hand."""

import numpy as np
import pytest
from scipy import stats

from workbench import toy_world
from workbench.fidelity import frames, scores
from workbench.fidelity.signals import Found, Name, padded
from workbench.fidelity.truth import Truth, difference, estimate, exact, truth

ROLLS = 16


@pytest.fixture(scope="module")
def world():
    """Episodes of a walk, the exact truth of their states, and one from rolls whose chance to win is that value."""
    walk = toy_world.with_success_rate(toy_world.random_walk(goal=2, steps=8, seed=1), 0.4)
    played = toy_world.sample(walk, 150, seed=3)
    table, rng = toy_world.state_values(walk).numpy(), np.random.default_rng(5)
    columns = walk.steps + np.pad(np.cumsum(2 * played.actions.numpy() - 1, 1), ((0, 0), (1, 0)))
    known = table[np.arange(walk.steps + 1), columns]
    rolled: dict = {}
    paths = []
    for values, places in zip(known, columns, strict=True):
        path = []
        for k, (value, place) in enumerate(zip(values, places, strict=True)):
            if k == walk.steps:
                path.append(exact(value))
            else:
                path.append(rolled.setdefault((k, place), estimate(rng.random(ROLLS) < value)))
        paths.append(path)
    groups = range(len(known))
    return played, truth([[exact(v) for v in row] for row in known], groups), truth(paths, groups)


def test_rolled_values_are_unbiased_and_their_intervals_cover():
    rng, chances = np.random.default_rng(0), np.array([0.02, 0.1, 0.3, 0.5, 0.85])
    true = rng.choice(chances, (4000, 2))
    found = [[estimate(rng.random(ROLLS) < p) for p in pair] for pair in true]
    error = np.array([[v.value for v in pair] for pair in found]) - true
    noise = np.array([[v.variance for v in pair] for pair in found])
    assert abs(error.mean()) < 4 * error.std() / error.size**0.5
    assert noise.mean() == pytest.approx((error**2).mean(), rel=0.05)
    low, high = (np.array([[getattr(v, end) for v in pair] for pair in found]) for end in ("low", "high"))
    assert 0.93 < ((low <= true) & (true <= high)).mean() < 0.99
    spans = np.array([difference(*pair) for pair in found])
    gap = true[:, 1] - true[:, 0]
    assert spans[:, 0].mean() == pytest.approx(gap.mean(), abs=0.01)
    assert 0.93 < ((spans[:, 1] <= gap) & (gap <= spans[:, 2])).mean() < 0.99


def test_advantages_of_the_walk_are_the_exact_ones(world):
    played, known, rolled = world
    assert np.allclose(known.advantage, played.advantage.numpy())
    assert not known.variance.any() and (known.low == known.high).all()
    error = rolled.advantage - known.advantage
    assert abs(error.mean()) < 0.02
    assert np.allclose(rolled.advantage, rolled.halves.mean(0))
    inside = (rolled.low <= known.advantage + 1e-9) & (known.advantage - 1e-9 <= rolled.high)
    assert inside.mean() > 0.9


def test_the_ceiling_is_what_perfect_credit_reaches(world):
    _, known, rolled = world
    assert scores.ceiling(known) == (1.0, 1.0, 1.0)
    assert scores.score(known.advantage, known).value["correlation"] == pytest.approx(1)
    top, low, high = scores.ceiling(rolled)
    perfect = scores.score(known.advantage, rolled).value["correlation"]
    assert low < top < high and 0.5 < perfect < 0.9
    assert perfect == pytest.approx(top, abs=0.2)


def test_the_ceiling_is_not_far_above_perfect_credit_where_wins_are_rare():
    rng, apart = np.random.default_rng(0), []
    for seed in range(4):
        paths, perfect, groups = [], [], []
        for group in range(25):
            steps, chance, shared = rng.integers(2, 5), rng.uniform(0.05, 0.2), {}
            for _ in range(4):
                left = steps - np.cumsum([0, *(rng.random(10) < chance)])
                left = left[: next((k for k, n in enumerate(left) if n <= 0), 10) + 1]
                known = [stats.binom.sf(n - 1, 10 - k, chance) for k, n in enumerate(left)]
                path = [
                    shared.setdefault(tuple(left[: k + 1]), estimate(rng.random(ROLLS) < value))
                    for k, value in enumerate(known[:-1])
                ]
                paths.append([*path, exact(known[-1])])
                perfect.append(np.diff(known))
                groups.append(group)
        rolled = truth(paths, groups)
        reached = scores.score(padded(perfect, rolled.mask.shape[1]), rolled, resamples=1).value["correlation"]
        apart.append(scores.ceiling(rolled, draws=30, seed=seed)[0] - reached)
    assert -0.05 < np.mean(apart) < 0.13


def test_the_belief_of_an_ideal_teacher_is_better_than_chance(world):
    played, known, _ = world
    revision = toy_world.posterior_revisions(played.evidence, float(known.value[0, 0])).numpy()
    belief = np.cumsum(np.concatenate([known.value[:, :1], revision], 1), 1)
    made = scores.score(revision, known, belief)
    assert made.value["correlation"] > 0.99 and made.value["sign"] > 0.99 and made.told == 1
    assert abs(made.value["brier"]) < 1e-3
    flat = scores.score(revision, known, np.full(belief.shape, known.value[0, 0]))
    assert flat.value["brier"] > 0.05


def hand(advantage, mask=None, group=None) -> Truth:
    """A truth whose values are known, by its advantages."""
    advantage = np.array(advantage, float)
    mask = np.ones(advantage.shape, bool) if mask is None else np.array(mask, bool)
    values = np.cumsum(np.concatenate([np.full((len(advantage), 1), 0.5), advantage], 1), 1)
    groups = range(len(advantage)) if group is None else group
    return truth([[exact(v) for v in row[: m.sum() + 1]] for row, m in zip(values, mask, strict=True)], groups)


def test_order_is_spearmans_with_ties_and_flat_truths_are_counted_out():
    right = hand([[0.1, 0.0, -0.2, 0.1], [0.0, 0.0, 0.0, 0.0], [0.3, -0.1, 0.0, 0.0]], [[1] * 4, [1] * 4, [1, 1, 0, 0]])
    credit = np.array([[3.0, 1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [7.0, 7.0, 0.0, 9.0]])
    counted, found, told = scores.correlations(credit, right)
    assert counted.tolist() == [True, False, True] and told.tolist() == [True, True, False]
    assert found[0] == pytest.approx(stats.spearmanr(credit[0], right.advantage[0].round(6))[0])
    assert found[2] == 0  # says nothing of the order
    made = scores.score(credit, right)
    assert made.value["correlation"] == pytest.approx(found[0] / 2)
    assert (made.episodes, made.counted, made.told) == (3, 2, 0.5)


def test_order_is_blind_to_scale_and_rounding():
    right = hand([[0.1, 0.0, -0.2]])
    for scale in (1e-9, 1.0, 1e9):
        noisy = scale * (np.array([[1.0, 1.0, 1.0]]) + 1e-12 * np.array([[1, 2, 3]]))
        assert not scores.correlations(noisy, right)[2][0]
        assert scores.correlations(scale * np.array([[2.0, 1.0, 0.5]]), right)[1][0] == pytest.approx(1)


def test_signs_leave_out_turns_that_changed_nothing():
    right = hand([[0.2, 0.0, -0.1, 0.1]])
    assert scores.signs(np.array([[1.0, -1.0, -1.0, 0.0]]), right).tolist() == [[2.5, 3]]
    assert scores.signs(np.ones((1, 4)), right).tolist() == [[2, 3]]


def test_flags_are_shared_among_equals():
    mask = np.array([[True, True, True, False]])
    assert scores.flagged(np.array([[-5.0, 1.0, 1.0, 9.0]]), mask, np.array([2])).tolist() == [[1, 0.5, 0.5, 0]]
    right = hand([[0.3, 0.1, -0.4, 0.0]])
    assert right.pivotal(0.2).tolist() == [[True, False, True, False]]
    precision, recall = scores.hits(np.array([[0.0, 1.0, -3.0, 0.5]]), right, np.array([1]))
    assert precision.tolist() == [[1, 1]] and recall.tolist() == [[1, 2]]
    assert scores.hits(np.ones((1, 4)), right)[0].tolist() == [[1, 2]]  # chance: half of two flags


def test_a_turn_is_pivotal_only_where_its_interval_leaves_out_zero():
    few = [estimate(np.array([1, 0])), estimate(np.array([1, 1]))]
    many = [estimate(np.array([1, 0] * 20)), estimate(np.ones(40))]
    assert truth([few, many], [0, 1]).pivotal(0.2).tolist() == [[False], [True]]


def test_the_error_of_a_belief_is_less_the_noise_of_the_values():
    rng, true = np.random.default_rng(2), 0.3
    right = truth([[estimate(rng.random(8) < true), exact(1.0)] for _ in range(3000)], range(3000))
    for belief, distance in ((0.3, 0.0), (0.5, 0.04)):
        given = np.column_stack([np.full(3000, belief), np.ones(3000)])
        made = scores.score(np.zeros((3000, 1)), right, given)
        assert made.value["brier"] == pytest.approx(distance / 2, abs=0.002)


def test_reliability_bins_states():
    right = hand([[0.3], [-0.3]])
    rows = scores.reliability(np.array([[0.55, 0.95], [0.51, 1.0]]), right)
    assert [row["states"] for row in rows] == [2, 2]
    assert [round(row["value"], 6) for row in rows] == [0.5, 0.5]
    assert rows[1]["belief"] == pytest.approx(0.975)


def test_intervals_resample_groups():
    rng = np.random.default_rng(4)
    right = hand(np.repeat(rng.normal(0, 0.1, (6, 5)), 20, 0), group=np.repeat(np.arange(6), 20))
    credit = right.advantage + np.repeat(rng.normal(0, 0.2, (6, 5)), 20, 0)
    together = scores.score(credit, right)
    alone = scores.score(credit, hand(right.advantage))
    assert together.value == pytest.approx(alone.value, nan_ok=True)
    width = {name: made.high["correlation"] - made.low["correlation"] for name, made in (("t", together), ("a", alone))}
    assert width["t"] > 2 * width["a"]


def test_padding_changes_nothing():
    rng = np.random.default_rng(6)
    rows = [rng.normal(size=n) for n in (3, 5, 4)]
    wide = [truth([[exact(v) for v in (0.5, *(0.5 + r / 10))] for r in rows], range(3)) for _ in range(2)][0]
    credit = padded([rng.normal(size=len(r)) for r in rows], 5)
    dirty = np.where(wide.mask, credit, 99.0)
    assert scores.score(credit, wide).value == pytest.approx(scores.score(dirty, wide).value, nan_ok=True)
    alone = [scores.correlations(credit[e : e + 1, : len(r)], hand_of(wide, e))[1][0] for e, r in enumerate(rows)]
    assert np.allclose(scores.correlations(credit, wide)[1], alone)


def test_one_group_has_no_interval():
    whole = truth([[exact(0.5), exact(0.2), exact(1.0)], [exact(0.5), exact(0.7), exact(0.0)]], [0, 0])
    found = scores.score(whole.advantage, whole)
    assert found.value["correlation"] == 1 and np.isnan([found.low["correlation"], found.high["correlation"]]).all()
    value, *ends = scores.gain(whole.advantage, -whole.advantage, whole)
    assert value == 2 and np.isnan(ends).all()
    name = [Name("evidence", "signal", text) for text in ("right", "wrong")]
    credit = {name[0]: Found(list(whole.advantage)), name[1]: Found(list(-whole.advantage))}
    assert frames.teacher_gains(credit, whole, 0) == {"evidence": {"wrong": [2, None, None]}}


def test_a_bin_of_a_belief_that_one_group_alone_has_has_no_interval():
    right = hand(np.tile([0.3, -0.2, 0.1, -0.1], (2, 1)).reshape(8, 1))
    beliefs = np.column_stack([np.full(8, 0.15), np.array([0.95] + [0.55] * 7)])
    rows = {round(row["belief"], 2): row for row in scores.reliability(beliefs, right)}
    assert rows[0.95]["value_low"] is None and rows[0.95]["value_high"] is None
    assert rows[0.55]["value_low"] < rows[0.55]["value"] < rows[0.55]["value_high"]


def hand_of(whole: Truth, e: int) -> Truth:
    n = int(whole.turns[e])
    return truth([[exact(v) for v in whole.value[e, : n + 1]]], [0])


def test_padding_is_no_state_when_worlds_are_rolled_again():
    long, short = ([estimate(np.ones(ROLLS)) for _ in range(n)] for n in (4, 2))
    found = truth([long, short], [0, 1]).of([1, 0])
    certain = np.where(found.state_mask, 1.0, 0.0)
    again = scores._rerolled(found, certain, np.random.default_rng(0))
    assert np.array_equal(again.value, certain)
