"""Known faults of the released AgentOPSD code (github ZethWang/AgentOPSD, read), each beside what is done here.

Every test writes the fault down in a few lines, shows what it does, and that ours differs from it in the direction that
the paper's text asks: its prior is the group's success rate, a trajectory has one advantage, and a turn counts once.
Everything but the fault is the same on both sides, so the released code's other choices (eps, gamma) play no part.
"""

import types

import numpy as np
import pytest
import torch
from make_batch import make_batch, make_episodes, make_gaps, take_rows

from workbench.credit import agent_opsd, grpo
from workbench.credit.agent_opsd import AgentOPSDConfig, reshape_turns
from workbench.credit.grpo import GRPOConfig
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer


def evidence_of(gaps, episode):
    """Sums of token gaps of an episode's turns, in nats."""
    return [gaps[e, k].sum() for e, k in sorted(gaps) if e == episode]


def reshaped(evidence, prior, advantage):
    """The paper's recursion over the given rows of one trajectory, at the default settings."""
    evidence, start, advantage = (torch.tensor(v, dtype=torch.float64) for v in ([evidence], [prior], [advantage]))
    turns = reshape_turns(evidence, torch.ones_like(evidence, dtype=torch.bool), start, advantage)
    return {name: value[0] for name, value in turns.items()}


# The trainer ends in the middle of a name, and the teacher pass that it calls is defined elsewhere


RELEASED = """
class Trainer:
    def fit(self, batch):
        batch["teacher"] = self._compute_teacher_log_probs(batch)
        return actor_outpu"""


def test_the_released_trainer_cannot_run_and_ours_trains_with_a_teacher(tmp_path):
    module = types.ModuleType("released")
    exec(RELEASED, module.__dict__)
    with pytest.raises(AttributeError, match="_compute_teacher_log_probs"):
        module.Trainer().fit({})
    module.Trainer._compute_teacher_log_probs = lambda self, batch: None
    with pytest.raises(NameError, match="actor_outpu"):
        module.Trainer().fit({})

    folder = RunFolder.create(tmp_path, "run", {"name": "run"})
    small = {"steps": 1, "tasks_per_step": 1, "group_size": 2, "max_turns": 2, "live_episodes": 2, "eval_games": 1}
    small["eval_panels"] = "heldout"
    trainer = Trainer(TrainConfig(method="agent_opsd", **small), folder, lambda message: None)
    trainer.run()
    turns = folder.read("turns")
    assert trainer.updates == 1
    # The teacher is the same weights after a skill text: it must differ from the student, token by token.
    gaps = np.concatenate([np.asarray(gap) for gap in turns["gap"]])
    assert np.isfinite(gaps).all() and (np.abs(gaps) > 1e-3).mean() > 0.2
    assert (turns["revision"].abs() > 1e-6).any() and turns["evidence"].null_count() == 0


def test_without_the_teacher_pass_there_is_no_credit_rather_than_plain_grpo():
    """Log-probs of the student in the teacher's place would be silent: no evidence, and every turn the same weight."""
    batch = make_batch(make_episodes())
    silent = agent_opsd.credit(batch.with_(teacher_logprobs=batch.old_logprobs))
    assert torch.equal(silent.advantages, grpo.credit(batch).advantages)
    with pytest.raises(WorkbenchError, match="run the teacher pass first"):
        agent_opsd.credit(batch)


# The prior is the group's mean of raw rewards, 0 or 10, clamped to [.0001, .9999]


def released_prior(batch):
    means = [batch.reward[batch.group_index == g].mean() for g in batch.group_index]
    return torch.stack(means).clamp(1e-4, 1 - 1e-4)


@pytest.mark.parametrize("won", range(9))
def test_the_prior_is_the_success_rate_of_the_group(won):
    episodes = make_episodes([(0, int(i < won), (2, 3, 1)) for i in range(8)])
    batch = make_batch(episodes, make_gaps(episodes), reward="return")
    assert batch.reward.max() == (10 if won else 0)
    assert agent_opsd.prior(batch).tolist() == [won / 8] * 8
    first = agent_opsd.credit(batch).turns["belief_before"][:, 0]
    np.testing.assert_allclose(first, np.clip(won / 8, 1e-4, 1 - 1e-4), rtol=1e-9)
    np.testing.assert_allclose(released_prior(batch), 0.9999 if won else 0.0001, rtol=1e-12)


def test_a_belief_that_starts_saturated_hardly_moves():
    """One success in eight, and evidence within two nats: ours moves the belief, .9999 leaves it where it is."""
    episodes = make_episodes([(0, int(i == 0), (2, 3, 1, 2)) for i in range(8)])
    gaps = make_gaps(episodes)
    batch = make_batch(episodes, gaps, reward="return")
    ours, scale = agent_opsd.credit(batch).turns, agent_opsd.credit(batch.with_(reward=batch.outcome.double())).turns
    for name, value in ours.items():
        torch.testing.assert_close(value, scale[name], rtol=1e-5, atol=1e-6, msg=f"{name} hangs on the reward's scale")
    for e in range(8):
        theirs = reshaped(evidence_of(gaps, e), released_prior(batch)[e].item(), ours["turn_advantage"][e, 0].item())
        assert theirs["revision"].abs().max() < 1e-2 < ours["revision"][e].abs().max()
        assert bool((theirs["belief"] > 0.99).all())


