import pytest
import torch
from make_batch import make_batch, make_episodes, make_gaps, with_states

from workbench import loss
from workbench.composition import make_gate
from workbench.credit import rlsd
from workbench.distill import opsd, sdar
from workbench.errors import WorkbenchError
from workbench.methods import METHODS, method, options
from workbench.reuse.controls import FixedReuse, RandomStop
from workbench.reuse.dgg import Gate

TEACHER = {
    "agent_opsd", "agent_opsd_dgg", "rlsd", "step_opsd", "sdar", "grpo_opsd", "skill_sd", "opd", "opsd", "dear",
}  # fmt: skip
CREDIT = {
    "dr_grpo", "rloo", "reinforce_pp_baseline", "gigpo", "cast", "agent_opsd", "agent_opsd_dgg", "rlsd", "step_opsd",
    "v05",
}  # fmt: skip


@pytest.fixture
def batch():
    episodes = make_episodes()
    batch = with_states(make_batch(episodes, make_gaps(episodes)))
    return batch.with_(
        prior_rate=torch.tensor([0.6, 0.3, 0.9], dtype=torch.float64)[batch.group_index],
        solver_advantages=batch.anchors.double() - 1,
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_credit_and_says_what_it_needs(name, batch):
    m = method(name)
    assert m.name == name and m.paper
    for text in (m.description, m.sees):
        assert text.endswith(".") and "\n" not in text
    credit = m.credit(batch)
    assert credit.advantages.shape == batch.input_ids.shape
    assert m.needs_teacher == (name in TEACHER)
    if not m.needs_teacher:
        m.credit(batch.with_(teacher_logprobs=None))
    assert m.needs_solver == (name == "cast") and not method(name, **m.off).needs_solver
    assert (m.anchors is not None) == (name == "gigpo")
    assert (m.skills != "never") == name.startswith("skill_grpo")
    assert (m.verification is not None) == (name == "self_verification") and not method(name, **m.off).verification


def loss_and_gradient(m, batch):
    """The batch's loss and its gradient in the log-probs, one step off policy; of OPSD the policy loss alone."""
    generator = torch.Generator().manual_seed(0)
    moved = torch.randn(batch.old_logprobs.shape, generator=generator, dtype=torch.float64)
    logp = (batch.old_logprobs + 0.2 * moved).requires_grad_()
    own, old = m.loss, batch.old_logprobs
    ratio_logp = loss.sequence_form(logp, old, batch.turn_index, own.ratio)
    per_token = own.pg_coef * loss.surrogate(ratio_logp, old, m.credit(batch).advantages, **own.clip)
    total = (loss.token_weights(batch, own.aggregation) * per_token).sum()
    if m.aux is not None and m.aux.coef and m.aux.loss:
        aux = m.aux.loss(logp, batch.teacher_logprobs, old, old.abs())
        total = total + (loss.token_weights(batch, "token_mean") * aux).sum()
    return total.detach(), torch.autograd.grad(total, logp)[0]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "grpo"])
def test_every_method_switched_off_is_grpo_bit_for_bit(name, batch):
    off, plain = method(name, **method(name).off), method("grpo")
    assert torch.equal(off.credit(batch, 3).advantages, plain.credit(batch, 3).advantages)
    for got, want in zip(loss_and_gradient(off, batch), loss_and_gradient(plain, batch), strict=True):
        assert torch.equal(got, want)
    assert off.loss == plain.loss and off.sampling == plain.sampling and off.skills == plain.skills
    assert off.aux is None or off.aux.coef == 0
    gate = make_gate(off)
    assert gate.max_reuse == 1
    assert all((d := gate.observe(float(i**3), 1)).apply and not d.stop for i in range(60))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "grpo"])
def test_methods_switched_on_are_not_grpo(name, batch):
    plain, m = method("grpo"), method(name)
    assert torch.equal(m.credit(batch).advantages, plain.credit(batch).advantages) == (name not in CREDIT)
    same = torch.equal(loss_and_gradient(m, batch)[1], loss_and_gradient(plain, batch)[1])
    if same:
        divergence = m.aux and m.aux.divergence  # takes logits, which the batch does not hold
        other = m.skills != "never" or m.reuse.max_reuse > 1 or m.sampling != plain.sampling
        assert divergence or other or m.verification
    else:
        assert name in CREDIT or m.aux or m.loss != plain.loss


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("opsd", "dear")])
def test_the_recorded_slope_of_an_auxiliary_loss_is_its_gradient(name, batch):
    aux = method(name).aux
    if aux is None:
        return
    student = (batch.old_logprobs - 0.1).requires_grad_()
    args = (batch.teacher_logprobs, batch.old_logprobs, batch.old_logprobs.abs())
    want = torch.autograd.grad(aux.loss(student, *args).sum(), student)[0]
    torch.testing.assert_close(aux.gradient(student.detach(), *args), want)


