import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workbench.budget.coba import CoBAConfig, allocate, density_parameters, squash, total_value, value
from workbench.errors import WorkbenchError

EXAMPLE = {"p": [0.1, 0.3, 0.5, 0.7, 0.9], "total": 25, "lo": 2, "hi": 12, "alpha": 4.0, "beta": 7.0, "tau": 10.0}


def best_by_trying_all(p, total, lo, hi, **density):
    """The largest total value of any allocation within the bounds."""
    found = (
        total_value(p, budget, **density)
        for budget in itertools.product(range(lo, hi + 1), repeat=len(p))
        if sum(budget) == total
    )
    return max(found)


def value_of(case):
    density = {name: case[name] for name in ("alpha", "beta", "tau")}
    return total_value(case["p"], allocate(**case), **density)


def test_worked_example():
    assert allocate(**EXAMPLE) == [2, 12, 7, 2, 2]
    assert value_of(EXAMPLE) == pytest.approx(0.8743774792974747, abs=1e-12)
    assert best_by_trying_all(**EXAMPLE) == pytest.approx(0.8743774792974747, abs=1e-12)


# Importing torch may switch the processor to flush subnormals, which hypothesis refuses to draw then.
rate = st.floats(0, 1, allow_subnormal=False)
density = st.fixed_dictionaries(
    {"alpha": st.floats(0.5, 10), "beta": st.floats(0.5, 10), "tau": st.floats(1, 12)},
)
case = st.tuples(st.lists(rate, min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 4), density, st.data())


@settings(max_examples=60, deadline=None)
@given(case)
def test_greedy_is_as_good_as_trying_all_and_keeps_total_and_bounds(drawn):
    p, lo, room, density, data = drawn
    total = data.draw(st.integers(len(p) * lo, len(p) * (lo + room)))
    budget = allocate(p, total, lo=lo, hi=lo + room, **density)
    assert sum(budget) == total and all(lo <= b <= lo + room for b in budget)
    best = best_by_trying_all(p, total, lo, lo + room, **density)
    assert total_value(p, budget, **density) == pytest.approx(best, rel=1e-9, abs=1e-300)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.02, 0.98), min_size=2, max_size=12, unique=True), density, st.randoms(use_true_random=False)
)
def test_the_order_of_tasks_does_not_matter_where_none_are_equal(p, density, rng):
    gains = sorted(value(q, b + 1, **density) - value(q, b, **density) for q in p for b in range(2, 16))
    assume(min(np.diff(gains)) > 1e-9 * gains[-1])
    total = 9 * len(p)
    want = dict(zip(p, allocate(p, total, lo=2, hi=16, **density), strict=True))
    rng.shuffle(p)
    assert dict(zip(p, allocate(p, total, lo=2, hi=16, **density), strict=True)) == want


def test_equal_tasks_are_served_in_order():
    density = {"alpha": 4.0, "beta": 7.0, "tau": 10.0}
    assert allocate([0.4] * 4, 10, lo=2, hi=5, **density) == [3, 3, 2, 2]
    # Rollouts on a task that is always or never solved are worth nothing: what must be spent there goes to the first.
    assert allocate([0.0, 1.0, 0.5, 0.0], 16, lo=1, hi=5, **density) == [5, 5, 5, 1]
    assert total_value([0.0, 1.0], [5, 5], **density) == 0


def test_gains_that_only_rounding_parts_are_equal():
    density = {"alpha": 5.5, "beta": 5.5, "tau": 10.0}
    assert value(0.7, 1, **density) != value(0.3, 1, **density)
    for p in ([0.3, 0.7], [0.7, 0.3]):
        assert allocate(p, 7, lo=2, hi=16, **density) == [4, 3]
    mixed = [0.2, 0.8, 0.45, 0.55, 0.8, 0.2]
    steps = [allocate(mixed, total, lo=1, hi=9, **density) for total in range(6, 55)]
    for before, after in itertools.pairwise(steps):
        assert sum(b - a for a, b in zip(before, after, strict=True)) == 1
        assert min(b - a for a, b in zip(before, after, strict=True)) == 0
        for twins in ((0, 1, 4, 5), (2, 3)):
            served = [after[i] for i in twins]
            assert served == sorted(served, reverse=True) and served[0] - served[-1] <= 1


