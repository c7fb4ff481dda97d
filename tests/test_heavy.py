"""Heavy thinking: when a summariser beats a vote, and the same on games at an equal number of rollouts."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rollout import Corridor

from workbench import heavy
from workbench.cli import main
from workbench.envs.base import EnvBatch, Task
from workbench.errors import WorkbenchError
from workbench.prompts import Chat, PromptStyle
from workbench.rollout import Limits
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

ANSWERS = st.lists(st.integers(0, 4), min_size=1, max_size=9)


def rng(seed=0):
    return np.random.default_rng(seed)


def planted(n=200):
    """Questions whose right answer, 1, is given by two of seven attempts and a wrong one, 0, by three."""
    return [[0, 0, 0, 1, 1, 2, 3] for _ in range(n)]


def test_only_a_summariser_that_can_check_answers_beats_the_vote_where_the_right_one_is_in_the_minority():
    checks = lambda shown, memory: next((a for a in shown if a == 1), shown[0])  # noqa: E731
    counts = lambda shown, memory: heavy.majority(sorted(shown))  # noqa: E731
    first = lambda shown, memory: shown[0]  # noqa: E731

    def right(summarise):
        return np.mean([heavy.think(a, summarise, rng(i)) == 1 for i, a in enumerate(planted())])

    vote = np.mean([heavy.majority(a) == 1 for a in planted()])
    assert vote == 0 and right(checks) == 1 and right(counts) == 0
    assert abs(right(first) - 2 / 7) < 0.1, "one that takes what it reads first is one attempt drawn at random"


@given(ANSWERS, st.integers(0, 100), st.integers(1, 3), st.integers(1, 4))
def test_the_summariser_sees_the_answers_in_shuffled_orders_and_its_own_memory(answers, seed, rounds, orders):
    seen = []

    def summarise(shown, memory):
        seen.append((tuple(shown), tuple(memory)))
        return max(shown)

    assert heavy.think(answers, summarise, rng(seed), rounds, orders) == max(answers)
    assert len(seen) == rounds * orders and all(sorted(shown) == sorted(answers) for shown, _ in seen)
    assert [len(memory) for _, memory in seen] == [r for r in range(rounds) for _ in range(orders)]
    best = heavy.think(answers, lambda shown, memory: max(shown), rng(seed), rounds, orders)
    assert best == max(answers)


def test_orders_differ_from_the_given_one():
    shown = set()
    heavy.think(list(range(6)), lambda answers, memory: shown.add(tuple(answers)) or 0, rng(), 1, 20)
    assert len(shown) > 15


@given(ANSWERS)
def test_a_vote_takes_the_most_frequent_and_of_equals_the_earliest(answers):
    won = heavy.majority(answers)
    most = max(map(answers.count, answers))
    assert won == next(a for a in answers if answers.count(a) == most)


@pytest.fixture
def games(policy):
    chat = Chat(policy.tokenizer, PromptStyle())
    tasks = [Task(name, "corridor", "heldout") for name in ("a", "b", "c")]
    envs = EnvBatch([Corridor() for _ in range(4)])

    def play(**options):
        return heavy.compare(policy, chat, envs, tasks, Limits(3, 4, 400, 2), (5,), **options)

    return play


def test_arms_have_equal_rollouts_and_are_the_same_for_the_same_key(games, monkeypatch):
    calls = []
    real = heavy.play

    def counting(policy, chat, envs, jobs, limits, temperature, teacher=None):
        calls.append((len(jobs), teacher))
        return real(policy, chat, envs, jobs, limits, temperature, teacher)

    monkeypatch.setattr(heavy, "play", counting)
    frame = games(attempts=3, rounds=2)
    assert [n for n, _ in calls] == [3 * 5, 3, 3], "a vote of five; three attempts and two that read them"
    note = calls[1][1].bank.text("corridor", "", "b")
    assert note.count("\n") == 5 and "3. " in note and "won" not in note
    assert "Summary 1. " in calls[2][1].bank.text("corridor", "", "b")
    assert frame["task"].to_list() == ["a", "b", "c"]
    for row in frame.iter_rows(named=True):
        assert row["vote"] in (0, 1) and row["heavy"] in (0, 1) and row["vote"] <= row["any"] and row["single"] <= 1
        assert 1 <= row["plans"] <= 5 and row["heavy_read"] > row["vote_read"] // 2 > 0
    assert frame.equals(games(attempts=3, rounds=2))
    assert not frame.equals(games(attempts=4, rounds=1))


def test_a_policy_that_always_wins_wins_in_every_arm(policy, monkeypatch):
    chat = Chat(policy.tokenizer, PromptStyle())
    monkeypatch.setattr(chat.style.__class__, "command", lambda self, response, admissible: "go")
    envs = EnvBatch([Corridor() for _ in range(2)])
    frame = heavy.compare(policy, chat, envs, [Task("a", "corridor", "heldout")], Limits(4, 3, 400), (1,))
    assert frame.select("single", "vote", "heavy", "any", "plans").row(0) == (1.0, 1, 1, 1, 1)


def test_the_summary_counts_pairs():
    frame = pl.DataFrame({
        "vote": [0, 0, 1, 1], "heavy": [1, 1, 1, 0], "single": [0.5] * 4, "any": [1] * 4, "plans": [2] * 4,
        "vote_tokens": [10] * 4, "heavy_tokens": [12] * 4, "vote_read": [50] * 4, "heavy_read": [90] * 4,
    })  # fmt: skip
    s = heavy.summary(frame)
    assert (s["vote"], s["heavy"], s["gain"], s["games"]) == (0.5, 0.75, 0.25, 4)
    spread = np.std([1, 1, 0, -1], ddof=1) / 2
    assert s["gain_high"] - s["gain"] == pytest.approx(1.959964 * spread)
    assert "no difference is shown" in heavy.text(frame)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = {
        "steps": 1, "tasks_per_step": 1, "group_size": 2, "live_episodes": 2, "eval_games": 1, "max_turns": 2,
        "eval_panels": "heldout",
    }  # fmt: skip
    folder = RunFolder.create(tmp_path_factory.mktemp("heavy"), "run", config)
    Trainer(TrainConfig(**config), folder, lambda line: None).run()
    return folder


def test_a_run_is_asked_by_the_command_line(run, tmp_path, capsys):
    before = sorted(p.name for p in run.path.rglob("*"))
    out = tmp_path / "games.parquet"
    assert main(["heavy", str(run.path), "--games", "3", "--attempts", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "majority vote" in said and "heavy less vote" in said and "over 3 games" in said
    assert pl.read_parquet(out).height == 3
    assert sorted(p.name for p in run.path.rglob("*")) == before, "the run stays as it is"


def test_bad_input_is_one_line(run, games, tmp_path, capsys):
    for call, message in (
        (lambda: heavy.majority([]), "no answers to vote on"),
        (lambda: heavy.think([], max, rng()), "no answers to summarise"),
        (lambda: heavy.think([1], max, rng(), rounds=0), "rounds must be at least 1"),
        (lambda: games(attempts=0), "attempts must be at least 1"),
        (lambda: heavy.of_run(run, "nowhere"), "no panel 'nowhere'"),
        (lambda: heavy.of_run(RunFolder.create(tmp_path, "bare", {})), "no checkpoint is in it"),
        (lambda: heavy.summary(pl.DataFrame({"vote": []})), "no games were played"),
    ):
        with pytest.raises(WorkbenchError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert main(["heavy", str(run.path), "--games", "0"]) == 2
    assert "--games" in capsys.readouterr().err