def test_a_share_of_a_baseline_is_a_share_of_its_advantage(batch):
    plain, own, half = (method("rloo", share=s).credit(batch).advantages for s in (0, 1.0, 0.5))
    torch.testing.assert_close(half, (plain + own) / 2)
    assert not torch.allclose(plain, own)


def test_only_the_released_rlsd_depends_on_the_training_step(batch):
    paper, released = method("rlsd"), method("rlsd", form="released", decay_steps=10)
    assert torch.equal(paper.credit(batch, 5).advantages, paper.credit(batch, 0).advantages)
    assert torch.equal(released.credit(batch, 9).advantages, method("grpo").credit(batch).advantages)
    half = rlsd.credit(batch, rlsd.RLSDConfig(lam=0.25)).advantages
    torch.testing.assert_close(released.credit(batch, 4).advantages, half)


def test_options_reach_their_configurations():
    m = method("agent_opsd_dgg", lam=0.25, gamma=1, signal="evidence", advantage_std=False, window=8, mode="stop")
    config = m.credit.keywords["config"]
    assert (config.lam, config.gamma, config.signal, config.grpo.std) == (0.25, 1.0, "evidence", False)
    assert isinstance(config.gamma, float)
    assert (m.reuse.window, m.reuse.mode, m.reuse.max_reuse) == (8, "stop", 4)
    assert method("grpo_opsd", coef=0.1).aux.gate == sdar.SDARConfig(coef=0.1, beta=0.0)
    assert method("opsd", beta=0.5).aux.divergence == opsd.OPSDConfig(beta=0.5)
    assert method("sdar", advantage_per="turn").credit.keywords["config"].per == "turn"
    assert method("gspo").loss.ratio == "turn" and method("dapo", clip_high=0.3).loss.clip_high == 0.3
    assert method("dapo").sampling.max_batches == 10 and method("grpo").sampling.max_batches == 1


def test_options_are_listed_with_their_defaults():
    policy_loss = {
        "pg_coef": 1.0, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "engine_cap": 0.0, "ratio": "token",
        "aggregation": "episode_mean",
    }  # fmt: skip
    group = {"advantage_std": True, "advantage_eps": 1e-6, "advantage_ddof": 1, "advantage_per": "trajectory"}
    assert options("grpo") == group | policy_loss
    assert options("agent_opsd").items() >= {"lam": 0.5, "band": 0.2, "gamma": 0.95, "eps": 1e-4}.items()
    assert "grpo" not in options("agent_opsd") and "beta" not in options("grpo_opsd")
    for name in METHODS:
        once, again = method(name), method(name, **options(name))
        assert (again.reuse, again.loss, again.sampling) == (once.reuse, once.loss, once.sampling)
        assert once.off.keys() <= options(name).keys()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("agent_opds", {}, "unknown method 'agent_opds'; did you mean 'agent_opsd'"),
        ("sdar", {"beat": 1.0}, "unknown option of method 'sdar' 'beat'; did you mean 'beta'"),
        ("grpo", {"lam": 0.5}, "unknown option of method 'grpo' 'lam'"),
        ("grpo_opsd", {"beta": 1.0}, "unknown option of method 'grpo_opsd' 'beta'"),
        ("sdar", {"beta": "5"}, "option beta of method 'sdar' must be float"),
        ("grpo_dgg", {"window": 8.0}, "option window of method 'grpo_dgg' must be int"),
        ("grpo_dgg", {"window": True}, "must be int"),
        ("agent_opsd", {"signed": 1}, "option signed of method 'agent_opsd' must be bool"),
        ("agent_opsd", {"signal": "revisions"}, "did you mean 'revision'"),
        ("agent_opsd", {"lam": 2.0}, "lam must lie in"),
        ("dapo", {"max_batches": 0}, "max_batches must be at least 1"),
        ("gigpo", {"similarity": 0.0}, r"similarity must lie in \(0, 1\]"),
        ("rloo", {"share": 1.5}, "share must lie in"),
        ("skill_grpo", {"skills": "sometimes"}, "skills in the student's prompt 'sometimes'"),
    ],
)
def test_wrong_names_and_values_are_one_line(name, given, message):
    with pytest.raises(WorkbenchError, match=message) as caught:
        method(name, **given)
    assert "\n" not in str(caught.value)


def test_gates():
    assert isinstance(make_gate(method("grpo_dgg")), Gate)
    assert isinstance(make_gate(method("grpo")), FixedReuse) and make_gate(method("grpo")).max_reuse == 1
    assert make_gate(method("grpo_reuse", max_reuse=3)).max_reuse == 3
    stops = [make_gate(method("grpo_random_stop"), seed) for seed in (1, 1, 2)]
    assert all(isinstance(gate, RandomStop) for gate in stops)
    one, again, other = ([gate.observe(1.0, 2).stop for _ in range(50)] for gate in stops)
    assert one == again != other
