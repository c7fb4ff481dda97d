"""The walk on a line, whose values are known, and what beliefs say in it under the ideal teacher.

The bound of .95 holds for policies whose choices differ between states, as here. With a fair coin in every state and a
value of .4 at the start the mean rank correlation is about .90: the logistic recursion is a limit for rare success.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from workbench import toy_world
from workbench.credit import agent_opsd
from workbench.credit.agent_opsd import AgentOPSDConfig
from workbench.errors import WorkbenchError
from workbench.figures import toy_world as figure
from workbench.records import Batch, Episode, Turn
from workbench.toy_world import DOWN, UP, Walk, random_walk, rank_correlation, sample, with_success_rate

EPISODES = 200


@pytest.fixture(scope="module", params=[(0.47, 0), (0.29, 1), (0.11, 2)], ids="V0={0[0]}".format)
def world(request):
    rate, seed = request.param
    walk = with_success_rate(random_walk(goal=2, seed=seed), rate)
    return walk, sample(walk, EPISODES, seed)


def as_batch(walk, played):
    """The same trajectories as recorded episodes of one group: a token for each move, and one for what is seen."""
    episodes = []
    for e in range(len(played.outcome)):
        context, turns = np.array([1]), []
        for action, logprob in zip(played.actions[e].tolist(), played.logprobs[e].tolist(), strict=True):
            turns.append(Turn(context, [2 + action], [logprob]))
            context = np.concatenate([context, [2 + action, 4]])
        won = int(played.outcome[e])
        episodes.append(Episode(tuple(turns), "walk", 0, e, won, float(won)))
    batch = Batch.from_episodes(episodes, layout="episode")
    old = batch.old_logprobs.double()
    teacher = (old + batch.to_tokens(played.evidence)).clamp(max=0)
    return batch.with_(old_logprobs=old, reward=batch.reward.double(), teacher_logprobs=teacher)


def mean_correlation(signal, played):
    found = rank_correlation(signal, played.advantage, played.turn_mask)
    found = found[torch.isfinite(found)]
    assert len(found) > 0.8 * EPISODES
    return float(found.mean())


# The world itself


def test_values_are_those_of_every_path():
    """A walk short enough to add up the probabilities of all its paths."""
    walk = random_walk(goal=1, steps=5, seed=3)
    chance = toy_world.policy(walk)
    won, by_first = 0.0, [0.0, 0.0]
    for path in itertools.product((DOWN, UP), repeat=5):
        x, p = 5, 1.0
        for t, action in enumerate(path):
            p *= chance[t, x, action].item()
            x += 1 if action == UP else -1
        won += p * (x - 5 >= 1)
        by_first[path[0]] += p * (x - 5 >= 1)
    assert toy_world.success_rate(walk) == pytest.approx(won, abs=1e-12)
    quality = toy_world.action_values(walk)[0, 5]
    np.testing.assert_allclose(quality * chance[0, 5], by_first, atol=1e-12)


def test_the_teacher_is_the_policy_of_those_who_succeed():
    walk = with_success_rate(random_walk(goal=2, steps=6, seed=1), 0.3)
    played, told = sample(walk, 20_000, seed=5), toy_world.teacher(walk)
    won = played.actions[played.outcome == 1]
    first = (won[:, 0] == UP).double().mean().item()
    assert first == pytest.approx(told[0, 6, UP].item(), abs=0.02)
    reached = {(t, x) for t in range(6) for x in range(6 - t, 7 + t, 2)}
    sums = torch.stack([told[t, x].sum() for t, x in reached])
    torch.testing.assert_close(sums, torch.ones_like(sums))
    # Where success is out of reach nobody is told anything, and what leads there is never done.
    assert torch.equal(told[5, 2], toy_world.policy(walk)[5, 2]) and told[5, 7, DOWN] == 0


def test_the_walk_is_what_it_claims(world):
    walk, played = world
    value = toy_world.success_rate(walk)
    assert played.prior.tolist() == [played.outcome.mean().item()] * EPISODES
    assert played.prior[0].item() == pytest.approx(value, abs=0.1)
    torch.testing.assert_close(value + played.advantage.sum(1), played.outcome, rtol=0, atol=1e-12)
    took = toy_world.policy(walk)[0, walk.steps, played.actions[:, 0]]
    torch.testing.assert_close(played.logprobs[:, 0].exp(), took)


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_a_policy_is_shifted_to_a_success_rate(rate):
    assert toy_world.success_rate(with_success_rate(random_walk(4, seed=1), rate)) == pytest.approx(rate, abs=1e-9)


def test_a_seed_fixes_the_walk_and_its_episodes():
    one, other = (sample(random_walk(2, seed=4), 20, seed=9) for _ in range(2))
    assert torch.equal(one.evidence, other.evidence) and torch.equal(one.actions, other.actions)
    assert not torch.equal(one.actions, sample(random_walk(2, seed=4), 20, seed=10).actions)


def test_rank_correlation_is_spearmans():
    one, other = torch.tensor([[1.0, 2, 3, 4, 9]]), torch.tensor([[1.0, 3, 2, 4, -5]])
    mask = torch.tensor([[True, True, True, True, False]])
    assert rank_correlation(one, other, mask).tolist() == pytest.approx([0.8])
    assert rank_correlation(one, -other, mask).tolist() == pytest.approx([-0.8])
    # Ties share their mean rank: ranks (1.5, 1.5, 3, 4) against (1, 3, 2, 4).
    tied = rank_correlation(torch.tensor([[1.0, 1 + 1e-14, 3, 4, 0]], dtype=torch.float64), other, mask)
    assert tied.item() == pytest.approx(np.corrcoef([1.5, 1.5, 3, 4], [1, 3, 2, 4])[0, 1])
    assert math.isnan(rank_correlation(torch.ones(1, 5), other, mask).item())


def test_impossible_worlds_are_refused():
    for up, goal in ((torch.full((3, 6), 0.5), 1), (torch.ones(3, 7), 1), (torch.full((3, 7), 0.5), 4)):
        with pytest.raises(WorkbenchError, match="walk"):
            Walk(up, goal)
    with pytest.raises(WorkbenchError, match="success rate"):
        with_success_rate(random_walk(2), 1.0)
    with pytest.raises(WorkbenchError, match="at least one episode"):
        sample(random_walk(2), 0)


# What beliefs say in it


def test_revisions_rank_turns_as_the_true_advantages_do(world):
    walk, played = world
    batch, found = as_batch(walk, played), {}
    for gamma in (1.0, 0.95, 0.8):
        found[gamma] = mean_correlation(
            agent_opsd.credit(batch, AgentOPSDConfig(gamma=gamma)).turns["revision"], played
        )
    turns = agent_opsd.credit(batch).turns
    torch.testing.assert_close(turns["evidence"], played.evidence, rtol=0, atol=1e-6)
    assert found[1.0] > 0.95
    assert found[1.0] > found[0.95] > found[0.8]
    assert found[1.0] > mean_correlation(turns["evidence"], played)


def test_the_exact_posterior_is_multiplicative(world):
    walk, played = world
    revisions = toy_world.posterior_revisions(played.evidence, toy_world.success_rate(walk))
    assert mean_correlation(revisions, played) > 0.9995
    # Where no dead end was cut, the exact revision is the true advantage itself.
    alive = (played.evidence > -8).all(1)
    torch.testing.assert_close(revisions[alive], played.advantage[alive], rtol=0, atol=1e-9)


# The figure


@pytest.fixture(scope="module")
def measured():
    return figure.measure(rates=(0.1, 0.9), seeds=(0, 1, 2), episodes=60)


def test_every_rule_is_measured_at_every_rate_and_seed(measured):
    assert measured.height == 2 * 3 * len(figure.SHOWN) and set(measured["rule"]) == set(figure.SHOWN)
    means = {(r["rate"], r["rule"]): r for r in figure.summary(measured).to_dicts()}
    assert all(row["low"] <= row["mean"] <= row["high"] for row in means.values())
    assert all(means[rate, "posterior"]["low"] > 0.9995 for rate in (0.1, 0.9))
    assert all(means[rate, "gamma=1"]["low"] > 0.95 for rate in (0.1, 0.9))
    over = (means[0.1, "raw"]["mean"] + means[0.9, "raw"]["mean"]) / 2
    assert figure.overall(measured)["raw"] == pytest.approx(over)
    # Centring a sum's drift away takes the level away too, and the raw gap is as good only where success is common.
    assert means[0.1, "centred"]["high"] < means[0.1, "raw"]["low"] < 0.95 < means[0.9, "raw"]["low"]


def test_the_figure_shows_every_seed_and_says_its_scope(measured):
    fig = figure.agreement(measured)
    assert [t.name for t in fig.data if t.name and t.showlegend] == [label for label, _, _ in figure.SHOWN.values()]
    seeds = [t for t in fig.data if t.mode == "markers"]
    assert all(len(t.x) == 6 for t in seeds) and len(seeds) == 2 * len(figure.SHOWN)
    assert "deterministic" in fig.layout.meta["subtitle"] and "by construction" in fig.layout.meta["subtitle"]
    said = figure.sentences(measured)
    assert "success rates of 90 % and worse" in said[1] and "deterministic" in said[2]
