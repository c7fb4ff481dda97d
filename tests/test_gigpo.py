from difflib import SequenceMatcher

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import as_dtype, make_batch, make_episodes, take_rows, with_states

from workbench.credit import gigpo, grpo
from workbench.credit.gigpo import GiGPOConfig, discounted_returns, step_advantages
from workbench.credit.grpo import GRPOConfig
from workbench.errors import WorkbenchError
from workbench.records import Batch, Episode, Turn


def play(group, *observations):
    """An episode whose turns answer these observations."""
    turns = tuple(Turn([1 + k, 2], [3], [-1.0], observation=text) for k, text in enumerate(observations))
    return Episode(turns, f"task-{group}", group, 0, 1, 1.0)


# Anchors


def test_states_are_equal_where_their_texts_are_inside_a_group():
    episodes = [play(0, "hall", "kitchen", "hall"), play(0, "hall"), play(5, "hall", "")]
    assert gigpo.anchors(episodes).tolist() == [[0, 1, 0], [0, -1, -1], [2, 3, -1]]


def test_anchors_fit_a_batch():
    episodes = [play(0, "hall", "kitchen"), play(0, "hall")]
    batch = Batch.from_episodes(episodes, layout="turn").with_(anchors=gigpo.anchors(episodes))
    assert batch.anchors.dtype == torch.long


def test_similar_states_join_the_first_cluster_by_its_first_member():
    hall = "in the hall you see a red cup"
    near = "in the hall you see a red cap"
    far = "in the mall you see a bad cap"
    first, between, last = "a" + hall, "b" + near, "c" + far
    ratios = [SequenceMatcher(None, b, a).ratio() for a, b in ((first, between), (between, last), (first, last))]
    assert min(ratios[:2]) > 0.85 > ratios[2]
    # last is close to between, which is not a first member; in whatever order they were met.
    assert gigpo.anchors([play(0, first, between, last)], similarity=0.85).tolist() == [[0, 0, 1]]
    assert gigpo.anchors([play(0, last, between, first)], similarity=0.85).tolist() == [[0, 1, 1]]
    assert gigpo.anchors([play(0, first), play(1, between)], similarity=0.85).tolist() == [[0], [1]]
    assert gigpo.anchors([play(0, first, between, last)]).tolist() == [[0, 1, 2]]


def one_by_one(episodes, similarity):
    """Every text of a group against the first member of every cluster, nothing remembered and nothing skipped."""
    clusters = {}
    for group, text in sorted({(episode.group, turn.observation) for episode in episodes for turn in episode.turns}):
        for (other, first), members in clusters.items():
            if group == other and SequenceMatcher(None, text, first).ratio() >= similarity:
                members.append(text)
                break
        else:
            clusters[group, text] = [text]
    return {(group, text): (group, first) for (group, first), members in clusters.items() for text in members}


played = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(played, st.sampled_from([0.5, 0.7, 0.95, 1.0]), st.randoms(use_true_random=False))
def test_clusters_equal_the_plain_loop_in_any_order_of_episodes(played, similarity, rng):
    for _ in range(2):
        episodes = [play(group, *texts) for group, texts in played]
        got = gigpo.anchors(episodes, similarity)
        clusters = one_by_one(episodes, similarity)
        want = [clusters[episode.group, turn.observation] for episode in episodes for turn in episode.turns]
        assert got[got >= 0].tolist() == [list(dict.fromkeys(want)).index(cluster) for cluster in want]
        rng.shuffle(played)


def test_episodes_without_observations_are_refused():
    with pytest.raises(WorkbenchError, match="episode 1 of task-3 has no observation texts"):
        gigpo.anchors([play(0, "hall"), play(3, "", "")])
    with pytest.raises(WorkbenchError, match="similarity"):
        gigpo.anchors([play(0, "hall")], similarity=0.0)
    with pytest.raises(WorkbenchError, match="no episodes"):
        gigpo.anchors([])


# Returns and steps


def test_returns_are_discounted_within_an_episode():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got = discounted_returns(torch.tensor([[1.0, 0.0, 4.0], [3.0, 9.0, float("nan")]]), mask, 0.5)
    assert got.tolist() == [[2.0, 2.0, 4.0], [3.0, 0.0, 0.0]]


def steps_by_hand(returns, states, std, eps=1e-6):
    out = np.zeros(len(returns))
    for i, state in enumerate(states):
        mine = np.array([r for r, s in zip(returns, states, strict=True) if s == state])
        if len(mine) > 1 and mine.min() < mine.max():
            out[i] = (returns[i] - mine.mean()) / (mine.std(ddof=1) + eps if std else 1)
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-16, 16), st.integers(-1, 1), st.integers(0, 2)), min_size=1, max_size=20),
    st.booleans(),
)
def test_steps_equal_the_loop_over_states(rows, std):
    returns, anchors, groups = (list(x) for x in zip(*rows, strict=True))
    mode = "mean_std_norm" if std else "mean_norm"
    tensors = (torch.tensor(returns).double() / 8, torch.tensor(anchors), torch.tensor(groups))
    got = step_advantages(*tensors, mode=mode)
    states = list(zip(groups, anchors, strict=True))
    np.testing.assert_allclose(got.numpy(), steps_by_hand([r / 8 for r in returns], states, std), atol=1e-9)


def test_a_state_met_once_gives_zero_and_groups_never_share_a_state():
    returns = torch.tensor([3.0, -1.0, 7.0])
    assert step_advantages(returns, torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), mode="mean_norm").tolist() == [
        0,
        0,
        0,
    ]
    assert step_advantages(returns, torch.tensor([4, 4, 4]), torch.tensor([0, 1, 2]), mode="mean_norm").tolist() == [
        0,
        0,
        0,
    ]
    assert step_advantages(returns, torch.tensor([4, 4, 2]), torch.tensor([0, 0, 0]), mode="mean_norm").tolist() == [
        2,
        -2,
        0,
    ]
    assert step_advantages(returns[:0], torch.empty(0).long(), torch.empty(0).long(), mode="mean_norm").shape == (0,)


