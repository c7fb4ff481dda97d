import pytest
import torch
from make_batch import make_batch, make_episodes, make_gaps

from workbench import loss
from workbench.distill import sdar
from workbench.errors import WorkbenchError
from workbench.methods import METHODS, make_gate, method, options
from workbench.reuse.controls import FixedReuse, RandomStop
from workbench.reuse.dgg import Gate

NAMES = "grpo agent_opsd sdar grpo_opsd grpo_dgg agent_opsd_dgg grpo_reuse grpo_random_stop".split()


@pytest.fixture
def batch():
    episodes = make_episodes()
    return make_batch(episodes, make_gaps(episodes))


@pytest.mark.parametrize("name", NAMES)
def test_every_method_gives_credit_and_says_what_it_needs(name, batch):
    m = method(name)
    assert m.name == name and m.paper and m.description.endswith(".") and "\n" not in m.description
    credit = m.credit(batch)
    assert credit.advantages.shape == batch.input_ids.shape
    assert m.needs_teacher == (m.aux is not None or name.startswith("agent_opsd"))
    if not m.needs_teacher:
        m.credit(batch.with_(teacher_logprobs=None))
    assert tuple(METHODS) == tuple(NAMES)


OFF = {
    "agent_opsd": {"lam": 0},
    "agent_opsd_dgg": {"lam": 0, "max_reuse": 1},
    "sdar": {"coef": 0},
    "grpo_opsd": {"coef": 0},
    "grpo_dgg": {"max_reuse": 1},
    "grpo_reuse": {"max_reuse": 1},
    "grpo_random_stop": {"max_reuse": 1},
}


def loss_and_gradient(m, batch):
    """The batch's loss and its gradient in the log-probs, one step off policy."""
    generator = torch.Generator().manual_seed(0)
    moved = torch.randn(batch.old_logprobs.shape, generator=generator, dtype=torch.float64)
    logp = (batch.old_logprobs + 0.2 * moved).requires_grad_()
    per_token = loss.surrogate(logp, batch.old_logprobs, m.credit(batch).advantages)
    if m.aux is not None:
        per_token = per_token + sdar.token_loss(logp, batch.teacher_logprobs, m.aux)
    total = (loss.token_weights(batch) * per_token).sum()
    return total.detach(), torch.autograd.grad(total, logp)[0]


@pytest.mark.parametrize("name", OFF)
def test_every_method_switched_off_is_grpo_bit_for_bit(name, batch):
    off, plain = method(name, **OFF[name]), method("grpo")
    assert torch.equal(off.credit(batch).advantages, plain.credit(batch).advantages)
    for got, want in zip(loss_and_gradient(off, batch), loss_and_gradient(plain, batch), strict=True):
        assert torch.equal(got, want)
    gate = make_gate(off)
    assert gate.max_reuse == 1
    assert all((d := gate.observe(float(i**3), 1)).apply and not d.stop for i in range(60))


def test_methods_switched_on_are_not_grpo(batch):
    plain = loss_and_gradient(method("grpo"), batch)
    for name in ("agent_opsd", "sdar", "grpo_opsd"):
        got = loss_and_gradient(method(name), batch)
        assert not torch.equal(got[1], plain[1])


def test_options_reach_their_configurations():
    m = method("agent_opsd_dgg", lam=0.25, gamma=1, signal="evidence", advantage_std=False, window=8, mode="stop")
    config = m.credit.keywords["config"]
    assert (config.lam, config.gamma, config.signal, config.grpo.std) == (0.25, 1.0, "evidence", False)
    assert isinstance(config.gamma, float)
    assert (m.reuse.window, m.reuse.mode, m.reuse.max_reuse) == (8, "stop", 4)
    assert method("grpo_opsd", coef=0.1).aux == sdar.SDARConfig(coef=0.1, beta=0.0)
    assert method("sdar", advantage_per="turn").credit.keywords["config"].per == "turn"


def test_options_are_listed_with_their_defaults():
    assert options("grpo") == {
        "advantage_std": True,
        "advantage_eps": 1e-6,
        "advantage_ddof": 1,
        "advantage_per": "trajectory",
    }
    assert options("agent_opsd").items() >= {"lam": 0.5, "band": 0.2, "gamma": 0.95, "eps": 1e-4}.items()
    assert "grpo" not in options("agent_opsd") and "beta" not in options("grpo_opsd")
    for name in NAMES:
        assert method(name, **options(name)).reuse == method(name).reuse


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
