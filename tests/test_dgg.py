import copy
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from workbench.errors import WorkbenchError
from workbench.reuse.controls import FixedReuse, FixedReuseConfig, RandomStop, RandomStopConfig
from workbench.reuse.dgg import STATISTICS, DGGConfig, Gate

energies = st.lists(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=4, max_size=4), min_size=1, max_size=12)


def play(gate, batches, max_reuse=4):
    """(batch, reuse, decision) of every gradient a reuse loop would compute."""
    seen = []
    for b, batch in enumerate(batches):
        for reuse in range(1, max_reuse + 1):
            decision = gate.observe(batch[reuse - 1], reuse)
            seen.append((b, reuse, decision))
            if decision.stop:
                break
    return seen


@settings(max_examples=80, deadline=None)
@given(energies, st.integers(1, 8), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from(["both", "discard", "stop"]))
def test_never_fires_on_the_first_use_or_before_the_window_is_full(batches, window, threshold, mode):
    gate = Gate(DGGConfig(window=window, threshold=threshold, mode=mode))
    accepted, previous = [], None
    for b, reuse, d in play(gate, batches):
        energy = batches[b][reuse - 1]
        assert d.increment == (None if previous is None else energy - previous)
        previous = energy
        full = len(accepted) >= window
        assert (d.z is not None) == (full and d.increment is not None)
        if d.z is not None:
            recent = accepted[-window:]
            want = (d.increment - statistics.fmean(recent)) / (statistics.pstdev(recent) + 1e-8)
            assert d.z == pytest.approx(want, rel=1e-6, abs=1e-3)
        trip = d.z is not None and reuse > 1 and d.z > threshold
        assert d.apply == (not trip or mode == "stop")
        assert d.stop == (trip and mode != "discard")
        if d.apply and d.increment is not None:
            accepted.append(d.increment)


def test_a_spike_on_a_later_use_trips_and_the_next_increment_starts_from_it():
    gate = Gate(DGGConfig(window=3, threshold=1.0))
    for reuse, energy in ((1, 1.0), (2, 1.1), (3, 1.0), (4, 1.1)):
        assert gate.observe(energy, reuse).apply
    assert gate.observe(50.0, 1).apply, "the first use is never gated"
    assert gate.observe(1.0, 2).apply
    spike = gate.observe(500.0, 3)
    assert not spike.apply and spike.stop and spike.z > 1
    assert gate.observe(500.5, 1).increment == 0.5


@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_statistic_is_watched_by_the_same_rule(statistic):
    gate = Gate(DGGConfig(statistic=statistic, window=2, threshold=0.5))
    assert gate.statistic == statistic
    decisions = [gate.observe(value, reuse) for value, reuse in ((1.0, 1), (2.0, 2), (4.0, 3), (9.0, 4))]
    assert [d.apply for d in decisions] == [True, True, True, False] and decisions[3].increment == 5.0
    if statistic in ("kl", "chi2"):
        gate.observe(-0.01, 1)  # sample estimates can fall below 0
    else:
        with pytest.raises(WorkbenchError, match=f"gradient {statistic} must be finite and at least 0"):
            gate.observe(-0.01, 1)


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_resumed_gate_decides_as_an_unbroken_one(cut):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(40, generator=generator).tolist()

    def run(make, state=None, start=0, stop=40):
        gate = make()
        if state is not None:
            gate.load_state_dict(state)
        return [gate.observe(values[i], i % 4 + 1) for i in range(start, stop)], gate

    for make in (
        lambda: Gate(DGGConfig(window=5)),
        lambda: FixedReuse(FixedReuseConfig()),
        lambda: RandomStop(RandomStopConfig(), seed=3),
    ):
        whole, _ = run(make)
        first, gate = run(make, stop=cut)
        rest, _ = run(make, copy.deepcopy(gate.state_dict()), cut)
        assert first + rest == whole


def test_fixed_reuse_never_stops():
    seen = play(FixedReuse(FixedReuseConfig(max_reuse=4)), [[1.0, 99.0, 0.0, 1e5]] * 5)
    assert len(seen) == 20 and all(d.apply and not d.stop and d.z is None for *_, d in seen)


