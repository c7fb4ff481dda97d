import pytest
import torch

from workbench.distill import opd, skill_sd
from workbench.distill.opd import OPDConfig
from workbench.errors import WorkbenchError


@pytest.fixture
def logprobs():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (-3 * torch.rand(4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher.requires_grad_()


@pytest.mark.parametrize("config", [OPDConfig(), OPDConfig(coef=0.3), OPDConfig(clip=0.5)])
def test_gradient_is_minus_coef_times_gap_and_reaches_the_student_only(logprobs, config):
    student, teacher = logprobs
    opd.token_loss(student, teacher, config).sum().backward()
    gap = (teacher - student).detach()
    want = -config.coef * (gap.clamp(-config.clip, config.clip) if config.clip else gap)
    torch.testing.assert_close(student.grad, want)
    torch.testing.assert_close(opd.gradient_coefficient(student, teacher, config), want)
    assert not opd.gradient_coefficient(student, teacher, config).requires_grad
    assert teacher.grad is None
    preferred = gap > 0
    assert bool((student.grad[preferred] < 0).all()) and bool((student.grad[~preferred] > 0).all())


def test_the_loss_is_the_formula(logprobs):
    student, teacher = (x.detach() for x in logprobs)
    torch.testing.assert_close(
        opd.token_loss(student, teacher, OPDConfig(coef=0.2)), -0.2 * (teacher - student) * student
    )


def test_clip_bounds_wide_gaps_of_either_sign_and_leaves_the_rest(logprobs):
    student, teacher = logprobs
    free, bounded = (opd.gradient_coefficient(student, teacher, OPDConfig(clip=clip)) for clip in (0.0, 1.0))
    wide = free.abs() > 1
    assert bool((free[wide] > 0).any()) and bool((free[wide] < 0).any()) and bool((~wide).any())
    assert torch.equal(bounded[wide], free[wide].sign()) and torch.equal(bounded[~wide], free[~wide])


def test_on_policy_every_token_has_the_gradient_of_skill_sd(logprobs):
    student, teacher = logprobs
    config = skill_sd.SkillSDConfig(coef=1.0)
    torch.testing.assert_close(
        opd.gradient_coefficient(student, teacher), skill_sd.gradient_coefficient(student, teacher, student, config)
    )


def test_coef_zero_leaves_loss_and_gradient_alone_bit_for_bit(logprobs):
    student, teacher = logprobs
    other = (student * 1.7).square()
    plain = torch.autograd.grad(other.sum(), student, retain_graph=True)[0]
    total = other + opd.token_loss(student, teacher, OPDConfig(coef=0.0))
    assert torch.equal(total, other)
    assert torch.equal(torch.autograd.grad(total.sum(), student)[0], plain)


def test_float32_agrees_with_float64(logprobs):
    student, teacher = (x.detach() for x in logprobs)
    single = opd.gradient_coefficient(student.float(), teacher.float())
    torch.testing.assert_close(single.double(), opd.gradient_coefficient(student, teacher), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"coef": -1.0}, {"clip": -0.1}, {"coef": float("inf")}, {"clip": float("nan")}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError, match=f"OPD: {next(iter(wrong))} must be finite"):
        OPDConfig(**wrong)


def test_shapes_that_differ_are_refused():
    with pytest.raises(WorkbenchError, match=r"student \(2, 3\) and teacher \(2, 1\)"):
        opd.token_loss(torch.zeros(2, 3), torch.zeros(2, 1))
