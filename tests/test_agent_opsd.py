import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import SPEC, by_token, make_batch, make_episodes, make_gaps, pad, take_rows

from workbench.credit import agent_opsd, grpo
from workbench.credit.agent_opsd import AgentOPSDConfig, reshape_turns, saturation
from workbench.credit.grpo import GRPOConfig
from workbench.errors import WorkbenchError


def one_episode(evidence, prior=0.5, advantage=1.0, dtype=torch.float64, **config):
    evidence = torch.tensor([evidence], dtype=dtype)
    settings = AgentOPSDConfig(**config)
    mask = torch.ones_like(evidence, dtype=torch.bool)
    turns = reshape_turns(
        evidence, mask, torch.tensor([prior], dtype=dtype), torch.tensor([advantage], dtype=dtype), settings
    )
    return {name: value[0] for name, value in turns.items()}


def by_hand(evidence, prior, advantage, lam=0.5, band=0.2, gamma=0.95, eps=1e-4, ddof=0):
    """The paper's recursion, turn by turn in plain floats."""
    base = math.log((p := min(max(prior, eps), 1 - eps)) / (1 - p))
    c, before, revisions = 0.0, p, []
    for e in evidence:
        c = gamma * c + e
        belief = 1 / (1 + math.exp(-(base + c)))
        revisions.append(belief - before)
        before = belief
    q = np.sign(advantage) * np.array(revisions)
    deviation = math.sqrt(((q - q.mean()) ** 2).sum() / max(len(q) - ddof, 1))
    z = (q - q.mean()) / (deviation + eps)
    return advantage * (1 - lam + lam * np.clip(1 + band * z, 1 - band, 1 + band))


# Importing torch may switch the processor to flush subnormals, which hypothesis refuses to draw then.
finite = st.floats(-6, 6, allow_subnormal=False)
episodes_of_evidence = st.lists(st.lists(finite, min_size=1, max_size=7), min_size=1, max_size=5)


def tables(episodes):
    """Ragged evidence as (E,K) and its mask."""
    width = max(map(len, episodes))
    evidence = torch.tensor([e + [0.0] * (width - len(e)) for e in episodes], dtype=torch.float64)
    mask = torch.tensor([[True] * len(e) + [False] * (width - len(e)) for e in episodes])
    return evidence, mask


@settings(max_examples=60, deadline=None)
@given(
    episodes_of_evidence,
    st.floats(0, 1, allow_subnormal=False),
    st.sampled_from([-1.3, 0.0, 0.7]),
    st.sampled_from([0.8, 0.95, 1.0]),
)
def test_equals_the_recursion_by_hand_and_keeps_its_bounds(episodes, prior, advantage, gamma):
    evidence, mask = tables(episodes)
    n = len(episodes)
    config = AgentOPSDConfig(gamma=gamma)
    turns = reshape_turns(
        evidence,
        mask,
        torch.full((n,), prior, dtype=torch.float64),
        torch.full((n,), advantage, dtype=torch.float64),
        config,
    )
    reshaped = turns["turn_advantage"]
    for e, row in enumerate(episodes):
        want = by_hand(row, prior, advantage, gamma=gamma)
        np.testing.assert_allclose(reshaped[e, : len(row)].numpy(), want, atol=1e-9)
    # Bounded, sign kept, revisions add up to the whole move of the belief, and the closed form in one product.
    assert bool(((reshaped - advantage)[mask].abs() <= config.lam * config.band * abs(advantage) + 1e-12).all())
    assert bool((reshaped[mask].sign() == math.copysign(1, advantage) * (advantage != 0)).all())
    moved = turns["belief"].gather(1, mask.sum(1, keepdim=True) - 1)[:, 0] - turns["belief_before"][:, 0]
    torch.testing.assert_close(turns["revision"].sum(1), moved, rtol=0, atol=1e-12)
    closed = advantage * (1 + config.lam * config.band * turns["z"].clamp(-1, 1))
    torch.testing.assert_close(reshaped[mask], closed[mask], rtol=1e-12, atol=1e-12)
    assert all(bool((value[~mask] == 0).all()) for value in turns.values())
    alone = torch.tensor([len(row) == 1 for row in episodes])
    assert bool((turns["z"][alone] == 0).all()) and bool((reshaped[alone, 0] == advantage).all())