def test_random_stop_has_its_rate_its_seed_and_no_eye_for_the_gradient():
    config = RandomStopConfig(max_reuse=4, rate=0.3)
    calm = play(RandomStop(config, seed=1), [[1.0] * 4] * 1500)
    armed = [d for _, reuse, d in calm if reuse > 1]
    assert all(d.apply and not d.stop for _, reuse, d in calm if reuse == 1)
    assert all(d.apply != d.stop for d in armed)
    share = sum(d.stop for d in armed) / len(armed)
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(armed))
    wild = play(RandomStop(config, seed=1), [[1.0, 1e6, 0.0, 1e9]] * 1500)
    assert [d.stop for *_, d in wild] == [d.stop for *_, d in calm]
    other = play(RandomStop(config, seed=2), [[1.0] * 4] * 1500)
    assert [d.stop for *_, d in other][:200] != [d.stop for *_, d in calm][:200]
    assert len(play(RandomStop(RandomStopConfig(rate=0.0)), [[1.0] * 4] * 9)) == 36
    assert len(play(RandomStop(RandomStopConfig(rate=1.0)), [[1.0] * 4] * 9)) == 18


def test_max_reuse_of_one_never_stops():
    for gate in (Gate(DGGConfig(max_reuse=1, window=1)), RandomStop(RandomStopConfig(max_reuse=1, rate=1.0))):
        assert all(gate.observe(float(10**i), 1) for i in range(6))
        decisions = [gate.observe(float(10**i), 1) for i in range(6)]
        assert all(d.apply and not d.stop for d in decisions)
        with pytest.raises(WorkbenchError, match=r"reuse must lie in 1\.\.1"):
            gate.observe(1.0, 2)


@pytest.mark.parametrize("make", [Gate, FixedReuse, RandomStop])
@pytest.mark.parametrize(("energy", "reuse"), [(math.nan, 1), (math.inf, 1), (-1.0, 1), (1.0, 0), (1.0, 5)])
def test_a_value_no_gradient_can_have_is_refused(make, energy, reuse):
    with pytest.raises(WorkbenchError, match="gate"):
        make().observe(energy, reuse)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (DGGConfig, {"mode": "drop"}),
        (DGGConfig, {"statistic": "max"}),
        (DGGConfig, {"window": 0}),
        (DGGConfig, {"max_reuse": 0}),
        (DGGConfig, {"threshold": math.nan}),
        (FixedReuseConfig, {"max_reuse": 0}),
        (RandomStopConfig, {"max_reuse": 0}),
        (RandomStopConfig, {"rate": 1.1}),
    ],
)
def test_impossible_settings_are_refused(config, wrong):
    with pytest.raises(WorkbenchError):
        config(**wrong)


# What a discard must mean


def trained():
    """A small model some AdamW steps in, so that its moments are not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(4):
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def snapshot(model, optimizer):
    weights = [p.detach().clone() for p in model.parameters()]
    states = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
    return weights, [s[name].clone() for s in states for name in ("exp_avg", "exp_avg_sq", "step")]


def same(one, other):
    return [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(one, other, strict=True)]


def test_a_discarded_update_leaves_weights_and_moments_bit_identical():
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    gate = Gate(DGGConfig(window=2, threshold=0.1))
    for reuse, energy in enumerate((1.0, 1.1, 1.0, 1e6), 1):
        model(torch.randn(8, 5)).square().sum().backward()
        decision = gate.observe(energy, reuse)
        if decision.apply:
            optimizer.step()
            after_applied = snapshot(model, optimizer)
        optimizer.zero_grad()
    assert not decision.apply
    assert same(after_applied, snapshot(model, optimizer)) == [True, True]
    assert same(before, snapshot(model, optimizer)) == [False, False]


def test_stepping_with_zeroed_gradients_is_not_a_discard():
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same(before, snapshot(model, optimizer)) == [False, False]


def test_discarding_alone_meets_the_same_gradient_again():
    """Weights stand still after a discard, so the next use has the same energy and an increment of 0."""
    gate = Gate(DGGConfig(mode="discard", window=3, threshold=0.5, max_reuse=4))
    for energy in (1.0, 1.1, 1.0, 1.1):
        gate.observe(energy, 1)
    tripped = gate.observe(2.0, 2)
    again = gate.observe(2.0, 3)
    assert not tripped.apply and not tripped.stop and again.increment == 0.0 and again.apply
