"""DEAR's choice of tokens: the vectors of its definition, a plain-Python twin, and its loss and gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.distill import dear, opsd
from workbench.distill.dear import DEARConfig
from workbench.distill.opsd import OPSDConfig
from workbench.errors import WorkbenchError

SHARES = st.integers(1, 100).map(lambda n: n / 100)


def draw(n, width=8, vocabulary=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return rand(n).abs(), rand(n).abs(), rand(n, width), rand(n, vocabulary), rand(n, vocabulary)


def one(n):
    return torch.zeros(n, dtype=torch.long)


def ceiling(share, count):
    return math.ceil(round(share * count, 9))


def plain(entropy, kl, hidden, response, config):
    """Decisions and evidence as sets of indices, one response and one token after another."""
    decisions, evidence = set(), set()
    for r in sorted(set(response.tolist())):
        mine = [i for i, own in enumerate(response.tolist()) if own == r]
        size = len(mine)
        ranked = sorted(mine, key=lambda i: (-float(entropy[i]), i))
        own = ranked[: ceiling(config.decisions, size)]
        rest = [i for i in mine if i not in own]
        if rest:
            close = {
                j: max(float(torch.cosine_similarity(hidden[i], hidden[j], dim=0, eps=1e-30)) for i in own)
                for j in rest
            }

            def scaled(values, otherwise):
                low, high = min(values.values()), max(values.values())
                return {j: (v - low) / (high - low) if high - low > 1e-6 else otherwise for j, v in values.items()}

            a, d = scaled(close, 1.0), scaled({j: float(kl[j]) for j in rest}, 0.0)
            best = sorted(rest, key=lambda j: (-a[j] * (1 + d[j]), j))
            evidence |= set(best[: min(ceiling(config.evidence, size - config.decisions * size), len(rest))])
        decisions |= set(own)
    return decisions, evidence


def indices(flags):
    return set(flags.nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("p", "q", "size", "kept"),
    [(0.2, 0.2, 100, (20, 16)), (0.2, 0.2, 10, (2, 2)), (0.2, 0.2, 7, (2, 2)), (0.2, 0.2, 1, (1, 0)),
     (1.0, 0.2, 9, (9, 0)), (0.07, 0.0, 100, (7, 0)), (0.5, 1.0, 5, (3, 2)), (0.2, 0.2, 15, (3, 3))],
)  # fmt: skip
def test_how_many_tokens_are_kept(p, q, size, kept):
    config = DEARConfig(decisions=p, evidence=q)
    assert tuple(int(c) for c in dear.counts(torch.tensor([size]), config)) == pytest.approx(kept)
    entropy, kl, hidden, *_ = draw(size)
    chosen = dear.select(entropy, kl, hidden, one(size), config)
    assert (int(chosen.decisions.sum()), int(chosen.evidence.sum())) == kept


def test_at_the_papers_shares_36_percent_are_kept():
    entropy, kl, hidden, *_ = draw(1000)
    assert float(dear.select(entropy, kl, hidden, one(1000)).keep.float().mean()) == pytest.approx(0.36)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 10**6), SHARES, SHARES | st.just(0.0))
def test_the_choice_is_that_of_a_plain_loop(lengths, seed, p, q):
    config = DEARConfig(decisions=p, evidence=q)
    entropy, kl, hidden, *_ = draw(sum(lengths), seed=seed)
    response = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) * 3
    chosen = dear.select(entropy, kl, hidden, response, config)
    decisions, evidence = plain(entropy, kl, hidden, response, config)
    assert indices(chosen.decisions) == decisions and indices(chosen.evidence) == evidence
    assert not bool((chosen.decisions & chosen.evidence).any())
    assert bool(((chosen.score >= 0) & (chosen.score <= 2 + 1e-6)).all())
    # What the units of entropy, divergence and states are changes nothing, nor does what stands in other responses.
    again = dear.select(3 * entropy, kl / 7, 5 * hidden, response, config)
    assert torch.equal(again.keep, chosen.keep)
    first = slice(0, lengths[0])
    alone = dear.select(entropy[first], kl[first], hidden[first], response[first], config)
    assert torch.equal(alone.keep, chosen.keep[first])


def test_long_responses_are_cut_into_pieces_that_change_nothing(monkeypatch):
    entropy, kl, hidden, *_ = draw(900, seed=3)
    response = torch.arange(3).repeat_interleave(torch.tensor([600, 250, 50]))
    whole = dear.select(entropy, kl, hidden, response)
    monkeypatch.setattr(dear, "CELLS", 2000)
    parts = dear.select(entropy, kl, hidden, response)
    assert torch.equal(parts.keep, whole.keep)
    torch.testing.assert_close(parts.score, whole.score, atol=1e-5, rtol=0)


def planted(divergence_there):
    """Twenty tokens, four of them decisions; token 9 has the state of decision 2, token 15 is orthogonal to all."""
    entropy, kl, hidden, *_ = draw(20, width=16, seed=5)
    entropy = entropy.clamp(max=2.0)
    entropy[[2, 6, 11, 17]] = 3.0
    hidden[15] = 0
    hidden[9] = 4 * hidden[2]
    kl[9] = divergence_there
    return dear.select(entropy, kl, hidden, one(20)), kl


def test_a_copy_of_a_decision_where_the_teacher_disagrees_is_evidence():
    chosen, kl = planted(50.0)
    assert indices(chosen.decisions) == {2, 6, 11, 17}
    assert bool(chosen.evidence[9]) and float(chosen.relevance[9]) == pytest.approx(1)
    assert float(chosen.score[9]) == pytest.approx(2) and int(chosen.score.argmax()) == 9
    agreed, _ = planted(0.0)
    assert float(agreed.score[9]) == pytest.approx(1)
    rest = [i for i in range(20) if i not in (2, 6, 9, 11, 17)]
    least = min(rest, key=lambda i: float(agreed.relevance[i]))
    assert float(agreed.score[least]) == 0 < float(agreed.score[9]), "never below a token without relevance"


def test_ties_go_to_the_earlier_token_and_equal_relevance_leaves_it_to_divergence():
    n = 10
    hidden = torch.ones(n, 4)
    kl = torch.arange(n).float()
    chosen = dear.select(torch.ones(n), kl, hidden, one(n))
    assert indices(chosen.decisions) == {0, 1} and indices(chosen.evidence) == {8, 9}
    level = dear.select(torch.ones(n), torch.ones(n), hidden, one(n))
    assert indices(level.evidence) == {2, 3}
    dark = dear.select(torch.ones(n), kl, torch.zeros(n, 4), one(n))
    assert bool(torch.isfinite(dark.score).all())


def test_half_precision_states_choose_nearly_the_same():
    entropy, kl, hidden, *_ = draw(400, width=32, seed=2)
    full, half = (dear.select(entropy, kl, h, one(400)).keep for h in (hidden, hidden.bfloat16()))
    assert float((full == half).float().mean()) > 0.97


def test_keeping_all_is_plain_distillation_bit_for_bit():
    entropy, kl, hidden, student, teacher = draw(30)
    keep = dear.select(entropy, kl, hidden, one(30), DEARConfig(decisions=1.0)).keep
    assert bool(keep.all())
    whole = student.clone().requires_grad_()
    ours = student.clone().requires_grad_()
    want = opsd.token_loss(whole, teacher, OPSDConfig(beta=1.0)).mean()
    got = dear.loss(ours, teacher, keep)
    want.backward()
    got.backward()
    assert torch.equal(got, want) and torch.equal(ours.grad, whole.grad)


def test_only_kept_tokens_are_pulled_and_each_by_its_share_of_the_kl():
    *_, student, teacher = draw(12, seed=7)
    student, teacher = student.double().requires_grad_(), teacher.double().requires_grad_()
    keep = torch.tensor([True, False] * 6)
    dear.loss(student, teacher, keep).backward()
    assert teacher.grad is None and not bool(student.grad[~keep].any())
    p, gap = student.detach().softmax(1), student.detach().log_softmax(1) - teacher.detach().log_softmax(1)
    want = p * (gap - (p * gap).sum(1, keepdim=True)) / 6
    torch.testing.assert_close(student.grad[keep], want[keep])


def test_gradient_mass_is_the_length_of_each_tokens_gradient():
    *_, student, teacher = draw(9, seed=4)
    leaf = student.clone().requires_grad_()
    opsd.divergence(leaf, teacher, OPSDConfig(beta=1.0)).sum().backward()
    mass = dear.gradient_mass(student, teacher)
    torch.testing.assert_close(mass, leaf.grad.norm(dim=1), atol=1e-5, rtol=1e-4)
    chosen = torch.arange(9) < 3
    assert dear.coverage(mass, chosen) == pytest.approx(float(mass[:3].sum() / mass.sum()))
    assert dear.coverage(mass, torch.ones(9, dtype=torch.bool)) == 1
    assert dear.coverage(dear.gradient_mass(student, student), chosen) is None


@given(st.integers(2, 60), st.integers(0, 1000))
def test_evidence_never_lowers_the_mass_that_is_covered(n, seed):
    entropy, kl, hidden, student, teacher = draw(n, seed=seed)
    chosen = dear.select(entropy, kl, hidden, one(n))
    mass = dear.gradient_mass(student, teacher)
    assert 0 <= dear.coverage(mass, chosen.decisions) <= dear.coverage(mass, chosen.keep) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"decisions": 0.0}, r"decisions must lie in \(0, 1\]"),
        ({"evidence": 1.5}, r"evidence must lie in \[0, 1\]"),
        ({"coef": -1.0}, "coef must be finite"),
        ({"coef": math.nan}, "coef must be finite"),
        ({"within": "turns"}, "did you mean 'turn'"),
        ({"teacher": "frozn"}, "did you mean 'frozen'"),
    ],
)
def test_impossible_options_are_one_line(given_, message):
    with pytest.raises(WorkbenchError, match=message) as caught:
        DEARConfig(**given_)
    assert "\n" not in str(caught.value)


def test_bad_input_is_one_line():
    entropy, kl, hidden, student, teacher = draw(6)
    for call, message in (
        (lambda: dear.select(entropy[:0], kl[:0], hidden[:0], one(0)), "the mask is empty"),
        (lambda: dear.select(entropy, kl[:5], hidden, one(6)), r"must be \(N,\)"),
        (lambda: dear.select(entropy, kl, hidden, torch.tensor([0, 1, 0, 1, 1, 1])), "must not fall"),
        (lambda: dear.select(entropy / 0 * 0, kl, hidden, one(6)), "entropy of token 0 is not finite"),
        (lambda: dear.select(entropy, kl + torch.inf, hidden, one(6)), "divergence of token 0 is not finite"),
        (lambda: dear.select(entropy, kl, hidden.index_fill(0, one(6)[:1], math.nan), one(6)), "state is not finite"),
        (lambda: dear.loss(student, teacher, torch.zeros(6, dtype=torch.bool)), "no token is kept"),
        (lambda: dear.loss(student, teacher, torch.ones(5, dtype=torch.bool)), "keep must be bool"),
        (lambda: dear.loss(student, teacher[:, :7], torch.ones(6, dtype=torch.bool)), "another tokenizer"),
        (lambda: dear.gradient_mass(student, teacher[:, :7]), "another tokenizer"),
    ):
        with pytest.raises(WorkbenchError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
