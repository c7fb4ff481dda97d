import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import make_batch, make_episodes, take_rows

from workbench.credit import grpo, rloo
from workbench.credit.grpo import GRPOConfig
from workbench.credit.rloo import RLOOConfig, leave_one_out
from workbench.errors import WorkbenchError


def others(rewards, groups):
    """Each reward less the mean of the others in its group, one by one."""
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        rest = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        out.append(reward - np.mean(rest) if rest else 0.0)
    return np.array(out)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 10.0, -0.1, 0.3]), st.integers(-3, 4)), min_size=1, max_size=24))
def test_equals_the_mean_of_the_others_one_by_one(pairs):
    rewards, groups = (list(x) for x in zip(*pairs, strict=True))
    got = leave_one_out(torch.tensor(rewards).double(), torch.tensor(groups))
    np.testing.assert_allclose(got.numpy(), others(torch.tensor(rewards).tolist(), groups), atol=1e-6)


def test_worked_example():
    got = leave_one_out(torch.tensor([10.0, 0, 1, 10, 5]).double(), torch.tensor([0, 0, 0, 0, 7]))
    np.testing.assert_allclose(got.numpy(), [19 / 3, -7, -17 / 3, 19 / 3, 0], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_one_and_of_equal_rewards_give_exactly_zero(dtype):
    rewards, groups = torch.tensor([0.1] * 7 + [5.0], dtype=dtype), torch.tensor([4] * 7 + [9])
    assert torch.equal(leave_one_out(rewards, groups), torch.zeros(8, dtype=dtype))
    assert leave_one_out(rewards[:0], groups[:0]).shape == (0,)


def test_it_is_dr_grpo_scaled_by_the_size_of_the_group():
    batch = make_batch(make_episodes(), reward="return")
    dr_grpo = grpo.credit(batch, GRPOConfig(std=False)).turns["turn_advantage"]
    sizes = torch.tensor([4] * 4 + [2] * 2 + [1]).double()[:, None]
    torch.testing.assert_close(rloo.credit(batch).turns["turn_advantage"], dr_grpo * sizes / (sizes - 1).clamp(min=1))


def test_per_turn_counts_turns_once_where_the_released_code_counts_copies_of_rows_too():
    episodes = make_episodes()
    rows = [(float(e.outcome), e.group) for e in episodes for _ in e.turns]
    batch = make_batch(episodes, layout="turn")
    copied = take_rows(batch, [*range(len(rows)), 0, 0, 0, 1])
    for given_batch in (batch, copied):
        got = rloo.credit(given_batch, RLOOConfig(per="turn")).turns["turn_advantage"][batch.turn_mask]
        np.testing.assert_allclose(got.numpy(), others(*zip(*rows, strict=True)), atol=1e-12)
    faulty = others(*zip(*rows, rows[0], rows[0], rows[0], rows[1], strict=True))
    assert abs(faulty[0] - got[0]) > 0.01


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(WorkbenchError, match="did you mean 'turn'"):
        RLOOConfig(per="turns")
    with pytest.raises(WorkbenchError, match="reward 1 is not finite"):
        leave_one_out(torch.tensor([0.0, float("inf")]), torch.tensor([0, 0]))