# Rows that are appended to fill the batch are copies, and count again


@pytest.fixture
def episodes():
    return make_episodes()


def test_a_copied_row_leaves_every_turn_as_it_was(episodes):
    gaps = make_gaps(episodes)
    rows = make_batch(episodes, gaps, layout="turn")
    want = agent_opsd.credit(rows).turns
    copied = [0, 0, 5, 9]
    got = agent_opsd.credit(take_rows(rows, [*range(len(rows.input_ids)), *copied])).turns
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)

    # The released recursion walks over all rows of a trajectory in order of their turn: the first turn thrice.
    evidence, advantage = evidence_of(gaps, 0), grpo.turn_advantages(rows, GRPOConfig())[0, 0].item()
    once = reshaped(evidence, 0.5, advantage)
    torch.testing.assert_close(once["z"], want["z"][0, : len(evidence)])
    twice = reshaped([evidence[0]] * 3 + evidence[1:], 0.5, advantage)
    assert (twice["z"][2:] - once["z"]).abs().max() > 0.1, "the fault would move z"
    assert (twice["belief"][-1] - once["belief"][-1]).abs() > 0.01, "and count the evidence again"


def test_a_copied_row_leaves_the_groups_advantages_as_they_were(episodes):
    rows = make_batch(episodes, layout="turn")
    more = take_rows(rows, [*range(len(rows.input_ids)), 0, 0, 0])
    for per in ("trajectory", "turn"):
        want, got = (grpo.turn_advantages(b, GRPOConfig(per=per)) for b in (rows, more))
        assert torch.equal(got, want)
    assert not np.allclose(released_advantages(more)[: len(rows.input_ids)], released_advantages(rows))


# An advantage for each row, from the mean and sample deviation over all rows of the group, after a penalty of the row


def released_advantages(rows, invalid=(), penalty=0.1):
    """(B,) of a batch with a row a turn; invalid: rows whose action was not valid."""
    groups, reward = rows.group_index[rows.episode_index], rows.reward[rows.episode_index].clone()
    reward[list(invalid)] -= penalty
    out = torch.zeros_like(reward)
    for g in groups.unique():
        mine = reward[groups == g]
        out[groups == g] = (mine - mine.mean()) / (mine.std() + 1e-6)
    return out


def test_a_group_without_a_success_gets_no_advantage_however_many_actions_were_invalid():
    episodes = make_episodes([(0, 0, (1,) * 5) for _ in range(4)])
    rows = make_batch(episodes, make_gaps(episodes), layout="turn", reward="return")
    theirs = released_advantages(rows, invalid=[2, 11])
    assert theirs.abs().max() > 1 and theirs[0] > 0.2, "a tenth of a reward becomes a whole deviation"
    for credit in (grpo.credit(rows), agent_opsd.credit(rows)):
        assert bool((credit.advantages == 0).all())


def test_long_trajectories_do_not_weigh_more():
    """One success in four. The longer the failures, the nearer to zero the rows' mean, the larger the success looms."""
    ours, theirs = [], []
    for length in (2, 10, 40):
        episodes = make_episodes([(0, 1, (1, 1))] + [(0, 0, (1,) * length)] * 3)
        rows = make_batch(episodes, layout="turn")
        ours.append(grpo.turn_advantages(rows, GRPOConfig())[:, 0])
        theirs.append(released_advantages(rows)[0].item())
        by_row = grpo.turn_advantages(rows, GRPOConfig(per="turn"))[0, 0].item()
        assert by_row == pytest.approx(theirs[-1], rel=1e-6), "the fault is an option: per='turn'"
    assert all(torch.equal(advantage, ours[0]) for advantage in ours[1:])
    torch.testing.assert_close(ours[0], torch.tensor([1.5, -0.5, -0.5, -0.5]).double(), rtol=1e-5, atol=0)
    assert theirs[0] == pytest.approx(1.5, rel=0.1) and theirs[0] < theirs[1] / 2 < theirs[2] / 4


def test_a_trajectory_has_one_advantage_whose_sign_every_turn_keeps(episodes):
    rows = make_batch(episodes, make_gaps(episodes), layout="turn")
    first = (rows.episode_index == 0).nonzero()[:, 0].tolist()
    theirs = released_advantages(rows, invalid=first[1:2], penalty=1.0)[first]
    assert theirs.min() < 0 < theirs.max(), "the released rows of one success pull both ways"
    base = grpo.turn_advantages(rows, GRPOConfig())
    config = AgentOPSDConfig()
    for e, n in enumerate(rows.turn_counts.tolist()):
        assert len(base[e, :n].unique()) == 1
    ours = agent_opsd.credit(rows, config).turns["turn_advantage"]
    assert torch.equal(ours.sign(), base.sign())
    assert bool(((ours - base).abs() <= config.lam * config.band * base.abs() + 1e-12).all())
