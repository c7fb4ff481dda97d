import json
import math
import random
from importlib import metadata

import pytest

from workbench import envs
from workbench.envs import textworld
from workbench.envs.base import Solution, SolvedEnv, Unsolved
from workbench.envs.memo import Transitions
from workbench.envs.textworld import TextWorldCooking, memoised
from workbench.errors import WorkbenchError

TASK = "textworld/train/0"  # roast a carrot that lies sliced in the fridge
WAY = ["open fridge", "take carrot from fridge", "cook carrot with oven", "prepare meal", "eat meal"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    pytest.importorskip("textworld", reason="the textworld extra is not installed")
    return tmp_path_factory.mktemp("textworld")


@pytest.fixture(scope="module")
def env(cache):
    game = TextWorldCooking(cache=str(cache))
    game.reset(TASK)
    yield game
    game.close()


def unused(*_):
    raise AssertionError("a game was made")


def test_tasks_of_its_splits(env):
    assert isinstance(env, SolvedEnv) and env.splits == ("train", "heldout", "valid", "test")
    assert [len(env.tasks(split)) for split in env.splits] == [200, 50, 50, 50]
    assert len({env.fingerprint(t.id) for split in env.splits for t in env.tasks(split)}) == 350
    other = TextWorldCooking("recipe=2,take=2", cache=str(env.cache))
    assert other.fingerprint(TASK) != env.fingerprint(TASK)


def test_the_planner_wins_and_its_plan_gets_shorter_by_one(env):
    state, rewards = env.reset(TASK), []
    assert state.info["kind"] == "textworld" and state.info["task"].startswith("You are hungry!")
    assert state.observation.startswith("-= Kitchen =-") and "\n\n" not in state.observation
    assert not any(mark in state.observation for mark in ("$", ">", "You are hungry"))
    for left, command in zip(range(5, 0, -1), WAY, strict=True):
        before = env.solution()
        assert before == Solution(left, (command,)) and env.expert() == command in state.admissible
        state = env.step(command)
        rewards.append(state.reward)
        assert state.valid and env.solver_advantage(before, env.solution(), state) == 1
    assert (state.done, state.outcome, sum(rewards)) == (True, 1, 1.0) and env.expert() is None
    assert state.observation == "You eat the meal. Not bad.\nYour score has just gone up by one point."
    assert not env.step("look").valid and env.solution() == Solution(0.0)


def test_the_planner_plans_again_wherever_commands_lead(env):
    rng = random.Random(0)
    for _ in range(5):
        state = env.reset(TASK)
        for _ in range(7):
            harmless = [a for a in state.admissible if not a.startswith(("cook", "eat"))]
            state = env.step(rng.choice((*harmless, "dance")))
        left = env.solution().distance
        while not state.done:
            state = env.step(env.expert())
            left -= 1
            assert env.solution().distance == left
        assert state.outcome == 1 and left == 0


def test_a_spoilt_ingredient_loses(env):
    env.reset(TASK)
    for command in WAY[:2]:
        env.step(command)
    before = env.solution()
    state = env.step("cook carrot with stove")
    assert state.done and not state.outcome and state.admissible == () and env.expert() is None
    assert env.solution() == Solution(math.inf) and env.solver_advantage(before, env.solution(), state) == -3


def test_what_is_not_admissible_gets_the_engines_answer(env):
    before = env.reset(TASK)
    state = env.step("dance")
    assert not state.valid and "verb" in state.observation and state.admissible == before.admissible
    assert env.solution().distance == 5


def test_snapshots_restore_in_another_game_from_the_cache(env, cache, monkeypatch):
    monkeypatch.setattr(textworld, "_generate", unused)
    other, rng = TextWorldCooking(cache=str(cache)), random.Random(1)
    state = env.reset(TASK)
    for _ in range(6):
        state = env.step(rng.choice(state.admissible))
    assert other.restore(json.loads(json.dumps(env.snapshot()))) == state
    assert other.solution() == env.solution()
    other.close()


def test_a_damaged_game_is_made_again(env, cache, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(textworld, "_generate", lambda *given: made.append(given))
    folder = cache / env.fingerprint(TASK)
    whole = (folder / "game.z8").read_bytes()
    assert env._file(TASK) == folder / "game.z8" and not made
    broken = tmp_path / folder.name
    broken.mkdir()
    for name in ("game.json", "sums.json"):
        (broken / name).write_bytes((folder / name).read_bytes())
    (broken / "game.z8").write_bytes(whole[: len(whole) // 2])
    TextWorldCooking(cache=str(tmp_path))._file(TASK)
    assert len(made) == 1 and not broken.exists()


def test_memo_keeps_what_the_planner_said(env, cache, tmp_path):
    cold, warm = (memoised(cache=str(cache), path=Transitions(tmp_path)) for _ in range(2))
    for memo in (cold, warm):
        states, solutions = [memo.reset(TASK)], [memo.solution()]
        for command in (*WAY[:2], "cook carrot with stove"):
            states.append(memo.step(command))
            solutions.append(memo.solution())
        assert solutions[0] == Solution(5.0, (WAY[0],)) and solutions[-1] == Solution(math.inf)
        assert memo.solver_advantage(*solutions[-2:], states[-1]) == -3
    assert cold.played == 4 and warm.played == 0 and warm.inner._env is None, "a warm process starts no engine"
    assert states[-1] == env.restore((TASK, 0, (*WAY[:2], "cook carrot with stove")))
    assert isinstance(envs.make("textworld", cache=str(cache)).envs[0], SolvedEnv)
    cold.close()


def test_no_plan_is_no_distance(env, monkeypatch):
    env.reset(TASK)
    monkeypatch.setitem(env._raw, "policy_commands", [])
    assert env.expert() is None
    with pytest.raises(Unsolved, match=f"task {TASK}: TextWorld's planner has no plan after 0 commands"):
        env.solution()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: TextWorldCooking("recpe=2"), "did you mean 'recipe'"),
        (lambda: TextWorldCooking("go=7"), "'go=7': go must be one of 1, 6, 9, 12"),
        (lambda: TextWorldCooking("recipe=many"), "recipe must be one of 1, 2, 3, 4, 5"),
        (lambda: TextWorldCooking("take=2"), "take=2 of a recipe of 1"),
        (lambda: TextWorldCooking().tasks("vaild"), "did you mean 'valid'"),
        (lambda: TextWorldCooking().reset("textworld/vaild/1"), "did you mean 'valid'"),
        (lambda: TextWorldCooking().reset("textworld/train/x"), "expected textworld/<train"),
        (lambda: TextWorldCooking().reset("textworld/train/1000000"), "seeds are below 1000000"),
        (lambda: TextWorldCooking().step("look"), "no TextWorld game is running"),
        (lambda: TextWorldCooking(cache="/dev/null").reset(TASK), "cannot make TextWorld game /dev/null/"),
    ],
)
def test_bad_input_is_one_line(cache, call, said):
    with pytest.raises(WorkbenchError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    textworld.version.cache_clear()
    try:
        with pytest.raises(WorkbenchError, match=r'pip install "credit-workbench\[textworld\]"'):
            envs.make("textworld", memo=False)
    finally:
        textworld.version.cache_clear()
