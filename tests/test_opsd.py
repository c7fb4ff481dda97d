import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.distill import opsd
from workbench.distill.opsd import OPSDConfig
from workbench.errors import WorkbenchError

BETAS = [0.0, 0.001, 0.1, 0.5, 0.9, 1.0]


def by_hand(student_logits, teacher_logits, beta):
    """(N,V) entries from probabilities, as the definition reads."""
    s, t = student_logits.softmax(-1), teacher_logits.softmax(-1)
    if beta == 0:
        return t * (t / s).log()
    if beta == 1:
        return s * (s / t).log()
    m = (1 - beta) * s + beta * t
    return beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(6, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher.requires_grad_()


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_and_its_gradient_are_those_of_the_definition_and_reach_the_student_only(logits, beta):
    student, teacher = logits
    weights = torch.linspace(0.5, 2, 6, dtype=torch.float64)
    want = by_hand(student, teacher, beta).sum(1)
    gradient = torch.autograd.grad((weights * want).sum(), student)[0]
    got = opsd.divergence(student, teacher, OPSDConfig(beta=beta))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-14)
    (weights * got).sum().backward()
    torch.testing.assert_close(student.grad, gradient, rtol=1e-8, atol=1e-14)
    assert float(student.grad.abs().max()) > 0
    assert teacher.grad is None


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_two_ends_are_the_kls_of_torch(logits, beta):
    s, t = (x.detach().log_softmax(1) for x in logits)
    p, q = (t, s) if beta == 0 else (s, t)
    want = F.kl_div(q, p, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(opsd.divergence(*logits, OPSDConfig(beta=beta)).detach(), want)


def test_the_ends_are_closed_forms_in_the_students_logits(logits):
    student, teacher = logits
    s, t = student.detach().softmax(1), teacher.detach().softmax(1)
    forward = torch.autograd.grad(opsd.divergence(student, teacher, OPSDConfig(beta=0.0)).sum(), student)[0]
    torch.testing.assert_close(forward, s - t)
    kl = (s * (s / t).log()).sum(1, keepdim=True)
    reverse = torch.autograd.grad(opsd.divergence(student, teacher, OPSDConfig(beta=1.0)).sum(), student)[0]
    torch.testing.assert_close(reverse, s * ((s / t).log() - kl))


def test_small_beta_is_beta_times_the_forward_kl_so_zero_is_not_its_limit(logits):
    student = logits[0].detach()
    teacher = student + 0.1 * logits[1].detach()
    small = opsd.divergence(student, teacher, OPSDConfig(beta=0.001))
    forward = opsd.divergence(student, teacher, OPSDConfig(beta=0.0))
    torch.testing.assert_close(small / 0.001, forward, rtol=3e-3, atol=0.0)


# Importing torch may switch the processor to flush subnormals, which hypothesis refuses to draw then.
numbers = st.lists(st.floats(-30, 30, allow_subnormal=False), min_size=10, max_size=10)
betas = st.sampled_from([0.0, 1.0]) | st.floats(0.001, 0.999)


@settings(deadline=None, max_examples=60)
@given(student=numbers, teacher=numbers, beta=betas, shift=st.integers(-50, 50))
def test_properties_of_a_divergence(student, teacher, beta, shift):
    s, t = (torch.tensor(x, dtype=torch.float64).view(2, 5).requires_grad_() for x in (student, teacher))
    config = OPSDConfig(beta=beta)
    d = opsd.divergence(s, t, config)
    gradient = torch.autograd.grad(d.sum(), s)[0]
    assert bool(torch.isfinite(d).all()) and bool(torch.isfinite(gradient).all())
    assert bool((d >= -1e-13).all())
    assert float(gradient.sum(1).abs().max()) < 1e-10, "a shift of all logits changes nothing"
    d, s, t = d.detach(), s.detach(), t.detach()
    torch.testing.assert_close(opsd.divergence(s + shift, t - shift, config), d, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(opsd.divergence(s.flip(1), t.flip(1), config), d, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(opsd.divergence(s.flip(0), t.flip(0), config), d.flip(0), rtol=0.0, atol=0.0)
    mirrored = opsd.divergence(t, s, OPSDConfig(beta=1 - beta))
    torch.testing.assert_close(mirrored, d, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_distributions_give_exactly_zero(beta, dtype):
    logits = 5 * torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 7], logits[:, 8] = -1e30, -float("inf")
    logits = logits.to(dtype).requires_grad_()
    d = opsd.divergence(logits, logits.detach().clone(), OPSDConfig(beta=beta))
    assert bool((d == 0).all())
    assert float(torch.autograd.grad(d.sum(), logits)[0].abs().max()) < 1e-6


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("low", [-1e30, -1e38, -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_without_probability_stay_finite(beta, low, dtype):
    student = torch.tensor([[low, 1.0, 0.0, low], [1.0, low, 0.5, 0.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[low, 0.0, 1.0, 0.5], [low, low, 0.0, 1.0]], dtype=dtype)
    d = opsd.divergence(student, teacher, OPSDConfig(beta=beta))
    gradient = torch.autograd.grad(d.sum(), student)[0]
    assert bool(torch.isfinite(d).all()) and bool(torch.isfinite(gradient).all())
    assert bool((d >= 0).all())
    if 0 < beta < 1:
        assert d.max().item() < 1, "a mixture covers both sides, so its divergence is bounded by log 2"
    else:
        assert d[1 if beta == 1 else 0].item() > 1e28, "one side lacks a token that the other needs"
    assert bool((gradient[student <= -1e29] == 0).all()) or beta == 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_tokens_that_neither_side_gives_probability_are_as_absent(logits, beta):
    student, teacher = (x.detach() for x in logits)
    config = OPSDConfig(beta=beta)
    wide_student, wide_teacher = (F.pad(x, (0, 3), value=-1e30).requires_grad_() for x in (student, teacher))
    narrow = student.clone().requires_grad_()
    d, want = opsd.divergence(wide_student, wide_teacher, config), opsd.divergence(narrow, teacher, config)
    torch.testing.assert_close(d, want)
    got = torch.autograd.grad(d.sum(), wide_student)[0]
    torch.testing.assert_close(got[:, :9], torch.autograd.grad(want.sum(), narrow)[0])
    assert bool((got[:, 9:] == 0).all())


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_top_k_renormalises_both_sides_over_the_teachers_likeliest_tokens(logits, beta):
    student, teacher = logits
    kept = teacher.detach().argsort(1, descending=True)[:, :3]
    cut = student.detach().gather(1, kept).requires_grad_()
    want = opsd.divergence(cut, teacher.gather(1, kept), OPSDConfig(beta=beta))
    got = opsd.divergence(student, teacher, OPSDConfig(beta=beta, top_k=3))
    torch.testing.assert_close(got, want)
    gradient = torch.autograd.grad(got.sum(), student)[0]
    torch.testing.assert_close(gradient.gather(1, kept), torch.autograd.grad(want.sum(), cut)[0])
    assert int((gradient != 0).sum()) == 6 * 3
    blind = student.detach().clone()
    blind.scatter_add_(
        1, kept.new_tensor([[teacher[i].argmin() for i in range(6)]]).T, torch.full((6, 1), 40.0).double()
    )
    torch.testing.assert_close(opsd.divergence(blind, teacher, OPSDConfig(beta=beta, top_k=3)), got.detach())
    whole = opsd.divergence(student, teacher, OPSDConfig(beta=beta, top_k=9))
    torch.testing.assert_close(whole, opsd.divergence(student, teacher, OPSDConfig(beta=beta)))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_clip_caps_each_entry_before_the_sum_or_each_position_after_it(logits, beta):
    student, teacher = logits
    entries = by_hand(student, teacher, beta)
    free = torch.autograd.grad(entries.sum(), student, retain_graph=True)[0]
    by_entry = opsd.divergence(student, teacher, OPSDConfig(beta=beta, clip=0.05))
    torch.testing.assert_close(by_entry, entries.clamp(max=0.05).sum(1))
    want = torch.autograd.grad(entries.clamp(max=0.05).sum(), student, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(by_entry.sum(), student)[0], want)
    cap = entries.sum(1).median().item()
    by_position = opsd.divergence(student, teacher, OPSDConfig(beta=beta, clip=cap, clip_per="position"))
    torch.testing.assert_close(by_position, entries.sum(1).clamp(max=cap))
    held = entries.sum(1) > cap + 1e-12
    gradient = torch.autograd.grad(by_position.sum(), student)[0]
    assert bool(held.any()) and bool((gradient[held] == 0).all())
    below = entries.sum(1) < cap - 1e-12
    torch.testing.assert_close(gradient[below], free[below])


def test_a_clip_of_entries_can_make_the_sum_negative_and_a_clip_of_positions_cannot(logits):
    negative = opsd.divergence(*logits, OPSDConfig(clip=0.05))
    assert bool((negative < 0).any())
    assert bool((opsd.divergence(*logits, OPSDConfig(clip=0.05, clip_per="position")) >= 0).all())


def test_half_precision_is_computed_in_float32_and_float32_agrees_with_float64(logits):
    for beta in BETAS[2:]:
        config = OPSDConfig(beta=beta)
        single = [x.detach().float() for x in logits]
        got, want = opsd.divergence(*single, config), opsd.divergence(*(x.double() for x in single), config)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
        half = [x.detach().to(torch.bfloat16) for x in logits]
        assert opsd.divergence(*half, config).dtype == torch.float32
        torch.testing.assert_close(
            opsd.divergence(*half, config), opsd.divergence(*(x.float() for x in half), config), rtol=1e-6, atol=1e-7
        )


def test_token_loss_is_coef_times_the_divergence_and_coef_zero_changes_nothing(logits):
    student, teacher = logits
    loss = opsd.token_loss(student, teacher, OPSDConfig(coef=0.3, beta=0.5))
    torch.testing.assert_close(loss, 0.3 * opsd.divergence(student, teacher, OPSDConfig(beta=0.5)))
    other = (student * 1.7).square().sum(1)
    plain = torch.autograd.grad(other.sum(), student, retain_graph=True)[0]
    total = other + opsd.token_loss(student, teacher, OPSDConfig(coef=0.0))
    assert torch.equal(total, other)
    assert torch.equal(torch.autograd.grad(total.sum(), student)[0], plain)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"beta": -0.1}, "beta must be 0, 1 or in"),
        ({"beta": 1e-9}, "beta must be 0, 1 or in"),
        ({"beta": float("nan")}, "beta must be 0, 1 or in"),
        ({"coef": -1.0}, "coef must be finite"),
        ({"clip": float("inf")}, "clip must be finite"),
        ({"clip_per": "tokens"}, "known: entry, position"),
        ({"teacher": "frosen"}, "did you mean 'frozen'"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_k": 1}, "top_k must be 0"),
        ({"top_k": 2.5}, "top_k must be 0"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(WorkbenchError, match=message):
        OPSDConfig(**wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_are_refused_with_their_position(bad):
    logits = torch.zeros(3, 4)
    broken = logits.clone()
    broken[2, 1] = bad
    with pytest.raises(WorkbenchError, match="student logits of position 2"):
        opsd.divergence(broken, logits)
    with pytest.raises(WorkbenchError, match="teacher logits of position 2"):
        opsd.divergence(logits, broken)


def test_shapes_that_do_not_fit_and_a_row_without_any_token_are_refused():
    with pytest.raises(WorkbenchError, match=r"\(3, 4\) and \(3, 5\)"):
        opsd.divergence(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(WorkbenchError, match=r"must be \(N,V\)"):
        opsd.divergence(torch.zeros(4), torch.zeros(4))
    with pytest.raises(WorkbenchError, match="top_k = 5 of a vocabulary of 4"):
        opsd.divergence(torch.zeros(3, 4), torch.zeros(3, 4), OPSDConfig(top_k=5))
    with pytest.raises(WorkbenchError, match="only -inf"):
        opsd.divergence(torch.full((1, 4), -float("inf")), torch.zeros(1, 4))


def test_no_positions_give_an_empty_divergence():
    assert opsd.divergence(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)
