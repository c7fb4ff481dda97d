import math

import numpy as np
import pytest
import torch
from make_batch import by_token, make_batch, make_episodes, make_gaps

from workbench.credit import grpo, step_opsd
from workbench.credit.step_opsd import StepOPSDConfig
from workbench.errors import WorkbenchError


@pytest.fixture
def episodes():
    return make_episodes()


@pytest.fixture
def batch(episodes):
    return make_batch(episodes, make_gaps(episodes))


def test_credit_is_the_formula_by_hand(batch, episodes):
    gaps = make_gaps(episodes)
    base = grpo.turn_advantages(batch, grpo.GRPOConfig())[:, 0].tolist()
    credit = step_opsd.credit(batch, StepOPSDConfig(alpha=0.4, lam=0.3))
    got = by_token(batch, credit.advantages)
    for (e, k), gap in gaps.items():
        sign = (base[e] > 0) - (base[e] < 0)
        weights = np.array([min(max(math.exp(sign * g), 0.6), 1.4) for g in gap])
        want = base[e] * (0.7 + 0.3 * weights / weights.mean())
        np.testing.assert_allclose([got[e, k, i] for i in range(len(gap))], want, atol=1e-12)
        assert credit.turns["weight"][e, k].item() == pytest.approx(weights.mean(), abs=1e-12)


@pytest.mark.parametrize("layout", ["episode", "turn"])
@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_every_step_spends_the_budget_of_its_trajectory(layout, alpha, episodes):
    batch = make_batch(episodes, make_gaps(episodes, spread=3.0), layout)
    credit = step_opsd.credit(batch, StepOPSDConfig(alpha=alpha, lam=1.0))
    spent = batch.turn_mean(credit.advantages)
    budget = grpo.turn_advantages(batch, grpo.GRPOConfig())
    torch.testing.assert_close(spent, budget, rtol=1e-12, atol=1e-12)
    assert torch.equal(credit.turns["turn_advantage"], budget)
    assert torch.equal(credit.advantages.sign(), batch.to_tokens(budget).sign())
    assert not torch.allclose(credit.advantages, batch.to_tokens(budget))


def test_a_turn_of_one_token_and_weights_of_no_width_are_grpo(batch):
    want = grpo.credit(batch).advantages
    assert torch.equal(step_opsd.credit(batch, StepOPSDConfig(alpha=0.0)).advantages, want)
    assert torch.equal(step_opsd.credit(batch).advantages[2], want[2])


@pytest.mark.parametrize("wrong", [{"alpha": 1.0}, {"alpha": -0.1}, {"lam": 2.0}, {"lam": math.nan}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError, match="StepOPSD"):
        StepOPSDConfig(**wrong)


def test_without_a_teacher_there_is_no_credit(episodes):
    with pytest.raises(WorkbenchError, match="StepOPSD: the batch has no teacher_logprobs"):
        step_opsd.credit(make_batch(episodes))
