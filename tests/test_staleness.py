import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import staleness
from workbench.errors import WorkbenchError
from workbench.figures import staleness as figures
from workbench.staleness import StalenessConfig, simulate

config = st.builds(
    StalenessConfig,
    workers=st.integers(1, 12),
    batch=st.integers(1, 8),
    updates=st.integers(1, 12),
    max_staleness=st.integers(0, 4),
    late=st.sampled_from(staleness.LATE),
    tail=st.floats(0, 2, allow_subnormal=False),
    update_seconds=st.floats(0, 200, allow_subnormal=False),
    seed=st.integers(0, 99),
)


@settings(max_examples=150, deadline=None)
@given(config)
def test_no_sample_is_older_than_the_bound_and_none_is_lost_by_waiting(c):
    r = simulate(c)
    assert r.ages.shape == r.durations.shape == (c.updates, c.batch) and r.begun.shape == (c.updates,)
    assert r.ages.min() >= 0 and r.ages.max() <= c.max_staleness
    assert (r.ages <= np.arange(c.updates)[:, None]).all()  # no policy before the first
    assert sum(r.histogram) == r.ages.size and len(r.histogram) == c.max_staleness + 1
    assert (np.diff(r.begun) >= c.update_seconds - 1e-9).all()
    assert r.seconds == pytest.approx(r.begun[-1] + c.update_seconds)
    assert r.busy <= c.workers * r.seconds * (1 + 1e-9) and 0 <= r.wasted <= r.busy
    if c.late == "wait":
        assert r.dropped == r.wasted == 0
        assert r.busy == pytest.approx(r.durations.sum())
    assert r.busy - r.wasted >= r.durations.sum() * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(config)
def test_waiting_is_never_slower_than_synchrony_and_trains_on_the_same_rollouts(c):
    c = replace(c, late="wait")
    r, plain = simulate(c), simulate(replace(c, max_staleness=0))
    assert (r.begun <= plain.begun + 1e-6).all() and r.speedup >= 1 - 1e-9
    assert r.synchronous == plain.throughput and plain.speedup == 1 and plain.histogram == [plain.ages.size]
    np.testing.assert_array_equal(np.sort(r.durations, None), np.sort(plain.durations, None))


@settings(max_examples=50, deadline=None)
@given(config)
def test_a_bound_of_0_is_a_synchronous_trainer(c):
    """Against its schedule by hand: a batch is played by workers as they become free, then there is an update."""
    r = simulate(replace(c, max_staleness=0))
    now = 0.0
    for n in range(c.updates):
        free = [now] * c.workers
        for seconds in r.durations[n]:
            heapq.heappush(free, heapq.heappop(free) + seconds)
        assert r.begun[n] == pytest.approx(max(free))
        now = r.begun[n] + c.update_seconds
    assert r.dropped == 0


@pytest.mark.parametrize(("seconds", "update"), [(60.0, 30.0), (30.0, 60.0), (45.0, 45.0)])
@pytest.mark.parametrize("late", staleness.LATE)
def test_equal_rollouts_overlap_with_updates(seconds, update, late):
    c = StalenessConfig(workers=4, batch=4, updates=50, max_staleness=1, tail=0, rollout_seconds=seconds,
                        update_seconds=update, late=late)  # fmt: skip
    r = simulate(c)
    assert r.synchronous == pytest.approx(4 / (seconds + update))
    assert r.seconds == pytest.approx(seconds + update + 49 * max(seconds, update))
    assert r.dropped == 0 and r.histogram[1] == 4 * 49 if update <= seconds else r.ages.mean() > 0.9


def test_long_tails_cost_synchrony_more_and_dropping_prefers_short_rollouts():
    tails = [simulate(StalenessConfig(updates=60, tail=tail)) for tail in (0.0, 0.2, 0.4, 0.8)]
    assert all(a.synchronous > b.synchronous for a, b in itertools.pairwise(tails))
    # Beyond that, waiting for the longest rollouts holds up the bounded trainer too.
    assert tails[0].speedup < tails[1].speedup < tails[2].speedup
    waits, drops = (simulate(StalenessConfig(updates=60, max_staleness=1, late=late)) for late in ("wait", "drop"))
    assert drops.dropped > 0 and drops.speedup > waits.speedup
    assert drops.durations.mean() < 0.85 * waits.durations.mean()
    assert drops.worker_utilisation > waits.worker_utilisation and drops.trainer_utilisation > waits.trainer_utilisation


def test_the_seed_decides():
    c = StalenessConfig(updates=20)
    one, again, other = simulate(c), simulate(c), simulate(replace(c, seed=1))
    np.testing.assert_array_equal(one.ages, again.ages)
    assert one.seconds == again.seconds != other.seconds


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 0}, {"batch": 0}, {"updates": 0}, {"max_staleness": -1}, {"late": "skip"}, {"rollout_seconds": 0.0},
     {"tail": -0.1}, {"update_seconds": float("inf")}, {"tail": float("nan")}],
)  # fmt: skip
def test_an_impossible_simulation_is_refused_in_one_line(wrong):
    with pytest.raises(WorkbenchError, match=next(iter(wrong))) as caught:
        StalenessConfig(**wrong)
    assert "\n" not in str(caught.value)


def test_the_figure_shows_ages_and_throughput():
    results = [simulate(StalenessConfig(updates=30, max_staleness=s, late=late))
               for s, late in ((0, "wait"), (2, "wait"), (2, "drop"))]  # fmt: skip
    fig = figures.figure(*results)
    ages, rates = [t for t in fig.data if t.xaxis == "x"], [t for t in fig.data if t.xaxis == "x2"]
    assert [t.name for t in ages] == ["synchronous", "at most 2, wait", "at most 2, drop"]
    for trace, rate, result in zip(ages, rates, results, strict=True):
        assert sum(trace.y) == pytest.approx(1) and list(trace.customdata) == result.histogram
        assert rate.y[0] == pytest.approx(result.speedup)
    assert len(figures.figure(results[1]).data) == 2
    assert len({t.name for t in figures.figure(results[1], results[1]).data if t.name}) == 2
    with pytest.raises(WorkbenchError, match="no simulation"):
        figures.figure()


def test_the_figure_says_what_dropping_costs():
    waits, drops = (simulate(StalenessConfig(updates=30, late=late)) for late in staleness.LATE)
    assert "Waiting" in figures.figure(waits).layout.meta["subtitle"]
    told = figures.figure(drops).layout.meta["subtitle"]
    assert "Waiting" not in told and f"took {drops.durations.mean():.0f} s on average where all would take 83 s" in told
