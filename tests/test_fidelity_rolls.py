"""States brought back and rolled on, in a game so short that trying every token gives the policy's chance to win."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from workbench.envs.base import EnvBatch, Solution, State, Task, Unsolved, step_advantage
from workbench.envs.minesweeper import Minesweeper
from workbench.errors import WorkbenchError
from workbench.fidelity.rolls import Roller, read, roll
from workbench.fidelity.states import LOST, WON, choose, restore
from workbench.games.minesweeper import Board as MineBoard
from workbench.prompts import Chat, PromptStyle
from workbench.records import Episode, Turn
from workbench.rollout import Job, Limits, play

GOOD = {"take", "the", "red", "cup", "put", "it", "on", "table"}
TURNS, ROLLS = 3, 240
LIMITS = Limits(max_turns=TURNS, max_response_tokens=1, max_context=128, max_invalid=0)


class Pick:
    """Say two good words in three turns. What was said decides what is seen."""

    splits = ("train",)

    def reset(self, task_id, seed=0):
        self.task, self.words = task_id, []
        return self._state()

    def step(self, action):
        self.words.append(action)
        return self._state()

    def snapshot(self):
        return self.task, tuple(self.words)

    def restore(self, snapshot):
        self.task, self.words = snapshot[0], list(snapshot[1])
        return self._state()

    def tasks(self, split):
        return [Task("pick/1", "pick", "train")]

    def expert(self):
        return "take"

    def close(self):
        pass

    @property
    def good(self):
        return sum(word in GOOD for word in self.words)

    def _state(self):
        text = f"you see {('a table', 'the red cup', 'the red cup on the table')[min(self.good, 2)]}"
        return State(text, (), float(self.good >= 2), self.good >= 2, int(self.good >= 2))


class Solved(Pick):
    """Pick with a solver, which knows that two more words cannot be said in one turn."""

    limit = TURNS

    def solution(self):
        left = max(2 - self.good, 0)
        if len(self.words) > self.limit:
            raise Unsolved("over the limit of the solver")
        return Solution(float("inf") if left > TURNS - len(self.words) else float(left))

    def solver_advantage(self, before, after, state):
        return step_advantage(before, after)


@pytest.fixture
def roller(policy):
    return Roller(policy, Chat(policy.tokenizer, PromptStyle()), EnvBatch([Pick() for _ in range(60)]), LIMITS, seed=7)


@pytest.fixture
def episodes(roller):
    jobs = [Job(Task("pick/1", "pick", "train"), 0, (3, n)) for n in range(6)]
    return dict(enumerate(play(roller.policy, roller.chat, roller.envs, jobs, LIMITS)))


def chance(roller, prompt, words):
    """The chance to win from a prompt, over every token of every turn that is left."""
    env = Pick()
    state = env.restore(("pick/1", words))
    if state.done or len(words) == TURNS:
        return float(state.outcome)
    with torch.no_grad():
        hidden = roller.policy.hidden(torch.from_numpy(prompt.astype(np.int64))[None])
        probabilities = roller.policy.logits(hidden[:, -1]).double().softmax(-1)[0].tolist()
    total, known = 0.0, {}
    for token, p in enumerate(probabilities):
        word = roller.chat.style.command(roller.chat.decode([token]), ())
        after = env.restore(("pick/1", (*words, word)))
        if after.done or len(words) + 1 == TURNS:
            value = float(after.outcome)
        elif len(words) + 2 == TURNS and env.good == 0:
            value = 0.0
        else:
            text = roller.chat.style.message(after, [], False)
            following = np.concatenate([prompt, [token], roller.chat.following(text, token != roller.chat.end_id)])
            value = known.setdefault(token, chance(roller, following, (*words, word)))
        total += p * value
    return total


def test_rolled_values_are_those_of_every_token_tried(roller, episodes):
    """Prompts go on as recorded: a value at depth 2 depends on all tokens before it."""
    restored = restore(roller.envs.envs[0], episodes)
    assert not restored.excluded
    places = [p for p in restored.places.values() if p.depth != 1]
    places += [p for p in restored.places.values() if p.depth == 1][:2]
    rolled = roll(roller, places, ROLLS)
    values = {p.key: chance(roller, p.start.prompt_ids, tuple(t.action for t in p.start.turns)) for p in places}
    assert len({round(v, 6) for v in values.values()}) > 4 and {p.depth for p in places} == {0, 1, 2}
    z = [
        (rolled[key].mean() - value) / max((value * (1 - value) / ROLLS) ** 0.5, 1e-9)
        for key, value in values.items()
        if 0 < value < 1
    ]
    assert len(z) > 3 and max(np.abs(z)) < 3.5 and abs(np.mean(z)) < 2
    for key, value in values.items():
        if value in (0.0, 1.0):
            assert (rolled[key] == value).all()


def test_rolls_go_on_where_they_were_stopped(roller, episodes, tmp_path):
    places = list(restore(roller.envs.envs[0], episodes).places.values())
    unbroken = roll(roller, places, 12)

    def stop(done, total):
        if done >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll(roller, places, 12, tmp_path, stop)
    assert sum(map(len, read(tmp_path).values())) == 60
    asked = []
    again = roll(roller, places, 12, tmp_path, lambda done, total: asked.append(done))
    assert asked[0] == 60 and asked[-1] == 12 * len(places)
    assert all((again[key] == unbroken[key]).all() for key in unbroken)
    played = []
    more = roll(roller, places, 14, tmp_path, lambda done, total: played.append(done))
    assert played[0] == 12 * len(places) and all((more[key][:12] == unbroken[key]).all() for key in unbroken)


def test_the_digest_is_of_all_that_decides_outcomes(roller, policy):
    first = roller.digest()
    assert replace(roller, seed=8).digest() != first and replace(roller, temperature=0.5).digest() != first
    with torch.no_grad():
        policy.lm_head.weight[0, 0] += 1
    assert roller.digest() != first


def test_states_are_shared_and_ends_are_decided(roller, episodes):
    restored = restore(roller.envs.envs[0], episodes)
    firsts = {path[0] for path in restored.paths.values()}
    assert len(firsts) == 1  # one task, one prompt
    for number, episode in episodes.items():
        path = restored.paths[number]
        assert len(path) == len(episode.turns) + 1 and path[-1] == (WON if episode.outcome else LOST)
    one = restored.places[restored.paths[0][1]]
    assert one.start.turns == episodes[0].turns[:1]
    assert np.array_equal(one.start.prompt_ids, episodes[0].turns[1].prompt_ids)


def test_states_of_a_policy_without_memory_meet_by_their_snapshots(episodes):
    """The same board reached by other commands after as many turns; not after more, which leaves fewer."""

    class Board(Pick):
        def snapshot(self):
            return self.task, ["take"] * self.good + ["nothing"] * (len(self.words) - self.good)

    def played(*words):
        env, turns = Board(), []
        state = env.reset("pick/1")
        for word in words:
            turns.append(replace(episodes[0].turns[0], observation=state.observation, action=word))
            state = env.step(word)
        return replace(episodes[0], turns=tuple(turns), outcome=state.outcome, stop_reason="max_turns")

    known = {0: played("take", "go", "look"), 1: played("go", "red", "look"), 2: played("go", "look", "look")}
    apart, met = restore(Board(), known), restore(Board(), known, whole=False)
    assert apart.paths[0][2] != apart.paths[1][2] and met.paths[0][2] == met.paths[1][2]
    assert met.paths[2][2] not in met.paths[0] and len(met.places) == 5


def changed(episode, turn, **values):
    turns = list(episode.turns)
    turns[turn] = replace(turns[turn], **values)
    return replace(episode, turns=tuple(turns))


def test_an_episode_that_does_not_replay_is_excluded_by_name(roller, episodes):
    lost = next(e for e in episodes.values() if not e.outcome)
    bad = {
        1: changed(lost, 1, observation="you see nothing"),
        2: changed(lost, 0, valid=False),
        3: replace(lost, outcome=1),
        4: replace(lost, stop_reason="lost"),
    }
    restored = restore(roller.envs.envs[0], {0: lost} | bad)
    assert set(restored.paths) == {0} and set(restored.excluded) == set(bad)
    assert "turn 2 was recorded with 'you see nothing'" in restored.excluded[1]
    assert "turn 1 was not accepted" in restored.excluded[2]
    assert "recorded as won and now ends not won" in restored.excluded[3]
    assert all(why.startswith("pick/1: ") for why in restored.excluded.values())


def test_a_guess_that_dies_does_not_decide_a_state():
    """Minesweeper's solver sees no way from here, and another reveal wins: the state has to be rolled."""
    env = Minesweeper(boards={"two": MineBoard(2, 3, frozenset({(0, 0)}), (0, 2))})
    state = env.reset("two")
    assert env.solution().dead and not env.solution().lost
    turns = [Turn(np.arange(2), np.arange(1), np.zeros(1), state.observation, "reveal 2 1", True, 1.0, False)]
    assert env.step("reveal 2 1").outcome
    episode = Episode(tuple(turns), "two", 0, 0, 1, 1.0, "won", "minesweeper", "rows")
    restored = restore(env, {0: episode})
    assert restored.paths[0][0] in restored.places and restored.paths[0][1] == WON
    env.reset("two")
    env.step("reveal 1 1")
    assert env.solution().lost


