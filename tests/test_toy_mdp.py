"""A tabular walk with a known value of every state, and the ideal teacher: the same policy conditioned on success.

The bound of .95 holds for policies whose choices differ between states, as here. With a fair coin in every state and a
value of .4 at the start the mean rank correlation is about .90: the logistic recursion is a limit for rare success.
"""

import numpy as np
import pytest
import torch

from workbench.credit import agent_opsd
from workbench.credit.agent_opsd import AgentOPSDConfig
from workbench.records import Batch, Episode, Turn

STEPS, EPISODES = 14, 200


def rank(values):
    """Ranks, ties averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def spearman(one, other):
    one, other = rank(one), rank(other)
    return np.corrcoef(one, other)[0, 1] if one.std() and other.std() else None


@pytest.fixture(scope="module", params=[2, 4, 6])
def walk(request):
    """Random policy up[t, x], and V[t, x] of ending at the goal or higher after STEPS deterministic moves of +-1."""
    goal = request.param
    rng = np.random.default_rng(0)
    width = 2 * STEPS + 1
    up = rng.uniform(0.1, 0.9, (STEPS, width))
    value = np.zeros((STEPS + 1, width))
    value[STEPS] = np.arange(-STEPS, STEPS + 1) >= goal
    for t in reversed(range(STEPS)):
        higher, lower = np.roll(value[t + 1], -1), np.roll(value[t + 1], 1)
        value[t] = up[t] * higher + (1 - up[t]) * lower
    episodes, advantages, gaps = [], [], {}
    for e in range(EPISODES):
        x, turns, true = STEPS, [], []
        context = np.array([1])
        for t in range(STEPS):
            step = 1 if rng.random() < up[t, x] else -1
            p = up[t, x] if step == 1 else 1 - up[t, x]
            q, v = value[t + 1, x + step], value[t, x]
            # Success-conditioned: pi+(a|s) = pi(a|s) Q / V. A dead end has no such policy; its evidence is cut at -8.
            gaps[e, t] = float(np.clip(np.log(q / v) if q > 0 and v > 0 else (-8.0 if v > 0 else 0.0), -8, 8))
            true.append(q - v)
            turns.append(Turn(context, [2 + (step == 1)], [np.log(p)]))
            context = np.concatenate([context, [2 + (step == 1)], [4]])
            x += step
        won = int(x - STEPS >= goal)
        episodes.append(Episode(tuple(turns), "walk", 0, e, won, float(won)))
        advantages.append(true)
    batch = Batch.from_episodes(episodes, layout="episode")
    old = batch.old_logprobs.double()
    table = torch.tensor([[gaps[e, t] for t in range(STEPS)] for e in range(EPISODES)], dtype=torch.float64)
    batch = batch.with_(old_logprobs=old, reward=batch.reward.double())
    teacher = (old + batch.to_tokens(table)).clamp(max=0)
    return batch.with_(teacher_logprobs=teacher), np.array(advantages), value[0, STEPS]


def mean_rank_correlation(credit, truth):
    found = [c for c in map(spearman, credit, truth) if c is not None]
    assert len(found) > 0.8 * EPISODES
    return float(np.mean(found))


def test_the_walk_is_what_it_claims(walk):
    batch, truth, value = walk
    assert 0.15 < value < 0.6
    assert abs(batch.outcome.mean().item() - value) < 0.1
    np.testing.assert_allclose(value + truth.sum(1), batch.outcome, atol=1e-12)


def test_revisions_rank_turns_as_the_true_advantages_do(walk):
    batch, truth, _ = walk
    found = {}
    for gamma in (1.0, 0.95, 0.8):
        turns = agent_opsd.credit(batch, AgentOPSDConfig(gamma=gamma)).turns
        found[gamma] = mean_rank_correlation(turns["revision"].numpy(), truth)
    raw = mean_rank_correlation(agent_opsd.credit(batch).turns["evidence"].numpy(), truth)
    assert found[1.0] > 0.95
    assert found[1.0] > found[0.95] > found[0.8]
    assert found[1.0] > raw


def test_the_exact_posterior_is_multiplicative(walk):
    batch, truth, value = walk
    evidence = agent_opsd.credit(batch).turns["evidence"].numpy()
    beliefs = value * np.exp(np.cumsum(np.pad(evidence, ((0, 0), (1, 0))), 1))
    assert mean_rank_correlation(np.diff(beliefs).round(12), truth.round(12)) > 0.995
    # Where no dead end was cut, the exact revision is the true advantage itself.
    alive = (evidence > -8).all(1)
    np.testing.assert_allclose(np.diff(beliefs)[alive], truth[alive], atol=1e-6)