@settings(max_examples=30, deadline=None)
@given(episodes_of_evidence, st.integers(1, 4), st.randoms(use_true_random=False))
def test_order_and_padding_of_episodes_do_not_matter(episodes, extra, rng):
    evidence, mask = tables(episodes)
    prior = torch.linspace(0.1, 0.9, len(episodes)).double()
    advantage = torch.tensor([1.0, -1.0]).double().repeat(3)[: len(episodes)]
    want = reshape_turns(evidence, mask, prior, advantage)
    order = list(range(len(episodes)))
    rng.shuffle(order)
    junk = torch.full((len(episodes), extra), 7.0).double()
    got = reshape_turns(
        torch.cat([evidence, junk], 1)[order],
        torch.cat([mask, junk < 0], 1)[order],
        prior[order],
        advantage[order],
    )
    for name, value in want.items():
        torch.testing.assert_close(got[name][:, : mask.shape[1]], value[order], rtol=1e-9, atol=1e-9)


def test_only_the_product_of_lam_and_band_matters():
    evidence = [-0.8, 0.3, 0.5, 1.4, 0.6]
    one, other = (one_episode(evidence, lam=a, band=b)["turn_advantage"] for a, b in ((0.5, 0.2), (0.2, 0.5)))
    torch.testing.assert_close(one, other, rtol=0, atol=4e-16)


@pytest.mark.parametrize("size", [0.05, 1.0, 5.0])
def test_two_turns_are_always_ten_percent_apart(size):
    turns = one_episode([size, -size], advantage=2.0)
    torch.testing.assert_close(turns["z"], torch.tensor([1.0, -1.0]).double(), rtol=0, atol=2e-2)
    torch.testing.assert_close(turns["turn_advantage"], torch.tensor([2.2, 1.8]).double(), rtol=0, atol=4e-3)


def test_a_failure_mirrors_a_success():
    won, lost = (one_episode([-0.8, 0.3, 0.5, 1.4], advantage=a) for a in (1.0, -1.0))
    assert torch.equal(won["z"], -lost["z"])


def test_eps_matters_once_the_belief_is_saturated():
    evidence = [0.5, -0.2, 0.4, 0.1, -0.4, 0.3]
    fine, coarse = (one_episode(evidence, prior=0.9995, eps=eps)["z"].abs().max() for eps in (1e-6, 1e-4))
    assert fine > 1.5 * coarse


def test_long_negative_evidence_kills_the_belief_at_the_first_turn():
    turns = one_episode([-10.0] * 20, gamma=1.0)
    assert turns["z"][0] == pytest.approx(-math.sqrt(19), rel=2e-3)
    np.testing.assert_allclose(turns["z"][1:].numpy(), 1 / math.sqrt(19), rtol=5e-3)
    shares = saturation({k: v[None] for k, v in turns.items()}, torch.ones(1, 20, dtype=torch.bool))
    assert shares == {"belief_saturated": 1.0, "revision_tiny": 0.95, "pivotal_share": 0.05}


def test_saturation_counts_existing_turns_only():
    mask = torch.tensor([[True, True], [True, False]])
    values = {
        "belief": torch.tensor([[0.5, 0.995], [0.001, 0.0]]),
        "revision": torch.tensor([[0.1, 1e-4], [-0.2, 0.0]]),
        "z": torch.tensor([[1.0, -1.5], [0.0, 9.0]]),
    }
    assert saturation(values, mask) == pytest.approx(
        {"belief_saturated": 2 / 3, "revision_tiny": 1 / 3, "pivotal_share": 1 / 3}
    )
    assert saturation({k: v for k, v in values.items() if k != "z"}, mask)["pivotal_share"] is None


