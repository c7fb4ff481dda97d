import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.budget.v05 import V05Config, advantage, expected_drop, fuse, prior_from_rate, wants_more
from workbench.errors import WorkbenchError


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def of(prior, rewards):
    rewards = f64(*rewards)
    return fuse(f64(prior), rewards.mean()[None], torch.tensor([len(rewards)]))


@pytest.mark.parametrize(
    ("prior", "rewards", "weight", "baseline"),
    [(0.2, [1, 1, -1, 1], 0.0, 0.2), (-0.8, [1, 1, 1, 1], 0.9228, 0.8611), (0.0, [1] * 16, 0.9375, 0.9375)],
)
def test_worked_examples(prior, rewards, weight, baseline):
    fused = of(prior, rewards)
    assert fused.weight.item() == pytest.approx(weight, abs=5e-5)
    assert fused.baseline.item() == pytest.approx(baseline, abs=5e-5)


# Importing torch may switch the processor to flush subnormals, which hypothesis refuses to draw then.
unit = st.floats(-1, 1, allow_subnormal=False)


@settings(max_examples=100, deadline=None)
@given(unit, st.lists(st.sampled_from([-1.0, 1.0]), min_size=1, max_size=20))
def test_the_baseline_leaves_the_prior_only_where_the_rewards_contradict_it(prior, rewards):
    fused, k = of(prior, rewards), len(rewards)
    mean = sum(rewards) / k
    if abs(abs(mean - prior) - 1 / math.sqrt(k)) > 1e-9:
        assert (fused.weight.item() == 0) == (abs(mean - prior) < 1 / math.sqrt(k))
    low, high = sorted((mean, prior))
    assert low - 1e-12 <= fused.baseline.item() <= high + 1e-12
    # The plug-in error w^2/k + (1-w)^2 bias2, and w is where it is least.
    w, bias2 = fused.weight.item(), fused.bias2.item()
    error = {v: v * v / k + (1 - v) ** 2 * bias2 for v in (w, min(w + 1e-3, 1), max(w - 1e-3, 0), 0, 1)}
    assert fused.error.item() == pytest.approx(error[w], abs=1e-12) and min(error.values()) >= error[w] - 1e-12


def expectations(mu, prior, k):
    """Squared errors of the plain mean and of the fused baseline, and the bias of the latter, over all outcomes."""
    wins = torch.arange(k + 1, dtype=torch.float64)
    p = (1 + mu) / 2
    chance = torch.distributions.Binomial(k, f64(p)).log_prob(wins).exp()
    mean = 2 * wins / k - 1
    fused = fuse(torch.full_like(mean, prior), mean, torch.full_like(mean, k)).baseline
    errors = [(chance * (x - mu) ** 2).sum().item() for x in (mean, fused)]
    return *errors, (chance * (fused - mu)).sum().item()


# What a simulation of the formulas gave; the expectations here are exact, so they agree to its noise.
@pytest.mark.parametrize(
    ("mu", "prior", "k", "plain", "fused"),
    [
        (0, 0, 4, 0.2495, 0.0700),
        (0, 0.3, 4, 0.2505, 0.1319),
        (0, 0.5, 4, 0.250, 0.231),
        (0, 1, 4, 0.2502, 0.4116),
        (0.5, -0.5, 4, 0.1869, 0.3231),
        (0, 0.5, 16, 0.0626, 0.0939),
    ],
)
def test_expected_errors(mu, prior, k, plain, fused):
    got = expectations(mu, prior, k)
    assert got[0] == pytest.approx(plain, abs=2e-3) and got[1] == pytest.approx(fused, abs=4e-3)


def test_the_estimated_weight_is_not_always_better_than_the_mean():
    near, far = expectations(0, 0.5, 4), expectations(0, 1, 4)
    assert near[1] < near[0] and far[1] > 1.5 * far[0]


@pytest.mark.parametrize(("prior", "bias"), [(1.0, 0.27), (0.5, 0.23)])
def test_the_bias_stays_below_one_deviation(prior, bias):
    assert expectations(0, prior, 4)[2] == pytest.approx(bias, abs=6e-3)
    assert abs(expectations(0, prior, 4)[2]) < 1 / math.sqrt(4)


