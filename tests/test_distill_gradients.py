"""Gradients of the distillation losses, exact over all 343 texts of three tokens from a vocabulary of seven.

The student is a table of logits, one row a context (what was said so far), so every expectation is a sum and no
estimate stands between a loss and its closed form.
"""

from types import SimpleNamespace

import pytest
import torch

from workbench.distill import opd, opsd, sdar, skill_sd
from workbench.distill.opd import OPDConfig
from workbench.distill.opsd import OPSDConfig
from workbench.distill.sdar import SDARConfig
from workbench.distill.skill_sd import SkillSDConfig

V = 7
TEXTS = torch.cartesian_prod(*[torch.arange(V)] * 3)  # (343,3)
# Row of the table in which each token of each text is drawn: the empty context, 7 of one token, 49 of two.
CONTEXTS = torch.stack(
    [torch.zeros(V**3, dtype=torch.long), 1 + TEXTS[:, 0], 1 + V + V * TEXTS[:, 0] + TEXTS[:, 1]], dim=1
)
ROWS = 1 + V + V * V


def pick(logits):
    """(343,3) log-prob of every token of every text."""
    return logits.log_softmax(1)[CONTEXTS, TEXTS]


def chance(logits):
    """(343,1) probability of each text."""
    return pick(logits).sum(1, keepdim=True).exp().detach()


@pytest.fixture(scope="module")
def world():
    generator = torch.Generator().manual_seed(0)
    draw = lambda scale: scale * torch.randn(ROWS, V, generator=generator, dtype=torch.float64)  # noqa: E731
    student = draw(1.0)
    teacher, old = student + draw(0.7), student + draw(0.5)
    visits = torch.zeros(ROWS, dtype=torch.float64)
    visits_old = visits.index_add(0, CONTEXTS.flatten(), chance(old).expand(-1, 3).flatten())
    visits = visits.index_add(0, CONTEXTS.flatten(), chance(student).expand(-1, 3).flatten())
    return SimpleNamespace(student=student, teacher=teacher, old=old, visits=visits, visits_old=visits_old)


def expected(world, token_loss, sampler=None):
    """(57,7) gradient, in the student's logits, of the loss averaged over all texts as the sampler draws them."""
    logits = world.student.clone().requires_grad_()
    weights = chance(world.student if sampler is None else sampler)
    loss = (weights * token_loss(pick(logits), pick(world.teacher))).sum()
    return torch.autograd.grad(loss, logits)[0]


def kl_gradient(world, visits, reverse=True):
    """(57,7) gradient of the per-token KL, averaged over contexts whose visits are held fixed."""
    logits = world.student.clone().requires_grad_()
    s, t = logits.log_softmax(1), world.teacher.log_softmax(1)
    kl = (s.exp() * (s - t)).sum(1) if reverse else (t.exp() * (t - s)).sum(1)
    return torch.autograd.grad((visits * kl).sum(), logits)[0]


def scores(world, coefficients):
    """(57,7) sum over texts and tokens of coefficient * d log-prob / d logits, written out: one-hot less softmax."""
    flat, rows = coefficients.flatten()[:, None], CONTEXTS.flatten()
    score = torch.nn.functional.one_hot(TEXTS.flatten(), V) - world.student.softmax(1)[rows]
    return torch.zeros_like(world.student).index_add(0, rows, flat * score)


def distance(a, b):
    return float((a - b).norm() / b.norm())


def same(a, b, tolerance=1e-10):
    return distance(a, b) < tolerance


def test_the_world_is_what_the_claims_below_assume(world):
    torch.testing.assert_close(chance(world.student).sum(), torch.tensor(1.0).double())
    torch.testing.assert_close(world.visits.sum(), torch.tensor(3.0).double())
    assert float((world.visits - world.visits_old).abs().max()) > 1e-2
    assert float(kl_gradient(world, world.visits).norm()) > 0.1
    gap = pick(world.teacher) - pick(world.student)
    assert float(gap.min()) < -1 and float(gap.max()) > 1


@pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])
def test_sdar_is_minus_the_gate_times_the_score(world, beta):
    config = SDARConfig(coef=0.3, beta=beta)
    weights = torch.rand(V**3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = world.student.clone().requires_grad_()
    (weights * sdar.token_loss(pick(logits), pick(world.teacher), config)).sum().backward()
    gates = torch.sigmoid(beta * (pick(world.teacher) - pick(world.student)))
    assert same(logits.grad, scores(world, -0.3 * weights * gates))


def test_grpo_opsd_is_noise_around_zero_on_policy(world):
    config = SDARConfig(coef=1.0, beta=0.0)
    mean = expected(world, lambda s, t: sdar.token_loss(s, t, config))
    assert float(mean.norm()) < 1e-15
    for text in (0, 100, 342):
        logits = world.student.clone().requires_grad_()
        sdar.token_loss(pick(logits)[text], pick(world.teacher)[text], config).sum().backward()
        assert float(logits.grad.norm()) > 0.1
    assert float(expected(world, lambda s, t: sdar.token_loss(s, t, config), world.old).norm()) > 1e-2
    assert float(expected(world, lambda s, t: sdar.token_loss(s, t, SDARConfig(coef=1.0))).norm()) > 1e-2


def test_sdar_with_a_small_beta_is_a_quarter_beta_of_the_reverse_kl(world):
    down = -kl_gradient(world, world.visits)

    def error(beta):
        ascent = -expected(world, lambda s, t: sdar.token_loss(s, t, SDARConfig(coef=1.0, beta=beta)))
        return distance(ascent / (beta / 4), down)

    errors = [error(beta) for beta in (1.0, 0.1, 0.01)]
    assert errors[1] < 5e-3 and errors[2] < 1e-4
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_sdar_is_reinforce_with_the_gate_as_its_reward(world):
    gate = sdar.gate(pick(world.teacher) - pick(world.student))
    ascent = -expected(world, lambda s, t: sdar.token_loss(s, t, SDARConfig(coef=1.0)))
    assert same(ascent, scores(world, chance(world.student) * gate))
    baseline = torch.zeros(ROWS).double().index_add(0, CONTEXTS.flatten(), (chance(world.student) * gate).flatten())
    centred = gate - (baseline / world.visits)[CONTEXTS]
    assert same(ascent, scores(world, chance(world.student) * centred))


@pytest.mark.parametrize("beta", [1.0, 5.0])
def test_a_gate_that_carries_gradient_would_give_another_gradient(world, beta):
    def leaky(s, t):
        gap = t.detach() - s
        return torch.sigmoid(beta * gap) * gap

    gap = pick(world.teacher) - pick(world.student)
    g = torch.sigmoid(beta * gap)
    want = scores(world, -chance(world.student) * (g + beta * gap * g * (1 - g)))
    assert same(expected(world, leaky), want)
    ours = expected(world, lambda s, t: sdar.token_loss(s, t, SDARConfig(coef=1.0, beta=beta)))
    assert distance(ours, want) > 0.1


def entropies(logits):
    logp = logits.log_softmax(1)
    return -(logp.exp() * logp).sum(1)[CONTEXTS]


@pytest.mark.parametrize("kind", ["entropy", "soft_or"])
def test_entropy_and_soft_or_gates_are_closed_forms_that_carry_no_gradient(world, kind):
    weights = torch.rand(V**3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits = world.student.clone().requires_grad_()
    config = SDARConfig(coef=1.0, beta=2.0, gate=kind)
    (weights * sdar.token_loss(pick(logits), pick(world.teacher), config, entropies(logits))).sum().backward()
    gap, h = pick(world.teacher) - pick(world.student), entropies(world.student)
    inside = h if kind == "entropy" else h + gap - h * gap
    assert same(logits.grad, scores(world, -weights / (1 + (-2 * inside).exp())))


def test_an_entropy_gate_is_a_baseline_and_soft_or_turns_over_above_one_nat(world):
    def mean(kind):
        config, h = SDARConfig(coef=1.0, gate=kind), entropies(world.student)
        return float(expected(world, lambda s, t: sdar.token_loss(s, t, config, h)).norm())

    assert mean("entropy") < 1e-15
    gap = torch.tensor([0.0, 1.0])
    below, above = (sdar.gate(gap, SDARConfig(gate="soft_or"), h * torch.ones(2)).diff() for h in (0.5, 1.5))
    assert float(below) > 0 > float(above)
    assert mean("soft_or") > 1e-4


def test_skill_sd_is_the_reverse_kl_gradient_exactly(world):
    config = SkillSDConfig(coef=1.0)
    old = pick(world.student)
    assert same(expected(world, lambda s, t: skill_sd.token_loss(s, t, old, config)), kl_gradient(world, world.visits))


def test_skill_sd_corrects_tokens_of_an_older_policy_but_not_its_contexts(world):
    config, old = SkillSDConfig(coef=1.0), pick(world.old)
    got = expected(world, lambda s, t: skill_sd.token_loss(s, t, old, config), world.old)
    assert same(got, kl_gradient(world, world.visits_old))
    assert distance(got, kl_gradient(world, world.visits)) > 1e-2


def test_a_ratio_detached_or_dropped_gives_the_other_kl(world):
    reverse, forward = kl_gradient(world, world.visits), kl_gradient(world, world.visits, reverse=False)
    assert distance(forward, reverse) > 0.1
    old, config = pick(world.student), SkillSDConfig(coef=1.0, detach_ratio=True)
    detached = expected(world, lambda s, t: skill_sd.token_loss(s, t, old, config))
    dropped = expected(world, lambda s, t: (t.detach() - s).exp() - 1 - (t.detach() - s))
    for wrong in (detached, dropped):
        assert distance(wrong, reverse) > 0.1
        assert same(wrong, forward)


def test_opd_is_the_reverse_kl_gradient_exactly_and_the_gap_as_a_loss_is_nothing(world):
    reverse = kl_gradient(world, world.visits)
    assert same(expected(world, opd.token_loss), reverse)
    for sign in (1, -1):
        gap_itself = expected(world, lambda s, t, sign=sign: sign * (t.detach() - s))
        assert float(gap_itself.norm()) < 1e-15 < float(reverse.norm())
    assert distance(expected(world, lambda s, t: opd.token_loss(s, t, OPDConfig(clip=0.3))), reverse) > 0.1


def test_opd_has_no_ratio_so_an_older_policys_texts_bias_it(world):
    assert distance(expected(world, opd.token_loss, world.old), kl_gradient(world, world.visits_old)) > 0.1


def test_the_token_form_leaves_out_what_a_token_does_to_later_contexts(world):
    logits = world.student.clone().requires_grad_()
    logp = pick(logits).sum(1)
    kl = (logp.exp() * (logp - pick(world.teacher).sum(1))).sum()
    whole = torch.autograd.grad(kl, logits)[0]
    reward_to_go = (pick(world.student) - pick(world.teacher)).flip(1).cumsum(1).flip(1)
    assert same(whole, scores(world, chance(world.student) * reward_to_go))
    assert distance(expected(world, opd.token_loss), whole) > 1e-2


@pytest.mark.parametrize("beta, reverse", [(1.0, True), (0.0, False)])
def test_opsd_is_the_exact_kl_and_the_teacher_gets_no_gradient(world, beta, reverse):
    logits, teacher = world.student.clone().requires_grad_(), world.teacher.clone().requires_grad_()
    (world.visits * opsd.token_loss(logits, teacher, OPSDConfig(beta=beta))).sum().backward()
    assert same(logits.grad, kl_gradient(world, world.visits, reverse))
    assert teacher.grad is None


def test_opsd_opd_and_skill_sd_agree_in_expectation(world):
    logits, old = world.student.clone().requires_grad_(), pick(world.student)
    (world.visits * opsd.divergence(logits, world.teacher, OPSDConfig(beta=1.0))).sum().backward()
    assert same(expected(world, opd.token_loss), logits.grad)
    config = SkillSDConfig(coef=1.0)
    assert same(expected(world, lambda s, t: skill_sd.token_loss(s, t, old, config)), logits.grad)
