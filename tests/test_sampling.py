"""How many rollouts each group of a step gets: totals, bounds, where groups stop, and that draws stay in place."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_batch import make_batch, make_episodes

from workbench.budget import v0, v05
from workbench.budget.coba import CoBAConfig
from workbench.budget.dynamic_sampling import DynamicSamplingConfig
from workbench.budget.history import History, HistoryConfig
from workbench.budget.v0 import V0AllocationConfig
from workbench.budget.v05 import V05Config
from workbench.envs.base import Task
from workbench.errors import WorkbenchError
from workbench.methods import method
from workbench.records import Episode, Turn
from workbench.sampling import BUDGET, MORE, TRAIN, Dealer, budget_frame, check, draw

TURN = Turn([1], [2], [-0.5])
NOTHING = History()


def dealer(true, history=NOTHING, group_size=8, step=3, reward="outcome"):
    """A step over tasks of these true success rates; what a rollout comes to depends on its key alone."""
    tasks = [Task(f"t{i}", f"kind{i % 2}", "train") for i in range(len(true))]
    waves, rate = [], dict(zip((t.id for t in tasks), true, strict=True))

    def play(jobs):
        waves.append(list(jobs))
        wins = [int(np.random.default_rng(list(job.key)).random() < rate[job.task.id]) for job in jobs]
        return [
            Episode((TURN,), j.task.id, j.group, 0, won, float(won), kind=j.task.kind)
            for j, won in zip(jobs, wins, strict=True)
        ]

    made = Dealer(0, step, group_size, reward, lambda batch: tasks, play, lambda t: t.kind, history, lambda line: None)
    return made, waves


def known(rates, steps=3):
    """A history in which task i was won at about rates[i]."""
    history = History(HistoryConfig(memory=1.0, strength=1e-6))
    for _ in range(steps):
        history = history.after(
            (f"t{i}", f"kind{i % 2}", int(n < round(100 * rate))) for i, rate in enumerate(rates) for n in range(100)
        )
    return history


def sizes(drawn):
    return [row["rollouts"] for row in drawn.budget]


rates = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(2, 9), st.data())
def test_coba_spends_the_step_exactly_within_its_bounds(true, group_size, data):
    lo, hi = data.draw(st.integers(0, group_size)), data.draw(st.integers(group_size, 20))
    d, waves = dealer(true, known(true), group_size)
    drawn = draw(CoBAConfig(lo=lo, hi=hi), d)
    assert sum(sizes(drawn)) == len(drawn.kept) == len(true) * group_size
    assert all(lo <= n <= hi for n in sizes(drawn)) and drawn.batches == len(waves) == 1
    assert [e.group for e in drawn.kept] == sorted(e.group for e in drawn.kept)
    for row in drawn.budget:
        own = [e.outcome for e in drawn.kept if e.group == row["group"]]
        assert len(own) == row["rollouts"] and row["why"] == "allocated"
        assert row["success"] == (np.mean(own) if own else None)
    assert budget_frame(drawn.budget).schema == BUDGET


@settings(max_examples=25, deadline=None)
@given(rates, st.integers(2, 9), st.data())
def test_v0_spends_the_step_exactly_by_the_values_of_its_tasks(true, group_size, data):
    lo, hi = data.draw(st.integers(1, group_size)), data.draw(st.integers(group_size, 20))
    config = V0AllocationConfig(lo=lo, hi=hi)
    foreseen = {f"t{i}": rate for i, rate in enumerate(true)}
    drawn = draw(config, dealer(true, replace(known(true[::-1]), values=foreseen), group_size)[0])
    assert sizes(drawn) == v0.allocate(true, len(true) * group_size, lo=lo, hi=hi)
    assert [r["rate"] for r in drawn.budget] == true and {r["why"] for r in drawn.budget} == {"allocated"}
    assert budget_frame(drawn.budget)["alpha"].null_count() == len(true)
    equal = draw(config, dealer(true, known(true), group_size)[0])
    assert set(sizes(equal)) == {group_size} and {r["why"] for r in equal.budget} == {"equal"}


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(1, 5), st.integers(0, 12), st.integers(0, 3))
def test_v05_stays_within_the_step_and_says_why_each_group_stopped(true, first, room, spare):
    config, group_size = V05Config(first=first, most=first + room), first + spare
    d, waves = dealer(true, known([0.5] * len(true)), group_size)
    drawn = draw(config, d)
    assert len(drawn.kept) == len(drawn.played) == sum(map(len, waves)) <= len(true) * group_size
    left = len(true) * group_size - len(drawn.kept)
    assert [len(w) for w in waves[:1]] == [first * len(true)] and all(len(w) <= len(true) for w in waves[1:])
    for row in drawn.budget:
        own = [e.outcome for e in drawn.kept if e.group == row["group"]]
        assert first <= len(own) == row["rollouts"] <= config.most
        mean, prior = 2 * np.mean(own) - 1, 2 * row["rate"] - 1
        fused = v05.fuse(*(torch.tensor([x], dtype=torch.float64) for x in (prior, mean)), torch.tensor([len(own)]))
        assert row["baseline"] == fused.baseline.item()
        more = bool(v05.wants_more(fused.bias2, torch.tensor([len(own)]), config))
        assert row["why"] == ("budget" if more else "most" if len(own) == config.most else "cost")
        assert not more or left == 0
    # Every wave gives one more to groups that wanted it, and to none that had stopped.
    alive = set(range(len(true)))
    for wave in waves[1:]:
        groups = {job.group for job in wave}
        assert len(groups) == len(wave)
        if len(waves) > 2 and left:
            assert groups <= alive
            alive = groups


def test_groups_that_are_as_expected_stop_first_and_leave_the_rest_to_others():
    d, _ = dealer([0.0, 0.0, 0.0, 1.0], known([0.01, 0.01, 0.01, 0.01]))
    drawn = draw(V05Config(), d)
    assert sizes(drawn) == [4, 4, 4, 16] and [r["why"] for r in drawn.budget] == ["cost"] * 3 + ["most"]
    assert sum(sizes(drawn)) < 4 * 8
    short, _ = dealer([1.0, 1.0], known([0.01, 0.01]), group_size=5)
    assert sizes(draw(V05Config(), short)) == [5, 5]


def test_who_wants_most_is_served_first_when_few_are_left():
    f = torch.float64
    prior, mean = torch.tensor([0.0, 0.0, 0.0], dtype=f), torch.tensor([0.5, 1.0, 0.9], dtype=f)
    more, why = v05.next_wave(prior, mean, torch.tensor([4, 4, 4]), 1)
    assert more == [1] and why == ["cost", "", "budget"]
    assert v05.next_wave(prior, mean, torch.tensor([4, 16, 4]), 9) == ([2], ["cost", "most", ""])
    assert v05.next_wave(prior, mean, torch.tensor([2, 4, 4]), 1)[0] == [0], "the first rollouts before all others"
    assert v05.next_wave(prior, mean, torch.tensor([4, 4, 4]), 0)[0] == []


@pytest.mark.parametrize("sampling", [CoBAConfig(), V05Config()])
def test_draws_depend_on_step_group_and_member_alone(sampling):
    true = [0.1, 0.5, 0.9, 0.3]
    plain, _ = dealer(true)
    equal = {job.key for job in jobs_of(DynamicSamplingConfig(max_batches=1), plain)}
    one, other = (dealer(true, known([0.9, 0.1, 0.5, 0.2])) for _ in range(2))
    drawn, again = draw(sampling, one[0]), draw(sampling, other[0])
    assert [e.outcome for e in drawn.kept] == [e.outcome for e in again.kept]
    keys = [job.key for wave in one[1] for job in wave]
    assert len(set(keys)) == len(keys) and max(sizes(drawn)) > 8
    assert {k for k in keys if k[2] == TRAIN} < equal and any(k[2] == MORE for k in keys)


def jobs_of(sampling, d):
    made = []

    def play(jobs):
        made.extend(jobs)
        return d.play(jobs)

    draw(sampling, Dealer(**{**d.__dict__, "play": play}))
    return made


def test_before_anything_is_known_coba_draws_equal_groups_and_v05_expects_one_half():
    d, _ = dealer([0.2, 0.8])
    first = draw(CoBAConfig(), d)
    assert sizes(first) == [8, 8] and {r["why"] for r in first.budget} == {"equal"}
    assert {r["rate"] for r in draw(V05Config(), d).budget} == {0.5}


def test_what_cannot_be_drawn_is_refused_in_one_line():
    for sampling, given_, said in (
        (CoBAConfig(), (8, 1, "outcome"), "8 tasks of 2 to 128 rollouts take 16 to 1024 in all, but .* make 8"),
        (CoBAConfig(lo=1, hi=4), (8, 5, "outcome"), "set lo, hi or group_size"),
        (V0AllocationConfig(), (8, 1, "outcome"), "V0: 8 tasks of 2 to 128 rollouts .* make 8"),
        (V05Config(), (8, 1, "outcome"), "every task gets first = 4 rollouts, but group_size allows 1"),
        (V05Config(), (8, 8, "return"), "reward must be outcome, got 'return'"),
    ):
        with pytest.raises(WorkbenchError, match=said) as caught:
            check(sampling, *given_)
        assert "\n" not in str(caught.value)
    check(CoBAConfig(), 8, 2, "return")
    check(DynamicSamplingConfig(), 8, 1, "return")
    check(method("v05", dynamic=False).sampling, 8, 1, "outcome")


# The history


def test_a_rate_leans_on_the_kind_and_on_all_the_less_the_more_is_known():
    history = History(HistoryConfig(strength=4.0))
    assert history.rate("t0", "a") == 0.5
    history = history.after([("t0", "a", 1)] * 8 + [("t1", "b", 0)] * 8)
    everything = (8 + 4 * 0.5) / (16 + 4)
    kind = (8 + 4 * everything) / (8 + 4)
    assert history.rate("t0", "a") == pytest.approx((8 + 4 * kind) / 12)
    assert history.rate("new", "a") == pytest.approx(kind) and history.rate("new", "c") == pytest.approx(everything)
    assert history.success == (0.5,)
    assert History(HistoryConfig(prior="half"), history.success, history.counts).rate("t0", "a") == 0.5


def test_old_steps_fade_and_the_success_of_a_step_counts_tasks_alike():
    history = History(HistoryConfig(memory=0.5)).after([("t", "a", 1)] * 4).after([("t", "a", 0)] * 4 + [("u", "a", 1)])
    assert history.counts["task t"] == (2.0, 6.0) and history.success == (1.0, 0.5)
    forgets = History(HistoryConfig(memory=0.0)).after([("t", "a", 1)] * 4).after([("t", "a", 0)] * 4)
    assert forgets.counts["all"] == (0.0, 4.0)
    again = History(history.config).with_state(history.state_dict())
    assert again == history


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("kl"), st.integers(0, 1)), min_size=1)))
def test_rates_are_never_certain(steps):
    history = History()
    for played in steps:
        history = history.after(played)
    for task in "abcd":
        assert 0 < history.rate(task, "k") < 1
    assert len(history.success) == len(steps) and all(0 <= s <= 1 for s in history.success)


def test_bad_histories_are_refused():
    for wrong, said in (
        ({"memory": 1.5}, "memory must lie in"), ({"strength": 0.0}, "strength must be"),
        ({"strength": math.inf}, "strength must be"), ({"prior": "halves"}, "did you mean 'half'"),
    ):  # fmt: skip
        with pytest.raises(WorkbenchError, match=said):
            HistoryConfig(**wrong)
    with pytest.raises(WorkbenchError, match="V0: bounds must be 1 <= lo <= hi, got 0 and 4"):
        V0AllocationConfig(lo=0, hi=4)
    with pytest.raises(WorkbenchError, match="at least one rollout"):
        History().after([])
    with pytest.raises(WorkbenchError, match="0 or 1, got 2 of task t"):
        History().after([("t", "k", 2)])


# Credit in groups of any size


def test_v05_credits_outcomes_against_the_fused_baseline_in_ragged_groups():
    spec = [(0, 1, (2, 1)), (1, 1, (3,)), (0, 1, (1,)), (2, 0, (2,)), (0, 0, (1, 1)), (0, 1, (2,))]
    batch = make_batch(make_episodes(spec))
    rate = torch.tensor([0.6, 0.1, 0.05], dtype=torch.float64)[batch.group_index]
    turns = v05.credit(batch.with_(prior_rate=rate)).turns["turn_advantage"]
    # Three of four at an expected .6: within the noise. One of one at an expected .1: contradicted.
    bias2 = 1.8**2 - 1
    weight = bias2 / (bias2 + 1)
    alone = 1 - (weight * 1 + (1 - weight) * -0.8)
    want = [1 - 0.2, alone, 1 - 0.2, -1 + 0.9, -1 - 0.2, 1 - 0.2]
    assert turns[:, 0].tolist() == pytest.approx(want) and not turns[~batch.turn_mask].any()
    with pytest.raises(WorkbenchError, match="no prior_rate"):
        v05.credit(batch)
    with pytest.raises(WorkbenchError, match=r"a success rate must lie in \[0, 1\]"):
        v05.credit(batch.with_(prior_rate=rate + 1))