def test_revisions_keep_their_digits_in_float32_where_beliefs_are_saturated():
    evidence = [12.0, 0.5, 1.0, -0.75]
    exact, single = (
        one_episode(evidence, dtype=dtype)["revision"].double() for dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(single, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("evidence", [[1e4, -1e4, 3.0], [-1e4] * 4, [700.0, 0.0]])
def test_extreme_evidence_stays_finite(evidence):
    for dtype in (torch.float32, torch.float64):
        assert all(bool(torch.isfinite(value).all()) for value in one_episode(evidence, dtype=dtype).values())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_evidence_that_is_not_finite_is_refused(bad):
    with pytest.raises(WorkbenchError, match="not finite"):
        one_episode([0.1, bad])
    with pytest.raises(WorkbenchError, match="advantage is not finite"):
        one_episode([0.1, 0.2], advantage=bad)
    with pytest.raises(WorkbenchError, match="success rate"):
        one_episode([0.1, 0.2], prior=bad)


def test_a_raw_reward_is_no_prior():
    with pytest.raises(WorkbenchError, match="binarise"):
        one_episode([0.1, 0.2], prior=1.25)


def test_a_hole_before_an_existing_turn_is_refused():
    for holes in ([[True, False, True]], [[False, True, True]]):
        with pytest.raises(WorkbenchError, match="turn_mask has a hole"):
            reshape_turns(torch.zeros(1, 3), torch.tensor(holes), torch.full((1,), 0.5), torch.ones(1))


def test_an_evidence_mask_that_does_not_fit_is_refused_in_one_line(batch):
    mask = batch.response_mask
    for granularity in ("turn", "token"):
        for wrong in (mask[0], mask[:1], mask[:, :1], mask.long()):
            with pytest.raises(WorkbenchError, match="evidence_mask must be bool") as error:
                agent_opsd.credit(batch, AgentOPSDConfig(granularity=granularity), evidence_mask=wrong)
            assert "\n" not in str(error.value)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(WorkbenchError, match="reshape_turns"):
        reshape_turns(torch.zeros(2, 3), torch.ones(2, 3).bool(), torch.zeros(3), torch.zeros(2))


# Switches


def test_switches_of_the_ablations():
    evidence, advantage = [-0.8, 0.3, 0.5, 1.4], -1.0
    base = one_episode(evidence, advantage=advantage)
    z = agent_opsd.standardise
    mask = torch.ones(1, 4, dtype=torch.bool)
    raw = torch.tensor([evidence], dtype=torch.float64)

    def check(want, **config):
        got = one_episode(evidence, advantage=advantage, **config)["z"]
        torch.testing.assert_close(got, z(want, mask, 1e-4)[0], rtol=1e-12, atol=1e-12)

    check(-base["revision"][None])
    check(-raw, signal="evidence")
    check(base["revision"].abs()[None], signed=False)
    check(raw.abs(), signal="evidence", signed=False)
    sample = one_episode(evidence, advantage=advantage, ddof=1)["z"]
    torch.testing.assert_close(sample, z(-base["revision"][None], mask, 1e-4, ddof=1)[0])
    assert float(sample.abs().max()) < float(base["z"].abs().max())


def test_decay_of_the_prior():
    turns = one_episode([0.0] * 3, prior=0.9, gamma=0.5, decay_prior=True)
    logit = math.log(9)
    want = torch.sigmoid(torch.tensor([logit / 2, logit / 4, logit / 8]).double())
    torch.testing.assert_close(turns["belief"], want)
    kept = one_episode([0.0] * 3, prior=0.9, gamma=0.5)
    torch.testing.assert_close(kept["belief"], torch.full((3,), 0.9).double())


@pytest.mark.parametrize(
    "wrong",
    [
        {"granularity": "turns"},
        {"signal": "belief"},
        {"signal": "absolute"},
        {"lam": 1.5},
        {"band": -0.1},
        {"gamma": 1.01},
        {"eps": 0.0},
        {"eps": math.nan},
        {"ddof": 2},
        {"granularity": "token", "evidence": "mean"},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError):
        AgentOPSDConfig(**wrong)


# On batches


@pytest.fixture
def episodes():
    return make_episodes()


@pytest.fixture
def batch(episodes):
    return make_batch(episodes, make_gaps(episodes))


CONFIGS = {
    "paper": {},
    "mean": {"evidence": "mean"},
    "centred": {"evidence": "centred"},
    "raw": {"signal": "evidence"},
    "unsigned": {"signed": False},
    "half": {"prior": "half"},
    "rows": {"grpo": GRPOConfig(per="turn"), "prior_per": "turn"},
    "token": {"granularity": "token"},
    "token centred": {"granularity": "token", "evidence": "centred"},
}


def test_credit_is_the_recursion_by_hand(batch, episodes):
    gaps = make_gaps(episodes)
    credit = agent_opsd.credit(batch)
    base = grpo.turn_advantages(batch, GRPOConfig())[:, 0].tolist()
    rates = {0: 2 / 4, 1: 1.0, 2: 0.0}
    for e, episode in enumerate(episodes):
        evidence = [gaps[e, k].sum() for k in range(len(episode.turns))]
        want = by_hand(evidence, rates[episode.group], base[e])
        np.testing.assert_allclose(credit.turns["turn_advantage"][e, : len(want)], want, atol=1e-9)
        np.testing.assert_allclose(credit.turns["evidence"][e, : len(want)], evidence, atol=1e-12)
    assert tuple(credit.turns) == agent_opsd.COLUMNS
    assert torch.equal(credit.turns["pivotal"], credit.turns["z"].abs() > 1)
    assert torch.equal(credit.advantages, batch.to_tokens(credit.turns["turn_advantage"]))


@pytest.mark.parametrize("name", CONFIGS)
def test_layouts_orders_repeats_and_padding_give_the_same_credit(name, episodes, batch):
    config = AgentOPSDConfig(**CONFIGS[name])
    want = agent_opsd.credit(batch, config)
    tokens = by_token(batch, want.advantages)
    rows = make_batch(episodes, make_gaps(episodes), layout="turn")
    order = np.random.default_rng(0).permutation(len(rows.input_ids)).tolist()
    others = {
        "turn rows": rows,
        "shuffled": take_rows(rows, order),
        "repeated": take_rows(rows, [*order[:6], *order, 0]),
        "padded": pad(batch, 6),
        "repeated episodes": take_rows(batch, [3, *range(7), 0, 0]),
    }
    for other in others.values():
        got = agent_opsd.credit(other, config)
        assert got.turns.keys() == want.turns.keys()
        for column in want.turns:
            torch.testing.assert_close(got.turns[column], want.turns[column], rtol=1e-9, atol=1e-9)
        assert by_token(other, got.advantages) == pytest.approx(tokens, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.lists(st.integers(1, 4), min_size=1, max_size=4)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 10**6),
)
def test_any_batch_gives_the_same_credit_in_both_layouts(spec, seed):
    episodes = make_episodes(spec, seed)
    gaps = make_gaps(episodes, seed)
    whole, rows = (make_batch(episodes, gaps, layout) for layout in ("episode", "turn"))
    for config in (AgentOPSDConfig(), AgentOPSDConfig(granularity="token")):
        one, other = agent_opsd.credit(whole, config), agent_opsd.credit(rows, config)
        assert by_token(rows, other.advantages) == pytest.approx(by_token(whole, one.advantages), abs=1e-9)
        base = grpo.credit(whole).advantages
        assert bool(((one.advantages - base).abs() <= 0.1 * base.abs() + 1e-12).all())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_lam_zero_is_grpo_bit_for_bit(name, dtype, layout, episodes):
    config = AgentOPSDConfig(lam=0.0, **CONFIGS[name])
    batch = make_batch(episodes, make_gaps(episodes), layout)
    batch = batch.with_(**{n: getattr(batch, n).to(dtype) for n in ("old_logprobs", "teacher_logprobs", "reward")})
    got, want = agent_opsd.credit(batch, config).advantages, grpo.credit(batch, config.grpo).advantages
    assert got.dtype == want.dtype == dtype and torch.equal(got, want)
    assert not torch.equal(agent_opsd.credit(batch, AgentOPSDConfig(**CONFIGS[name])).advantages, want)


def test_float32_credit_is_close_to_float64(batch):
    single = batch.with_(**{n: getattr(batch, n).float() for n in ("old_logprobs", "teacher_logprobs", "reward")})
    got, want = agent_opsd.credit(single).advantages, agent_opsd.credit(batch).advantages
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_other_priors_than_the_groups_success_rate(batch):
    assert agent_opsd.prior(batch).tolist() == [0.5] * 4 + [1.0] * 2 + [0.0]
    assert set(agent_opsd.prior(batch, AgentOPSDConfig(prior="half")).tolist()) == {0.5}
    by_rows = agent_opsd.prior(batch, AgentOPSDConfig(prior_per="turn"))
    won = sum(len(turns) for group, outcome, turns in SPEC if group == 0 and outcome)
    assert by_rows[0] == won / sum(len(turns) for group, _, turns in SPEC if group == 0)


def test_groups_without_variance_and_single_turns_get_plain_advantages(batch):
    credit = agent_opsd.credit(batch)
    assert bool((credit.advantages[4:] == 0).all())
    assert torch.equal(credit.advantages[2], grpo.credit(batch).advantages[2])


def test_evidence_as_mean_centred_or_of_chosen_tokens(batch, episodes):
    gaps = make_gaps(episodes)
    mean = agent_opsd.credit(batch, AgentOPSDConfig(evidence="mean")).turns["evidence"]
    assert mean[0, 2] == pytest.approx(gaps[0, 2].mean())
    centred = agent_opsd.credit(batch, AgentOPSDConfig(evidence="centred")).turns["evidence"]
    sums = [gaps[0, k].sum() for k in range(4)]
    np.testing.assert_allclose(centred[0, :4], np.array(sums) - np.mean(sums), atol=1e-12)
    # As the released code: one turn has no drift to remove.
    assert centred[2, 0] == pytest.approx(gaps[2, 0].sum())
    last = torch.cat([batch.turn_index[:, 1:] != batch.turn_index[:, :-1], torch.ones(7, 1).bool()], 1)
    chosen = agent_opsd.credit(batch, evidence_mask=last).turns["evidence"]
    assert chosen[3, 0] == pytest.approx(gaps[3, 0][-1])


def test_centred_evidence_of_a_turn_of_one_token_stays_as_that_of_an_episode_of_one_turn(batch, episodes):
    gaps = make_gaps(episodes)
    turns = agent_opsd.credit(batch, AgentOPSDConfig(granularity="token", evidence="centred")).turns
    for (e, k), gap in gaps.items():
        want = gap[0] if len(gap) == 1 else 0.0
        assert turns["evidence"][e, k] == pytest.approx(want, abs=1e-12)
    assert len(gaps[0, 1]) == 1 and turns["revision"][0, 1].abs() > 1e-3


def test_token_granularity_restarts_the_belief_in_every_turn(batch, episodes):
    gaps = make_gaps(episodes)
    credit = agent_opsd.credit(batch, AgentOPSDConfig(granularity="token"))
    base = grpo.turn_advantages(batch, GRPOConfig())
    got = by_token(batch, credit.advantages)
    for (e, k), gap in gaps.items():
        want = by_hand(gap.tolist(), agent_opsd.prior(batch)[e].item(), base[e, k].item())
        np.testing.assert_allclose([got[e, k, i] for i in range(len(gap))], want, atol=1e-9)
        assert credit.turns["turn_advantage"][e, k] == pytest.approx(want.mean(), abs=1e-9)
    assert "z" not in credit.turns and "pivotal" not in credit.turns
    torch.testing.assert_close(
        credit.turns["revision"], (credit.turns["belief"] - credit.turns["belief_before"]), rtol=0, atol=1e-12
    )


def test_without_a_teacher_there_is_no_credit(episodes):
    with pytest.raises(WorkbenchError, match="no teacher_logprobs"):
        agent_opsd.credit(make_batch(episodes))


def test_a_gap_that_is_not_finite_is_refused(batch):
    # A batch refuses such values when it is made, not when someone writes into its tensors later.
    batch.teacher_logprobs[0, batch.response_mask[0].nonzero()[0]] = -math.inf
    with pytest.raises(WorkbenchError, match="gap is not finite"):
        agent_opsd.credit(batch)