def test_a_solver_that_denies_a_win_is_told(roller, episodes):
    class Wrong(Solved):
        def solution(self):
            return Solution(float("inf"))

    won = {n: e for n, e in episodes.items() if e.outcome}
    restored = restore(Wrong(), won)
    assert won and not restored.paths
    assert all("no win left before turn 1, and the game was won" in why for why in restored.excluded.values())


def test_a_solver_decides_dead_states_and_values_turns(roller, episodes):
    restored = restore(Solved(), episodes)
    plain = restore(Pick(), episodes)
    for number, episode in episodes.items():
        words = [t.action in GOOD for t in episode.turns]
        for k, key in enumerate(restored.paths[number][:-1]):
            dead = 2 - sum(words[:k]) > TURNS - k
            assert key == (LOST if dead else plain.paths[number][k])
        assert len(restored.solver[number]) == len(episode.turns)
    assert len(restored.places) < len(plain.places)

    class Limited(Solved):
        limit = 1

    some = restore(Limited(), episodes)
    assert set(some.unsolved) == {n for n, e in episodes.items() if len(e.turns) > 1}
    assert not set(some.unsolved) & set(some.solver) and set(some.paths) == set(episodes)


def test_episodes_are_spread_over_groups():
    groups = [n // 8 for n in range(64)]
    some = choose(groups, 10, seed=1)
    assert len(some) == 10 and len({groups[i] for i in some}) == 8
    assert some == choose(groups, 10, seed=1) != choose(groups, 10, seed=2)
    assert choose(groups, 100, seed=1) == list(range(64))


def test_fidelity_of_bad_parameters():
    from workbench.fidelity.measure import FidelityConfig

    with pytest.raises(WorkbenchError, match="rolls must be at least 2, got 1"):
        FidelityConfig(rolls=1)
    with pytest.raises(WorkbenchError, match="did you mean 'random'"):
        FidelityConfig(teachers=("randm",))
    with pytest.raises(WorkbenchError, match="did you mean 'grpo'"):
        FidelityConfig(methods=("grp",))
