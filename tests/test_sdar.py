import pytest
import torch

from workbench.distill import sdar
from workbench.distill.sdar import SDARConfig
from workbench.errors import WorkbenchError


@pytest.fixture
def logprobs():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (-3 * torch.rand(4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher.requires_grad_()


@pytest.mark.parametrize("config", [SDARConfig(), SDARConfig(coef=0.3, beta=1.0), SDARConfig(beta=0.0)])
def test_gradient_is_minus_coef_times_gate_and_reaches_the_student_only(logprobs, config):
    student, teacher = logprobs
    sdar.token_loss(student, teacher, config).sum().backward()
    want = -config.coef * torch.sigmoid(config.beta * (teacher - student)).detach()
    torch.testing.assert_close(student.grad, want)
    torch.testing.assert_close(sdar.gradient_coefficient(student, teacher, config), want)
    assert teacher.grad is None
    assert bool((student.grad < 0).all()), "descent must raise the log-prob of every sampled token"


def test_a_gate_that_is_not_detached_has_another_gradient(logprobs):
    student, teacher = logprobs
    gap = teacher.detach() - student
    (torch.sigmoid(5 * gap) * gap).sum().backward()
    g = torch.sigmoid(5 * gap).detach()
    torch.testing.assert_close(student.grad, -(g + 5 * gap.detach() * g * (1 - g)))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(student.grad, sdar.gradient_coefficient(student, teacher, SDARConfig(coef=1.0)))


def expected_gradient(logits, teacher, config):
    """Gradient of the loss in the logits, exact over all tokens of the vocabulary under the student itself."""
    logits = logits.clone().requires_grad_()
    student = logits.log_softmax(-1)
    loss = (student.exp().detach() * sdar.token_loss(student, teacher, config)).sum()
    return torch.autograd.grad(loss, logits)[0]


@pytest.fixture
def vocabulary():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(11, generator=generator, dtype=torch.float64)
    teacher = (logits + 0.3 * torch.randn(11, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return logits, teacher


def test_with_beta_zero_the_expected_gradient_is_zero(vocabulary):
    logits, teacher = vocabulary
    half = expected_gradient(logits, teacher, SDARConfig(coef=1.0, beta=0.0))
    assert float(half.norm()) < 1e-15
    assert float(expected_gradient(logits, teacher, SDARConfig(coef=1.0)).norm()) > 1e-2


def test_for_small_beta_the_expected_ascent_is_a_quarter_beta_of_the_reverse_kl(vocabulary):
    logits, teacher = vocabulary
    beta = 1e-3
    ascent = -expected_gradient(logits, teacher, SDARConfig(coef=1.0, beta=beta))
    leaf = logits.clone().requires_grad_()
    student = leaf.log_softmax(-1)
    kl = (student.exp() * (student - teacher)).sum()
    down = -torch.autograd.grad(kl, leaf)[0]
    torch.testing.assert_close(ascent / (beta / 4), down, rtol=5e-4, atol=1e-6)


def test_gates(logprobs):
    student, teacher = logprobs
    gap, entropy = teacher - student, torch.rand(4, 9, dtype=torch.float64)
    assert not sdar.gate(gap).requires_grad
    torch.testing.assert_close(sdar.gate(gap), torch.sigmoid(5 * gap.detach()))
    by_entropy = sdar.gate(gap, SDARConfig(gate="entropy"), entropy)
    torch.testing.assert_close(by_entropy, torch.sigmoid(5 * entropy))
    both = sdar.gate(gap, SDARConfig(gate="soft_or"), entropy)
    torch.testing.assert_close(both, torch.sigmoid(5 * (1 - (1 - entropy) * (1 - gap.detach()))))
    for gate in ("entropy", "soft_or"):
        with pytest.raises(WorkbenchError, match="needs the student's entropy"):
            sdar.token_loss(student, teacher, SDARConfig(gate=gate))


def test_a_very_wide_gap_stays_finite():
    student = torch.tensor([-90.0, -0.1], requires_grad=True)
    loss = sdar.token_loss(student, torch.tensor([-0.1, -90.0]))
    loss.sum().backward()
    assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(student.grad).all())


def test_coef_zero_leaves_loss_and_gradient_alone_bit_for_bit(logprobs):
    student, teacher = logprobs
    other = (student * 1.7).square()
    plain = torch.autograd.grad(other.sum(), student, retain_graph=True)[0]
    total = other + sdar.token_loss(student, teacher, SDARConfig(coef=0.0))
    assert torch.equal(total, other)
    assert torch.equal(torch.autograd.grad(total.sum(), student)[0], plain)


@pytest.mark.parametrize("wrong", [{"gate": "gaps"}, {"coef": -1.0}, {"beta": float("inf")}, {"beta": float("nan")}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError):
        SDARConfig(**wrong)


@pytest.mark.parametrize("shape", [(9,), (1, 9), (4, 1), (9, 4)])
def test_shapes_that_do_not_fit_are_refused_in_one_line(logprobs, shape):
    student, teacher = logprobs
    other = torch.full(shape, -1.0, dtype=torch.float64)
    for rule in (sdar.token_loss, sdar.gradient_coefficient):
        for pair in ((student, other), (other, teacher)):
            with pytest.raises(WorkbenchError, match="must be of one shape") as error:
                rule(*pair)
            assert "\n" not in str(error.value)
        with pytest.raises(WorkbenchError, match="entropy .* must be of one shape"):
            rule(student, teacher, SDARConfig(gate="entropy"), other)
