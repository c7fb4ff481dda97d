import math

import numpy as np
import pytest
import torch
from make_batch import by_token, make_batch, make_episodes, make_gaps

from workbench.credit import grpo, rlsd
from workbench.credit.rlsd import RLSDConfig, mixing
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
    credit = rlsd.credit(batch, RLSDConfig(lam=0.3, clip=0.4))
    got = by_token(batch, credit.advantages)
    assert got
    for (e, k), gap in gaps.items():
        sign = (base[e] > 0) - (base[e] < 0)
        weights = [min(max(math.exp(sign * g), 0.6), 1.4) for g in gap]
        want = [base[e] * (0.7 + 0.3 * w) for w in weights]
        np.testing.assert_allclose([got[e, k, i] for i in range(len(gap))], want, atol=1e-12)
        assert credit.turns["weight"][e, k].item() == pytest.approx(np.mean(weights), abs=1e-12)
        assert credit.turns["turn_advantage"][e, k].item() == pytest.approx(np.mean(want), abs=1e-12)


def test_a_teacher_that_agrees_makes_successes_stronger_and_failures_weaker():
    gap = torch.tensor([[0.1, -0.1]]).double().expand(3, 2)
    advantage = torch.tensor([[1.0], [-1.0], [0.0]]).double().expand(3, 2)
    weights = rlsd.reweighting(gap, advantage, 0.2)
    want = [[math.exp(0.1), math.exp(-0.1)], [math.exp(-0.1), math.exp(0.1)], [1.0, 1.0]]
    np.testing.assert_allclose(weights.numpy(), want, atol=1e-12)


def test_advantages_keep_their_sign_and_their_band(batch):
    base = grpo.credit(batch).advantages
    got = rlsd.credit(batch, RLSDConfig(lam=0.5, clip=0.2)).advantages
    assert torch.equal(got.sign(), base.sign())
    assert bool(((got - base).abs() <= 0.1 * base.abs() + 1e-12).all())
    assert (got - base).abs().max() > 0.05


def test_mixing_falls_in_the_released_form_alone():
    released = RLSDConfig(form="released")
    assert [mixing(step, released) for step in (0, 49, 99, 1000)] == [0.495, 0.25, 0.0, 0.0]
    assert {mixing(step) for step in (0, 50, 1000)} == {0.5}
    assert mixing(2, RLSDConfig(form="released", lam=0.8, decay_steps=4)) == pytest.approx(0.2)


def test_the_released_form_falls_from_its_first_update_and_ends_as_grpo(batch):
    released = RLSDConfig(form="released")
    first = rlsd.credit(batch, RLSDConfig(lam=0.495)).advantages
    torch.testing.assert_close(rlsd.credit(batch, released).advantages, first)
    assert torch.equal(rlsd.credit(batch, released, step=99).advantages, grpo.credit(batch).advantages)
    half = rlsd.credit(batch, released, step=49).advantages
    torch.testing.assert_close(half, rlsd.credit(batch, RLSDConfig(lam=0.25)).advantages)


def test_a_weight_carries_no_gradient():
    gap, advantage = torch.tensor([0.1], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    assert not rlsd.reweighting(gap, advantage, 0.2).requires_grad


@pytest.mark.parametrize("wrong", [{"form": "papers"}, {"lam": 1.1}, {"clip": -0.1}, {"decay_steps": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError, match="RLSD"):
        RLSDConfig(**wrong)


def test_bad_input_is_refused_in_one_line(batch, episodes):
    with pytest.raises(WorkbenchError, match="RLSD: the batch has no teacher_logprobs"):
        rlsd.credit(make_batch(episodes))
    with pytest.raises(WorkbenchError, match="at least 0, got -1"):
        rlsd.credit(batch, step=-1)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 1), ()])
def test_an_advantage_of_another_shape_is_refused_in_one_line(shape):
    with pytest.raises(WorkbenchError, match="RLSD: gap .* must be of one shape") as error:
        rlsd.reweighting(torch.zeros(2, 3), torch.zeros(shape), 0.2)
    assert "\n" not in str(error.value)