def test_the_density_is_that_of_a_beta_distribution():
    p = torch.tensor([0.05, 0.3, 0.9], dtype=torch.float64)
    want = torch.distributions.Beta(*torch.tensor([4.0, 7.0], dtype=torch.float64)).log_prob(p).exp()
    many = [value(q, 10**6, 4.0, 7.0, 1.0) for q in p.tolist()]
    torch.testing.assert_close(torch.tensor(many, dtype=torch.float64), want, rtol=1e-12, atol=0)
    one = value(0.3, 5, 4.0, 7.0, 10.0)
    assert one == pytest.approx((1 - math.exp(-5 / 10 * 0.21)) * want[1].item(), rel=1e-12)


def test_marginal_gains_are_a_geometric_series():
    values = np.array([value(0.3, b, 4.0, 7.0, 10.0) for b in range(12)])
    gains = np.diff(values)
    np.testing.assert_allclose(gains[1:] / gains[:-1], math.exp(-0.21 / 10), rtol=1e-9)


def test_weak_policies_practise_easy_tasks_and_strong_ones_hard_tasks():
    alphas = [density_parameters([s])[0] for s in np.linspace(0, 1, 41)]
    assert all(one > other for one, other in itertools.pairwise(alphas))
    assert alphas[0] == 10 and alphas[-1] == pytest.approx(1 + 9 / (1 + math.exp(5)))
    assert sum(density_parameters([0.3])) == pytest.approx(11) and sum(density_parameters([0.3], CoBAConfig(7.0))) == 7
    p = [0.1, 0.3, 0.5, 0.7, 0.9]
    for success, favourite in ((0.1, 4), (0.9, 0)):
        alpha, beta = density_parameters([success])
        budget = allocate(p, 40, lo=2, hi=32, alpha=alpha, beta=beta, tau=10.0)
        assert budget[favourite] == max(budget)


def test_the_squashed_failure_rate_is_continuous_and_rises():
    assert squash(0.5) == 0.5 and squash(0.5 + 1e-9) == pytest.approx(0.5, abs=1e-8)
    values = [squash(f) for f in np.linspace(0, 1, 201)]
    assert all(one < other for one, other in itertools.pairwise(values))


def test_only_the_last_steps_count():
    assert density_parameters([1.0, 1.0, 0.2, 0.3, 0.4]) == density_parameters([0.3])
    assert density_parameters([1.0, 0.3], CoBAConfig(window=1)) == density_parameters([0.3])


def test_bad_input_is_refused():
    for total in (9, 61):
        with pytest.raises(WorkbenchError, match="5 tasks of 2 to 12 rollouts take 10 to 60 in all"):
            allocate(**(EXAMPLE | {"total": total}))
    with pytest.raises(WorkbenchError, match="whole rollouts is expected, got 25.5"):
        allocate(**(EXAMPLE | {"total": 25.5}))
    for p in ([0.1, 1.1], [math.nan], [-0.1], []):
        with pytest.raises(WorkbenchError, match="task"):
            allocate(**(EXAMPLE | {"p": p, "total": 2 * len(p)}))
    for wrong in ({"lo": -1}, {"lo": 13}, {"alpha": 0.0}, {"beta": math.inf}, {"tau": math.nan}):
        with pytest.raises(WorkbenchError):
            allocate(**(EXAMPLE | wrong))
    with pytest.raises(WorkbenchError, match="no step"):
        density_parameters([])
    for wrong in ({"alpha_min": 6.0}, {"gamma": 0.0}, {"window": 0}, {"kappa": math.inf}):
        with pytest.raises(WorkbenchError):
            CoBAConfig(**wrong)