@settings(max_examples=40, deadline=None)
@given(unit, unit, st.integers(1, 16))
def test_with_the_true_bias_the_fusion_beats_both_parts(mu, prior, k):
    """The oracle's weight bias2 / (bias2 + variance/k), over all outcomes; only the plug-in weight can lose."""
    wins = torch.arange(k + 1, dtype=torch.float64)
    chance = torch.distributions.Binomial(k, f64(min(max((1 + mu) / 2, 1e-9), 1 - 1e-9))).log_prob(wins).exp()
    mean, variance, bias2 = 2 * wins / k - 1, (1 - mu**2) / k, (prior - mu) ** 2
    weight = bias2 / (bias2 + variance) if bias2 + variance else 0.5
    error = (chance * (weight * mean + (1 - weight) * prior - mu) ** 2).sum().item()
    assert error <= min(variance, bias2) + 1e-7


STOPS = {0.0: 4, 0.01: 4, 0.05: 4, 0.1: 6, 0.25: 12, 0.5: 14, 1: 15, 4: 16, math.inf: 16}


@pytest.mark.parametrize(("bias2", "stop"), STOPS.items())
def test_where_the_look_ahead_stops(bias2, stop):
    config, k = V05Config(cost=1 / 256, most=100), 1
    while bool(wants_more(f64(bias2), torch.tensor([k]), config)):
        k += 1
    assert k == stop


def test_the_cost_and_the_most_rollouts_are_one_knob():
    wrong = f64(math.inf)
    drops = [expected_drop(wrong, torch.tensor([k])).item() for k in (15, 16)]
    assert drops == pytest.approx([0.004167, 0.003676], abs=5e-7) and drops[0] > V05Config().cost > drops[1]


def test_first_and_most_bound_the_rollouts():
    config = V05Config(first=6, most=8, cost=0.0)
    assert wants_more(f64(0.0, 0.0), torch.tensor([5, 6]), config).tolist() == [True, False]
    assert wants_more(f64(4.0, 4.0), torch.tensor([7, 8]), config).tolist() == [True, False]


def test_the_drop_is_the_difference_of_errors():
    bias2, k = f64(0.02, 0.3, 2.0), torch.tensor([4, 7, 15])
    want = bias2 / (k * bias2 + 1) - bias2 / ((k + 1) * bias2 + 1)
    torch.testing.assert_close(expected_drop(bias2, k), want, rtol=1e-10, atol=0)


def test_advantages_of_ragged_groups_in_any_order():
    rewards, groups = f64(1, 1, 1, -1, 1, 1, 1), torch.tensor([7, 3, 7, 3, 3, 7, 7])
    prior = torch.where(groups == 7, -0.8, 0.2).double()
    got, fused = advantage(rewards, groups, prior)
    assert fused.baseline.tolist() == pytest.approx([0.2, 0.8611], abs=5e-5)
    torch.testing.assert_close(got, rewards - torch.where(groups == 7, fused.baseline[1], fused.baseline[0]))
    order = torch.tensor([4, 0, 6, 3, 1, 5, 2])
    torch.testing.assert_close(advantage(rewards[order], groups[order], prior[order])[0], got[order])
    torch.testing.assert_close(advantage(rewards.long(), groups, prior)[0], got)


def test_a_rate_becomes_a_prior_on_the_scale_of_rewards():
    assert prior_from_rate(f64(0, 0.5, 1)).tolist() == [-1, 0, 1]


def test_bad_input_is_refused():
    one = torch.tensor([1])
    for prior, mean in ((1.2, 0), (0, -1.5), (math.nan, 0)):
        with pytest.raises(WorkbenchError, match=r"must lie in \[-1, 1\]"):
            fuse(f64(prior), f64(mean), one)
    for rate in (-0.1, 1.5, math.nan):
        with pytest.raises(WorkbenchError, match=r"a success rate must lie in \[0, 1\]"):
            prior_from_rate(f64(0.5, rate))
    with pytest.raises(WorkbenchError, match="at least one rollout"):
        fuse(f64(0), f64(0), one - 1)
    with pytest.raises(WorkbenchError, match="a reward must lie"):
        advantage(f64(10, -1), one.repeat(2), f64(0, 0))
    with pytest.raises(WorkbenchError, match="one prior"):
        advantage(f64(1, -1), one.repeat(2), f64(0, 0.1))
    with pytest.raises(WorkbenchError, match=r"\(N,\) all"):
        advantage(f64(1, -1), one, f64(0, 0))
    for wrong in ({"first": 0}, {"first": 5, "most": 4}, {"cost": -1.0}, {"cost": math.nan}):
        with pytest.raises(WorkbenchError):
            V05Config(**wrong)
