import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import by_token, make_batch, make_episodes, make_gaps, take_rows

from workbench.credit import grpo, rloo
from workbench.credit.grpo import GRPOConfig, group_advantage
from workbench.errors import WorkbenchError


def one_by_one(rewards, groups, std=True, eps=1e-6, ddof=1):
    """The formula, a loop over groups in numpy."""
    rewards, groups = np.asarray(rewards, float), np.asarray(groups)
    out = np.zeros(len(rewards))
    for g in np.unique(groups):
        mine = rewards[groups == g]
        if mine.min() < mine.max():
            out[groups == g] = (mine - mine.mean()) / (mine.std(ddof=ddof) + eps if std else 1)
    return out


rewards_and_groups = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 10.0, -0.1, 0.3]), st.integers(-3, 4)), min_size=1, max_size=24
)


@settings(max_examples=60, deadline=None)
@given(rewards_and_groups, st.booleans(), st.integers(0, 1))
def test_equals_the_loop_over_groups(pairs, std, ddof):
    rewards, groups = (list(x) for x in zip(*pairs, strict=True))
    got = group_advantage(torch.tensor(rewards).double(), torch.tensor(groups), std=std, ddof=ddof)
    np.testing.assert_allclose(
        got.numpy(), one_by_one(torch.tensor(rewards).double(), groups, std, ddof=ddof), atol=1e-9
    )


@settings(max_examples=40, deadline=None)
@given(
    rewards_and_groups,
    st.randoms(use_true_random=False),
    st.floats(0.1, 9, allow_subnormal=False),
    st.floats(-5, 5, allow_subnormal=False),
)
def test_order_scale_and_shift_do_not_matter(pairs, rng, scale, shift):
    rewards, groups = (torch.tensor(x).double() for x in zip(*pairs, strict=True))
    want = group_advantage(rewards, groups, eps=0)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    torch.testing.assert_close(group_advantage(rewards[order], groups[order], eps=0), want[order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(group_advantage(rewards * scale + shift, groups, eps=0), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_groups_of_one_and_of_equal_rewards_give_exactly_zero(dtype, eps):
    # The rounded mean of seven times .1 is not .1.
    rewards = torch.tensor([0.1] * 7 + [5.0] + [0.0] * 3, dtype=dtype)
    groups = torch.tensor([4] * 7 + [9] + [1] * 3)
    assert torch.equal(group_advantage(rewards, groups, eps=eps), torch.zeros(11, dtype=dtype))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("rewards", [[1, 0], [1, 0, 0], [0.5, -0.25, 0.25, 0.5]])
def test_very_small_and_large_rewards_neither_vanish_nor_overflow(rewards, size, dtype, eps):
    rewards = torch.tensor(rewards, dtype=dtype) * size
    # A second group of another size must not matter.
    both, groups = torch.cat([rewards, rewards.new_tensor([2, 0])]), torch.tensor([3] * len(rewards) + [1] * 2)
    for ddof in (0, 1):
        got = group_advantage(both, groups, eps=eps, ddof=ddof)[: len(rewards)]
        want = one_by_one_in_units(rewards, eps, ddof)
        np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-5, atol=1e-36)
    centred = group_advantage(both, groups, std=False)[: len(rewards)].double().numpy()
    exact = rewards.double().numpy()
    np.testing.assert_allclose(centred, exact - exact.mean(), rtol=1e-5, atol=1e-6 * size)


def one_by_one_in_units(rewards, eps, ddof):
    """The formula in double precision, in units of the largest reward."""
    unit = float(rewards.abs().max())
    r = rewards.double().numpy() / unit
    return (r - r.mean()) / (r.std(ddof=ddof) + eps / unit)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool])
def test_integer_rewards_are_taken_as_floats(dtype):
    rewards, groups = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0, 0, 1])
    for std in (True, False):
        got, want = (group_advantage(r, groups, std=std) for r in (rewards.to(dtype), rewards.float()))
        assert got.dtype == torch.float32 and torch.equal(got, want)
    assert torch.equal(rloo.leave_one_out(rewards.to(dtype), groups), rloo.leave_one_out(rewards.float(), groups))
    assert group_advantage(rewards[:0].to(dtype), groups[:0]).dtype == torch.float32


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(WorkbenchError, match="reward 1 is not finite"):
        group_advantage(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(WorkbenchError, match=r"must be \(N,\) both"):
        group_advantage(torch.zeros(2), torch.zeros(3))


def test_per_turn_counts_each_turn_of_a_trajectory_as_the_released_code_does():
    episodes = make_episodes()
    batch = make_batch(episodes)
    got = grpo.turn_advantages(batch, GRPOConfig(per="turn"))
    rows = [(e.outcome, e.group) for e in episodes for _ in e.turns]
    np.testing.assert_allclose(got[batch.turn_mask], one_by_one(*zip(*rows, strict=True)), atol=1e-12)
    assert not torch.allclose(got, grpo.turn_advantages(batch, GRPOConfig()))


@pytest.mark.parametrize("per", ["trajectory", "turn"])
def test_layouts_orders_and_repeats_of_rows_give_the_same_credit(per):
    episodes = make_episodes()
    config = GRPOConfig(per=per)
    whole = make_batch(episodes, make_gaps(episodes))
    want = by_token(whole, grpo.credit(whole, config).advantages)
    rows = make_batch(episodes, make_gaps(episodes), layout="turn")
    order = np.random.default_rng(0).permutation(len(rows.input_ids)).tolist()
    for batch in (rows, take_rows(rows, order), take_rows(rows, [*order, *order[:5]])):
        assert by_token(batch, grpo.credit(batch, config).advantages) == want


def test_advantages_are_zero_off_the_mask_and_equal_within_a_trajectory():
    batch = make_batch(make_episodes())
    advantages = grpo.credit(batch).advantages
    assert bool((advantages[~batch.response_mask] == 0).all())
    values = group_advantage(batch.reward, batch.group_index)
    assert torch.equal(advantages, batch.episodes_to_tokens(values))
    assert len(values[:4].unique()) == 2 and bool((values[4:] == 0).all())


@pytest.mark.parametrize("wrong", [{"per": "turns"}, {"ddof": 2}, {"eps": -1.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError):
        GRPOConfig(**wrong)