# On batches


@pytest.fixture
def batch():
    return with_states(make_batch(make_episodes(), reward="return"))


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_credit_is_the_formula_by_hand(batch, mode):
    config = GiGPOConfig(weight=0.7, gamma=0.9, mode=mode, grpo=GRPOConfig(std=mode == "mean_std_norm"))
    credit = gigpo.credit(batch, config)
    keys, returns = [], []
    for e, n in enumerate(batch.turn_counts.tolist()):
        for k in range(n):
            keys.append((int(batch.group_index[e]), int(batch.anchors[e, k])))
            returns.append(sum(0.9 ** (u - k) * float(batch.turn_rewards[e, u]) for u in range(k, n)))
    step = steps_by_hand(returns, keys, mode == "mean_std_norm")
    assert np.abs(step).max() > 0.1 and (step == 0).any()
    want = grpo.turn_advantages(batch, config.grpo)[batch.turn_mask].numpy() + 0.7 * step
    mask = batch.turn_mask
    np.testing.assert_allclose(credit.turns["step_return"][mask].numpy(), returns, atol=1e-12)
    np.testing.assert_allclose(credit.turns["step_advantage"][mask].numpy(), step, atol=1e-9)
    np.testing.assert_allclose(credit.turns["turn_advantage"][mask].numpy(), want, atol=1e-9)
    assert torch.equal(credit.advantages, batch.to_tokens(credit.turns["turn_advantage"]))
    assert all(bool((value[~mask] == 0).all()) for value in credit.turns.values())


def test_the_turn_that_did_better_from_a_state_is_credited_more():
    episodes = [play(0, "hall", "cellar"), play(0, "hall", "kitchen"), play(0, "hall")]
    batch = make_batch(episodes, layout="turn").with_(
        outcome=torch.tensor([0.0, 1, 1]),
        reward=torch.tensor([0.0, 1, 1]).double(),
        turn_rewards=torch.tensor([[0.0, 0], [0, 1], [1, 0]]).double(),
        anchors=gigpo.anchors(episodes),
    )
    step = gigpo.credit(batch, GiGPOConfig(mode="mean_norm")).turns["step_advantage"]
    mean = (0 + 0.95 + 1) / 3
    np.testing.assert_allclose(step.numpy(), [[-mean, 0], [0.95 - mean, 0], [1 - mean, 0]], atol=1e-12)


def test_rows_that_repeat_a_turn_count_once_where_the_released_code_counts_copies_too(batch):
    rows = with_states(make_batch(make_episodes(), reward="return", layout="turn"))
    copied = take_rows(rows, [*range(len(rows.input_ids)), 0, 0, 1])
    want = gigpo.credit(batch).turns["step_advantage"]
    torch.testing.assert_close(gigpo.credit(copied).turns["step_advantage"], want, rtol=0, atol=1e-12)
    tensors = [t[batch.turn_mask] for t in (gigpo.credit(batch).turns["step_return"], batch.anchors)]
    groups = batch.group_index[:, None].expand(batch.turn_mask.shape)[batch.turn_mask]
    faulty = step_advantages(*(torch.cat([t, t[[0, 0, 1]]]) for t in (*tensors, groups)), mode="mean_std_norm")
    assert (faulty[: len(groups)] - want[batch.turn_mask]).abs().max() > 0.01


def test_equal_returns_are_not_told_apart_by_rounding():
    # The same rewards in another order: single precision adds them up to .70000005 and .7, which over eps is not small.
    episodes = [play(0, "hall", "x", "y"), play(0, "hall", "z", "z")]
    earned = torch.tensor([[0.1, 0.2, 0.4], [0.2, 0.1, 0.4]])
    batch = as_dtype(make_batch(episodes, layout="turn"), torch.float32).with_(
        anchors=gigpo.anchors(episodes), turn_rewards=earned
    )
    single = discounted_returns(earned, torch.ones(2, 3).bool(), 1.0)[:, 0]
    residue = step_advantages(single, torch.zeros(2).long(), torch.zeros(2).long(), mode="mean_std_norm")
    assert residue.abs().max() > 1e-2
    assert gigpo.credit(batch, GiGPOConfig(gamma=1.0)).turns["step_advantage"][:, 0].abs().max() < 1e-6


@pytest.mark.parametrize("name", ["anchors", "turn_rewards"])
def test_a_batch_without_states_or_rewards_of_turns_is_refused(batch, name):
    with pytest.raises(WorkbenchError, match=f"GiGPO: the batch has no {name}"):
        gigpo.credit(batch.with_(**{name: None}))


def test_a_reward_that_is_not_finite_is_refused(batch):
    rewards = batch.turn_rewards.clone()
    rewards[0, 0] = float("inf")
    with pytest.raises(WorkbenchError, match="turn's reward is not finite"):
        gigpo.credit(batch.with_(turn_rewards=rewards))


@pytest.mark.parametrize("wrong", [{"mode": "mean"}, {"weight": -1.0}, {"gamma": 1.1}, {"weight": float("inf")}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(WorkbenchError, match="GiGPO"):
        GiGPOConfig(**wrong)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(WorkbenchError, match="discounted_returns"):
        discounted_returns(torch.zeros(2, 3), torch.ones(3, 2).bool(), 0.9)
    with pytest.raises(WorkbenchError, match="step_advantages"):
        step_advantages(torch.zeros(2), torch.zeros(3).long(), torch.zeros(2).long(), mode="mean_norm")
