import math

import numpy as np
import pytest
import torch

from workbench.distill import skill_sd
from workbench.distill.skill_sd import MAX_EXPONENT, MAX_LOG_RATIO, SkillSDConfig
from workbench.errors import WorkbenchError


def by_hand(student, teacher, old):
    ahead = student - teacher
    return math.exp(min(student - old, 10)) * (math.exp(min(-ahead, 20)) - 1 + ahead)


@pytest.fixture
def tokens():
    """Log-probs within both bounds, and some well beyond each and beyond both."""
    generator = torch.Generator().manual_seed(0)
    student = -4 * torch.rand(5, 12, generator=generator, dtype=torch.float64)
    teacher, old = (student + torch.randn(5, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    teacher[1, ::2] += 30
    old[2, ::2] -= 15
    teacher[3, ::3] += 30
    old[3, ::3] -= 15
    teacher[4] -= 30
    return student.requires_grad_(), teacher.requires_grad_(), old.requires_grad_()


@pytest.mark.parametrize("config", [SkillSDConfig(), SkillSDConfig(coef=2.0), SkillSDConfig(detach_ratio=True)])
def test_loss_is_the_formula_and_its_gradient_the_autograd_one(tokens, config):
    student, teacher, old = tokens
    got = skill_sd.token_loss(student, teacher, old, config)
    flat = zip(*(x.detach().flatten().tolist() for x in tokens), strict=True)
    np.testing.assert_allclose(
        got.detach().flatten(), [config.coef * by_hand(*x) for x in flat], rtol=1e-10, atol=1e-14
    )
    got.sum().backward()
    coefficient = skill_sd.gradient_coefficient(student, teacher, old, config)
    torch.testing.assert_close(coefficient, student.grad, rtol=1e-9, atol=1e-12)
    assert not coefficient.requires_grad
    assert teacher.grad is None and old.grad is None


def test_the_fixture_reaches_every_branch(tokens):
    student, teacher, old = tokens
    wide, far = teacher - student > MAX_EXPONENT, student - old > MAX_LOG_RATIO
    assert all(bool((a & b).any()) for a in (wide, ~wide) for b in (far, ~far))


def test_inside_the_bounds_the_gradient_is_rho_times_the_log_ratio(tokens):
    student, teacher, old = (x[0].detach() for x in tokens)
    got = skill_sd.gradient_coefficient(student, teacher, old, SkillSDConfig(coef=1.0))
    torch.testing.assert_close(got, (student - old).exp() * (student - teacher), rtol=1e-12, atol=0.0)


def test_a_detached_ratio_has_the_same_loss_and_another_gradient(tokens):
    student, teacher, old = (x[:1].detach() for x in tokens)
    free, held = SkillSDConfig(coef=1.0), SkillSDConfig(coef=1.0, detach_ratio=True)
    assert torch.equal(
        skill_sd.token_loss(student, teacher, old, free), skill_sd.token_loss(student, teacher, old, held)
    )
    ahead = student - teacher
    want = (student - old).exp() * (1 - (-ahead).exp())
    torch.testing.assert_close(skill_sd.gradient_coefficient(student, teacher, old, held), want)
    assert float((want - skill_sd.gradient_coefficient(student, teacher, old, free)).abs().max()) > 0.1


def test_beyond_the_exponents_bound_the_gradient_turns_away_from_the_teacher():
    student, teacher = torch.tensor([-21.0, -19.0], dtype=torch.float64), torch.tensor([-0.5, -0.5]).double()
    beyond, inside = skill_sd.gradient_coefficient(student, teacher, student, SkillSDConfig(coef=1.0)).tolist()
    assert inside == pytest.approx(-18.5)
    assert beyond == pytest.approx(math.exp(20) - 20.5)


def test_the_loss_is_never_negative_and_zero_where_student_and_teacher_agree(tokens):
    student, teacher, old = (x.detach() for x in tokens)
    inside = teacher - student <= MAX_EXPONENT
    assert bool((skill_sd.token_loss(student, teacher, old)[inside] >= 0).all())
    assert bool((skill_sd.token_loss(student, student, old) == 0).all())
    assert bool((skill_sd.gradient_coefficient(student, student, old) == 0).all())


@pytest.mark.parametrize("jump", [300.0, -300.0])
def test_huge_gaps_stay_finite_in_float32(jump):
    student = torch.tensor([-300.0, -0.1], requires_grad=True)
    for teacher, old in ((student.detach() + jump, student.detach()), (student.detach(), student.detach() + jump)):
        loss = skill_sd.token_loss(student, teacher, old)
        gradient = torch.autograd.grad(loss.sum(), student)[0]
        assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(gradient).all())
        torch.testing.assert_close(skill_sd.gradient_coefficient(student, teacher, old), gradient)


def test_float32_agrees_with_float64(tokens):
    for function in (skill_sd.token_loss, skill_sd.gradient_coefficient):
        double = [x.detach().float().double() for x in tokens]
        got = function(*(x.float() for x in double)).double()
        torch.testing.assert_close(got, function(*double), rtol=1e-5, atol=1e-8)


def test_coef_zero_leaves_loss_and_gradient_alone_bit_for_bit(tokens):
    student, teacher, old = tokens
    other = (student * 1.7).square()
    plain = torch.autograd.grad(other.sum(), student, retain_graph=True)[0]
    total = other + skill_sd.token_loss(student, teacher, old, SkillSDConfig(coef=0.0))
    assert torch.equal(total, other)
    assert torch.equal(torch.autograd.grad(total.sum(), student)[0], plain)


@pytest.mark.parametrize("coef", [-1.0, float("inf"), float("nan")])
def test_impossible_settings_are_refused(coef):
    with pytest.raises(WorkbenchError, match="Skill-SD: coef must be finite"):
        SkillSDConfig(coef=coef)


@pytest.mark.parametrize("function", [skill_sd.token_loss, skill_sd.gradient_coefficient])
def test_shapes_that_differ_are_refused(function):
    with pytest.raises(WorkbenchError, match=r"old \(2, 1\) log-probs must have one shape"):
        function(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1))
